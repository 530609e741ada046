"""A reader of files against damaged ones: in a fork, which may crash, hang or fill memory without taking the tests along."""

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.errors import HpcaiError
from tests.fuzz.mutations import damaged

SEED, SECONDS, GIB = 20261123, 5.0, 1 << 30     # CPU seconds; of the clock it may be twelve times as many
GOOD = ("read", "refused")


@dataclass(frozen=True)
class Reader:
    """``make(folder)`` writes a real input and returns the file that is damaged; ``read`` takes it. ``seal`` puts checksums right
    again, which half of the damaged files then have. ``names``: what an error must name besides the file itself."""

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    seal: Callable[[bytes], bytes] | None = None
    names: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How often each thing happened, and the first of each that must not happen: its number and what was said."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, number: int, text: str) -> None:
        self.counts[kind] += 1
        if kind not in GOOD:
            self.first.setdefault(kind, f"number {number}: {text}")


def attack(reader: Reader, folder: Path, numbers: range) -> Outcome:
    """Every damaged file of ``numbers``. What must not happen: an error without the file's name (unnamed) or of another family
    (bare), more than 5 CPU seconds (slow) or 1 GiB (memory), the end of the process (crash)."""
    path = reader.make(folder)
    whole, outcome, numbers = path.read_bytes(), Outcome(), range(numbers.start, numbers.stop)
    while numbers:
        done = numbers.start
        for number, kind, text in _in_fork(reader, path, whole, numbers):
            outcome.add(kind, number, text)
            done = number + 1
        if done < numbers.stop:
            outcome.add("crash", done, "the process ended")
            done += 1
        numbers = range(done, numbers.stop)
    path.write_bytes(whole)
    reader.read(path)
    return outcome


def _in_fork(reader: Reader, path: Path, whole: bytes, numbers: range) -> Iterator[tuple[int, str, str]]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_try, args=(reader, path, whole, numbers, theirs))
    process.start()
    theirs.close()
    try:
        while ours.poll(12 * SECONDS):
            yield ours.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        ours.close()


class Slow(BaseException):
    """Not an Exception, so that no reader takes it for a fault of the file."""


def _try(reader: Reader, path: Path, whole: bytes, numbers: range, pipe: Connection) -> None:
    faulthandler.disable()
    sys.stdout = sys.stderr = open(os.devnull, "w")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, used + GIB))
    signal.signal(signal.SIGPROF, _late)
    for number in numbers:
        random = np.random.default_rng([SEED, number])
        data = damaged(whole, random)
        if reader.seal is not None and random.integers(2):
            with suppress(Exception):  # too damaged to hold a checksum
                data = reader.seal(data)
        path.write_bytes(data)
        pipe.send((number, *_one(reader, path)))


def _late(*_: Any) -> None:
    raise Slow


def _one(reader: Reader, path: Path) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        reader.read(path)
        return "read", ""
    except HpcaiError as error:
        named = any(name in str(error) for name in (path.name, *reader.names))
        return ("refused", "") if named else ("unnamed", f"{type(error).__name__}: {error}"[:300])
    except Slow:
        return "slow", f"more than {SECONDS} s"
    except MemoryError:
        return "memory", "more than 1 GiB"
    except BaseException as error:
        return "bare", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
