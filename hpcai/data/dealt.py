"""Samples of a cut copy of a model, each made by one of its processes and sent to the others."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.data.ahead import Ahead, Ready, Task
from hpcai.data.assemble import tree_map
from hpcai.data.direct import Memory
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError, HpcaiError

_ALIGN = 64  # bytes; a cache line, and what torch wants


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What arrays, tensors or numbers of samples are, but for their shapes. ``order`` is that of their dims in memory, so that
    they come to others as they lie."""

    kind: Literal["tensor", "array", "scalar", "number"]
    dtype: Any  # torch's or numpy's
    order: tuple[int, ...]

    def made(self, content: np.ndarray, shape: Sequence[int]) -> Any:
        """A leaf of the bytes ``content``; ``shape`` in the order of memory."""
        back = tuple(np.argsort(self.order))
        if self.kind == "tensor":
            return torch.from_numpy(content).view(self.dtype).reshape(*shape).permute(back)
        array = content.view(self.dtype).reshape(shape).transpose(back)
        return array if self.kind == "array" else array[()] if self.kind == "scalar" else array.item()


def _leaf(value: Any) -> tuple[_Leaf, Sequence[int], np.ndarray]:
    """What ``value`` is, its shape in the order of memory, and its bytes."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        order = _order(value.stride())
        tensor = value.detach().permute(order).contiguous().resolve_conj().resolve_neg()
        return _Leaf("tensor", value.dtype, order), tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy()
    array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)) else None
    if array is None or array.dtype.hasobject:
        kind = f"{type(value).__name__} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"a sample holds a {kind}; expected arrays, CPU tensors, numbers, texts or None; set data.once to false")
    single: Literal["scalar", "number"] = "scalar" if isinstance(value, np.generic) else "number"
    array = array.transpose(order := _order(array.strides))
    leaf = _Leaf("array" if isinstance(value, np.ndarray) else single, array.dtype, order)
    return leaf, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda dim: -abs(strides[dim])))


def _room(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class Dealt:
    """Sample ``place`` of a copy's part of batch ``number`` is made by process (number + place) % size of ``channel``.

    A thread of its own calls ``take``, on all processes in the same order. Each sample is two broadcasts: four numbers, and bytes
    (shapes and values; the tree of a sample only where it is another one than that of the sample before). ``rank`` of the job is
    for messages; ``pin``: a GPU, and what comes is put where it can fetch it.
    """

    def __init__(self, channel: Axis, rank: int, pin: torch.device | None = None) -> None:
        self._channel, self._rank = channel, rank
        self._memory = Memory(pin=pin)
        self._trees: dict[int, Any] = {}  # by process, of what it sent last

    def makes(self, number: int, place: int) -> bool:
        """Whether this process makes that sample."""
        return self._maker(number, place) == self._channel.rank

    def _maker(self, number: int, place: int) -> int:
        return (number + place) % self._channel.size

    def take(self, ahead: Ahead, tasks: Sequence[Task], number: int, task_at: Callable[[int], Task] | None) -> list[Ready]:
        """The samples of ``tasks``, this copy's part of a batch; of all processes alike. In ready order (``task_at`` tells the
        task of a position) each process gives those of its own that are ready. Where one cannot give its sample all raise: it its
        own exception, the others DataError."""
        own = [task.position for place, task in enumerate(tasks) if self.makes(number, place)]
        failure: BaseException | None = None
        mine: Iterator[Ready] = iter(())
        try:
            if own:
                mine = iter(ahead.take(tasks[0].epoch, len(own), None if task_at else own) or ())
        except BaseException as problem:  # the others wait for its word
            failure = problem
        found: list[Ready] = []
        for place, task in enumerate(tasks):
            maker = self._maker(number, place)
            if maker == self._channel.rank:
                found.append(self._give(mine, failure))
            else:
                position, sample = self._receive(maker)
                found.append(Ready(task_at(position) if task_at else task, sample))
        return found

    def _give(self, mine: Iterator[Ready], failure: BaseException | None) -> Ready:
        try:
            if failure is not None:
                raise failure
            ready = next(mine)
            told, content = self._packed(ready.sample)
        except BaseException as problem:
            text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
            content = np.frombuffer(bytearray(f"rank {self._rank} has no sample to send: {text}".encode()), np.uint8)
            self._send([1, 0, 0, len(content)], content)
            raise
        self._send([0, ready.task.position, told, len(content)], content)
        return ready

    def _send(self, head: list[int], content: np.ndarray) -> None:
        self._broadcast(torch.tensor(head), self._channel.rank)
        self._broadcast(torch.from_numpy(content), self._channel.rank)

    def _receive(self, maker: int) -> tuple[int, Any]:
        head = torch.zeros(4, dtype=torch.int64)
        self._broadcast(head, maker)
        failed, position, told, size = head.tolist()
        content = self._memory.take(size)
        self._broadcast(torch.from_numpy(content), maker)
        if failed:
            raise DataError(content.tobytes().decode())
        return position, self._unpacked(content, told, maker)

    def _broadcast(self, value: Tensor, maker: int) -> None:
        torch_dist.broadcast(value, group=self._channel.group, group_src=maker)

    # ---- a sample as bytes

    def _packed(self, sample: Any) -> tuple[int, np.ndarray]:
        """How many bytes tell the tree, and all bytes: tree, shapes, values."""
        shapes: list[int] = []
        values: list[np.ndarray] = []

        def told_of(value: Any) -> Any:
            if value is None or isinstance(value, str):
                return value
            leaf, shape, content = _leaf(value)
            shapes.extend(shape)
            values.append(content)
            return leaf

        tree, me = tree_map(sample, told_of), self._channel.rank
        told = b"" if me in self._trees and tree == self._trees[me] else pickle.dumps(tree)
        self._trees[me] = tree
        parts = [np.frombuffer(told, np.uint8), np.array(shapes, np.int64).view(np.uint8), *values]
        content, at = self._memory.take(max(sum(_room(len(part)) for part in parts), 1)), 0
        for part in parts:
            content[at : at + len(part)] = part
            at += _room(len(part))
        return len(told), content

    def _unpacked(self, content: np.ndarray, told: int, maker: int) -> Any:
        if told:
            self._trees[maker] = pickle.loads(content[:told].tobytes())  # noqa: S301  (from our own process)
        tree, leaves = self._trees[maker], list[_Leaf]()
        tree_map(tree, lambda leaf: leaves.append(leaf) if isinstance(leaf, _Leaf) else None)
        at, dims = _room(told), sum(len(leaf.order) for leaf in leaves)
        sizes = iter(content[at : at + 8 * dims].view(np.int64).tolist())
        at += _room(8 * dims)

        def value(leaf: Any) -> Any:
            nonlocal at
            if not isinstance(leaf, _Leaf):
                return leaf
            shape = list(islice(sizes, len(leaf.order)))
            first, size = at, prod(shape) * leaf.dtype.itemsize
            at += _room(size)
            return leaf.made(content[first : first + size], shape)

        return tree_map(tree, value)
