"""RetinaNet on a GPU: losses of the CPU, captured steps equal to eager ones, and detections without a wait for the device."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.models import retinanet
from hpcai.settings import StepConfig
from tests.gpu.device import DEVICE, GPU, GRAPH, disable_tf32, forbid_synchronization

SIZE = 64, 96
SMALL: dict[str, Any] = {
    "layers": (1, 1, 1, 1), "base_width": 16, "groups": 1, "width_per_group": 64, "trainable_layers": 5, "fpn_channels": 32,
    "size": SIZE, "num_classes": 5, "anchor_sizes": (8, 16, 32, 64, 128), "score_threshold": 0.0, "detections": 40,
}  # fmt: skip


def make_model(norm: str = "batch") -> retinanet.RetinaNet:
    torch.manual_seed(0)
    return retinanet.RetinaNet(retinanet.RetinaNetConfig(**SMALL, norm=norm))


def new_step(device: str, **overrides: Any) -> train.Step:
    cfg, mesh = StepConfig(**overrides), dist.single_process(torch.device(device))
    return train.Step(make_model(), retinanet.loss, cfg, mesh, graph=GRAPH)


def make_batch(device: torch.device, seed: int) -> retinanet.Batch:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, *SIZE, 3), generator=draw, dtype=torch.uint8)
    corners = (torch.rand(2, 8, 2, 2, generator=draw) * torch.tensor(SIZE[::-1])).sort(2).values.flatten(2)
    labels = torch.randint(0, 5, (2, 8), generator=draw)
    labels[1, seed % 4 + 2 :] = -1
    size = torch.tensor([SIZE, SIZE])
    return retinanet.Batch(*(part.to(device) for part in (images, corners, labels, size, size, torch.arange(2))))


def train_losses(step: train.Step) -> list[float]:
    return [float(step(make_batch(step.mesh.device, i), 1e-3)["loss"]) for i in range(5)]


def test_the_gpu_trains_as_the_cpu_does() -> None:
    disable_tf32()
    assert train_losses(new_step(GPU)) == pytest.approx(train_losses(new_step("cpu")), rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step(GPU, precision=precision, capture=mode) for mode in ("none", "whole"))
    assert train_losses(captured) == pytest.approx(train_losses(eager), rel=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("norm", ["frozen", "batch"])
def test_detections_are_those_of_the_cpu(norm: str) -> None:
    disable_tf32()
    model, batch = make_model(norm).eval(), make_batch(torch.device("cpu"), 3)
    expected = retinanet.detections(model, batch)["detections"]
    model, batch = model.to(DEVICE), make_batch(DEVICE, 3)
    with forbid_synchronization():
        actual = retinanet.detections(model, batch)["detections"]
    torch.testing.assert_close(actual.cpu()[..., 4], expected[..., 4], rtol=1e-4, atol=1e-4)
    same = (actual.cpu()[..., 5] == expected[..., 5]) & torch.isclose(actual.cpu()[..., :4], expected[..., :4], atol=0.1).all(-1)
    assert same.double().mean() > 0.9, "equal scores may change places"
