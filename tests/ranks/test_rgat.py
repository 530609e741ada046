"""R-GAT on replicas with sub-graphs of different sizes: training equals that of one process with all of them."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models import rgat
from hpcai.models.rgat import RGAT, Batch
from hpcai.settings import StepConfig
from hpcai.train import Step
from tests.ranks.launch import on_ranks
from tests.subgraphs import join, random_batch
from tests.unit.models.test_rgat import CFG, RELATIONS

SEEDS = [3, 5, 1, 4]  # of each sub-graph


def batch_of(first: int, last: int) -> Batch:
    return join([random_batch(number, RELATIONS, 5, SEEDS[number]) for number in range(first, last)])


def train(mesh: Mesh, shard: Any = "none") -> dict[str, Any]:
    torch.manual_seed(0)
    model, axis = rgat.parallelize(RGAT(CFG), mesh), mesh["replicate"]
    step = Step(model, rgat.loss, StepConfig(lr=0.01, precision="fp64", shard=shard), mesh, counts=rgat.counted)
    each = len(SEEDS) // axis.size
    for _ in range(3):
        value = step(batch_of(axis.rank * each, (axis.rank + 1) * each))["loss"]
    return {"loss": value.item(), **{name: t.numpy() for name, t in step.snapshot().items()}}


@pytest.mark.parametrize(("replicas", "shard"), [(1, "none"), (2, "none"), (4, "none"), (2, "optimizer"), (4, "weights")])
def test_replicas_equal_one_process(replicas: int, shard: str) -> None:
    expected, ranks = train(dist.single_process(torch.device("cpu"))), on_ranks({"replicate": replicas}, train, shard)
    assert np.mean([rank.pop("loss") for rank in ranks]) == pytest.approx(expected.pop("loss"), rel=1e-10)
    for rank in ranks:
        assert list(rank) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(rank[name], values, rtol=1e-9, atol=1e-11, err_msg=name)


def refuse(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match="R-GAT"):
        rgat.parallelize(RGAT(CFG), mesh)


def test_other_axes_are_refused() -> None:
    on_ranks({"replicate": 2, "tensor": 2}, refuse)
