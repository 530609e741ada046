"""The figure of a run: ROC, calibration, and the AUC by abundance and distance of strains, if these are known.

N events, O organisms
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, panel_title
from hpcai.errors import DataError
from hpcai.models.dlrm import auc

FILE = "events.npz"
TITLE = "Events"
HIGHER = ("auc",)
BINS = 10                                                # of the calibration, with equally many events


@dataclass
class Events:
    """Validation events with their scores, and of simulated ones what is known."""

    logit: np.ndarray                                    # [N]
    label: np.ndarray                                    # [N]
    teacher: np.ndarray | None                           # [N] logits of the teacher of clicks
    organism: np.ndarray | None                          # [N] from which a read comes
    abundance: np.ndarray                                # [O]
    distance: np.ndarray                                 # [O] substitutions of a base to the closest pathogen

    @property
    def probability(self) -> np.ndarray:
        return 1 / (1 + np.exp(-self.logit.clip(-50, 50)))

    def by_organism(self) -> dict[int, float]:
        """Return the AUC of the pathogens' reads against those of each other strain."""
        assert self.organism is not None
        others = np.unique(self.organism[self.label == 0])
        chosen = {int(o): (self.organism == o) | (self.label == 1) for o in others}
        return {o: _auc(self.logit[mask], self.label[mask]) for o, mask in chosen.items()}


def _auc(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(auc(torch.from_numpy(scores), torch.from_numpy(labels)))


def read(path: Path) -> Events:
    content = arrays(path, {"row": "whole N", "logit": "real N", "label": "real N"})
    logit, label = content["logit"].astype(float), content["label"].astype(int)
    if not np.isfinite(logit).all() or not 0 < label.sum() < len(label):
        raise DataError(f"{path}: {len(label)} events, of which {label.sum()} are positive; expected both, with finite logits")
    with np.load(path, allow_pickle=False) as file:
        truth = {name.removeprefix("truth_"): file[name] for name in file if name.startswith("truth_")}
    teacher, organism = (truth[name][content["row"]] if name in truth else None for name in ("logit", "organism"))
    return Events(logit, label, teacher, organism, truth.get("abundance", np.zeros(0)), truth.get("distance", np.zeros(0)))


def caption(results: Events) -> str:
    text = f"{len(results.label):,} validation events, of which {results.label.mean():.1%} are positive. "
    if results.organism is not None:
        text += "Reads of pathogens against those of each harmless strain: rare strains were seldom seen. "
    return text + "A probability of 80 % should be right 80 times in 100."


def finding(results: Events) -> Finding:
    area = _auc(results.logit, results.label)
    text = f"the AUC of unseen events is {area:.4f}"
    if results.teacher is not None:
        best = _auc(results.teacher, results.label)
        text += f"; that of the teacher is {best:.4f}, so {(area - 0.5) / (best - 0.5):.0%} of what can be known is learnt"
    if results.organism is not None:
        values = results.by_organism()
        rarest = min(values, key=lambda o: results.abundance[o])
        text += f"; against the rarest strain, with {results.abundance[rarest]:.1%} of the reads, it is {values[rarest]:.4f}"
    return Finding(text, format_measured(area), "AUC")


def draw(results: Events, theme: Theme) -> list[Figure]:
    figures = [_draw_roc(results, theme), _draw_calibration(results, theme)]
    return figures + ([_draw_organisms(results, theme)] if results.organism is not None else [])


def _draw_roc(results: Events, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes = figure.subplots()
    lines = [("network", results.logit, theme.main)]
    lines += [("teacher", results.teacher, theme.second)] if results.teacher is not None else []
    for name, scores, color in lines:
        ordered = results.label[np.argsort(-scores, kind="stable")]
        rates = [np.append(0, np.cumsum(ordered == kind)) / max((ordered == kind).sum(), 1) for kind in (0, 1)]
        axes.plot(*rates, color=color, label=f"{name}: AUC {_auc(scores, results.label):.4f}")
    axes.plot([0, 1], [0, 1], color=theme.ink, linewidth=0.8, linestyle=":")
    axes.set(xlabel="fraction of negatives above the threshold", ylabel="fraction of positives above it")
    axes.legend(loc="lower right", fontsize=8)
    panel_title(axes, "ROC", f"{len(results.label):,} events", theme)
    return figure


def _draw_calibration(results: Events, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes, order = figure.subplots(), np.argsort(results.probability, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    x, y = ([values[part].mean() for part in parts] for values in (results.probability, results.label))
    top = 1.05 * max(*x, *y)
    axes.plot([0, top], [0, top], color=theme.ink, linewidth=1, label="perfect")
    axes.plot(x, y, marker="o", markersize=4, color=theme.main, label="network")
    axes.set(xlabel="predicted probability", ylabel="fraction of positives", xlim=(0, top), ylim=(0, top))
    axes.legend(loc="upper left", fontsize=8)
    panel_title(axes, "Calibration", f"{BINS} bins with equally many events", theme)
    return figure


def _draw_organisms(results: Events, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    axes, values = figure.subplots(), results.by_organism()
    keys = [*values]
    near = results.distance[keys] <= np.median(results.distance[keys])
    for chosen, name, color in ((near, "closer", theme.main), (~near, "farther", theme.second)):
        area = np.array([*values.values()])[chosen]
        axes.scatter(100 * results.abundance[keys][chosen], area, color=color, alpha=0.7, label=f"{name} half of the strains")
    axes.set(xlabel="reads of a harmless strain, per cent", ylabel="AUC of the pathogens' reads", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.legend(loc="lower right", fontsize=8)
    panel_title(axes, "Harmless strains", "by their abundance and distance to the closest pathogen", theme)
    return figure


def table(results: Events) -> Table:
    order, rows = np.argsort(-results.logit, kind="stable"), []
    for share in (0.001, 0.01, 0.05, 0.1, 0.2):
        count = max(round(share * len(order)), 1)
        labels = results.label[order[:count]]
        rows.append((f"{share:.1%}", f"{count:,}", f"{labels.mean():.3f}", f"{labels.sum() / results.label.sum():.3f}"))
    return Table("Events with the highest scores", "How many of them are positive.", ("", "events", "precision", "recall"), rows)
