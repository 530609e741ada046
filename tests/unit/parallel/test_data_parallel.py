"""Gradients of bfloat16 parameters over simulated ranks: an all-reduce sums in the dtype of its buffer, rank by rank."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.parallel import data_parallel
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.fsdp import ShardedReducer


def gradients(ranks: int) -> torch.Tensor:
    """Return correlated gradients of each rank in bfloat16.   [R, N]"""
    return (torch.randn(ranks, 4096, generator=torch.Generator().manual_seed(0)) + 1).bfloat16()


def error(ranks: int, monkeypatch: pytest.MonkeyPatch, **words: Any) -> float:
    """Return the error of the sum relative to the norm of the exact one."""
    every = gradients(ranks)

    def all_reduce(total: torch.Tensor, **_: Any) -> None:
        for gradient in every[1:]:
            total += gradient.to(total.dtype)

    for name, stand_in in {"all_reduce": all_reduce, "broadcast": lambda *_, **words: None}.items():
        monkeypatch.setattr(data_parallel.torch_dist, name, stand_in)
    monkeypatch.setattr(Axis, "group", None)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    sums = GradientReducer(model, Mesh({"replicate": ranks}, ranks), **words)
    sums.zero_grad()
    (model.weight * every[0]).sum().backward()
    sums.reduce()
    found, exact = sums.flat_parameters[0].gradient(), every.double().sum(0)
    assert found is not None
    return ((found.double() - exact).norm() / exact.norm()).item()


def test_the_error_of_bfloat16_gradients_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [error(ranks, monkeypatch) for ranks in (2, 4, 8, 128)]
    assert errors[0] < errors[1] < 0.004 and max(errors[2:]) < 1e-5
    monkeypatch.setattr(data_parallel, "MAX_BF16_RANKS", 1000)
    assert error(128, monkeypatch) > 0.005, "in bfloat16"
    assert error(128, monkeypatch, float32_sums=True) < 1e-5


def test_shards_are_summed_in_the_same_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel.torch_dist, "broadcast", lambda *_, **words: None)
    monkeypatch.setattr(Axis, "group", None)
    kinds = []
    for ranks in (4, 8):
        (bucket,) = ShardedReducer(nn.Linear(8, 8).bfloat16(), Mesh({"replicate": ranks}, ranks), overlap=False).buckets
        kinds.append((bucket.gradients.dtype, bucket.weights.dtype))
    assert kinds == [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
