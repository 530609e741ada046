"""Checks of a prepared CosmoFlow folder: its files against their index, its spectra against the linear input, and a picture.

N cells per side of a whole universe   Z redshifts   K = N/2 + 1   B bins of wavenumber
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, store, universe

PICTURE = "universes.png"
WINDOW = 0.02           # relative error that the mesh leaves in the power at the wavenumbers compared
THEORY = 0.05           # what is not linear there, over D1^2, as which one-loop terms grow
SIGMAS = 4.0            # deviations; that of the power of Gaussian modes is sqrt(1/modes), a pair of conjugates counted once
BINS = 24


@dataclass
class Comparison:
    """Measured over linear power of the sampled universes, per redshift."""

    redshifts: tuple[float, ...]
    universes: int
    k: NDArray[np.float64]              # [B] mean wavenumber, h/Mpc
    modes: NDArray[np.float64]          # [B] independent modes in all universes
    measured: NDArray[np.float64]       # [Z, B] mean power
    linear: NDArray[np.float64]         # [Z, B] mean linear power
    ratio: NDArray[np.float64]          # [Z, B] mean of the ratio
    reach: tuple[float, ...]            # largest k at which each redshift is compared
    margin: tuple[float, ...]           # relative difference that is no fault, besides sample variance

    def mean(self, channel: int) -> tuple[float, float]:
        """Mean ratio over the modes within reach, and the tolerance of its distance from 1."""
        near = self.k < self.reach[channel]
        modes = float(self.modes[near].sum())
        if modes == 0:
            return math.nan, math.nan
        return float((self.ratio[channel] * self.modes)[near].sum() / modes), self.margin[channel] + SIGMAS / math.sqrt(modes)

    def mistakes(self) -> Iterator[str]:
        for channel, redshift in enumerate(self.redshifts):
            mean, tolerance = self.mean(channel)
            if abs(mean - 1) > tolerance:
                yield (f"redshift {redshift:g}: power is {mean:.3f} of the linear input for k < {self.reach[channel]:.3f} h/Mpc, "
                       f"expected 1 within {tolerance:.3f}")  # fmt: skip
        # The highest redshift is the most linear: there the shape is compared as well, bin by bin.
        channel = int(np.argmax(self.redshifts))
        near = (self.k < self.reach[channel]) & (self.modes > 0)
        margin = self.margin[channel]
        deviation = np.maximum(np.abs(self.ratio[channel] - 1) - margin, 0)[near] * np.sqrt(self.modes[near])
        chi2, bins = float((deviation**2).sum()), int(near.sum())
        if chi2 > bins + 5 * math.sqrt(2 * bins):
            yield (f"redshift {self.redshifts[channel]:g}: the shape of the spectrum is off: chi-square {chi2:.0f} in {bins} bins "
                   f"below k = {self.reach[channel]:.3f} h/Mpc, beyond {margin:.1%}")  # fmt: skip


def check(out: Path, spectra: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out, _file_mistakes)
    settings = store.read_json(out / "recipe.json")
    if settings.get("kind") != "simulate":
        print("not simulated here, so there is no input spectrum to compare with")
    elif not wrong:
        paths = [path for path, _, _ in files]
        comparison = compare(paths, spectra) if spectra else None
        if comparison:
            wrong += _report(comparison)
        if picture:
            draw(out / PICTURE, paths, comparison)
    return command.told(wrong)


def _file_mistakes(path: Path, entry: dict[str, Any], index: dict[str, Any]) -> Iterator[str]:
    found = list(store.mistakes(path, entry, index))
    yield from found
    if found:
        return
    with h5py.File(path, "r") as file:
        counts, target = file["counts"], file["target"]
        if "recipe" not in file.attrs:
            return
        if not (np.abs(target[...]) <= 1).all():
            yield f"target {target[0].tolist()} outside [-1, 1]"
        settings = json.loads(file.attrs["recipe"])
        mean = counts[...].mean(axis=(0, 1, 2, 3))
        # Rounding by chance moves a cell by at most half a count in the standard deviation.
        if (np.abs(mean - settings["mean_count"]) > 6 * 0.5 / math.sqrt(counts.size / counts.shape[-1])).any():
            yield f"mean counts {mean.tolist()}, expected {settings['mean_count']}: matter is not conserved"


def whole(file: h5py.File) -> NDArray[np.int16]:
    """The samples of a simulated universe put together again: counts [N, N, N, Z], periodic."""
    counts = file["counts"][...]
    cut, size = round(counts.shape[0] ** (1 / 3)), counts.shape[1]
    parts = counts.reshape(cut, cut, cut, size, size, size, -1)
    return parts.transpose(0, 3, 1, 4, 2, 5, 6).reshape(cut * size, cut * size, cut * size, -1)


def compare(paths: Sequence[Path], universes: int) -> Comparison:
    """Spectra of evenly chosen files against P(k) D1(z)^2 of their own parameters."""
    chosen = command.spread(paths, universes)
    with h5py.File(chosen[0], "r") as file:
        settings = json.loads(file.attrs["recipe"])
    cells, width, redshifts = settings["size"] * settings["cut"], settings["voxel"], tuple(settings["redshifts"])
    mesh = universe.Mesh(cells, width)
    edges = np.linspace(0, mesh.nyquist / 2, BINS + 1)
    k = np.sqrt(mesh.k2)
    keep = mesh.modes & (k < edges[-1])
    # A mode and its conjugate are one; on the plane k_z = 0 the half spectrum holds both.
    weight = np.broadcast_to(np.where(mesh.k[2] > 0, 1.0, 0.5), k.shape)[keep]
    k, bins = k[keep].astype(np.float64), np.digitize(k[keep], edges) - 1

    def binned(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(bins, weight * values, BINS).astype(np.float64)

    modes = binned(np.ones_like(k))
    measured, linear, ratio = np.zeros((3, len(redshifts), BINS))
    spread = 0.0                        # mean square of the linear displacement per axis at redshift 0
    for path in chosen:
        with h5py.File(path, "r") as file:
            counts, variance = whole(file), file.attrs["rounding_variance"]
            omega_m, sigma_8, n_s, hubble = (float(value) for value in file.attrs["physical"])
        spectrum = universe.Spectrum(universe.Cosmology(omega_m, sigma_8, n_s, hubble, settings["omega_b"]))
        fine = np.geomspace(k.min(), np.sqrt(3) * mesh.nyquist, 2048)
        spread += float(np.trapezoid(spectrum(fine), fine)) / (6 * np.pi**2) / len(chosen)
        today = np.exp(np.interp(np.log(k), np.log(fine), np.log(spectrum(fine))))
        for channel, redshift in enumerate(redshifts):
            theory = today * universe.growth(redshift, omega_m) ** 2
            power = universe.power(mesh, counts[..., channel], float(variance[channel]))[keep]
            measured[channel] += binned(power)
            linear[channel] += binned(theory)
            ratio[channel] += binned(power / theory)
    full = np.maximum(modes, 1e-9) * len(chosen)
    # Linear theory holds while k times the displacement is small; a quarter of Nyquist keeps the window's aliases away.
    reach = tuple(min(mesh.nyquist / 4, 0.35 / (math.sqrt(spread) * universe.growth(z, 0.3))) for z in redshifts)
    margin = tuple(WINDOW + THEORY * universe.growth(z, 0.3) ** 2 for z in redshifts)
    mean_k = binned(k) / np.maximum(modes, 1e-9)
    modes *= len(chosen)
    return Comparison(redshifts, len(chosen), mean_k, modes, measured / full, linear / full, ratio / full, reach, margin)


def _report(comparison: Comparison) -> list[str]:
    print(f"spectra of {comparison.universes} universes over the linear input, on large scales:")
    for channel, redshift in enumerate(comparison.redshifts):
        mean, tolerance = comparison.mean(channel)
        if math.isnan(mean):
            print(f"  redshift {redshift:g}: the box holds no mode below k = {comparison.reach[channel]:.3f} h/Mpc, not compared")
            continue
        print(f"  redshift {redshift:g}: {mean:.3f} for k < {comparison.reach[channel]:.3f} h/Mpc, tolerance {tolerance:.3f}")
    return list(comparison.mistakes())


def draw(path: Path, paths: Sequence[Path], comparison: Comparison | None) -> None:
    """Slices of three universes, of low, middle and high sigma_8, at every redshift; spectra beside them."""
    shown = _spread(paths)
    with h5py.File(shown[0], "r") as file:
        redshifts, voxel = [float(z) for z in file.attrs["redshifts"]], float(file.attrs["voxel_mpc_h"])
    order = np.argsort(redshifts)[::-1]                 # time runs to the right
    columns = len(redshifts)
    with command.picture(path, (2.5 * columns + 5.2, 2.62 * len(shown) + 0.5), 110) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=(2.5 * columns, 5.2), wspace=0.02)
        axes = left.subplots(len(shown), columns, squeeze=False)
        thick = max(1, round(16 / voxel))
        bottom = top = 0.0
        for row, name in enumerate(shown):
            with h5py.File(name, "r") as file:
                counts, values = whole(file), file.attrs["physical"]
            slab = np.log1p(counts[:thick].mean(axis=0))                              # [N, N, Z]
            if not top:                                 # one scale for all, so that growth and sigma_8 are seen
                bottom, top = (float(q) for q in np.quantile(slab[..., int(order[-1])], (0.002, 0.998)))
            for axis, channel in zip(axes[row], order):
                axis.imshow(slab[..., channel].T, origin="lower", cmap="magma", vmin=bottom, vmax=top, interpolation="nearest")
                axis.set(xticks=[], yticks=[])
                if row == 0:
                    axis.set_title(f"z = {redshifts[channel]:g}", fontsize=11)
            text = f"$\\Omega_m$ {values[0]:.3f}  $\\sigma_8$ {values[1]:.3f}\n$n_s$ {values[2]:.3f}  $H_0$ {values[3]:.1f}"
            axes[row][0].set_ylabel(text, fontsize=9)
        side = counts.shape[0] * voxel
        left.supxlabel(f"log(1 + mean count) of a slice {thick * voxel:g} Mpc/h thick; each side {side:g} Mpc/h", fontsize=10)
        if comparison:
            _draw_spectra(right, comparison, order)


def _spread(paths: Sequence[Path]) -> list[Path]:
    """Lowest, middle and highest sigma_8 of up to 64 files."""
    some = command.spread(paths, 64)
    strength = []
    for path in some:
        with h5py.File(path, "r") as file:
            strength.append(float(file.attrs["physical"][1]))
    order = np.argsort(strength)
    return [some[i] for i in dict.fromkeys((int(order[0]), int(order[len(order) // 2]), int(order[-1])))]


def _draw_spectra(panel: Any, comparison: Comparison, order: NDArray[Any]) -> None:
    upper, lower = panel.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    full = comparison.modes > 0
    k, error = comparison.k[full], 1 / np.sqrt(comparison.modes[full])
    from matplotlib import colormaps

    for place, channel in enumerate(order):
        color = colormaps["viridis"](0.9 * (1 - place / max(1, len(order) - 1)))
        label = f"z = {comparison.redshifts[channel]:g}"
        upper.plot(k, comparison.linear[channel][full], color=color, linewidth=1)
        measured = comparison.measured[channel][full]
        upper.errorbar(k, measured, measured * error, color=color, fmt="o", markersize=3, linewidth=1, label=label)
        ratio = comparison.ratio[channel][full]
        lower.errorbar(k, ratio, error, color=color, fmt="o-", markersize=2.5, linewidth=0.8)
        near = k < comparison.reach[channel]
        lower.plot(k[near], ratio[near], "o", color=color, markersize=5, markerfacecolor="none")
    upper.set_title(f"{comparison.universes} universes: counts and linear input", fontsize=11)
    upper.set(xscale="log", yscale="log", ylabel="P(k)  [(Mpc/h)$^3$]")
    upper.legend(fontsize=8, frameon=False)
    lower.axhline(1, color="0.4", linewidth=0.8)
    lower.set(xlabel="k  [h/Mpc]", ylabel="counts / linear", ylim=(0.75, 1.25))
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if k[0] * 0.8 < tick < k[-1] * 1.2]
    lower.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    lower.set_xticks([], minor=True)
    lower.text(0.02, 0.06, "rings: compared", transform=lower.transAxes, fontsize=8, color="0.3")
