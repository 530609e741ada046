"""Checks of prepared CosmoFlow universes: their spectra against the linear input.

N cells per side of a universe   Z redshifts   K = N/2 + 1   B bins of wavenumber
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, universe

WINDOW = 0.02           # relative error that the mesh leaves in the power at the wavenumbers compared
THEORY = 0.05           # relative nonlinear power there, over D1^2, with which one-loop terms grow
SIGMAS = 4.0            # standard deviations; that of the power of Gaussian modes is sqrt(1/modes), conjugate pairs counted once
BINS = 24


@dataclass
class Comparison:
    """Ratio of measured to linear power of some universes, per redshift."""

    redshifts: tuple[float, ...]
    universes: int
    k: NDArray[np.float64]              # [B] mean wavenumber, h/Mpc
    modes: NDArray[np.float64]          # [B] independent modes in all universes
    ratio: NDArray[np.float64]          # [Z, B] mean of the ratio
    reach: tuple[float, ...]            # largest k at which each redshift is compared
    margin: tuple[float, ...]           # accepted relative difference, besides sample variance

    def mean(self, channel: int) -> tuple[float, float]:
        """Return the mean ratio over the modes within reach, and the tolerance of its distance from 1."""
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


def check_spectra(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the faults of simulated universes, and print the ratios of their spectra."""
    if prepared.recipe.get("kind") != "simulate":
        print("not simulated: there is no input spectrum to compare with")
        return
    for path in prepared.paths:
        with h5py.File(path, "r") as file:
            counts, expected = file["counts"], json.loads(file.attrs["recipe"])["mean_count"]
            mean = counts[...].mean(axis=(0, 1, 2, 3))
            # Rounding by chance moves a cell by at most half a count in the standard deviation.
            if (np.abs(mean - expected) > 6 * 0.5 / math.sqrt(counts.size / counts.shape[-1])).any():
                yield f"{path}: mean counts {mean.tolist()}, expected {expected}: matter is not conserved"
    if options.check_count:
        comparison = compare(tuple(command.subsample(prepared.paths, options.check_count)))
        print(f"spectra of {comparison.universes} universes over the linear input, on large scales:")
        for channel, redshift in enumerate(comparison.redshifts):
            (mean, tolerance), reach = comparison.mean(channel), comparison.reach[channel]
            text = f"{mean:.3f} for k < {reach:.3f} h/Mpc, tolerance {tolerance:.3f}"
            print(f"  redshift {redshift:g}: " + ("not compared, the box holds no mode so large" if math.isnan(mean) else text))
        yield from comparison.mistakes()


def assemble(file: h5py.File) -> NDArray[np.int16]:
    """Join the samples of a simulated universe to periodic counts [N, N, N, Z]."""
    counts = file["counts"][...]
    blocks, size = round(counts.shape[0] ** (1 / 3)), counts.shape[1]
    parts = counts.reshape(blocks, blocks, blocks, size, size, size, -1)
    return parts.transpose(0, 3, 1, 4, 2, 5, 6).reshape(blocks * size, blocks * size, blocks * size, -1)


@lru_cache(1)
def compare(paths: tuple[Path, ...]) -> Comparison:
    """Compare the spectra of some files with P(k) D1(z)^2 of their parameters."""
    with h5py.File(paths[0], "r") as file:
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
    ratio = np.zeros((len(redshifts), BINS))
    spread = 0.0                        # mean square of the linear displacement per axis at redshift 0
    for path in paths:
        with h5py.File(path, "r") as file:
            counts, variance = assemble(file), file.attrs["rounding_variance"]
            omega_m, sigma_8, n_s, hubble = (float(value) for value in file.attrs["physical"])
        spectrum = universe.Spectrum(universe.Cosmology(omega_m, sigma_8, n_s, hubble, settings["omega_b"]))
        fine = np.geomspace(k.min(), np.sqrt(3) * mesh.nyquist, 2048)
        spread += float(np.trapezoid(spectrum(fine), fine)) / (6 * np.pi**2) / len(paths)
        today = np.exp(np.interp(np.log(k), np.log(fine), np.log(spectrum(fine))))
        for channel, redshift in enumerate(redshifts):
            theory = today * universe.growth(redshift, omega_m) ** 2
            power = universe.power_spectrum(mesh, counts[..., channel], float(variance[channel]))[keep]
            ratio[channel] += binned(power / theory)
    full = np.maximum(modes, 1e-9) * len(paths)
    # Linear theory holds while k times the displacement is small; a quarter of Nyquist keeps the window's aliases away.
    reach = tuple(min(mesh.nyquist / 4, 0.35 / (math.sqrt(spread) * universe.growth(z, 0.3))) for z in redshifts)
    margin = tuple(WINDOW + THEORY * universe.growth(z, 0.3) ** 2 for z in redshifts)
    mean_k = binned(k) / np.maximum(modes, 1e-9)
    modes *= len(paths)
    return Comparison(redshifts, len(paths), mean_k, modes, ratio / full, reach, margin)
