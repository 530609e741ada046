"""Protein chains: the predicted fold over the true one, distances between residues, and how right each is.   N residues"""

import math

import matplotlib
import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hpcai.cli.report.run import Chain, Structures
from hpcai.cli.report.theme import Theme, head, verbatim

WIDTH = 13.2                                             # inches of the picture
ROWS = 4                                                 # chains that are drawn
WIDE = 1.3                                               # of the outer panels, over the height of all
GAPS = 0.15, 0.6, 0.55, 0.6, 0.15                        # inches to the left of each panel, and to the right of the last
TOP, HEAD, FOOT, BOTTOM = 0.4, 0.55, 0.5, 0.7            # inches: the legend, over and under each row, the scale
NEAR, FAR = 2.0, 22.0                                    # angstrom from end to end of the scale; the distogram sees no further
BANDS = ((90, "#1f6feb"), (70, "#4fbdf0"), (50, "#f2c200"), (0, "#f0703a"))  # pLDDT from there up, as AlphaFold's pages have it
HALVES = 4                                               # straight parts of half a step from residue to residue
TRUE, PREDICTED = 5.5, 2.2                               # points of the traces
EDGE = 0.8                                               # points of paper on both sides
LAYERS = 16                                              # in depth
FADE = 0.5                                               # of the farthest part into the paper
RULER = 10.0                                             # angstrom
LETTERS = 34                                             # of a name


def caption(found: Structures) -> str:
    total, shown = len(found.chains), len(found.spread(ROWS))
    which = f"{total:,} validation chain{'s' * (total > 1)}"
    if total > shown:
        which = f"{shown} of {which}, evenly from the first to the last"
    return (f"{which}. Left: Cα traces along the two longest axes of the true fold, the prediction superposed by least squares over"
            " all Cα that are known; RMSD and GDT-TS are of this one superposition. Distances are between Cβ atoms (Cα of glycine),"
            f" as the distogram expects them, which sees no further than {FAR:g} Å, and as they are. Right: lDDT-Cα of each residue"
            " and what the network expects of it, pLDDT. What is not in the true structure is left blank.")


def draw(found: Structures, theme: Theme) -> Figure:
    chains = [found.chains[m] for m in found.spread(ROWS)]
    side = (WIDTH - sum(GAPS)) / (2 + 2 * WIDE)
    height = TOP + len(chains) * (HEAD + side + FOOT) + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine("none")
    limits, colors = Normalize(NEAR, FAR), matplotlib.colormaps[theme.water].reversed()  # what is far fades into the paper

    def box(left: float, top: float, width: float, tall: float) -> Axes:
        return figure.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

    widths = WIDE * side, side, side, WIDE * side
    lefts = [sum(GAPS[: k + 1]) + sum(widths[:k]) for k in range(4)]
    for row, chain in enumerate(chains):
        top = TOP + HEAD + row * (HEAD + side + FOOT)
        fold, predicted, true, scores = (box(left, top, width, side) for left, width in zip(lefts, widths))
        _fold(fold, chain, theme)
        distance, between = chain.distance.astype(float), np.linalg.norm(chain.beta[:, None] - chain.beta, axis=2)
        near = (between < FAR) & ~np.eye(len(between), dtype=bool)
        said = f"MAE {np.abs(distance - between)[near].mean():.2f} Å where true is below {FAR:g}" if near.any() else "MAE –"
        known = int(np.isfinite(chain.beta).all(1).sum())
        for axes, values, words in (
            (predicted, distance, ("Distances, predicted", said)),
            (true, between, ("Distances, true", f"{known:,} of {len(between):,} residues known")),
        ):
            axes.imshow(np.ma.masked_invalid(values), colors, limits, extent=_ends(values), interpolation="nearest")
            _square(axes, *words, theme)
        if not known:
            true.text(0.5, 0.5, "no truth", transform=true.transAxes, color=theme.faint, ha="center", va="center")
        _scores(scores, chain, theme)
    bar = figure.colorbar(ScalarMappable(limits, colors), orientation="horizontal", ticks=np.linspace(NEAR, FAR, 6),
                          cax=box(lefts[1], height - BOTTOM + 0.12, lefts[2] + side - lefts[1], 0.09))
    bar.set_label(f"distance [Å], cut off at {FAR:g}")
    bar.outline.set_visible(False)
    _legend(figure, theme)
    return figure


def _said(value: float, digits: int = 1) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


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
    axes.set(xlim=middle[0] + half * WIDE * np.array((-1, 1)), ylim=middle[1] + half * np.array((-1, 1)), xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.grid(False)
    share = RULER / (2 * half * WIDE)
    axes.plot([0, share], [0, 0], transform=axes.transAxes, color=theme.ink, linewidth=2, clip_on=False)
    axes.text(0, 0.025, f"{RULER:g} Å", transform=axes.transAxes, color=theme.ink, fontsize=8, va="bottom")
    if chain.known.any():
        said = f"lDDT {_said(chain.mean_lddt())}, GDT-TS {chain.gdt_ts():.1f}, RMSD {chain.rmsd():.2f} Å"
    else:
        said = "no truth"
    name = chain.name if len(chain.name) <= LETTERS else chain.name[: LETTERS - 1] + "…"
    head(axes, verbatim(name), f"{len(chain.plddt)} residue{'s' * (len(chain.plddt) > 1)}, {said}", theme)


def _view(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true CA: the longest axis of the known ones to the right, the next up, the third to the reader.   2 x [N, 3]"""
    predicted = chain.superposed()
    seen = chain.true[chain.known] if chain.known.any() else predicted
    middle = seen.mean(0)
    axes = np.linalg.eigh((seen - middle).T @ (seen - middle))[1][:, ::-1]
    axes = axes * np.where((seen[0] - middle) @ axes > 0, -1, 1)
    axes[:, 2] = np.cross(axes[:, 0], axes[:, 1])        # no mirror image: a right-handed helix is drawn as one
    return (predicted - middle) @ axes, (chain.true - middle) @ axes


def _trace(axes: Axes, points: np.ndarray, colors: np.ndarray, width: float, theme: Theme) -> None:
    """A curve through points [N, 3], some of which are NaN, in the colours of the residues [N, 3]; the near over the far."""
    pieces, of = _pieces(points)
    if not len(pieces):
        return
    depth = pieces[..., 2].mean(1)
    order = np.argsort(depth)
    far = (depth.max() - depth) / max(np.ptp(depth), 1e-9)
    shades = colors[of] + (FADE * far)[:, None] * (np.array(to_rgb(theme.paper)) - colors[of])
    # Paper around each layer: where two parts cross, it is seen which is nearer. Round ends of it would cut into what goes on.
    around = patheffects.Stroke(linewidth=width + 2 * EDGE, foreground=theme.paper, capstyle="butt")
    for layer in np.array_split(order, min(LAYERS, len(order))):
        lines = LineCollection(list(pieces[layer, :, :2]), colors=shades[layer], linewidths=width, capstyle="round")
        lines.set_path_effects([around, patheffects.Normal()])
        axes.add_collection(lines, autolim=False)


def _pieces(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half steps of a cubic curve through points, and the residue of each; none beside a NaN, and a dot for a point alone.

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


def _ends(matrix: np.ndarray) -> tuple[float, float, float, float]:
    return 0.5, len(matrix) + 0.5, len(matrix) + 0.5, 0.5


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
    head(axes, "lDDT-Cα", f"mean: true {_said(chain.mean_lddt())}, predicted (pLDDT) {_said(float(chain.plddt.mean()))}", theme)


def _legend(figure: Figure, theme: Theme) -> None:
    marks = [Line2D([], [], color=_pale(theme), linewidth=TRUE, label="true trace")]
    tops = (None, *(least for least, _ in BANDS))
    for (least, color), top in zip(BANDS, tops):
        label = f"pLDDT {least} to {top}" if top and least else f"pLDDT below {top}" if top else f"predicted, pLDDT above {least}"
        marks.append(Line2D([], [], color=color, linewidth=PREDICTED + 0.8, label=label))
    marks += [Line2D([], [], color=theme.main, linewidth=1.5, label="true lDDT-Cα"),
              Line2D([], [], color=theme.second, linewidth=1.5, label="predicted lDDT-Cα (pLDDT)")]
    figure.legend(handles=marks, loc="upper left", borderaxespad=0.3, ncols=len(marks), fontsize=9)
