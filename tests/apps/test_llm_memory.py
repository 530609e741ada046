"""The memory estimate of LLM training: equal to a recording of a step, for each form of parallelism and setting."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

from apps.llm import memory
from apps.llm.settings import Config
from hpcai import config
from hpcai.cli.plan.planner import Planner
from hpcai.dist import Mesh
from hpcai.errors import MeshError
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig, adapt, build_pipeline, loss, parallelize
from hpcai.nn.deferred_init import deferred
from hpcai.parallel import pipeline
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.sharding import as_flat_parameter
from hpcai.plan.machines import find_machine as machine
from hpcai.plan.step_trace import StepTracer, traced_job
from hpcai.train import Step
from hpcai.train.optim import Optimizer
from tests.apps.app_runs import ROOT
from tests.reference_data import load_json

TOKENS = 2048
MODEL = ("model.width=2048", "model.heads=16", "model.inner=5504", "model.layers=4", "model.vocabulary=32000", "step.clip=1.0",
         f"model.positions={TOKENS}", "data.batch=4", "data.documents=joined", "step.precision=bf16-params",
         "data.directory=nowhere")  # fmt: skip
CASES = load_json("llm_memory")


def load_config(*overrides: str) -> Config:
    return config.load(Config, None, [*MODEL, *overrides])


def estimated_bytes(cfg: Config, world: int) -> float:
    return sum(memory.estimate_bytes(cfg, world).values())


class StorageTracer(StepTracer):
    """A tracer of storages that grow and shrink, like those of torch's ``fully_shard``."""

    def __init__(self) -> None:
        super().__init__(kernels=True)
        self.storages: dict[int, Any] = {}

    def _track(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        self.storages[memory._cdata] = weakref.ref(memory)
        live = [storage for reference in self.storages.values() if (storage := reference()) is not None]
        self.storages = {storage._cdata: weakref.ref(storage) for storage in live}
        self.bytes = sum(storage.nbytes() for storage in live)
        self._trace.peak = max(self._trace.peak, self.bytes)


@contextmanager
def trace_job(cfg: Config, world: int) -> Iterator[StepTracer]:
    """A tracer of rank 0 of ``world`` on fake tensors; functions that read values, or that a CPU lacks, are replaced."""
    micro = cfg.data.batch // (memory._resolve_mesh(cfg, world).mesh.replicate * cfg.step.accumulate)
    size = micro, TOKENS // (cfg.mesh.tensor * cfg.mesh.context), cfg.model.width
    dtype = torch.bfloat16 if cfg.step.precision == "bf16-params" else torch.float32

    def build_reducer(*args: Any, **kwargs: Any) -> GradientReducer:
        return GradientReducer(*args, **kwargs | {"fixed": True})  # buckets, as on a GPU

    def trace_specs(self: Any, *_: Any) -> list[Any]:
        return [pipeline._TensorSpec(size, dtype)] * (self.count - 1) + [pipeline._TensorSpec((1,), torch.float32)]

    def skip_votes(self: Any, chain: Any, *_: Any) -> None:
        from torch.distributed.pipelining.stage import InferenceMode

        for stage in chain:
            stage._inference_mode = InferenceMode.STATIC

    from torch.distributed.pipelining import schedules

    votes = {"torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p": skip_votes}  # stages of torch >= 2.13 vote
    with ExitStack() as stack:
        for target, function in {
            "hpcai.train.auto_settings.GradientReducer": build_reducer,
            "hpcai.parallel.pipeline.Pipeline._trace_specs": trace_specs,
            "hpcai.parallel.pipeline.Pipeline._broadcast_values": lambda *_: [{}],
            "hpcai.parallel.pipeline._Stage.forward": lambda stage, *x, number: stage._run_microbatch(0, x[0] if x else None),
            "hpcai.train.step._combine_micro_batches": lambda values: {},
            **(votes if hasattr(schedules._PipelineSchedule, "_warmup_p2p") else {}),
        }.items():
            stack.enter_context(mock.patch(target, function))
        if cfg.step.shard != "weights":
            yield stack.enter_context(traced_job(world))
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch_dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        stack.callback(torch_dist.destroy_process_group)
        yield StorageTracer()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def record_memory(cfg: Config, world: int) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer state; of all tensors between steps; of the peak of a step."""
    with trace_job(cfg, world) as tracer:
        names = ("pipeline", "context", "tensor")
        mesh = Mesh({"replicate": -1, **{name: getattr(cfg.mesh, name) for name in names}}, world)
        if cfg.step.shard == "weights":
            mesh.device_mesh(mesh["replicate"])  # cannot be created under fake tensors
        with deferred(0), default_dtype(torch.float64 if cfg.step.precision == "fp64" else torch.float32):
            model = parallelize(LLM(cfg.model), mesh)
            schedule = build_pipeline(model, mesh, **cfg.stages.model_dump())
            model = model if cfg.lora is None else adapt(model, cfg.lora)
        with tracer.fake_tensors():
            step = Step(tracer.materialize(model), loss, cfg.step, mesh, pipeline=schedule)
            gc.collect()
            between = tracer.bytes
            tokens = torch.empty(cfg.data.batch // mesh["replicate"].size, TOKENS + 1, dtype=torch.int64)
            with tracer.record() as record:
                step._gradients(Batch(tokens, tokens.clone() if cfg.data.documents == "apart" else None))
            nbytes = sum(getattr(p, "_local_tensor", p).nbytes for p in step.model.parameters() if not p.requires_grad)
            for state in step.optimizer.states:
                tensors = (state._master, state.average, getattr(state, "direction", None), *state.moments.values())
                nbytes += sum(x.nbytes for x in (state.flat_param.weights, state.flat_param.gradient(), *tensors) if x is not None)
            for b in step.reducer.buckets:
                if hasattr(b, "gradient_shard"):  # weights and gradients are full, the flat parameter is a shard
                    nbytes += b.weights.nbytes - b.gradient_shard.numel() * b.weights.element_size() + b.gradients.nbytes
    return nbytes, between, record.peak


PAIRS = "Muon, sharded", "tensor and context", "pipeline and tensor", "adapters, tensor"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.claim] * (name in PAIRS)) for name in CASES])
def test_the_estimate_equals_the_memory_of_a_recorded_step(name: str) -> None:
    world, *overrides = CASES[name]
    cfg = load_config(*overrides)
    exact, between, peak = record_memory(cfg, world)
    estimate = memory._estimate_rank(memory._resolve_mesh(cfg, world), 0)  # the rank that is recorded
    total = sum(estimate.values())
    state = sum(estimate[part] for part in ("weights", "gradients", "optimizer", "average", "adapters"))
    print(f"{name}: {100 * (total / (exact + peak - between) - 1):+.1f} %")
    replicated = cfg.mesh.tensor > 1 and (cfg.model.bias or cfg.lora is not None)  # replicated tensors are counted as sharded
    assert state == pytest.approx(exact, rel=0.05 if replicated else 5e-3)  # norms and biases are not counted
    assert total == pytest.approx(exact + peak - between, rel=0.1 if cfg.step.shard == "weights" else 0.05)


def test_a_planned_stage_has_the_memory_of_the_fullest_rank(tmp_path: Path) -> None:
    options = [*MODEL, "model.layers=24", "step.bucket_mb=1e-6", "mesh.pipeline=4", "stages.per_rank=2", "mesh.tensor=2",
               "step.shard=optimizer", "step.accumulate=8", "data.batch=16"]  # fmt: skip
    (tmp_path / "plain.yaml").write_text("{}")
    planner, cfg = Planner("llm", options, tmp_path / "plain.yaml"), config.load(Config, None, options)
    mesh = cfg.mesh
    planned = planner.mean_step(mesh.tensor, 2, 8, machine("h100"), ("step.accumulate=1",)).peak
    estimate = estimated_bytes(cfg, 2 * mesh.pipeline * mesh.tensor)
    print(f"planned {planned / 1e9:.3f} GB, estimated {estimate / 1e9:.3f}")
    assert planned == pytest.approx(estimate, rel=0.005)


def test_flops_per_token_are_the_known_counts() -> None:
    cfg = config.load(Config, None, ["data.directory=nowhere"])
    assert [memory.flops_per_token(cfg, 4096, half) / 1e9 for half in (False, True)] == pytest.approx([46.09, 42.87], abs=0.01)
    cfg = cfg.model_copy(update={"model": LLMConfig.preset("llama3.1-8b")})
    assert [memory.flops_per_token(cfg, 8192, half) / 1e9 for half in (False, True)] == pytest.approx([57.91, 51.47], abs=0.01)
    plain, deepseek = (cfg.model_copy(update={"model": LLMConfig.preset("deepseek-v3", mtp_layers=n)}) for n in (0, 1))
    added, flops = deepseek.model.num_parameters - plain.model.num_parameters, memory.flops_per_token(deepseek, 4096, False)
    assert round((added - 2 * 7168**2) / 1e9, 1) == 11.5, "as published for multi-token prediction, without eh_proj"
    computed = added - 248 * 3 * 2048 * 7168 + 129_280 * 7168 + 2 * 128 * 192 * 4096  # 8 of 256 experts, output layer, attention
    assert flops - memory.flops_per_token(plain, 4096, False) == 6 * computed
    adapted = cfg.model_copy(update={"lora": LoRAConfig()})
    assert memory.flops_per_token(adapted, 8192, False) < 0.76 * memory.flops_per_token(cfg, 8192, False)


def test_adapters_of_single_layers_and_whole_modules_are_counted() -> None:
    cfg = config.load(Config, None, ["data.directory=nowhere"])
    named, saved = LoRAConfig(targets=("layers.0.self_attn.q_proj",)), LoRAConfig(targets=("q_proj",), modules_to_save=("lm_head",))
    higher = LoRAConfig(rank=2, targets=("q_proj",), rank_pattern={"layers.1.self_attn.q_proj": 16})
    counts = [memory._adapter_parameters(cfg.model_copy(update={"lora": lora})) for lora in (named, saved, higher)]
    assert counts == [32 * 16 * 8192, 32 * 16 * 8192 + 32_000 * 4096, 32 * 16 * 8192]


# ---- refusals


def test_a_run_that_does_not_fit_is_refused_with_settings_that_need_less() -> None:
    mesh: Any = SimpleNamespace(job=SimpleNamespace(size=8), device=torch.device("cpu"))
    cfg = config.load(Config, None, ["data.directory=nowhere", "step.precision=bf16-params", "data.batch=8"])
    with pytest.raises(MeshError, match=r"about 1\d\d GB, .* 80 \(optimizer 80\.9, .*step.shard to optimizer or weights"):
        memory.check_memory(cfg, mesh, 80e9)
    estimate = estimated_bytes(cfg, 8)
    memory.check_memory(cfg, mesh, 0.9 * estimate)  # within the error of the estimate
    with pytest.raises(MeshError):
        memory.check_memory(cfg, mesh, 0.85 * estimate)


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("name", ["lamb", "adamw", "sgd", "lars", "muon"])
def test_the_estimate_of_optimizer_state_is_exact(name: Any, low_precision: bool) -> None:
    overrides = [f"step.optimizer={name}", f"step.precision={'bf16-params' if low_precision else 'fp32'}", "step.moments=bf16"]
    cfg = load_config(*overrides, "step.momentum=0.9", "mesh.replicate=1")
    model = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16 if low_precision else torch.float32)
    states = Optimizer([as_flat_parameter("layers.0.weight", model.weight, True, ())], cfg.step).states
    tensors = [x for s in states for x in (s._master, getattr(s, "direction", None), *s.moments.values()) if x is not None]
    estimate = memory._state_bytes(cfg, 64 * 32, trained=True)
    assert estimate["optimizer"] == sum(x.nbytes for x in tensors) > 0


# ---- shown settings


def test_settings_are_shown_with_an_estimate_and_can_be_loaded(tmp_path: Path) -> None:
    args = ["data.directory=nowhere", "--show", "mesh.replicate=2", "mesh.tensor=4", "step.shard=optimizer"]
    code = f"import sys; from apps.llm import __main__ as m; m.config.run(m.Run, m.main, {args})"
    code += "; print('# torch', 'torch' in sys.modules)"
    stdout = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in stdout.splitlines() if line.startswith("# ")]
    assert lines[0] == "# GB of the rank that needs most, of 8 (replicate 2 x tensor 4), about:"
    assert any(line.startswith("#   weights ") for line in lines) and "# 6,738,415,616 parameters" in lines
    assert "# 524,288 tokens a step: 128 rows of 4096" in lines and lines[-2].startswith("# 46.09 GFLOP a token")
    assert lines[-1] == "# torch False"
    (tmp_path / "shown.yaml").write_text(stdout)
    assert config.load(Config, tmp_path / "shown.yaml").mesh.tensor == 4


# ---- published configurations

PUBLISHED = {
    "llama2-7b": ("llama2-7b", 1, 141e9), "llama31-8b": ("llama3.1-8b", 8, 141e9), "llama2-70b-lora": ("llama2-70b", 8, 141e9),
    "llama31-405b": ("llama3.1-405b", 576, 80e9), "gpt3": ("gpt3-175b", 512, 80e9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_model_of_its_name_and_fits(name: str) -> None:
    preset, world, capacity = PUBLISHED[name]
    cfg = config.load(Config, ROOT / f"apps/llm/configs/{name}.yaml", ["data.directory=nowhere"])
    free = {name: getattr(cfg.model, name) for name in ("positions", "recompute", "deviation")}
    assert cfg.model == LLMConfig.preset(preset, **free)
    assert estimated_bytes(cfg, world) <= 0.92 * capacity
    sizes = memory._resolve_mesh(cfg, world).mesh
    assert cfg.data.batch % (sizes.replicate * cfg.step.accumulate) == 0 and cfg.model.layers % sizes.pipeline == 0
    assert memory.row_tokens(cfg) % (sizes.tensor * sizes.context) == 0
