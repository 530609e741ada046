"""The picture of a run: chains of proteins with the predicted fold over the true one, distances between residues, and scores.

M chains, N residues of one chain
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.picture import Table, arrays
from hpcai.cli.report.theme import WIDTH, Theme, bare, head, score, verbatim
from hpcai.errors import DataError
from hpcai.models.openfold.residues import PLACE, UNKNOWN
from hpcai.models.openfold.scores import superposed
from hpcai.models.openfold.truth import pseudo_beta

FILE = "structures.npz"
TITLE = "Predicted and true structures"
HIGHER = ("lddt", "gdt")
# M chains one after the other with R residues in all and S pairs of residues of the same chain; 37 places for atoms
LEGEND = {"names": "text M", "residues": "whole M", "aatype": "whole R", "predicted": "real R 37 3", "true": "real R 37 3",
          "mask": "whole R 37", "plddt": "real R", "lddt": "real R", "distance": "real S"}  # fmt: skip
ROWS = 4                                                 # chains that are drawn
LISTED = 10                                              # chains in the table, among which are those that are drawn
GDT_TS = np.array([1, 2, 4, 8])                          # angstrom
WIDE = 1.3                                               # width of the outer panels over the height of all panels
GAPS = 0.15, 0.6, 0.55, 0.6, 0.15                        # inches to the left of each panel, and to the right of the last
TOP, HEAD, FOOT, BOTTOM = 0.4, 0.55, 0.5, 0.7            # inches: the legend, over and under each row, the scale
NEAR, FAR = 2.0, 22.0                                    # angstrom from end to end of the scale; the distogram sees no further
BANDS = ((90, "#1f6feb"), (70, "#4fbdf0"), (50, "#f2c200"), (0, "#f0703a"))  # pLDDT from there up, as AlphaFold's pages have it
HALVES = 4                                               # straight parts of half the way from residue to residue
TRUE, PREDICTED = 5.5, 2.2                               # points of the traces
EDGE = 0.8                                               # points of paper on both sides
LAYERS = 16                                              # of a trace in depth
FADE = 0.5                                               # how far the farthest part fades into the paper
RULER = 10.0                                             # angstrom
LETTERS = 34                                             # at most in the name of a chain


@dataclass(kw_only=True)
class Chain:
    """A protein chain, predicted and true, each in a frame of its own.   angstrom; NaN where not known"""

    name: str
    predicted: np.ndarray                                # [N, 3] CA
    true: np.ndarray                                     # [N, 3] CA
    beta: np.ndarray                                     # [N, 3] true CB, or CA of glycine
    plddt: np.ndarray                                    # [N] 0 to 100
    lddt: np.ndarray                                     # [N] 0 to 100
    distance: np.ndarray                                 # [N, N] between CB, or CA of glycine, as the distogram expects

    @property
    def known(self) -> np.ndarray:
        """Whether the true CA is known.   [N]"""
        return np.isfinite(self.true).all(1)

    def superposed(self) -> np.ndarray:
        """Predicted CA in the frame of the true ones; where none is known, in the frame in which they came.   [N, 3]"""
        places = self.predicted, np.nan_to_num(self.true), self.known
        return superposed(*(torch.from_numpy(each)[None] for each in places))[0].numpy()

    @cached_property
    def errors(self) -> np.ndarray:
        """Distances of the superposed CA from those that are known.   [known]"""
        return np.asarray(np.linalg.norm((self.superposed() - self.true)[self.known], axis=1))

    def rmsd(self) -> float:
        """RMSD of all known CA, superposed by them; NaN where none is known."""
        return float(np.sqrt(np.mean(self.errors ** 2))) if self.known.any() else math.nan

    def gdt_ts(self) -> float:
        """0 to 100, after the one superposition by all known CA; NaN where none is known.

        The official score seeks the best superposition for each cutoff: this is a lower bound of it.
        """
        return 100 * float(np.mean(self.errors[:, None] <= GDT_TS)) if self.known.any() else math.nan

    def mean_lddt(self) -> float:
        """The mean over residues; NaN where no residue has one."""
        finite = self.lddt[np.isfinite(self.lddt)]
        return float(finite.mean()) if len(finite) else math.nan


def read(path: Path) -> list[Chain]:
    found = arrays(path, LEGEND)
    residues, aatype = found["residues"].astype(np.int64), found["aatype"]
    sums = {"R": residues.sum(), "S": (residues**2).sum()}
    if residues.min() < 1 or sums["R"] != len(aatype) or sums["S"] != len(found["distance"]):
        raise DataError(f"residues is {residues.min()} to {residues.max()}, their sum {sums['R']} and the sum of their squares"
                        f" {sums['S']}; expected whole numbers from 1 on with R = {len(aatype)} and S = {len(found['distance'])}")
    if aatype.min() < 0 or aatype.max() > UNKNOWN:
        raise DataError(f"aatype is {aatype.min()} to {aatype.max()}, expected 0 to {UNKNOWN}, which is X")
    beta, seen = pseudo_beta(aatype, found["true"], found["mask"], "true")
    known = found["mask"][:, PLACE["CA"]] == 1
    _refuse_out_of_range(found, known)
    # The page shows two atoms of each residue.
    alpha = {name: found[name][:, PLACE["CA"]].astype(float) for name in ("predicted", "true")}
    alpha["true"][~known] = math.nan
    beta = np.where(seen[:, None] > 0, beta, math.nan)
    rows = {**alpha, "beta": beta, "plddt": found["plddt"], "lddt": found["lddt"]}
    parts = [np.split(values, np.cumsum(residues)[:-1]) for values in rows.values()]
    matrices = np.split(found["distance"], np.cumsum(residues**2)[:-1])
    return [
        Chain(name=name, distance=matrix.reshape(count, count), **dict(zip(rows, each)))
        for name, count, matrix, *each in zip(found["names"].tolist(), residues, matrices, *parts)
    ]


def _refuse_out_of_range(found: dict[str, np.ndarray], known: np.ndarray) -> None:
    lddt, distance = found["lddt"], found["distance"]
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
    if not (np.isfinite(distance) & (distance >= 0)).all():
        raise DataError(f"distance is {distance.min():g} to {distance.max():g}, expected angstrom from 0 on")


def spread(found: list[Chain], most: int) -> list[int]:
    """The numbers of at most ``most`` chains, evenly from the first to the last."""
    return [int(m) for m in np.linspace(0, len(found) - 1, min(len(found), most)).round()]


def caption(found: list[Chain]) -> str:
    total, shown = len(found), len(spread(found, ROWS))
    which = f"{total:,} validation chain{'s' * (total > 1)}"
    if total > shown:
        which = f"{shown} of {which}, evenly from the first to the last"
    return (f"{which}. Left: Cα traces along the two longest axes of the true fold, the prediction superposed by least squares over"
            " all Cα that are known; RMSD and GDT-TS are of this one superposition. Distances are between Cβ atoms (Cα of glycine),"
            f" as the distogram expects them, which sees no further than {FAR:g} Å, and as they are. Right: lDDT-Cα of each residue"
            " and what the network expects of it, pLDDT. What is not in the true structure is left blank.")


def table(found: list[Chain]) -> Table:
    total, listed = len(found), spread(found, LISTED)
    scores = np.array([(chain.mean_lddt(), chain.plddt.mean(), chain.gdt_ts(), chain.rmsd()) for chain in found])
    means = [float(each[np.isfinite(each)].mean()) if np.isfinite(each).any() else math.nan for each in scores.T]
    which = f"{total:,} validation chains" + (f", {len(listed)} of them shown" if total > len(listed) else "")
    note = (f"{which}; means over all: lDDT-Cα {score(means[0], 1)}, pLDDT {score(means[1], 1)}, GDT-TS {score(means[2], 1)},"
            f" RMSD {score(means[3])} Å. " if total > 1 else "")
    note += ("lDDT-Cα and pLDDT are means over residues, 0 to 100; an evaluation's lddt is over distances, 0 to 1. GDT-TS is of one"
             " superposition by all Cα, a lower bound of the official score, which seeks the best for each cutoff.")
    head, rows = ("chain", "residues", "in the truth", "lDDT-Cα", "pLDDT", "GDT-TS", "RMSD of Cα [Å]"), []
    for chain, (*row, rmsd) in ((found[m], scores[m]) for m in listed):
        counts = f"{len(chain.plddt):,}", f"{chain.known.sum():,}"
        rows.append((chain.name, *counts, *(score(each, 1) for each in row), score(rmsd)))
    return Table("Prediction per chain", note, head, rows)


def draw(found: list[Chain], theme: Theme) -> Figure:
    chains = [found[m] for m in spread(found, ROWS)]
    side = (WIDTH - sum(GAPS)) / (2 + 2 * WIDE)
    height = TOP + len(chains) * (HEAD + side + FOOT) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("none")
    limits, colors = Normalize(NEAR, FAR), matplotlib.colormaps[theme.values].reversed()  # far residues fade into the paper

    def box(left: float, top: float, width: float, tall: float) -> Axes:
        return figure.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

    widths = WIDE * side, side, side, WIDE * side
    lefts = [sum(GAPS[: k + 1]) + sum(widths[:k]) for k in range(4)]
    for row, chain in enumerate(chains):
        top = TOP + HEAD + row * (HEAD + side + FOOT)
        fold, predicted, true, scores = (box(left, top, width, side) for left, width in zip(lefts, widths))
        _fold(fold, chain, theme)
        _distances(predicted, true, chain, (colors, limits), theme)
        _scores(scores, chain, theme)
    bar = figure.colorbar(ScalarMappable(limits, colors), orientation="horizontal", ticks=np.linspace(NEAR, FAR, 6),
                          cax=box(lefts[1], height - BOTTOM + 0.12, lefts[2] + side - lefts[1], 0.09))
    bar.set_label(f"distance [Å], cut off at {FAR:g}")
    bar.outline.set_visible(False)
    _legend(figure, theme)
    return figure


def _fold(axes: Axes, chain: Chain, theme: Theme) -> None:
    predicted, true = _view(chain)
    _trace(axes, true, np.tile(_pale(theme), (len(true), 1)), TRUE, theme)
    colors = [to_rgb(next(color for least, color in BANDS if value >= least)) for value in chain.plddt]
    _trace(axes, predicted, np.array(colors), PREDICTED, theme)
    drawn = np.concatenate((predicted, true[chain.known]))[:, :2]
    if chain.known.any():                                # a prediction that has flown apart leaves the truth large
        reach = 2 * np.abs(true[chain.known, :2]).max() + RULER
        drawn = np.clip(drawn, -reach, reach)
    low, high = drawn.min(0), drawn.max(0)
    middle, half = (low + high) / 2, max(1.1 * float(((high - low) / (WIDE, 1)).max()) / 2 + 1, RULER)
    axes.set(xlim=middle[0] + half * WIDE * np.array((-1, 1)), ylim=middle[1] + half * np.array((-1, 1)))
    axes.set_aspect("equal")
    bare(axes)
    share = RULER / (2 * half * WIDE)
    axes.plot([0, share], [0, 0], transform=axes.transAxes, color=theme.ink, linewidth=2, clip_on=False)
    axes.text(0, 0.025, f"{RULER:g} Å", transform=axes.transAxes, color=theme.ink, fontsize=8, va="bottom")
    told = f"lDDT {score(chain.mean_lddt(), 1)}, GDT-TS {chain.gdt_ts():.1f}, RMSD {chain.rmsd():.2f} Å"
    said = told if chain.known.any() else "no truth"
    name = chain.name if len(chain.name) <= LETTERS else chain.name[: LETTERS - 1] + "…"
    head(axes, verbatim(name), f"{len(chain.plddt)} residue{'s' * (len(chain.plddt) > 1)}, {said}", theme)


def _view(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true CA, turned so that the longest axis of the known ones points to the right, the next one up and the third
    one to the reader.   2 x [N, 3]"""
    predicted = chain.superposed()
    seen = chain.true[chain.known] if chain.known.any() else predicted
    middle = seen.mean(0)
    axes = np.linalg.eigh((seen - middle).T @ (seen - middle))[1][:, ::-1]
    axes = axes * np.where((seen[0] - middle) @ axes > 0, -1, 1)
    axes[:, 2] = np.cross(axes[:, 0], axes[:, 1])        # no mirror image: a right-handed helix is drawn as one
    return (predicted - middle) @ axes, (chain.true - middle) @ axes


def _trace(axes: Axes, points: np.ndarray, colors: np.ndarray, width: float, theme: Theme) -> None:
    """Draws a curve through points [N, 3], some of which are NaN, in the colours of the residues [N, 3], the near over the far."""
    pieces, of = _pieces(points)
    if not len(pieces):
        return
    depth = pieces[..., 2].mean(1)
    order = np.argsort(depth)
    far = (depth.max() - depth) / max(np.ptp(depth), 1e-9)
    shades = colors[of] + (FADE * far)[:, None] * (np.array(to_rgb(theme.paper)) - colors[of])
    # Each layer has paper around it, so that one sees which of two parts that cross is nearer. Paper with round ends would cut into
    # the part that goes on.
    around = patheffects.Stroke(linewidth=width + 2 * EDGE, foreground=theme.paper, capstyle="butt")
    for layer in np.array_split(order, min(LAYERS, len(order))):
        lines = LineCollection(list(pieces[layer, :, :2]), colors=shades[layer], linewidths=width, capstyle="round")
        lines.set_path_effects([around, patheffects.Normal()])
        axes.add_collection(lines, autolim=False)


def _pieces(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half steps of a cubic curve through points, and the residue of each; there is none beside a NaN, and a lone point is a dot.

    [N, 3] -> [S, HALVES + 1, 3], [S]
    """
    steps = np.pad(np.diff(points, axis=0), ((1, 1), (0, 0)), constant_values=math.nan)
    there = np.isfinite(steps).all(1)
    known = np.where(there[:, None], steps, 0)
    slopes = (known[:-1] + known[1:]) / np.maximum(there[:-1].astype(int) + there[1:], 1)[:, None]
    a = np.flatnonzero(there[1:-1])
    t = np.linspace(0, 1, 2 * HALVES + 1)[:, None]
    turns = t * (1 - t) * ((1 - t) * slopes[a, None] - t * slopes[a + 1, None])  # Hermite: through both ends with their slopes
    curves = points[a, None] + t**2 * (3 - 2 * t) * steps[a + 1, None] + turns
    alone = np.flatnonzero(np.isfinite(points).all(1) & ~there[:-1] & ~there[1:])
    pieces = np.concatenate((curves[:, : HALVES + 1], curves[:, HALVES:], np.repeat(points[alone, None], HALVES + 1, 1)))
    pieces[:, -1, :2] += 0.01                            # what has no length would not be drawn
    return pieces, np.concatenate((a, a + 1, alone))


def _pale(theme: Theme) -> tuple[float, float, float]:
    red, green, blue = (0.45 * ink + 0.55 * paper for ink, paper in zip(to_rgb(theme.faint), to_rgb(theme.paper)))
    return red, green, blue


def _distances(predicted: Axes, true: Axes, chain: Chain, scale: tuple[Any, Any], theme: Theme) -> None:
    """Draws the predicted and the true distances between residues on one scale of colours."""
    distance, between = chain.distance.astype(float), np.linalg.norm(chain.beta[:, None] - chain.beta, axis=2)
    count, known = len(between), int(np.isfinite(chain.beta).all(1).sum())
    near = (between < FAR) & ~np.eye(count, dtype=bool)
    said = f"MAE {np.abs(distance - between)[near].mean():.2f} Å where true is below {FAR:g}" if near.any() else "MAE –"
    ends = (0.5, count + 0.5, count + 0.5, 0.5)
    for axes, values, words in (
        (predicted, distance, ("Distances, predicted", said)),
        (true, between, ("Distances, true", f"{known:,} of {count:,} residues known")),
    ):
        axes.imshow(np.ma.masked_invalid(values), *scale, extent=ends, interpolation="nearest")
        _square(axes, *words, theme)
    if not known:
        true.text(0.5, 0.5, "no truth", transform=true.transAxes, color=theme.faint, ha="center", va="center")


def _square(axes: Axes, title: str, said: str, theme: Theme) -> None:
    axes.set_facecolor(theme.grid)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.set_xlabel("residue")
    head(axes, title, said, theme)


def _scores(axes: Axes, chain: Chain, theme: Theme) -> None:
    edges = np.arange(len(chain.plddt) + 1) + 0.5
    for values, color, width in ((chain.plddt, theme.second, 1.2), (chain.lddt, theme.main, 1.5)):
        axes.stairs(values, edges, color=color, linewidth=width, baseline=None)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 103), yticks=[0, *(least for least, _ in BANDS[:3]), 100], xlabel="residue")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(False, axis="x")
    said = f"mean: true {score(chain.mean_lddt(), 1)}, predicted (pLDDT) {chain.plddt.mean():.1f}"
    head(axes, "lDDT-Cα", said, theme)


def _legend(figure: Figure, theme: Theme) -> None:
    marks = [Line2D([], [], color=_pale(theme), linewidth=TRUE, label="true trace")]
    tops = (None, *(least for least, _ in BANDS))
    for (least, color), top in zip(BANDS, tops):
        label = f"pLDDT {least} to {top}" if top and least else f"pLDDT below {top}" if top else f"predicted, pLDDT above {least}"
        marks.append(Line2D([], [], color=color, linewidth=PREDICTED + 0.8, label=label))
    marks += [Line2D([], [], color=theme.main, linewidth=1.5, label="true lDDT-Cα"),
              Line2D([], [], color=theme.second, linewidth=1.5, label="predicted lDDT-Cα (pLDDT)")]
    figure.legend(handles=marks, loc="upper left", borderaxespad=0.3, ncols=len(marks), fontsize=9)
