"""Deterministic maps between edges and atoms, differentiable any number of times.   N atoms, E edges, K slots of a row, C channels

Each edge has a slot in the table row of its centre, and one in that of its neighbour. Every map and its adjoint is therefore a copy
by index, or a sum over one row: the same bits in every run on a GPU, also in higher derivatives. Empty slots hold the index of a
padding edge, whose values are 0. Under torch.compile the maps are plain indexing, since there the second derivative of such
functions comes out wrong (torch 2.13).
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.dynamo import needs_plain_derivatives


def scatter(x: Tensor, table: Tensor, slots: Tensor) -> Tensor:
    """Copy the values of edges into their slots.   x [E, C], table [N, K] edge of a slot, slots [E] slot of an edge -> [N, K, C]"""
    rows = table.flatten()
    return (x[rows] if needs_plain_derivatives() else _Permute.apply(x, rows, slots)).unflatten(0, table.shape)


def gather(x: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """Copy the values of slots back to their edges, the inverse of ``scatter``.   x [N, K, C], slots [E], table [N, K] -> [E, C]"""
    rows = x.flatten(0, 1)
    return rows[slots] if needs_plain_derivatives() else _Permute.apply(rows, slots, table.flatten())


def reverse_edges(x: Tensor, reverse: Tensor) -> Tensor:
    """Return, for each edge, the value of its reverse edge: an involution.   x [E, C], reverse [E] -> [E, C]"""
    return x[reverse] if needs_plain_derivatives() else _Permute.apply(x, reverse, reverse)


def index_select(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Copy the values of atoms to their edges, listed by ``table``.   x [N, C], index [E] atom, table [N, K] -> [E, C]"""
    return x[index] if needs_plain_derivatives() else _IndexSelect.apply(x, index, table)


def segment_sum(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
    """Sum over the edges of each atom.   x [E, C], index [E], table [N, K] -> [N, C]"""
    if needs_plain_derivatives():
        return x.new_zeros(len(table), x.shape[1]).index_add(0, index, x)
    return _SegmentSum.apply(x, index, table)


class _TableFunction(torch.autograd.Function):
    """A linear function whose derivatives need only its index tensors."""

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


class _IndexSelect(_Permute):
    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        index, table = ctx.saved_tensors
        return _SegmentSum.apply(grad_output, index, table), None, None


class _SegmentSum(_TableFunction):
    @staticmethod
    def forward(x: Tensor, index: Tensor, table: Tensor) -> Tensor:
        padding = len(x) - 1  # the last edge is padding
        return torch.nn.functional.embedding_bag(table, x, mode="sum", padding_idx=padding)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        index, table = ctx.saved_tensors
        return _IndexSelect.apply(grad_output, index, table), None, None
