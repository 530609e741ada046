"""Prepare each sample on one rank of a model-parallel group and scatter it to the others."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.data.direct import MemoryPool
from hpcai.data.pickling import buffer_offsets, flatten
from hpcai.data.prefetch import PrefetchQueue, Ready, Task
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError, HpcaiError


class ScatteredLoader:
    """Distributes the preparation of samples over the ranks of ``channel``, each of which receives all samples.

    Sample ``slot`` of the local batch ``number`` is prepared by rank (number + slot) % size. Each sample is two broadcasts: a
    header of four integers, and bytes. ``take`` runs in a thread of its own, in the same order on all ranks. ``rank``: that of the
    job, for messages. ``pin``: A GPU; received samples are in memory pinned for it.
    """

    def __init__(self, channel: Axis, rank: int, pin: torch.device | None = None) -> None:
        self._channel, self._rank = channel, rank
        self._memory = MemoryPool(pin=pin)

    def is_local(self, number: int, slot: int) -> bool:
        """Whether this rank prepares the sample."""
        return (number + slot) % self._channel.size == self._channel.rank

    def take(self, queue: PrefetchQueue, tasks: Sequence[Task], number: int, task_at: Callable[[int], Task] | None) -> list[Ready]:
        """Return the samples of ``tasks``, a local batch, the same on all ranks. In ready order (``task_at`` maps a position to its
        task) each rank sends those of its samples that are ready. If a rank cannot prepare its sample, it raises its own exception,
        and the others raise DataError."""
        local_positions = [task.position for slot, task in enumerate(tasks) if self.is_local(number, slot)]
        failure: BaseException | None = None
        local_samples: Iterator[Ready] = iter(())
        try:
            if local_positions:
                local_samples = iter(queue.take(tasks[0].epoch, len(local_positions), None if task_at else local_positions) or ())
        except BaseException as problem:  # the other ranks wait for a header
            failure = problem
        samples: list[Ready] = []
        for slot, task in enumerate(tasks):
            if self.is_local(number, slot):
                samples.append(self._broadcast_own(local_samples, failure))
            else:
                position, sample = self._receive((number + slot) % self._channel.size)
                samples.append(Ready(task_at(position) if task_at else task, sample))
        return samples

    def _broadcast_own(self, local_samples: Iterator[Ready], failure: BaseException | None) -> Ready:
        try:
            if failure is not None:
                raise failure
            ready = next(local_samples)
            try:
                stream, buffers = flatten(ready.sample)
            except Exception as problem:
                reason = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
                raise DataError(f"a sample cannot be sent ({reason}); set data.scatter to false") from problem
            header = pickle.dumps((stream, [len(buffer) for buffer in buffers]))
            parts: list[bytes | memoryview] = [header, *buffers]
            offsets = buffer_offsets([len(part) for part in parts])
            content = self._memory.allocate(offsets[-1])
            for offset, part in zip(offsets, parts):
                content[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
        except BaseException as problem:
            text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
            content = np.frombuffer(bytearray(f"rank {self._rank} has no sample to send: {text}".encode()), np.uint8)
            self._send([1, 0, 0, len(content)], content)
            raise
        self._send([0, ready.task.position, len(header), len(content)], content)
        return ready

    def _send(self, header: list[int], content: np.ndarray) -> None:
        self._broadcast(torch.tensor(header), self._channel.rank)
        self._broadcast(torch.from_numpy(content), self._channel.rank)

    def _receive(self, source: int) -> tuple[int, Any]:
        header = torch.zeros(4, dtype=torch.int64)
        self._broadcast(header, source)
        failed, position, header_size, size = header.tolist()
        content = self._memory.allocate(size)
        self._broadcast(torch.from_numpy(content), source)
        if failed:
            raise DataError(content.tobytes().decode())
        return position, _unpack(content, header_size)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        torch_dist.broadcast(tensor, group=self._channel.group, group_src=source)


def _unpack(content: np.ndarray, header_size: int) -> Any:
    """Return the sample. Its arrays are views of ``content``."""
    stream, lengths = pickle.loads(content[:header_size].data)  # noqa: S301  (from our own process)
    offsets = buffer_offsets([header_size, *lengths])[1:]
    return pickle.loads(stream, buffers=[content[start : start + n] for start, n in zip(offsets, lengths)])  # noqa: S301
