"""DiT, Flux and SD3 agree with stored results of diffusers (tests/data/diffusion)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.flux import pack_latents
from hpcai.models.diffusion.load import load_network
from hpcai.models.diffusion.sd3 import SD3
from tests.reference_data import DATA, load_arrays, load_json

HOME = DATA / "diffusion"
CASES = {  # case: folder of the model, tolerance of its outputs in float32
    "dit_tiny/dit": ("dit_tiny/model_a", 6e-5), "flux_tiny/plain": ("flux_tiny/model_schnell", 3e-4),
    "flux_tiny/guided": ("flux_tiny/model_dev", 3e-4), "sd3_tiny/plain": ("sd3_tiny/model_3", 3e-4),
    "sd3_tiny/dual": ("sd3_tiny/model_35", 3e-4),
}  # fmt: skip


def network(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_network(folder).to(dtype)


def load_inputs(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Condition]]:
    stored = {name: torch.from_numpy(value) for name, value in load_arrays(f"diffusion/{case}").items()}
    if case.startswith("dit"):
        return stored, (stored["sample"].to(dtype), stored["timestep"], Condition(classes=stored["class_labels"]))
    condition = Condition(
        tokens=stored["encoder_hidden_states"], pooled=stored["pooled_projections"], guidance=stored.get("guidance")
    )  # fmt: skip
    return stored, (stored["x_t"].to(dtype), stored["timestep"], condition)


def to_peer_layout(case: str, outputs: Tensor) -> Tensor:
    return pack_latents(outputs) if case.startswith("flux") else outputs


def check_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_outputs_losses_and_gradients(case: str) -> None:
    model, expected = network(HOME / CASES[case][0]).double(), load_json(f"diffusion/{case}")
    if case.startswith("sd3"):  # positions of a new network
        assert torch.equal(SD3(model.cfg).pos_embed.pos_embed.half(), model.pos_embed.pos_embed.half())
    stored, inputs = load_inputs(case, torch.float64)
    out = to_peer_layout(case, model(*inputs))
    check_close(out, stored["out_f64"], 1e-10)
    loss = (out[:, : stored["target"].shape[1]] - stored["target"]).square().mean()
    assert loss.item() == pytest.approx(expected["loss_f64"], rel=1e-11)
    loss.backward()
    norms, largest = expected["grad_l2"], max(expected["grad_l2"].values())
    assert {name for name, _ in model.named_parameters()} == set(norms)
    for name, parameter in model.named_parameters():
        assert abs(parameter.grad.norm().item() - norms[name]) < 1e-8 * (norms[name] + 1e-4 * largest), name


@pytest.mark.parametrize("case", CASES)
def test_outputs_in_float32_and_under_autocast(case: str) -> None:
    model = network(HOME / CASES[case][0])
    stored, inputs = load_inputs(case, torch.float32)
    expected = stored["out_f32"]
    check_close(to_peer_layout(case, model(*inputs)), expected, CASES[case][1])
    with torch.autocast("cpu", torch.bfloat16):
        assert (to_peer_layout(case, model(*inputs)) - expected).norm() < 0.02 * expected.norm()
    outputs = to_peer_layout(case, model.bfloat16()(inputs[0].bfloat16(), *inputs[1:]))
    assert outputs.dtype == torch.bfloat16 and (outputs - expected).norm() < 0.04 * expected.norm()
