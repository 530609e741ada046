"""The figure of a run: predicted against true energies and forces of validation frames of atoms.

B frames, A free atoms in them
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report import pairs
from hpcai.cli.report.pairs import Pair
from hpcai.cli.report.picture import Finding, Table, arrays
from hpcai.cli.report.theme import Theme
from hpcai.errors import DataError

FILE = "pairs.npz"
TITLE = "Predicted and true energies and forces"
HIGHER = ("cosine", "within")


def read(path: Path) -> list[Pair]:
    """Read forces, energies, and the forces on each element."""
    energy, forces, numbers = arrays(path, {"energy": "real B 2", "forces": "real A 2 3", "numbers": "whole A"}).values()
    symbols = json.loads(Path(__file__).with_name("elements.json").read_text(encoding="utf-8"))
    frames, atoms = np.isfinite(energy).all(1), np.isfinite(forces).all((1, 2))
    for what, finite in (("frame has a finite true and predicted energy", frames), ("free atom has finite forces", atoms)):
        if not finite.any():
            raise DataError(f"no {what}")
    forces, numbers = forces[atoms].astype(float), numbers[atoms]
    # Most forces are small and a few are a hundred times as large: on a linear axis the others would share one bin.
    small = float(np.median(np.abs(forces[:, 0]))) or 1.0

    def force(name: str, values: np.ndarray) -> Pair:
        return Pair(name, values[:, 0].ravel(), values[:, 1].ravel(), "eV/Å", ("no force", 0.0), small)

    elements = (force(f"Forces on {symbols[z - 1]}", forces[numbers == z]) for z in np.unique(numbers))
    true, predicted = energy[frames].astype(float).T
    return [force("Forces", forces), Pair("Energies", true, predicted, "eV"), *elements]


def caption(results: list[Pair]) -> str:
    return (f"{len(results[1].true):,} validation frames, {len(results[0].true) // 3:,} free atoms in them. A perfect network lies"
            " on the diagonal; the baseline (dashed) predicts no force and the mean energy. Axes of forces are linear near 0 and"
            " logarithmic far from it.")


def finding(results: list[Pair]) -> Finding:
    return pairs.finding(results[0], "Each component of the forces on atoms of unseen frames is", "mean absolute error")


def draw(results: list[Pair], theme: Theme) -> list[Figure]:
    return pairs.draw(results[:2], theme)


def table(results: list[Pair]) -> Table:
    return pairs.table(results, "Forces: three components of each free atom. The constant is no force, and the mean energy.")
