"""Shard specs of weights, sums over shards, and gradients of bfloat16 parameters over simulated ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError
from hpcai.parallel import data_parallel
from hpcai.parallel.data_parallel import GradientReducer, sum_gradients_over
from hpcai.parallel.fsdp import ShardedReducer
from hpcai.parallel.sharding import FlatParameter, FlatView, ShardSpec, global_sum, mark_exclusive, replica_axes, shard_, shard_spec

PARTS = (6, 3, 3)


def sharded_twice(tensor: int, height: int) -> nn.Parameter:
    """Return a shard of a weight of three concatenated parts, sharded along dim 0 and along dim 1."""
    weight = nn.Parameter(torch.arange(12 * 10.0).view(12, 10))
    shard_(weight, 0, Axis("tensor", 3, tensor), PARTS)
    shard_(weight, 1, Axis("height", 2, height))
    return weight


def test_the_shards_of_all_ranks_are_the_full_tensor() -> None:
    full, gathered = torch.arange(12 * 10.0).view(12, 10), torch.full((12, 10), torch.nan)
    for tensor in range(3):
        for height in range(2):
            part = sharded_twice(tensor, height)
            assert part.shape == (4, 5) and shard_spec(part).global_shape == (12, 10)
            for offsets, index in shard_spec(part).boxes((0, 0), part.shape):
                box = tuple(slice(o, o + n) for o, n in zip(offsets, part[index].shape))
                assert gathered[box].isnan().all()
                gathered[box] = part[index].detach()
    assert torch.equal(gathered, full)


def test_a_box_of_a_shard_maps_to_the_full_tensor() -> None:
    part = sharded_twice(1, 1)
    assert shard_spec(part).ranges == (((2, 4), (7, 8), (10, 11)), ((5, 10),))
    boxes = [(offsets, part[1:4, 2:3][index].tolist()) for offsets, index in shard_spec(part).boxes((1, 2), (3, 1))]
    assert boxes == [((3, 7), [[37.0]]), ((7, 7), [[77.0]]), ((10, 7), [[107.0]])]


def test_a_dim_may_be_sharded_over_two_axes() -> None:
    weight = nn.Parameter(torch.arange(12.0))
    shard_(weight, 0, Axis("tensor", 2, 1), (8, 4))
    shard_(weight, 0, Axis("height", 3, 1))
    assert weight.tolist() == [6, 7] and shard_spec(weight).ranges == (((6, 8),),)


def test_a_shared_weight_is_sharded_once_and_contradictions_are_refused() -> None:
    weight, axis = nn.Parameter(torch.ones(4, 6)), Axis("tensor", 2, 1)
    shard_(weight, 0, axis)
    shard_(weight, 0, axis)
    assert weight.shape == (2, 6)
    with pytest.raises(ConfigError, match="sharded over tensor in another dim than 1"):
        shard_(weight, 1, axis)
    with pytest.raises(ConfigError, match=r"sizes are \[4, 1\], expected a sum of 6"):
        shard_(weight, 1, Axis("height", 2, 0), (4, 1))
    with pytest.raises(ConfigError, match="at least one element for each of 8 ranks"):
        shard_(weight, 1, Axis("height", 8, 0))


def test_replica_axes() -> None:
    mesh: Any = Mesh({"replicate": 2, "pipeline": 2, "tensor": 2}, 8, 5)
    layer = nn.Linear(4, 4)

    def names(tensor: torch.Tensor) -> list[str]:
        return [axis.name for axis in replica_axes(tensor, mesh)]

    assert names(layer.bias) == ["replicate x pipeline x tensor"]
    shard_(layer.weight, 0, mesh["tensor"])
    assert names(layer.weight) == ["replicate x pipeline"] and names(layer.bias) == ["replicate x pipeline x tensor"]
    for parameter in layer.parameters():
        mark_exclusive(parameter, mesh["pipeline"])
    assert names(layer.weight) == ["replicate"] and names(layer.bias) == ["replicate x tensor"]
    between, within = mesh.split("replicate", 2, "x")
    assert [a.name for a in replica_axes(layer.bias, mesh, within, between)] == ["tensor"]
    sum_gradients_over(layer, Axis("ends", 2, 0, parent="pipeline"))  # a weight that two stages share
    assert names(layer.bias) == ["replicate x tensor", "ends"]


def test_an_element_that_several_ranks_hold_counts_once() -> None:
    def flat_parameter(rank: int) -> FlatParameter:
        parameter = nn.Parameter(torch.ones(2))
        part = FlatView("w", parameter, 0, 2, 0, ShardSpec((2,), (((0, 2),),), exclusive_axes=(Axis("pipeline"),)))
        return FlatParameter([part], parameter.detach(), lambda: None, False, (Axis("ends", 2, rank, parent="pipeline"),))

    assert [flat_parameter(0).is_counted, flat_parameter(1).is_counted] == [True, False]
    values = [(flat_parameter(0), torch.tensor(3.0)), (flat_parameter(1), torch.tensor(5.0))]
    assert global_sum(values).item() == 3.0


# ---- gradients: an all-reduce sums rank by rank in the dtype of its buffer


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
