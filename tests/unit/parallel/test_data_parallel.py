"""Gradients of bfloat16 parameters over simulated ranks. An all-reduce sums rank by rank in the dtype of its buffer."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.parallel import data_parallel
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.fsdp import ShardedReducer


def sum_error(ranks: int, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> float:
    """Return the error of the sum relative to the norm of the exact one."""
    per_rank = (torch.randn(ranks, 4096, generator=torch.Generator().manual_seed(0)) + 1).bfloat16()    # correlated

    def all_reduce(total: torch.Tensor, **_: Any) -> None:
        for gradient in per_rank[1:]:
            total += gradient.to(total.dtype)

    for name, stand_in in {"all_reduce": all_reduce, "broadcast": lambda *_, **kwargs: None}.items():
        monkeypatch.setattr(data_parallel.torch_dist, name, stand_in)
    monkeypatch.setattr(Axis, "group", None)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    sums = GradientReducer(model, Mesh({"replicate": ranks}, ranks), **kwargs)
    sums.zero_grad()
    (model.weight * per_rank[0]).sum().backward()
    sums.reduce()
    actual, exact = sums.flat_parameters[0].gradient(), per_rank.double().sum(0)
    assert actual is not None
    return ((actual.double() - exact).norm() / exact.norm()).item()


def test_the_error_of_bfloat16_gradients_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [sum_error(ranks, monkeypatch) for ranks in (2, 4, 8, 128)]
    assert errors[0] < errors[1] < 0.004 and max(errors[2:]) < 1e-5
    monkeypatch.setattr(data_parallel, "MAX_BF16_RANKS", 1000)
    assert sum_error(128, monkeypatch) > 0.005, "in bfloat16"
    assert sum_error(128, monkeypatch, float32_sums=True) < 1e-5


def test_shards_are_summed_in_the_same_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel.torch_dist, "broadcast", lambda *_, **kwargs: None)
    monkeypatch.setattr(Axis, "group", None)
    kinds = []
    for ranks in (4, 8):
        (bucket,) = ShardedReducer(nn.Linear(8, 8).bfloat16(), Mesh({"replicate": ranks}, ranks), overlap=False).buckets
        kinds.append((bucket.gradients.dtype, bucket.weights.dtype))
    assert kinds == [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
