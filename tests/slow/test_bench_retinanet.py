"""A training step of RetinaNet beside torchvision's, from images and boxes to gradients, in CPU seconds of one run."""

import time
from statistics import median
from typing import Any

import pytest
import torch

from hpcai.models.retinanet import Batch, RetinaNet, RetinaNetConfig, loss

pytestmark = pytest.mark.timing
SIZE, IMAGES, OBJECTS, CLASSES = 256, 2, 20, 91


def test_a_step_is_faster_than_torchvisions() -> None:
    detection = pytest.importorskip(
        "torchvision.models.detection", reason="torchvision is not installed: its RetinaNet is NOT compared"
    )
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": CLASSES, "min_size": SIZE}
    peer = detection.retinanet_resnet50_fpn(**options, max_size=SIZE).train().to(memory_format=torch.channels_last)
    sizes: dict[str, Any] = {"groups": 1, "width_per_group": 64, "norm": "batch", "trainable_layers": 5}
    ours = RetinaNet(RetinaNetConfig(**sizes, num_classes=CLASSES, size=(SIZE, SIZE))).train()
    ours.load_state_dict(peer.state_dict())
    images = torch.randint(0, 256, (IMAGES, SIZE, SIZE, 3), dtype=torch.uint8)
    corners = (torch.rand(IMAGES, OBJECTS, 2, 2) * SIZE).sort(2).values.flatten(2)
    boxes = corners + torch.tensor([0.0, 0.0, 8.0, 8.0])
    labels, shape = torch.randint(0, CLASSES, (IMAGES, OBJECTS)), torch.full((IMAGES, 2), SIZE)
    batch = Batch(images, boxes, labels, shape, shape, torch.arange(IMAGES))
    floats = [*images.permute(0, 3, 1, 2).float().div(255)]
    targets = [{"boxes": own, "labels": kinds} for own, kinds in zip(boxes, labels)]

    def step(model: Any) -> tuple[float, float]:
        start = time.process_time()
        model.zero_grad()
        value = sum(peer(floats, targets).values()) if model is peer else loss(ours, batch)["loss"]
        value.backward()
        return time.process_time() - start, value.item()

    first, *rest = [[step(model) for model in (peer, ours)] for _ in range(8)]
    assert first[0][1] == pytest.approx(first[1][1], rel=1e-4)
    theirs, own = (median(pair[which][0] for pair in rest) for which in (0, 1))
    print(f"torchvision {theirs:.3f} s, ours {own:.3f} s: {theirs / own:.2f}")
    assert theirs / own > 1.0
