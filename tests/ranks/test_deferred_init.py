"""Deferred initialization of sharded models: the shards of all ranks together equal the weights that one process initializes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Mesh
from hpcai.parallel.sharding import shard_, shard_spec
from hpcai.settings import StepConfig
from hpcai.train import rng
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

MESHES = [{"tensor": 1}, {"tensor": 2}, {"tensor": 4}, {"height": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}]


class Network(nn.Module):
    """Weights of sizes that do not divide by 2 or 4, of three parts, tied, with values of the constructor, and channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(19, 14, padding_idx=2), nn.Linear(14, 19)
        self.head.weight = self.table.weight
        self.attention, self.norm = nn.MultiheadAttention(14, 2), nn.LayerNorm(14)
        self.conv = nn.Conv2d(5, 6, 3)
        self.conv.to(memory_format=torch.channels_last)
        self.slow, self.dense = nn.Linear(9, 14), nn.Linear(14, 9)
        self.waves = nn.Parameter(torch.arange(14) * torch.pi)
        self.register_buffer("ramp", torch.linspace(0, 1, 14))
        nn.init.orthogonal_(self.slow.weight)
        nn.init.trunc_normal_(self.dense.weight, std=0.1, a=-0.2, b=0.2)


def shard_network(mesh: Mesh) -> Network:
    model, tensor, height = Network(), mesh["tensor"], mesh["height"]
    for weight in (model.table.weight, model.head.weight, model.slow.weight, model.waves, model.ramp):
        shard_(weight, 0, tensor)
    shard_(model.attention.in_proj_weight, 0, tensor, (14, 14, 14))
    shard_(model.attention.in_proj_weight, 1, height)
    shard_(model.conv.weight, 1, tensor)
    shard_(model.conv.weight, 0, height)
    shard_(model.dense.weight, 1, tensor)
    return model


def gather_initialized(mesh: Mesh, precision: Any) -> dict[str, Any]:
    """Return the full tensors, gathered from all ranks. Assert that replicated elements are equal."""
    torch.manual_seed(mesh.rank)  # without effect
    with rng.seeds(7):
        model = shard_network(mesh)
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.table.weight
    step = Step(model, lambda model, batch: {}, StepConfig(precision=precision), mesh)
    local = {name: (t.detach().numpy().copy(), shard_spec(t)) for name, t in step.model.state_dict(keep_vars=True).items()}
    gathered: dict[str, Any] = {}
    shards = {name: (array, spec.global_shape, spec.ranges) for name, (array, spec) in local.items()}
    for rank_shards in all_gather_object(shards, mesh.peers):
        for name, (array, size, ranges) in rank_shards.items():
            full = gathered.setdefault(name, np.full(size, np.nan, array.dtype))
            index = np.ix_(*(np.concatenate([np.arange(a, b) for a, b in dim]) for dim in ranges))
            assert np.isnan(full[index]).all() or np.array_equal(full[index], array), name
            full[index] = array
    return gathered


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_shards_of_all_ranks_equal_the_initialization_of_one_process(axes: dict[str, int], precision: str) -> None:
    with rng.seeds(7):
        full: Any = Network()
    expected: dict[str, Tensor] = Step(full, lambda model, batch: {}, StepConfig(precision=precision), Mesh({})).model.state_dict()  # type: ignore[arg-type]
    for gathered in on_ranks(axes, gather_initialized, precision):
        assert gathered.keys() == expected.keys()
        for name, array in gathered.items():
            assert np.array_equal(array, expected[name].numpy()), name
