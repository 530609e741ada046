"""Models on sharded volumes, maps and batches train as one process does: losses, weights, scores."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models import cosmoflow, deepcam, retinanet, unet3d
from hpcai.parallel.spatial import SpatialPartition
from hpcai.settings import StepConfig
from hpcai.train import rng
from hpcai.train.metrics import MetricSums
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

STEPS = SAMPLES = 2
CFG = StepConfig(optimizer="sgd", lr=0.05, precision="fp64", nesterov=True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Unet:
    """Half the resolutions, so that one level is sharded on four ranks and one is replicated."""

    cfg = unet3d.UNet3DConfig(filters=(4, 6, 8), window=(32, 16, 16))
    package: Any = unet3d

    def model(self, mesh: Mesh) -> Any:
        return unet3d.parallelize(unet3d.UNet3D(self.cfg), mesh)

    def batch(self, step: int, mesh: Mesh, samples: slice) -> Any:
        image = torch.randn(SAMPLES, *self.cfg.window, generator=generator(step)).double()
        label = torch.randint(0, 3, image.shape, generator=generator(step), dtype=torch.uint8)
        part = SpatialPartition.from_mesh(mesh).local_slices(self.cfg.window)
        return unet3d.Batch(image[(samples, *part)], label[(samples, *part)])

    def held_out(self, mesh: Mesh) -> Any:
        image = torch.randn(1, 53, 24, 17, generator=generator(99)).double()
        return [unet3d.Batch(image, (image > 0.8).to(torch.uint8))]

    def score(self, model: Any, mesh: Mesh) -> Any:
        return unet3d.score(model, self.held_out(mesh))


class Cosmo:
    cfg = cosmoflow.CosmoFlowConfig(size=16, filters=4, blocks=3, dropout=0.3)
    package: Any = cosmoflow

    def model(self, mesh: Mesh) -> Any:
        return cosmoflow.parallelize(cosmoflow.CosmoFlow(self.cfg), mesh)

    def batch(self, step: int, mesh: Mesh, samples: slice) -> Any:
        counts = torch.randint(0, 50, (SAMPLES, 16, 16, 16, 4), generator=generator(step), dtype=torch.int16)
        target = torch.rand(SAMPLES, 4, generator=generator(step))
        return cosmoflow.Batch(counts[(samples, *SpatialPartition.from_mesh(mesh).local_slices((16, 16, 16)))], target[samples])

    def score(self, model: Any, mesh: Mesh) -> Any:
        return cosmoflow.error(model, self.batch(99, mesh, slice(None)))


class Cam:
    cfg = deepcam.DeepCamConfig(divide=32, middle=1, variables=("A", "B"), units=("K", "K"), low=(0.0, 0.0), high=(1.0, 1.0))
    package: Any = deepcam

    def model(self, mesh: Mesh) -> Any:
        return deepcam.parallelize(deepcam.DeepCam(self.cfg), mesh, mesh["replicate"].size, (96, 32))

    def batch(self, step: int, mesh: Mesh, samples: slice) -> Any:
        part = SpatialPartition.from_mesh(mesh, 2).local_slices((96, 32))
        fields = torch.rand(SAMPLES, 96, 32, 2, generator=generator(step))
        mask = torch.randint(0, 3, (SAMPLES, 96, 32), generator=generator(step), dtype=torch.uint8)
        return deepcam.Batch(fields[(samples, *part)].double(), mask[(samples, *part)])

    def score(self, model: Any, mesh: Mesh) -> Any:
        maps = deepcam.maps(model, self.batch(99, mesh, slice(None)))
        assert {name: tuple(rows.shape[:3]) for name, rows in maps.items()} == dict.fromkeys(maps, (SAMPLES, 96, 32))
        return deepcam.score(model, self.batch(99, mesh, slice(None)))


class Retina:
    """Each image is padded on its own; scores are all detections."""

    cfg = retinanet.RetinaNetConfig(
        layers=(1, 1, 1, 1), base_width=4, groups=2, width_per_group=32, fpn_channels=8, head_norm_groups=2, num_classes=3,
        size=(96, 64), candidates=40, detections=20, score_threshold=0.005, trainable_layers=4, resize="shorter",
    )  # fmt: skip
    package: Any = retinanet

    def model(self, mesh: Mesh) -> Any:
        return retinanet.parallelize(retinanet.RetinaNet(self.cfg), mesh, size=(96, 64))

    def batch(self, step: int, mesh: Mesh, samples: slice) -> Any:
        image = torch.randint(0, 256, (SAMPLES, 96, 64, 3), generator=generator(step), dtype=torch.uint8)
        corner, extent = (torch.rand(SAMPLES, 5, 2, generator=generator(step + n), dtype=torch.float64) for n in (1, 2))
        boxes = torch.cat((40 * corner, 40 * corner + 4 + 20 * extent), 2)
        boxes[..., 1::2] *= 1.4
        labels, within = torch.tensor([[0, 1, 2, 1, -1], [2, 0, -1, -1, -1]]), torch.tensor([[96, 64], [80, 64]])
        image = image[(slice(None), *SpatialPartition.from_mesh(mesh, 2).local_slices((96, 64)))]
        original = torch.tensor([[48, 128], [80, 64]])
        return retinanet.Batch(*(x[samples] for x in (image, boxes, labels, within, original, torch.arange(SAMPLES))))

    def score(self, model: Any, mesh: Mesh) -> Any:
        rows = retinanet.detections(model, self.batch(99, mesh, slice(None)))["detections"]
        assert (rows[..., 5] >= 0).sum(1).min() > 5
        return {str(number): value for number, value in enumerate(rows.flatten())}


class Fixed(Retina):
    cfg = Retina.cfg.model_copy(update={"resize": "fixed"})


def train_model(mesh: Mesh, kind: Any, cfg: StepConfig = CFG) -> tuple[list[float], dict[str, Any], dict[str, float]]:
    torch.manual_seed(0)
    case = kind()
    model = case.model(mesh)
    step = Step(model, case.package.loss, cfg, mesh)
    axis = mesh["replicate"]
    samples = slice(axis.rank * SAMPLES // axis.size, (axis.rank + 1) * SAMPLES // axis.size)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(5)
        losses.append(step(case.batch(number, mesh, samples))["loss"].item())
    with torch.no_grad():
        sums = MetricSums()
        sums.add(case.score(model.eval(), mesh), 1)
        scores = sums.reduce(single_process()["replicate"], torch.device("cpu"))
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}  # a queue loses tensors
    return losses, state, scores


@cache
def train_unsharded(kind: Any) -> tuple[list[float], dict[str, Any], dict[str, float]]:
    return train_model(single_process(), kind)


MESHES = [
    (Unet, {"depth": 4}), (Unet, {"depth": 2, "height": 2}), (Unet, {"replicate": 2, "depth": 2}), (Cosmo, {"depth": 4}),
    (Cosmo, {"depth": 2, "height": 2}), (Cam, {"height": 4}), (Cam, {"replicate": 2, "height": 2}),
    (Retina, {"height": 2}), (Fixed, {"height": 4}), (Retina, {"replicate": 2}), (Retina, {"replicate": 2, "height": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "axes"), MESHES, ids=str)
def test_a_sharded_model_trains_as_one_process(kind: Any, axes: dict[str, int]) -> None:
    losses, weights, scores = train_unsharded(kind)
    ranks = on_ranks(axes, train_model, kind)
    replicas = axes.get("replicate", 1)
    for rank_losses, state, rank_scores in ranks:
        assert list(state) == list(weights)
        for name, values in weights.items():
            np.testing.assert_allclose(state[name], values, rtol=1e-8, atol=1e-9, err_msg=name)
        assert rank_scores == pytest.approx(scores, rel=1e-8)
        if replicas == 1:
            assert rank_losses == pytest.approx(losses, rel=1e-9)
    if replicas > 1:
        model_ranks = len(ranks) // replicas
        means = [sum(ranks[replica * model_ranks][0][k] for replica in range(replicas)) / replicas for k in range(STEPS)]
        assert means == pytest.approx(losses, rel=1e-9)


def first_gradients(mesh: Mesh, seed: int, axes: dict[str, int]) -> list[tuple[float, dict[str, Any]]]:
    """Return the loss and gradients of the first step with dropout by replica, seeded as in an app; one process emulates each."""
    case, replicas, results = Cosmo(), axes.get("replicate", 1), []
    unsharded = mesh.world == 1
    for replica in range(replicas) if unsharded else [mesh["replicate"].rank]:
        with rng.seeds(seed):
            model = case.model(mesh)
        step = Step(model, case.package.loss, CFG, mesh)
        rng.seed_all(seed + replica)
        value = step._gradients(case.batch(0, mesh, slice(replica, replica + 1)))["loss"].item()
        gradients = {name: p.grad.clone().numpy() for name, p in model.named_parameters() if p.grad is not None}
        results.append((value, gradients))
    return results


@pytest.mark.parametrize("axes", [{"depth": 2, "height": 2}, {"replicate": 2, "depth": 2}], ids=str)
def test_dropout_of_a_sharded_model_is_that_of_one_process_per_replica(axes: dict[str, int]) -> None:
    assert Cosmo.cfg.dropout > 0
    replicas, ranks = first_gradients(single_process(), 7, axes), on_ranks(axes, first_gradients, 7, axes)
    for rank, ((value, gradients),) in enumerate(ranks):
        assert value == pytest.approx(replicas[rank * len(replicas) // len(ranks)][0], rel=1e-9), rank
        for name in replicas[0][1]:
            expected = sum(each[name] for _, each in replicas) / len(replicas)
            np.testing.assert_allclose(gradients[name], expected, rtol=1e-8, atol=1e-12, err_msg=name)


def mismatch(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=r"\(96, 60\), expected multiples of 32"):
        retinanet.parallelize(retinanet.RetinaNet(Retina.cfg), mesh, size=(96, 60))


def test_an_image_that_cannot_be_sharded_is_refused() -> None:
    on_ranks({"height": 2}, mismatch)
