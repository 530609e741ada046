"""The figure of a run: coarse fields, generated ensembles and the truth; power by scale; rank of the truth among members.

N samples, K of them drawn, M members, C channels, S cells along each dim
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from torch import Tensor
from torch.nn.functional import interpolate

from hpcai.cli.report.picture import Finding, Table, arrays, compare_errors, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, hide_axes, panel_title
from hpcai.errors import DataError
from hpcai.models.diffusion import scores

FILE = "ensembles.npz"
TITLE = "Ensembles of unseen fields"
SHOWN, COLUMNS = 3, 3                                    # samples that are drawn, and columns and members of each


@dataclass
class Ensembles:
    """Normalized fields, as for the model, and their ensembles."""

    names: list[str]                                     # of the channels
    field: np.ndarray | None                              # [N, C, *s]
    truth: Tensor                                        # [N, C, *S]
    members: Tensor                                      # [N, M, C, *S]
    smooth: Tensor                                       # [N, C, *S] cubic interpolation of field, or the truth's mean
    box: list[float]                                     # length of each dim
    unit: str


def read(path: Path) -> Ensembles:
    with np.load(path, allow_pickle=False) as file:
        dims = " ".join(f"S{n}" for n in range(file["truth"].ndim - 2)) if "truth" in file else "S0"
        legend = {"truth": f"real N C {dims}", "members": f"real N M C {dims}"}
        legend |= {"field": "real N C " + dims.replace("S", "s")} if "field" in file else {}
    content = arrays(path, legend, ("about_names", "about_box", "about_box_units", "about_periodic"))
    if not all(np.isfinite(content[name]).all() for name in legend):
        raise DataError("some elements are not finite")
    truth, members = (torch.from_numpy(content[name]) for name in ("truth", "members"))
    names = content.get("about_names", np.array([f"channel {n}" for n in range(truth.shape[1])])).astype(str).tolist()
    periodic = content.get("about_periodic", np.zeros(truth.ndim - 2, bool))
    field = content.get("field")
    if field is None:
        smooth = truth.mean((0, *range(2, truth.ndim)), keepdim=True).expand_as(truth)
    else:
        smooth = torch.from_numpy(field)
        for dim, (size, wraps) in enumerate(zip(truth.shape[2:], periodic.tolist()), 2):
            smooth = resize_cubic(smooth, dim, size, wraps)
    box = content.get("about_box", np.array(truth.shape[2:])).astype(float).tolist()
    return Ensembles(names, content.get("field"), truth, members, smooth, box, str(content.get("about_box_units", "cells")))


def resize_cubic(field: Tensor, dim: int, size: int, wraps: bool) -> Tensor:
    """Resize ``field`` to ``size`` along ``dim`` by torch's cubic convolution; periodic if it ``wraps``."""
    rows, copies = field.movedim(dim, -1), 3 if wraps else 1  # the middle one of three copies is periodic
    flat = torch.cat([rows] * copies, -1).flatten(0, -2)
    resized = interpolate(flat[None, None], (len(flat), copies * size), mode="bicubic")[0, 0]
    return resized.narrow(1, size * (copies // 2), size).unflatten(0, rows.shape[:-1]).movedim(-1, dim)


def caption(ensembles: Ensembles) -> str:
    count, members = ensembles.members.shape[:2]
    return (f"{count} validation samples, {members} members of each. A member is one possible field for the coarse one."
            " Power: of all members beside that of the truth; band: 5th to 95th percentile. Rank: number of members below the"
            " truth, at each cell; uniform if members and truth have the same distribution.")


def _compare(ensembles: Ensembles, channel: int) -> tuple[float, float, float]:
    """Return the CRPS of a channel, its spread over skill, and the error of the field that is compared."""
    truth = ensembles.truth[:, channel]
    sums, finish = scores.ensemble_sums(ensembles.members[:, :, channel].transpose(0, 1), truth)
    metrics = finish(*sums)
    return metrics["crps"], metrics["spread_over_skill"], float((ensembles.smooth[:, channel] - truth).abs().mean())


def finding(ensembles: Ensembles) -> Finding:
    crps, _, plain = _compare(ensembles, 0)
    baseline = "the mean field" if ensembles.field is None else "cubic interpolation of what is given"
    comparison = compare_errors(crps, plain, baseline)
    sentence = f"To the truth of unseen samples, generated {ensembles.names[0]} is {comparison} (CRPS)."
    return Finding(sentence, format_measured(crps), f"CRPS in deviations of {ensembles.names[0]}; 0 is perfect")


def draw(ensembles: Ensembles, theme: Theme) -> list[Figure]:
    samples = [_fields(ensembles, n, theme) for n in range(min(SHOWN, len(ensembles.truth)))]
    figures = [Figure(figsize=(WIDTH, 3.6)) for _ in range(2)]
    _power(figures[0].subplots(), ensembles, theme)
    _ranks(figures[1].subplots(), ensembles, theme)
    return [*samples, *figures]


def _fields(ensembles: Ensembles, n: int, theme: Theme) -> Figure:
    members = min(COLUMNS, ensembles.members.shape[1])
    titles = [*(["given"] if ensembles.field is not None else []), "truth", *(f"member {m + 1}" for m in range(members))]
    coarse = [] if ensembles.field is None else [ensembles.field[n, 0]]
    fields = *coarse, ensembles.truth[n, 0], *ensembles.members[n, :members, 0]
    planes = [field if field.ndim == 2 else field[len(field) // 2] for field in fields]  # the middle of a volume
    limits = Normalize(float(ensembles.truth[n, 0].min()), float(ensembles.truth[n, 0].max()))
    rows = math.ceil(len(titles) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 0.3 + rows * (WIDTH / COLUMNS + 0.3)))
    figure.suptitle(f"Sample {n}", x=0.01, ha="left", fontsize=11, fontweight="bold")
    for cell, (plane, title) in enumerate(zip(planes, titles), 1):
        axes = figure.add_subplot(rows, COLUMNS, cell)
        hide_axes(axes)
        axes.imshow(plane, origin="lower", cmap=theme.values, norm=limits)
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def _power(axes: Axes, ensembles: Ensembles, theme: Theme) -> None:
    scale, true = spectra(ensembles.truth[:, 0], ensembles.box)
    _, member_power = spectra(ensembles.members[:, :, 0], ensembles.box)  # [N, M, K]
    _, smooth = spectra(ensembles.smooth[:, 0], ensembles.box)
    low, high = member_power.mean(0).quantile(torch.tensor([0.05, 0.95], dtype=member_power.dtype), 0)
    axes.fill_between(scale, low, high, color=theme.main, alpha=0.25, linewidth=0)
    axes.plot(scale, member_power.mean((0, 1)), color=theme.main, label="members")
    axes.plot(scale, true.mean(0), color=theme.ink, linestyle="--", label="truth")
    if ensembles.field is not None:
        axes.plot(scale, smooth.mean(0), color=theme.faint, label="cubic interpolation")
    floor = float(true.mean(0).min()) / 30
    axes.set(xscale="log", yscale="log", xlabel=f"wave number [rad/{ensembles.unit}]", ylabel=f"power of {ensembles.names[0]}")
    axes.set_ylim(bottom=floor)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    share = f"the cubic field has {float(smooth.mean(0)[-1] / true.mean(0)[-1]):.0%} of it at the smallest scale"
    panel_title(axes, "Power by scale", "" if ensembles.field is None else share, theme)


def spectra(fields: Tensor, box: list[float]) -> tuple[Tensor, Tensor]:
    """Return wave numbers [K] and the power of each field [..., K], without the mean."""
    sizes = fields.shape[-len(box) :]
    at = scores.shells(sizes, box)
    power = scores.spectrum(fields.reshape(-1, *sizes), at)
    return at.center[1:], power[:, 1:].reshape(*fields.shape[: -len(box)], -1)


def _ranks(axes: Axes, ensembles: Ensembles, theme: Theme) -> None:
    (counts, *_), _ = scores.rank_sums(ensembles.members[:, :, 0].transpose(0, 1), ensembles.truth[:, 0])
    share = (counts / counts.sum() * len(counts)).numpy()
    axes.bar(np.arange(len(share)), share, width=0.9, color=theme.main)
    axes.axhline(1.0, color=theme.ink, linewidth=1)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="members below the truth", ylabel="density, 1 if uniform")
    panel_title(axes, "Rank of the truth", "high at both ends: too little spread", theme)


def table(ensembles: Ensembles) -> Table:
    rows = []
    for channel, name in enumerate(ensembles.names):
        crps, skill, plain = _compare(ensembles, channel)
        rows.append([name, f"{crps:.3f}", f"{plain:.3f}", f"{crps / plain:.2f}", f"{skill:.2f}"])
    note = ("CRPS: mean distance of members from the truth, minus half of that between members, in units of the field's deviation;"
            " of one field it is the mean absolute error. Spread over skill: 1 if the spread equals the error of the mean.")
    plainly = "of their mean" if ensembles.field is None else "of the cubic field"
    return Table("Ensembles beside one field", note, ("", "CRPS", plainly, "ratio", "spread / skill"), rows)
