"""The figure of a run: bits per byte of held-out text beside compressors, loss by position, and continued texts.

K codes, M texts, T positions
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.picture import Finding, Table, arrays, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, panel_title
from hpcai.errors import DataError

FILE = "text.npz"
TITLE = "Held-out text"
BINS = 24                                                # of positions
LINES = (                                                # metrics of the training's reports, of a mixture of experts
    ("expert_load", "expert_load", "Load of the busiest expert", "relative to a balanced load", "Of all layers, in training."),
    ("router_entropy", "router_entropy", "Entropy of routers", "nats", "Mean over tokens and layers; 0 for a collapsed router."),
    ("dropped", "dropped", "Dropped tokens", "fraction of pairs of a token and an expert", "Pairs that exceed the capacity."),
)


@dataclass
class Texts:
    """Scores of a model on held-out rows, and texts that it continued."""

    names: list[str]                                     # of codes, the model last
    bits: np.ndarray                                     # [K] per byte
    positions: np.ndarray                                # [T] nats of a token, by its position in the row
    counts: np.ndarray                                   # [T] tokens
    texts: list[list[str]]                               # [M] of three: prompt, generated, true
    load: np.ndarray | None = None                       # [L, E] tokens of each expert in each layer with experts


def read(path: Path) -> Texts:
    content = arrays(path, {"positions": "real T", "counts": "whole T"}, ("names", "bits", "texts", "load"))
    if not content["counts"].sum() > 0 or not np.isfinite(content["positions"]).all():
        raise DataError("no token counts, or a loss is not finite")
    names, bits, texts = content["names"].astype(str).tolist(), content["bits"].astype(float), content["texts"].astype(str)
    return Texts(names, bits, content["positions"].astype(float), content["counts"], texts.tolist(), content.get("load"))


def caption(texts: Texts) -> str:
    tokens = f"{int(texts.counts.sum()):,} tokens of validation rows."
    if not texts.names:
        return tokens + " Only some of them are scored, so compressors cannot be compared."
    return (f"{tokens} A probability for each token is a compressor. gzip, xz and the frequencies start untrained, on all of this"
            " text at once; the model was trained on similar texts, and reads one row at a time.")


def finding(texts: Texts) -> Finding:
    """Compare the model with the best compressor, or without one with a guess among all bytes."""
    if not texts.names:
        nats = float((texts.positions * texts.counts).sum() / texts.counts.sum())
        number = f"{format_measured(nats)} nats"
        return Finding(f"A token of held-out text costs {number}: as uncertain as one of {format_measured(math.exp(min(nats, 99)))}"
                       " equally likely ones.", number, "mean loss of a token; lower is better")
    codes = dict(zip(texts.names, texts.bits.tolist()))
    name, bits = codes.popitem()
    best = min(codes, key=lambda code: codes[code], default="raw bytes")
    other, number = codes.get(best, 8.0), f"{format_measured(bits)} bits"
    comparison = f"{format_measured(other / bits)} times fewer than by" if bits < other else "no fewer than by"
    sentence = f"A byte of held-out text takes {number} by {name}, {comparison} {best} ({format_measured(other)})."
    return Finding(sentence, number, "for each byte of held-out text; lower is better")


def draw(texts: Texts, theme: Theme) -> list[Figure]:
    figures = [Figure(figsize=(WIDTH, 3.6)) for _ in range(2 if texts.load is None else 3)]
    _codes(figures[0].subplots(), texts, theme)
    _positions(figures[1].subplots(), texts, theme)
    if texts.load is not None:
        _load(figures[2].subplots(), texts.load, theme)
    return figures


def _codes(axes: Axes, texts: Texts, theme: Theme) -> None:
    rows = np.arange(len(texts.names))
    axes.barh(rows, texts.bits, height=0.6, color=[theme.main if row == len(rows) - 1 else theme.faint for row in rows])
    for row, bits in zip(rows, texts.bits):
        axes.text(float(bits), float(row), f" {bits:.2f}", va="center", color=theme.ink)
    axes.set_yticks(rows, texts.names, color=theme.ink)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set(xlabel="bits per byte", xlim=(0, 1.2 * texts.bits.max(initial=1.0)), ylim=(len(rows) - 0.4, -0.6))
    panel_title(axes, "Bits per byte", "lower is better", theme)


def _positions(axes: Axes, texts: Texts, theme: Theme) -> None:
    count = len(texts.positions)
    edges = np.unique(np.geomspace(1, count + 1, BINS + 1).astype(int)) - 1
    sums, total = (np.add.reduceat(each, edges[:-1]) for each in (texts.positions * texts.counts, texts.counts))
    middle = np.sqrt((edges[:-1] + 1) * edges[1:])
    means = np.divide(sums, total, out=np.full(len(sums), np.nan), where=total > 0)  # a bin without tokens has no loss
    axes.plot(middle, means, color=theme.main, marker="o", markersize=4)
    axes.set_xscale("log")
    axes.set(xlabel="position in the row [tokens]", ylabel="loss [nats per token]")
    mean = float((texts.positions * texts.counts).sum() / texts.counts.sum())
    known = means[total > 0]
    panel_title(axes, "Loss by position", f"mean {mean:.3f} nats; {known[-1] - known[0]:+.2f} from first to last positions", theme)


def _load(axes: Axes, load: np.ndarray, theme: Theme) -> None:
    relative = load / load.mean(-1, keepdims=True)
    image = axes.imshow(relative, cmap=theme.values, vmin=0, vmax=max(2.0, float(relative.max())), aspect="auto")
    axes.grid(False)
    axes.set(xlabel="expert", ylabel="layer with experts")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    axes.figure.colorbar(image, ax=axes, label="load relative to a balanced one")
    unused = int((relative < 0.1).sum())
    panel_title(axes, "Load of experts", f"busiest {relative.max():.2f}; {unused} of {load.size} below 0.1", theme)


def table(texts: Texts) -> Table | None:
    if not texts.texts:
        return None
    note = "Beginnings of held-out rows; the model's continuations at temperature 0.8 and top_p 0.95; the true continuations."
    return Table("Continued texts", note, ("prompt", "generated", "true"), texts.texts, text=True)
