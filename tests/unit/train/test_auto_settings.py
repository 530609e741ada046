"""Compilation of a step and reuse of its code, and ``auto`` settings that depend on the machine."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.settings import StepConfig
from hpcai.train import compiling
from hpcai.train.auto_settings import set_backend_flags
from hpcai.train.step import Step


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    return {"loss": model(batch).square().mean()}


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile by Dynamo without Inductor, whose C++ compilation takes half a minute."""
    compile_model = compiling.compile_model
    monkeypatch.setattr(compiling, "compile_model", lambda model, mode: compile_model(model, mode, backend="eager"))
    torch._dynamo.reset()


@pytest.mark.parametrize("mode, count", [("whole", 1), ("blocks", 3)])
def test_a_compiled_step_reports_its_compilation_once(eager_backend: None, mode: str, count: int) -> None:
    eager, step = (Step(build_network(), loss, StepConfig(compile=c), dist.single_process()) for c in ("none", mode))
    modules = "3 modules" if count == 3 else "1 module"
    assert step.messages == [f"step.compile: {modules} of Sequential"] and eager.news() == []
    batch = torch.randn(4, 8)
    for _ in range(3):
        assert step(batch)["loss"].item() == pytest.approx(eager(batch)["loss"].item(), rel=1e-6)
    assert step.news()[0].startswith("compiled")
    assert step.news() == []
    assert list(step.model.state_dict()) == list(eager.model.state_dict())


def test_a_second_start_reuses_all_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = StepConfig(compile="whole", compile_cache=tmp_path / "cache", optimizer="sgd")
    weights = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))  # matmuls only: there is no C++ to build
    counts = []
    for start in ("first", "second"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / start))  # the disk of another node
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        torch._dynamo.reset()
        step = Step(copy.deepcopy(weights), loss, cfg, dist.single_process())
        step(torch.ones(4, 8))
        assert step._compiled is not None
        counts.append(step._compiled.counts.read() | {"news": step.news()[0], "seconds": step.compiled})
    first, second = counts
    assert first["cache_hits"] == 0 and first["cache_misses"] == 2 and "found" not in first["news"], "forward and backward"
    assert second["cache_hits"] == 2 and second["cache_misses"] == 0 and "2 of 2 parts found ready" in second["news"]
    assert 0 < second["seconds"] < first["seconds"]


@pytest.fixture
def backends() -> Iterator[Callable[[], tuple[bool, bool, bool]]]:
    """Return a function that reads torch's flags, which are restored afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    yield lambda: (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def test_tf32_and_cudnn_benchmark_are_set_for_the_process_if_configured(backends: Any) -> None:
    gpu, before = torch.device("cuda"), backends()
    assert set_backend_flags(StepConfig(), gpu) == [] and backends() == before
    assert set_backend_flags(StepConfig(tf32=True), gpu) == ["step.tf32: true, for this whole process"]
    assert backends() == (True, True, before[2])
    assert len(set_backend_flags(StepConfig(tf32=False, cudnn_benchmark=True), gpu)) == 2 and backends() == (False, False, True)
    assert set_backend_flags(StepConfig(), gpu) == [] and backends() == (False, False, True), "auto keeps the flags"
    torch.get_float32_matmul_precision()  # torch raises if its two interfaces were mixed


def test_gpu_settings_on_a_cpu_are_reported_and_not_set(backends: Any) -> None:
    before = backends()
    step = Step(build_network(), loss, StepConfig(tf32=True, cudnn_benchmark=True), dist.single_process(torch.device("cpu")))
    assert backends() == before
    names = "tf32", "cudnn_benchmark"
    assert step.messages == [f"step.{name}: true, without effect: this process computes on cpu" for name in names]
