"""The focal loss equals the formula in values and gradients; its kernels run for their dtypes."""

from typing import Any

import pytest
import torch

from hpcai.kernels.focal_loss import focal_loss, reference


@pytest.mark.parametrize("options", [(0.25, 2.0), (-1.0, 1.5)])
def test_values_and_gradients_are_those_of_the_formula(options: tuple[float, float]) -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 30, 5, dtype=torch.float64, generator=draw), torch.randint(-5, 5, (2, 30), generator=draw)
    results = []
    for function in (focal_loss, reference):
        x = logits.clone().requires_grad_()
        loss = function(x, labels, *options)
        results.append((loss, *torch.autograd.grad(loss.square().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


def test_kernels_run_for_their_dtypes_only(kernel_calls: Any) -> None:
    calls, labels = kernel_calls("focal_loss", focal_loss=reference), torch.tensor([0, -1])
    for dtype in (torch.float64, torch.float16, torch.float32, torch.bfloat16):
        focal_loss(torch.ones(2, 3, dtype=dtype), labels)
    assert calls == [("focal_loss", torch.float32), ("focal_loss", torch.bfloat16)]
