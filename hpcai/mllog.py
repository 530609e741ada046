"""The MLPerf log: ``:::MLLOG {...}`` lines for the compliance checkers of MLPerf HPC 3.0 and MLPerf Training 4.0 to 6.1.

The training loop is independent of it. An app declares its benchmark in apps/NAME/mlperf.toml: keys of settings, by their dotted
paths in the `start` event, and the metric among those of an `evaluate` event. Sources of keys and rules: the files of
``hpc_3.0.0``, ``training_4.0.0``, ``training_5.0.0`` and ``training_6.1.0`` of mlcommons/logging, and mlcommons/training_policies.
"""

import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError
from hpcai.log import Event, LineWriter, open_resumed

PREFIX = ":::MLLOG "
REQUIRED = object()

Lookup = Callable[[str], Any]
"""Returns the value of a setting by its dotted path."""
Rule = Callable[[Lookup], Any]
"""Returns a value derived from settings."""


class Entry(NamedTuple):
    """An MLLOG key, the path or the rule of its value, and the default for runs without this setting."""

    key: str
    setting: str | Rule
    default: Any = REQUIRED


class Goal(NamedTuple):
    """A target of one of several metrics for checkpoints, computed after the training; ``label`` is MLPerf's name of the metric."""

    metric: str
    label: str
    target: float
    higher: bool = False

    def is_reached(self, value: float) -> bool:
        return value >= self.target if self.higher else value <= self.target


class Benchmark(NamedTuple):
    """The lines of a benchmark besides the common ones. ``name`` is MLPerf's; ``metric`` is that of an `evaluate` event."""

    name: str
    entries: tuple[Entry, ...]
    metric: str
    metric_key: str
    log_samples: bool = False
    """whether lines have the number of samples too"""
    samples_per_row: int = 1
    """samples that MLPerf counts in one of ours, which is a packed row; those of evaluations are not packed"""
    goals: tuple[Goal, ...] = ()
    """for ``judge_checkpoint``, in place of ``metric``: a run succeeds with a checkpoint that reaches all of them"""


# Paths that begin with "run" are fields of the `start` event, such as run.parameters.
SUBMISSION = (
    Entry("submission_org", "report.submission.org", "reference"),
    Entry("submission_division", "report.submission.division", "closed"),
    Entry("submission_status", "report.submission.status", "onprem"),
    Entry("submission_platform", "report.submission.platform", None),          # None: the world and the device of the run
)


def base_learning_rate(setting: Lookup) -> float:
    """Return MLPerf's base learning rate, at the start of the warm-up. Times ``peak_factor`` it is the peak."""
    start = setting("step.schedule.start")
    return start if start and setting("step.schedule.warmup") else setting("step.lr")


def peak_factor(setting: Lookup) -> float:
    """Return the factor from MLPerf's base learning rate to the peak."""
    return setting("step.lr") / base_learning_rate(setting)


def if_lamb(value: Any) -> Rule:
    """Return the rule ``value`` for LAMB, and None for other optimizers."""
    return lambda setting: value if setting("step.optimizer") == "lamb" else None


def in_unit(unit: str, path: str) -> Rule:
    """Return the rule of a length of the schedule. It raises ConfigError if the schedule has another unit."""

    def value(setting: Lookup) -> Any:
        if setting("step.schedule.unit") != unit and setting(path):
            raise ConfigError(f"the MLPerf log of this benchmark counts {path} in {unit}; set step.schedule.unit={unit}")
        return setting(path)

    return value


def decay_name(setting: Lookup) -> Any:
    """Return MLPerf's name of the decay."""
    return {"steps": "multistep", "cosine": "cosine_annealing"}.get(setting("step.schedule.decay"))


def decay_factor(setting: Lookup) -> Any:
    """Return the factor of the learning rate at each milestone."""
    factors = setting("step.schedule.decay_to") if setting("step.schedule.decay") == "steps" else ()
    return factors[0] if factors else None


def if_decay(kinds: tuple[str, ...], rule: Rule) -> Rule:
    """Return ``rule`` for the decays ``kinds``, and None for other decays."""
    return lambda setting: rule(setting) if setting("step.schedule.decay") in kinds else None


def _activation_precision(setting: Lookup) -> str:
    """Return the precision of activations and of attention's matrix products."""
    return "bfloat16" if setting("step.precision").startswith("bf16") else str(setting("step.precision"))


def _communication_precision(setting: Lookup) -> str:
    """Return the precision of communicated activations or gradients."""
    return _activation_precision(setting) if _model_ranks(setting) > 1 or setting("step.precision") == "bf16-params" else "fp32"


def _model_ranks(setting: Lookup) -> int:
    """Return the number of ranks of a replica of the model."""
    return math.prod(size for axis, size in setting("mesh").items() if axis not in ("replicate", "expert", "evaluate"))


def _micro_batch(setting: Lookup) -> int:
    replicas = setting("run.world") // _model_ranks(setting)
    return int(setting("run.global_batch") // (replicas * setting("step.accumulate")))


# Required by Training 6.1 for every run.
DISCLOSED = (
    Entry("lowest_numerical_precision_in_linear",
          lambda setting: "fp8" if setting("step.matmul") == "fp8" else _activation_precision(setting)),
    Entry("lowest_numerical_precision_in_attn", _activation_precision),
    Entry("lowest_numerical_precision_in_comm", _communication_precision),
    *(Entry(f"{axis}_parallelism", f"mesh.{axis}", 1) for axis in ("tensor", "pipeline", "context", "expert")),
    Entry("micro_batch_size", _micro_batch),
    Entry("config_filename", lambda setting: "settings.yaml"),               # beside the log
)


def read_benchmarks(module: str, rules: Mapping[str, Rule]) -> dict[str, Benchmark]:
    """Return the benchmarks of an app by name, from the TOML file beside ``module``.

    A table has the fields of a benchmark. Its ``keys``, after those of the whole file, are the keys of the log, each with the
    dotted path of a setting ("path in steps" for a length of the schedule), "computed" by ``rules``, or a constant. A key whose
    value ends with "?" is None for runs without the setting. ``disclosed = true`` adds the keys that Training 6.1 requires.
    """

    def entry(key: str, value: Any) -> Entry:
        if not isinstance(value, str):
            return Entry(key, lambda setting: value)
        path, _, unit = value.rstrip("?").partition(" in ")
        rule = rules[key] if path == "computed" else in_unit(unit, path) if unit else path
        return Entry(key, rule, None if value.endswith("?") else REQUIRED)

    tables = tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))
    common, benchmarks = tables.pop("keys", {}), {}
    for name, table in tables.items():
        keys, disclosed = common | table.pop("keys"), DISCLOSED if table.pop("disclosed", False) else ()
        goals = tuple(Goal(**goal) for goal in table.pop("goals", ()))
        benchmarks[name] = Benchmark(name, (*(entry(*pair) for pair in keys.items()), *disclosed), goals=goals, **table)
    return benchmarks


def entry_value(entry: Entry, settings: Mapping[str, Any]) -> Any:
    """Return the value of ``entry`` for a run with ``settings``. Raises ConfigError if it is required and missing."""

    def setting(path: str) -> Any:
        value: Any = settings
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else value[int(name)] if isinstance(value, list) else None
        if value is None and entry.default is REQUIRED:
            raise ConfigError(f"the MLPerf log needs the setting {path} for its key {entry.key}, but this run has none; set it")
        return entry.default if value is None else value

    return setting(entry.setting) if isinstance(entry.setting, str) else entry.setting(setting)


class MlperfLog:
    """The sink of ``mlperf.log``, with the lines of one run of ``benchmark``, also written to ``echo``.

    Epochs count from 1. The status is success if the run has reached its target, and aborted otherwise, also after an error.
    """

    def __init__(self, path: Path, benchmark: Benchmark, echo: TextIO | None = None) -> None:
        self.path, self.benchmark, self.echo = path, benchmark, echo
        self._lines: LineWriter | None = None
        self._start_time: float | None = None                 # time of the first event of any kind
        self._steps_per_epoch = self._batch = 1
        self._open_epoch = 0                                   # the epoch that has started but not stopped, or 0
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
        """Log the end of a run that had no `stop` event, and close the file."""
        if self._running:
            self._stop(Event("stop", time.time(), {"step": self._last_step}))
        if self._lines is not None:
            self._lines.close()

    def _line(self, at: float, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        # NaN stays NaN: the checker parses with Python's json and compares numbers
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
        sizes = (get(name) or 0 for name in ("global_batch", "train_samples"))
        batch, samples = (size * self.benchmark.samples_per_row or None for size in sizes)
        self._steps_per_epoch, self._batch = (max(1, int(number or 1)) for number in (get("steps_per_epoch"), batch))
        resuming = get("resumed_from") is not None and self.path.exists()
        self._lines = open_resumed(self.path, get("resumed_from"), self._is_later, PREFIX)
        self._running, self._last_step = True, get("resumed_from") or 0
        if resuming:                                      # one header in a log, independent of the number of restarts
            return
        world, nodes = int(get("world") or 1), int(get("nodes") or 1)
        device = str(get("device") or "unknown device")
        values["submission_platform"] = values["submission_platform"] or f"{world} x {device}"
        values |= {
            "submission_benchmark": self.benchmark.name,
            "number_of_nodes": nodes,
            "accelerators_per_node": 0 if "cpu" in device.lower() else world // nodes,
            "number_of_ranks": world,
            "global_batch_size": batch,
            "train_samples": samples,
            "eval_samples": get("validation_samples"),
        } | specific                                     # after the keys with which the checker compares it
        # False: this program does not drop the page cache; a job script that does so logs its own line
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
        """Log an evaluation: outside of the epoch after its last step, otherwise inside."""
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
        """Whether a run that resumes from ``step`` logs ``record`` again: later steps, an unfinished epoch, the end of the run."""
        at, epoch = (record["metadata"].get(name, 0) for name in ("step_num", "epoch_num"))
        unfinished = record["key"] in ("epoch_start", "epoch_stop") and epoch > step // self._steps_per_epoch
        return at > step or unfinished or record["key"] == "run_stop"


def judge_checkpoint(path: Path, benchmark: Benchmark, step: int, saved: float, values: Mapping[str, float], samples: int) -> bool:
    """Add metrics ``values`` of the checkpoint of ``step``, on ``samples`` samples, to the log of a finished run; return whether it
    reaches all goals. The first that does makes the run a success, which ends at the time ``saved`` of its completion.

    Raises DataError if there is no such log, or one of another benchmark.
    """
    lines = _read_lines(path)
    last = next((line for line in reversed(lines) if line["key"] == "run_stop"), None)
    batch = next((line["value"] for line in lines if line["key"] == "global_batch_size"), None)
    matches = any(line["key"] == "submission_benchmark" and line["value"] == benchmark.name for line in lines)
    if last is None or batch is None or not matches:
        raise DataError(f"{path}: not the log of a finished run of {benchmark.name}; give the directory of such a run")
    epochs = sum(line["key"] == "epoch_start" and line["metadata"]["step_num"] < step for line in lines)
    location = {"epoch_num": epochs, "step_num": step, "samples_count": step * batch}
    earlier = [line for line in lines if line["key"] == benchmark.metric_key and line["metadata"].get("step_num") == step]
    updated = [line for line in lines if line is not last and line not in earlier]
    for line in updated:
        line |= {"value": samples} if line["key"] == "eval_samples" else {}
    record = {"namespace": "", "time_ms": round(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": benchmark.metric_key}
    for goal in benchmark.goals:
        metadata = location | {"metric": goal.label, "saved_ms": round(saved * 1000)}
        updated.append(record | {"value": values[goal.metric], "metadata": metadata})
    goals = {goal.label: goal for goal in benchmark.goals}
    reached_lines: dict[int, list[dict[str, Any]]] = {}
    for line in updated:
        if line["key"] == benchmark.metric_key and goals[line["metadata"]["metric"]].is_reached(line["value"]):
            reached_lines.setdefault(line["metadata"].get("step_num"), []).append(line)
    stop = last | {"metadata": last["metadata"] | {"status": "aborted"}}
    if reached_steps := [number for number, reached in reached_lines.items() if len(reached) == len(goals)]:
        metadata = reached_lines[min(reached_steps)][0]["metadata"]
        where = {name: metadata[name] for name in location}
        stop = last | {"time_ms": metadata["saved_ms"], "metadata": {"status": "success", **where}}
    replace_file(path, "".join(f"{PREFIX}{json.dumps(line)}\n" for line in [*updated, stop]).encode())
    return all(goal.is_reached(values[goal.metric]) for goal in benchmark.goals)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise DataError(f"{path}: {problem.strerror}; runs write it if report.sinks has mlperf") from problem
    records = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):                             # incomplete after a crash
            records.append(json.loads(line.removeprefix(PREFIX)))
    return [line for line in records if isinstance(line, dict) and {"key", "value", "metadata"} <= line.keys()]
