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


def sum_in_place(value: Tensor, *axes: Axis) -> Tensor:
    """The sum of ``value`` over the processes of ``axes``, in place."""
    for axis in axes:
        if axis.size > 1:
            torch_dist.all_reduce(value, group=axis.group)
    return value


def sum_with_adjoint(value: Tensor, *axes: Axis, once: bool = False) -> Tensor:
    """The sum of ``value`` over the processes of ``axes``. Its gradients are added over them too, because each process may use it
    for something of its own. ``once``: all processes compute the same from the sum, which counts once; the gradient of a process
    is then that of its own part."""
    axes = tuple(axis for axis in axes if axis.size > 1)
    return _Sum.apply(value, axes, once) if axes else value


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axes: tuple[Axis, ...], once: bool) -> Tensor:
        ctx.axes, ctx.once = axes, once
        return sum_in_place(value.clone(memory_format=torch.contiguous_format), *axes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.once:
            return gradient, None, None
        return sum_in_place(gradient.clone(memory_format=torch.contiguous_format), *ctx.axes), None, None


def once(value: Tensor, ranks: int) -> Tensor:
    """``value``, which ``ranks`` processes have computed alike: what follows counts once, though each of them computes it."""
    return _Once.apply(value, ranks)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.ranks, None


# torch 2.13 has other names for these, and warns of the old ones.
_gather_into = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_scatter_sum = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def backend(device: torch.device, axis: Axis) -> str:
    """What carries tensors of ``device`` along ``axis``: nccl or gloo; none where there is one process."""
    if axis.group is None:
        return "none"
    names = str(torch_dist.get_backend(axis.group))  # a group of several backends names all of them: cpu:gloo,cuda:nccl
    of_device = dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair)
    return of_device.get(device.type, names)


def gather_shares(whole: Tensor, own: Tensor, axis: Axis) -> torch_dist.Work:
    """Begin to fill ``whole`` with the equal shares ``own`` of all ranks of ``axis``, in their order."""
    return _gather_into(whole, own, group=axis.group, async_op=True)


def swap_shares(incoming: Tensor, outgoing: Tensor, axis: Axis) -> torch_dist.Work:
    """Begin to send the r-th of equal pieces of ``outgoing`` to rank r of ``axis``, and to fill ``incoming`` with what comes."""
    return torch_dist.all_to_all_single(incoming, outgoing, group=axis.group, async_op=True)


class Scattered:
    """A sum under way: once ``wait()`` returns, rank r of ``axis`` has in ``own`` the sum of the r-th of equal pieces of ``whole``.

    gloo's reduce_scatter sends as much as its all_reduce. Pieces that are sent one to one and added in the order of the ranks are
    half as much.
    """

    def __init__(self, own: Tensor, whole: Tensor, axis: Axis) -> None:
        self._own, self._pieces = own, None
        if backend(whole.device, axis) == "gloo":
            self._pieces = torch.empty_like(whole)
            self._work = torch_dist.all_to_all_single(self._pieces, whole, group=axis.group, async_op=True)
        else:
            self._work = _scatter_sum(own, whole, group=axis.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._pieces is not None:
            torch.sum(self._pieces.view(-1, len(self._own)), 0, out=self._own)


def least(value: Tensor, axis: Axis) -> Tensor:
    """The smallest ``value`` among the processes of ``axis``, in place."""
    if axis.size > 1:
        torch_dist.all_reduce(value, torch_dist.ReduceOp.MIN, group=axis.group)
    return value


def gather_objects(value: T, axis: Axis) -> list[T]:
    """``value`` of every process of ``axis``, by rank. Small Python objects of ours only; they are pickled on the way."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    torch_dist.all_gather_object(values, value, group=axis.group)
    return values


def gather_numbers(values: Sequence[float], axis: Axis, dtype: torch.dtype = torch.float64) -> Tensor:
    """As many numbers from every process of ``axis``, by rank, on the CPU.   [K] -> [ranks, K]"""
    own = torch.tensor([list(values)], dtype=dtype)
    if axis.size == 1:
        return own
    whole = own.new_empty((axis.size, own.shape[1]))
    gather_shares(whole, own, axis).wait()
    return whole


def distinct(value: T | None, axis: Axis) -> dict[int, T]:
    """What the processes of ``axis`` have, by rank, but None: of the first one alone where all others have the same. Only where
    they differ are objects gathered; ``repr`` tells whether they do."""
    if axis.size == 1:
        return {} if value is None else {0: value}
    lacks = value is None
    own = _NONE if lacks else digest(repr(value))
    # The greatest x has the least ~x.
    seen = torch.tensor([own, _NONE if lacks else ~own, _NONE if lacks else axis.rank, int(not lacks)])
    low, high, first, all_have = least(seen, axis).tolist()
    if first == _NONE:
        return {}
    if low != ~high:
        return {rank: each for rank, each in enumerate(gather_objects(value, axis)) if each is not None}
    found = value if all_have else agree(value, axis, first)
    assert found is not None
    return {first: found}


_NONE = 2**62


def digest(text: str) -> int:
    """A number of 56 bits that stands for ``text``, the same on all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def agree(value: T, axis: Axis, source: int = 0) -> T:
    """``value`` as the process ``source`` of ``axis`` sees it: a small Python object of ours, which is pickled on the way."""
    if axis.size == 1:
        return value
    box = [value]
    torch_dist.broadcast_object_list(box, group=axis.group, group_src=source)
    return box[0]


def to_first(value: T, axis: Axis) -> list[T]:
    """``value`` of every process of ``axis``, by rank, on its first one, and nothing elsewhere: small Python objects of ours, which
    are pickled on the way. Nobody talks but to the first."""
    if axis.rank:
        torch_dist.send_object_list([value], group=axis.group, group_dst=0)
        return []
    values = [value]
    for rank in range(1, axis.size):
        torch_dist.recv_object_list(box := [value], group=axis.group, group_src=rank)
        values.append(box[0])
    return values


def by_first(work: Callable[[], T], axis: Axis) -> T:
    """What ``work`` gives on the first process of ``axis``, which does it for all; it is pickled on the way. All of them call this
    together, and where it fails all raise the error."""
    if axis.size == 1:
        return work()
    value, problem = None, None
    if axis.rank == 0:
        try:
            value = work()
        except Exception as error:
            problem = error
    told = problem if problem is None or isinstance(problem, HpcaiError) else HpcaiError(f"{type(problem).__name__}: {problem}")
    value, told = agree((value, told), axis)
    if told is not None:
        raise problem or told
    return value  # type: ignore[return-value]


def rows_to_first(own: Tensor, axis: Axis) -> Tensor:
    """Rows of all processes of ``axis`` in rank order, on its first one, and none elsewhere. They come in pieces, so that no other
    process holds more than its own. Where they are many, they lie in an unnamed temporary file.   [N_r, ...] -> [sum N_r, ...]"""
    counts = gather_numbers([len(own)], axis, torch.int64).flatten().tolist()
    raw = own.contiguous().flatten().view(torch.uint8)
    if axis.rank:
        for piece in raw.split(_PIECE) if len(raw) else ():
            torch_dist.send(piece, group=axis.group, group_dst=0)
        return own[:0]
    of_row = own.dtype.itemsize * math.prod(own.shape[1:])
    whole = _room(sum(counts) * of_row)
    for rank, part in enumerate(whole.split([count * of_row for count in counts])):
        if rank == 0:
            part.copy_(raw)
            continue
        for piece in part.split(_PIECE) if len(part) else ():
            torch_dist.recv(piece, group=axis.group, group_src=rank)
    return whole.view(own.dtype).view(sum(counts), *own.shape[1:])


_PIECE = 64 << 20
_MAPPED = 1 << 30  # bytes from which on rows are kept in a file


def _room(size: int) -> Tensor:
    if size < _MAPPED:
        return torch.empty(size, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
