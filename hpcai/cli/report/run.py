"""The contents of a run's directory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcai import config
from hpcai.cli import apps
from hpcai.cli.report.picture import Finding, Picture, Table
from hpcai.errors import DataError
from hpcai.json_file import read_regular
from hpcai.log import METRICS, format_number, read_metrics, select_metrics

Series = tuple[np.ndarray, np.ndarray]                   # steps, values

# Substrings of names of metrics for which higher is better, besides those of the app's picture. `train.better` overrides them
# for `train.metric`.
HIGHER = ("acc", "r2", "auc", "confidence", "score", "f1", "precision", "recall", "correlation")


@dataclass
class RunRecord:
    """The events, settings and predictions in a run's directory."""

    directory: Path
    events: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    settings_text: str = ""
    picture: Picture | None = None                       # declared by the app
    predictions: Any = None                                    # read from the run's file by the picture, with its
    caption: str = ""
    table: Table | None = None
    found: Finding | None = None
    left_out: list[str] = field(default_factory=list)    # missing parts, with reasons

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(reversed(self.events_of("start"))), {})

    @property
    def stop(self) -> dict[str, Any]:
        """The stop event of the last start, or {} if it still runs."""
        last: dict[str, Any] = next((event for event in reversed(self.events) if event["kind"] in ("start", "stop")), {})
        return last if last.get("kind") == "stop" else {}

    @property
    def name(self) -> str:
        return str(self.start.get("name") or self.directory.resolve().name)

    def setting(self, path: str) -> Any:
        value: Any = self.settings
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def series(self, kind: str, name: str) -> Series:
        """Return steps and values; NaN for a precision where nothing was found, which evaluations report as 1."""
        events = [event for event in self.events_of(kind) if "step" in event and isinstance(event.get(name), (int, float))]
        pairs = {event["step"]: math.nan if _found_nothing(event, name) else event[name] for event in events}
        return np.array(sorted(pairs)), np.array([pairs[step] for step in sorted(pairs)], dtype=float)

    def names(self, kind: str) -> list[str]:
        """Return the metrics of all events of ``kind``, in order of first occurrence."""
        return list(dict.fromkeys(name for event in self.events_of(kind) for name in select_metrics(event) if name != "time"))

    @property
    def metric(self) -> str | None:
        """The metric of the run, or the first one that was evaluated."""
        return self.setting("train.metric") or next(iter(self.names("evaluate")), None)

    def describe(self, name: str, value: float) -> str:
        return ("none found" if name.startswith("precision") else "none") if math.isnan(value) else format_number(value)

    @property
    def finding(self) -> Finding:
        """The words on what was learnt: of the app's picture, or on the run's metric, or on the loss."""
        kind, name = ("evaluate", str(self.metric)) if self.metric in self.names("evaluate") else ("train", "loss")
        finite = [pair for pair in zip(*self.series(kind, name)) if math.isfinite(pair[1])]
        if self.found is not None or not finite:
            return self.found or Finding(f"No report has a finite {name}.", self.describe(name, math.nan), name)
        higher, target, (start, first) = self.higher_is_better(name), self.target(name), finite[0]
        step, value = (self.best(name) if kind == "evaluate" else None) or finite[-1]
        text = f"{name} of unseen samples" if kind == "evaluate" else "The training loss"
        text += f" is {format_number(float(value))} at step {step:,}"
        if len(finite) > 1:
            better = value > first if higher else value < first
            text += f", from {format_number(first)} at" if better else ", and did not get better after"
            text += f" step {start:,}"
        if target is not None:
            reached = value >= target if higher else value <= target
            text += f"; the target {format_number(target)} is {'reached' if reached else 'not reached'}"
        return Finding(f"{text}.", format_number(float(value)), f"{name}; {'higher' if higher else 'lower'} is better")

    def target(self, name: str) -> float | None:
        return self.setting("train.target") if name == self.setting("train.metric") else None

    def higher_is_better(self, name: str) -> bool:
        """Whether a higher value is better; the parts of the run's own metric are like it."""
        metric, better = self.setting("train.metric"), self.setting("train.better")
        if metric and better and (name == metric or name.startswith(f"{metric_stem(metric)}_")):
            return bool(better == "higher")
        return any(word in name.lower() for word in (*HIGHER, *getattr(self.picture, "HIGHER", ())))

    def metric_families(self) -> dict[str, list[str]]:
        """Return each evaluated metric but the loss, with its parts: skill with skill_rain, mean_skill with skill_rain."""
        names = [name for name in self.names("evaluate") if name != "loss"]
        families: dict[str, list[str]] = {}
        for name in names:
            parents = [parent for parent in names if name.startswith(f"{metric_stem(parent)}_")]
            family = families.setdefault(min(parents, key=len, default=name), [])
            family += [name] if parents else []
        return families

    @property
    def classes(self) -> list[str]:
        """Names of the classes, the first of which is the background."""
        classes_of = getattr(self.picture, "classes", None) if self.predictions is not None else None
        names = classes_of(self.predictions) if classes_of else self.setting("model.classes")
        return [str(name) for name in names] if isinstance(names, Sequence) else []

    def best(self, name: str) -> tuple[int, float] | None:
        """Return step and value of the best evaluation, or None if no value is finite."""
        pairs = [(int(step), float(value)) for step, value in zip(*self.series("evaluate", name)) if math.isfinite(value)]
        return (max if self.higher_is_better(name) else min)(pairs, key=lambda pair: pair[1], default=None)

    @property
    def training_time(self) -> Series:
        """Steps and training time at each, summed over all starts, whether the recorded time continues after a resume or not."""
        total = last = 0.0
        times = {0: 0.0}
        for event in self.events:
            if event["kind"] in ("train", "stop") and isinstance(event.get("seconds"), (int, float)):
                now = event["seconds"]
                total += now - last if now >= last else now
                last = now
                step = event.get("step") or 0
                times[max(step, *times) if event["kind"] == "stop" else step] = total  # the target was reached before the last step
        return np.array(sorted(times)), np.array([times[step] for step in sorted(times)], dtype=float)

    @property
    def seconds(self) -> float:
        return float(self.training_time[1].max())

    @property
    def rates(self) -> dict[str, float]:
        """The medians over all reports of samples and other units per second, and of the model FLOPs utilization."""
        names = dict.fromkeys(name for event in self.events_of("train") for name in event)
        values = {name: self.series("train", name)[1] for name in names if name == "mfu" or name.endswith("_per_second")}
        return {name: float(np.nanmedian(series)) for name, series in values.items() if np.isfinite(series).any()}

    @property
    def energy(self) -> dict[str, Any]:
        """The `energy` events of all starts of the run that recorded one, summed; {} if there is none."""
        events = self.events_of("energy")
        if not events:
            return {}
        keys = dict.fromkeys(key for event in events for key in event if key == "samples" or key.endswith("joules"))
        total = {key: sum(event[key] for event in events if key in event) for key in keys}
        derived: dict[str, Any] = {"joules_per_sample": total["joules"] / max(total.get("samples", 0), 1)}
        if limits := [watts for event in events for watts in event.get("gpu_limits_w") or ()]:
            derived["gpu_limits_w"] = [min(limits), max(limits)]
        return {**events[-1], **total, **derived}


def _found_nothing(event: Mapping[str, Any], name: str) -> bool:
    """Whether ``name`` is a precision, or a mean of some, of which one is 1 with a recall of 0: no positive was predicted."""
    names = [key for key in event if key == name or key.startswith(f"{name}_")] if name.startswith("precision") else []
    return any(event[key] == 1 and event.get(key.replace("precision", "recall", 1)) == 0 for key in names)


def metric_stem(metric: str) -> str:
    """Return the common prefix of a metric's parts."""
    return metric.removeprefix("mean_")


def read_run(directory: Path) -> RunRecord:
    """Return the run. Raises DataError if ``directory`` holds no run; other missing parts are noted in ``left_out``."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; expected a run's directory, which holds {METRICS}")
    events = read_metrics(directory / METRICS)
    if not events:
        raise DataError(f"{directory / METRICS} holds no event; the run has not started, or died before its first event")
    run = RunRecord(directory, events)
    path = directory / "settings.yaml"
    try:
        run.settings_text = read_regular(path).decode()
        loaded = yaml.load(run.settings_text, config.YamlReader)
        run.settings = loaded if isinstance(loaded, dict) else {}
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        run.left_out.append(f"settings.yaml: {describe_error(error)}; the settings are those of the last start in {METRICS}")
        run.settings = run.start.get("settings") or {}
        run.settings_text = yaml.safe_dump(run.settings, sort_keys=False) if run.settings else ""
    _read_picture(run)
    return run


def _read_picture(run: RunRecord) -> None:
    """Load the picture that the run's app declares, and read the run's file with it."""
    name = run.start.get("name")
    try:
        module: Any = apps.find_module(str(name), "picture")
        run.picture = module
    except Exception as error:  # anything that an app's code raises
        run.left_out.append(f"apps/{name}/picture.py: {describe_error(error)}")
    path = run.directory / run.picture.FILE if run.picture else None
    run.left_out += [f"{other.name}: no picture is made of it; expected one in apps/{name}/picture.py"
                     for other in sorted(run.directory.glob("*.npz")) if other != path]
    if run.picture is None or path is None:
        return
    try:
        module = run.picture.read(path)
        run.found = run.picture.finding(module) if hasattr(run.picture, "finding") else None
        run.caption, run.table, run.predictions = run.picture.caption(module), run.picture.table(module), module
    except Exception as error:  # a damaged archive fails in zipfile, zlib, tokenize, numpy or by lack of memory
        prefix = "" if isinstance(error, FileNotFoundError) else f"{path.name}: "
        run.left_out.append(f"{run.picture.TITLE}: {prefix}{describe_error(error)}")


def describe_error(error: Exception) -> str:
    """Return the reason why something is left out, on one line."""
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).replace("\n", " ")[:500]
