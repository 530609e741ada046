"""The picture of a run: energies and forces of validation frames of atoms, what the network says over what is true.

B frames, A free atoms in them, N points of a panel
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from hpcai.cli.report.picture import CELLS, arrays, histogram, panels, scatter
from hpcai.cli.report.theme import WIDTH, Theme, compare, head
from hpcai.errors import DataError
from hpcai.log import number

FILE = "pairs.npz"
TITLE = "Predicted and true energies and forces"
HIGHER = ("cosine", "within")
BARS = 16                                                # elements in a panel
ELEMENTS = 118
SYMBOLS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh "
    "Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn "
    "Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og"
)


@dataclass
class Pairs:
    """What is true and what the network says."""

    energy: np.ndarray                                   # [B, 2] eV
    forces: np.ndarray                                   # [A, 2, 3] eV/angstrom
    numbers: np.ndarray                                  # [A] atomic numbers


def read(path: Path) -> Pairs:
    energy, forces, numbers = arrays(path, {"energy": "real B 2", "forces": "real A 2 3", "numbers": "whole A"}).values()
    frames, atoms = np.isfinite(energy).all(1), np.isfinite(forces).all((1, 2))
    for what, finite in (("frame has a finite true and predicted energy", frames), ("free atom has finite forces", atoms)):
        if not finite.any():
            raise DataError(f"no {what}")
    if numbers.min() < 1 or numbers.max() > ELEMENTS:
        raise DataError(f"numbers is {numbers.min()} to {numbers.max()}, expected atomic numbers 1 to {ELEMENTS}")
    return Pairs(energy[frames].astype(float), forces[atoms].astype(float), numbers[atoms].astype(np.intp))


def caption(found: Pairs) -> str:
    return (f"{len(found.energy):,} validation frames, {len(found.forces):,} free atoms in them. A perfect network lies on the"
            " diagonal; one that has learned nothing says that no force acts, and gives the mean for every energy (dashed). Axes of"
            " forces are linear near 0 and logarithmic far from it.")


def table(found: Pairs) -> None:
    return None                                          # the panel of the elements is the table


def draw(found: Pairs, theme: Theme) -> Figure:
    elements = np.unique(found.numbers)
    parts = np.array_split(elements, math.ceil(len(elements) / BARS))
    columns = 4 if len(parts) == 2 else 3
    rows = math.ceil((2 + len(parts)) / columns)
    figure = Figure(figsize=(WIDTH, rows * (WIDTH / columns + 0.45)))
    forces, energies, *bars = panels(figure, 2 + len(parts), columns)
    _forces(forces, found.forces.transpose(1, 0, 2).reshape(2, -1), theme)
    _energies(energies, found.energy.T, theme)
    errors, sizes = (np.abs(each).mean(1) for each in (found.forces[:, 1] - found.forces[:, 0], found.forces[:, 0]))
    total = np.maximum(np.bincount(found.numbers), 1)
    mae, zero = (np.bincount(found.numbers, each) / total for each in (errors, sizes))
    for axes, part in zip(bars, parts):
        _bars(axes, part, total[part], mae[part], zero[part], theme)
        axes.set(xlim=(0, 1.3 * max(mae.max(), zero.max()) or 1.0), ylim=(max(len(parts[0]), 6) - 0.4, -1.6))
    bars[0].legend(loc="upper left", fontsize=8, ncols=2, reverse=True)
    head(bars[0], "Force error by element", "MAE of the components, by atomic number", theme)
    return figure


def _forces(axes: Axes, pair: np.ndarray, theme: Theme) -> None:
    end = 1.2 * float(np.abs(pair).max()) or 1.0
    # Most forces are small and a few are a hundred times as large: on a linear axis all but those few would be one cell.
    width = float(np.median(np.abs(pair[0]))) or end
    edges = width * np.sinh(np.linspace(-1, 1, CELLS + 1) * math.asinh(end / width))
    naive = "no force", 0.0
    histogram(axes, pair, edges, "components", theme)
    compare(axes, (-end, end), naive, theme)
    last = math.floor(math.log10(end))
    first = min(math.ceil(math.log10(width)), last)
    tens = 10.0 ** np.arange(last, first - 1, -1 - (last - first) // 4)
    for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        set_scale("asinh", linear_width=width)
        axis.set_major_locator(FixedLocator([*-tens, 0, *tens]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))
    _head(axes, pair, ("Forces", "eV/Å"), naive, theme)
    axes.set(xlabel="true component [eV/Å]", ylabel="predicted component [eV/Å]")


def _energies(axes: Axes, pair: np.ndarray, theme: Theme) -> None:
    naive = "the mean", float(pair[0].mean())
    scatter(axes, pair, "frames", naive, theme)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, prune="both"))
    _head(axes, pair, ("Energies", "eV"), naive, theme)
    axes.set(xlabel="true energy [eV]", ylabel="predicted energy [eV]")


def _head(axes: Axes, pair: np.ndarray, what: tuple[str, str], naive: tuple[str, float], theme: Theme) -> None:
    """Says the mean absolute error and that of the naive answer.   pair [2, N], true and predicted"""
    axes.legend(loc="upper left", fontsize=8)
    mae, yardstick = (float(np.abs(each - pair[0]).mean()) for each in (pair[1], naive[1]))
    head(axes, what[0], f"MAE {number(mae)} {what[1]}   ({naive[0]}: {number(yardstick)})", theme)


def _bars(axes: Axes, elements: np.ndarray, atoms: np.ndarray, mae: np.ndarray, zero: np.ndarray, theme: Theme) -> None:
    rows = np.arange(len(elements))
    axes.barh(rows, mae, height=0.62, color=theme.main, label="the network")
    axes.vlines(zero, rows - 0.42, rows + 0.42, color=theme.second, linewidth=2.4, label="no force")
    for row, text in zip((-1, *rows), ("free atoms", *(f"{count:,}" for count in atoms))):
        axes.text(0.99, row, text, transform=axes.get_yaxis_transform(), fontsize=8.5, color=theme.faint, ha="right", va="center")
    axes.set_yticks(rows, [SYMBOLS.split()[z - 1] for z in elements], color=theme.ink)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel("force MAE [eV/Å]")
    axes.set_box_aspect(1)
