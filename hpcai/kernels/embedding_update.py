"""Lookups in embedding tables, and Adagrad on the rows that a batch touched, fused with the gradients of these rows.

The gradients of all bags that contain an id are summed before they are squared, and no gradient of a table or of all ids is
stored. On CUDA each table has a sort and a Triton kernel (``embedding_update_triton``). Elsewhere it is torch: one sort for all
tables, then chunks of rows that stay in the cache.

N bags of each table, T tables, D channels, H ids of a bag at most, K the sum of H over tables, R rows"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import triton_support

_CHUNK = 1 << 17  # elements of a chunk of rows, of which there are four (60,000 rows of 64: 21 ms, 26 ms unchunked; one thread)


@dataclass(frozen=True)
class Layout:
    """The tables of ids [N, K]: of each the ``hotness``, and the ``rows`` that are here, from ``first_rows`` on. Other ids, and
    -1, are padding."""

    hotness: tuple[int, ...]
    rows: tuple[int, ...]
    first_rows: tuple[int, ...]

    def split(self, ids: Tensor) -> list[Tensor]:
        """Return the ids of each table [N, H], counted from its first row."""
        parts = ids.split(list(self.hotness), 1)
        return [part - first if first else part for part, first in zip(parts, self.first_rows)]


def pool(ids: Tensor, weights: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """Write the sums of the rows of each bag to ``out``.   ids [N, K], weights [R, D] of each table -> [N, T, D]"""
    for index, weight, part in zip(layout.split(ids), weights, out.unbind(1)):
        inside = (index >= 0) & (index < len(weight))
        if not len(weight) or not len(ids):
            part.zero_()
        elif triton_support.on_gpu(ids):  # of static shapes
            mask = inside.to(weight.dtype)
            part.copy_(F.embedding_bag(index.clamp(0, len(weight) - 1), weight, mode="sum", per_sample_weights=mask))
        elif inside.all():
            part.copy_(F.embedding_bag(index, weight, mode="sum"))
        else:
            offsets = F.pad(inside.sum(1).cumsum(0).to(ids.dtype), (1, 0))
            part.copy_(F.embedding_bag(index[inside], weight, offsets, mode="sum", include_last_offset=True))


def adagrad_(weights: Sequence[Tensor], sums: Sequence[Tensor], layout: Layout, ids: Tensor, grad: Tensor, *, lr: Tensor,
             scale: Tensor | None, found_inf: Tensor, eps: float) -> None:  # fmt: skip
    """Adagrad of the touched rows: s += g^2, w -= lr g/(sqrt(s) + eps), or with one state for each row s += mean of g^2 over the
    row (row-wise Adagrad). ``lr``, ``scale`` of the gradient and ``found_inf`` are device scalars; with ``found_inf`` 1 nothing
    changes.

    Shape: weights [R, D] and sums [R, D] or [R, 1] of each table, ids [N, K], grad [N, T, D] of the bags"""
    if triton_support.is_supported(grad):
        for table, (weight, s, index) in enumerate(zip(weights, sums, layout.split(ids))):
            _kernels().update(weight, s, index, grad[:, table], lr, scale, found_inf, eps)
        return
    if found_inf.item() == 1:
        return
    factor = lr.to(grad.dtype)
    for table, rows, g in _row_gradients(layout, ids, grad):
        if scale is not None:
            g.mul_(scale)
        squares = g.square()
        sums[table].index_add_(0, rows, squares if sums[table].shape[1] == g.shape[1] else squares.mean(1, keepdim=True))
        s = sums[table].index_select(0, rows)
        weights[table].index_add_(0, rows, g.mul_(-factor).div_(s.sqrt_().add_(eps)))


def dense_gradients(layout: Layout, ids: Tensor, grad: Tensor) -> Tensor:
    """Return the gradients of full tables, for small ones.   ids [N, K], grad [N, T, D] -> [sum of R, D]"""
    out = grad.new_zeros(sum(layout.rows), grad.shape[2])
    parts = out.split(list(layout.rows))
    if triton_support.is_supported(grad):
        for table, index in enumerate(layout.split(ids)):
            _kernels().update(parts[table], None, index, grad[:, table], None, None, None, 0.0)
    else:
        for table, rows, g in _row_gradients(layout, ids, grad):
            parts[table].index_copy_(0, rows, g)
    return out


def _kernels() -> Any:
    return import_module("hpcai.kernels.embedding_update_triton")


def _row_gradients(layout: Layout, ids: Tensor, grad: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield tables, chunks of their touched rows in ascending order, and the gradients of these.   -> t, [n], [n, D]"""
    begins, (samples, tables, channels) = list(accumulate(layout.rows, initial=0)), grad.shape
    kind = torch.int32 if max(begins[-1], samples * tables) < 2**31 else torch.int64
    parts = zip(layout.split(ids.to(kind)), layout.rows, begins)  # the rows of all tables are numbered one after another
    keys = torch.cat([torch.where((x >= 0) & (x < n), x + begin, -1) for x, n, begin in parts], 1)
    numbers = torch.arange(samples * tables, dtype=kind, device=ids.device).view(samples, tables).split(1, 1)
    bags = torch.cat([number.expand(-1, hotness) for number, hotness in zip(numbers, layout.hotness)], 1)
    order, positions = keys.flatten().sort(stable=True)
    first = int(torch.searchsorted(order, 0))
    order, bags = order[first:], bags.flatten()[positions[first:]]
    starts = F.pad((order[1:] != order[:-1]).nonzero().flatten() + 1, (1, 1))
    starts[-1] = len(order)
    touched = order[starts[: -1 if len(order) else 0]].long()
    edges = [int(torch.searchsorted(touched, begin)) for begin in begins]
    size = max(_CHUNK // channels, 1)
    for table, (begin, end) in enumerate(pairwise(edges)):
        for a in range(begin, end, size):
            b = min(a + size, end)
            at, to = int(starts[a]), int(starts[b])
            offsets = (starts[a:b] - at).to(kind)
            yield table, touched[a:b] - begins[table], F.embedding_bag(bags[at:to], grad.flatten(0, 1), offsets, mode="sum")
