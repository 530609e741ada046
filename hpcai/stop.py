"""Signals with which a scheduler stops a run.

Before training there is nothing to save: the run exits at once with code 85, a request for a restart. During training the signal is
recorded, and all processes stop after the same step, with a checkpoint and this code. Afterwards signals are ignored: a second one
would replace the exit code. A closed stdout (``ignore_broken_pipe``) also ends the output.
"""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], object] | signal.Handlers

REQUEUE = 85
"""Exit code of a run that was stopped by a signal, has saved its state and should be restarted."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _set_handler(handler: Handler, numbers: Sequence[int] = SIGNALS) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(REQUEUE)


def is_starting() -> bool:
    """Whether a signal ends this run at once, since its training has not begun."""
    return signal.getsignal(signal.SIGTERM) is _exit


_received: list[int] = []  # both ends of a pipe of signal numbers
os.register_at_fork(after_in_child=_received.clear)


def receive_signal(timeout: float) -> int:
    """Return the number of a signal that reaches this run within ``timeout`` seconds, otherwise 0. It is for a thread: handlers run
    in the main thread, after its call in C++."""
    if not _received:
        time.sleep(timeout)
    return os.read(_received[0], 1)[0] if _received and select.select(_received[:1], (), (), timeout)[0] else 0


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Context manager around a run: a signal before ``on_signal`` exits with ``REQUEUE``; one afterwards is ignored."""
    if not _received and threading.current_thread() is threading.main_thread():
        _received[:] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(_received[1], warn_on_full_buffer=False)
        atexit.register(_set_handler, signal.SIG_IGN)  # Python would restore the default handler, which ends the process
    _set_handler(_exit)
    try:
        yield
    finally:
        _set_handler(lambda number, frame: None)


@contextmanager
def _handled_by(handler: Handler, numbers: Sequence[int], afterwards: Handler | None = None) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in numbers}
    _set_handler(handler, numbers)
    try:
        yield
    finally:
        for number, previous in before.items():
            _set_handler(afterwards or previous, (number,))  # type: ignore[arg-type]


def on_signal(callback: Callable[[str], object]) -> AbstractContextManager[None]:
    """Context manager that calls ``callback`` with the name of a signal. Afterwards signals are ignored within ``exit_on_signal``;
    otherwise, as in a notebook, the previous handlers are restored.
    """
    afterwards = (lambda number, frame: None) if is_starting() else None
    return _handled_by(lambda number, frame: callback(signal.Signals(number).name), SIGNALS, afterwards)


def interrupt_on_signal() -> AbstractContextManager[None]:
    """Context manager in which SIGTERM and SIGHUP raise KeyboardInterrupt, with their number."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    return _handled_by(interrupt, (signal.SIGTERM, signal.SIGHUP))


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Context manager that defers a first Ctrl-C to its end, so that files are complete; a second one interrupts."""
    pending = False
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending and callable(before):
            before(number, frame)
        pending = True

    installed = threading.current_thread() is threading.main_thread() and callable(before)
    if installed:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if installed:
            signal.signal(signal.SIGINT, before)
            if pending:
                signal.raise_signal(signal.SIGINT)


def ignore_broken_pipe(write: Callable[[], Result]) -> Result | None:
    """Return the result of ``write``, which writes to stdout, or None if the reader has closed the pipe (``| head``)."""
    try:
        result = write()
        sys.stdout.flush()
        return result
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
