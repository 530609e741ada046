"""Batches on the device, read ahead by threads, in an order that any number of processes shares."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcai.data.sampler import order, share
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError


class Source(Protocol):
    """Samples by index. ``batch`` is called from several threads."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray, epoch: int) -> Any:
        """Tensors on the CPU, stacked, in tuples, named tuples or dicts."""

    def describe(self, index: int) -> str:
        """Where a sample lies, for people."""


class Loader:
    """Batches of ``source`` for one process of the mesh.

    ``batch`` counts samples over all copies of the model: the same settings train the same way on any number of processes.
    ``whole`` drops the last batch of an epoch when it is not full, so that all copies take equal parts; otherwise (evaluation)
    every sample is delivered exactly once, in parts that may be uneven. Raises DataError when a batch does not divide.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, *, name: str, seed: int = 0, shuffle: bool = True, whole: bool = True,
        accumulate: int = 1, threads: int = 2, ahead: int = 4,
    ) -> None:  # fmt: skip
        self.source, self.size, self.name, self.device = source, batch, name, mesh.device
        self.copies = mesh["replicate"]
        self._whole, self._threads, self._ahead = whole, threads, ahead
        parts = self.copies.size * accumulate
        if whole and batch % parts:
            raise DataError(
                f"{name}: a batch of {batch} samples does not divide by {self.copies.size} copies x {accumulate} micro-batches; "
                f"give a multiple of {parts}"
            )
        if whole and len(source) < batch:
            raise DataError(f"{name}: {len(source)} samples are fewer than one batch of {batch}; make more data or lower the batch")
        if len(source) < self.copies.size:
            raise DataError(
                f"{name}: {len(source)} samples for {self.copies.size} processes; make more data or start fewer processes"
            )
        self._order: Callable[[int], np.ndarray] = lru_cache(2)(lambda epoch: order(len(source), seed, epoch, shuffle))

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.source) // self.size if self._whole else -(-len(self.source) // self.size)

    @property
    def samples(self) -> int:
        """Samples that an epoch delivers, over all processes."""
        return len(self) * self.size if self._whole else len(self.source)

    def indices(self, epoch: int, first: int) -> np.ndarray:
        """Samples that this process reads for the batch that begins at position ``first`` of ``epoch``."""
        return share(self._order(epoch)[first : first + self.size], self.copies.rank, self.copies.size)

    def describe(self, epoch: int, first: int) -> str:
        names = [self.source.describe(int(index)) for index in self.indices(epoch, first)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Batches of ``epoch`` from position ``first`` on; a part without samples (a small last one) is left out."""
        end = len(self.source) - (self.size - 1 if self._whole else 0)
        starts = iter(s for s in range(first, end, self.size) if len(self.indices(epoch, s)))
        reading: deque[Future] = deque()
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"read-{self.name}")
        try:
            while True:
                while len(reading) < self._ahead and (start := next(starts, None)) is not None:
                    reading.append(pool.submit(self._read, epoch, start))
                if not reading:
                    return
                yield _move(reading.popleft().result(), self.device)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, epoch: int, first: int) -> Any:
        batch = self.source.batch(self.indices(epoch, first), epoch)
        return _pin(batch) if self.device.type == "cuda" else batch


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: _map(value, change) for key, value in batch.items()}
    parts = [_map(value, change) for value in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _pin(batch: Any) -> Any:
    return _map(batch, torch.Tensor.pin_memory)


def _move(batch: Any, device: torch.device) -> Any:
    return batch if device.type == "cpu" else _map(batch, lambda tensor: tensor.to(device, non_blocking=True))
