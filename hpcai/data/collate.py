"""Collation of samples to a batch on the device, overlapped with the computation of the previous batch."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.data.direct import MemoryPool


class Prepared(NamedTuple):
    """A batch, the event that marks it as complete on the device, and the samples, which must stay alive until then."""

    batch: Any
    ready: torch.cuda.Event | None
    samples: Sequence[Any]


class Collator:
    """Stacks samples to a batch on ``device``, or collates them by ``collate``.

    On a GPU each sample is copied from the memory that it was read to into the batch, on a separate stream. The host does not
    wait, and the samples are kept until the copies are done. On a CPU a batch of one sample is a view of it.
    """

    def __init__(self, device: torch.device, name: str, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self.device, self._collate = device, collate
        self._memory_pool = MemoryPool()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, f"collate-{name}", set_device, (device,))
        self._in_flight: deque[Prepared] = deque()

    def submit(self, take: "Callable[[], tuple[Any, list[Any]]]") -> "Future[tuple[Any, Prepared]]":
        """Collate a batch in the thread of the collator. ``take() -> (info, samples)`` waits for the samples."""

        def prepare() -> tuple[Any, Prepared]:
            info, samples = take()
            return info, self._prepare(samples)

        return self._pool.submit(prepare)

    def wait(self, prepared: Prepared) -> Any:
        """Return the batch, or None if it has no sample. The current stream waits for it."""
        if prepared.ready is None:
            return prepared.batch
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(prepared.ready)
        tree_map(prepared.batch, lambda tensor: tensor.record_stream(stream))
        self._in_flight.append(prepared._replace(batch=None))
        while self._in_flight[0].ready.query() and len(self._in_flight) > 1:  # type: ignore[union-attr]
            self._in_flight.popleft()
        return prepared.batch

    def close(self) -> None:
        self._pool.shutdown(wait=True)  # no job is cancelled: the other ranks of a replica wait for each
        if self._stream is not None:
            self._stream.synchronize()
        self._in_flight.clear()

    def _prepare(self, samples: list[Any]) -> Prepared:
        if not samples:
            return Prepared(None, None, ())
        if self._stream is None:
            return Prepared(self._collate(samples) if self._collate else tree_zip(samples, self._stack), None, ())
        host = tree_map(self._collate(samples), Tensor.pin_memory) if self._collate else None
        with torch.cuda.stream(self._stream):
            if host is None:
                batch = tree_zip(samples, self._upload)
            else:
                batch = tree_map(host, lambda tensor: tensor.to(self.device, non_blocking=True))
            done = torch.cuda.Event()
            done.record()
        return Prepared(batch, done, samples if host is None else (host,))

    def _stack(self, values: list[Any]) -> Tensor:
        if isinstance(values[0], Tensor):
            return torch.stack(values)
        arrays = [np.asarray(value) for value in values]
        if len(arrays) == 1 and arrays[0].flags.c_contiguous and arrays[0].flags.writeable:
            return torch.from_numpy(arrays[0][None])
        size = sum(array.nbytes for array in arrays)
        out = self._memory_pool.allocate(size)[:size].view(arrays[0].dtype).reshape(len(arrays), *arrays[0].shape)
        return torch.from_numpy(np.stack(arrays, out=out))

    def _upload(self, values: list[Any]) -> Tensor:
        parts = [value if isinstance(value, Tensor) else torch.from_numpy(_writable(value)) for value in values]
        batch = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device=self.device)
        for slot, part in zip(batch, parts):
            slot.copy_(part, non_blocking=True)
        return batch


def set_device(device: torch.device) -> None:
    """Set the current GPU of this thread. It starts with GPU 0, where pinning memory would create another context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _writable(value: Any) -> np.ndarray:
    """Return the array in row-major order and marked as writable, as torch.from_numpy expects. Nothing writes to it."""
    array = np.asarray(value, order="C")
    if array.flags.writeable:
        return array
    raw = (ctypes.c_char * max(array.nbytes, 1)).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(raw), array.dtype, array.size).reshape(array.shape)


def tree_map(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to all leaves of a tree of dicts, lists, tuples and named tuples. None is no leaf."""
    return tree_zip([tree], lambda leaves: function(leaves[0]))


def tree_zip(trees: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Return a tree whose leaves are ``function`` of the list of corresponding leaves. None stays None."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: tree_zip([tree[key] for tree in trees], function) for key in first}
    if isinstance(first, list | tuple):
        parts = [tree_zip([tree[i] for tree in trees], function) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return function(list(trees))


def tree_bytes(tree: Any) -> int:
    sizes: list[int] = []
    tree_map(tree, lambda leaf: sizes.append(getattr(leaf, "nbytes", 64)))
    return sum(sizes)
