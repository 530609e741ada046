"""Waits for other processes: signals are handled meanwhile, and a long wait is reported."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

FIRST_REPORT, NEXT_REPORT = 10.0, 60.0  # seconds until the first message of a wait, and between the further ones


def wait_until(is_done: Callable[[float], object], describe: Callable[[], str] | None, timeout: float) -> bool:
    """Call ``is_done(seconds)``, which waits so long, until it returns a true value; return False after ``timeout`` seconds.

    Between the calls the main thread handles signals. ``describe``: Returns the text of reports, "waiting for ..."; None for none.
    """
    start, due = time.monotonic(), FIRST_REPORT
    while not is_done(0.2):
        waited = time.monotonic() - start
        if waited > timeout:
            return False
        if waited >= due and describe is not None:
            due += NEXT_REPORT
            sys.stderr.write(f"waiting for {describe()} since {waited:.0f} s\n")
            sys.stderr.flush()
    return True


def call_in_thread(function: Callable[[], T], describe: Callable[[], str]) -> T:
    """Return ``function()``. It runs in a thread, since a call in C++ would delay the signals of the main thread until its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="hpcai-wait", daemon=True)
    thread.start()
    wait_until(lambda seconds: wait([future], seconds).done, describe, threading.TIMEOUT_MAX)
    return future.result()
