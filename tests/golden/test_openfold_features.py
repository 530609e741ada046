"""Chains, alignments, atoms, frames and feature dictionaries equal those of the public OpenFold (tests/data/openfold).

Random numbers are not reproduced: the tests use the rows and templates that the reference drew.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hpcai.models.openfold import sampling
from hpcai.models.openfold.alignments import read_alignments
from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, center, collate, featurize
from hpcai.models.openfold.formats import parse_features
from hpcai.models.openfold.structures import Chain, read_structure, write_structure
from hpcai.models.openfold.targets import compute_targets
from tests.reference_data import load_arrays, load_json

# With missing atoms the reference's angles are noise and hpcai's are 0; its float32 frames have rounding errors.
MASKS = load_json("openfold_features/masks")
SAMPLED = {"msa_feat", "true_msa", "bert_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"}


@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_clusters_and_features_for_rows_drawn_by_the_reference(name: str) -> None:
    golden = load_arrays(f"openfold/features/{name}")
    sampled = {key.removeprefix("sampled."): array for key, array in golden.items() if key.startswith("sampled.")}
    msa, deletions = sampled["msa"], sampled["deletion_matrix"]
    extra, extra_deletions = sampled["extra_msa"], sampled["extra_deletion_matrix"]
    cluster = sampling.assign_clusters(msa, extra)
    assert np.array_equal(cluster, golden["cluster.assignment"]) and (not len(extra) or len(np.unique(cluster)) > 20)
    profile, mean = sampling.summarize_clusters(msa, deletions, extra, extra_deletions, cluster)
    features = {
        "cluster.profile": profile,
        "cluster.deletion_mean": mean,
        "feat.msa_feat": sampling.msa_feat(msa, deletions, profile, mean),
        "feat.target_feat": sampling.target_feat(golden["det.aatype"]),
        "feat.extra_has_deletion": sampling.has_deletion(extra_deletions),
        "feat.extra_deletion_value": sampling.deletion_value(extra_deletions),
        "det.hhblits_profile": sampling.msa_profile(golden["det.msa"]),
    }
    for key, array in features.items():
        assert array.shape == golden[key].shape and array.dtype == golden[key].dtype, key
        assert np.abs(array - golden[key]).max(initial=0) < 2e-7, key
    assert deletions.max() > 0


def test_the_small_batch_of_the_full_model() -> None:
    """Features without random numbers are equal. Templates are those that the reference drew, centered before comparison."""
    raw, golden = (load_arrays(f"openfold/network/{name}") for name in ("raw_features", "batch"))
    cfg = FeatureConfig(crop=24, clusters=6, extra=8, templates=2, recycles=1)
    drawn_probs = golden["template_sum_probs"][0, ..., 0]
    indices = [np.flatnonzero((raw["template_sum_probs"] == probs).all(1))[0] for probs in drawn_probs]
    chain, alignment, templates = parse_features(raw | {name: raw[name][indices] for name in TEMPLATES})
    batch = collate([featurize(chain, alignment, templates, cfg, training=False)])
    assert batch.keys() == golden.keys() - {"no_recycling_iters"}
    _center_templates(golden)
    for name, array in batch.items():
        expected = golden[name]
        assert array.shape == expected.shape and array.dtype == expected.dtype, name
        if name not in SAMPLED | {"use_clamped_fape"}:
            mask = np.moveaxis(golden[MASKS[name]] if name in MASKS else np.ones_like(expected), -1, 0)
            error = np.moveaxis(np.abs(array - expected), -1, 0)
            assert (error * mask[(..., *[None] * (error.ndim - mask.ndim))]).max() < 1e-5, name
    assert np.array_equal(golden["true_msa"][0, 0], batch["true_msa"][0, 0])
    rows = {row.tobytes() for row in np.pad(alignment.msa.astype(np.int64), ((0, 0), (0, 3)))}
    for msa in (golden["true_msa"], golden["extra_msa"], batch["true_msa"], batch["extra_msa"]):
        assert all(np.ascontiguousarray(row).tobytes() in rows for row in np.moveaxis(msa[0], -1, 0).reshape(-1, 24))


def _center_templates(golden: dict[str, np.ndarray]) -> None:
    """Center the templates in place: the reference does not."""
    positions, beta = (golden[f"template_{name}"][0] for name in ("all_atom_positions", "pseudo_beta"))
    atom_mask, beta_mask = (golden[f"template_{name}"][0, ..., 0] > 0 for name in ("all_atom_mask", "pseudo_beta_mask"))
    centered = center(positions[..., 0], atom_mask)
    for template, atoms in enumerate(atom_mask):
        mean = positions[template, atoms, :, 0].mean(0)
        assert np.abs(centered[template, atoms] + mean - positions[template, atoms, :, 0]).max() < 1e-5
        beta[template, beta_mask[template]] -= mean[:, None]
    positions[:] = centered[..., None]


# ---- files


needs_gemmi = pytest.mark.skipif(find_spec("gemmi") is None, reason="gemmi is not installed: structures are NOT compared")

HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"  # the order of raw.msa


def check_chain(path: Path, name: str) -> Chain:
    """Return the chain of a file, compared with the public code's features of the original file except for the resolution."""
    golden, author = load_arrays(f"openfold/features/{name}"), name.split("_")[1]
    chain = read_structure(path, author).chains[author]
    assert chain.name == name and chain.sequence == golden["raw.sequence"].tobytes().decode()
    assert np.array_equal(chain.aatype, golden["raw.aatype"].argmax(1)) and np.array_equal(chain.aatype, golden["det.aatype"])
    assert np.array_equal(chain.positions, golden["det.all_atom_positions"])
    assert np.array_equal(chain.mask, golden["det.all_atom_mask"])
    return chain


@needs_gemmi
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_a_chain_and_its_alignment_are_read_as_by_the_public_code(name: str, tmp_path: Path) -> None:
    golden, path = load_arrays(f"openfold/features/{name}"), tmp_path / f"{name[:4]}.cif"
    positions, mask = golden["det.all_atom_positions"], golden["det.all_atom_mask"]
    write_structure(path, golden["det.aatype"], positions, mask, np.ones_like(mask), chain=name[-1])
    rows = [
        "".join("a" * int(count) + HHBLITS[letter] for letter, count in zip(letters, deletions))
        for letters, deletions in zip(golden["raw.msa"], golden["raw.deletion_matrix_int"])
    ]
    (tmp_path / "hits.a3m").write_text("".join(f">row {number}\n{row}\n" for number, row in enumerate(rows)))
    alignment = read_alignments([tmp_path / "hits.a3m"], check_chain(path, name).sequence)
    assert np.array_equal(alignment.msa, golden["det.msa"])
    assert np.array_equal(alignment.deletions, golden["raw.deletion_matrix_int"])


@needs_gemmi
@pytest.mark.originals
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_the_original_files_of_a_chain_are_read_as_by_the_public_code(name: str, originals: Path) -> None:
    golden = load_arrays(f"openfold/features/{name}")
    chain = check_chain(originals / "openfold" / "mmcif" / f"{name[:4]}.cif", name)
    assert chain.resolution == pytest.approx(float(golden["raw.resolution"][0]))
    # The stored features come from the .a3m files only.
    alignment = read_alignments(sorted((originals / "openfold" / "alignments" / name).glob("[bn]*.a3m")), chain.sequence)
    assert np.array_equal(alignment.msa, golden["det.msa"])
    assert np.array_equal(alignment.deletions, golden["raw.deletion_matrix_int"])


# ---- targets


# With a missing atom the reference's torsion angles are rounding noise scaled to unit length; hpcai's are 0.
DEFINED = {
    "torsion_angles_sin_cos": "torsion_angles_mask", "alt_torsion_angles_sin_cos": "torsion_angles_mask",
    "chi_angles_sin_cos": "chi_mask",
}  # fmt: skip


@pytest.mark.parametrize("chain", ["5zyh_A", "2q2k_A"])
def test_targets_of_a_chain(chain: str) -> None:
    """Other features are compared everywhere, also frames of missing groups. The reference's float32 angles are off by 7e-6."""
    stored = load_arrays(f"openfold/features/{chain}")
    expected = {name.removeprefix("det."): array for name, array in stored.items() if name.startswith("det.")}
    targets = compute_targets(expected["aatype"], expected["all_atom_positions"], expected["all_atom_mask"], chain)
    assert len(targets) == 23
    for name, array in targets.items():
        assert array.shape == expected[name].shape and array.dtype.kind == expected[name].dtype.kind, name
        error = np.abs(array - expected[name])
        if name in DEFINED:
            defined = expected[DEFINED[name]] > 0
            assert error[defined].max() < 1e-5 and not array[~defined].any(), name
        else:
            assert error.max() < 1e-6, name
    assert 0 < targets["backbone_rigid_mask"].mean() < 1 and targets["torsion_angles_mask"][:, 3:].any(0).all()
