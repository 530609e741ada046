"""The time by which `hpcai doctor --ranks` ends, also where a rank is stuck: ranks that lag or do not answer are then named.

It counts from before torch is imported, which takes minutes where a file system is slow, and so imports nothing itself.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcai.dist.watch import Answer

_GRACE = 4.0  # seconds that the other ranks leave rank 0 to report
_ANSWER_TIMEOUT = 1.5  # seconds for an answer
_LIKELY_CAUSES = {
    "imports": "Python's files are read slowly; install to a file system that is fast for many small files, or to each node",
    "meeting": "not all ranks came; look on every node whether its processes run, and for names that one node does not know",
}
"""Likely causes where a rank knows of no other."""


class Deadline:
    """Ends the job ``seconds`` from now unless ``over`` comes first. ``report`` is called on rank 0 with a text about the ranks
    that hold the others up; ``name`` is this rank's, and ``world`` the number of ranks where the launcher tells it."""

    def __init__(self, seconds: float, rank: int, name: str, world: int | None = None) -> None:
        self.seconds, self.rank, self.name, self.world = seconds, rank, name, world
        self.report: Callable[[str], object] = lambda text: None
        self.until = time.monotonic() + seconds
        self._stage, self._number, self._since = "imports", 0, time.monotonic()
        self._cancelled = threading.Event()
        threading.Thread(target=self._wait, name="hpcai-deadline", daemon=True).start()

    def begin(self, stage: str) -> None:
        """This rank begins ``stage``: all ranks begin the same ones in the same order, so the ranks behind are known."""
        self._stage, self._number, self._since = stage, self._number + 1, time.monotonic()

    def status(self) -> str:
        """This rank's answer to rank 0: how many stages it has begun, and the last of them."""
        return f"{self._number} {self._stage} for {time.monotonic() - self._since:.0f} s"

    def remaining(self) -> float:
        """Seconds."""
        return max(0.0, self.until - time.monotonic())

    def cancel(self) -> None:
        self._cancelled.set()

    def _wait(self) -> None:
        if self._cancelled.wait(self.remaining() + (_GRACE if self.rank else 0.0)):
            return
        alone = f"{self.name} is at {self.status().partition(' ')[2]}; "
        alone += _LIKELY_CAUSES.get(self._stage, "rank 0 does not answer; look at its node")
        text = f"not done after {self.seconds:.0f} s: "
        if not self._number:  # the main thread may hold the lock of an import that is needed here
            os.write(2, f"hpcai doctor: {text}{alone}\n".encode())
            os._exit(1)
        from hpcai.dist import watch

        answers = watch.answers(_ANSWER_TIMEOUT) if self.rank == 0 else {}
        text += describe_lagging(answers, self.world) if answers else alone
        with suppress(Exception):  # a page that cannot be made of half of what was asked keeps nobody
            self.report(text)
        watch.end_job(text, f"hpcai doctor: {text}")


def describe_lagging(answers: "Mapping[int, Answer]", world: int | None = None) -> str:
    """Name the ranks of ``world`` that have not met the others, those that do not answer, and those at an earlier stage."""
    from hpcai.dist.host import ranges

    lines = []
    if absent := set(range(world or 0)) - set(answers):
        lines.append(f"rank{'s' * (len(absent) > 1)} {ranges(absent)} did not come; look whether they run, and at their nodes")
    if silent := [answer.name for _, answer in sorted(answers.items()) if answer.doing is None]:
        do = "do" if len(silent) > 1 else "does"
        lines.append(f"{', '.join(silent)} {do} not answer: stopped, or held by a driver or a file system; look at these nodes")
    stages = [(answer.name, *answer.doing.split(" ", 1)) for _, answer in sorted(answers.items()) if answer.doing]
    last = max((int(number) for _, number, _ in stages), default=0)
    behind = [f"{name} is still at {stage}, and the others wait for it" for name, number, stage in stages if int(number) < last]
    lines += behind[:8] + ([f"and {len(behind) - 8} more"] if len(behind) > 8 else [])
    return "; ".join(lines) or f"all ranks are at {stages[0][2]}, and no one lags; give more time (--limit)"
