"""The figures of a run: ensembles beside the truth; power by scale; rank of the truth among members; errors of forecasts.

N samples, M members, L lead times (1 if nothing is forecast), C channels, S cells along each dim, K wave numbers
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from torch import Tensor
from torch.nn.functional import interpolate

from hpcai.cli.report.curves import set_log_scale
from hpcai.cli.report.picture import Finding, Table, arrays, compare_errors, format_measured
from hpcai.cli.report.theme import WIDTH, Theme, escape_mathtext, hide_axes, panel_title
from hpcai.errors import DataError
from hpcai.models.diffusion import FieldsConfig, scores

FILE = "ensembles.npz"
TITLE = "Ensembles of unseen fields"
SHOWN, CHANNELS, COLUMNS = 3, 4, 3                       # samples and channels that are drawn, and columns of each
BASELINES = {"start": "persistence", "mean": "the regression mean", "field": "cubic interpolation", "constant": "the mean field"}


@dataclass
class Ensembles:
    """Normalized fields, as for the model, and their ensembles."""

    fields: FieldsConfig
    given: Tensor | None                                 # [N, C, *s] coarse fields, or initial states of forecasts
    truth: Tensor                                        # [N, L, C, *S]
    members: Tensor                                      # [M, N, L, C, *S]
    baseline: str                                        # name of the fields that ensembles are compared with
    single: Tensor                                       # [N, L, C, *S] these fields
    weights: Tensor                                      # [C, *S] of cells, mean 1; 0: masked
    interval: tuple[float, str] | None                   # between lead times, and its unit; None: no forecast

    def time(self, lead: int) -> str:
        return "" if self.interval is None else f" after {self.interval[0] * (lead + 1):g} {self.interval[1]}"

    def to_physical(self, channel: int, values: Tensor) -> Tensor:
        fields = self.fields
        x = fields.mean[channel] + fields.deviation[channel] * values.double()
        return {"none": x, "log": x.exp() - fields.floors[channel], "sqrt": x.clamp(min=0).square()}[fields.transforms[channel]]

    def score(self, channel: int, lead: int = -1) -> dict[str, float]:
        """Return weighted means of a channel, in its deviations: ``crps`` of the members, and of the ``dressed`` baseline with
        Gaussian errors, which have the mean square of its own (Gneiting et al. 2005, eq. 5); absolute errors of the ``single``
        baseline and of the members' ``mean``; and ``spread`` over skill, as in ``scores.ensemble_sums``."""
        truth, members = self.truth[:, lead, channel].double(), self.members[:, :, lead, channel].double()
        weights, single = self.weights[channel], self.single[:, lead, channel] - truth
        sigma = max(math.sqrt((weights * single.square()).mean()), 1e-12)
        cells = scores.gaussian_crps(self.single[:, lead, channel], sigma, truth), single.abs(), (members.mean(0) - truth).abs()
        sums, finish = scores.ensemble_sums(members, truth, weights)
        metrics, means = finish(*sums), (float((weights * values).mean()) for values in cells)
        return {"crps": metrics["crps"], **dict(zip(("dressed", "single", "mean"), means)), "spread": metrics["spread_over_skill"]}

    def power_ratios(self, channel: int, lead: int = -1) -> tuple[Tensor, Tensor, Tensor]:
        """Return wave numbers [K], and power over that of the truth, without the mean, of members [M, K] and the baseline [K]."""
        at, seen = scores.shells(self.truth.shape[3:], self.fields.box), self.weights[channel] > 0
        fields = (each[:, lead, channel] * seen for each in (self.truth, self.single, *self.members))
        true, single, *members = (scores.spectrum(field, at)[:, 1:].mean(0).clamp(min=1e-30) for field in fields)
        return at.center[1:], torch.stack(members) / true, single / true

    def plane(self, channel: int, field: Tensor) -> np.ndarray:
        """Return a map, or the middle plane of a volume, with NaN in cells where all weights are 0."""
        masked = interpolate(self.weights[None, None, channel], field.shape, mode="area")[0, 0] == 0
        plane = field.double().masked_fill(masked, math.nan).numpy()
        return plane if plane.ndim == 2 else plane[len(plane) // 2]


def read(path: Path) -> Ensembles:
    with np.load(path, allow_pickle=False) as file:
        lead = " L" if "start" in file else ""
        dims = " ".join(f"S{n}" for n in range(file["truth"].ndim - 2 - bool(lead))) if "truth" in file else "S0"
        forms = {"truth": f"real N{lead} C {dims}", "members": f"real N M{lead} C {dims}", "weights": f"real C {dims}",
                 "field": "real N C " + dims.replace("S", "s"), "index": "whole N"}  # fmt: skip
        forms |= dict.fromkeys(("start", "mean"), f"real N C {dims}")
        legend = {name: form for name, form in forms.items() if name in file or name in ("truth", "members")}
        described = [name for name in (*FieldsConfig.model_fields, "floor") if f"about_{name}" in file]
        about = {name: file[f"about_{name}"].tolist() for name in described if file[f"about_{name}"].size}
    content = arrays(path, legend)
    if not all(np.isfinite(array).all() for array in content.values()):
        raise DataError("some elements are not finite")
    order = np.argsort(content.pop("index", np.arange(len(content["truth"]))), kind="stable")
    tensors = {name: torch.from_numpy(array if name == "weights" else array[order]) for name, array in content.items()}
    truth, members = (tensors[name] if lead else tensors[name].unsqueeze(dim) for dim, name in enumerate(("truth", "members"), 1))
    count, *sizes = truth.shape[2:]
    weights = tensors.get("weights", torch.ones(count, *sizes)).double()
    if weights.min() < 0 or not weights.flatten(1).any(1).all():
        raise DataError("weights are negative, or 0 in a whole channel; expected positive ones, and 0 in masked cells")
    weights = weights / weights.mean(tuple(range(1, weights.ndim)), keepdim=True)
    number, unit = about.pop("interval", (1.0, "steps"))
    names = [f"channel {n}" for n in range(count)]
    default = {"names": names, "units": [""] * count, "mean": [0.0] * count, "deviation": [1.0] * count}
    fields = FieldsConfig.model_validate({"box": sizes, "box_units": "cell", **default, **about}, strict=False)
    if odd := [name for name in (*default, "transforms", "floors") if len(getattr(fields, name)) != count]:
        raise DataError(f"about_{odd[0]} has {len(getattr(fields, odd[0]))} elements, expected {count}, one for each channel")
    tensors["constant"] = (weights * truth).mean((0, 1, *range(3, truth.ndim)), keepdim=True)[0]
    baseline = next(name for name in BASELINES if name in tensors)
    single = tensors[baseline]
    for dim, (size, wraps) in enumerate(zip(sizes, fields.periodic or [False] * len(sizes)), 2):  # leaves fine fields as they are
        rows, copies = single.movedim(dim, -1), 3 if wraps else 1  # the middle one of three copies is periodic
        flat = torch.cat([rows] * copies, -1).flatten(0, -2)
        resized = interpolate(flat[None, None], (len(flat), copies * size), mode="bicubic")[0, 0]
        single = resized.narrow(1, size * (copies // 2), size).unflatten(0, rows.shape[:-1]).movedim(-1, dim)
    return Ensembles(fields, tensors.get("start", tensors.get("field")), truth, members.movedim(1, 0), BASELINES[baseline],
                     single[:, None].expand_as(truth), weights, (float(number), unit) if lead else None)  # fmt: skip


def caption(ensembles: Ensembles) -> str:
    (count, leads, channels), members = ensembles.truth.shape[:3], len(ensembles.members)
    drawn = f"; the first {CHANNELS} of {channels} channels are drawn" if channels > CHANNELS else ""
    return (f"{count} validation samples, {members} members of each{drawn}. A member is one possible field; spread is the standard"
            " deviation of members. Power: of normalized members over that of the truth; band: 5th to 95th percentile of members."
            " Rank: number of members below the truth, at each cell; uniform if members and truth have the same distribution"
            f"{'; of the last lead time' if leads > 1 else ''}.{'' if ensembles.weights.all() else ' Masked cells are blank.'}")


def finding(ensembles: Ensembles) -> Finding:
    name, values, when = ensembles.fields.names[0], ensembles.score(0), ensembles.time(ensembles.truth.shape[1] - 1)
    comparison = compare_errors(values["crps"], values["dressed"], f"{ensembles.baseline} with Gaussian errors")
    sentence = f"To the truth of unseen samples{when}, generated {name} is {comparison} (CRPS)."
    return Finding(sentence, format_measured(values["crps"]), f"CRPS in deviations of {name}; 0 is perfect")


def draw(ensembles: Ensembles, theme: Theme) -> list[Figure]:
    (count, leads), channels = ensembles.truth.shape[:2], range(len(ensembles.fields.names))[:CHANNELS]
    samples, times = range(count)[: math.ceil(SHOWN / len(channels))], sorted({(leads - 1) // 2, leads - 1})
    figures = [_fields(ensembles, n, channel, lead, theme) for n in samples for channel in channels for lead in times]
    for panel in (_power, _ranks) if ensembles.interval is None else (_errors, _power, _ranks):
        for channel in channels:
            figures.append(Figure(figsize=(WIDTH, 3.6)))
            panel(figures[-1], ensembles, channel, theme)
    return figures


def _fields(ensembles: Ensembles, n: int, channel: int, lead: int, theme: Theme) -> Figure:
    name, unit = ensembles.fields.names[channel], ensembles.fields.units[channel]
    fields = {} if ensembles.given is None else {"given" if ensembles.interval is None else "start": ensembles.given[n, channel]}
    members, fields["truth"] = ensembles.members[:, n, lead, channel], ensembles.truth[n, lead, channel]
    fields |= {f"member {m}": member for m, member in enumerate(members[: 2 * COLUMNS - 2 - len(fields)], 1)}
    physical, true = (ensembles.to_physical(channel, each) for each in (members, fields["truth"]))
    panels = fields | {"spread": physical.std(0), "error of the mean": (physical.mean(0) - true).abs()}
    planes = {title: ensembles.plane(channel, field) for title, field in panels.items()}
    rows, (height, width) = math.ceil(len(planes) / COLUMNS), planes["truth"].shape
    figure = Figure(figsize=(WIDTH, 1.5 + rows * (WIDTH / COLUMNS * min(max(height / width, 0.3), 1.5) + 0.15)))
    figure.suptitle(escape_mathtext(f"Sample {n}: {name}{ensembles.time(lead)}"), x=0.01, ha="left", fontsize=11, weight="bold")
    values = Normalize(np.nanmin(planes["truth"]), np.nanmax(planes["truth"]))
    errors = Normalize(0, np.nanpercentile([*planes.values()][-2:], 99))
    for cell, (title, plane) in enumerate(planes.items(), 1):
        axes = figure.add_subplot(rows, COLUMNS, cell)
        hide_axes(axes)
        norm, colors = (values, theme.values) if title in fields else (errors, theme.counts)
        axes.imshow(plane, origin="lower", norm=norm, cmap=colors)
        axes.set_title(title, fontsize=10, loc="left")
    images = [axes.images[0] for axes in figure.axes]
    for image, label, ends in ((images[-1], "spread and error", "max"), (images[0], name, "both")):
        bar = figure.colorbar(image, ax=figure.axes[: len(planes)], location="bottom", aspect=40, pad=0.02, extend=ends)
        bar.set_label(escape_mathtext(f"{label} [{unit}]" if unit else label))
        bar.outline.set_visible(False)
    grid = torch.linspace(*images[0].get_clim(), 401)  # the bar of normalized values has physical ones as labels
    physical = ensembles.to_physical(channel, grid)
    ticks = MaxNLocator(6).tick_values(float(physical[0]), float(physical[-1]))
    if ensembles.fields.transforms[channel] != "none":
        ticks = [float(f"{value:.2g}") for value in physical[40::80]]
    ticks = [tick for tick in ticks if physical[0] <= tick <= physical[-1]]
    bar.set_ticks(np.interp(ticks, physical, grid).tolist(), labels=[f"{tick:g}".replace("-", "\N{MINUS SIGN}") for tick in ticks])
    return figure


def _power(figure: Figure, ensembles: Ensembles, channel: int, theme: Theme) -> None:
    axes, leads, unit = figure.subplots(), ensembles.truth.shape[1], escape_mathtext(ensembles.fields.box_units)
    for lead in range(leads):
        scale, ratios, single = ensembles.power_ratios(channel, lead)
        label = f"members{ensembles.time(lead)}" if lead in (0, leads - 1) else None
        axes.plot(scale, ratios.mean(0), color=theme.main, alpha=0.3 + 0.7 * (lead + 1) / leads, label=label)
    band = ratios.quantile(torch.tensor([0.05, 0.95], dtype=ratios.dtype), 0).numpy()
    axes.fill_between(scale, *band, color=theme.main, alpha=0.25, linewidth=0)
    axes.plot(scale, single, color=theme.faint, label=ensembles.baseline)
    axes.axhline(1.0, color=theme.ink, linewidth=1)
    set_log_scale(axes, ends := np.array([1.0, band.min(), 1.2 * max(1.2, band.max())]))
    axes.set(xscale="log", xlabel=f"wave number [radians per {unit}]", ylabel="power over that of the truth")
    axes.set_ylim(ends.min() / 2 if axes.get_yscale() == "log" else 0, ends.max())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    n = int(((ratios.mean(0) - 1).abs() <= 0.1).long().cumprod(0).sum())
    limit = f"within 10 % of the truth up to {scale[n - 1]:.2g} of {scale[-1]:.2g}" if n else "over 10 % off at the largest scale"
    panel_title(axes, f"Power of {escape_mathtext(ensembles.fields.names[channel])}", limit + ensembles.time(leads - 1), theme)


def _ranks(figure: Figure, ensembles: Ensembles, channel: int, theme: Theme) -> None:
    axes, seen = figure.subplots(), ensembles.weights[channel] > 0
    counts = scores.rank_histogram(ensembles.members[:, :, -1, channel, seen], ensembles.truth[:, -1, channel, seen])
    share = (counts / counts.sum() * len(counts)).numpy()
    axes.bar(np.arange(len(share)), share, width=0.9, color=theme.main)
    axes.axhline(1.0, color=theme.ink, linewidth=1)
    axes.grid(False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="members below the truth", ylabel="density, 1 if uniform")
    title = f"Rank of true {escape_mathtext(ensembles.fields.names[channel])}"
    panel_title(axes, title, "high at both ends: too little spread", theme)


def _errors(figure: Figure, ensembles: Ensembles, channel: int, theme: Theme) -> None:
    (above, below), (number, unit) = figure.subplots(2, sharex=True, height_ratios=(2, 1)), ensembles.interval or (1.0, "")
    values = [ensembles.score(channel, lead) for lead in range(ensembles.truth.shape[1])]
    curves = {"single": (above, f"error of {ensembles.baseline}", theme.faint), "crps": (above, "CRPS", theme.main),
              "mean": (above, "error of the ensemble mean", theme.second), "spread": (below, None, theme.main)}  # fmt: skip
    for key, (axes, label, color) in curves.items():
        axes.plot(number * np.arange(1, len(values) + 1), [each[key] for each in values], color=color, marker=".", label=label)
    above.set(ylabel="in deviations", ylim=(0, None))
    above.legend()
    below.axhline(1.0, color=theme.ink, linewidth=1)
    below.set(xlabel=escape_mathtext(f"lead time [{unit}]"), ylabel="spread / skill")
    panel_title(above, f"Errors of {escape_mathtext(ensembles.fields.names[channel])}", "CRPS of a single field: its error", theme)


def table(ensembles: Ensembles) -> Table:
    rows, names = [], ensembles.fields.names
    for channel, lead in np.ndindex(len(names), ensembles.truth.shape[1]):
        crps, dressed, single, _, spread = ensembles.score(channel, lead).values()
        values = crps, dressed, crps / dressed, single, spread
        rows.append([names[channel] + ensembles.time(lead), *(f"{value:.3f}" for value in values)])
    note = ("CRPS: mean distance of members from the truth, minus half of that between members, in units of the field's deviation;"
            f" of one field it is the mean absolute error. The Gaussian errors of {ensembles.baseline} are as wide as its own in"
            " these samples, which favours it. Spread over skill: 1 if the spread equals the error of the mean.")
    head = ("", "CRPS", f"of {ensembles.baseline} with Gaussian errors", "ratio", "its error without", "spread / skill")
    return Table("Ensembles beside one field", note, head, rows)
