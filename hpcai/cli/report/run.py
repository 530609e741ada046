"""What a run's directory says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcai.cli import apps
from hpcai.cli.report.picture import Picture, Table
from hpcai.cli.report.theme import PALETTE
from hpcai.errors import DataError
from hpcai.log import METRICS, metrics, read_metrics

Series = tuple[np.ndarray, np.ndarray]                   # steps, values

# Words in names of metrics that are better when higher, beside those that the app's picture names. A run's own `train.metric` obeys
# `train.better`.
HIGHER = ("acc", "r2", "auc", "confidence", "score", "f1", "precision", "recall", "correlation")


@dataclass
class RunRecord:
    """All that a run's directory says."""

    directory: Path
    events: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    settings_text: str = ""
    picture: Picture | None = None                       # what the run's app declares
    predictions: Any = None                                    # what the picture has read in the run's file, and says of it:
    caption: str = ""
    table: Table | None = None
    left_out: list[str] = field(default_factory=list)    # what the page lacks, and why

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(reversed(self.events_of("start"))), {})

    @property
    def stop(self) -> dict[str, Any]:
        """The end of the last life, or nothing while it lasts."""
        last: dict[str, Any] = next((event for event in reversed(self.events) if event["kind"] in ("start", "stop")), {})
        return last if last.get("kind") == "stop" else {}

    @property
    def name(self) -> str:
        return str(self.start.get("name") or self.directory.resolve().name)

    def setting(self, path: str) -> Any:
        found: Any = self.settings
        for word in path.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        return found

    def series(self, kind: str, name: str) -> Series:
        pairs = {e["step"]: e[name] for e in self.events_of(kind) if "step" in e and isinstance(e.get(name), (int, float))}
        return np.array(sorted(pairs)), np.array([pairs[step] for step in sorted(pairs)], dtype=float)

    def names(self, kind: str) -> list[str]:
        """Metrics of all events of ``kind``, in the order in which they came up."""
        return list(dict.fromkeys(name for event in self.events_of(kind) for name in metrics(event) if name != "time"))

    def target(self, name: str) -> float | None:
        return self.setting("train.target") if name == self.setting("train.metric") else None

    def higher_is_better(self, name: str) -> bool:
        """Whether more of it is better; the classes of the run's own metric go with it."""
        metric, better = self.setting("train.metric"), self.setting("train.better")
        if metric and better and (name == metric or name.startswith(f"{metric_stem(metric)}_")):
            return bool(better == "higher")
        return any(word in name.lower() for word in (*HIGHER, *getattr(self.picture, "HIGHER", ())))

    def metric_families(self) -> dict[str, list[str]]:
        """Each evaluated metric but the loss, with those that belong to it: skill with skill_rain, mean_skill with skill_rain."""
        names = [name for name in self.names("evaluate") if name != "loss"]
        found: dict[str, list[str]] = {}
        for name in names:
            heads = [head for head in names if name.startswith(f"{metric_stem(head)}_")]
            if heads:
                found.setdefault(min(heads, key=len), []).append(name)
            else:
                found.setdefault(name, [])
        return found

    @property
    def classes(self) -> list[str]:
        """Names of the classes, the first being what is none of the others."""
        told = getattr(self.picture, "classes", None) if self.predictions is not None else None
        named = told(self.predictions) if told else self.setting("model.classes")
        return [str(name) for name in named] if isinstance(named, Sequence) else []

    @property
    def palette(self) -> Sequence[str]:
        """Colours of the classes without the first."""
        return getattr(self.picture, "PALETTE", PALETTE)

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the best evaluation; None where no value is finite."""
        pairs = [(int(step), float(value)) for step, value in zip(*self.series("evaluate", name)) if math.isfinite(value)]
        return (max if self.higher_is_better(name) else min)(pairs, key=lambda pair: pair[1], default=None)

    @property
    def training_time(self) -> Series:
        """Training time at each step that told it, over all lives of the run, whether the clock went on after a resume or not."""
        total = last = 0.0
        found = {0: 0.0}
        for event in self.events:
            if event["kind"] in ("train", "stop") and isinstance(event.get("seconds"), (int, float)):
                now = event["seconds"]
                total += now - last if now >= last else now
                last = now
                step = event.get("step") or 0
                found[max(step, *found) if event["kind"] == "stop" else step] = total  # a target was met before the last step
        return np.array(sorted(found)), np.array([found[step] for step in sorted(found)], dtype=float)

    @property
    def seconds(self) -> float:
        """Training time over all lives of the run."""
        return float(self.training_time[1].max())

    @property
    def energy(self) -> dict[str, Any]:
        """The `energy` events of all lives of the run that have told it, as one; nothing where there is none."""
        lives = self.events_of("energy")
        if not lives:
            return {}
        keys = dict.fromkeys(key for life in lives for key in life if key == "samples" or key.endswith("joules"))
        total = {key: sum(life[key] for life in lives if key in life) for key in keys}
        each: dict[str, Any] = {"joules_per_sample": total["joules"] / max(total.get("samples", 0), 1)}
        if limits := [watts for life in lives for watts in life.get("gpu_limits_w") or ()]:
            each["gpu_limits_w"] = [min(limits), max(limits)]
        return {**lives[-1], **total, **each}


def metric_stem(metric: str) -> str:
    """What the names of its classes begin with."""
    return metric.removeprefix("mean_")


def read_run(directory: Path) -> RunRecord:
    """Raises DataError where ``directory`` holds no run; whatever else is missing is noted in ``left_out``."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; expected a run's directory, which holds {METRICS}")
    events = read_metrics(directory / METRICS)
    if not events:
        raise DataError(f"{directory / METRICS} holds no event; the run has not started, or died before its first line")
    run = RunRecord(directory, events)
    path = directory / "settings.yaml"
    try:
        run.settings_text = path.read_text(encoding="utf-8")
        loaded = yaml.safe_load(run.settings_text)
        run.settings = loaded if isinstance(loaded, dict) else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        run.left_out.append(f"settings.yaml: {describe_error(error)}; the settings are those of the last start, as {METRICS} has them")
        run.settings = run.start.get("settings") or {}
        run.settings_text = yaml.safe_dump(run.settings, sort_keys=False) if run.settings else ""
    _read_picture(run)
    return run


def _read_picture(run: RunRecord) -> None:
    """Finds the picture that the run's app declares, and what it says of the run's file."""
    name = run.start.get("name")
    try:
        found: Any = apps.find_module(str(name), "picture")
        run.picture = found
    except Exception as error:  # whatever the code that an app brings may raise
        run.left_out.append(f"apps/{name}/picture.py: {describe_error(error)}")
    path = run.directory / run.picture.FILE if run.picture else None
    run.left_out += [f"{other.name}: no picture is made of it; expected one in apps/{name}/picture.py"
                     for other in sorted(run.directory.glob("*.npz")) if other != path]
    if run.picture is None or path is None:
        return
    try:
        found = run.picture.read(path)
        run.caption, run.table, run.predictions = run.picture.caption(found), run.picture.table(found), found
    except Exception as error:  # a damaged archive fails in zipfile, zlib, tokenize, numpy or for want of memory
        told = "" if isinstance(error, FileNotFoundError) else f"{path.name}: "
        run.left_out.append(f"{run.picture.TITLE}: {told}{describe_error(error)}")


def describe_error(error: Exception) -> str:
    """Why something is left out, on one line."""
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).replace("\n", " ")[:500]
