"""The picture of an Open Catalyst run: energies and forces are drawn and measured as pairs.npz has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, QuadMesh

from apps.opencatalyst import picture
from apps.opencatalyst.data import write_pairs
from apps.opencatalyst.picture import Pairs
from hpcai.cli.report.picture import MANY
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.errors import DataError
from hpcai.log import number
from tests import pages
from tests.pages import subtitle

ELEMENTS = {1: "H", 8: "O", 29: "Cu", 78: "Pt", 118: "Og"}


def arrays(frames: int = 30, atoms: int = 400, elements: Any = tuple(ELEMENTS), seed: int = 0) -> dict[str, np.ndarray]:
    """Forces over decades, as they are; the light atoms' are seen worse."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(np.resize(np.array(elements, np.uint8), atoms))
    true = rng.normal(size=(atoms, 3)) * rng.lognormal(-2, 1.5, (atoms, 1))
    predicted = true + 0.2 * rng.normal(size=true.shape) / np.sqrt(numbers)[:, None]
    energy = rng.normal(-5, 2, frames)
    both = np.stack((energy, 0.8 * energy - 1 + 0.2 * rng.normal(size=frames)), 1)
    return {"energy": both, "forces": np.stack((true, predicted), 1).astype(np.float32), "numbers": numbers}


def loaded(folder: Path, found: dict[str, np.ndarray]) -> Pairs:
    return picture.read(pages.saved(folder / "pairs.npz", found))


def one(axes: Axes, kind: type) -> Any:
    (found,) = [each for each in axes.get_children() if type(each) is kind]
    return found


def mean_abs(values: np.ndarray) -> float:
    return float(np.mean(np.abs(values.astype(float))))


def test_the_page_shows_energies_and_forces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [{"force_mae": 0.2 / n, "loss": 1 / n, "force_cosine": 0.4 * n, "within": 0.01 * n} for n in (1, 2)]
    write_pairs(tmp_path / "pairs.npz", {name: torch.as_tensor(values) for name, values in arrays().items()})
    run = pages.evaluated(tmp_path, "opencatalyst", "lower", *scores)
    found = pages.read_by_people(run)
    for words in ("Predicted and true energies and forces", "30 validation frames, 400 free atoms in them.",
                  "force_cosine 0.8 80 0.8 80", "within 0.02 80 0.02 80", "best validation force_mae 0.1 at step 80"):
        assert words in found, words
    assert pages.shows_something(picture, run.found, monkeypatch)


# ---- the picture


@pytest.mark.parametrize(("theme", "frames"), [(LIGHT, 30), (DARK, MANY + 1)])
def test_what_is_drawn_and_said_is_what_the_file_holds(tmp_path: Path, theme: Any, frames: int) -> None:
    said = arrays(frames)
    figure = picture.draw(loaded(tmp_path, said), theme)
    forces, energies, bars = figure.axes[:3]
    true, predicted = said["forces"][:, 0].astype(float), said["forces"][:, 1].astype(float)
    energy, seen = said["energy"].T
    assert subtitle(forces) == f"MAE {number(mean_abs(predicted - true))} eV/Å (no force: {number(mean_abs(true))})"
    assert subtitle(energies) == f"MAE {number(mean_abs(seen - energy))} eV (the mean: {number(mean_abs(energy - energy.mean()))})"
    for axes, naive in ((forces, 0.0), (energies, energy.mean())):
        diagonal, dashed = axes.get_lines()
        assert np.array_equal(diagonal.get_xdata(), diagonal.get_ydata())
        assert np.asarray(dashed.get_ydata()) == pytest.approx([naive] * 2)
    # Every component is counted, in the cell where it lies: true to the right, predicted upwards.
    mesh = one(forces, QuadMesh)
    edges = mesh.get_coordinates()[0, :, 0]
    counts = np.zeros_like(mesh.get_array(), float)
    np.add.at(counts, tuple(np.searchsorted(edges, each.ravel()) - 1 for each in (predicted, true)), 1)
    assert (mesh.get_array().filled(0) == counts).all() and counts.sum() == true.size
    if frames > MANY:
        counts = one(energies, QuadMesh).get_array()
        rows, columns = np.ma.nonzero(counts)
        assert np.ma.sum(counts) == frames and columns.std() > rows.std()       # the network sees less than there is
    else:
        assert np.allclose(one(energies, PathCollection).get_offsets(), said["energy"])
    # Of each element the error, that of no force, and how many there are.
    assert [label.get_text() for label in bars.get_yticklabels()] == list(ELEMENTS.values())
    marks = {round(line[:, 1].mean()): line[0, 0] for line in one(bars, LineCollection).get_segments()}
    for row, z in enumerate(ELEMENTS):
        of = said["numbers"] == z
        assert bars.patches[row].get_width() == pytest.approx(mean_abs((predicted - true)[of]))
        assert marks[row] == pytest.approx(mean_abs(true[of]))
    assert [each.get_text() for each in bars.texts if each.get_position()[0] == 0.99] == ["free atoms", *["80"] * 5]


@pytest.mark.parametrize("count", [1, 17, 118])
def test_many_elements_fill_panels_of_one_scale(count: int, tmp_path: Path) -> None:
    figure = picture.draw(loaded(tmp_path, arrays(elements=range(1, count + 1))), LIGHT)
    panels = [axes for axes in figure.axes if axes.get_xlabel().startswith("force MAE")]
    symbols = [label.get_text() for axes in panels for label in axes.get_yticklabels()]
    assert symbols == picture.SYMBOLS.split()[:count]
    assert len({axes.get_xlim() for axes in panels}) == len({axes.get_ylim() for axes in panels}) == 1
    assert max(len(axes.patches) for axes in panels) <= picture.BARS


def test_the_symbols_are_in_the_places_of_their_numbers() -> None:
    places = {2: "He", 10: "Ne", 18: "Ar", 26: "Fe", 36: "Kr", 47: "Ag", 54: "Xe", 57: "La", 71: "Lu", 79: "Au", 86: "Rn", 92: "U"}
    symbols = picture.SYMBOLS.split()
    assert len(symbols) == 118 and all(symbols[z - 1] == symbol for z, symbol in (places | ELEMENTS).items())


@pytest.mark.filterwarnings("error")
def test_odd_frames_are_drawn_too(tmp_path: Path) -> None:
    """One frame, one atom, no force at all, a constant energy, what a diverging network says."""
    far = arrays()["forces"].copy()
    far[3, 1, 2] = 1e30
    for change in (arrays(1, 1, [29]), {"forces": np.zeros((400, 2, 3))}, {"energy": np.full((9, 2), -3.0)}, {"forces": far}):
        figure = picture.draw(loaded(tmp_path, arrays() | change), DARK)
        figure.draw_without_rendering()
        assert 1 <= len(figure.axes[0].get_xticks()) < 12


@pytest.mark.parametrize(("change", "reason"), [
    ({"numbers": None}, "has no array numbers"),
    ({"energy": np.zeros((30, 3))}, r"energy is float64 \(30, 3\), expected real \[B, 2\]"),
    ({"numbers": np.ones(399, np.uint8)}, r"numbers is uint8 \(399,\), expected whole \[A\] with A = 400"),
    ({"forces": np.full((400, 2, 3), np.nan)}, "no free atom has finite forces"),
    ({"energy": np.full((30, 2), np.inf)}, "no frame has a finite true and predicted energy"),
    ({"numbers": np.zeros(400, np.uint8)}, "numbers is 0 to 0, expected atomic numbers 1 to 118"),
    ({"numbers": np.full(400, 119, np.uint8)}, "numbers is 119 to 119"),
])  # fmt: skip
def test_unusable_pairs_are_refused_with_a_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        loaded(tmp_path, arrays() | change)
