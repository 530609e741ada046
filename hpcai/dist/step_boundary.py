"""A step after which all ranks stop, on request of one. There is no communication before a request."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcai import stop

NEVER = 1 << 62
"""The step of a rank that has left the boundary, and the step to stop at before a request."""


class StepBoundary:
    """A point in the loop of the main thread of every rank, such as the end of a step, at which all ranks can stop together.

    After a request the hub queries the step of every rank, and each rank holds at its boundary. All then stop at the step after the
    largest one. The watchdog's thread answers, also while the main thread is in a collective. ``send(request=...)`` sends a request
    to the hub.
    """

    def __init__(self, send: Callable[..., object], alone: bool) -> None:
        self.reason = ""  # the signal, and its rank
        self._send, self._alone = send, alone
        self._steps, self._stop = 0, NEVER
        self._held, self._request, self._requested = False, "", False
        self._changed = threading.Condition()

    @contextmanager
    def on_signals(self) -> Iterator["StepBoundary"]:
        """Context manager: ``stop.SIGNALS`` request a stop. Afterwards this rank takes no further steps."""
        with stop.on_signal(self.request_stop):
            try:
                yield self
            finally:
                self.leave()

    def request_stop(self, reason: str) -> None:
        """Request a stop at the next step of this rank."""
        self._request = reason

    def should_stop(self) -> bool:
        """Count a step, and return whether all ranks stop after it."""
        if self._request and not self._requested:
            self._requested = True
            if self._alone:
                self.reason = self._request
                return True
            self._send(request=self._request)
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._steps += 1
            return self._steps >= self._stop

    def leave(self) -> None:
        """Take no further steps on this rank."""
        with self._changed:
            self._steps = NEVER

    def hold(self) -> int:
        """Block the next step until ``set_stop``, and return the number of steps."""
        with self._changed:
            self._held = True
            return self._steps

    def set_stop(self, step: int, reason: str) -> None:
        """Stop after ``step``, counted from 1."""
        with self._changed:
            self._held, self._stop, self.reason = False, step, reason
            self._changed.notify_all()
