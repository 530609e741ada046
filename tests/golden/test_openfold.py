"""OpenFold agrees with the public implementation (tests/data/openfold) except at padded positions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcai.models.openfold.config import ObjectiveConfig, OpenFoldConfig
from hpcai.models.openfold.load import from_public, load_weights, to_public
from hpcai.models.openfold.model import OpenFold, Prediction
from hpcai.models.openfold.objective import lddt, loss_terms, weighted_total
from tests import proteins
from tests.reference_data import load_json, load_tensors

ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)
PUBLIC_NAMES = {
    "fape": "fape", "chi": "supervised_chi", "distogram": "distogram", "masked_msa": "masked_msa", "plddt": "plddt_loss",
    "resolved": "experimentally_resolved", "violation": "violation", "aligned_error": "tm",
}  # fmt: skip
FOLDER = "openfold/network"
Arrays = dict[str, Tensor]


def build_network(dtype: torch.dtype) -> OpenFold:
    model = OpenFold(OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True}))
    model.load_state_dict(from_public(load_tensors(f"{FOLDER}/state_dict"), model.state_dict()))
    return proteins.without_dropout(model).to(dtype)


def predict(model: OpenFold, dtype: torch.dtype) -> tuple[Prediction, Arrays, Arrays]:
    batch = load_tensors(f"{FOLDER}/batch", dtype)
    name = "fp64" if dtype == torch.float64 else "fp32"
    return model(batch), {key: value[..., -1] for key, value in batch.items()}, load_tensors(f"{FOLDER}/outputs_{name}", dtype)


@pytest.mark.parametrize("dtype, rounding", [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_the_network(dtype: torch.dtype, rounding: float) -> None:
    model = build_network(dtype)
    prediction, targets, expected = predict(model, dtype)
    residues = targets["seq_mask"].bool()
    pairs, letters = residues[:, :, None] & residues[:, None], targets["msa_mask"].bool()
    table = {
        "msa": (prediction.msa, letters), "pair": (prediction.pair, pairs), "single": (prediction.single, residues),
        "final_atom_positions": (prediction.positions, residues), "lddt_logits": (prediction.logits.plddt, residues),
        "distogram_logits": (prediction.logits.distogram, pairs), "masked_msa_logits": (prediction.logits.masked_msa, letters),
        "experimentally_resolved_logits": (prediction.logits.resolved, residues),
        "tm_logits": (prediction.logits.aligned_error, pairs),
        "sm.frames": (prediction.atoms.backbone, residues.expand(2, -1, -1)),
        "sm.angles": (prediction.atoms.angles, residues.expand(2, -1, -1)), "sm.single": (prediction.atoms.states[-1], residues),
        "sm.positions": (prediction.atoms.positions, residues.expand(2, -1, -1)),
    }  # fmt: skip
    for name, (value, mask) in table.items():
        assert value is not None
        assert (value - expected[name])[mask].abs().max() <= rounding * max(1, expected[name][mask].abs().max()), name
    ca = [targets[name][:, :, 1] for name in ("all_atom_positions", "all_atom_mask")]
    assert torch.allclose(lddt(prediction.positions[:, :, 1], *ca), expected["metric.lddt_ca"])


@pytest.mark.parametrize("clamped", [True, False])
def test_every_loss_and_every_gradient(clamped: bool) -> None:
    model = build_network(torch.float64)
    prediction, targets, _ = predict(model, torch.float64)
    targets["use_clamped_fape"] = torch.full_like(targets["use_clamped_fape"], float(clamped))
    stored = load_json(f"{FOLDER}/losses_{'and_grad_norms' if clamped else 'unclamped'}_fp64")
    losses = stored.get("losses", stored)
    terms = loss_terms(prediction, targets, ALL)
    for name, term in terms.items():
        # The bounds of distances within a residue are float32 tables in both implementations.
        assert term.item() == pytest.approx(losses[PUBLIC_NAMES[name]], rel=1e-7 if name == "violation" else 1e-12), name
    loss = weighted_total(terms, targets, ALL).mean()
    assert loss.item() == pytest.approx(losses["loss"], rel=2e-8)
    if not clamped:
        return
    loss.backward()
    expected = from_public(load_tensors(f"{FOLDER}/grads_fp64"), model.state_dict())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad - expected[name]).norm() <= 1e-7 * expected[name].norm() + 1e-11, name


def test_public_weights_load_and_convert_to_alphafold_s_shapes(tmp_path: Path) -> None:
    public = load_tensors(f"{FOLDER}/state_dict", torch.float32)
    torch.save(public, tmp_path / "public.pt")
    model = load_weights(tmp_path / "public.pt")
    assert model.cfg == OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True})
    converted = to_public(model.state_dict(), model.cfg)
    assert converted.keys() == public.keys() and all(torch.equal(value, public[name]) for name, value in converted.items())
    model.save(tmp_path / "params.npz", form="alphafold")
    batch, expected = load_tensors(f"{FOLDER}/batch", torch.float32), load_tensors(f"{FOLDER}/outputs_fp32")["final_atom_positions"]
    with torch.no_grad():
        positions = load_weights(tmp_path / "params.npz")(batch).positions
    residues = batch["seq_mask"][..., -1].bool()
    assert (positions - expected)[residues].abs().max() <= 3e-5 * expected[residues].abs().max()


def test_the_full_network_has_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in OpenFold(OpenFoldConfig.preset(name)).parameters())
                 for name in ("initial", "model_1_ptm", "model_3")}  # fmt: skip
    assert sizes == {"initial": 93_229_082, "model_1_ptm": 93_237_338, "model_3": 92_899_674}
