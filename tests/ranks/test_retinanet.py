"""RetinaNet on sharded images trains and detects as one process does."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models import retinanet
from hpcai.parallel.spatial import SpatialPartition
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

SIZE, IMAGES = (96, 64), 2
CFG = retinanet.RetinaNetConfig(
    layers=(1, 1, 1, 1), base_width=4, groups=2, width_per_group=32, fpn_channels=8, head_norm_groups=2, num_classes=3, size=SIZE,
    candidates=40, detections=20, score_threshold=0.005, trainable_layers=4,
)  # fmt: skip


def make_batch(mesh: Mesh, samples: slice) -> Any:
    generator = torch.Generator().manual_seed(3)
    image = torch.randint(0, 256, (IMAGES, *SIZE, 3), generator=generator, dtype=torch.uint8)
    corner = torch.rand(IMAGES, 5, 2, generator=generator, dtype=torch.float64) * 40
    boxes = torch.cat((corner, corner + 4 + 20 * torch.rand(corner.shape, generator=generator, dtype=torch.float64)), 2)
    boxes[..., 1::2] *= 1.4
    labels = torch.tensor([[0, 1, 2, 1, -1], [2, 0, -1, -1, -1]])
    within, original = torch.tensor([[96, 64], [80, 64]]), torch.tensor([[48, 128], [80, 64]])
    shard = SpatialPartition.from_mesh(mesh, 2).local_slices(SIZE)
    batch = retinanet.Batch(image[(slice(None), *shard)], boxes, labels, within, original, torch.arange(IMAGES))
    return retinanet.Batch(*(values[samples] for values in batch))


def train_model(mesh: Mesh, resize: str) -> tuple[list[float], dict[str, Any], np.ndarray]:
    torch.manual_seed(0)
    cfg = CFG.model_copy(update={"resize": resize})
    model = retinanet.parallelize(retinanet.RetinaNet(cfg), mesh, size=SIZE)
    step, axis = Step(model, retinanet.loss, StepConfig(optimizer="sgd", lr=0.02, precision="fp64"), mesh), mesh["replicate"]
    samples = slice(axis.rank * IMAGES // axis.size, (axis.rank + 1) * IMAGES // axis.size)
    losses = [step(make_batch(mesh, samples))["loss"].item() for _ in range(2)]
    rows = retinanet.detections(model.eval(), make_batch(mesh, slice(None)))["detections"].numpy()
    return losses, {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}, rows


@cache
def train_unsharded(resize: str) -> tuple[list[float], dict[str, Any], np.ndarray]:
    return train_model(single_process(), resize)


@pytest.mark.parametrize("axes", [{"height": 2}, {"height": 4}, {"replicate": 2}, {"replicate": 2, "height": 2}], ids=str)
def test_a_sharded_model_trains_and_detects_as_one_process(axes: dict[str, int]) -> None:
    resize = "fixed" if axes.get("height") == 4 else "shorter"
    losses, weights, rows = train_unsharded(resize)
    assert (rows[..., 5] >= 0).sum(1).min() > 5
    ranks, replicas = on_ranks(axes, train_model, resize), axes.get("replicate", 1)
    for _, state, rank_rows in ranks:
        assert list(state) == list(weights)
        for name, values in weights.items():
            np.testing.assert_allclose(state[name], values, rtol=1e-8, atol=1e-10, err_msg=name)
        np.testing.assert_allclose(rank_rows, rows, rtol=1e-8, atol=1e-8)
    means = np.mean([values for values, _, _ in ranks[:: len(ranks) // replicas]], 0)
    np.testing.assert_allclose(means, losses, rtol=1e-9)


def mismatch(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=r"\(96, 60\), expected multiples of 32"):
        retinanet.parallelize(retinanet.RetinaNet(CFG), mesh, size=(96, 60))


def test_an_image_that_cannot_be_sharded_is_refused() -> None:
    on_ranks({"height": 2}, mismatch)
