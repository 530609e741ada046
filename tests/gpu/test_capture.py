"""Lifetime and failures of CUDA graphs: repeated capture and release, failed captures, and the fallback of `auto`."""

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
from tests.gpu.device import DEVICE, GRAPH, ON_GPU, cuda_only, synchronize


def mean_square(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    return {"loss": model(x).square().mean()}


def reads(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    values = mean_square(model, x)
    return values if values["loss"].item() < 1e9 else {}


def syncs(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Synchronize the stream, which only the capture detects: no operation of torch reads the device."""
    if ON_GPU:
        torch.cuda.current_stream().synchronize()
    elif any(isinstance(mode, CPUGraph) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()):
        raise RuntimeError("operation not permitted when stream is capturing")
    return mean_square(model, x)


def make_batch(seed: int, count: int = 16) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def new_step(loss: Any = mean_square, dropout: float = 0.0, **overrides: Any) -> Step:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, 8)]
    return Step(nn.Sequential(*layers), loss, StepConfig(**overrides), dist.single_process(DEVICE), graph=GRAPH)


def train_losses(step: Step, first: int = 0, steps: int = 4, count: int = 16) -> list[float]:
    return [step(make_batch(first + i, count), 1e-3)["loss"].item() for i in range(steps)]


def test_graphs_come_and_go_and_one_pool_outlives_none() -> None:
    expected = train_losses(new_step())
    values: list[Any] = []
    for repetition in range(4):
        step = new_step(capture="whole")
        assert train_losses(step) == pytest.approx(expected, rel=1e-5), repetition
        assert step._capture is not None
        values += [slot.values["loss"] for slot in step._capture._slots.values()]  # pool memory in use during the next capture
        if repetition % 2:
            step._capture.close()
        del step
        gc.collect()
    assert len(values) == 4 and all(float(x) == pytest.approx(expected[-1], rel=1e-5) for x in values)


@cuda_only
def test_memory_of_graphs_that_are_gone_comes_back() -> None:
    reserved = []
    for _ in range(5):
        step = new_step(capture="whole")
        train_losses(step, count=4096)
        del step
        gc.collect()
        synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[1], f"bytes reserved after each turn: {reserved}"


def test_a_closed_capture_goes_on_uncaptured() -> None:
    expected, step = train_losses(new_step(), steps=6), new_step(capture="whole")
    losses = train_losses(step, steps=3)
    assert step._capture is not None
    step._capture.close()
    assert losses + train_losses(step, 3, 3) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", ["forward", "whole"])
@pytest.mark.parametrize("loss", [reads, syncs])
def test_after_a_capture_that_fails_the_device_is_as_before(loss: Any, mode: str) -> None:
    expected = train_losses(new_step(dropout=0.5))
    stream = torch.cuda.current_stream() if ON_GPU else None
    with pytest.raises(ConfigError, match="step.capture"):
        train_losses(new_step(loss, dropout=0.5, capture=mode))
    gc.collect()
    if ON_GPU:
        assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
        torch.cuda.empty_cache()
    large = torch.full((1 << 22,), 2.0, device=DEVICE)  # the allocator works
    assert float(large.sum()) == float(1 << 23)
    assert len({float(torch.rand((), device=DEVICE)) for _ in range(3)}) == 3  # and so does the generator
    assert train_losses(new_step(dropout=0.5)) == pytest.approx(expected, rel=1e-5), "dropout differs after the failure"
    assert train_losses(new_step(capture=mode)) == pytest.approx(train_losses(new_step()), rel=1e-5), "a new capture fails"


@pytest.mark.parametrize(("loss", "reason"), [(reads, "makes the host wait"), (syncs, "cannot be captured")])
def test_auto_trains_on_where_a_step_cannot_be_captured(loss: Any, reason: str) -> None:
    step = new_step(loss, dropout=0.5, capture="auto")
    assert step.cfg.capture == "whole"
    assert train_losses(step) == pytest.approx(train_losses(new_step(dropout=0.5)), rel=1e-5)
    (message,) = step.news()
    assert reason in message and "uncaptured from now on" in message
    step.check()
