"""Rotary angles: cached frequencies are correct for every later caller."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hpcai.kernels import triton_support
from hpcai.models.llm import model as llm
from hpcai.models.llm.config import RotaryConfig

CFG = RotaryConfig.model_validate({"theta": 500.0, "scaling": {"factor": 4.0, "original": 16}})
CONTEXTS: dict[str, AbstractContextManager[object]] = {
    "as usual": nullcontext(), "fake": FakeTensorMode(), "inference": torch.inference_mode(), "meta": torch.device("meta"),
    "autocast": torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the devices on which frequencies are computed."""
    recorded, original = [], llm.rotary_frequencies

    def frequencies(cfg: RotaryConfig, size: int, device: torch.device | str | None = None, *args: Tensor | None) -> Tensor:
        recorded.append(str(device))
        return original(cfg, size, device)

    monkeypatch.setattr(llm, "rotary_frequencies", frequencies)
    llm._cached_frequencies.cache_clear()
    yield recorded
    llm._cached_frequencies.cache_clear()


def cos_sin(positions: Tensor, size: int = 6) -> tuple[Tensor, Tensor]:
    return llm.rotary_cos_sin(CFG, size, positions, torch.float64)


@pytest.mark.parametrize("first", CONTEXTS)
def test_angles_do_not_depend_on_the_first_caller(first: str) -> None:
    angles = torch.arange(9)[:, None].double() * llm.rotary_frequencies(CFG, 6).double()
    expected = torch.cat((angles, angles), -1)[None]
    for name in (first, *CONTEXTS):
        with CONTEXTS[name]:
            positions = torch.arange(9, device="cpu")[None]
            cosines, sines = cos_sin(positions)
        assert type(cosines) is type(positions) and cosines.device == positions.device and cosines.shape == (1, 9, 6), name
        if type(positions) is Tensor:
            assert torch.equal(cosines, expected.cos()) and torch.equal(sines, expected.sin()), name
    x = torch.ones(9, 6, dtype=torch.float64, requires_grad=True)
    (x * cos_sin(torch.arange(9)[None])[0]).sum().backward()  # not inference tensors, which autograd refuses


def test_frequencies_are_cached_on_a_cpu_and_computed_by_each_call_on_a_gpu(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed CUDA graph would read or write cached memory that has another use by then."""
    for size in (6, 6, 8, 6):
        assert cos_sin(torch.arange(3)[None], size)[0].shape == (1, 3, size)
    assert devices == ["cpu"] * 2
    monkeypatch.setattr(triton_support, "PLANNED", True)
    for _ in range(2):
        cos_sin(torch.arange(3)[None])
    assert len(devices) == 4
