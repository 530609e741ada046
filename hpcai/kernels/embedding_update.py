"""Adagrad on the rows of an embedding table that a batch touched, fused with the gradients of these rows.

The gradient of a row is the sum of the gradients of all bags that contain its id, as often as they contain it. It is summed before
it is squared, and no gradient of a table or of all ids is stored. On CUDA the update is one Triton kernel
(``embedding_update_triton``) behind a sort. Elsewhere it is torch, in chunks of rows that stay in the cache.

N bags, H ids of a bag at most, R rows, D channels
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import triton_support

_CHUNK = 1 << 17  # elements of a chunk of rows, of which there are four (60,000 rows of 64: 21 ms, 26 ms unchunked; one thread)


def adagrad_rows_(weight: Tensor, sum: Tensor, ids: Tensor, grad: Tensor, *, lr: Tensor, scale: Tensor | None, found_inf: Tensor,
                  eps: float) -> None:  # fmt: skip
    """Adagrad of the touched rows: s += g^2, w -= lr g/(sqrt(s) + eps), or with one state for each row s += mean of g^2 over the row
    (row-wise Adagrad). ``lr``, ``scale`` of the gradient and ``found_inf`` are device scalars; with ``found_inf`` 1 nothing changes.

    Shape: weight [R, D], sum [R, D] or [R, 1], ids [N, H], where ids outside of the table are padding, grad [N, D] of the bags
    """
    if triton_support.is_supported(weight):
        kernels: Any = import_module("hpcai.kernels.embedding_update_triton")
        kernels.update(weight, sum, ids, grad, lr, scale, found_inf, eps)
        return
    if found_inf.item() == 1:
        return
    factor = lr.to(weight.dtype)
    for rows, g in _row_gradients(ids, grad, *weight.shape):
        if scale is not None:
            g.mul_(scale)
        squares = g.square()
        sum.index_add_(0, rows, squares if sum.shape == weight.shape else squares.mean(1, keepdim=True))
        s = sum.index_select(0, rows)
        weight.index_add_(0, rows, g.mul_(-factor).div_(s.sqrt_().add_(eps)))


def dense_gradient(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    """Return the gradient of a full table, for small ones.   ids [N, H], grad [N, D] -> [R, D]"""
    if triton_support.is_supported(grad):
        kernels: Any = import_module("hpcai.kernels.embedding_update_triton")
        return kernels.dense_gradient(ids, grad, rows)
    dense = grad.new_zeros(rows, grad.shape[1])
    for index, g in _row_gradients(ids, grad, *dense.shape):
        dense.index_copy_(0, index, g)
    return dense


def pool(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the sums of the rows of each bag to ``out``; ids outside of the table are padding.   ids [N, H] -> [N, D]"""
    if not ids.numel():
        out.zero_()
    elif triton_support.is_supported(weight):
        kernels: Any = import_module("hpcai.kernels.embedding_update_triton")
        kernels.pool(ids, weight, out)
    elif (inside := (ids >= 0) & (ids < len(weight))).all():
        out.copy_(F.embedding_bag(ids, weight, mode="sum"))
    else:
        ends = inside.sum(1).cumsum(0).to(ids.dtype)
        out.copy_(F.embedding_bag(ids[inside], weight, F.pad(ends, (1, 0)), mode="sum", include_last_offset=True))


def _row_gradients(ids: Tensor, grad: Tensor, rows: int, channels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of touched rows, in ascending order, and their gradients.   -> [n], [n, D]"""
    order, positions = torch.sort(ids.flatten(), stable=True)
    first, last = torch.searchsorted(order, order.new_tensor([0, rows])).tolist()
    order, bags = order[first:last], (positions[first:last] // ids.shape[1]).to(ids.dtype)
    if not len(order):
        return
    starts = F.pad((order[1:] != order[:-1]).nonzero().flatten() + 1, (1, 0))
    touched, ends = order[starts].long(), F.pad(starts[1:], (0, 1), value=len(order))
    size = max(_CHUNK // channels, 1)
    for some, begin, end in zip(touched.split(size), starts.split(size), ends.split(size)):
        a, b = begin[0], end[-1]
        offsets = (begin - a).to(ids.dtype)
        yield some, F.embedding_bag(bags[a:b], grad, offsets, mode="sum")
