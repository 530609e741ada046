"""Structures from sequences in one call: files, templates, errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.errors import DataError
from hpcai.models.openfold import FeatureConfig, OpenFold, OpenFoldConfig, folding, read_structure
from tests import proteins

FEW = FeatureConfig(crop=None, clusters=4, extra=4, templates=1)
SEQUENCE = "MKVLAAGXWW"


def test_a_fold_is_written_and_read_again(tmp_path: Path) -> None:
    pytest.importorskip("gemmi")
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny"))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "uniref90_hits.a3m").write_text(f">query\n{SEQUENCE}\n>other\nMKaaVLAA-AWW\n")
    alone = model.fold(SEQUENCE, recycles=1, cfg=FEW)
    fold = model.fold(SEQUENCE, tmp_path / "rows", recycles=1, cfg=FEW)
    assert model.training, "the mode is restored"
    assert fold.positions.shape == (10, 37, 3) and fold.plddt.shape == (10,) and ((fold.plddt > 0) & (fold.plddt < 100)).all()
    assert fold.mask[0].sum() == 8 and fold.mask[7].sum() == 0, "methionine has 8 atoms, an unknown residue none"
    assert not np.allclose(alone.positions, fold.positions), "the alignment has an effect"
    second = model.fold(SEQUENCE, [tmp_path / "rows" / "uniref90_hits.a3m"], recycles=1, cfg=FEW)
    assert np.array_equal(second.positions, fold.positions), "the same seed"
    fold.write(tmp_path / "guess.cif")
    chain = read_structure(tmp_path / "guess.cif").chains["A"]
    resolved = chain.mask > 0
    assert resolved.sum() == fold.mask.sum() and np.allclose(chain.positions[resolved], fold.positions[resolved], atol=1e-3)
    assert np.allclose(chain.bfactors[0, :2], fold.plddt[0], atol=0.01)


def test_repr_of_a_fold() -> None:
    plddt = np.linspace(20, 95, 300, dtype=np.float32)
    positions = np.random.default_rng(0).normal(size=(300, 37, 3)).astype(np.float32)
    fold = folding.Fold("A" * 300, np.zeros(300, np.int64), positions, np.ones((300, 37), np.float32), plddt)
    assert len(repr(fold)) < 80 and f"300 residues, mean pLDDT {plddt.mean():.1f}" in repr(fold)


def test_no_templates_are_needed_and_invalid_chains_raise() -> None:
    model = OpenFold(OpenFoldConfig.preset("tiny", template=None))
    assert model.fold(SEQUENCE, recycles=0, cfg=FEW).positions.shape == (10, 37, 3)
    with pytest.raises(DataError, match="is it of another chain"):
        model.fold(SEQUENCE, proteins.random_alignment(proteins.random_chain(10), 3), recycles=0, cfg=FEW)
    with pytest.raises(DataError, match="sequence: "):
        model.fold("MKVL\n", recycles=0, cfg=FEW)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_chain_too_long_for_the_memory_raises(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OpenFold(OpenFoldConfig.preset("tiny"))

    def out_of_memory(_: Any) -> Any:
        if kind == "device":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        torch.empty(1 << 60)  # the error of torch itself

    monkeypatch.setattr(model, "run_passes", out_of_memory)
    text = "a chain of 10 residues with 4 clusters and 4 extra rows does not fit into the memory"
    with pytest.raises(DataError, match=text):
        model.fold(SEQUENCE, recycles=0, cfg=FEW)
    assert model.training
