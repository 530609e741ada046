"""Prefetching of samples by worker threads, within a budget of bytes. A straggler delays no other sample."""

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
    """Sample ``index``, at ``position`` in the order of ``epoch``."""

    epoch: int
    position: int
    index: int


class Ready(NamedTuple):
    task: Task
    sample: Any


class PrefetchQueue:
    """A prefetching queue: worker threads prepare tasks in order, and ``take`` returns finished samples, lowest position first.

    ``workers`` threads call ``prepare(task, worker) -> (sample, bytes)``. A task starts while ready and running samples stay within
    ``budget`` bytes, and always if they are fewer than ``min_samples``. ``take`` raises the first exception of a worker, and
    DataError if no sample was finished for ``patience`` seconds.
    """

    def __init__(
        self, prepare: Callable[[Task, int], tuple[Any, int]], *, name: str, workers: int, budget: int, min_samples: int,
        patience: float = 600.0,
    ) -> None:  # fmt: skip
        self._prepare, self._name, self._budget = prepare, name, budget
        self._minimum, self._patience = max(min_samples, 1), patience
        self._condition = threading.Condition()
        self._feeds: deque[Iterator[Task]] = deque()
        self._upcoming: Task | None = None
        self._urgent: set[tuple[int, int]] = set()
        self._running: dict[tuple[int, int], tuple[Task, float]] = {}
        self._heap: list[tuple[int, int]] = []
        self._ready: dict[tuple[int, int], tuple[Ready, int]] = {}
        self._bytes = self._largest = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._last_progress = 0.0
        self._threads = [
            threading.Thread(target=self._worker_loop, args=(k,), name=f"{name}-{k}", daemon=True) for k in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def feed(self, tasks: Iterable[Task]) -> None:
        """Append tasks. Epochs and positions must increase."""
        with self._condition:
            self._feeds.append(iter(tasks))
            self._condition.notify_all()

    def take(self, epoch: int, count: int, positions: Sequence[int] | None = None, wait: bool = True) -> list[Ready] | None:
        """Remove and return ``count`` samples of ``epoch``: the ready ones with the lowest positions, or those at ``positions``.
        Wait until they are ready, or, if not ``wait``, return None instead."""
        keys = None if positions is None else [(epoch, position) for position in positions]
        with self._condition:
            if keys is not None and wait:
                self._urgent.update(key for key in keys if key not in self._ready and key not in self._running)
                self._condition.notify_all()
            start = time.monotonic()
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise RuntimeError(f"{self._name}: the epoch was closed")
                ready = self._pop_lowest(epoch, count) if keys is None else keys if all(k in self._ready for k in keys) else None
                if ready is not None:
                    taken = [self._ready.pop(key) for key in ready]
                    self._bytes -= sum(size for _, size in taken)
                    self._urgent.difference_update(ready)
                    self._condition.notify_all()
                    return [sample for sample, _ in taken]
                if not wait:
                    return None
                self._wait(start)

    def close(self) -> None:
        """Stop the workers after their current tasks, and discard all samples."""
        with self._condition:
            self._closed = True
            self._ready.clear()
            self._heap.clear()
            self._condition.notify_all()
        until = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))  # a thread stuck in a dead file system ends with this process

    # ---- with the lock held

    def _pop_lowest(self, epoch: int, count: int) -> list[tuple[int, int]] | None:
        keys: list[tuple[int, int]] = []
        while self._heap and len(keys) < count:
            key = heapq.heappop(self._heap)
            if key in self._ready:  # otherwise taken by position
                keys.append(key)
        if len(keys) == count and all(key[0] == epoch for key in keys):
            return keys
        for key in keys:
            heapq.heappush(self._heap, key)
        return None

    def _wait(self, start: float) -> None:
        if not (self._running or self._feeds or self._upcoming):
            raise RuntimeError(f"{self._name}: more samples are requested than tasks were fed")
        left = max(self._last_progress, start) + self._patience - time.monotonic()
        if left <= 0:
            running = [f"index {task.index} for {time.monotonic() - since:.0f} s" for task, since in self._running.values()]
            raise DataError(
                f"{self._name}: no sample has become ready for {self._patience:.0f} s; workers are at "
                f"{', '.join(running[:4]) or 'nothing'}: does the file system hang? Raise data.patience if samples take that long"
            )
        self._condition.wait(min(left, 1.0))

    def _next_task(self) -> Task | None:
        """Return the next task, or None if there is none or the budget is exhausted."""
        if self._closed or self._failure is not None:
            return None
        while self._feeds and self._upcoming is None:
            self._upcoming = next(self._feeds[0], None)
            if self._upcoming is None:
                self._feeds.popleft()
        task = self._upcoming
        if task is None:
            return None
        count = len(self._ready) + len(self._running)
        # An urgent sample (requested, but not started) may be queued behind others that fill the budget.
        if count >= self._minimum and not self._urgent and self._bytes + (len(self._running) + 1) * self._largest > self._budget:
            return None
        if count >= self._minimum and self._largest == 0 and len(self._running) >= len(self._threads):
            return None
        self._upcoming = None
        key = (task.epoch, task.position)
        self._urgent.discard(key)
        self._running[key] = (task, time.monotonic())
        return task

    # ---- workers

    def _worker_loop(self, number: int) -> None:
        while True:
            with self._condition:
                while (task := self._next_task()) is None:
                    if self._closed:
                        return
                    self._condition.wait()
            key = (task.epoch, task.position)
            try:
                sample, size = self._prepare(task, number)
            except BaseException as problem:
                error: BaseException = problem
                if not isinstance(problem, HpcaiError):
                    text = f"index {task.index} cannot be prepared ({type(problem).__name__}: {problem})"
                    error = DataError(f"{self._name}: {text}")
                    error.__cause__ = problem
                with self._condition:
                    self._running.pop(key)
                    self._failure = self._failure or error
                    self._condition.notify_all()
                del problem, error
                continue
            with self._condition:
                self._running.pop(key)
                self._last_progress = time.monotonic()
                if not self._closed:
                    self._ready[key] = (Ready(task, sample), size)
                    heapq.heappush(self._heap, key)
                    self._bytes += size
                    self._largest = max(self._largest, size)
                self._condition.notify_all()
            del sample  # otherwise kept until the next one is ready
