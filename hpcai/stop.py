"""The signals with which a scheduler asks a run to stop, from the first line of the run to its last.

Before training begins there is nothing to save: the run leaves at once with exit code 85, which means "start me again". While it
trains a signal is noted, and all processes stop at the same step with a checkpoint and that code. From then on signals change
nothing: a second one would otherwise replace the exit code by its own.

A reader of stdout that has gone asks for an end, too (``show_to_reader``).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

REQUEUE = 85
"""Exit code of a run that was asked to stop, saved what it had and wants to be started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def _set_handler(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(REQUEUE)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Around a whole run: a signal that comes before ``noting`` ends it, one that comes after changes nothing."""
    _set_handler(_exit)
    try:
        yield
    finally:
        _set_handler(signal.SIG_IGN)  # Python would put back the default, which ends a process, before it has left


@contextmanager
def on_signal(callback: Callable[[str], object]) -> Iterator[None]:
    """Inside, ``note`` is called with a signal's name. Afterwards signals are ignored within ``heard``, and otherwise, as in a
    notebook, do what they did before.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _set_handler(lambda number, frame: callback(signal.Signals(number).name))
    try:
        yield
    finally:
        nested = before[signal.SIGTERM] is _exit
        for number, handler in before.items():
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_IGN if nested else handler)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Inside, a first Ctrl-C waits until the end, so that what is being written is whole; a second one does not."""
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
    """What ``write`` gives, which writes to stdout; None where its reader has seen enough (``| head``), which is no error."""
    try:
        result = write()
        sys.stdout.flush()
        return result
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
