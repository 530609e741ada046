"""Plan the fine-tuning of Llama 2 70B:  hpcai plan llm --gpus 8 64 | hpcai plan llm --check

Other settings are planned for their own number of steps:  hpcai plan llm apps/llm/configs/gpt3.yaml --gpus 512 1024

The model is sharded over ``tensor``, and over pipeline and context as set; each row of a batch is a micro-batch. Steps are planned
without torch.compile: NVIDIA's published code is fused by hand.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import nn

from apps.llm.benchmarks import Benchmark
from apps.llm.memory import estimate_bytes, flops_per_token
from hpcai.cli.benchmarks import read_published
from hpcai.cli.plan.training import Evaluation, PlannedTraining
from hpcai.dist import Mesh
from hpcai.models.llm import LLM, build_pipeline
from hpcai.parallel.pipeline import Pipeline
from hpcai.plan.machines import Machine

_ACCESSES = 7  # to each byte of the weights, by a micro-batch: read twice, and added to gradients of twice the width


class Plan(PlannedTraining):
    workload, yaml, split_axis, depth = Benchmark(), "llama2-70b-lora.yaml", "tensor", "model.layers"
    fixed_settings = ("step.shard", "step.matmul", "start.weights")  # adapters need start.weights, whose files are not read
    memory_savings = tuple(("step.accumulate=1", f"model.recompute={what}") for what in ("none", "selective", "layers"))
    samples = {8: 3264, 128: 11_100}
    source = "reference convergence of MLPerf: 3,072 to 3,456 rows at a batch of 8, about 11,100 at 128"
    evaluation = Evaluation(samples=173, every=384, cost=1 / 2)  # forward only; backward computes no gradients of frozen weights

    def pipeline(self, cfg: Any, model: nn.Module, mesh: Mesh) -> Pipeline | None:
        assert isinstance(model, LLM)
        return build_pipeline(model, mesh, **cfg.stages.model_dump())

    def stage_count(self, cfg: Any) -> int:
        return int(cfg.mesh.pipeline * cfg.stages.per_rank)

    def layer_kinds(self, cfg: Any) -> Any:
        layers, dense = range(cfg.model.layers), () if cfg.model.experts is None else cfg.model.experts.dense_layers
        kinds = [(each, {*layers} - {*dense} if each == () else dense) for each in ((), tuple(layers)) if dense]
        return [((f"model.experts.dense_layers={list(each)}",), own) for each, own in kinds] or super().layer_kinds(cfg)

    def meshes(self, cfg: Any, gpus: int, machine: Machine) -> Iterator[dict[str, int]]:
        model, stages = cfg.model, cfg.stages.per_rank
        experts = model.experts.count if model.experts else 1
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        for tensor, context, pipeline, expert in product(divisors, repeat=4):
            replicas, rest = divmod(gpus, tensor * context * pipeline)
            heads = model.heads % tensor == 0 and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)
            if rest or not heads or tensor * context > machine.gpus_per_node or pipeline * stages > model.layers:
                continue
            if replicas % expert == 0 == experts % expert and cfg.data.batch % replicas == 0 == model.positions % (2 * context):
                yield {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}

    def estimate(self, cfg: Any, gpus: int, machine: Machine) -> tuple[float, float]:
        """Count products of matrices, or the accesses to weights by each micro-batch of a row, what each form of parallelism sends
        in a layer, pipeline bubbles, and the gradients."""
        mesh, model, again = cfg.mesh, cfg.model, cfg.model.recompute == "layers"
        inner = mesh.tensor * mesh.context
        within = inner * mesh.pipeline
        replicas = gpus // within
        rows, element = cfg.data.batch // replicas, 1 if cfg.step.matmul == "fp8" and 1 in machine.flops else 2
        flops = flops_per_token(cfg, model.positions, True) * cfg.data.batch * model.positions / gpus
        bytes = estimate_bytes(cfg.model_copy(update={"step": cfg.step.model_copy(update={"accumulate": rows})}), gpus)
        accesses = _ACCESSES * rows * bytes["weights"] / machine.bandwidth
        seconds = machine.slowdown * max(flops * (4 / 3 if again else 1) / machine.flops[element], accesses)
        hidden = 2 * model.width * rows * model.positions // mesh.context  # bytes of the hidden state of a step
        sends = [("all-gather", hidden // mesh.tensor, 8, range(mesh.tensor))] if mesh.tensor > 1 else []
        if mesh.expert > 1:
            sends.append(("all-to-all", hidden * model.experts.top_k, 4, range(0, within * mesh.expert, within)))
        if mesh.context > 1:
            keys = 4 * model.kv_heads * model.head_dim * rows * model.positions // (inner * mesh.context)
            sends.append(("all-gather", keys, 3, range(0, inner, mesh.tensor)))
        for name, size, times, ranks in sends:
            times *= (1.5 if again else 1) * model.layers / mesh.pipeline
            seconds += times * machine.communication_time(name, size, ranks)[0]
        seconds *= 1 + (mesh.pipeline - 1) / (rows * cfg.stages.per_rank)
        size = int(bytes["weights"] + bytes["gradients"]) // 2
        return seconds + machine.communication_time("all-reduce", size, range(0, gpus, within))[0], sum(bytes.values())

    def read_settings(self, cfg: Any) -> None:
        if cfg.benchmark == "llama2_70b_lora":
            return
        batch, rows = cfg.data.batch, cfg.data.validation_rows or cfg.data.evaluation_batch
        self.samples, self.source = {batch: batch * cfg.train.steps}, "the steps of its settings"
        if convergence := read_published(self.workload)["convergence"].get(cfg.benchmark):
            self.samples = {int(batch): samples for batch, samples in convergence.items()}
            self.source = "reference convergence of MLPerf 6.1, mean of its runs"
        self.evaluation = Evaluation(samples=rows, every=cfg.data.epoch or batch * cfg.train.steps, cost=1 / 3)
