"""Values of edges at their atoms and back, without a sum whose order is left to chance.

Every edge has a place in the row of its centre and one in the row of the atom it comes from, so that each of these maps and its
adjoint is a copy by a table, or a sum over a row of one: the same bits in every run on a GPU, to any derivative. Empty places hold
the number of an edge that is none, whose values are 0.   N atoms, E edges, K places of a row, C channels.

Under torch.compile they are plain indexing: there the second derivative of such functions comes out wrong (torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor


def scatter(x: Tensor, table: Tensor, slots: Tensor) -> Tensor:
    """Rows in another order: ``there`` says which row of ``x`` stands at each place, ``back`` at which place each row stands.

    x [E, C], there [N, K], back [E] -> [N, K, C]
    """
    rows = table.flatten()
    return (x[rows] if torch.compiler.is_compiling() else _Permute.apply(x, rows, slots)).unflatten(0, table.shape)


def gather(x: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """The inverse of ``place``.   x [N, K, C], back [E], there [N, K] -> [E, C]"""
    rows = x.flatten(0, 1)
    return rows[slots] if torch.compiler.is_compiling() else _Permute.apply(rows, slots, table.flatten())


def reverse_edges(x: Tensor, reverse: Tensor) -> Tensor:
    """Values of the edges that lead back; done twice it changes nothing.   x [E, C], reverse [E] -> [E, C]"""
    return x[reverse] if torch.compiler.is_compiling() else _Permute.apply(x, reverse, reverse)


def index_select(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Values of atoms at their edges: row ``index`` of ``x``, where ``table`` lists the edges of each.

    x [N, C], index [E], table [N, K] -> [E, C]
    """
    return x[index] if torch.compiler.is_compiling() else _IndexSelect.apply(x, index, table)


def segment_sum(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """The sum over the edges of each atom.   x [E, C], index [E], table [N, K] -> [N, C]"""
    if torch.compiler.is_compiling():
        return x.new_zeros(len(table), x.shape[1]).index_add(0, index, x)
    return _SegmentSum.apply(x, index, table)


class _TableFunction(torch.autograd.Function):
    """A function of values and tables whose derivative needs the tables alone."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])


class _Permute(_TableFunction):
    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _Permute.apply(grad_output, inverse, index), None, None


class _IndexSelect(_TableFunction):
    @staticmethod
    def forward(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        index, table = ctx.saved_tensors
        return _SegmentSum.apply(grad_output, index, table), None, None


class _SegmentSum(_TableFunction):
    @staticmethod
    def forward(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
        padding = len(x) - 1  # the last edge is none
        return torch.nn.functional.embedding_bag(table, x, mode="sum", padding_idx=padding)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        index, table = ctx.saved_tensors
        return _IndexSelect.apply(grad_output, index, table), None, None
