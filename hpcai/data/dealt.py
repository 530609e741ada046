"""Samples of a cut copy of a model, each made by one of its processes and sent to the others."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.data.ahead import Ahead, Ready, Task
from hpcai.data.direct import Memory
from hpcai.data.pickling import flatten, starts
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError, HpcaiError


class Dealt:
    """Sample ``place`` of a copy's part of batch ``number`` is made by process (number + place) % size of ``channel``.

    A thread of its own calls ``take``, on all processes in the same order. Each sample is two broadcasts: four numbers, and bytes.
    ``rank`` of the job is for messages; ``pin``: a GPU, and what comes is put where it can fetch it.
    """

    def __init__(self, channel: Axis, rank: int, pin: torch.device | None = None) -> None:
        self._channel, self._rank = channel, rank
        self._memory = Memory(pin=pin)

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
            head, content = self._packed(ready.sample)
        except BaseException as problem:
            text = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
            content = np.frombuffer(bytearray(f"rank {self._rank} has no sample to send: {text}".encode()), np.uint8)
            self._send([1, 0, 0, len(content)], content)
            raise
        self._send([0, ready.task.position, head, len(content)], content)
        return ready

    def _send(self, head: list[int], content: np.ndarray) -> None:
        self._broadcast(torch.tensor(head), self._channel.rank)
        self._broadcast(torch.from_numpy(content), self._channel.rank)

    def _receive(self, maker: int) -> tuple[int, Any]:
        head = torch.zeros(4, dtype=torch.int64)
        self._broadcast(head, maker)
        failed, position, first, size = head.tolist()
        content = self._memory.take(size)
        self._broadcast(torch.from_numpy(content), maker)
        if failed:
            raise DataError(content.tobytes().decode())
        return position, _unpacked(content, first)

    def _broadcast(self, value: Tensor, maker: int) -> None:
        torch_dist.broadcast(value, group=self._channel.group, group_src=maker)

    def _packed(self, sample: Any) -> tuple[int, np.ndarray]:
        """The bytes of a sample: of a head of so many with its pickle and the lengths of its buffers, then of these."""
        try:
            stream, buffers = flatten(sample)
        except Exception as problem:
            why = str(problem) if isinstance(problem, HpcaiError) else f"{type(problem).__name__}: {problem}"
            raise DataError(f"a sample cannot be sent ({why}); set data.once to false") from problem
        head = pickle.dumps((stream, [len(buffer) for buffer in buffers]))
        parts: list[bytes | memoryview] = [head, *buffers]
        places = starts([len(part) for part in parts])
        content = self._memory.take(places[-1])
        for place, part in zip(places, parts):
            content[place : place + len(part)] = np.frombuffer(part, np.uint8)
        return len(head), content


def _unpacked(content: np.ndarray, first: int) -> Any:
    """The sample of ``content``, whose arrays stay there."""
    stream, lengths = pickle.loads(content[:first].data)  # noqa: S301  (from our own process)
    places = starts([first, *lengths])[1:]
    return pickle.loads(stream, buffers=[content[at : at + n] for at, n in zip(places, lengths)])  # noqa: S301
