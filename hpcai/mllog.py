"""The MLPerf log: ``:::MLLOG {...}`` lines, as the compliance checkers of MLPerf HPC 3.0 and MLPerf Training 4.0 to 6.1 want them.

The training loop knows nothing of it. An app declares its benchmark in apps/NAME/mlperf.py: which setting, found by its dotted path
in the `start` event, is logged under which key, and which metric of an `evaluate` event is the benchmark's own. Keys and rules: the
files of ``hpc_3.0.0``, ``training_4.0.0``, ``training_5.0.0`` and ``training_6.1.0`` of mlcommons/logging, and the rules of
mlcommons/training_policies.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hpcai.errors import ConfigError, DataError
from hpcai.log import Event, LineWriter, open_resumed

PREFIX = ":::MLLOG "
REQUIRED = object()

Lookup = Callable[[str], Any]
"""A setting's value by its dotted path."""
Rule = Callable[[Lookup], Any]
"""A value that follows from settings."""


class Entry(NamedTuple):
    """An MLLOG key, the setting that holds its value (or the rule that gives it), and the value where a run has no such setting."""

    key: str
    setting: str | Rule
    default: Any = REQUIRED


class Goal(NamedTuple):
    """One of several metrics by which checkpoints are judged after the training: its name, what MLPerf calls it, and what is good
    enough."""

    metric: str
    label: str
    target: float
    higher: bool = False

    def is_reached(self, value: float) -> bool:
        return value >= self.target if self.higher else value <= self.target


class Benchmark(NamedTuple):
    """What one benchmark logs beside the common lines; ``name`` is what MLPerf calls it, ``metric`` its own among those of an
    `evaluate` event."""

    name: str
    entries: tuple[Entry, ...]
    metric: str
    metric_key: str
    log_samples: bool = False
    """whether its lines tell how many samples were seen, too"""
    goals: tuple[Goal, ...] = ()
    """what ``judge`` tells in place of ``metric``: a run succeeds with a checkpoint that reaches all of them"""


# Paths that begin with "run" name what the start of the run tells, such as run.parameters.
SUBMISSION = (
    Entry("submission_org", "report.submission.org", "reference"),
    Entry("submission_division", "report.submission.division", "closed"),
    Entry("submission_status", "report.submission.status", "onprem"),
    Entry("submission_platform", "report.submission.platform", None),          # None: the world and the device of the run
)


def base_learning_rate(setting: Lookup) -> float:
    """MLPerf's base learning rate: where the warm-up starts. The base times ``rise`` is the peak."""
    start = setting("step.schedule.start")
    return start if start and setting("step.schedule.warmup") else setting("step.lr")


def peak_factor(setting: Lookup) -> float:
    """The factor from MLPerf's base learning rate to the peak."""
    return setting("step.lr") / base_learning_rate(setting)


def if_lamb(value: Any) -> Rule:
    """``value`` where the optimizer is LAMB, otherwise nothing."""
    return lambda setting: value if setting("step.optimizer") == "lamb" else None


def in_unit(unit: str, path: str) -> Rule:
    """A length of the schedule. Raises ConfigError where the run's schedule counts in another unit."""

    def value(setting: Lookup) -> Any:
        if setting("step.schedule.unit") != unit and setting(path):
            raise ConfigError(f"the MLPerf log of this benchmark counts {path} in {unit}; set step.schedule.unit={unit}")
        return setting(path)

    return value


in_steps = partial(in_unit, "steps")


def decay_name(setting: Lookup) -> Any:
    """MLPerf's name of the decay."""
    return {"steps": "multistep", "cosine": "cosine_annealing"}.get(setting("step.schedule.decay"))


def decay_factor(setting: Lookup) -> Any:
    """The factor by which each milestone multiplies the rate."""
    factors = setting("step.schedule.decay_to") if setting("step.schedule.decay") == "steps" else ()
    return factors[0] if factors else None


def if_decay(kinds: tuple[str, ...], rule: Rule) -> Rule:
    """What ``rule`` gives where the decay is one of ``kinds``, otherwise nothing."""
    return lambda setting: rule(setting) if setting("step.schedule.decay") in kinds else None


def _activation_precision(setting: Lookup) -> str:
    """Also of attention's products."""
    return "bfloat16" if setting("step.precision").startswith("bf16") else str(setting("step.precision"))


def _linear_precision(setting: Lookup) -> str:
    return "fp8" if setting("step.products") == "fp8" else _activation_precision(setting)


def _communication_precision(setting: Lookup) -> str:
    """Activations between cut layers, or gradients."""
    return _activation_precision(setting) if _model_ranks(setting) > 1 or setting("step.precision") == "bf16-params" else "fp32"


def _model_ranks(setting: Lookup) -> int:
    """Processes that hold a copy of the model together."""
    return math.prod(size for axis, size in setting("mesh").items() if axis not in ("replicate", "evaluate"))


def _micro_batch(setting: Lookup) -> int:
    replicas = setting("run.world") // _model_ranks(setting)
    return int(setting("run.global_batch") // (replicas * setting("step.accumulate")))


# What Training 6.1 wants to know of every run.
DISCLOSED = (
    Entry("lowest_numerical_precision_in_linear", _linear_precision),
    Entry("lowest_numerical_precision_in_attn", _activation_precision),
    Entry("lowest_numerical_precision_in_comm", _communication_precision),
    *(Entry(f"{axis}_parallelism", f"mesh.{axis}", 1) for axis in ("tensor", "pipeline", "context")),
    Entry("expert_parallelism", lambda setting: 1),
    Entry("micro_batch_size", _micro_batch),
    Entry("config_filename", lambda setting: "settings.yaml"),               # beside the log
)


def entry_value(entry: Entry, settings: Mapping[str, Any]) -> Any:
    """The value that ``entry`` logs for a run with ``settings``. Raises ConfigError where it is required and missing."""

    def setting(path: str) -> Any:
        value: Any = settings
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is None and entry.default is REQUIRED:
            raise ConfigError(f"the MLPerf log needs the setting {path} for its key {entry.key}, but this run has none; set it")
        return entry.default if value is None else value

    return setting(entry.setting) if isinstance(entry.setting, str) else entry.setting(setting)


class MlperfLog:
    """``mlperf.log``: the lines of one run of ``benchmark``; ``echo`` gets them too.

    Epochs count from 1. A run is a success when it reached its target, and aborted otherwise, also where an error ends it.
    """

    def __init__(self, path: Path, benchmark: Benchmark, echo: TextIO | None = None) -> None:
        self.path, self.benchmark, self.echo = path, benchmark, echo
        self._lines: LineWriter | None = None
        self._start_time: float | None = None                 # time of the first event of any kind: the program is up
        self._steps_per_epoch = self._batch = 1
        self._open_epoch = 0                                   # the epoch that has started and not stopped, or 0
        self._running = False
        self._last_step = 0                                   # step of the last event

    def write(self, event: Event) -> None:
        self._start_time = self._start_time or event.time
        if event.kind == "start":
            self._start(event)
        elif self._lines is not None and event.kind in ("epoch", "evaluate", "stop"):
            getattr(self, f"_{event.kind}")(event)
        self._last_step = max(self._last_step, event.fields.get("step") or 0)

    def close(self) -> None:
        """A run that has not stopped was broken by something."""
        if self._running:
            self._stop(Event("stop", time.time(), {"step": self._last_step}))
        if self._lines is not None:
            self._lines.close()

    def _line(self, at: float, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        # NaN stays Python's NaN here: the checker reads with Python's json and compares numbers
        if self.benchmark.log_samples and "step_num" in metadata:
            metadata["samples_count"] = metadata["step_num"] * self._batch
        record = {"namespace": "", "time_ms": round(at * 1000), "event_type": kind, "key": key, "value": value}
        line = PREFIX + json.dumps(record | {"metadata": metadata})
        assert self._lines is not None
        self._lines.append(line)
        if self.echo is not None:
            self.echo.write(line + "\n")
            self.echo.flush()

    def _start(self, event: Event) -> None:
        get, at = event.fields.get, event.time
        settings = {**(get("settings") or {}), "run": event.fields}
        values, specific = ({e.key: entry_value(e, settings) for e in entries} for entries in (SUBMISSION, self.benchmark.entries))
        self._steps_per_epoch, self._batch = (max(1, int(get(name) or 1)) for name in ("steps_per_epoch", "global_batch"))
        resuming = get("resumed_from") is not None and self.path.exists()
        self._lines = open_resumed(self.path, get("resumed_from"), self._is_later, PREFIX)
        self._running, self._last_step = True, get("resumed_from") or 0
        if resuming:                                      # one header in a run's log, however many lives the run has
            return
        world, nodes = int(get("world") or 1), int(get("nodes") or 1)
        device = str(get("device") or "unknown device")
        values["submission_platform"] = values["submission_platform"] or f"{world} x {device}"
        values |= {
            "submission_benchmark": self.benchmark.name,
            "number_of_nodes": nodes,
            "accelerators_per_node": 0 if "cpu" in device.lower() else world // nodes,
            "number_of_ranks": world,
            "global_batch_size": get("global_batch"),
            "train_samples": get("train_samples"),
            "eval_samples": get("validation_samples"),
        } | specific                                     # after what the checker compares it with
        # False: this program drops no page cache; a job script that does so logs its own line
        self._line(self._start_time or at, "POINT_IN_TIME", "cache_clear", False)
        self._line(self._start_time or at, "INTERVAL_START", "init_start")
        for key, value in values.items():
            if value is not None:
                self._line(at, "POINT_IN_TIME", key, value)
        self._line(at, "INTERVAL_END", "init_stop")
        self._line(at, "INTERVAL_START", "run_start")

    def _epoch(self, event: Event) -> None:
        self._end_epoch(event.time, event.fields["step"])
        self._open_epoch = event.fields["epoch"] + 1
        self._line(event.time, "INTERVAL_START", "epoch_start", epoch_num=self._open_epoch, step_num=event.fields["step"])

    def _end_epoch(self, at: float, step: int) -> None:
        if self._open_epoch:
            self._line(at, "INTERVAL_END", "epoch_stop", epoch_num=self._open_epoch, step_num=step)
        self._open_epoch = 0

    def _evaluate(self, event: Event) -> None:
        """An evaluation after the last step of an epoch is outside the epoch, any other one is inside."""
        step, start_time = event.fields["step"], event.time - (event.fields.get("seconds") or 0)
        metadata = {"epoch_num": math.ceil(step / self._steps_per_epoch), "step_num": step}
        if step % self._steps_per_epoch == 0 and self._open_epoch == metadata["epoch_num"]:
            self._end_epoch(start_time, step)
        self._line(start_time, "INTERVAL_START", "eval_start", **metadata)
        if (error := event.fields.get(self.benchmark.metric)) is not None:
            self._line(event.time, "POINT_IN_TIME", self.benchmark.metric_key, error, **metadata)
        self._line(event.time, "INTERVAL_END", "eval_stop", **metadata)

    def _stop(self, event: Event) -> None:
        self._end_epoch(event.time, event.fields["step"])
        status = "success" if event.fields.get("target_reached") and not self.benchmark.goals else "aborted"
        metadata = {"epoch_num": math.ceil(event.fields["step"] / self._steps_per_epoch), "step_num": event.fields["step"]}
        self._line(event.time, "INTERVAL_END", "run_stop", status=status, **metadata)
        self._running = False

    def _is_later(self, record: dict[str, Any], step: int) -> bool:
        """Whether a run that goes on from ``step`` writes ``record`` again: an unfinished epoch starts again, and the run has not
        stopped."""
        at, epoch = (record["metadata"].get(name, 0) for name in ("step_num", "epoch_num"))
        unfinished = record["key"] in ("epoch_start", "epoch_stop") and epoch > step // self._steps_per_epoch
        return at > step or unfinished or record["key"] == "run_stop"


def judge_checkpoint(path: Path, benchmark: Benchmark, step: int, saved: float, values: Mapping[str, float], samples: int) -> bool:
    """Add to the log of a run that has ended what ``samples`` samples say of its checkpoint of ``step``, which was whole at the
    time ``saved`` -> whether it reaches all goals. The first one that does is a success, and its time the end of the run.

    Raises DataError where there is no such log, or none of this benchmark.
    """
    lines = _read_lines(path)
    last = next((line for line in reversed(lines) if line["key"] == "run_stop"), None)
    batch = next((line["value"] for line in lines if line["key"] == "global_batch_size"), None)
    matches = any(line["key"] == "submission_benchmark" and line["value"] == benchmark.name for line in lines)
    if last is None or batch is None or not matches:
        raise DataError(f"{path}: not the log of a run of {benchmark.name} that has ended; give the folder of such a run")
    epochs = sum(line["key"] == "epoch_start" and line["metadata"]["step_num"] < step for line in lines)
    location = {"epoch_num": epochs, "step_num": step, "samples_count": step * batch}
    kept = [line for line in lines if line is not last and (line["key"] != benchmark.metric_key or _get_step(line) != step)]
    for line in kept:
        line |= {"value": samples} if line["key"] == "eval_samples" else {}
    record = {"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": benchmark.metric_key}
    for goal in benchmark.goals:
        metadata = location | {"metric": goal.label, "saved_ms": round(saved * 1000)}
        kept.append(record | {"value": values[goal.metric], "metadata": metadata})
    new = path.with_name(f".partial.{path.name}")
    new.write_text("".join(f"{PREFIX}{json.dumps(line)}\n" for line in [*kept, _run_stop(kept, last, benchmark)]))
    new.replace(path)
    return all(goal.is_reached(values[goal.metric]) for goal in benchmark.goals)


def _run_stop(lines: list[dict[str, Any]], last: dict[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """``run_stop``, with the first checkpoint that reaches all goals; ``last`` is as it was."""
    goals = {goal.label: goal for goal in benchmark.goals}
    reached_lines: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if line["key"] == benchmark.metric_key and goals[line["metadata"]["metric"]].is_reached(line["value"]):
            reached_lines.setdefault(_get_step(line), []).append(line)
    first = min((step for step, reached in reached_lines.items() if len(reached) == len(goals)), default=None)
    if first is None:
        return last | {"metadata": last["metadata"] | {"status": "aborted"}}
    metadata = reached_lines[first][0]["metadata"]
    where = {name: metadata[name] for name in ("epoch_num", "step_num", "samples_count")}
    return last | {"time_ms": metadata["saved_ms"], "metadata": {"status": "success", **where}}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise DataError(f"{path}: {problem.strerror}; a run keeps it where report.sinks has mlperf") from problem
    records = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):                             # torn by a crash
            records.append(json.loads(line.removeprefix(PREFIX)))
    return [line for line in records if isinstance(line, dict) and {"key", "value", "metadata"} <= line.keys()]


def _get_step(line: Mapping[str, Any]) -> Any:
    return line["metadata"].get("step_num")
