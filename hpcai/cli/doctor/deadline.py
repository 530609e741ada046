"""A time by which a doctor's visit ends, also where a rank is stuck: then the ranks that lag or do not answer are named.

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

_GRACE = 4.0  # seconds that the other ranks leave rank 0 to speak
_PATIENCE = 1.5  # seconds for an answer


class Deadline:
    """Ends the job ``seconds`` from now unless ``over`` comes first. ``tell`` is called on rank 0 with what is known of the ranks
    that hold the others up; ``name`` is this one's, and ``world`` the number of ranks where the launcher has told it."""

    def __init__(self, seconds: float, rank: int, name: str, world: int | None = None) -> None:
        self.seconds, self.rank, self.name, self.world = seconds, rank, name, world
        self.tell: Callable[[str], object] = lambda text: None
        self.clean: Callable[[], object] = lambda: None
        self.until = time.monotonic() + seconds
        self._stage, self._number, self._since = "imports", 0, time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._guard, name="hpcai-deadline", daemon=True).start()

    def at(self, stage: str) -> None:
        """This rank begins ``stage``: all ranks begin the same ones in the same order, so that who is behind is seen."""
        self._stage, self._number, self._since = stage, self._number + 1, time.monotonic()

    def doing(self) -> str:
        """What this rank answers: how many stages it has begun, and the last of them."""
        return f"{self._number} {self._stage} for {time.monotonic() - self._since:.0f} s"

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.until - time.monotonic())

    def over(self) -> None:
        self._over.set()

    def _guard(self) -> None:
        if not self._over.wait(self.left() + (_GRACE if self.rank else 0.0)):
            self._end()

    def _end(self) -> None:
        text = f"not done after {self.seconds:.0f} s: "
        mine = self.doing().partition(" ")[2]
        if not self._number:  # the main thread may hold the lock of an import that is needed here
            os.write(2, f"hpcai doctor: {text}{self.name} is at {mine}; {_alone(self._stage)}\n".encode())
            os._exit(1)
        from hpcai.dist import watch

        answers = watch.answers(_PATIENCE) if self.rank == 0 else {}
        text += who_lags(answers, self.world) if answers else f"{self.name} is at {mine}; {_alone(self._stage)}"
        with suppress(Exception):  # a page that cannot be made of half of what was asked keeps nobody
            self.tell(text)
        self.clean()
        watch.end_job(text, f"hpcai doctor: {text}")


def _alone(stage: str) -> str:
    """What may be wrong where a rank knows of no other."""
    if stage == "imports":
        return "Python's files are read slowly; install to a file system that is fast for many small files, or to each node"
    if stage == "meeting":
        return "not all ranks came; look on every node whether its processes run, and for names that one node does not know"
    return "rank 0 does not answer; look at its node"


def who_lags(answers: "Mapping[int, Answer]", world: int | None = None) -> str:
    """Names the ranks of ``world`` that have not met the others, those that do not answer, and those that are at an earlier stage
    than others."""
    lines = []
    if absent := sorted(set(range(world or 0)) - set(answers)):
        lines.append(f"{_ranks(absent)} did not come; look whether they run, and at their nodes")
    if silent := [rank for rank, answer in answers.items() if answer.doing is None]:
        named = ", ".join(answers[rank].name for rank in sorted(silent))
        lines.append(f"{named} {_do(silent)} not answer: stopped, or held by a driver or a file system; look at these nodes")
    told = {rank: (int(number), text) for rank, answer in answers.items() for number, _, text in [_parts(answer.doing)]}
    behind = sorted(rank for rank, (number, _) in told.items() if 0 <= number < max(number for number, _ in told.values()))
    if behind:
        lines += [f"{answers[rank].name} is still at {told[rank][1]}, and the others wait for it" for rank in behind[:8]]
        lines += [f"and {len(behind) - 8} more"] if len(behind) > 8 else []
    if not lines:
        lines.append(f"all ranks are at {told[min(told)][1]}, and no one lags; give more time (--limit)")
    return "; ".join(lines)


def _parts(doing: str | None) -> tuple[str, str, str]:
    return (doing or "-1 ").partition(" ")


def _ranks(ranks: list[int]) -> str:
    from hpcai.dist.host import ranges

    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(set(ranks))}"


def _do(ranks: list[int]) -> str:
    return "do" if len(ranks) > 1 else "does"
