"""OpenFold against the public code it is known by (tests/data/openfold), on positions that are not padding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpcai.models.openfold.config import ObjectiveConfig, OpenFoldConfig
from hpcai.models.openfold.load import from_public, load_weights, to_public
from hpcai.models.openfold.model import OpenFold, Prediction
from hpcai.models.openfold.objective import lddt, loss_terms, weighted_total
from tests import reference_data

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)
THEIRS = {
    "fape": "fape", "chi": "supervised_chi", "distogram": "distogram", "masked_msa": "masked_msa", "plddt": "plddt_loss",
    "resolved": "experimentally_resolved", "violation": "violation", "aligned_error": "tm",
}  # fmt: skip
Arrays = dict[str, Tensor]


def arrays(path: str, dtype: torch.dtype = torch.float64) -> Arrays:
    found = {name: torch.from_numpy(value) for name, value in reference_data.load_arrays(f"openfold/{path}").items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def network(dtype: torch.dtype) -> OpenFold:
    model = OpenFold(OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True}))
    model.load_state_dict(from_public(arrays("network/state_dict"), model.state_dict()))
    for layer in model.modules():
        if hasattr(layer, "rate"):
            layer.rate = 0.0
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model.to(dtype)


def compared(model: OpenFold, dtype: torch.dtype) -> tuple[Prediction, Arrays, Arrays]:
    batch = arrays("network/batch", dtype)
    name = "fp64" if dtype == torch.float64 else "fp32"
    return model(batch), {key: value[..., -1] for key, value in batch.items()}, arrays(f"network/outputs_{name}", dtype)


@pytest.mark.parametrize("dtype, rounding", [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_the_network(dtype: torch.dtype, rounding: float) -> None:
    model = network(dtype)
    found, last, wanted = compared(model, dtype)
    residues = last["seq_mask"].bool()
    pairs, letters = residues[:, :, None] & residues[:, None], last["msa_mask"].bool()
    table = {
        "msa": (found.msa, letters), "pair": (found.pair, pairs), "single": (found.single, residues),
        "final_atom_positions": (found.positions, residues), "lddt_logits": (found.logits.plddt, residues),
        "distogram_logits": (found.logits.distogram, pairs), "masked_msa_logits": (found.logits.masked_msa, letters),
        "experimentally_resolved_logits": (found.logits.resolved, residues), "tm_logits": (found.logits.aligned_error, pairs),
        "sm.frames": (found.atoms.backbone, residues.expand(2, -1, -1)),
        "sm.angles": (found.atoms.angles, residues.expand(2, -1, -1)),
        "sm.positions": (found.atoms.positions, residues.expand(2, -1, -1)), "sm.single": (found.atoms.states[-1], residues),
    }  # fmt: skip
    for name, (value, mask) in table.items():
        assert value is not None
        assert (value - wanted[name])[mask].abs().max() <= rounding * max(1, wanted[name][mask].abs().max()), name
    ca = [last[name][:, :, 1] for name in ("all_atom_positions", "all_atom_mask")]
    assert torch.allclose(lddt(found.positions[:, :, 1], *ca), wanted["metric.lddt_ca"])


@pytest.mark.parametrize("clamped", [True, False])
def test_every_loss_and_every_gradient(clamped: bool) -> None:
    model = network(torch.float64)
    found, last, _ = compared(model, torch.float64)
    last["use_clamped_fape"] = torch.full_like(last["use_clamped_fape"], float(clamped))
    said = reference_data.load_json(f"openfold/network/losses_{'and_grad_norms' if clamped else 'unclamped'}_fp64")
    losses = said.get("losses", said)
    each = loss_terms(found, last, ALL)
    for name, term in each.items():
        # The bounds of a residue's own distances are float32 tables, ours and theirs.
        assert term.item() == pytest.approx(losses[THEIRS[name]], rel=1e-7 if name == "violation" else 1e-12), name
    loss = weighted_total(each, last, ALL).mean()
    assert loss.item() == pytest.approx(losses["loss"], rel=2e-8)
    if not clamped:
        return
    loss.backward()
    wanted = from_public(arrays("network/grads_fp64"), model.state_dict())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad - wanted[name]).norm() <= 1e-7 * wanted[name].norm() + 1e-11, name


def test_the_public_network_s_weights_load_by_their_names_and_predict_by_way_of_alphafold_s_shapes(tmp_path: Path) -> None:
    theirs = arrays("network/state_dict", torch.float32)
    torch.save(theirs, tmp_path / "public.pt")
    model = load_weights(tmp_path / "public.pt")
    assert model.cfg == OpenFoldConfig.preset("tiny", heads={"plddt": 16, "tm": True})
    again = to_public(model.state_dict(), model.cfg)
    assert again.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in again.items())
    model.save(tmp_path / "params.npz", form="alphafold")
    batch, wanted = arrays("network/batch", torch.float32), arrays("network/outputs_fp32")["final_atom_positions"]
    with torch.no_grad():
        found = load_weights(tmp_path / "params.npz")(batch).positions
    residues = batch["seq_mask"][..., -1].bool()
    assert (found - wanted)[residues].abs().max() <= 3e-5 * wanted[residues].abs().max()


def test_the_full_network_has_as_many_parameters_as_published() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in OpenFold(OpenFoldConfig.preset(name)).parameters())
                 for name in ("initial", "model_1_ptm", "model_3")}  # fmt: skip
    assert sizes == {"initial": 93_229_082, "model_1_ptm": 93_237_338, "model_3": 92_899_674}
