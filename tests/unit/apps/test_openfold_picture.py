"""The picture of an OpenFold run: chains are superposed, drawn and measured as structures.npz has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from apps.openfold import picture
from apps.openfold.picture import Chain
from hpcai.cli.report.theme import DARK, LIGHT
from hpcai.errors import DataError
from hpcai.models.openfold.residues import LETTERS, PLACE
from tests import pages
from tests.pages import subtitle

CA, CB = PLACE["CA"], PLACE["CB"]
GLYCINE = LETTERS.index("G")
PLDDT = (95.0, 80.0, 60.0, 20.0)                                                # one of each band


def turn(rng: np.random.Generator) -> np.ndarray:
    found = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return found * np.linalg.det(found)


def chain(count: int, seed: int = 0, unknown: Any = (), noise: float = 1.0) -> dict[str, np.ndarray]:
    """A right-handed helix, and what is said of it in another frame; each seventh residue is a glycine."""
    rng = np.random.default_rng(seed)
    n = np.arange(count)
    true = np.zeros((count, 37, 3))
    true[:, CA] = np.stack((2.3 * np.cos(np.deg2rad(100) * n), 2.3 * np.sin(np.deg2rad(100) * n), 1.5 * n), 1)
    true[:, CB] = true[:, CA] * (1.66, 1.66, 1)
    predicted = (true + noise * rng.normal(size=(count, 1, 3))) @ turn(rng) + rng.normal(0, 30, 3)
    aatype = rng.integers(0, 20, count)
    aatype[::7] = GLYCINE
    mask = np.zeros((count, 37))
    mask[:, [CA, CB]] = 1
    mask[aatype == GLYCINE, CB] = 0
    mask[list(unknown)] = 0
    true[mask == 0] = 0
    beta = np.where((aatype == GLYCINE)[:, None], predicted[:, CA], predicted[:, CB])
    distance = np.minimum(np.linalg.norm(beta[:, None] - beta, axis=2), 22)
    lddt = np.where(mask[:, CA] == 1, rng.uniform(0, 100, count), np.nan)
    return {"aatype": aatype, "predicted": predicted, "true": true, "mask": mask, "plddt": np.resize(PLDDT, count), "lddt": lddt,
            "distance": distance.ravel()}  # fmt: skip


KINDS = {"aatype": "i1", "predicted": "f4", "true": "f4", "mask": "u1", "plddt": "f4", "lddt": "f4", "distance": "f2"}


def arrays(*chains: dict[str, np.ndarray], names: Any = None) -> dict[str, np.ndarray]:
    chains = chains or (chain(40, 0, [0, 11, 12, 14]), chain(25, 1))
    found = {name: np.concatenate([each[name] for each in chains]).astype(kind) for name, kind in KINDS.items()}
    names = names or [f"{k}abc_A" for k in range(len(chains))]
    return {"names": np.array(names), "residues": np.array([len(each["aatype"]) for each in chains], np.int32), **found}


def loaded(folder: Path, *chains: dict[str, np.ndarray], **words: Any) -> list[Chain]:
    return picture.read(pages.saved(folder / "structures.npz", arrays(*chains, **words)))


def pieces(axes: Axes, width: float) -> list[tuple[np.ndarray, str]]:
    """Points and colour of each part of the trace so wide, from the first that is drawn."""
    layers = [each for each in axes.collections if isinstance(each, LineCollection) and each.get_linewidth()[0] == width]
    return [(part, to_hex(color)) for each in layers for part, color in zip(each.get_segments(), each.get_colors())]


def test_the_page_shows_the_chains_and_measures_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = loaded(tmp_path)
    scores = [{"lddt": 0.4 * n, "loss": 1 / n, "gdt_ts": 0.3 * n, "drmsd": 4 / n} for n in (1, 2)]
    run = pages.evaluated(tmp_path, "openfold", "higher", *scores)
    found = pages.read_by_people(run)
    for words in ("Predicted and true structures 2 validation chains. Left: Cα traces", "Prediction per chain 2 validation chains;",
                  "chain residues in the truth lDDT-Cα pLDDT GDT-TS RMSD of Cα [Å] 0abc_A 40 36 ", " 1abc_A 25 25 ",
                  "best validation lddt 0.8 at step 80", "gdt_ts 0.6 80 0.6 80", "drmsd 2 80 2 80"):
        assert words in found, words
    for each in said:
        scored = f"{np.nanmean(each.lddt):.1f} {each.plddt.mean():.1f} {each.gdt_ts():.1f} {each.rmsd():.2f}"
        assert f"{len(each.plddt)} {each.known.sum()} {scored}" in found, scored
    assert f"RMSD {np.mean([each.rmsd() for each in said]):.2f} Å." in found
    assert pages.shows_something(picture, said, monkeypatch)


def test_of_many_chains_a_few_are_drawn_and_some_are_in_the_table(tmp_path: Path) -> None:
    found = loaded(tmp_path, *[chain(5)] * 1000, names=[f"chain_{k}" for k in range(1000)])
    drawn = [0, 333, 666, 999]
    assert picture.caption(found).startswith("4 of 1,000 validation chains, evenly from the first to the last.")
    table = picture.table(found)
    assert len(table.rows) == 10 and {f"chain_{k}" for k in drawn} < {row[0] for row in table.rows}
    assert table.note.startswith("1,000 validation chains, 10 of them shown; means over all")
    heads = [axes.get_title(loc="left") for axes in picture.draw(found, LIGHT).axes[:16:4]]
    assert heads == [f"chain_{k}\n" for k in drawn]


# ---- superposition and scores


def test_scores_are_those_of_a_count_by_hand() -> None:
    """Two pairs of atoms, each drawn apart along its own axis: the best turn is none, and the middle stays."""
    true = np.array([(20.0, 0, 0), (-20, 0, 0), (0, 12, 0), (0, -12, 0), (0, 0, 5), (np.nan, np.nan, np.nan)])
    away = np.array([(0.5, 0, 0), (-0.5, 0, 0), (0, 3, 0), (0, -3, 0), (0, 0, 0), (0, 0, 0)])
    predicted = np.nan_to_num(true) + away
    lddt = np.array([80, 60, 40, np.nan, np.nan, np.nan])
    rest = {"beta": true, "plddt": np.full(6, 50.0), "lddt": lddt, "distance": np.zeros((6, 6))}
    rng = np.random.default_rng(6)
    found = Chain(name="x", predicted=predicted @ turn(rng) - 7, true=true, **rest)
    assert found.known.tolist() == [True] * 5 + [False]
    assert sorted(found.errors) == pytest.approx([0, 0.5, 0.5, 3, 3])
    assert found.rmsd() == pytest.approx(np.sqrt((2 * 0.25 + 2 * 9) / 5))
    assert found.gdt_ts() == pytest.approx(100 * (3 + 3 + 5 + 5) / 20) and found.mean_lddt() == pytest.approx(60)


# ---- the picture


def test_what_is_drawn_is_what_the_file_holds(tmp_path: Path) -> None:
    said = chain(40, 0, [0, 11, 12, 14])
    (first,) = found = loaded(tmp_path, said, names=["$odd_A"])
    fold, predicted, true, scores = picture.draw(found, DARK).axes[:4]
    lddt = np.nanmean(said["lddt"])
    assert fold.get_title(loc="left") == r"\$odd_A" + "\n"
    assert subtitle(fold) == f"40 residues, lDDT {lddt:.1f}, GDT-TS {first.gdt_ts():.1f}, RMSD {first.rmsd():.2f} Å"
    # Both matrices on one scale; what is unknown, and only that, is blank.
    image, other = (axes.get_images()[0] for axes in (predicted, true))
    between = np.asarray(image.get_array())
    assert np.allclose(between.ravel(), said["distance"].astype(np.float16)) and image.get_clim() == other.get_clim() == (2, 22)
    beta = np.where((said["aatype"] == GLYCINE)[:, None], said["true"][:, CA], said["true"][:, CB])
    blank = said["mask"][:, CA] == 0
    seen, expected = ~(blank[:, None] | blank), np.linalg.norm(beta[:, None] - beta, axis=2)
    assert (np.ma.getmaskarray(other.get_array()) == ~seen).all()
    assert np.allclose(np.asarray(other.get_array())[seen], expected[seen], atol=1e-4)
    near = seen & (expected < 22) & ~np.eye(40, dtype=bool)
    assert subtitle(predicted) == f"MAE {np.abs(between - expected)[near].mean():.2f} Å where true is below 22"
    # Each residue's confidence and score.
    steps = {to_hex(each.get_edgecolor()): each.get_data() for each in scores.patches if isinstance(each, StepPatch)}
    for color, name in ((DARK.main, "lddt"), (DARK.second, "plddt")):
        assert np.allclose(steps[color].values, said[name], equal_nan=True, atol=1e-4)
    assert subtitle(scores) == f"mean: true {lddt:.1f}, predicted (pLDDT) {said['plddt'].mean():.1f}"


def test_traces_are_broken_coloured_and_the_near_is_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "FADE", 0.0)
    found = loaded(tmp_path, chain(40, 0, [0, 11, 12, 14], noise=0.0))
    fold = picture.draw(found, LIGHT).axes[0]
    predicted, true = picture._view(found[0])
    assert np.allclose(predicted[found[0].known], true[found[0].known], atol=1e-3), "whatever frame it came in"
    volumes = [np.linalg.det(each[4:7] - each[3]) for each in (true, found[0].true)]
    assert volumes[0] == pytest.approx(volumes[1]) and volumes[1] > 1, "helices keep their hand"
    narrow, wide = pieces(fold, picture.PREDICTED), pieces(fold, picture.TRUE)
    # 39 steps of the prediction. Of the truth 1 to 10 and 15 to 39 are joined; 13 stands alone; two halves of each step.
    assert len(narrow) == 78 and len(wide) == 2 * (9 + 24) + 1
    for part, color in narrow:                                                  # each half begins or ends at its residue
        near = np.linalg.norm(part[[0, -1]] - predicted[:, None, :2], axis=2).min(1)
        assert color in {picture.BANDS[n % 4][1] for n in np.flatnonzero(near < 0.1)}
    nearest = [np.argmin(np.linalg.norm(predicted[:, :2] - part.mean(0), axis=1)) for part, _ in narrow]
    assert np.corrcoef(predicted[nearest, 2], np.arange(len(nearest)))[0, 1] > 0.9
    layers = [each.get_linewidth()[0] for each in fold.collections]
    assert layers == sorted(layers, reverse=True)                               # the prediction lies over the truth


@pytest.mark.filterwarnings("error")
def test_odd_chains_are_drawn_too(tmp_path: Path) -> None:
    """One residue, all in one point, flown apart, all X, nothing known, only one known, many residues."""
    alone, point, flown, x = (chain(count) for count in (1, 20, 20, 20))
    point["predicted"][:] = 3
    flown["predicted"] = flown["predicted"] * 1e4
    x["aatype"][:] = 20
    cases = [alone, point, flown, x, chain(30, 0, range(30)), chain(30, 0, set(range(30)) - {5}), chain(300)]
    found = loaded(tmp_path, *cases)
    rows, panels = picture.table(found).rows, []
    for first in range(0, len(cases), picture.ROWS):
        figure = picture.draw(found[first : first + picture.ROWS], DARK)
        figure.draw_without_rendering()
        panels += figure.axes[:-1]
    for k, case in enumerate(cases):
        fold, distances, true, scores = panels[4 * k : 4 * k + 4]
        if not case["mask"].any():
            assert subtitle(fold).endswith("no truth") and "no truth" in [each.get_text() for each in true.texts]
            assert not pieces(fold, picture.TRUE) and subtitle(distances) == "MAE –" and "true –" in subtitle(scores)
            assert rows[k][2:4] == ("0", "–") and rows[k][5:] == ("–", "–")
        else:
            assert "RMSD" in subtitle(fold) and pieces(fold, picture.TRUE), k
        assert all(np.isfinite(part).all() for part, _ in pieces(fold, picture.PREDICTED))
    assert np.ptp(panels[4 * 2].get_xlim()) < 400               # what has flown apart leaves the truth large enough to be seen


# ---- files that cannot be used


def spoiled(name: str, place: Any, value: float) -> dict[str, np.ndarray]:
    values = arrays()[name].copy()
    values[place] = value
    return {name: values}


@pytest.mark.parametrize(("change", "reason"), [
    ({"plddt": None}, "has no array plddt"),
    ({"residues": np.array([65, 0], np.int32)}, r"residues is 0 to 65, .*expected whole numbers from 1 on"),
    ({"residues": np.array([40, 24])}, "their sum 64 .* expected .* R = 65"),
    ({"residues": np.array([39, 26])}, "the sum of their squares 2197; expected .* S = 2225"),
    (spoiled("aatype", 3, 21), "aatype is .* to 21, expected 0 to 20"),
    (spoiled("mask", (3, CA), 2), "true: the mask of atoms has values other than 0 and 1"),
    (spoiled("true", (3, CA, 1), np.nan), "true: CA of residue 3 has no finite position"),
    (spoiled("predicted", (7, 20, 1), np.nan), "predicted of residue 7 is not finite; expected angstrom"),
    (spoiled("plddt", slice(4, 6), np.nan), "plddt of residue 4, the first of 2 such ones, is nan; expected 0 to 100"),
    (spoiled("lddt", 11, 50), "lddt of residue 11 is 50; expected 0 to 100, and NaN where CA is not"),
    (spoiled("distance", 9, -1), "distance is -1 to 22"),
])  # fmt: skip
def test_unusable_structures_are_refused_with_a_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        picture.read(pages.saved(tmp_path / "structures.npz", arrays() | change))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    pages.survives_damage(picture, pages.saved(tmp_path / "structures.npz", arrays()))
