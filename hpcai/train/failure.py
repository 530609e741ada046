"""What a run leaves behind when it fails: a bundle, and a watchdog that sees to it that a hang is a failure too.

A bundle is the folder ``failure-<step>-<time>`` in the run's directory, with ``rank-00003.json`` and ``rank-00003.safetensors`` of
each process that could still write. ``kind`` says how it failed: ``nan``, ``hang``, ``crash`` (an exception), or ``stopped``
(another process failed first). ``step``, counted from 1, is the one that failed, or that would have come next. The tensors are the
random state at the time of writing.

What is not there: weights, and the random state at the start of the step. The newest whole checkpoint before it has both, and
training on from there makes them again (`hpcai replay`). A process that is killed writes nothing; the others then write.
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
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file

from hpcai import __version__, log
from hpcai.dist import watchdog
from hpcai.dist.host import format_ranges
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, DivergedError
from hpcai.train import rng

LAST = "last-failure"  # a link in the run's directory: who makes it first names the bundle for all
FIRST_STEP = 4         # times as long as others may the first step of a start take: it compiles
_TICKS = 10            # looks at the counter in the time that is allowed
_LINES, _EVENTS = 200, 100
_WRITING = 10.0        # seconds that the file system may take before the failure goes on without a bundle


class _Pulse:
    """Counts what was finished: steps, batches of an evaluation. There is one of it, because a process has one run at a time."""

    beats = 0
    rests = 0  # while this process rightly waits for as long as others take


PULSE = _Pulse()


@contextmanager
def resting() -> Iterator[None]:
    """Inside, this process waits for others which are watched themselves."""
    PULSE.rests += 1
    try:
        yield
    finally:
        PULSE.rests -= 1
        PULSE.beats += 1


class Failures(logging.Handler):
    """Keeps the last words of a run on this process, and writes them down when it fails. It is a handler of log records and a sink
    of events. ``whereabouts(step)`` tells of the step with this number from 1, or of the one under way."""

    def __init__(self, name: str, directory: Path | None, settings: Mapping[str, Any], mesh: Mesh) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.run, self.directory, self.settings, self.job = name, directory, settings, mesh.job
        self.whereabouts: Callable[[int | None], dict[str, Any]] = lambda step: {"step": step or 0}
        self._records: deque[logging.LogRecord] = deque(maxlen=_LINES)
        self._events: deque[log.Event] = deque(maxlen=_EVENTS)
        self._armed, self._once = False, threading.Lock()
        self.bundle: Path | None = None
        self.names_it = True  # whether this process was the first to write

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def write(self, event: log.Event) -> None:
        if event.kind != "start":  # it repeats the settings
            self._events.append(event)

    def arm(self) -> None:
        """From now on the directory is ours."""
        if self.directory is not None and not self._armed:
            if self.job.rank == 0:
                (self.directory / LAST).unlink(missing_ok=True)
            self._armed = True

    # ---- the bundle

    def tell(self, error: BaseException) -> None:
        """Leave a bundle for an exception that ends the run."""
        step = error.step if isinstance(error, DivergedError) else None
        self.leave("nan" if step else "crash", step, error)

    def leave(self, kind: str, step: int | None = None, error: BaseException | None = None, reason: str = "") -> None:
        """Write what this process knows, once. It takes ten seconds at most and raises nothing: what it tells of counts more."""
        if not self._armed or not self._once.acquire(blocking=False):
            return

        def act() -> None:
            try:
                self._write(kind, step, error, reason)
            except Exception as problem:
                watchdog.report_failure(f"rank {self.job.rank}: no failure bundle in {self.directory}: {problem}")

        watchdog.run_with_timeout(_WRITING, act)

    def _write(self, kind: str, step: int | None, error: BaseException | None, reason: str) -> None:
        now = time.time()
        about = _tried(lambda: self.whereabouts(step))
        about = about if isinstance(about, dict) else {"step": step or 0, "position": about}
        stacks = _stacks()
        told = {
            "format": 1, "kind": kind, "run": self.run, "rank": self.job.rank, "world": self.job.size, "host": socket.gethostname(),
            "pid": os.getpid(), "time": now, **about, "where": stacks[0]["where"], "error": _error(error, reason),
            "threads": stacks, "log": [self.format(record) for record in list(self._records)],
            "events": [log.to_strict_json({"kind": e.kind, "time": e.time, **e.fields}) for e in list(self._events)],
            "command": sys.argv, "folder": os.getcwd(), "versions": _tried(_versions), "settings": self.settings,
        }  # fmt: skip
        assert self.directory is not None
        name = f"failure-{about['step']:08d}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        try:
            (self.directory / LAST).symlink_to(name)
        except FileExistsError:
            name, self.names_it = os.readlink(self.directory / LAST), False
        except OSError:  # no links here: each process has a bundle of its own
            pass
        bundle = self.directory / Path(name).name
        bundle.mkdir(exist_ok=True)
        file = bundle / f"rank-{self.job.rank:05d}.json"
        partial = file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(log.to_strict_json(told), indent=1))
        except OSError:  # a full disk: half a file helps nobody
            with suppress(OSError):
                partial.unlink(missing_ok=True)
                bundle.rmdir()
            raise
        partial.replace(file)
        self.bundle = bundle
        save_file(rng.state(), file.with_suffix(".safetensors"))

    # ---- the watchdog

    @contextmanager
    def watching(self, patience: float | None, whereabouts: Callable[[int | None], dict[str, Any]] | None = None) -> Iterator[None]:
        """Inside, the job ends when no step was finished for ``patience`` seconds, and a process that is ended because another
        failed says its last words."""
        if whereabouts is not None:
            self.whereabouts = whereabouts

        def stopped(reason: str) -> None:
            self.leave("stopped", reason=reason)

        done, thread = threading.Event(), None
        watchdog.on_abort.append(stopped)
        if patience is not None and self.settings:  # a notebook may wait as long as it likes
            thread = threading.Thread(target=self._watch, args=(patience, done), name="hpcai-watchdog", daemon=True)
            thread.start()
        try:
            yield
        finally:
            done.set()
            watchdog.on_abort.remove(stopped)
            if thread is not None:
                thread.join()

    def _watch(self, patience: float, done: threading.Event) -> None:
        """Count looks, not seconds: a job that is suspended is looked at by nobody meanwhile, and did not hang."""
        first, idle, seen, saved = PULSE.beats, 0, PULSE.beats, 0
        while True:
            # This thread cannot run while a call holds the interpreter, but that one of faulthandler can.
            faulthandler.dump_traceback_later(patience, file=2)
            if done.wait(patience / _TICKS):
                break
            before, (seen, saved) = (seen, saved), (PULSE.beats, self._saved() if PULSE.beats == seen else saved)
            idle = 0 if before != (seen, saved) or PULSE.rests else idle + 1
            if idle >= _TICKS * (FIRST_STEP if seen == first else 1):
                break
        faulthandler.cancel_dump_traceback_later()
        if not done.is_set():
            self._end(patience)

    def _saved(self) -> int:
        """Bytes of a checkpoint that is being written by any process: while they grow, those that wait for it do not hang."""
        sizes = [0]

        def act() -> None:
            for file in self.directory.glob("checkpoints/.*.partial/*") if self.directory is not None else ():
                with suppress(OSError):
                    sizes.append(file.stat().st_size)

        watchdog.run_with_timeout(_WRITING, act)
        return sum(sizes)

    def _end(self, patience: float) -> None:
        """End the job in the name of the process that noticed first; the others wait to be ended by it, and do it if it cannot."""
        self.leave("hang")
        after = min(max(3 * patience / _TICKS, 1.0), 60.0)
        if not self.names_it:
            time.sleep(after + 3 * _WRITING)
        brief = f"no step was finished for {patience:g} s (train.hang_after)"
        places = f"rank {self.job.rank}: {_stacks()[0]['where']}"
        if self.bundle is not None:
            until = time.monotonic() + after
            while len(list(self.bundle.glob("rank-*.json"))) < self.job.size and time.monotonic() < until:
                time.sleep(0.05)
            places = standing(read(self.bundle), self.job.size)
            brief += f"; all stacks are in {self.bundle}"
        watchdog.abort_job(brief, f"{brief}\n{places}")


def read(bundle: Path) -> list[dict[str, Any]]:
    """What the processes wrote, by rank. Raises DataError where it is no bundle."""
    told = []
    for file in sorted(bundle.glob("rank-*.json")):
        try:
            told.append(json.loads(file.read_text()))
            missing = {"kind", "run", "rank", "world", "time", "step", "settings", "where"} - told[-1].keys()
        except (OSError, ValueError, AttributeError) as problem:
            raise DataError(f"{file}: cannot be read ({problem})") from problem
        if missing:
            raise DataError(f"{file}: has no {', '.join(sorted(missing))}; expected what a run that failed has written")
    if not told:
        raise DataError(f"{bundle}: holds no rank-*.json; expected a folder failure-... of a run's directory")
    return told


def standing(told: list[dict[str, Any]], world: int) -> str:
    """One line for each place where processes stood, the rarest first: that is mostly where the fault is."""
    places: dict[str, list[int]] = {}
    for one in told:
        places.setdefault(f"step {one['step']}, in {one['where']}", []).append(one["rank"])
    if silent := sorted(set(range(world)) - {one["rank"] for one in told}):
        places["wrote nothing: its node is gone, its disk full, or a call holds the interpreter"] = silent
    lines = sorted(places.items(), key=lambda place: len(place[1]))
    return "\n".join(f"  rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}: {place}" for place, ranks in lines)


def _stacks() -> list[dict[str, Any]]:
    """Where each thread stands, the main one first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [{"thread": names.get(ident, str(ident)), "where": _where(frame), "stack": traceback.format_stack(frame)}
            for ident, frame in frames]  # fmt: skip


def _where(frame: FrameType) -> str:
    """The innermost function, and the innermost one of ours that led there."""
    stack = traceback.extract_stack(frame)[::-1]
    texts = [f"{f.name} ({'/'.join(Path(f.filename).parts[-3:])}:{f.lineno}: {f.line})" for f in stack]
    foreign = ("site-packages", "dist-packages", os.path.dirname(threading.__file__))
    ours = [text for f, text in zip(stack[1:], texts[1:]) if not any(place in f.filename for place in foreign)]
    return ", called by ".join([texts[0], *ours[:1]])


def _error(error: BaseException | None, reason: str) -> dict[str, str] | None:
    if error is None:
        return {"type": "", "text": reason, "traceback": ""} if reason else None
    return {"type": type(error).__name__, "text": str(error), "traceback": "".join(traceback.format_exception(error))}


def _versions() -> dict[str, Any]:
    return {"hpcai": __version__, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
            "system": platform.platform()}  # fmt: skip


def _tried(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as problem:
        return f"not known: {problem!r}"
