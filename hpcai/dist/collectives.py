"""Collective operations over an axis of the mesh. Over an axis of size 1 each does nothing."""

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
from hpcai.errors import HpcaiError

T = TypeVar("T")


def all_reduce_(value: Tensor, *axes: Axis) -> Tensor:
    """The sum of ``value`` over the processes of ``axes``, in place."""
    for axis in axes:
        if axis.size > 1:
            torch_dist.all_reduce(value, group=axis.group)
    return value


def all_reduce(value: Tensor, *axes: Axis, identity_backward: bool = False) -> Tensor:
    """The sum of ``value`` over the processes of ``axes``. Its gradients are added over them too, because each process may use it
    for something of its own. ``once``: all processes compute the same from the sum, which counts once; the gradient of a process
    is then that of its own part."""
    axes = tuple(axis for axis in axes if axis.size > 1)
    return _AllReduce.apply(value, axes, identity_backward) if axes else value


class _AllReduce(torch.autograd.Function):
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
    """``value``, which ``ranks`` processes have computed alike: what follows counts once, though each of them computes it."""
    return _SumOnce.apply(value, ranks)


class _SumOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output / ctx.ranks, None


# torch 2.13 has other names for these, and warns of the old ones.
_all_gather_into_tensor = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_tensor = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def get_backend(device: torch.device, axis: Axis) -> str:
    """What carries tensors of ``device`` along ``axis``: nccl or gloo; none where there is one process."""
    if axis.group is None:
        return "none"
    names = str(torch_dist.get_backend(axis.group))  # a group of several backends names all of them: cpu:gloo,cuda:nccl
    by_device = dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair)
    return by_device.get(device.type, names)


def all_gather(output: Tensor, input: Tensor, axis: Axis) -> torch_dist.Work:
    """Begin to fill ``whole`` with the equal shares ``own`` of all ranks of ``axis``, in their order."""
    return _all_gather_into_tensor(output, input, group=axis.group, async_op=True)


def all_to_all(output: Tensor, input: Tensor, axis: Axis) -> torch_dist.Work:
    """Begin to send the r-th of equal pieces of ``outgoing`` to rank r of ``axis``, and to fill ``incoming`` with what comes."""
    return torch_dist.all_to_all_single(output, input, group=axis.group, async_op=True)


class ReduceScatter:
    """A sum under way: once ``wait()`` returns, rank r of ``axis`` has in ``own`` the sum of the r-th of equal pieces of ``whole``.

    gloo's reduce_scatter sends as much as its all_reduce. Pieces that are sent one to one and added in the order of the ranks are
    half as much.
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
    """The smallest ``value`` among the processes of ``axis``, in place."""
    if axis.size > 1:
        torch_dist.all_reduce(value, torch_dist.ReduceOp.MIN, group=axis.group)
    return value


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """``value`` of every process of ``axis``, by rank. Small Python objects of ours only; they are pickled on the way."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    torch_dist.all_gather_object(values, value, group=axis.group)
    return values


def all_gather_numbers(values: Sequence[float], axis: Axis, dtype: torch.dtype = torch.float64) -> Tensor:
    """As many numbers from every process of ``axis``, by rank, on the CPU.   [K] -> [ranks, K]"""
    input = torch.tensor([list(values)], dtype=dtype)
    if axis.size == 1:
        return input
    output = input.new_empty((axis.size, input.shape[1]))
    all_gather(output, input, axis).wait()
    return output


def gather_distinct(value: T | None, axis: Axis) -> dict[int, T]:
    """What the processes of ``axis`` have, by rank, but None: of the first one alone where all others have the same. Only where
    they differ are objects gathered; ``repr`` tells whether they do."""
    if axis.size == 1:
        return {} if value is None else {0: value}
    missing = value is None
    code = _NONE if missing else hash_text(repr(value))
    # The greatest x has the least ~x.
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
    """A number of 56 bits that stands for ``text``, the same on all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def broadcast_object(value: T, axis: Axis, source: int = 0) -> T:
    """``value`` as the process ``source`` of ``axis`` sees it: a small Python object of ours, which is pickled on the way."""
    if axis.size == 1:
        return value
    objects = [value]
    torch_dist.broadcast_object_list(objects, group=axis.group, group_src=source)
    return objects[0]


def gather_to_first(value: T, axis: Axis) -> list[T]:
    """``value`` of every process of ``axis``, by rank, on its first one, and nothing elsewhere: small Python objects of ours, which
    are pickled on the way. Nobody talks but to the first."""
    if axis.rank:
        torch_dist.send_object_list([value], group=axis.group, group_dst=0)
        return []
    values = [value]
    for rank in range(1, axis.size):
        torch_dist.recv_object_list(received := [value], group=axis.group, group_src=rank)
        values.append(received[0])
    return values


def broadcast_from_first(function: Callable[[], T], axis: Axis) -> T:
    """What ``work`` gives on the first process of ``axis``, which does it for all; it is pickled on the way. All of them call this
    together, and where it fails all raise the error."""
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
    """Rows of all processes of ``axis`` in rank order, on its first one, and none elsewhere. They come in pieces, so that no other
    process holds more than its own. Where they are many, they lie in an unnamed temporary file.   [N_r, ...] -> [sum N_r, ...]"""
    counts = all_gather_numbers([len(rows)], axis, torch.int64).flatten().tolist()
    data = rows.contiguous().flatten().view(torch.uint8)
    if axis.rank:
        for chunk in data.split(_CHUNK) if len(data) else ():
            torch_dist.send(chunk, group=axis.group, group_dst=0)
        return rows[:0]
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    output = _allocate(sum(counts) * row_bytes)
    for rank, shard in enumerate(output.split([count * row_bytes for count in counts])):
        if rank == 0:
            shard.copy_(data)
            continue
        for chunk in shard.split(_CHUNK) if len(shard) else ():
            torch_dist.recv(chunk, group=axis.group, group_src=rank)
    return output.view(rows.dtype).view(sum(counts), *rows.shape[1:])


_CHUNK = 64 << 20
_MMAP_FROM = 1 << 30  # bytes from which on rows are kept in a file


def _allocate(size: int) -> Tensor:
    if size < _MMAP_FROM:
        return torch.empty(size, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
