"""Alignment samples and feature dictionaries equal those of the reference implementation (tests/data/openfold).

Random numbers are not reproduced: the tests use the rows and templates that the reference drew.
"""

import numpy as np
import pytest

from hpcai.models.openfold import sampling
from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, center, collate, featurize
from hpcai.models.openfold.formats import parse_features
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
