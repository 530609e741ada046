"""Collectives over an axis of the mesh, without effect over an axis of size 1."""

import hashlib
import math
import mmap
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dist.mesh import Axis
from hpcai.dynamo import UntransformedFunction
from hpcai.errors import HpcaiError

T = TypeVar("T")


def all_reduce_(value: Tensor, *axes: Axis) -> Tensor:
    """All-reduce (sum) in place over ``axes``, and return ``value``."""
    for axis in axes:
        if axis.size > 1:
            torch_dist.all_reduce(value, group=axis.group)
    return value


def all_reduce(value: Tensor, *axes: Axis, identity_backward: bool = False) -> Tensor:
    """Return the sum over ``axes``. The backward pass sums gradients over ``axes`` too, because ranks may use the sum differently.

    ``identity_backward``: All ranks compute the same loss from the sum, which counts once. The gradient is then passed unchanged.
    """
    axes = tuple(axis for axis in axes if axis.size > 1)
    return _AllReduce.apply(value, axes, identity_backward) if axes else value


class _AllReduce(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axes: tuple[Axis, ...], identity_backward: bool) -> Tensor:
        ctx.axes, ctx.identity_backward = axes, identity_backward
        return all_reduce_(value.clone(memory_format=torch.contiguous_format), *axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if ctx.identity_backward:
            return grad_output, None, None
        return all_reduce_(grad_output.clone(memory_format=torch.contiguous_format), *ctx.axes), None, None


def sum_once(value: Tensor, ranks: int) -> Tensor:
    """Return ``value``, and divide its gradient by ``ranks``: so many ranks hold the same value, and the loss counts once."""
    return _SumOnce.apply(value, ranks)


class _SumOnce(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output / ctx.ranks, None


# torch 2.13 renamed both functions, and warns about the old names.
_all_gather_into_tensor = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def get_backend(device: torch.device, axis: Axis) -> str:
    """Return the backend of tensors of ``device`` on ``axis``: nccl or gloo, or none if the axis has size 1."""
    if axis.group is None:
        return "none"
    names = str(torch_dist.get_backend(axis.group))  # a group with several backends: cpu:gloo,cuda:nccl
    by_device = dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair)
    return by_device.get(device.type, names)


def all_gather(output: Tensor, input: Tensor, axis: Axis) -> torch_dist.Work:
    """Start an all-gather: ``output`` becomes the concatenation of ``input`` of all ranks, by rank. Shapes are equal."""
    return _all_gather_into_tensor(output, input, group=axis.group, async_op=True)


def all_to_all(
    output: Tensor, input: Tensor, axis: Axis, received: list[int] | None = None, sent: list[int] | None = None,
) -> torch_dist.Work:  # fmt: skip
    """Start an all-to-all: the r-th chunk of ``input`` goes to rank r; ``output`` holds the received chunks, by rank. Chunks are
    equal, or have the sizes ``received`` and ``sent``."""
    return torch_dist.all_to_all_single(output, input, received, sent, group=axis.group, async_op=True)


class ReduceScatter:
    """An asynchronous reduce-scatter: after ``wait()``, ``output`` of rank r is the sum of the r-th of equal chunks of ``input``.

    gloo's reduce_scatter sends as many bytes as its all_reduce. An all-to-all with a local sum, in rank order, sends half as many.
    """

    def __init__(self, output: Tensor, input: Tensor, axis: Axis) -> None:
        self._output, self._chunks = output, None
        if get_backend(input.device, axis) == "gloo":
            self._chunks = torch.empty_like(input)
            self._work = torch_dist.all_to_all_single(self._chunks, input, group=axis.group, async_op=True)
        else:
            self._work = _reduce_scatter_tensor(output, input, group=axis.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._chunks is not None:
            torch.sum(self._chunks.view(-1, len(self._output)), 0, out=self._output)


def all_reduce_min(value: Tensor, axis: Axis) -> Tensor:
    """All-reduce (min) in place over ``axis``, and return ``value``."""
    if axis.size > 1:
        torch_dist.all_reduce(value, torch_dist.ReduceOp.MIN, group=axis.group)
    return value


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """Return ``value`` of all ranks, by rank. It is pickled: for small trusted objects."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    torch_dist.all_gather_object(values, value, group=axis.group)
    return values


def all_gather_numbers(values: Sequence[float], axis: Axis, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gather K numbers of each rank into a CPU tensor.   [K] -> [ranks, K]"""
    input = torch.tensor([list(values)], dtype=dtype)
    if axis.size == 1:
        return input
    output = input.new_empty((axis.size, input.shape[1]))
    all_gather(output, input, axis).wait()
    return output


def gather_distinct(value: T | None, axis: Axis) -> dict[int, T]:
    """Return the values that are not None, by rank; if they are equal, that of the first such rank only.
    Values are compared by a hash of their ``repr``. Objects are gathered only if they differ."""
    if axis.size == 1:
        return {} if value is None else {0: value}
    missing = value is None
    code = _NONE if missing else hash_text(repr(value))
    # The maximum of x is the complement of the minimum of ~x.
    codes = torch.tensor([code, _NONE if missing else ~code, _NONE if missing else axis.rank, int(not missing)])
    low, high, first, on_all = all_reduce_min(codes, axis).tolist()
    if first == _NONE:
        return {}
    if low != ~high:
        return {rank: item for rank, item in enumerate(all_gather_object(value, axis)) if item is not None}
    common = value if on_all else broadcast_object(value, axis, first)
    assert common is not None
    return {first: common}


_NONE = 2**62


def hash_text(text: str) -> int:
    """Return a hash of 56 bits, the same on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def broadcast_object(value: T, axis: Axis, source: int = 0) -> T:
    """Return ``value`` of the rank ``source``. It is pickled: for small trusted objects."""
    if axis.size == 1:
        return value
    objects = [value]
    torch_dist.broadcast_object_list(objects, group=axis.group, group_src=source)
    return objects[0]


def gather_to_first(value: T, axis: Axis) -> list[T]:
    """Return ``value`` of all ranks, by rank, on the first rank, and an empty list on the others.
    It is pickled: for small trusted objects. The other ranks communicate with the first only."""
    if axis.rank:
        torch_dist.send_object_list([value], group=axis.group, group_dst=0)
        return []
    values = [value]
    for rank in range(1, axis.size):
        torch_dist.recv_object_list(received := [value], group=axis.group, group_src=rank)
        values.append(received[0])
    return values


def broadcast_from_first(function: Callable[[], T], axis: Axis) -> T:
    """Call ``function`` on the first rank, and return its result on all. It is pickled. If it raises, all ranks raise the error."""
    if axis.size == 1:
        return function()
    value, problem = None, None
    if axis.rank == 0:
        try:
            value = function()
        except Exception as error:
            problem = error
    shared = problem if problem is None or isinstance(problem, HpcaiError) else HpcaiError(f"{type(problem).__name__}: {problem}")
    value, shared = broadcast_object((value, shared), axis)
    if shared is not None:
        raise problem or shared
    return value  # type: ignore[return-value]


def gather_rows_to_first(rows: Tensor, axis: Axis) -> Tensor:
    """Concatenate the rows of all ranks, by rank, on the first rank; the others get no rows.   [N_r, ...] -> [sum N_r, ...]

    Rows are sent in chunks, so that other ranks hold no more than their own. From 1 GB on they lie in an unnamed temporary file."""
    counts = all_gather_numbers([len(rows)], axis, torch.int64).flatten().tolist()
    data = rows.contiguous().flatten().view(torch.uint8)
    if axis.rank:
        for chunk in data.split(_CHUNK) if len(data) else ():
            torch_dist.send(chunk, group=axis.group, group_dst=0)
        return rows[:0]
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    size = sum(counts) * row_bytes
    if size < _MMAP_FROM:
        output = torch.empty(size, dtype=torch.uint8)
    else:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            output = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    for rank, shard in enumerate(output.split([count * row_bytes for count in counts])):
        if rank == 0:
            shard.copy_(data)
            continue
        for chunk in shard.split(_CHUNK) if len(shard) else ():
            torch_dist.recv(chunk, group=axis.group, group_src=rank)
    return output.view(rows.dtype).view(sum(counts), *rows.shape[1:])


_CHUNK = 64 << 20  # bytes
_MMAP_FROM = 1 << 30  # bytes from which the rows lie in a file
