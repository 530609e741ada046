"""The picture of an OpenFold run: chains of structures.npz are superposed, plotted and scored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.openfold import picture
from apps.openfold.picture import Chain
from hpcai.cli.report.theme import LIGHT
from hpcai.errors import DataError
from hpcai.models.openfold.residues import ATOM_ORDER, RESTYPES
from tests import report_runs
from tests.report_runs import subtitle

CA, CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
GLYCINE = RESTYPES.index("G")
PLDDT = (95.0, 80.0, 60.0, 20.0)                                                # one in each confidence band


def random_rotation(rng: np.random.Generator) -> np.ndarray:
    orthogonal = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return orthogonal * np.linalg.det(orthogonal)


def make_chain(count: int, seed: int = 0, unknown: Any = (), noise: float = 1.0) -> dict[str, np.ndarray]:
    """Return a right-handed helix and its prediction, in another frame. Each seventh residue is a glycine."""
    rng = np.random.default_rng(seed)
    n = np.arange(count)
    true = np.zeros((count, 37, 3))
    true[:, CA] = np.stack((2.3 * np.cos(np.deg2rad(100) * n), 2.3 * np.sin(np.deg2rad(100) * n), 1.5 * n), 1)
    true[:, CB] = true[:, CA] * (1.66, 1.66, 1)
    predicted = (true + noise * rng.normal(size=(count, 1, 3))) @ random_rotation(rng) + rng.normal(0, 30, 3)
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


DTYPES = {"aatype": "i1", "predicted": "f4", "true": "f4", "mask": "u1", "plddt": "f4", "lddt": "f4", "distance": "f2"}


def make_arrays(*chains: dict[str, np.ndarray], names: Any = None) -> dict[str, np.ndarray]:
    chains = chains or (make_chain(40, 0, [0, 11, 12, 14]), make_chain(25, 1))
    concatenated = {name: np.concatenate([each[name] for each in chains]).astype(dtype) for name, dtype in DTYPES.items()}
    names = names or [f"{k}abc_A" for k in range(len(chains))]
    return {"names": np.array(names), "residues": np.array([len(each["aatype"]) for each in chains], np.int32), **concatenated}


def write_and_read(folder: Path, *chains: dict[str, np.ndarray], **kwargs: Any) -> list[Chain]:
    return picture.read(report_runs.write_arrays(folder / "structures.npz", make_arrays(*chains, **kwargs)))


def test_the_page_shows_the_chains_and_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = write_and_read(tmp_path)
    scores = [{"lddt": 0.4 * n, "loss": 1 / n, "gdt_ts": 0.3 * n, "drmsd": 4 / n} for n in (1, 2)]
    run = report_runs.write_evaluated_run(tmp_path, "openfold", "higher", *scores)
    text = report_runs.page_text(run)
    for entry in ("Predicted and true structures 2 validation chains. Above: Cα", "Prediction per chain Means over 2 chains:",
                  "chain residues in the truth lDDT-Cα pLDDT GDT-TS RMSD of Cα [Å] 0abc_A 40 36 ", " 1abc_A 25 25 ",
                  "best validation lddt 0.8 at step 80", "gdt_ts 0.6 80 0.6 80", "drmsd 2 80 2 80"):
        assert entry in text, entry
    for chain in chains:
        scored = f"{np.nanmean(chain.lddt):.1f} {chain.plddt.mean():.1f} {chain.gdt_ts():.1f} {chain.rmsd():.2f}"
        assert f"{len(chain.plddt)} {chain.known.sum()} {scored}" in text, scored
    assert f"are placed within {np.mean([chain.rmsd() for chain in chains]):.1f} Å (RMSD, mean of chains), " in text
    assert f" times closer than all in one point. {np.mean([chain.mean_lddt() for chain in chains]):.0f} of 100 lDDT-Cα" in text
    assert f"RMSD {np.mean([chain.rmsd() for chain in chains]):.2f} Å." in text
    assert report_runs.is_drawn(picture, chains, monkeypatch)


# ---- scores


def test_scores_equal_those_computed_by_hand() -> None:
    """Two pairs of atoms are displaced symmetrically along their axes: the best superposition is the identity."""
    true = np.array([(20.0, 0, 0), (-20, 0, 0), (0, 12, 0), (0, -12, 0), (0, 0, 5), (np.nan, np.nan, np.nan)])
    displacement = np.array([(0.5, 0, 0), (-0.5, 0, 0), (0, 3, 0), (0, -3, 0), (0, 0, 0), (0, 0, 0)])
    predicted = np.nan_to_num(true) + displacement
    lddt = np.array([80, 60, 40, np.nan, np.nan, np.nan])
    kwargs = {"beta": true, "plddt": np.full(6, 50.0), "lddt": lddt, "distance": np.zeros((6, 6))}
    rng = np.random.default_rng(6)
    chain = Chain(name="x", predicted=predicted @ random_rotation(rng) - 7, true=true, **kwargs)
    assert chain.known.tolist() == [True] * 5 + [False]
    assert sorted(chain.errors) == pytest.approx([0, 0.5, 0.5, 3, 3])
    assert chain.rmsd() == pytest.approx(np.sqrt((2 * 0.25 + 2 * 9) / 5))
    assert chain.gdt_ts() == pytest.approx(100 * (3 + 3 + 5 + 5) / 20) and chain.mean_lddt() == pytest.approx(60)


# ---- the picture


def test_the_picture_shows_the_contents_of_the_file(tmp_path: Path) -> None:
    chain = make_chain(40, 0, [0, 11, 12, 14])
    chains = write_and_read(tmp_path, chain, make_chain(25, 1), names=["$odd_A", "x" * 60])
    figure, other_figure = picture.draw(chains, LIGHT)
    first = chains[0]
    fold, predicted, true, scores = figure.axes[:4]
    assert [axes.get_title(loc="left") for axes in figure.axes[:4]] == [
        r"\$odd_A", "Distances, predicted", "Distances, true", "lDDT-Cα"]
    lddt = np.nanmean(chain["lddt"])
    assert subtitle(fold) == f"40 residues, lDDT {lddt:.1f}, GDT-TS {first.gdt_ts():.1f}, RMSD {first.rmsd():.2f} Å"
    # Both matrices have one scale. Unknown distances, and only these, are masked.
    image, other = (axes.get_images()[0] for axes in (predicted, true))
    distance = np.asarray(image.get_array())
    assert np.allclose(distance.ravel(), chain["distance"].astype(np.float16)) and not np.ma.is_masked(image.get_array())
    assert image.get_clim() == other.get_clim() == (2, 22) and image.cmap == other.cmap
    beta = np.where((chain["aatype"] == GLYCINE)[:, None], chain["true"][:, CA], chain["true"][:, CB])
    unknown = np.zeros(40, bool)
    unknown[[0, 11, 12, 14]] = True
    assert (np.ma.getmaskarray(other.get_array()) == (unknown[:, None] | unknown)).all()
    expected = np.linalg.norm(beta[:, None] - beta, axis=2)
    known = ~(unknown[:, None] | unknown)
    assert np.allclose(np.asarray(other.get_array())[known], expected[known], atol=1e-4)
    near = known & (expected < 22) & ~np.eye(40, dtype=bool)
    assert subtitle(predicted) == f"MAE {np.abs(distance - expected)[near].mean():.2f} Å where true is below 22"
    assert subtitle(true) == "36 of 40 residues known"
    # The confidence and the score of each residue.
    for line, name in zip(scores.lines, ("lddt", "plddt")):
        assert np.allclose(line.get_ydata(), chain[name], equal_nan=True, atol=1e-4)
        assert np.array_equal(line.get_xdata(), np.arange(40) + 1)
    assert subtitle(scores) == f"mean: true {lddt:.1f}, predicted (pLDDT) {chain['plddt'].mean():.1f}" and scores.get_ylim()[0] == 0
    assert other_figure.axes[0].get_title(loc="left") == "x" * (picture.LETTERS - 1) + "…"


# ---- unusable files


def test_unusable_structures_are_refused_with_a_reason(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["true"][3, CA, 1] = np.nan
    with pytest.raises(DataError, match="true: CA of residue 3 has no finite position"):
        picture.read(report_runs.write_arrays(tmp_path / "structures.npz", arrays))


def test_masked_values_are_ignored(tmp_path: Path) -> None:
    arrays = make_arrays()
    arrays["true"][11], arrays["lddt"][3] = np.nan, np.nan
    (first, _) = picture.read(report_runs.write_arrays(tmp_path / "structures.npz", arrays))
    assert not first.known[11] and first.known[3]
