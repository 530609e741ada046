"""Where all ranks stop together once one of them asks, without a message before it does."""

import threading
from collections.abc import Callable

NEVER = 1 << 62
"""How often a rank has passed a boundary that it has left for good."""


class StepBoundary:
    """A place that the main thread of every rank passes again and again, such as the end of a step.

    When a rank asks, the hub asks all of them how often each has passed. Who has answered passes no more until it hears at which
    pass all stop: the next one after the farthest. A rank answers in the thread that listens to the hub, so that one whose main
    thread waits for another rank, in a collective, answers all the same. ``tell(asked=...)`` says to the hub that this rank asks.
    """

    def __init__(self, send: Callable[..., object], alone: bool) -> None:
        self.reason = ""  # which signal, on which rank
        self._send, self._alone = send, alone
        self._steps, self._stop = 0, NEVER
        self._held = self._requested = False
        self._changed = threading.Condition()

    def should_stop(self, request: str | None) -> bool:
        """Pass once more -> whether all ranks stop here; ``asked`` says why this one wants to."""
        if request is not None and not self._requested:
            self._requested = True
            if self._alone:
                self.reason = request
                return True
            self._send(request=request)
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._steps += 1
            return self._steps >= self._stop

    def leave(self) -> None:
        """This rank passes no more."""
        with self._changed:
            self._steps = NEVER

    def hold(self) -> int:
        """Let the rank pass no more -> how often it has passed."""
        with self._changed:
            self._held = True
            return self._steps

    def set_stop(self, step: int, reason: str) -> None:
        """All ranks stop at the pass ``stop``, counted from 1."""
        with self._changed:
            self._held, self._stop, self.reason = False, step, reason
            self._changed.notify_all()
