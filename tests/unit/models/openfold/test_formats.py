"""Feature dictionaries against those that the OpenFold package made (tests/data/openfold_features)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.errors import DataError
from hpcai.models.openfold import Chain, FeatureConfig, featurize
from hpcai.models.openfold.features import TEMPLATES, collate
from hpcai.models.openfold.formats import batch_of, parts_of, processed_of, raw_of

DATA = Path(__file__).resolve().parents[3] / "data" / "openfold_features"
SMALL = FeatureConfig(crop=24, clusters=6, extra=8, templates=2, recycles=1)


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


# ---- raw


def test_raw_features_of_the_package_are_read_and_written_bit_for_bit() -> None:
    raw = golden("raw")
    chain, alignment, templates = parts_of(raw, "7abc_A")
    assert isinstance(chain, Chain) and chain.name == "7abc_A" and len(chain.sequence) == 21 and templates is not None
    again = raw_of(chain, alignment, templates)
    for name in raw.keys() - {"use_clamped_fape", "no_recycling_iters"}:
        assert again[name].dtype == raw[name].dtype and np.array_equal(again[name], raw[name]), name
    assert np.array_equal(again["template_all_atom_masks"], raw["template_all_atom_mask"])
    assert [again[name].tolist() for name in ("sequence", "domain_name")] == [[chain.sequence.encode()], [b"7abc_A"]]


def test_older_names_and_shapes_are_read_too() -> None:
    raw = golden("raw")
    wanted = parts_of(raw)
    renamed = raw | {"deletion_matrix": raw["deletion_matrix_int"].astype(np.float32)}
    renamed["template_sum_probs"] = raw["template_sum_probs"][:, 0]
    renamed["template_all_atom_masks"], renamed["domain_name"] = renamed.pop("template_all_atom_mask"), np.array([b"5zyh"], object)
    del renamed["deletion_matrix_int"], renamed["resolution"]
    found = parts_of(renamed)
    assert np.array_equal(found.alignment.deletions, wanted.alignment.deletions) and found.alignment.deletions.dtype == np.int32
    assert all(np.array_equal(found.templates[name], wanted.templates[name]) for name in TEMPLATES)  # type: ignore[index]
    assert isinstance(found.chain, Chain) and found.chain.name == "5zyh" and found.chain.resolution is None


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"msa": None}, "features: no msa; expected aatype, msa, deletion_matrix_int"),
        ({"msa": np.zeros((20, 19), int)}, r"msa has shape \[20, 19\], expected \[S, N\]: .*N 21 of aatype"),
        ({"msa": np.full((20, 21), 22)}, "msa: int64 from 0 to 22, expected integers from 0 to 21"),
    ],
)
def test_raw_features_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    raw = {name: value for name, value in (golden("raw") | changes).items() if value is not None}
    with pytest.raises(DataError, match=text):
        parts_of(raw)


# ---- processed


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("passes", [True, False])
def test_processed_features_are_read_with_or_without_batch_and_passes(batched: bool, passes: bool) -> None:
    wanted = golden("processed")
    given: dict[str, Any] = {name: array if passes else array[..., 0] for name, array in wanted.items()}
    given = {name: array if batched else array[0] for name, array in given.items()} | {"hhblits_profile": np.ones(3)}
    given["template_all_atom_masks"] = torch.from_numpy(np.ascontiguousarray(given.pop("template_all_atom_mask")))
    found = batch_of(given)
    assert found.keys() == wanted.keys() - {"no_recycling_iters"}
    for name, value in found.items():
        assert np.array_equal(value, wanted[name] if passes else wanted[name][..., :1]), name


def test_ours_are_the_package_s_names_shapes_and_types() -> None:
    sample, wanted = featurize(*parts_of(golden("raw")), SMALL), golden("processed")
    for given, dims in ((sample, 1), (collate([sample]), 0)):
        found = processed_of(given)
        assert found.keys() == wanted.keys()
        for name, array in found.items():
            assert array.shape == wanted[name].shape[dims:] and array.dtype == wanted[name].dtype, name
        assert (found["no_recycling_iters"] == 1).all()
    again = processed_of(batch_of(sample))
    assert all(np.array_equal(again[name][0], found) for name, found in processed_of(sample).items())


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"target_feat": None}, "features: no target_feat; expected aatype, residue_index, seq_mask, target_feat"),
        ({"msa_feat": np.zeros((1, 6, 24, 23, 2))}, r"msa_feat has shape \[1, 6, 24, 23, 2\], expected \[B, C, N, 49, P\]"),
        ({"aatype": np.array([b"MKV"], object)}, "features: .*expected arrays or tensors of numbers"),
    ],
)
def test_processed_features_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    given = {name: value for name, value in (golden("processed") | changes).items() if value is not None}
    with pytest.raises(DataError, match=text):
        batch_of(given)
