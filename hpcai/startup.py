"""Timing of the startup, from the start of the process to the end of its first step, by consecutive parts.

``config.run`` starts the clock, and shared code marks the beginning of a part: ``startup.begin("data")``. Without a clock, as in a
notebook, nothing is recorded.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, get_args

Part = Literal[
    "imports", "processes", "data", "network", "other", "checkpoint", "connections", "first batch", "compile", "first step"
]

PARTS: tuple[Part, ...] = get_args(Part)

# Intervals between synchronizations: parts without waiting for other processes, and the parts that wait for them.
_INTERVALS: dict[tuple[Part, ...], tuple[Part, ...]] = {
    ("imports",): ("processes",),
    ("data", "network"): ("checkpoint", "connections", "other"),
    ("first batch", "compile"): ("first step",),
}


class Clock:
    """Seconds of consecutive ``parts``: the beginning of one ends the one before."""

    def __init__(self, part: str, age: float = 0.0) -> None:
        self.parts: dict[str, float] = {}
        self.part, self.start = part, time.perf_counter() - age

    def begin(self, part: str) -> None:
        now = time.perf_counter()
        self.parts[self.part] = self.parts.get(self.part, 0.0) + now - self.start
        self.part, self.start = part, now

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Context manager for ``part``; afterwards the previous part continues."""
        before = self.part
        self.begin(part)
        try:
            yield
        finally:
            self.begin(before)


_clock: Clock | None = None


@contextmanager
def clock(age: float = 0.0) -> Iterator[None]:
    """Context manager that records parts, from ``age`` seconds ago until ``end``."""
    global _clock
    _clock = Clock("imports", age)
    try:
        yield
    finally:
        _clock = None


def process_age() -> float:
    """Return seconds since the start of this process, or on systems without /proc since the import of this module."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        seconds = -1.0
    return seconds if seconds >= 0 else time.perf_counter() - _IMPORTED


_IMPORTED = time.perf_counter()


def is_running() -> bool:
    """Whether the clock runs: the first step has not ended yet."""
    return _clock is not None


def begin(part: Part) -> None:
    """Start ``part``, which ends the current one."""
    if _clock is not None:
        _clock.begin(part)


def during(part: Part) -> AbstractContextManager[None]:
    """Context manager for ``part``; afterwards the previous part continues."""
    return nullcontext() if _clock is None else _clock.during(part)


def end(compiled: float) -> dict[str, float]:
    """Stop the clock after the first step, and return seconds of each part. ``compiled``: Seconds of compilation in that step."""
    global _clock
    assert _clock is not None
    _clock.begin("other")
    parts, _clock = _clock.parts, None
    step = parts.get("first step", 0.0)
    return parts | {"compile": min(compiled, step), "first step": max(step - compiled, 0.0)}


def combine_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the seconds of each part over the ranks of a job: between two synchronizations those of the slowest rank count."""
    parts: dict[str, float] = {}
    for independent, waiting in _INTERVALS.items():
        last = max(ranks, key=lambda parts: sum(parts.get(part, 0.0) for part in independent))
        parts |= {part: last.get(part, 0.0) for part in (*independent, *waiting)}
    return parts


def format_parts(parts: Mapping[str, float]) -> str:
    """Format the parts in one line, without those that round to 0."""
    named = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)
    return f"first step after {sum(parts.values()):.1f} s" + f": {named}" * bool(named)
