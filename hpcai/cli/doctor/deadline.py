"""The time limit of `hpcai doctor --ranks`, enforced even if a rank hangs: stragglers and unresponsive ranks are then named.

It starts before the import of torch, which takes minutes on a slow file system, so this module imports nothing slow.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcai.dist.watchdog import Member

_GRACE = 4.0  # seconds that other ranks give rank 0 to report
_ANSWER_TIMEOUT = 1.5  # seconds to wait for a reply
_LIKELY_CAUSES = {
    "imports": "Python's files are read slowly; install to a file system that is fast for many small files, or on each node",
    "meeting": "not all ranks connected; check on every node whether its processes run, and whether it resolves all host names",
}
"""Likely causes if a rank has no connection to others."""


class Deadline:
    """Terminates the job after ``seconds`` unless ``cancel`` is called. ``report`` is called on rank 0 with a text about the ranks
    that block the others; ``name`` is the name of this rank, and ``world`` the number of ranks if the launcher provides it."""

    def __init__(self, seconds: float, rank: int, name: str, world: int | None = None) -> None:
        self.seconds, self.rank, self.name, self.world = seconds, rank, name, world
        self.report: Callable[[str], object] = lambda text: None
        self.until = time.monotonic() + seconds
        self._stage, self._number, self._since = "imports", 0, time.monotonic()
        self._cancelled = threading.Event()
        self.cancel = self._cancelled.set
        threading.Thread(target=self._wait, name="hpcai-deadline", daemon=True).start()

    def begin(self, stage: str) -> None:
        """Begin ``stage``. All ranks have the same stages in the same order, so that the ranks behind can be determined."""
        self._stage, self._number, self._since = stage, self._number + 1, time.monotonic()

    def status(self) -> str:
        """Return the status that this rank sends to rank 0: the number of stages begun, and the current one."""
        return f"{self._number} {self._stage} for {time.monotonic() - self._since:.0f} s"

    def remaining(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _wait(self) -> None:
        if self._cancelled.wait(self.remaining() + (_GRACE if self.rank else 0.0)):
            return
        cause = f"{self.name} is at {self.status().partition(' ')[2]}; "
        cause += _LIKELY_CAUSES.get(self._stage, "rank 0 does not respond; check its node")
        text = f"not done after {self.seconds:.0f} s: "
        if not self._number:  # the main thread may hold the import lock needed below
            os.write(2, f"hpcai doctor: {text}{cause}\n".encode())
            os._exit(1)
        from hpcai.dist import watchdog

        answers = watchdog.query_status(_ANSWER_TIMEOUT) if self.rank == 0 else {}
        text += describe_lagging(answers, self.world) if answers else cause
        with suppress(Exception):  # an incomplete report may fail; the job ends anyway
            self.report(text)
        watchdog.abort_job(text, f"hpcai doctor: {text}")


def describe_lagging(answers: "Mapping[int, Member]", world: int | None = None) -> str:
    """Describe the ranks of ``world`` that have not connected, the unresponsive ones, and those at an earlier stage."""
    from hpcai.dist.host import format_ranges

    lines = []
    if absent := set(range(world or 0)) - set(answers):
        lines.append(f"rank{'s' * (len(absent) > 1)} {format_ranges(absent)} did not connect; check their processes and nodes")
    if silent := [answer.name for _, answer in sorted(answers.items()) if answer.status is None]:
        verb = "do" if len(silent) > 1 else "does"
        lines.append(f"{', '.join(silent)} {verb} not respond: stopped, or blocked by a driver or a file system; check these nodes")
    stages = [(answer.name, *answer.status.split(" ", 1)) for _, answer in sorted(answers.items()) if answer.status]
    latest = max((int(number) for _, number, _ in stages), default=0)
    behind = [f"{name} is still at {stage}, and the others wait for it" for name, number, stage in stages if int(number) < latest]
    lines += behind[:8] + ([f"and {len(behind) - 8} more"] if len(behind) > 8 else [])
    return "; ".join(lines) or f"all ranks are at {stages[0][2]}, and none lags; give more time (--limit)"
