"""Sigmoid focal loss (Lin et al. 2017, arXiv:1708.02002, equation 5).   K classes"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.kernels import triton_support


def focal_loss(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return the focal loss of each anchor, summed over classes: cross entropy times (1 - pt)^gamma times alpha, or 1 - alpha for
    an absent class; a negative alpha omits these. On CUDA by one kernel for each pass (``focal_loss_triton``).

    Shape: logits [..., K], labels [...] class, negative: none -> [...], in float32 or float64
    """
    if not triton_support.needs_plain_ops() and triton_support.is_supported_float(logits):
        from hpcai.kernels import focal_loss_triton

        return focal_loss_triton.focal_loss(logits, labels, alpha, gamma)
    return _FocalLoss.apply(logits, labels, alpha, gamma)


def reference(logits: Tensor, labels: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Compute ``focal_loss`` with the gradient of autograd."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = torch.arange(x.shape[-1], device=x.device) == labels[..., None]
    x = torch.where(own, -x, x)
    weight = torch.where(own, alpha, 1 - alpha) if alpha >= 0 else 1.0
    return (weight * x.sigmoid().pow(gamma) * F.softplus(x)).sum(-1)


class _FocalLoss(torch.autograd.Function):
    """The focal loss and its gradient in one pass over the logits, of which only the gradient is saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, alpha: float, gamma: float) -> Tensor:
        x, label = logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.clamp(min=0)[..., None]
        off, on = (1 - alpha, alpha) if alpha >= 0 else (1.0, 1.0)
        loss, grad = _terms(x, off, gamma)  # all classes are absent
        present, slope = _terms(-x.gather(-1, label), on, gamma)
        is_object = labels[..., None] >= 0
        present, slope = (torch.where(is_object, a, b.gather(-1, label)) for a, b in ((present, loss), (-slope, grad)))
        total = loss.scatter_(-1, label, present).sum(-1)
        ctx.save_for_backward(grad.scatter_(-1, label, slope).to(logits.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return grad * grad_output[..., None].to(grad.dtype), None, None, None


def _terms(x: Tensor, weight: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Return weight p^gamma softplus(x), p = sigmoid(x), and its derivative, weight p^gamma (p + gamma (1 - p) softplus(x))."""
    p, entropy = x.sigmoid(), F.logsigmoid(-x).neg_()
    scale = p.pow(gamma).mul_(weight)
    slope = (1 - p).mul_(entropy).mul_(gamma).add_(p).mul_(scale)
    return entropy.mul_(scale), slope
