"""Logging with the rank, and sinks of the events of a run: terminal, JSON lines, trackers, MLPerf log.

The training loop emits each event once, with numbers and text as fields, and every sink writes it in its own format. The page
docs/performance.md ("Events of a run") lists their fields.

A sink that cannot write (full disk, closed terminal) warns once, and the run continues.
"""

import errno
import importlib.util
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TextIO

from hpcai import startup
from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError, MissingExtraError, escape_controls
from hpcai.json_file import read_regular

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
BETWEEN = ("evaluate", "save")  # parts of a run that lie between steps, and do not count as time of training
_TRACKERS = {"tensorboard": "hpcai.log.TensorBoard", "wandb": "hpcai.trackers.Wandb", "mlflow": "hpcai.trackers.Mlflow"}


# ---------------------------------------------------------------------------------------------------------- logging


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A handler with the current ``sys.stderr``, which a progress bar, a notebook or a test may replace."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None: ...


class _Formatter(logging.Formatter):
    """A formatter of messages that may have names from untrusted files: further lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escape(super().formatMessage(record))


def _escape(line: str) -> str:
    return escape_controls(line).replace("\n", "\n  ")


def setup(rank: int = 0, world: int = 1) -> None:
    """Log INFO and above of the first rank, WARNING and above of the others, to stderr. It may be called again."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler()
    where = f" rank {rank} on {socket.gethostname()}".replace("%", "%%") if world > 1 else ""
    handler.setFormatter(_Formatter(f"%(levelname)s{where}: %(message)s"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.addHandler(handler)
    root.setLevel(handler.level)


# ----------------------------------------------------------------------------------------------------------- events


class Event(NamedTuple):
    """An event of a run; ``time`` is in seconds since 1970."""

    kind: str
    time: float
    fields: Mapping[str, Any]


class Sink(Protocol):
    """A writer of events."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Reports(AbstractContextManager["Reports"]):
    """The sinks of a run, to which its events are emitted; none on ranks other than the first."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = tuple(sinks)
        self._failed: set[int] = set()

    def emit(self, kind: str, **fields: Any) -> None:
        """Write an event of ``kind`` to every sink."""
        event = Event(kind, time.time(), fields)
        for sink in self.sinks:
            self._try_call(sink, partial(sink.write, event))

    def close(self) -> None:
        """Close every sink. It may be called again."""
        sinks, self.sinks = self.sinks, ()
        for sink in sinks:
            self._try_call(sink, sink.close)

    def _try_call(self, sink: Sink, function: Callable[[], None]) -> None:
        try:
            function()
        except OSError as error:
            if id(sink) not in self._failed:
                self._failed.add(id(sink))
                logger.warning("%s cannot write (%s); the run continues without these events", type(sink).__name__, error)

    def __exit__(self, *_: object) -> None:
        self.close()


def open_reports(
    directory: Path | None, sinks: Sequence[str], first: bool, mlperf: Callable[[Path, TextIO | None], Sink] | None = None,
    project: str | None = None,
) -> Reports:  # fmt: skip
    """Open the ``sinks`` of a run (``report.sinks``) on its ``first`` process; the others have none.

    JSON lines are always written if there is a directory. ``mlperf(path, echo)`` creates the sink of a benchmark, whose lines also
    go to stdout unless the terminal sink uses it. ``project``: of W&B and MLflow. On all processes raises ConfigError for settings
    that do not fit together, and MissingExtraError without the package of a tracker.
    """
    trackers = [name for name in _TRACKERS if name in sinks]
    for name in ("mlperf", *trackers):
        if name in sinks and directory is None:
            raise ConfigError(f"report.sinks has '{name}', which writes files, but report.directory is not set; set it")
    for name in trackers:
        if getattr(importlib.util.find_spec(name), "origin", None) is None:  # a folder such as ./wandb is found, without an origin
            raise MissingExtraError(f"report.sinks has '{name}', which is not installed: pip install 'hpcai-suite[{name}]'")
    if "mlperf" in sinks and mlperf is None:
        raise ConfigError("report.sinks has 'mlperf', but this app has no benchmark of MLPerf (apps/NAME/mlperf.py); leave it out")
    if not first:
        return Reports()
    created: list[Sink] = [Terminal()] if "terminal" in sinks else []
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"report.directory {directory} cannot be created ({error.strerror}); choose another") from error
        created.append(JsonLines(directory / METRICS))
        for name in trackers:
            module, _, sink = _TRACKERS[name].rpartition(".")
            created.append(getattr(importlib.import_module(module), sink)(directory / name, project))
        if "mlperf" in sinks and mlperf is not None:
            created.append(mlperf(directory / "mlperf.log", None if "terminal" in sinks else sys.stdout))
    return Reports(created)


# ------------------------------------------------------------------------------------------------------- JSON lines

_EVENT: dict[str, Any] = {"kind": str, "time": int | float, "step": int | tuple}  # without a step: ()
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_strict_json(value: Any) -> Any:
    """Convert ``value`` to strict JSON. NaN and infinities become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_strict_json(inner) for inner in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return to_strict_json(value.item()) if hasattr(value, "item") else str(value)      # a scalar of numpy or torch; a path


def flatten(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted paths."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def restore_non_finite(value: Any) -> Any:
    """Convert the text of NaN and infinities back to floats."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restore_non_finite(inner) for key, inner in value.items()}
    return [restore_non_finite(inner) for inner in value] if isinstance(value, list) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events of a ``metrics.jsonl``, in order, each with ``kind`` and ``time``. NaN and infinities are floats.

    An incomplete last line, after a crash, is omitted. Raises DataError if the file is missing or invalid.
    """
    try:
        lines = read_regular(path, None).split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected the JSON lines that a run writes to its directory") from error
    events = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not all(isinstance(event.get(key, ()), kind) for key, kind in _EVENT.items()):
                raise ValueError("not an event")
        except (ValueError, RecursionError) as error:
            if number == len(lines):                     # no newline after it: incomplete
                break
            raise DataError(f"{path}:{number}: {line[:60]!r} is no event; expected an object with kind and time") from error
        events.append(restore_non_finite(event))
    return events


class LineWriter:
    """A text file that grows by complete lines. Lines are lost while the disk is full."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def append(self, line: str) -> None:
        """Append a line. If it raises OSError, no part of the line is in the file."""
        data = line.encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "no space for a whole line")
            self._size += len(data)
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._size)
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        self._file.close()


def open_resumed(path: Path, step: int | None, is_later: Callable[[dict[str, Any], int], bool], prefix: str = "") -> LineWriter:
    """Open the JSON lines at ``path`` for a run that resumes from ``step``, and remove the lines of later steps.

    Without a step the run is new: an existing file is renamed (``metrics.1.jsonl``). ``prefix`` precedes the object on each line.
    """
    if path.exists() and step is None:
        path.rename(next(aside for n in range(1, sys.maxsize) if not (aside := path.with_stem(f"{path.stem}.{n}")).exists()))
    elif path.exists() and step is not None:
        earlier = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):                         # incomplete, by the end of the previous job
                event = json.loads(line.removeprefix(prefix))
                if isinstance(event, dict) and not is_later(event, step):
                    earlier.append(line + "\n")
        replace_file(path, "".join(earlier).encode())
    return LineWriter(path)


def _is_later(event: dict[str, Any], step: int) -> bool:
    """Whether a run that resumes from ``step`` repeats ``event``: an epoch that began at ``step`` begins again; a checkpoint, an
    evaluation or a report at ``step`` stays."""
    event_step = event.get("resumed_from" if event.get("kind") == "start" else "step")
    return isinstance(event_step, int) and (event_step >= step if event.get("kind") == "epoch" else event_step > step)


class JsonLines:
    """The sink of ``metrics.jsonl``: one strict JSON object per event, written at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: LineWriter | None = None
        self._pending: list[str] = []                    # until `start` distinguishes a resumed run from a new one

    def write(self, event: Event) -> None:
        self._pending.append(json.dumps(to_strict_json({"kind": event.kind, "time": event.time, **event.fields}), allow_nan=False))
        if event.kind == "start" or self._lines is not None:
            self._flush(event.fields.get("resumed_from"))

    def _flush(self, step: int | None) -> None:
        if self._lines is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = open_resumed(self.path, step, _is_later)
        while self._pending:
            self._lines.append(self._pending.pop(0))

    def close(self) -> None:
        if self._pending:
            self._flush(None)
        if self._lines is not None:
            self._lines.close()


# --------------------------------------------------------------------------------------------------------- terminal


def format_duration(seconds: float) -> str:
    """Format ``seconds`` as h:mm:ss."""
    if not math.isfinite(seconds):
        return "?"
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02}:{total % 60:02}"


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, as for disks and networks."""
    return format_decimal(count, "B", "kB", "MB", "GB", "TB")


def format_decimal(count: float, *units: str) -> str:
    power = next((power for power in range(len(units) - 1) if count < 1000 ** (power + 1)), len(units) - 1)
    return f"{count / 1000**power:.{4 if power == len(units) - 1 else 3}g} {units[power]}"


def format_energy(fields: Mapping[str, Any]) -> str:
    units = "J", "kJ", "MJ", "GJ"  # 3.6 MJ are one kWh
    kinds = [f"{name} {format_decimal(fields[key], *units)}" for name, key in
             (("GPUs", "gpu_joules"), ("processors", "cpu_joules"), ("memory", "memory_joules")) if key in fields]
    counted = [f"{fields['gpus']} of {fields.get('world')} GPUs"] if fields.get("gpus") else []
    counted += [f"processors of {fields['nodes_counted']} of {fields.get('nodes')} nodes"] if fields.get("nodes_counted") else []
    mean = f"{format_number(fields.get('joules_per_sample', math.nan))} J a sample"
    limits = sorted({format_number(watts) for watts in fields.get("gpu_limits_w") or ()}, key=float)
    limit = f"; GPUs limited to {' to '.join(limits)} W" if limits else ""
    total = format_decimal(fields.get("joules", math.nan), *units)
    return f"{total}, {mean} ({', '.join(kinds)}; counted: {', '.join(counted)}{limit})"


def format_number(value: Any) -> str:
    """Format a metric with four significant digits."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def format_rate(rate: float, unit: str = "samples") -> str:
    """Format samples per second, without decimals from 100 on."""
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def format_rates(fields: Mapping[str, Any]) -> list[str]:
    """Format the rates of a `train` event: samples per second, other units, and the model FLOPs utilization."""
    names = [name for name in fields if name.endswith("_per_second") and fields[name]]
    rates = [format_rate(fields[name], name.removesuffix("_per_second")) for name in names]
    return rates + ([f"MFU {100 * fields['mfu']:.1f} %"] if "mfu" in fields else [])


def format_reason(fields: Mapping[str, Any]) -> str:
    """Describe why a run stopped, by the fields of its `stop` event."""
    reason = str(fields.get("reason"))
    text = {"target": "target reached", "signal": "stopped by a signal"}.get(reason, reason)
    return text + (", target reached" if fields.get("target_reached") and reason != "target" else "")


_NOT_METRICS = {"step", "epoch", "samples", "seconds", "mfu", "lr"}


def select_metrics(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss and the metrics among the fields of a `train` or `evaluate` event."""
    return {name: value for name, value in fields.items()
            if name not in _NOT_METRICS and not name.startswith("gpu_") and not name.endswith("_per_second")
            and isinstance(value, (int, float)) and not isinstance(value, bool)}


class Terminal:
    """The sink of stdout: a progress bar on a terminal, one plain line per event in a job log or a notebook."""

    def __init__(self, stream: TextIO | None = None, console: "Console | None" = None) -> None:
        self._stream = stream or sys.stdout
        if console is None and self._stream.isatty():
            from rich.console import Console

            console = Console(file=self._stream)
        self._console = console if console and console.is_terminal and not console.is_jupyter else None
        self._bar: Progress | None = None
        self._steps = self._batch = 0
        self._first_report: tuple[float, int] | None = None     # time and step of this job's first report, the origin of the ETA
        self._evaluation = ""

    def write(self, event: Event) -> None:
        if event.kind == "start":
            self._steps, self._first_report = int(event.fields.get("steps") or 0), None
            self._batch = int(event.fields.get("global_batch") or 0)
        line = _escape(getattr(self, f"_{event.kind}", lambda event: "")(event))
        if self._console is None:
            if line:
                self._stream.write(line + "\n")
                self._stream.flush()
            return
        if event.kind in ("start", "train"):
            self._advance(event)
        if event.kind == "stop":
            self.close()
        if line and event.kind not in ("train", "checkpoint"):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _advance(self, event: Event) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        if self._bar is None:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
            self._bar = Progress(BarColumn(24), text, console=self._console, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=self._steps or None)
            self._bar.start()
        parts = ["waiting for the first step"] if event.kind == "start" else [*self._format_numbers(event), self._evaluation]
        done = event.fields.get("step", event.fields.get("resumed_from")) or 0
        self._bar.update(self._bar.task_ids[0], completed=done, description="  ".join(parts))

    def _format_step(self, fields: Mapping[str, Any]) -> str:
        return f"step {fields.get('step', 0)}/{self._steps}" if self._steps else f"step {fields.get('step', 0)}"

    def _format_numbers(self, event: Event) -> list[str]:
        fields = event.fields
        parts = [self._format_step(fields)]
        if "epoch" in fields:
            parts.append(f"epoch {round(fields['epoch'], 2):g}")
        parts += [f"{name} {format_number(value)}" for name, value in select_metrics(fields).items()]
        if "lr" in fields:
            parts.append(f"lr {fields['lr']:.1e}")
        parts += format_rates(fields)
        if (left := self._remaining_seconds(event)) is not None:
            parts.append(f"ETA {format_duration(left)}")
        return parts

    def _remaining_seconds(self, event: Event) -> float | None:
        """Return seconds to the last planned step; from the second report on they include evaluations and checkpoints."""
        step = int(event.fields.get("step", 0))
        if event.kind != "train" or not self._steps:
            return None
        if self._first_report is None:
            self._first_report = (event.time, step)
        first_time, first_step = self._first_report
        if step > first_step:
            return (event.time - first_time) / (step - first_step) * (self._steps - step)
        rate = event.fields.get("samples_per_second") or 0
        return self._batch * (self._steps - step) / rate if rate > 0 and self._batch else None

    def _start(self, event: Event) -> str:
        get = event.fields.get
        parts = [f"{get('name', 'run')}:"]
        parts += [f"{get('parameters'):,} parameters"] if get("parameters") else []
        parts += [f"{get('world', 1)} x {get('device')}"] if get("device") else []
        parts += [f"{self._steps:,} steps"] if self._steps else []
        parts += ([f"{format_number(get('epochs'))} epochs of {get('steps_per_epoch')}"]
                  if get("epochs") and get("steps_per_epoch") else [])
        parts += [f"global batch {get('global_batch')}"] if get("global_batch") else []
        parts += [f"resumed from step {get('resumed_from')}"] if get("resumed_from") is not None else []
        return parts[0] + " " + ", ".join(parts[1:]) + (f" -> {get('directory')}" if get("directory") else "")

    def _startup(self, event: Event) -> str:
        return startup.format_parts(event.fields.get("parts") or {})

    def _train(self, event: Event) -> str:
        return "  ".join(self._format_numbers(event))

    def _evaluate(self, event: Event) -> str:
        metrics = "  ".join(f"{name} {format_number(value)}" for name, value in select_metrics(event.fields).items())
        self._evaluation = f"[evaluated: {metrics}]"
        title = f"evaluation at {self._format_step(event.fields)}"
        epoch = f"epoch {round(event.fields['epoch'], 2):g}" if "epoch" in event.fields else ""
        return "  ".join(word for word in (title, epoch, metrics, f"{event.fields.get('seconds', math.nan):.1f} s") if word)

    def _checkpoint(self, event: Event) -> str:
        get = event.fields.get
        return (f"checkpoint at {self._format_step(event.fields)}  {format_bytes(get('bytes') or 0)} in "
                f"{get('seconds') or 0:.2f} s  {get('path')}")

    def _note(self, event: Event) -> str:
        where = f" at {self._format_step(event.fields)}" if event.fields.get("step") is not None else ""
        return f"note{where}: {event.fields.get('text', '')}"

    def _energy(self, event: Event) -> str:
        return f"energy: {format_energy(event.fields)}"

    def _stop(self, event: Event) -> str:
        get = event.fields.get
        return (f"{format_reason(event.fields)} at {self._format_step(event.fields)} after "
                f"{format_duration(get('seconds') or 0)}, {get('samples') or 0:,} samples")


# ------------------------------------------------------------------------------------------------------ TensorBoard


def name_scalars(event: Event) -> dict[str, float]:
    """Return the scalars of a `train` or `evaluate` event by their names in a tracker: ``train/*`` and ``evaluate/*``."""
    if event.kind not in ("train", "evaluate") or event.fields.get("step") is None:
        return {}
    values = select_metrics(event.fields) | {name: value for name, value in event.fields.items() if event.kind == "train"
                                             and (name in ("lr", "mfu", "epoch") or name.startswith("gpu_")
                                                  or name.endswith("_per_second"))}
    return {f"{event.kind}/{name}": value for name, value in values.items()}


class TensorBoard:
    """The sink of these scalars, with TensorBoard's event writer, without torch or TensorFlow."""

    def __init__(self, directory: Path, project: str | None = None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def write(self, event: Event) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if event.kind == "start" and (since := event.fields.get("resumed_from")) is not None:
            # TensorBoard hides the values of earlier files from this step on
            self._writer.add_event(Record(wall_time=event.time, step=since + 1, session_log=SessionLog(status=SessionLog.START)))
        elif scalars := name_scalars(event):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            self._writer.add_event(Record(wall_time=event.time, step=event.fields["step"], summary=Summary(value=values)))
            if event.kind == "evaluate":
                self._writer.flush()

    def close(self) -> None:
        self._writer.close()
