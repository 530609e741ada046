"""A training step of ResNet-50 beside torchvision's, channels-last both, in CPU seconds of one run."""

import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hpcai.models.resnet import ResNet

pytestmark = pytest.mark.timing


@pytest.mark.parametrize(("batch", "size"), [(8, 128), (4, 224)])
def test_a_step_takes_no_longer_than_torchvisions(batch: int, size: int) -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed: its ResNet-50 is NOT compared")
    torch.manual_seed(0)
    peer, ours = models.resnet50().to(memory_format=torch.channels_last), ResNet()
    ours.load_state_dict(peer.state_dict())
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (peer, ours)]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        start = time.process_time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return time.process_time() - start, loss.item()

    first, *rest = [[step(*pair) for pair in zip((peer, ours), optimizers)] for _ in range(7)]
    assert first[0][1] == pytest.approx(first[1][1], rel=1e-5)
    ratio = median(pair[0][0] for pair in rest) / median(pair[1][0] for pair in rest)
    print(f"torchvision {median(pair[0][0] for pair in rest):.3f} s, ours {median(pair[1][0] for pair in rest):.3f} s: {ratio:.2f}")
    assert ratio > 0.95
