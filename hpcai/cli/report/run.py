"""What a run's directory says."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hpcai.errors import DataError
from hpcai.log import METRICS, metrics, read_metrics
from hpcai.models.openfold.residues import PLACE, UNKNOWN
from hpcai.models.openfold.truth import pseudo_beta

PANELS = 6                                               # maps or slices that are drawn
HECTOPASCAL = {"Pa": 0.01, "hPa": 1.0, "mbar": 1.0, "mb": 1.0}
ELEMENTS = 118
GDT_TS = np.array([1, 2, 4, 8])                          # angstrom

Series = tuple[np.ndarray, np.ndarray]                   # steps, values

# Words of metric names that are better when higher; a run's own `train.metric` obeys `train.better`
HIGHER = (
    "acc", "iou", "dice", "r2", "auc", "lddt", "gdt", "confidence", "score", "f1", "precision", "recall", "correlation", "cosine",
    "within",
)  # fmt: skip


@dataclass
class Predictions:
    """What the network said about the validation samples, and what is true.   P parameters, N samples"""

    names: list[str]
    units: list[str]
    predicted: np.ndarray                                # [N, P]
    true: np.ndarray                                     # [N, P]

    def rmse(self, p: int) -> float:
        return float(np.sqrt(np.mean((self.predicted[:, p] - self.true[:, p]) ** 2)))

    def mae(self, p: int) -> float:
        return float(np.mean(np.abs(self.predicted[:, p] - self.true[:, p])))

    def spread(self, p: int) -> float:
        """RMSE of the network that always says the mean: the yardstick."""
        return float(np.std(self.true[:, p]))

    def r2(self, p: int) -> float:
        return 1 - (self.rmse(p) / self.spread(p)) ** 2 if self.spread(p) > 0 else math.nan


@dataclass(kw_only=True)
class Images:
    """What is in validation images and what the network sees.   N images, M of them shown, H W cells, K classes"""

    classes: list[str]
    variable: str
    unit: str
    shown: list[int]                                     # which are drawn: M of 0 ... N - 1
    true: np.ndarray                                     # [M, H, W]
    predicted: np.ndarray                                # [M, H, W]
    cells: np.ndarray                                    # [N, K, K] of each true class (first K) that are seen as each


@dataclass(kw_only=True)
class Maps(Images):
    """Validation maps: the weather, what is in it and what the network sees."""

    colour: np.ndarray                                   # [M, H, W] of the variable
    pressure: np.ndarray | None                          # [M, H, W] at sea level, hPa

    def iou(self, n: int | None = None) -> np.ndarray:
        """Of each class in map ``n``, or of all cells of all maps together; NaN where a class is neither there nor seen.   [K]"""
        cells = self.cells.sum(0) if n is None else self.cells[n]
        both = np.diagonal(cells).astype(float)
        either = cells.sum(0) + cells.sum(1) - both
        return np.divide(both, either, out=np.full(len(both), math.nan), where=either > 0)


@dataclass(kw_only=True)
class Slices(Images):
    """Axial slices of validation volumes, one of each, the front of the body in the first row."""

    scan: np.ndarray                                     # [M, H, W] of the variable
    spacing_mm: tuple[float, float] | None               # of rows and of columns

    def dice(self, n: int | None = None) -> np.ndarray:
        """Of each class in slice ``n``, or in all slices together; NaN where a class is neither there nor seen.   [K]"""
        cells = self.cells.sum(0) if n is None else self.cells[n]
        both, sizes = 2.0 * np.diagonal(cells), cells.sum(0) + cells.sum(1)
        return np.divide(both, sizes, out=np.full(len(both), math.nan), where=sizes > 0)

    def mean_dice(self) -> np.ndarray:
        """Of each class, over the slices that are shown and where it is there or seen; NaN where there is none.   [K]"""
        rows = np.array([self.dice(n) for n in self.shown])
        count = np.isfinite(rows).sum(0)
        return np.divide(np.nansum(rows, 0), count, out=np.full(rows.shape[1], math.nan), where=count > 0)


@dataclass
class Pairs:
    """Validation frames of atoms: what is true and what the network says.   B frames, A free atoms"""

    energy: np.ndarray                                   # [B, 2] eV
    forces: np.ndarray                                   # [A, 2, 3] eV/angstrom
    numbers: np.ndarray                                  # [A] atomic numbers


def superpose(points: np.ndarray, onto: np.ndarray) -> np.ndarray:
    """``points`` after the turn and shift with the least squared distances from ``onto``, of which rows may be NaN (Kabsch 1976).

    [N, 3], [N, 3] -> [N, 3]
    """
    known = np.isfinite(onto).all(1)
    if not known.any():
        return points
    here, there = points[known].mean(0), onto[known].mean(0)
    left, _, right = np.linalg.svd((points[known] - here).T @ (onto[known] - there))
    # Where a mirror image would lie nearer, the best of the turns gives way along the axis that counts least.
    right[2] *= np.sign(np.linalg.det(left @ right))
    return (points - here) @ (left @ right) + there


@dataclass(kw_only=True)
class Chain:
    """A protein chain, predicted and true; each in a frame of its own.   N residues; angstrom, NaN where not known"""

    name: str
    predicted: np.ndarray                                # [N, 3] CA
    true: np.ndarray                                     # [N, 3] CA
    beta: np.ndarray                                     # [N, 3] true CB, or CA of glycine
    plddt: np.ndarray                                    # [N] 0 to 100
    lddt: np.ndarray                                     # [N] 0 to 100
    distance: np.ndarray                                 # [N, N] between CB, or CA of glycine, as expected of the distogram

    @property
    def known(self) -> np.ndarray:
        """Whether the true CA is known.   [N]"""
        return np.isfinite(self.true).all(1)

    def superposed(self) -> np.ndarray:
        """Predicted CA in the frame of the true ones.   [N, 3]"""
        return superpose(self.predicted, self.true)

    def errors(self) -> np.ndarray:
        """Distances from the known CA, superposed.   [known]"""
        return np.asarray(np.linalg.norm((self.superposed() - self.true)[self.known], axis=1))

    def rmsd(self) -> float:
        """Of all known CA, superposed by them; NaN where none is known."""
        return float(np.sqrt(np.mean(self.errors() ** 2))) if self.known.any() else math.nan

    def gdt_ts(self) -> float:
        """0 to 100, after the one superposition by all known CA; NaN where none is known.

        The official score seeks the best superposition for each cutoff: this is a lower bound of it.
        """
        return 100 * float(np.mean(self.errors()[:, None] <= GDT_TS)) if self.known.any() else math.nan

    def mean_lddt(self) -> float:
        """Over residues; NaN where no residue has one."""
        finite = self.lddt[np.isfinite(self.lddt)]
        return float(finite.mean()) if len(finite) else math.nan


@dataclass
class Structures:
    """Validation chains of proteins.   M chains"""

    chains: list[Chain]

    def spread(self, most: int) -> list[int]:
        """At most so many of 0 ... M - 1, evenly from the first to the last."""
        total = len(self.chains)
        return [int(m) for m in np.linspace(0, total - 1, min(total, most)).round()]


@dataclass
class Run:
    """All that a run's directory says."""

    directory: Path
    events: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    settings_text: str = ""
    predictions: Predictions | None = None
    maps: Maps | None = None
    slices: Slices | None = None
    pairs: Pairs | None = None
    structures: Structures | None = None
    left_out: list[str] = field(default_factory=list)    # what the page lacks, and why

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        return next(iter(reversed(self.of("start"))), {})

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
        pairs = {e["step"]: e[name] for e in self.of(kind) if "step" in e and isinstance(e.get(name), (int, float))}
        return np.array(sorted(pairs)), np.array([pairs[step] for step in sorted(pairs)], dtype=float)

    def names(self, kind: str) -> list[str]:
        """Metrics of all events of ``kind``, in the order in which they came up."""
        return list(dict.fromkeys(name for event in self.of(kind) for name in metrics(event) if name != "time"))

    def target(self, name: str) -> float | None:
        return self.setting("train.target") if name == self.setting("train.metric") else None

    def higher(self, name: str) -> bool:
        """Whether more of it is better; the classes of the run's own metric go with it."""
        metric, better = self.setting("train.metric"), self.setting("train.better")
        if metric and better and (name == metric or name.startswith(f"{stem(metric)}_")):
            return bool(better == "higher")
        return any(word in name.lower() for word in HIGHER)

    def families(self) -> dict[str, list[str]]:
        """Each evaluated metric but the loss, with those that belong to it: iou with iou_background, mean_dice with dice_kidney."""
        names = [name for name in self.names("evaluate") if name != "loss"]
        found: dict[str, list[str]] = {}
        for name in names:
            heads = [head for head in names if name.startswith(f"{stem(head)}_")]
            if heads:
                found.setdefault(min(heads, key=len), []).append(name)
            else:
                found.setdefault(name, [])
        return found

    @property
    def classes(self) -> list[str]:
        """What a cell of a map can be, the first being what is neither."""
        images = self.maps or self.slices
        named = images.classes if images else self.setting("model.classes")
        return [str(name) for name in named] if isinstance(named, Sequence) else []

    def best(self, name: str) -> tuple[int, float] | None:
        """Step and value of the best evaluation; None where no value is finite."""
        pairs = [(int(step), float(value)) for step, value in zip(*self.series("evaluate", name)) if math.isfinite(value)]
        return (max if self.higher(name) else min)(pairs, key=lambda pair: pair[1], default=None)

    @property
    def seconds(self) -> float:
        """Training time over all lives of the run, whether the clock went on after a resume or began again."""
        total = last = 0.0
        for event in self.events:
            if event["kind"] in ("train", "stop") and isinstance(event.get("seconds"), (int, float)):
                now = event["seconds"]
                total += now - last if now >= last else now
                last = now
        return total


def stem(metric: str) -> str:
    """What the names of its classes begin with."""
    return metric.removeprefix("mean_")


def read(directory: Path) -> Run:
    """Raises DataError where ``directory`` holds no run; whatever else is missing is noted in ``left_out``."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; expected a run's directory, which holds {METRICS}")
    events = read_metrics(directory / METRICS)
    if not events:
        raise DataError(f"{directory / METRICS} holds no event; the run has not started, or died before its first line")
    run = Run(directory, events)
    path = directory / "settings.yaml"
    try:
        run.settings_text = path.read_text(encoding="utf-8")
        loaded = yaml.safe_load(run.settings_text)
        run.settings = loaded if isinstance(loaded, dict) else {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        run.left_out.append(f"settings.yaml: {_reason(error)}; the settings are those of the last start, as {METRICS} has them")
        run.settings = run.start.get("settings") or {}
        run.settings_text = yaml.safe_dump(run.settings, sort_keys=False) if run.settings else ""
    names = "predictions.npz", "maps.npz", "pairs.npz", "structures.npz"
    predictions, maps, pairs, structures = (directory / name for name in names)
    if not any((directory / name).exists() for name in names):
        run.left_out.append(f"predicted against true: there is no {', no '.join(names[:-1])} and no {names[-1]}")
    if predictions.exists():
        run.predictions = _tried(_predictions, predictions, "predicted against true", run)
    if maps.exists():
        found = _tried(_images, maps, "predicted and true maps", run)
        run.maps, run.slices = found if isinstance(found, Maps) else None, found if isinstance(found, Slices) else None
    if pairs.exists():
        run.pairs = _tried(_pairs, pairs, "predicted and true energies and forces", run)
    if structures.exists():
        run.structures = _tried(_structures, structures, "predicted and true structures", run)
    return run


def _tried(act: Callable[[Path], Any], path: Path, what: str, run: Run) -> Any:
    try:
        return act(path)
    except Exception as error:  # a damaged archive fails in zipfile, zlib, tokenize, numpy or for want of memory
        run.left_out.append(f"{what}: {path.name}: {_reason(error)}")
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).replace("\n", " ")[:500]


def _has(file: Any, *names: str) -> None:
    missing = [name for name in names if name not in file]
    if missing:
        raise DataError(f"has no array {', '.join(missing)}")


def _predictions(path: Path) -> Predictions:
    with np.load(path, allow_pickle=False) as file:
        _has(file, "names", "units", "predicted", "true")
        names, units = file["names"].astype(str).tolist(), file["units"].astype(str).tolist()
        predicted, true = file["predicted"].astype(float), file["true"].astype(float)
    found = (predicted.shape, true.shape, (len(true), len(names)), (len(true), len(units)))
    if len(set(found)) > 1 or not predicted.size:
        raise DataError(f"predicted {found[0]}, true {found[1]}, names [{len(names)}], units [{len(units)}];"
                        " expected predicted and true [N, P], names and units [P]")
    finite = np.isfinite(predicted).all(1) & np.isfinite(true).all(1)
    if not finite.any():
        raise DataError("no sample has finite predictions and truths")
    return Predictions(names, units, predicted[finite], true[finite])


def _pairs(path: Path) -> Pairs:
    with np.load(path, allow_pickle=False) as file:
        _has(file, "energy", "forces", "numbers")
        energy, forces, numbers = file["energy"], file["forces"], file["numbers"]
    shapes = energy.shape[1:] == (2,) and forces.shape == (*numbers.shape, 2, 3) and numbers.ndim == 1
    if not shapes or not {energy.dtype.kind, forces.dtype.kind} <= set("fiu"):
        found = f"energy {energy.dtype} {energy.shape}, forces {forces.dtype} {forces.shape}, numbers {numbers.shape}"
        raise DataError(f"{found}; expected energy [B, 2], forces [A, 2, 3] and numbers [A] of frames and their free atoms")
    frames, atoms = np.isfinite(energy).all(1), np.isfinite(forces).all((1, 2))
    for what, finite in (("frame has a finite true and predicted energy", frames), ("free atom has finite forces", atoms)):
        if not finite.any():
            raise DataError(f"no {what}")
    if numbers.dtype.kind not in "iu" or numbers.min() < 1 or numbers.max() > ELEMENTS:
        found = f"{numbers.dtype} {numbers.min()} to {numbers.max()}"
        raise DataError(f"numbers is {found}, expected whole atomic numbers 1 to {ELEMENTS}")
    return Pairs(energy[frames].astype(float), forces[atoms].astype(float), numbers[atoms].astype(np.intp))


def _structures(path: Path) -> Structures:
    with np.load(path, allow_pickle=False) as file:
        _has(file, "names", "residues", "aatype", "predicted", "true", "mask", "plddt", "lddt", "distance")
        names = np.atleast_1d(file["names"]).astype(str).tolist()
        found = {name: file[name] for name in file.files if name != "names"}
    _refuse_unlike_residues(names, found)
    aatype, mask, lddt = found["aatype"], found["mask"], found["lddt"]
    if aatype.min() < 0 or aatype.max() > UNKNOWN:
        raise DataError(f"aatype is {aatype.min()} to {aatype.max()}, expected 0 to {UNKNOWN}, which is X")
    beta, seen = pseudo_beta(aatype, found["true"], mask, "true")
    known = mask[:, PLACE["CA"]] == 1
    told = (lddt >= 0) & (lddt <= 100)
    for what, good, expected in (
        ("predicted", np.isfinite(found["predicted"]).all((1, 2)), "angstrom for each of 37 atoms"),
        ("plddt", (found["plddt"] >= 0) & (found["plddt"] <= 100), "0 to 100"),
        ("lddt", told & known | np.isnan(lddt), "0 to 100, and NaN where CA is not known"),
    ):
        if not good.all():
            first, count = int(np.argmin(good)), int((~good).sum())
            value = "not finite" if what == "predicted" else f"{found[what][first]:g}"
            which = f"residue {first}" + (f", the first of {count:,} such ones," if count > 1 else "")
            raise DataError(f"{what} of {which} is {value}; expected {expected}")
    distance = found["distance"]
    if not (np.isfinite(distance) & (distance >= 0)).all():
        raise DataError(f"distance is {distance.min():g} to {distance.max():g}, expected angstrom from 0 on")
    residues = found["residues"].astype(np.int64)
    # Of all atoms the page shows two.
    alpha = {name: found[name][:, PLACE["CA"]].astype(float) for name in ("predicted", "true")}
    alpha["true"][~known] = math.nan
    rows = {**alpha, "beta": np.where(seen[:, None] > 0, beta, math.nan), "plddt": found["plddt"], "lddt": lddt}
    parts = [np.split(values, np.cumsum(residues)[:-1]) for values in rows.values()]
    matrices = np.split(distance, np.cumsum(residues**2)[:-1])
    return Structures([
        Chain(name=name, distance=matrix.reshape(count, count), **dict(zip(rows, each)))
        for name, count, matrix, *each in zip(names, residues, matrices, *parts)
    ])


def _refuse_unlike_residues(names: list[str], found: dict[str, np.ndarray]) -> None:
    residues = found["residues"]
    if residues.shape != (len(names),) or not names or residues.dtype.kind not in "iu" or residues.min() < 1:
        text = f" from {residues.min()}" if residues.size else ""
        raise DataError(f"names [{len(names)}], residues {residues.dtype} {residues.shape}{text};"
                        " expected names and residues [M] of at least one chain, each of whole numbers from 1")
    total, squares = int(residues.sum(dtype=np.int64)), int((residues.astype(np.int64) ** 2).sum())
    atoms = (total, 37)
    for name, kinds, shape in (
        ("aatype", "iu", (total,)), ("predicted", "f", (*atoms, 3)), ("true", "f", (*atoms, 3)), ("mask", "biu", atoms),
        ("plddt", "f", (total,)), ("lddt", "f", (total,)), ("distance", "f", (squares,)),
    ):  # fmt: skip
        if found[name].shape != shape or found[name].dtype.kind not in kinds:
            what = "real" if kinds == "f" else "whole"
            text = f"the squares of residues add up to {squares}" if name == "distance" else f"residues adds up to {total}"
            raise DataError(f"{name} is {found[name].dtype} {found[name].shape}, expected {what} numbers {shape}: {text}")


def _images(path: Path) -> Images:
    with np.load(path, allow_pickle=False) as file:
        _has(file, "variables", "units", "classes", "fields", "true", "predicted")
        variables, units, classes = (np.atleast_1d(file[name]).astype(str).tolist() for name in ("variables", "units", "classes"))
        true, predicted = file["true"], file["predicted"]
        fields = file["fields"]
        kind = str(file["kind"]) if "kind" in file.files else "maps"
        spacing = file["spacing_mm"] if "spacing_mm" in file.files else None
    _refuse_misshapen(variables, units, classes, fields, true, predicted)
    count, kinds = len(true), len(classes)
    cells = np.stack([np.bincount(t.ravel() * np.intp(kinds) + p.ravel(), minlength=kinds**2) for t, p in zip(true, predicted)])
    cells = cells.reshape(count, kinds, kinds)
    # Those that hold or seem to hold most; of equals the first.
    variety = ((cells.sum(1) > 0) | (cells.sum(2) > 0)).sum(1)
    shown = sorted(np.argsort(-variety, kind="stable")[:PANELS].tolist())
    seen: dict[str, Any] = {"classes": classes, "shown": shown, "true": true[shown], "predicted": predicted[shown], "cells": cells}
    if kind == "slices":
        return _slices(seen, variables[0], units[0], fields[shown, ..., 0].astype(float), spacing)
    if kind != "maps":
        raise DataError(f"kind is {kind!r}, expected 'slices' or, of maps, none")
    first = variables.index("TMQ") if "TMQ" in variables else 0
    colour = fields[shown, ..., first].astype(float)
    if not np.isfinite(colour).any():
        raise DataError(f"no cell has a finite {variables[first]}")
    pressure = None
    if "PSL" in variables and (scale := HECTOPASCAL.get(units[variables.index("PSL")])):
        pressure = scale * fields[shown, ..., variables.index("PSL")].astype(float)
    return Maps(variable=variables[first], unit=units[first], colour=colour, pressure=pressure, **seen)


def _slices(seen: dict[str, Any], variable: str, unit: str, scan: np.ndarray, spacing: np.ndarray | None) -> Slices:
    if not np.isfinite(scan).any():
        raise DataError(f"no voxel has a finite {variable}")
    mm = None
    if spacing is not None:
        if spacing.shape != (2,) or spacing.dtype.kind not in "fiu" or not (np.isfinite(spacing).all() and spacing.min() > 0):
            raise DataError(f"spacing_mm is {spacing.tolist()}, expected two numbers above 0, of rows and of columns")
        mm = float(spacing[0]), float(spacing[1])
    return Slices(variable=variable, unit=unit, scan=scan, spacing_mm=mm, **seen)


def _refuse_misshapen(
    variables: list[str], units: list[str], classes: list[str], fields: np.ndarray, true: np.ndarray, predicted: np.ndarray
) -> None:
    alike = fields.ndim == 4 and fields.shape[:3] == true.shape == predicted.shape and min(fields.shape[1:3]) > 1
    if not alike or not fields.size or not len(variables) == len(units) == fields.shape[3] or fields.dtype.kind not in "fiu":
        shapes = f"fields {fields.shape}, true {true.shape}, predicted {predicted.shape}"
        found = f"{shapes}, variables [{len(variables)}], units [{len(units)}]"
        raise DataError(f"{found}; expected numbers, fields [N, H, W, V], true and predicted [N, H, W], variables and units [V]")
    for name, mask in (("true", true), ("predicted", predicted)):
        if mask.dtype.kind not in "iu" or mask.min() < 0 or mask.max() >= len(classes):
            found = f"{mask.dtype} {mask.min()} to {mask.max()}"
            raise DataError(f"{name} is {found}, expected whole numbers 0 to {len(classes) - 1}, one for each of classes")
