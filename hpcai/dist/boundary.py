"""Where all ranks stop together once one of them asks, without a message before it does."""

import threading
from collections.abc import Callable

PAST = 1 << 62
"""How often a rank has passed a boundary that it has left for good."""


class Boundary:
    """A place that the main thread of every rank passes again and again, such as the end of a step.

    When a rank asks, the hub asks all of them how often each has passed. Who has answered passes no more until it hears at which
    pass all stop: the next one after the farthest. A rank answers in the thread that listens to the hub, so that one whose main
    thread waits for another rank, in a collective, answers all the same. ``tell(asked=...)`` says to the hub that this rank asks.
    """

    def __init__(self, tell: Callable[..., object], alone: bool) -> None:
        self.by = ""  # which signal, on which rank
        self._tell, self._alone = tell, alone
        self._passed, self._stop = 0, PAST
        self._held = self._asked = False
        self._changed = threading.Condition()

    def passed(self, asked: str | None) -> bool:
        """Pass once more -> whether all ranks stop here; ``asked`` says why this one wants to."""
        if asked is not None and not self._asked:
            self._asked = True
            if self._alone:
                self.by = asked
                return True
            self._tell(asked=asked)
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            self._passed += 1
            return self._passed >= self._stop

    def left(self) -> None:
        """This rank passes no more."""
        with self._changed:
            self._passed = PAST

    def hold(self) -> int:
        """Let the rank pass no more -> how often it has passed."""
        with self._changed:
            self._held = True
            return self._passed

    def agreed(self, stop: int, by: str) -> None:
        """All ranks stop at the pass ``stop``, counted from 1."""
        with self._changed:
            self._held, self._stop, self.by = False, stop, by
            self._changed.notify_all()
