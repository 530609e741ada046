"""Feature dictionaries of the OpenFold package (tests/data/openfold_features)."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold import Chain
from hpcai.models.openfold.features import TEMPLATES
from hpcai.models.openfold.formats import parse_features
from hpcai.models.openfold.residues import RESTYPES
from tests.reference_data import load_arrays

HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"
golden = partial(load_arrays, "openfold_features/raw")


def test_raw_features_of_the_package_are_read() -> None:
    raw = golden()
    chain, alignment, templates = parse_features(raw, "7abc_A")
    assert isinstance(chain, Chain) and chain.name == "7abc_A" and templates is not None
    assert np.array_equal(np.eye(21)[chain.aatype], raw["aatype"]) and np.array_equal(chain.positions, raw["all_atom_positions"])
    for actual, expected in ((alignment.msa, raw["msa"]), (templates["template_aatype"], raw["template_aatype"].argmax(-1))):
        assert np.array_equal(np.array([*RESTYPES, "X", "-"])[actual], np.array([*HHBLITS])[expected])
    assert np.array_equal(alignment.deletions, raw["deletion_matrix_int"])
    assert all(np.array_equal(templates[name], raw[name]) for name in TEMPLATES[1:])


def test_a_chain_without_positions_is_its_sequence() -> None:
    raw = {name: golden()[name] for name in ("aatype", "msa", "deletion_matrix_int")}
    chain, _, templates = parse_features(raw)
    assert chain == "".join(RESTYPES[code] for code in raw["aatype"].argmax(-1)) and templates is None


def test_older_names_and_shapes_are_read_too() -> None:
    raw = golden()
    expected = parse_features(raw)
    renamed = raw | {"deletion_matrix": raw["deletion_matrix_int"].astype(np.float32)}
    renamed["template_sum_probs"] = raw["template_sum_probs"][:, 0]
    renamed["template_all_atom_masks"], renamed["domain_name"] = renamed.pop("template_all_atom_mask"), np.array([b"5zyh"], object)
    del renamed["deletion_matrix_int"], renamed["resolution"]
    actual = parse_features(renamed)
    assert np.array_equal(actual.alignment.deletions, expected.alignment.deletions) and actual.alignment.deletions.dtype == np.int32
    assert all(np.array_equal(actual.templates[name], expected.templates[name]) for name in TEMPLATES)  # type: ignore[index]
    assert isinstance(actual.chain, Chain) and actual.chain.name == "5zyh" and actual.chain.resolution is None


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"msa": None}, "features: no msa; expected aatype, msa, deletion_matrix_int"),
        ({"msa": np.zeros((20, 19), int)}, r"msa has shape \[20, 19\], expected \[S, N\]: .*N 21 of aatype"),
        ({"msa": np.full((20, 21), 22)}, "msa: int64 from 0 to 22, expected integers from 0 to 21"),
    ],
)
def test_mismatched_raw_features_raise(changes: dict[str, Any], text: str) -> None:
    raw = {name: value for name, value in (golden() | changes).items() if value is not None}
    with pytest.raises(DataError, match=text):
        parse_features(raw)
