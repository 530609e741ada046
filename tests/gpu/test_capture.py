"""CUDA graphs in trouble: graphs that come and go, a capture that fails, `auto` that falls back, and what each leaves behind."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph
from tests.gpu.machine import DEVICE, GRAPH, ON_GPU, cuda_alone, wait


def mean_square(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    return {"loss": model(x).square().mean()}


def reads(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    values = mean_square(model, x)
    return values if values["loss"].item() < 1e9 else {}


def syncs(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """What only the capture itself finds: no operation of torch reads the device here."""
    if ON_GPU:
        torch.cuda.current_stream().synchronize()
    elif any(isinstance(mode, CPUGraph) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()):
        raise RuntimeError("operation not permitted when stream is capturing")
    return mean_square(model, x)


def batch(seed: int, count: int = 16) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def new_step(loss: Any = mean_square, dropout: float = 0.0, **words: Any) -> Step:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, 8)]
    return Step(nn.Sequential(*layers), loss, StepConfig(**words), dist.single_process(DEVICE), graph=GRAPH)


def losses(step: Step, first: int = 0, steps: int = 4, count: int = 16) -> list[float]:
    return [step(batch(first + i, count), 1e-3)["loss"].item() for i in range(steps)]


def test_graphs_come_and_go_and_one_pool_outlives_none() -> None:
    expected = losses(new_step())
    kept: list[Any] = []
    for turn in range(4):
        step = new_step(capture="whole")
        assert losses(step) == pytest.approx(expected, rel=1e-5), turn
        assert step._capture is not None
        kept += [slot.values["loss"] for slot in step._capture._slots.values()]  # of the pool: in use while the next is recorded
        if turn % 2:
            step._capture.close()
        del step
        gc.collect()
    assert len(kept) == 4 and all(float(x) == pytest.approx(expected[-1], rel=1e-5) for x in kept)


@cuda_alone
def test_memory_of_graphs_that_are_gone_comes_back() -> None:
    held = []
    for _ in range(5):
        step = new_step(capture="whole")
        losses(step, count=4096)
        del step
        gc.collect()
        wait()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] <= held[1], f"bytes reserved after each turn: {held}"


def test_a_closed_capture_goes_on_uncaptured() -> None:
    expected, step = losses(new_step(), steps=6), new_step(capture="whole")
    found = losses(step, steps=3)
    assert step._capture is not None
    step._capture.close()
    assert found + losses(step, 3, 3) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["forward", "whole"])
@pytest.mark.parametrize("loss", [reads, syncs])
def test_after_a_capture_that_fails_the_device_is_as_before(loss: Any, how: str) -> None:
    expected = losses(new_step(dropout=0.5))
    stream = torch.cuda.current_stream() if ON_GPU else None
    with pytest.raises(ConfigError, match="step.capture"):
        losses(new_step(loss, dropout=0.5, capture=how))
    gc.collect()
    if ON_GPU:
        assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
        torch.cuda.empty_cache()
    large = torch.full((1 << 22,), 2.0, device=DEVICE)  # the allocator hands out memory
    assert float(large.sum()) == float(1 << 23)
    assert len({float(torch.rand((), device=DEVICE)) for _ in range(3)}) == 3  # and the generator numbers
    assert losses(new_step(dropout=0.5)) == pytest.approx(expected, rel=1e-5), "dropout is another than before the failure"
    assert losses(new_step(capture=how)) == pytest.approx(losses(new_step()), rel=1e-5), "nothing can be captured any more"


@pytest.mark.parametrize(("loss", "says"), [(reads, "makes the host wait"), (syncs, "cannot be captured")])
def test_auto_trains_on_where_a_step_cannot_be_captured(loss: Any, says: str) -> None:
    step = new_step(loss, dropout=0.5, capture="auto")
    assert step.cfg.capture == "whole"
    assert losses(step) == pytest.approx(losses(new_step(dropout=0.5)), rel=1e-5)
    (told,) = step.news()
    assert says in told and "uncaptured from now on" in told
    step.check()
