"""Waits for other processes: a long one is reported, and signals end it, also within a call in C++, which delays their handlers."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from hpcai import stop

FIRST_REPORT, NEXT_REPORT = 10.0, 60.0  # seconds until the first report of a wait, and between the further ones


class _Heartbeat:
    """Counts of finished steps and batches of evaluations. It is global, since a process has one run at a time."""

    beats = 0
    attended = False  # a person is at the terminal: no wait is reported, and the main thread handles signals
    pauses = 0  # above 0 while this rank waits for ranks with watchdogs of their own


HEARTBEAT = _Heartbeat()


class _Wait:
    """A wait of the main thread; ``lost``: whether a rank does not answer."""

    def __init__(self, place: Callable[[], str], is_work: bool) -> None:
        self.place, self.is_work, self.signal = place, is_work, 0
        self.restart()

    def restart(self) -> None:
        self.start, self.beats, self.reports, self.lost = time.monotonic(), HEARTBEAT.beats, 0, False


_waits: list[_Wait] = []  # of the main thread, the innermost last
_monitors: list[threading.Thread] = []


class Handlers(NamedTuple):
    """Functions of the watchdog, which imports this module.

    ``report(seconds)``: Reports a wait, and returns whether a rank does not answer. ``end(text, report, code)``: Ends the job.
    """

    report: Callable[[float], bool]
    end: Callable[[str, str, int], NoReturn]


handlers: list[Handlers] = []


@contextmanager
def waiting_at(place: str | Callable[[], str], is_work: bool = False) -> Iterator[None]:
    """Context manager around calls of the main thread that wait for others. After ten seconds without a step a thread reports the
    wait. It ends the job by a signal that the main thread cannot handle: before training begins at once, later if it has reported.

    ``place``: The name of the wait; without one only a rank that does not answer is reported, or a long start. ``is_work``: The
    ranks may be at work, which a signal should not interrupt: it ends the wait only if a rank does not answer.
    """
    if not handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    if not (_monitors and _monitors[-1].is_alive()):  # it does not survive a fork
        _monitors[:] = [threading.Thread(target=_monitor, name="hpcai-waits", daemon=True)]
        _monitors[-1].start()
    _waits.append(_Wait(place if callable(place) else lambda: place, is_work))
    try:
        yield
    finally:
        _waits.pop()
        for outer in _waits[-1:]:
            outer.restart()


def describe_main_thread() -> str:
    """Return the named wait of the main thread, or its location."""
    place = _waits[-1].place() if _waits else ""
    return f"at {place}" if place else f"in {location(sys._current_frames()[threading.main_thread().ident or 0])}"


def location(frame: FrameType) -> str:
    """Return the innermost function of a stack, and the innermost one of this project that called it."""
    stack = traceback.extract_stack(frame)[::-1]
    texts = [f"{f.name} ({'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}: {f.line})" for f in stack]
    foreign = ("site-packages", "dist-packages", os.path.dirname(threading.__file__))
    ours = [text for f, text in zip(stack[1:], texts[1:]) if not any(place in f.filename for place in foreign)]
    return ", called by ".join([texts[0], *ours[:1]])


def _monitor() -> None:
    wait: _Wait | None = None
    while True:
        number = stop.receive_signal(0.1 if wait and wait.signal else min(0.5, FIRST_REPORT / 4))
        wait, now = next(iter(_waits[-1:]), None), time.monotonic()
        if wait is None or HEARTBEAT.attended:
            continue
        if wait.signal and (stop.is_starting() or (wait.lost if wait.is_work else wait.reports)):
            place, code = wait.place(), 130 if wait.signal == signal.SIGINT else stop.REQUEUE
            text = f"{signal.Signals(wait.signal).name} ended the wait{place and f' at {place}'}"
            handlers[0].end(text, text, code)
        wait.signal = wait.signal or number
        if wait.beats != HEARTBEAT.beats:
            wait.restart()
        elif now - wait.start >= FIRST_REPORT + NEXT_REPORT * wait.reports:
            wait.reports += 1
            with suppress(RuntimeError, TimeoutError):  # the hub has ended
                wait.lost = handlers[0].report(now - wait.start)
