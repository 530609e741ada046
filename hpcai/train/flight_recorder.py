"""The flight recorder of a run, which dumps its state on failure, and a watchdog that turns a hang into a failure.

A dump, or bundle, is the folder ``failure-<step>-<time>`` in the run's directory, with ``rank-00003.json`` and
``rank-00003.safetensors`` of each rank that could still write. ``kind`` is ``nan``, ``hang``, ``crash`` (an exception), or
``stopped`` (another rank failed first). ``step``, counted from 1, is the step that failed, or the next one. The tensors are the
random state at the time of writing.

A bundle holds no weights, nor the random state at the start of the step. The newest complete checkpoint before it has both, and
training from it reproduces them (`hpcai replay`). A killed process writes nothing; the other ranks then write.
"""

import faulthandler
import json
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hpcai import __version__, log
from hpcai.dist import watchdog
from hpcai.dist.host import format_ranges
from hpcai.dist.mesh import Mesh
from hpcai.dist.watchdog import HEARTBEAT, location
from hpcai.errors import DataError, DivergedError
from hpcai.json_file import read_object
from hpcai.train import rng

LAST_FAILURE = "last-failure"  # a link in the run's directory: the first rank to create it names the bundle for all
FIRST_STEP_FACTOR = 4  # the first step after a start compiles, and has so many timeouts
_REPORT = "a report of a failed run"
_CHECKS = 10  # checks of the heartbeat per timeout
_MAX_RECORDS, _MAX_EVENTS = 200, 100
_WRITE_TIMEOUT = 10.0  # seconds for the file system, after which the failure is handled without a bundle


@contextmanager
def pause_watchdog() -> Iterator[None]:
    """Context manager: the watchdog is paused while this rank waits for ranks with watchdogs of their own."""
    HEARTBEAT.pauses += 1
    try:
        yield
    finally:
        HEARTBEAT.pauses -= 1
        HEARTBEAT.beats += 1


class FlightRecorder(logging.Handler):
    """A recorder of the last log records and events of this rank, written to a bundle on failure. It is a handler of log records
    and a sink of events. ``describe(step)`` describes the step with this number from 1, or the current one."""

    def __init__(self, name: str, directory: Path | None, settings: Mapping[str, Any], mesh: Mesh) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.run, self.directory, self.settings, self.job = name, directory, settings, mesh.job
        self.describe: Callable[[int | None], dict[str, Any]] = lambda step: {"step": step or 0}
        self._records: deque[logging.LogRecord] = deque(maxlen=_MAX_RECORDS)
        self._events: deque[log.Event] = deque(maxlen=_MAX_EVENTS)
        self._armed, self._dump_lock = False, threading.Lock()
        self.bundle: Path | None = None
        self.wrote_first = True  # whether this rank was the first to write

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def write(self, event: log.Event) -> None:
        if event.kind != "start":  # it repeats the settings
            self._events.append(event)

    def arm(self) -> None:
        """Enable dumps, once the directory belongs to this run."""
        if self.directory is not None and not self._armed:
            if self.job.rank == 0:
                (self.directory / LAST_FAILURE).unlink(missing_ok=True)
            self._armed = True

    # ---- the bundle

    def record(self, error: BaseException) -> None:
        """Dump a bundle for an exception that ends the run."""
        step = error.step if isinstance(error, DivergedError) else None
        self.dump("nan" if step else "crash", step=step, error=error)

    def dump(self, kind: str, reason: str = "", step: int | None = None, error: BaseException | None = None) -> None:
        """Dump the state of this rank, once. It takes ten seconds at most and raises nothing, so that the original error is not
        lost."""
        if not self._armed or not self._dump_lock.acquire(blocking=False):
            return

        def write() -> None:
            try:
                self._write(kind, step, error, reason)
            except Exception as problem:
                watchdog.report_failure(f"rank {self.job.rank}: no failure bundle in {self.directory}: {problem}")

        watchdog.run_with_timeout(_WRITE_TIMEOUT, write)

    def _write(self, kind: str, step: int | None, error: BaseException | None, reason: str) -> None:
        now = time.time()
        state = _call_or_error(lambda: self.describe(step))
        state = state if isinstance(state, dict) else {"step": step or 0, "position": state}
        stacks, fault = _stacks(), {"type": "", "text": reason, "traceback": ""} if reason else None
        if error is not None:
            fault = {"type": type(error).__name__, "text": str(error), "traceback": "".join(traceback.format_exception(error))}
        content = {
            "format": 1, "kind": kind, "run": self.run, "rank": self.job.rank, "world": self.job.size, "host": socket.gethostname(),
            "pid": os.getpid(), "time": now, **state, "where": stacks[0]["where"], "error": fault,
            "threads": stacks, "log": [self.format(record) for record in list(self._records)],
            "events": [log.to_strict_json({"kind": e.kind, "time": e.time, **e.fields}) for e in list(self._events)],
            "command": sys.argv, "folder": os.getcwd(), "settings": self.settings, "versions": _call_or_error(lambda: {
                "hpcai": __version__, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
                "system": platform.platform()}),
        }  # fmt: skip
        assert self.directory is not None
        name = f"failure-{state['step']:08d}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        try:
            (self.directory / LAST_FAILURE).symlink_to(name)
        except FileExistsError:
            name, self.wrote_first = os.readlink(self.directory / LAST_FAILURE), False
        except OSError:  # a file system without links: each rank has its own bundle
            pass
        bundle = self.directory / Path(name).name
        bundle.mkdir(exist_ok=True)
        file = bundle / f"rank-{self.job.rank:05d}.json"
        partial = file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(log.to_strict_json(content), indent=1))
        except OSError:  # a full disk: remove the partial file
            with suppress(OSError):
                partial.unlink(missing_ok=True)
                bundle.rmdir()
            raise
        partial.replace(file)
        self.bundle = bundle
        save_file(rng.state(), file.with_suffix(".safetensors"))

    # ---- the watchdog

    @contextmanager
    def watch_hang(self, timeout: float | None, describe: Callable[[int | None], dict[str, Any]] | None = None) -> Iterator[None]:
        """Context manager: end the job if no step finishes for ``timeout`` seconds. If another rank fails, this rank dumps its
        state before it is ended."""
        if describe is not None:
            self.describe = describe
        stopped, done, thread = partial(self.dump, "stopped"), threading.Event(), None
        watchdog.on_abort.append(stopped)
        if timeout is not None and self.settings:  # not in a notebook
            thread = threading.Thread(target=self._watch, args=(timeout, done), name="hpcai-watchdog", daemon=True)
            thread.start()
        try:
            yield
        finally:
            done.set()
            watchdog.on_abort.remove(stopped)
            if thread is not None:
                thread.join()

    def _watch(self, timeout: float, done: threading.Event) -> None:
        """Watch the heartbeat. It counts checks, not seconds, so that the time in which a job is suspended is no hang."""
        first, idle, seen, size = HEARTBEAT.beats, 0, HEARTBEAT.beats, 0
        while True:
            # This thread cannot run while a call holds the GIL, but the thread of faulthandler can.
            faulthandler.dump_traceback_later(timeout, file=2)
            if done.wait(timeout / _CHECKS):
                break
            before, (seen, size) = (seen, size), (HEARTBEAT.beats, self._checkpoint_bytes() if HEARTBEAT.beats == seen else size)
            idle = 0 if before != (seen, size) or HEARTBEAT.pauses else idle + 1
            if idle >= _CHECKS * (FIRST_STEP_FACTOR if seen == first else 1):
                break
        faulthandler.cancel_dump_traceback_later()
        if not done.is_set():
            self._end_job(timeout)

    def _checkpoint_bytes(self) -> int:
        """Return the bytes of a checkpoint that any rank is writing. While they grow, ranks that wait for it do not hang."""
        sizes = [0]

        def add_sizes() -> None:
            for file in self.directory.glob("checkpoints/.*.partial/*") if self.directory is not None else ():
                with suppress(OSError):
                    sizes.append(file.stat().st_size)

        watchdog.run_with_timeout(_WRITE_TIMEOUT, add_sizes)
        return sum(sizes)

    def _end_job(self, timeout: float) -> None:
        """End the job. The rank that dumped first does so; others wait for it, and do so if it cannot."""
        self.dump("hang")
        delay = min(max(3 * timeout / _CHECKS, 1.0), 60.0)
        if not self.wrote_first:
            time.sleep(delay + 3 * _WRITE_TIMEOUT)
        brief = f"no step was finished for {timeout:g} s (train.hang_after)"
        details = f"rank {self.job.rank}: {_stacks()[0]['where']}"
        if self.bundle is not None:
            deadline = time.monotonic() + delay
            while len(list(self.bundle.glob("rank-*.json"))) < self.job.size and time.monotonic() < deadline:
                time.sleep(0.05)
            details = describe_ranks(read_bundle(self.bundle), self.job.size)
            brief += f"; all stacks are in {self.bundle}"
        watchdog.abort_job(brief, f"{brief}\n{details}")


def read_bundle(bundle: Path) -> list[dict[str, Any]]:
    """Return the reports of a bundle, by rank. Raises DataError if it is no bundle."""
    reports = []
    for file in sorted(bundle.glob("rank-*.json")):
        reports.append(read_object(file, _REPORT, DataError))
        if missing := {"kind", "run", "rank", "world", "time", "step", "settings", "where"} - reports[-1].keys():
            raise DataError(f"{file}: has no {', '.join(sorted(missing))}; expected {_REPORT}")
    if not reports:
        raise DataError(f"{bundle}: holds no rank-*.json; expected a folder failure-... of a run's directory")
    return reports


def describe_ranks(reports: list[dict[str, Any]], world: int) -> str:
    """Return one line for each code location of ranks, the rarest first, which is most often the location of the fault."""
    locations: dict[str, list[int]] = {}
    for report in reports:
        locations.setdefault(f"step {report['step']}, in {report['where']}", []).append(report["rank"])
    if silent := sorted(set(range(world)) - {report["rank"] for report in reports}):
        locations["wrote nothing: its node is gone, its disk full, or a call holds the interpreter"] = silent
    lines = sorted(locations.items(), key=lambda place: len(place[1]))
    return "\n".join(f"  rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}: {place}" for place, ranks in lines)


def _stacks() -> list[dict[str, Any]]:
    """Return the stack of each thread, the main thread first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [{"thread": names.get(ident, str(ident)), "where": location(frame), "stack": traceback.format_stack(frame)}
            for ident, frame in frames]  # fmt: skip


def _call_or_error(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as problem:
        return f"not known: {problem!r}"
