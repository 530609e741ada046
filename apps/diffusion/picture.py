"""The picture of a run: coarse fields, what the model makes of them, and the truth; power by scale; the truth's rank among members.

N samples, K of them drawn, M members, C channels, S cells along each dim
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from hpcai.cli.report.picture import Table, arrays
from hpcai.cli.report.theme import WIDTH, Theme, bare, head
from hpcai.errors import DataError
from hpcai.models.diffusion import scores

FILE = "ensembles.npz"
TITLE = "Ensembles of unseen fields"
SHOWN, COLUMNS = 3, 3                                    # samples that are drawn, and members of each


@dataclass
class Ensembles:
    """Fields as the model sees them, and what follows from them."""

    names: list[str]                                     # of the channels
    field: np.ndarray | None                             # [N, C, *s]
    truth: np.ndarray                                    # [N, C, *S]
    members: np.ndarray                                  # [N, M, C, *S]
    smooth: np.ndarray                                   # [N, C, *S] cubic interpolation of that, or the truth's mean
    box: list[float]                                     # how long each dim is
    unit: str


def read(path: Path) -> Ensembles:
    with np.load(path, allow_pickle=False) as file:
        dims, given = " ".join(f"S{n}" for n in range(file["truth"].ndim - 2)) if "truth" in file else "S0", "field" in file
    legend = {"truth": f"real N C {dims}", "members": f"real N M C {dims}"}
    legend |= {"field": "real N C " + dims.replace("S", "s")} if given else {}
    found = arrays(path, legend, ("about_names", "about_box", "about_box_units", "about_periodic"))
    if not all(np.isfinite(found[name]).all() for name in legend):
        raise DataError("some numbers are not finite")
    channels, dims_ = found["truth"].shape[1], found["truth"].ndim - 2
    names = found.get("about_names", np.array([f"channel {n}" for n in range(channels)])).astype(str).tolist()
    wraps = found.get("about_periodic", np.zeros(dims_, bool))
    wrapped = [dim for dim, wraps_ in enumerate(wraps.tolist(), 2) if wraps_]
    truth = found["truth"]
    if given:
        smooth = found["field"]
        for dim, size in enumerate(truth.shape[2:], 2):
            smooth = cubic(smooth, dim, size, dim in wrapped)
    else:
        smooth = np.zeros_like(truth) + truth.mean((0, *range(2, truth.ndim)), keepdims=True)
    box = found.get("about_box", np.array(found["truth"].shape[2:])).astype(float).tolist()
    unit = str(found.get("about_box_units", "cells"))
    return Ensembles(names, found.get("field"), truth, found["members"], smooth, box, unit)


def cubic(field: np.ndarray, dim: int, size: int, wraps: bool) -> np.ndarray:
    """``field`` at ``size`` places along ``dim``, by the cubic convolution of four neighbours (Keys 1981, a = -0.75 as torch)."""
    have = field.shape[dim]
    at = (np.arange(size) + 0.5) * have / size - 0.5
    first = np.floor(at).astype(int)
    found = np.zeros((), field.dtype)
    for step in (-1, 0, 1, 2):
        x, place = np.abs(at - first - step), first + step
        near, far = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
        weight = np.where(x <= 1, near, far).astype(field.dtype)
        part = np.take(field, place % have if wraps else place.clip(0, have - 1), dim)
        found = found + part * weight.reshape(-1, *(1,) * (field.ndim - dim - 1))
    return found


def caption(found: Ensembles) -> str:
    count, members = found.members.shape[:2]
    return (f"{count} validation samples, {members} members of each. A member is one field that could be behind the coarse one."
            " Power: of all members beside that of the truth; band: nine tenths of the members. Rank: how many members lie below"
            " the truth, at each cell; level where members and truth are drawn alike.")


def draw(found: Ensembles, theme: Theme) -> Figure:
    shown = min(SHOWN, len(found.truth))
    figure = Figure(figsize=(WIDTH, 2.5 * shown + 3.6))
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.5 * shown, 3.6))
    _fields(parts[0], found, shown, theme)
    left, right = parts[1].subplots(1, 2)
    _power(left, found, theme)
    _ranks(right, found, theme)
    return figure


def _fields(figure: Any, found: Ensembles, shown: int, theme: Theme) -> None:
    members = min(COLUMNS, found.members.shape[1])
    titles = [*(["given"] if found.field is not None else []), "truth", *(f"member {m + 1}" for m in range(members))]
    every = figure.subplots(shown, len(titles), squeeze=False)
    for n in range(shown):
        given = [] if found.field is None else [found.field[n, 0]]
        planes = [_plane(field) for field in (*given, found.truth[n, 0], *found.members[n, :members, 0])]
        limits = Normalize(float(found.truth[n, 0].min()), float(found.truth[n, 0].max()))
        for axes, plane, title in zip(every[n], planes, titles):
            bare(axes)
            axes.imshow(plane, origin="lower", cmap=theme.values, norm=limits)
            if n == 0:
                axes.set_title(title, fontsize=10, loc="left")
        every[n][0].set_ylabel(f"sample {n}", fontsize=9)


def _plane(field: np.ndarray) -> np.ndarray:
    """A map, or the middle of a volume."""
    return field if field.ndim == 2 else field[len(field) // 2]


def _power(axes: Axes, found: Ensembles, theme: Theme) -> None:
    scale, true = spectra(found.truth[:, 0], found.box)
    _, every = spectra(found.members[:, :, 0], found.box)  # [N, M, K]
    _, smooth = spectra(found.smooth[:, 0], found.box)
    low, high = np.quantile(every.mean(0), (0.05, 0.95), axis=0)
    axes.fill_between(scale, low, high, color=theme.main, alpha=0.25, linewidth=0)
    axes.plot(scale, every.mean((0, 1)), color=theme.main, label="members")
    axes.plot(scale, true.mean(0), color=theme.ink, linestyle="--", label="truth")
    if found.field is not None:
        axes.plot(scale, smooth.mean(0), color=theme.faint, label="cubic interpolation of it")
    floor = float(true.mean(0).min()) / 30
    axes.set(xscale="log", yscale="log", xlabel=f"wave number [radians per {found.unit}]", ylabel=f"power of {found.names[0]}")
    axes.set_ylim(bottom=floor)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    head(axes, "Power by scale", "what is not in the coarse field must be made", theme)


def spectra(fields: np.ndarray, box: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Wave numbers [K] and power of each field [..., K], without the mean."""
    sizes = fields.shape[-len(box) :]
    at = scores.shells(sizes, box)
    power = scores.spectrum(torch.from_numpy(fields).reshape(-1, *sizes), at).numpy()
    return at.center[1:].numpy(), power[:, 1:].reshape(*fields.shape[: -len(box)], -1)


def _ranks(axes: Axes, found: Ensembles, theme: Theme) -> None:
    members = torch.from_numpy(found.members[:, :, 0]).transpose(0, 1)
    (sums, *_), _ = scores.rank_sums(members, torch.from_numpy(found.truth[:, 0]))
    counts = sums.numpy()
    share = counts / counts.sum() * len(counts)
    axes.bar(np.arange(len(share)), share, width=0.9, color=theme.main)
    axes.axhline(1.0, color=theme.ink, linewidth=1)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="members below the truth", ylabel="share, 1 where level")
    head(axes, "Rank of the truth", "high at both ends: members are too much alike", theme)


def table(found: Ensembles) -> Table:
    rows = []
    for channel, name in enumerate(found.names):
        members = torch.from_numpy(found.members[:, :, channel]).transpose(0, 1)
        sums, finish = scores.ensemble_sums(members, torch.from_numpy(found.truth[:, channel]))
        known, plain = finish(*sums), float(np.abs(found.smooth[:, channel] - found.truth[:, channel]).mean())
        crps, skill = known["crps_fair"], known["spread_over_skill_corrected"]
        rows.append([name, f"{crps:.3f}", f"{plain:.3f}", f"{crps / plain:.2f}", f"{skill:.2f}"])
    note = ("CRPS: how far members are from the truth, less how far from one another, in units of the field's deviation; of one"
            " field it is the mean absolute error. Spread over skill: 1 where members differ as much as their mean errs.")
    plainly = "of their mean" if found.field is None else "of the cubic field"
    return Table("Ensembles beside one field", note, ("", "CRPS", plainly, "ratio", "spread / skill"), rows)
