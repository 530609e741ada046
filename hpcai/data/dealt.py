"""Samples of a cut copy of a model, each made by one of its processes and sent to the others."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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
    """What arrays, tensors or numbers of a sample are, but for their shapes."""

    make: Callable[[np.ndarray, Any, tuple[int, ...]], Any]
    dtype: Any  # numpy's, or torch's
    dims: int


class Dealt:
    """Sample ``place`` of a copy's part of batch ``number`` is made by process (number + place) % size of ``channel``.

    A thread of its own calls ``take``, on all processes in the same order. Each sample is two broadcasts: four numbers, and bytes
    (shapes and values; the tree of a sample only where it is another one than that of the sample before). ``rank`` of the job is
    for messages; ``pin``: what comes is put where a GPU can fetch it.
    """

    def __init__(self, channel: Axis, rank: int, pin: bool = False) -> None:
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
            head = [0, ready.task.position, told, len(content)]
        except BaseException as problem:
            text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
            content = np.frombuffer(bytearray(f"rank {self._rank} has no sample to send: {text}".encode()), np.uint8)
            self._broadcast(torch.tensor([1, 0, 0, len(content)]), self._channel.rank)
            self._broadcast(torch.from_numpy(content), self._channel.rank)
            raise
        self._broadcast(torch.tensor(head), self._channel.rank)
        self._broadcast(torch.from_numpy(content), self._channel.rank)
        return ready

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
        arrays: list[np.ndarray] = []
        shapes: list[int] = []

        def leaf(value: Any) -> Any:
            if value is None or isinstance(value, str):
                return value
            known, array = _known(value)
            arrays.append(array)
            shapes.extend(np.shape(value))
            return known

        tree = tree_map(sample, leaf)
        told = b"" if (tree,) == (self._trees.get(self._channel.rank),) else pickle.dumps(tree)
        self._trees[self._channel.rank] = tree
        parts = [np.frombuffer(told, np.uint8), np.array(shapes, np.int64).view(np.uint8), *arrays]
        content, at = self._memory.take(max(sum(_room(len(part)) for part in parts), 1)), 0
        for part in parts:
            content[at : at + len(part)] = part
            at += _room(len(part))
        return len(told), content

    def _unpacked(self, content: np.ndarray, told: int, maker: int) -> Any:
        if told:
            self._trees[maker] = pickle.loads(content[:told].tobytes())  # noqa: S301  (from our own process)
        tree, at, dims = self._trees.get(maker), _room(told), 0

        def count(known: Any) -> None:
            nonlocal dims
            dims += known.dims if isinstance(known, _Leaf) else 0

        tree_map(tree, count)
        shapes = iter(content[at : at + 8 * dims].view(np.int64).tolist())
        at += _room(8 * dims)

        def leaf(known: Any) -> Any:
            nonlocal at
            if not isinstance(known, _Leaf):
                return known
            shape = tuple(next(shapes) for _ in range(known.dims))
            raw = content[at : at + prod(shape) * known.dtype.itemsize]
            at += _room(len(raw))
            return known.make(raw, known.dtype, shape)

        return tree_map(tree, leaf)


def _room(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _known(value: Any) -> tuple[_Leaf, np.ndarray]:
    """What a leaf is, and its bytes."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return _Leaf(_tensor, value.dtype, value.ndim), flat.numpy()
    array = value if isinstance(value, np.ndarray) else np.asarray(value) if isinstance(value, _NUMBERS) else None
    if array is None or array.dtype.hasobject:
        kind = f"{type(value).__name__} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"a sample holds a {kind}; expected arrays, CPU tensors, numbers, texts or None; set data.once to false")
    make = _array if array is value else _scalar if isinstance(value, np.generic) else _number
    return _Leaf(make, array.dtype, array.ndim), np.ascontiguousarray(array).reshape(-1).view(np.uint8)


_NUMBERS = (np.generic, bool, int, float, complex)


def _array(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return raw.view(dtype).reshape(shape)


def _scalar(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    return raw.view(dtype)[0]


def _number(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    return raw.view(dtype)[0].item()


def _tensor(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape)
