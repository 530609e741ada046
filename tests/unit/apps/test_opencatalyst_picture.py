"""The picture of an Open Catalyst run shows the energies and forces of pairs.npz and their errors."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.opencatalyst import picture
from hpcai.cli.report.pairs import Pair
from hpcai.log import format_number
from tests import report_runs

ELEMENTS = {1: "H", 8: "O", 29: "Cu", 78: "Pt", 118: "Og"}


def make_arrays(frames: int = 30, atoms: int = 400, elements: Any = tuple(ELEMENTS), seed: int = 0) -> dict[str, np.ndarray]:
    """Return forces over several decades, with larger errors on light atoms, and energies."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(np.resize(np.array(elements, np.uint8), atoms))
    true = rng.normal(size=(atoms, 3)) * rng.lognormal(-2, 1.5, (atoms, 1))
    predicted = true + 0.2 * rng.normal(size=true.shape) / np.sqrt(numbers)[:, None]
    energy = rng.normal(-5, 2, frames)
    energies = np.stack((energy, 0.8 * energy - 1 + 0.2 * rng.normal(size=frames)), 1)
    return {"energy": energies, "forces": np.stack((true, predicted), 1).astype(np.float32), "numbers": numbers}


def write_and_read(folder: Path, arrays: dict[str, np.ndarray]) -> list[Pair]:
    return picture.read(report_runs.write_arrays(folder / "pairs.npz", arrays))


def mean_abs(values: np.ndarray) -> float:
    return float(np.mean(np.abs(values.astype(float))))


def test_the_page_shows_energies_and_forces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [{"force_mae": 0.2 / n, "loss": 1 / n, "force_cosine": 0.4 * n, "within": 0.01 * n} for n in (1, 2)]
    report_runs.write_arrays(tmp_path / "pairs.npz", make_arrays())
    run = report_runs.write_evaluated_run(tmp_path, "opencatalyst", "lower", *scores)
    text = report_runs.page_text(run)
    for entry in ("Each component of the forces on atoms of unseen frames is predicted within 0.0", "closer than predicting no",
                  "Predicted and true energies and forces", "30 validation frames, 400 free atoms in them.",
                  "force_cosine 0.8 80 0.8 80", "within 0.02 80 0.02 80", "best validation force_mae 0.1 at step 80"):
        assert entry in text, entry
    true, predicted = (make_arrays()["forces"][:, k].astype(float) for k in (0, 1))
    for symbol, z in (("Forces", None), *((f"Forces on {symbol}", z) for z, symbol in ELEMENTS.items())):
        mask = np.ones(400, bool) if z is None else make_arrays()["numbers"] == z
        errors = rf"\S+ \S+ {format_number(mean_abs((predicted - true)[mask]))} \S+ {format_number(mean_abs(true[mask]))} "
        assert re.search(rf"{symbol} \[eV/Å\] {3 * mask.sum():,} {errors}", text), symbol
    assert report_runs.is_drawn(picture, run.predictions, monkeypatch)


def test_nonfinite_values_are_excluded(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["forces"][:3, 1, 0], arrays["energy"][4, 1] = np.nan, np.inf
    pairs = write_and_read(tmp_path, arrays)
    assert picture.caption(pairs).startswith("29 validation frames, 397 free atoms in them.")
    forces = arrays["forces"][3:].astype(float)
    assert np.array_equal(pairs[0].true, forces[:, 0].ravel()) and np.array_equal(pairs[0].predicted, forces[:, 1].ravel())
    assert sum(len(pair.true) for pair in pairs[2:]) == forces[:, 0].size
