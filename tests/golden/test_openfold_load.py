"""Weights of the public OpenFold (tests/data/openfold) in files of every lineage."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from hpcai.models.openfold.config import OpenFoldConfig
from hpcai.models.openfold.load import Form, load_weights, to_public
from tests import stored

pytestmark = pytest.mark.usefixtures("one_thread")


def arrays(name: str) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in stored.arrays(f"openfold/network/{name}").items()}


def test_the_public_network_s_weights_pass_through_every_lineage(tmp_path: Path) -> None:
    theirs = arrays("state_dict")
    torch.save(theirs, tmp_path / "public.pt")
    model = load_weights(tmp_path / "public.pt")
    assert model.cfg == OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True})
    again = to_public(model.state_dict(), model.cfg)
    assert again.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in again.items())
    for form in get_args(Form):
        model.save(tmp_path / "w", form=form)
        found = load_weights(tmp_path / "w").state_dict()
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items()), form


def test_a_loaded_network_predicts_as_the_public_one(tmp_path: Path) -> None:
    """With tables and passes that files do not hold, by way of AlphaFold's shapes."""
    torch.save(arrays("state_dict"), tmp_path / "public.pt")
    load_weights(tmp_path / "public.pt").save(tmp_path / "params.npz", form="alphafold")
    batch, wanted = arrays("batch"), arrays("outputs_fp32")["final_atom_positions"]
    with torch.no_grad():
        found = load_weights(tmp_path / "params.npz")(batch).positions
    residues = batch["seq_mask"][..., -1].bool()
    assert (found - wanted)[residues].abs().max() <= 3e-5 * wanted[residues].abs().max()
