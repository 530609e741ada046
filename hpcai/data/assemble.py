"""Samples become a batch on the device, one batch ahead of its use, while the last one is computed with."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.data.direct import Memory


class Made(NamedTuple):
    """A batch; the event after which it is there on the device; and the samples, which must live until then."""

    batch: Any
    done: torch.cuda.Event | None
    samples: Sequence[Any]


class Assembler:
    """Stacks samples (or joins them by ``collate``) on ``device``.

    On a GPU each sample is copied from where it was read to its place in the batch, on a stream of its own; the host never
    waits, and the memory of the samples is kept until the copies are done. On the CPU a batch of one is its sample, uncopied.
    """

    def __init__(self, device: torch.device, name: str, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.device, self._collate = device, collate
        self._memory = Memory()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, f"assemble-{name}", take_device, (device,))
        self._in_flight: deque[Made] = deque()

    def begin(self, take: "Callable[[], tuple[Any, list[Any]]]") -> "Future[tuple[Any, Made]]":
        """Begin a batch in a thread, where ``take`` -> (what is to be known of the samples, samples) waits for them."""

        def work() -> tuple[Any, Made]:
            about, samples = take()
            return about, self._assemble(samples)

        return self._pool.submit(work)

    def finish(self, made: Made) -> Any:
        """The batch, in order with what the caller does next on the device. None when there was no sample."""
        if made.done is None:
            return made.batch
        here = torch.cuda.current_stream(self.device)
        here.wait_event(made.done)
        tree_map(made.batch, lambda tensor: tensor.record_stream(here))
        self._in_flight.append(made._replace(batch=None))
        while self._in_flight[0].done.query() and len(self._in_flight) > 1:  # type: ignore[union-attr]
            self._in_flight.popleft()
        return made.batch

    def close(self) -> None:
        self._pool.shutdown(wait=True)  # none is left out: in ready order the other processes of a copy wait for each
        if self._stream is not None:
            self._stream.synchronize()
        self._in_flight.clear()

    def _assemble(self, samples: list[Any]) -> Made:
        if not samples:
            return Made(None, None, ())
        if self._stream is None:
            return Made(self._collate(samples) if self._collate else tree_zip(samples, self._stack), None, ())
        host = tree_map(self._collate(samples), Tensor.pin_memory) if self._collate else None
        with torch.cuda.stream(self._stream):
            if host is None:
                batch = tree_zip(samples, self._upload)
            else:
                batch = tree_map(host, lambda tensor: tensor.to(self.device, non_blocking=True))
            done = torch.cuda.Event()
            done.record()
        return Made(batch, done, samples if host is None else (host,))

    def _stack(self, values: list[Any]) -> Tensor:
        if isinstance(values[0], Tensor):
            return torch.stack(values)
        arrays = [np.asarray(value) for value in values]
        if len(arrays) == 1 and arrays[0].flags.c_contiguous and arrays[0].flags.writeable:
            return torch.from_numpy(arrays[0][None])
        size = sum(array.nbytes for array in arrays)
        place = self._memory.take(size)[:size].view(arrays[0].dtype).reshape(len(arrays), *arrays[0].shape)
        return torch.from_numpy(np.stack(arrays, out=place))

    def _upload(self, values: list[Any]) -> Tensor:
        parts = [value if isinstance(value, Tensor) else torch.from_numpy(_readable(value)) for value in values]
        whole = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device=self.device)
        for place, part in zip(whole, parts):
            place.copy_(part, non_blocking=True)
        return whole


def take_device(device: torch.device) -> None:
    """Make a GPU that of this thread: a thread begins with the first of the node, where all that it pins would open a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _readable(value: Any) -> np.ndarray:
    """The array in row-major order and marked as writable, since torch warns of others. Nothing writes to it."""
    array = np.asarray(value, order="C")
    if array.flags.writeable:
        return array
    raw = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(raw), array.dtype, array.size).reshape(array.shape)


def tree_map(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree of dicts, lists, tuples and named tuples with ``change`` of every leaf; None is no leaf."""
    return tree_zip([tree], lambda leaves: change(leaves[0]))


def tree_zip(trees: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """One tree; each leaf is ``join`` of the leaves that all trees have there, and None where they have none."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: tree_zip([tree[key] for tree in trees], join) for key in first}
    if isinstance(first, list | tuple):
        parts = [tree_zip([tree[i] for tree in trees], join) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return join(list(trees))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays and tensors of a tree."""
    sizes: list[int] = []
    tree_map(tree, lambda leaf: sizes.append(getattr(leaf, "nbytes", 64)))
    return sum(sizes)
