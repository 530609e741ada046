"""Run readers on damaged files in forked processes, which may crash, hang or exhaust memory without ending the tests."""

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
from tests.fuzz.mutations import damage, displace, remove_any

SEED, SECONDS, GIB = 20261123, 5.0, 1 << 30     # CPU seconds; wall time may be twelve times as long
GOOD = ("read", "refused")


@dataclass(frozen=True)
class Reader:
    """A reader. ``make(folder)`` writes a valid input and returns the file to damage, and ``read`` reads it. ``seal`` recomputes
    checksums, for half of the damaged files. An error must have the name of the file, or one of ``names``. ``listed``: the file was
    listed as a regular one, so nothing else is put in its place."""

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    seal: Callable[[bytes], bytes] | None = None
    names: tuple[str, ...] = ()
    listed: bool = False


@dataclass
class Outcome:
    """The count of each kind of result, and the number and message of the first failure of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, number: int, text: str) -> None:
        self.counts[kind] += 1
        if kind not in GOOD:
            self.first.setdefault(kind, f"number {number}: {text}")


def attack(reader: Reader, folder: Path, numbers: range) -> Outcome:
    """Read the damaged files ``numbers``; at every tenth, something else is in the place of the file. Failures are an error without
    the file's name (unnamed) or of another family (bare), more than 5 CPU seconds (slow) or 1 GiB (memory), and the end of the
    process (crash)."""
    path = reader.make(folder)
    content, outcome, numbers = path.read_bytes(), Outcome(), range(numbers.start, numbers.stop)
    while numbers:
        next_number = numbers.start
        for number, kind, text in _run_in_fork(reader, path, content, numbers):
            outcome.add(kind, number, text)
            next_number = number + 1
        if next_number < numbers.stop:
            outcome.add("crash", next_number, "the process ended")
            next_number += 1
        numbers = range(next_number, numbers.stop)
    remove_any(path)
    path.write_bytes(content)
    reader.read(path)
    return outcome


def _run_in_fork(reader: Reader, path: Path, content: bytes, numbers: range) -> Iterator[tuple[int, str, str]]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read_damaged, args=(reader, path, content, numbers, sender))
    process.start()
    sender.close()
    try:
        while receiver.poll(12 * SECONDS):
            yield receiver.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        receiver.close()


class Slow(BaseException):
    """A timeout; not an Exception, so that no reader takes it for a fault of the file."""


def _read_damaged(reader: Reader, path: Path, content: bytes, numbers: range, pipe: Connection) -> None:
    faulthandler.disable()
    sys.stdout = sys.stderr = open(os.devnull, "w")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, used + GIB))
    signal.signal(signal.SIGPROF, _raise_slow)
    for number in numbers:
        rng = np.random.default_rng([SEED, number])
        data = damage(content, rng)
        if reader.seal is not None and rng.integers(2):
            with suppress(Exception):  # too damaged to hold a checksum
                data = reader.seal(data)
        remove_any(path)
        path.write_bytes(data)
        if not (reader.listed or number % 10):
            displace(path, number // 10 % 4)
        pipe.send((number, *_read_once(reader, path)))


def _raise_slow(*_: Any) -> None:
    raise Slow


def _read_once(reader: Reader, path: Path) -> tuple[str, str]:
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
