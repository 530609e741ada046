"""OpenFold against the public code it is known by (tests/data/openfold), on positions that are not padding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.models.openfold.attention import ColumnAttention, GlobalColumnAttention, RowAttention, TriangleAttention
from hpcai.models.openfold.config import MsaConfig, ObjectiveConfig, OpenFoldConfig, PairConfig, StructureConfig
from hpcai.models.openfold.embedders import InputEmbedder, PointwiseAttention, RecyclingEmbedder
from hpcai.models.openfold.evoformer import EvoformerBlock, OuterProductMean, TemplateStack, TriangleMultiplication
from hpcai.models.openfold.geometry import Frames, rotation_of
from hpcai.models.openfold.heads import Confidence
from hpcai.models.openfold.layers import Linear, Transition
from hpcai.models.openfold.load import from_public, load_weights, public_names, to_public
from hpcai.models.openfold.model import OpenFold, Prediction
from hpcai.models.openfold.objective import lddt, terms, total
from hpcai.models.openfold.structure import Angles, PointAttention, StructureModule
from hpcai.models.openfold.structure import Transition as StructureTransition
from tests import stored
from tests.proteins import masks

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = ObjectiveConfig(resolved=0.01, violation=1.0, aligned_error=0.1)
THEIRS = {
    "fape": "fape", "chi": "supervised_chi", "distogram": "distogram", "masked_msa": "masked_msa", "plddt": "plddt_loss",
    "resolved": "experimentally_resolved", "violation": "violation", "aligned_error": "tm",
}  # fmt: skip
Arrays = dict[str, Tensor]
ROUNDING = 1e-6  # of a row that is all padding, whose logits are -1e9; elsewhere the network's test asks for more


def arrays(path: str, dtype: torch.dtype = torch.float64) -> Arrays:
    found = {name: torch.from_numpy(value) for name, value in stored.arrays(f"openfold/{path}").items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


PAIRS = PairConfig(triangle=24, head=8, heads=2, transition=2, dropout=0)
STRUCTURE = StructureConfig(passes=2, head=8, heads=4, query_points=3, value_points=5, angle=16, dropout=0)
BLOCK = "evoformer.blocks.0."


def _distogram(layer: nn.Module, z: Tensor) -> Tensor:
    half = layer(z)
    return half + half.transpose(1, 2)


def _points(attention: PointAttention, x: Arrays) -> Tensor:
    frames = Frames(rotation_of(x["quats"]), x["trans"])
    return attention(x["s"], attention.bias(x["z"], x["mask"]), x["z"], frames)


def _structure(module: StructureModule, x: Arrays) -> Arrays:
    found = module(x["single"], x["pair"], x["aatype"], x["mask"])
    corner = torch.zeros(*found.rotation.shape[:-2], 1, 4, dtype=found.rotation.dtype)
    corner[..., 3] = 1
    frames = torch.cat([torch.cat([found.rotation, found.translation[..., None]], -1), corner], -2)
    return {
        "frames": found.backbone, "sidechain_frames": frames, "unnormalized_angles": found.raw_angles, "angles": found.angles,
        "positions": found.positions, "states": found.states, "single": found.states[-1],
    }  # fmt: skip


def _block(block: EvoformerBlock, x: Arrays) -> Arrays:
    return dict(zip("mz", block(x["m"], x["z"], masks(x["msa_mask"], x["pair_mask"]))))


def _stack(stack: TemplateStack, x: Arrays) -> Tensor:
    t, several = x["t"], x["t"].shape[1]
    mask = x["pair_mask"][:, None].expand(-1, several, -1, -1).flatten(0, 1)
    return stack(t.flatten(0, 1), mask).unflatten(0, (-1, several))


# Name in the public code -> ours, where it stands in the network, how it is called. EvoformerBlock holds the triangles of the other
# direction, too.
PARTS: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Any, Arrays], Any]]] = {
    "TriangleMultiplicationOutgoing": (
        lambda: TriangleMultiplication(16, 24, True), BLOCK + "pair.tri_mul_out.", lambda f, x: f(x["z"], x["mask"])),
    "TriangleAttentionStartingNode": (
        lambda: TriangleAttention(16, 8, 2, True), BLOCK + "pair.tri_att_start.", lambda f, x: f(x["z"], x["mask"])),
    "MSARowAttentionWithPairBias": (
        lambda: RowAttention(32, 16, 8, 4), BLOCK + "msa_att_row.", lambda f, x: f(x["m"], x["mask"], x["z"])),
    "MSAColumnAttention": (lambda: ColumnAttention(32, 8, 4), BLOCK + "msa_att_col.", lambda f, x: f(x["m"], x["mask"])),
    "MSAColumnGlobalAttention": (
        lambda: GlobalColumnAttention(16, 4, 4), "extra_msa_stack.blocks.0.msa_att_col.", lambda f, x: f(x["m"], x["mask"])),
    "OuterProductMean": (
        lambda: OuterProductMean(32, 16, 8), BLOCK + "outer_product_mean.",
        lambda f, x: f(x["m"], masks(x["mask"], x["mask"]))),
    "PairTransition": (lambda: Transition(16, 4), BLOCK + "pair.pair_transition.", lambda f, x: f(x["z"])),
    "MSATransition": (lambda: Transition(32, 4), BLOCK + "msa_transition.", lambda f, x: f(x["m"])),
    "EvoformerBlock": (
        lambda: EvoformerBlock(32, 16, MsaConfig(head=8, heads=4, outer=8, transition=2, dropout=0), PAIRS), BLOCK, _block),
    "InvariantPointAttention": (lambda: PointAttention(32, 16, STRUCTURE), "structure_module.ipa.", _points),
    "AngleResnet": (
        lambda: Angles(32, STRUCTURE), "structure_module.angle_resnet.",
        lambda f, x: dict(zip(("unnormalized", "normalized"), f(x["s"], x["s_initial"])))),
    "StructureModuleTransition": (
        lambda: StructureTransition(32, STRUCTURE), "structure_module.transition.", lambda f, x: f(x["s"])),
    "StructureModule": (lambda: StructureModule(32, 16, STRUCTURE), "structure_module.", _structure),
    "TemplatePointwiseAttention": (
        lambda: PointwiseAttention(16, 16, 8, 2), "template_embedder.template_pointwise_att.",
        lambda f, x: f(x["t"], x["z"], x["template_mask"])),
    "TemplatePairStack": (
        lambda: TemplateStack(16, 1, PairConfig(triangle=16, head=8, heads=2, transition=2, dropout=0)),
        "template_embedder.template_pair_stack.", _stack),
    "InputEmbedder": (
        lambda: InputEmbedder(32, 16), "input_embedder.",
        lambda f, x: dict(zip("mz", f(x["target_feat"], x["residue_index"], x["msa_feat"])))),
    "RecyclingEmbedder": (
        lambda: RecyclingEmbedder(32, 16), "recycling_embedder.",
        lambda f, x: dict(zip("mz", f(x["m0_prev"], x["z_prev"], x["x_prev"])))),
    "DistogramHead": (lambda: Linear(16, 64), "heads.distogram.", lambda f, x: _distogram(f, x["z"])),
    "PerResidueLDDTCaPredictor": (lambda: Confidence(32, 16), "heads.plddt.", lambda f, x: f(x["s"])),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_part_and_its_gradients(name: str) -> None:
    build, prefix, call = PARTS[name]
    golden = arrays(f"parts/{name}")
    groups: dict[str, Arrays] = {}
    for key, value in golden.items():
        group, _, rest = key.partition(".")
        groups.setdefault(group, {})[rest] = value
    module = build()
    home = prefix.replace(".pair.", ".pair_stack.").replace("heads.", "aux_heads.")
    names = {ours: [each.removeprefix(home) for each in public_names(prefix + ours)] for ours in module.state_dict()}
    used = sorted(each for group in names.values() for each in group)
    assert used == sorted(groups["param"])
    gathered = {ours: torch.cat([groups["param"][each] for each in theirs]) for ours, theirs in names.items()}
    module.load_state_dict(gathered)
    module.to(torch.float64)
    given = {key: value.requires_grad_(f"grad_in.{key}" in golden) for key, value in groups["in"].items()}
    found = call(module, given)
    found = found if isinstance(found, dict) else {"out": found}
    for key, value in found.items():
        torch.testing.assert_close(value, groups["out"][key], rtol=ROUNDING, atol=ROUNDING)
    sum((value * groups["cot"][key]).sum() for key, value in found.items() if key in groups["cot"]).backward()  # type: ignore[union-attr]
    for key, value in given.items():
        if f"grad_in.{key}" in golden:
            torch.testing.assert_close(value.grad, groups["grad_in"][key], rtol=ROUNDING, atol=ROUNDING)
    for ours, parameter in module.named_parameters():
        wanted = torch.cat([groups["grad_param"][each] for each in names[ours]])
        torch.testing.assert_close(parameter.grad, wanted, rtol=ROUNDING, atol=ROUNDING)


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
    said = stored.told(f"openfold/network/losses_{'and_grad_norms' if clamped else 'unclamped'}_fp64")
    losses = said.get("losses", said)
    each = terms(found, last, ALL)
    for name, term in each.items():
        # The bounds of a residue's own distances are float32 tables, ours and theirs.
        assert term.item() == pytest.approx(losses[THEIRS[name]], rel=1e-7 if name == "violation" else 1e-12), name
    loss = total(each, last, ALL).mean()
    assert loss.item() == pytest.approx(losses["loss"], rel=2e-8)
    if not clamped:
        return
    loss.backward()
    wanted = from_public(arrays("network/grads_fp64"), model.state_dict())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad - wanted[name]).norm() <= 1e-7 * wanted[name].norm() + 1e-11, name


def test_ten_steps_of_adam() -> None:
    steps = stored.told("openfold/network/trajectory")["steps"]
    model, batch = network(torch.float64), arrays("network/batch")
    last = {key: value[..., -1] for key, value in batch.items()}
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, (0.9, 0.999), 1e-6)
    for wanted in steps:
        optimizer.zero_grad()
        loss = total(terms(model(batch), last, ALL), last, ALL).mean()
        assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.item() == pytest.approx(wanted["grad_norm_before_clip"], rel=1e-4)
        optimizer.step()


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
