"""Samples prepared ahead of their use, by workers, within a budget of bytes; a late one holds up no other."""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcai.errors import DataError, HpcaiError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """Sample ``index``, wanted at ``position`` of the order of ``epoch``."""

    epoch: int
    position: int
    index: int


class Ready(NamedTuple):
    task: Task
    sample: Any


class Ahead:
    """Workers prepare tasks in their order; ``take`` hands out what is ready, lowest position first.

    ``prepare(task, worker)`` -> (sample, bytes) is called from ``workers`` threads. A task is begun while the samples that are
    held or under way stay within ``budget`` bytes, and always while they are fewer than ``least``. The first exception of a
    worker is raised by ``take``; so is DataError when nothing has become ready for ``patience`` seconds.
    """

    def __init__(
        self, prepare: Callable[[Task, int], tuple[Any, int]], *, name: str, workers: int, budget: int, least: int,
        patience: float = 600.0,
    ) -> None:  # fmt: skip
        self._prepare, self._name, self._budget = prepare, name, budget
        self._least, self._patience = max(least, 1), patience
        self._change = threading.Condition()
        self._feeds: deque[Iterator[Task]] = deque()
        self._next: Task | None = None
        self._urgent: set[tuple[int, int]] = set()
        self._busy: dict[tuple[int, int], tuple[Task, float]] = {}
        self._heap: list[tuple[int, int]] = []
        self._held: dict[tuple[int, int], tuple[Ready, int]] = {}
        self._bytes = self._largest = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def feed(self, tasks: Iterable[Task]) -> None:
        """Add tasks after those that were fed before. Epochs and positions rise."""
        with self._change:
            self._feeds.append(iter(tasks))
            self._change.notify_all()

    def take(self, epoch: int, count: int, positions: Sequence[int] | None = None, wait: bool = True) -> list[Ready] | None:
        """``count`` samples of ``epoch``: those that are ready with the lowest positions, or those at ``positions``.

        Waits until they are ready; without ``wait`` gives None instead. Each is given once.
        """
        keys = None if positions is None else [(epoch, position) for position in positions]
        with self._change:
            if keys is not None and wait:
                self._urgent.update(key for key in keys if key not in self._held and key not in self._busy)
                self._change.notify_all()
            began = time.monotonic()
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise RuntimeError(f"{self._name}: the epoch was left")
                found = self._lowest(epoch, count) if keys is None else keys if all(k in self._held for k in keys) else None
                if found is not None:
                    return self._give(found)
                if not wait:
                    return None
                self._wait(began)

    def close(self) -> None:
        """Let workers end after what they are at; nothing more is given."""
        with self._change:
            self._closed = True
            self._held.clear()
            self._heap.clear()
            self._change.notify_all()
        until = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))  # one that hangs in a dead file system ends with this process

    # ---- under the lock

    def _lowest(self, epoch: int, count: int) -> list[tuple[int, int]] | None:
        found: list[tuple[int, int]] = []
        while self._heap and len(found) < count:
            key = heapq.heappop(self._heap)
            if key in self._held:  # otherwise it was taken by its position
                found.append(key)
        if len(found) == count and all(key[0] == epoch for key in found):
            return found
        for key in found:
            heapq.heappush(self._heap, key)
        return None

    def _give(self, keys: Sequence[tuple[int, int]]) -> list[Ready]:
        given = []
        for key in keys:
            ready, size = self._held.pop(key)
            self._bytes -= size
            given.append(ready)
        self._urgent.difference_update(keys)
        self._change.notify_all()
        return given

    def _wait(self, began: float) -> None:
        if not (self._busy or self._feeds or self._next):
            raise RuntimeError(f"{self._name}: more samples are taken than were fed")
        left = max(self._changed, began) + self._patience - time.monotonic()
        if left <= 0:
            at = [f"index {task.index} for {time.monotonic() - since:.0f} s" for task, since in self._busy.values()]
            raise DataError(
                f"{self._name}: no sample has become ready for {self._patience:.0f} s; workers are at "
                f"{', '.join(at[:4]) or 'nothing'}: does the file system hang? Raise data.patience if samples may take that long"
            )
        self._change.wait(min(left, 1.0))

    def _begin(self) -> Task | None:
        """The next task, if there is one and the budget allows it."""
        if self._closed or self._failure is not None:
            return None
        if self._next is None:
            while self._feeds and self._next is None:
                self._next = next(self._feeds[0], None)
                if self._next is None:
                    self._feeds.popleft()
        task = self._next
        if task is None:
            return None
        count = len(self._held) + len(self._busy)
        # A sample that is wanted now and was not begun yet lies behind others that fill the budget.
        if count >= self._least and not self._urgent and self._bytes + (len(self._busy) + 1) * self._largest > self._budget:
            return None
        if count >= self._least and self._largest == 0 and len(self._busy) >= len(self._threads):
            return None
        self._next = None
        key = (task.epoch, task.position)
        self._urgent.discard(key)
        self._busy[key] = (task, time.monotonic())
        return task

    # ---- workers

    def _work(self, number: int) -> None:
        while True:
            with self._change:
                while (task := self._begin()) is None:
                    if self._closed:
                        return
                    self._change.wait()
            key = (task.epoch, task.position)
            try:
                sample, size = self._prepare(task, number)
            except BaseException as problem:
                with self._change:
                    self._busy.pop(key)
                    self._failure = self._failure or self._named(problem, task)
                    self._change.notify_all()
                del problem
                continue
            with self._change:
                self._busy.pop(key)
                self._changed = time.monotonic()
                if not self._closed:
                    self._held[key] = (Ready(task, sample), size)
                    heapq.heappush(self._heap, key)
                    self._bytes += size
                    self._largest = max(self._largest, size)
                self._change.notify_all()
            del sample  # otherwise it is held until the next one is there

    def _named(self, problem: BaseException, task: Task) -> BaseException:
        if isinstance(problem, HpcaiError):
            return problem
        named = DataError(f"{self._name}: index {task.index} cannot be prepared ({type(problem).__name__}: {problem})")
        named.__cause__ = problem
        return named
