"""The figure of a run: protein chains with the predicted fold over the true one, distances between residues, and scores.

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
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpcai.cli.report.picture import Finding, Table, arrays, compare_errors, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, format_score, panel_title
from hpcai.models.openfold.residues import ATOM_ORDER
from hpcai.models.openfold.scores import superpose
from hpcai.models.openfold.targets import pseudo_beta

FILE = "structures.npz"
TITLE = "Predicted and true structures"
HIGHER = ("lddt", "gdt")
# M concatenated chains with R residues in all and S pairs of residues of the same chain; 37 atoms
LEGEND = {"names": "text M", "residues": "whole M", "aatype": "whole R", "predicted": "real R 37 3", "true": "real R 37 3",
          "mask": "whole R 37", "plddt": "real R", "lddt": "real R", "distance": "real S"}  # fmt: skip
ROWS = 4                                                 # chains that are drawn
GDT_TS = np.array([1, 2, 4, 8])                          # angstrom
NEAR, FAR = 2.0, 22.0                                    # angstrom, ends of the scale and range of the distogram
BANDS = ((90, "pLDDT above 90", "#1f6feb"), (70, "70 to 90", "#4fbdf0"), (50, "50 to 70", "#f2c200"),
         (0, "below 50", "#f0703a"))                     # as in AlphaFold's database
TRUE, PALE = 5.5, 0.45                                   # points of the true trace, and its opacity
LETTERS = 34                                             # at most in the name of a chain


@dataclass(kw_only=True)
class Chain:
    """A protein chain, predicted and true, each in its own frame.   angstrom; NaN where unknown"""

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

    def superpose(self) -> np.ndarray:
        """Return predicted CA superposed on the true ones, or unchanged if none is known.   [N, 3]"""
        coordinates = self.predicted, np.nan_to_num(self.true), self.known
        return superpose(*(torch.from_numpy(each)[None] for each in coordinates))[0].numpy()

    @cached_property
    def errors(self) -> np.ndarray:
        """Distances of the superposed CA from the known true ones.   [known]"""
        return np.asarray(np.linalg.norm((self.superpose() - self.true)[self.known], axis=1))

    def rmsd(self) -> float:
        """Return the RMSD of all known CA, after superposition by them; NaN if none is known."""
        return float(np.sqrt(np.mean(self.errors ** 2))) if self.known.any() else math.nan

    def gdt_ts(self) -> float:
        """Return GDT-TS, 0 to 100, after the one superposition by all known CA; NaN if none is known.

        The official score optimizes the superposition for each cutoff: this is a lower bound of it."""
        return 100 * float(np.mean(self.errors[:, None] <= GDT_TS)) if self.known.any() else math.nan

    def mean_lddt(self) -> float:
        """Return the mean over residues; NaN if no residue has one."""
        finite = self.lddt[np.isfinite(self.lddt)]
        return float(finite.mean()) if len(finite) else math.nan


def read(path: Path) -> list[Chain]:
    content = arrays(path, LEGEND)
    residues, aatype = content["residues"].astype(np.int64), content["aatype"]
    beta, seen = pseudo_beta(aatype, content["true"], content["mask"], "true")
    known = content["mask"][:, ATOM_ORDER["CA"]] == 1
    # The figure shows two atoms of each residue.
    alpha = {name: content[name][:, ATOM_ORDER["CA"]].astype(float) for name in ("predicted", "true")}
    alpha["true"][~known] = math.nan
    beta = np.where(seen[:, None] > 0, beta, math.nan)
    rows = {**alpha, "beta": beta, "plddt": content["plddt"], "lddt": content["lddt"]}
    parts = [np.split(values, np.cumsum(residues)[:-1]) for values in rows.values()]
    matrices = np.split(content["distance"], np.cumsum(residues**2)[:-1])
    return [
        Chain(name=name, distance=matrix.reshape(count, count), **dict(zip(rows, each)))
        for name, count, matrix, *each in zip(content["names"].tolist(), residues, matrices, *parts)
    ]


def select_shown(chains: list[Chain]) -> list[int]:
    """Return the indices of the chains that are drawn, evenly spaced from the first to the last."""
    return [int(m) for m in np.linspace(0, len(chains) - 1, min(len(chains), ROWS)).round()]


def caption(chains: list[Chain]) -> str:
    total, shown = len(chains), len(select_shown(chains))
    which = f"{total:,} validation chain{'s' * (total > 1)}"
    if total > shown:
        which = f"{shown} of {which}, evenly from the first to the last"
    return (f"{which}. Above: Cα traces along the two longest axes of the true fold, the prediction superposed by least squares"
            " over all known Cα; RMSD and GDT-TS are of this one superposition. Distances are between Cβ atoms (Cα of glycine),"
            f" expected by the distogram, whose range ends at {FAR:g} Å, and true. Below: lDDT-Cα of each residue and the network's"
            " prediction of it, pLDDT. Residues that the true structure lacks are blank.")


def table(chains: list[Chain]) -> Table:
    scores = np.array([(chain.mean_lddt(), chain.plddt.mean(), chain.gdt_ts(), chain.rmsd()) for chain in chains])
    means = [float(each[np.isfinite(each)].mean()) if np.isfinite(each).any() else math.nan for each in scores.T]
    note = (f"Means over {len(chains):,} chains: lDDT-Cα {format_score(means[0], 1)}, pLDDT {format_score(means[1], 1)}, GDT-TS"
            f" {format_score(means[2], 1)}, RMSD {format_score(means[3])} Å. lDDT-Cα and pLDDT are means over residues, 0 to 100;"
            " an evaluation's lddt is over distances, 0 to 1. GDT-TS is of one superposition by all Cα, a lower bound of the"
            " official score, which optimizes it for each cutoff.")
    head, rows = ("chain", "residues", "in the truth", "lDDT-Cα", "pLDDT", "GDT-TS", "RMSD of Cα [Å]"), []
    for chain, (*row, rmsd) in zip(chains, scores):
        counts = f"{len(chain.plddt):,}", f"{chain.known.sum():,}"
        rows.append((chain.name, *counts, *(format_score(each, 1) for each in row), format_score(rmsd)))
    return Table("Prediction per chain", note, head, rows)


def finding(chains: list[Chain]) -> Finding:
    known = [chain for chain in chains if chain.known.any()]
    if not known:
        return Finding("No true structure is known of these chains, so that nothing can be compared.", "–", "lDDT-Cα")
    rmsd = float(np.mean([chain.rmsd() for chain in known]))
    radius = float(np.mean([chain.true[chain.known].std(0).dot(chain.true[chain.known].std(0)) ** 0.5 for chain in known]))
    score = format_score(float(np.nanmean([chain.mean_lddt() for chain in known])), 0)
    comparison = compare_errors(rmsd, radius, "all in one point")
    sentence = f"Cα atoms of unseen chains are placed within {format_measured(rmsd)} Å (RMSD, mean of chains), {comparison}."
    return Finding(sentence, f"{score} of 100", "lDDT-Cα, the share of distances between residues that are right; mean of chains")


def draw(chains: list[Chain], theme: Theme) -> list[Figure]:
    return [_draw(chains[m], theme) for m in select_shown(chains)]


def _draw(chain: Chain, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.7 * WIDTH))
    rows = [["fold", "fold"], ["predicted", "true"], ["scores", "scores"]]
    fold, predicted, true, scores = figure.subplot_mosaic(rows, height_ratios=(5, 3, 3)).values()  # type: ignore[arg-type]
    # Distant pairs fade into the background.
    scale = {"norm": Normalize(NEAR, FAR), "cmap": matplotlib.colormaps[theme.values].reversed(), "interpolation": "nearest"}
    _fold(fold, chain, theme)
    bar = figure.colorbar(_distances(predicted, true, chain, scale, theme), ax=[predicted, true], location="bottom", aspect=40)
    bar.set_label(f"distance [Å], cut off at {FAR:g}")
    bar.outline.set_visible(False)
    _scores(scores, chain, theme)
    marks = [Line2D([], [], color=theme.faint, alpha=PALE, linewidth=TRUE, label="true trace")]
    marks += [Line2D([], [], color=color, linewidth=3, label=f"predicted, {name}") for _, name, color in BANDS]
    figure.legend(handles=[*marks, *scores.lines], loc="outside upper left", ncols=2, fontsize=8)
    return figure


def _fold(axes: Axes, chain: Chain, theme: Theme) -> None:
    """Draw both traces, the near over the far: the longest axis of the known CA points right, the second up, the third to the
    viewer."""
    predicted, true = chain.superpose(), chain.true
    seen = true[chain.known] if chain.known.any() else predicted
    middle = seen.mean(0)
    rotation = np.linalg.eigh((seen - middle).T @ (seen - middle))[1][:, ::-1]
    rotation[:, 2] = np.cross(rotation[:, 0], rotation[:, 1])  # no mirror image: a right-handed helix is drawn as one
    predicted, true = (predicted - middle) @ rotation, (true - middle) @ rotation
    axes.plot(*true[:, :2].T, color=theme.faint, alpha=PALE, linewidth=TRUE, marker="o", markersize=1.5, solid_joinstyle="round")
    steps = np.stack((predicted[:-1], predicted[1:]), 1)
    order = np.argsort(steps[..., 2].mean(1))
    colors = np.array([next(color for least, _, color in BANDS if not value < least) for value in chain.plddt])
    axes.add_collection(LineCollection(list(steps[order, :, :2]), colors=colors[order].tolist(), linewidths=2.2, capstyle="round"))
    axes.plot(*predicted[:1, :2].T, "o", color=colors[0], markersize=3)
    half = 3 + 1.1 * float(np.abs((true[chain.known] if chain.known.any() else predicted)[:, :2]).max())
    axes.set(xlim=(-half, half), ylim=(-half, half), aspect="equal")  # limits of the truth, also if the prediction is scattered
    axes.grid(False)
    axes.set_xlabel("Å")
    scores = f"lDDT {format_score(chain.mean_lddt(), 1)}, GDT-TS {chain.gdt_ts():.1f}, RMSD {chain.rmsd():.2f} Å"
    name = chain.name if len(chain.name) <= LETTERS else chain.name[: LETTERS - 1] + "…"
    panel_title(axes, escape_mathtext(name), f"{len(chain.plddt):,} residues, {scores if chain.known.any() else 'no truth'}", theme)


def _distances(predicted: Axes, true: Axes, chain: Chain, scale: dict[str, Any], theme: Theme) -> Any:
    """Draw predicted and true distances between residues on one color scale. Return the image of the true ones."""
    distance, between = chain.distance.astype(float), np.linalg.norm(chain.beta[:, None] - chain.beta, axis=2)
    count, known = len(between), int(np.isfinite(chain.beta).all(1).sum())
    near = (between < FAR) & ~np.eye(count, dtype=bool)
    mae = f"MAE {np.abs(distance - between)[near].mean():.2f} Å where true is below {FAR:g}" if near.any() else "MAE –"
    for axes, values, title, under in (
        (predicted, distance, "Distances, predicted", mae),
        (true, between, "Distances, true", f"{known:,} of {count:,} residues known"),
    ):
        image = axes.imshow(np.ma.masked_invalid(values), extent=(0.5, count + 0.5, count + 0.5, 0.5), **scale)
        axes.set(facecolor=theme.grid, xlabel="residue")
        axes.grid(False)
        panel_title(axes, title, under, theme)
    return image


def _scores(axes: Axes, chain: Chain, theme: Theme) -> None:
    residues = np.arange(len(chain.plddt)) + 1
    for values, color, width, label in (
        (chain.lddt, theme.main, 1.5, "true lDDT-Cα"), (chain.plddt, theme.second, 1.2, "predicted lDDT-Cα (pLDDT)"),
    ):  # fmt: skip
        axes.step(residues, values, where="mid", color=color, linewidth=width, label=label)
    axes.set(ylim=(0, 103), yticks=[0, *(least for least, _, _ in BANDS[:3]), 100], xlabel="residue")
    axes.grid(False, axis="x")
    means = f"mean: true {format_score(chain.mean_lddt(), 1)}, predicted (pLDDT) {chain.plddt.mean():.1f}"
    panel_title(axes, "lDDT-Cα", means, theme)
