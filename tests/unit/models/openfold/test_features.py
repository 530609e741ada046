"""Features of a chain: random draws, shapes, padding, batches, and errors of mismatched inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcai.errors import DataError
from hpcai.models.openfold import sampling
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.features import FeatureConfig, Templates, collate, featurize
from hpcai.models.openfold.residues import GAP, MASKED, UNKNOWN
from hpcai.models.openfold.sampling import MaskConfig
from hpcai.models.openfold.structures import Chain
from tests import proteins

SMALL = FeatureConfig(crop=16, clusters=5, extra=7, templates=3, recycles=2)


def inputs(residues: int = 40, rows: int = 30, templates: int = 5, seed: int = 0) -> tuple[Chain, Alignment, dict[str, np.ndarray]]:
    rng, chain = np.random.default_rng(seed), replace(proteins.random_chain(residues, seed), name="1abc_A")
    mask = (rng.random((templates, residues, 37)) < 0.5).astype(np.float32)
    return chain, proteins.random_alignment(chain, rows, seed), {
        "template_aatype": rng.integers(0, GAP + 1, (templates, residues)),
        "template_all_atom_positions": rng.normal(50, 9, (*mask.shape, 3)).astype(np.float32),
        "template_all_atom_mask": mask,
        "template_sum_probs": np.arange(templates, 0, -1, np.float32)[:, None],
    }  # fmt: skip


def equal_features(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name in a if np.array_equal(a[name], b[name])}


# ---- draws


def test_samples_are_deterministic_and_passes_have_different_rows() -> None:
    parts = inputs()
    first = featurize(*parts, SMALL, seed=1, epoch=2, index=3)
    assert equal_features(first, featurize(*parts, SMALL, seed=1, epoch=2, index=3)) == first.keys()
    for seed, epoch, index in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)):
        other = featurize(*parts, SMALL, seed=seed, epoch=epoch, index=index)
        assert not {"msa_feat", "bert_mask", "extra_msa"} & equal_features(first, other)
    fewer = featurize(*parts, SMALL, seed=1, epoch=2, index=3, passes=2)
    assert all(np.array_equal(array, first[name][..., :2]) for name, array in fewer.items())
    varying = {name for name, array in first.items() if not (array == array[..., :1]).all()}
    assert varying == {"msa_feat", "true_msa", "bert_mask", "extra_msa", "extra_has_deletion", "extra_deletion_value"}
    assert (first["true_msa"][0] == first["aatype"]).all()  # the query is first


def test_crops_are_slices_of_the_full_chain() -> None:
    parts, starts, small = inputs(), set(), SMALL.model_copy(update={"clusters": 1, "extra": 0})
    full = featurize(*parts, SMALL.model_copy(update={"crop": None}), training=False)
    for index in range(200):
        sample = featurize(*parts, small, index=index, passes=1)
        first = int(sample["residue_index"][0, 0])
        starts.add(first)
        for name in ("aatype", "target_feat", "rigidgroups_gt_frames", "chi_angles_sin_cos", "atom14_gt_positions"):
            assert np.array_equal(sample[name][..., 0], full[name][first : first + 16, ..., 0]), name
    assert starts == set(range(25))


def test_clusters_are_assigned_by_full_rows() -> None:
    """Inside the crop all rows agree; outside, the query differs from the others."""
    msa = np.zeros((3, 40), np.int8)
    msa[1:, 20:] = 5
    cfg = FeatureConfig(crop=8, clusters=2, extra=4, templates=0, mask=MaskConfig(fraction=0))
    sample = featurize("A" * 40, Alignment(msa, np.repeat([[0], [0], [6]], 40, 1), []), None, cfg, training=False)
    mean = sample["msa_feat"][..., -1, 0]
    assert not mean[0].any() and np.isclose(mean[1], 0.5, atol=1e-6).all()  # the mean of 0 and 6: atan(3 / 3)


def test_masking_fractions() -> None:
    rng, msa = np.random.default_rng(0), np.full((400, 500), 3, np.int8)
    column = np.zeros((500, 22), np.float32)
    column[:, 7], column[:, GAP] = 0.75, 0.25
    masked, chosen = sampling.mask_msa(msa, column, MaskConfig(), rng)
    assert (masked[~chosen] == 3).all()
    expected = np.full(23, 0.1 / 20)
    expected[[UNKNOWN, GAP, MASKED]] = 0, 0.025, 0.7
    expected[3], expected[7] = 0.105, 0.08
    count, letters = chosen.sum(), np.bincount(masked[chosen], minlength=23)
    for observed, fraction, total in ((count, 0.15, msa.size), *((n, fraction, count) for n, fraction in zip(letters, expected))):
        assert abs(int(observed) - total * fraction) <= 5 * np.sqrt(total * fraction * (1 - fraction))
    assert np.array_equal(sampling.mask_msa(msa, column, MaskConfig(fraction=0), rng)[0], msa)
    assert (sampling.mask_msa(msa, column, MaskConfig(fraction=1, uniform=0, profile=0, same=0), rng)[0] == MASKED).all()


def test_sampling_and_deletion_of_rows_keep_the_query() -> None:
    counts, sizes = np.zeros(10), []
    for seed in range(2000):
        chosen, rest = sampling.choose_clusters(10, 4, np.random.default_rng(seed))
        assert chosen[0] == 0 and sorted([*chosen, *rest]) == list(range(10))
        counts[chosen] += 1
    assert np.abs(counts[1:] / 2000 - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 2000)
    for seed in range(300):
        remaining = sampling.delete_blocks(100, 5, 0.3, np.random.default_rng(seed))
        deleted = np.setdiff1d(np.arange(100), remaining)
        assert remaining[0] == 0 and 1 <= 1 + (np.diff(deleted) > 1).sum() <= 5
        sizes.append(len(deleted))
    assert max(sizes) > 80 and min(sizes) < 60


@pytest.mark.parametrize("training", [True, False])
def test_templates_that_are_not_used_are_not_read(training: bool) -> None:
    chain, alignment, templates = inputs(templates=9)
    requests: list[list[int]] = []

    def take(chosen: np.ndarray) -> dict[str, np.ndarray]:
        requests.append(chosen.tolist())
        return {name: array[chosen] for name, array in templates.items()}

    for index in range(12):
        lazy, eager = (featurize(chain, alignment, source, SMALL, index=index, training=training)
                       for source in (Templates(9, take), templates))  # fmt: skip
        assert equal_features(lazy, eager) == eager.keys()
    assert all(1 <= len(chosen) <= 3 for chosen in requests) and (len(requests) < 12) == training
    assert training or all(chosen == [0, 1, 2] for chosen in requests), "the best templates"


# ---- shapes


AXES = {"template": "TR", "extra": "ER", "msa": "CR", "bert": "CR", "true": "CR"}  # keyed by the first word of a name; otherwise R
AXES |= {"template_mask": "T", "template_sum_probs": "T", "msa_row_mask": "C", "extra_msa_row_mask": "E"}
AXES |= dict.fromkeys(("seq_length", "resolution", "is_distillation", "use_clamped_fape"), "")


@given(
    residues=st.integers(1, 40), rows=st.integers(1, 20), templates=st.integers(0, 5), crop=st.none() | st.integers(1, 50),
    clusters=st.integers(1, 22), extra=st.integers(0, 22), most=st.integers(0, 4), training=st.booleans(),
)  # fmt: skip
def test_shapes_depend_on_settings_alone_and_masks_mark_padding(
    residues: int, rows: int, templates: int, crop: int | None, clusters: int, extra: int, most: int, training: bool
) -> None:
    chain, alignment, arrays = inputs(residues, rows, templates)
    cfg = FeatureConfig(crop=crop, clusters=clusters, extra=extra, templates=most, deleted_blocks=2)
    sample = featurize(chain, alignment, arrays, cfg, index=rows, passes=2, training=training)
    size, length = crop or residues, min(residues, crop or residues)
    sizes = {"T": most, "R": size, "C": clusters, "E": extra}
    for name, array in sample.items():
        axes = AXES.get(name, AXES.get(name.split("_")[0], "R"))
        assert array.shape[:-1][: len(axes)] == tuple(sizes[axis] for axis in axes) and array.shape[-1] == 2, name
        assert array.dtype in (np.float32, np.int64) and np.isfinite(array).all(), name
        assert "R" not in axes or not np.moveaxis(array, axes.index("R"), 0)[length:].any(), name
    assert (sample["seq_length"] == length).all() and (sample["seq_mask"].sum(0) == length).all()
    if not training:
        assert (sample["msa_row_mask"].sum(0) == min(rows, clusters)).all()
        assert (sample["extra_msa_row_mask"].sum(0) == min(max(rows - clusters, 0), extra)).all()
    for name in ("msa", "extra_msa"):
        assert np.array_equal(sample[f"{name}_mask"], sample[f"{name}_row_mask"][:, None] * sample["seq_mask"][None])
    assert (sample["bert_mask"] <= sample["msa_mask"]).all()
    if most:
        absent = sample["template_mask"][:, 0] == 0
        assert absent.sum() >= most - templates and (training or absent.sum() == max(0, most - templates))
        assert not any(array[absent].any() for name, array in sample.items() if name.startswith("template_"))


def test_evaluation_uses_the_best_templates_centred_at_zero() -> None:
    chain, alignment, templates = inputs()
    sample = featurize(chain, alignment, templates, FeatureConfig(crop=None, templates=3), training=False)
    assert sample["template_sum_probs"][:, 0, 0].tolist() == [5, 4, 3]
    positions, mask = sample["template_all_atom_positions"][..., 0], sample["template_all_atom_mask"][..., 0]
    assert np.abs(positions.sum((1, 2)) / mask.sum((1, 2))[:, None]).max() < 1e-4 and not positions[mask == 0].any()
    shift = (positions - templates["template_all_atom_positions"][:3])[1][mask[1] > 0]
    assert np.ptp(shift, 0).max() < 1e-4


# ---- errors


def change_letter(msa: np.ndarray) -> np.ndarray:
    msa = msa.copy()
    msa[0, 6] = (msa[0, 6] + 1) % 20
    return msa


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("msa", lambda a: a[:, 1:], r"1abc_A: an alignment of \(30, 39\).* for 40 residues"),
        ("msa", change_letter, "has [A-Y] at residue 7, expected [A-Y] .1 of 40 residues differ"),
        ("template_all_atom_positions", lambda a: a * np.nan, "1abc_A: template [1-5]: .* has no finite position"),
    ],
)
def test_mismatched_inputs_raise(name: str, change: Any, text: str) -> None:
    chain, alignment, templates = inputs()
    if name == "msa":
        alignment = replace(alignment, msa=change(alignment.msa))
    else:
        templates[name] = change(templates[name])
    with pytest.raises(DataError, match=text):
        featurize(chain, alignment, templates, SMALL)


def test_positions_of_missing_atoms_are_ignored() -> None:
    chain, alignment, templates = inputs()
    positions = np.where(chain.mask[..., None] > 0, chain.positions, np.nan)
    mask = templates["template_all_atom_mask"][..., None] > 0
    changed = templates | {"template_all_atom_positions": np.where(mask, templates["template_all_atom_positions"], np.inf)}
    features = featurize(replace(chain, positions=positions), alignment, changed, SMALL)
    assert equal_features(features, featurize(chain, alignment, templates, SMALL)) == features.keys()


# ---- batches


def test_collate_stacks_samples_and_raises_on_mismatch() -> None:
    samples = [featurize(*inputs(residues), SMALL, index=residues) for residues in (9, 40)]
    for name, array in collate(samples).items():
        assert array.dtype == samples[0][name].dtype and array[..., 1].flags.c_contiguous, name
        assert all(np.array_equal(array[k], samples[k][name]) for k in range(2)), name
    sample = samples[1]
    for other, text in (
        (featurize(*inputs(), SMALL, passes=1), r"msa_feat: float32 \(5, 16, 49, 1\) in sample 1 and float32 \(5, .* 3\)"),
        ({**sample, "aatype": sample["aatype"].astype(np.int32)}, "aatype: int32"),
        ({name: array for name, array in sample.items() if name != "chi_mask"}, "chi_mask: sample 0 .* has it, sample 1 has not"),
    ):
        with pytest.raises(DataError, match=text):
            collate([sample, other])
