"""Signals with which a user or a scheduler stops a run or another command.

Before training there is nothing to save: the run exits at once with code 85, a request for a restart. During training the signal is
recorded, and all processes stop after the same step, with a checkpoint and this code. Afterwards signals are ignored: a second one
would replace the exit code. Ctrl-C ends a run, and each of these signals another command, with one line (``end_in_one_line``). A
closed stdout (``ignore_broken_pipe``) also ends the output.
"""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], object] | signal.Handlers

REQUEUE = 85
"""Exit code of a run that was stopped by a signal, has saved its state and should be restarted."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command which is no training."""

_RANKS = ("RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")


def _set_handler(handler: Handler, numbers: Sequence[int] = SIGNALS) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in numbers:  # nohup ignores SIGHUP, and a shell's script SIGINT in the background
            if number not in (signal.SIGHUP, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)


class Interrupted(KeyboardInterrupt):
    """A signal ends this process, with exit code ``code``. Of KeyboardInterrupt itself Python would make an end by SIGINT."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        self.number, self.code, self.time = number, code, time.monotonic()


_first: list[Interrupted] = []  # the first signal that ends this process
_printed: list[str] = []  # the line about it


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, it is not inherited by programs that this process starts."""


def _exit(number: int, frame: FrameType | None) -> None:
    _first.append(Interrupted(number, REQUEUE))
    raise SystemExit(REQUEUE)


def _print_end(name: str, advice: str, end: Interrupted) -> None:
    """Write the line of an interrupted command, on one process of a job, also where Python's streams are in use."""
    _printed.append(f"{name}: interrupted by {end}{advice and f'; {advice}'}\n")
    if all(os.environ.get(rank, "0") == "0" for rank in _RANKS):
        os.write(2, _printed[-1].encode())


@contextmanager
def end_in_one_line(name: str, advice: str = "", numbers: Sequence[int] = ENDING) -> Iterator[None]:
    """Context manager around a program, which the signals ``numbers`` interrupt: it ends with one line, of ``name`` and how to go
    on (``advice``, or the last note of the exception), and with exit code 128 + number. SIGUSR1 and SIGUSR2 are ignored.

    The exception that ends it need not be KeyboardInterrupt: modules in C++ that are being imported turn it into others. A second
    signal, a second later, ends the process at once. Handlers are not restored, since the program ends.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        end = Interrupted(number, 128 + number)
        if not _first:
            _first.append(end)
            raise end
        if end.time - _first[0].time > 1:  # launchers repeat the signal of a terminal
            _print_end(name, advice, end)
            os._exit(end.code)

    def repeat(unraisable: Any) -> None:
        """Repeat an interruption that Python cannot raise, in a finalizer."""
        if not isinstance(unraisable.exc_value, Interrupted):
            sys.__unraisablehook__(unraisable)
        elif not _printed:
            threading.Timer(0.05, os.kill, (os.getpid(), _first.pop().number)).start()

    _first.clear()
    _printed.clear()
    sys.unraisablehook = repeat
    _set_handler(signal.SIG_IGN, (signal.SIGUSR1, signal.SIGUSR2))
    _set_handler(interrupt, numbers)
    notes: Sequence[str] = ()
    try:
        yield
    except BaseException as error:
        if _printed or not (_first or isinstance(error, KeyboardInterrupt)):
            raise
        notes = getattr(error, "__notes__", ())
        if not _first:
            _first.append(Interrupted(signal.SIGINT, 128 + signal.SIGINT))
    finally:
        if not _first:
            _set_handler(signal.SIG_DFL, numbers)
    if _first and not _printed:
        end = _first[0]
        restart = "the same command starts it again" if end.code == REQUEUE else ""
        _print_end(name, [restart, advice, *notes][-1] or restart, end)
        raise SystemExit(end.code)


def interrupt_imports(package: str) -> None:
    """Have Ctrl-C end this program in one line while ``python -m PACKAGE.NAME`` imports its modules: the package calls it."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _print_end(name, "", Interrupted(number, 0))
        os._exit(128 + number)  # a module that is being imported could turn an exception into another

    name = next((word for word in sys.orig_argv if word.startswith(f"{package}.")), package)
    if sys.argv[:1] == ["-m"] or Path(sys.argv[0]).name == package:
        _set_handler(interrupt, (signal.SIGINT,))


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
        _received[:] = os.pipe()
        os.set_blocking(_received[1], False)
        signal.set_wakeup_fd(_received[1], warn_on_full_buffer=False)
        atexit.register(_set_handler, signal.SIG_IGN)  # Python would restore the default handler, which ends the process
    _set_handler(_exit)
    try:
        yield
    finally:
        _set_handler(_ignore)


@contextmanager
def on_signal(callback: Callable[[str], object]) -> Iterator[None]:
    """Context manager that calls ``callback`` with the name of a signal. Afterwards signals are ignored within ``exit_on_signal``;
    otherwise, as in a notebook, the previous handlers are restored.
    """
    before = {number: _ignore if is_starting() else signal.getsignal(number) for number in SIGNALS}
    _set_handler(lambda number, frame: callback(signal.Signals(number).name))
    try:
        yield
    finally:
        for number, previous in before.items():
            _set_handler(previous, (number,))  # type: ignore[arg-type]


@contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Context manager that defers a first Ctrl-C to its end, so that files are complete; a second one interrupts. A caller that
    clears the list, which has the first one, has obeyed it."""
    pending: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if pending and callable(before):
            before(number, frame)
        pending.append(number)

    installed = threading.current_thread() is threading.main_thread() and callable(before)
    if installed:
        signal.signal(signal.SIGINT, handle)
    try:
        yield pending
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
