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
WAYS: dict[str, AbstractContextManager[object]] = {
    "as usual": nullcontext(), "fake": FakeTensorMode(), "inference": torch.inference_mode(), "meta": torch.device("meta"),
    "autocast": torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The devices on which frequencies are computed."""
    found, real = [], llm.rotary_frequencies

    def frequencies(cfg: RotaryConfig, size: int, device: torch.device | str | None = None) -> Tensor:
        found.append(str(device))
        return real(cfg, size, device)

    monkeypatch.setattr(llm, "rotary_frequencies", frequencies)
    llm._cached_frequencies.cache_clear()
    yield found
    llm._cached_frequencies.cache_clear()


def found(positions: Tensor, size: int = 6) -> tuple[Tensor, Tensor]:
    return llm.rotary_cos_sin(CFG, size, positions, torch.float64)


@pytest.mark.parametrize("first", WAYS)
def test_angles_do_not_depend_on_the_first_caller(first: str) -> None:
    turned = torch.arange(9)[:, None].double() * llm.rotary_frequencies(CFG, 6).double()
    right = torch.cat((turned, turned), -1)[None]
    for way in (first, *WAYS):
        with WAYS[way]:
            given = torch.arange(9, device="cpu")[None]
            cosines, sines = found(given)
        assert type(cosines) is type(given) and cosines.device == given.device and cosines.shape == (1, 9, 6), way
        if type(given) is Tensor:
            assert torch.equal(cosines, right.cos()) and torch.equal(sines, right.sin()), way
    x = torch.ones(9, 6, dtype=torch.float64, requires_grad=True)
    (x * found(torch.arange(9)[None])[0]).sum().backward()  # not inference tensors, which autograd refuses


def test_frequencies_are_cached_on_a_cpu_and_computed_by_each_call_on_a_gpu(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph would read memory that is in use by others by then, or write to it when it is replayed."""
    for size in (6, 6, 8, 6):
        assert found(torch.arange(3)[None], size)[0].shape == (1, 3, size)
    assert made == ["cpu"] * 2
    monkeypatch.setattr(triton_support, "PLANNED", True)
    for _ in range(2):
        found(torch.arange(3)[None])
    assert len(made) == 4
