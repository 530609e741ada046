"""Plan the fine-tuning of Llama 2 70B:  hpcai plan llm --gpus 8 64 | hpcai plan llm --check

Other settings are planned for their own number of steps:  hpcai plan llm apps/llm/configs/gpt3.yaml --gpus 512 1024

The model is sharded over ``tensor``, and over pipeline and context as set; each row of a batch is a micro-batch. Steps are planned
without torch.compile: NVIDIA's published code is fused by hand.
"""

from typing import Any

from torch import nn

from apps.llm.benchmarks import Benchmark
from hpcai.cli.plan.training import Evaluation, PlannedTraining
from hpcai.dist import Mesh
from hpcai.models.llm import LLM, build_pipeline
from hpcai.parallel.pipeline import Pipeline


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

    def read_settings(self, cfg: Any) -> None:
        if cfg.benchmark == "llama2_70b_lora":
            return
        batch, rows = cfg.data.batch, cfg.data.validation_rows or cfg.data.evaluation_batch
        self.samples, self.source = {batch: batch * cfg.train.steps}, "the steps of its settings"
        self.evaluation = Evaluation(samples=rows, every=cfg.data.epoch or batch * cfg.train.steps, cost=1 / 3)
