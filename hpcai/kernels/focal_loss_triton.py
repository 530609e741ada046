# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``focal_loss``, in float32 arithmetic: the forward pass reads the logits once, the backward pass reads them
again and writes their gradient.

For 3.8 million anchors of 264 classes in bf16 (32 images of 800 x 800) both move 6.2 GB; operations of torch move 167.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE, WARPS = 2048, 8  # elements of a tile: 8 a thread, 16 bytes in bf16; half where rows are not aligned: each takes a load
COLUMNS = 64  # of a tile: the classes of public data sets, 80 to 365, fill three quarters of their tiles or more

_jit = triton.jit(do_not_specialize=["anchors"])  # the level of a pyramid; sizes of images differ


@triton.jit
def _terms(x, own, off, on, gamma, SQUARE: tl.constexpr):
    """Return the loss of each class, and its derivative. ``own``: classes that are present."""
    x = tl.where(own, -x, x)  # softplus(x) is the cross entropy, and p the probability of the wrong answer
    small = tl.exp(-tl.abs(x))
    p = tl.where(x < 0, small, 1.0) / (1.0 + small)
    log = tl.log(1.0 + small)
    entropy = tl.maximum(x, 0.0) + log
    scale = tl.where(own, on, off) * (p * p if SQUARE else tl.exp(gamma * (tl.minimum(x, 0.0) - log)))
    slope = scale * (p + gamma * (1.0 - p) * entropy)
    return scale * entropy, tl.where(own, -slope, slope)


@_jit
def _forward(
    logits_, labels_, loss_, anchors, off, on, gamma, CLASSES: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ + row, row < anchors, other=-1)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    for first in tl.static_range(0, CLASSES, COLUMNS):
        column = first + tl.arange(0, COLUMNS)[None, :]
        exists = (row < anchors)[:, None] & (column < CLASSES)
        x = tl.load(logits_ + row.to(tl.int64)[:, None] * CLASSES + column, exists, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(exists, _terms(x, label == column, off, on, gamma, SQUARE)[0], 0.0), 1)
    tl.store(loss_ + row, total, row < anchors)


@_jit
def _backward(
    dloss_, logits_, labels_, dlogits_, anchors, off, on, gamma, CLASSES: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    exists, here = (row < anchors)[:, None] & (column < CLASSES), row.to(tl.int64)[:, None] * CLASSES + column
    label = tl.load(labels_ + row, row < anchors, other=-1)[:, None]
    dloss = tl.load(dloss_ + row, row < anchors, other=0.0)[:, None]
    x = tl.load(logits_ + here, exists, other=0.0).to(tl.float32)
    slope = _terms(x, label == column, off, on, gamma, SQUARE)[1]
    tl.store(dlogits_ + here, (dloss * slope).to(dlogits_.dtype.element_ty), exists)


class _FocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, alpha: float, gamma: float) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, labels)
        ctx.weights = (1 - alpha, alpha, gamma) if alpha >= 0 else (1.0, 1.0, gamma)
        _launch(_forward, [logits, labels, loss], ctx.weights, logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, labels = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        _launch(_backward, [dloss.contiguous(), logits, labels, dlogits], ctx.weights, logits)
        return dlogits, None, None, None


def _launch(kernel: Any, tensors: list[Tensor], weights: tuple[float, float, float], logits: Tensor) -> None:
    classes = logits.shape[-1]
    rows = (TILE if classes % 8 == 0 else TILE // 2) // COLUMNS
    anchors = logits.numel() // max(classes, 1)
    grid = triton.cdiv(anchors, rows), *([triton.cdiv(classes, COLUMNS)] if kernel is _backward else [])
    if logits.numel():
        with torch.cuda.device_of(logits):
            kernel[grid](
                *tensors, anchors, *weights, CLASSES=classes, SQUARE=weights[2] == 2, ROWS=rows, COLUMNS=COLUMNS, num_warps=WARPS,
            )  # fmt: skip


def focal_loss(logits: Tensor, labels: Tensor, alpha: float, gamma: float) -> Tensor:
    """Return the sigmoid focal loss of each anchor in float32. Raises ValueError for labels of another shape."""
    if logits.shape[:-1] != labels.shape:  # a kernel would read past the end
        raise ValueError(f"labels have shape {list(labels.shape)}; expected labels {list(logits.shape[:-1])}, as logits")
    return _FocalLoss.apply(logits, labels, alpha, gamma)
