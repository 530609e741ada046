"""DiT and Flux against numbers that diffusers produced (tests/data/diffusion)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.blocks import sinusoidal_embedding
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.dit import position_embedding
from hpcai.models.diffusion.flux import pack_latents, rotary_cos_sin, unpack_latents
from hpcai.models.diffusion.load import from_config, load_network
from tests.reference_data import DATA, load_arrays, load_json

pytestmark = pytest.mark.usefixtures("one_thread")
HOME = DATA / "diffusion"
CASES = {  # case: folder of the model, greatest error of its outputs in float32
    "dit_tiny/dit": ("dit_tiny/model_a", 6e-5), "flux_tiny/plain": ("flux_tiny/model_schnell", 3e-4),
    "flux_tiny/guided": ("flux_tiny/model_dev", 3e-4),
}  # fmt: skip


def network(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_network(folder).to(dtype)


def given(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Condition]]:
    found = {name: torch.from_numpy(value) for name, value in load_arrays(f"diffusion/{case}").items()}
    if case.startswith("dit"):
        return found, (found["sample"].to(dtype), found["timestep"], Condition(classes=found["class_labels"]))
    asked = Condition(
        tokens=found["encoder_hidden_states"], pooled=found["pooled_projections"], guidance=found.get("guidance")
    )  # fmt: skip
    return found, (found["x_t"].to(dtype), found["timestep"], asked)


def as_theirs(case: str, found: Tensor) -> Tensor:
    return found if case.startswith("dit") else pack_latents(found)


def close(found: Tensor, right: Tensor, most: float) -> None:
    torch.testing.assert_close(found.detach(), right, rtol=0, atol=most)


@pytest.mark.parametrize("case", CASES)
def test_outputs_losses_and_gradients(case: str) -> None:
    model, known = network(HOME / CASES[case][0]).double(), load_json(f"diffusion/{case}")
    stored, inputs = given(case, torch.float64)
    out = as_theirs(case, model(*inputs))
    close(out, stored["out_f64"], 1e-10)
    loss = (out[:, : stored["target"].shape[1]] - stored["target"]).square().mean()
    assert loss.item() == pytest.approx(known["loss_f64"], rel=1e-11)
    loss.backward()
    norms, largest = known["grad_l2"], max(known["grad_l2"].values())
    assert {name for name, _ in model.named_parameters()} == set(norms)
    for name, parameter in model.named_parameters():
        assert abs(parameter.grad.norm().item() - norms[name]) < 1e-8 * (norms[name] + 1e-4 * largest), name


@pytest.mark.parametrize("case", CASES)
def test_outputs_in_float32_and_under_autocast(case: str) -> None:
    model = network(HOME / CASES[case][0])
    stored, inputs = given(case, torch.float32)
    right = stored["out_f32"]
    close(as_theirs(case, model(*inputs)), right, CASES[case][1])
    with torch.autocast("cpu", torch.bfloat16):
        assert (as_theirs(case, model(*inputs)) - right).norm() < 0.02 * right.norm()
    found = as_theirs(case, model.bfloat16()(inputs[0].bfloat16(), *inputs[1:]))
    assert found.dtype == torch.bfloat16 and (found - right).norm() < 0.04 * right.norm()


def test_embeddings_of_times_and_positions() -> None:
    stored, (_, time, _) = given("dit_tiny/dit", torch.float32)
    close(sinusoidal_embedding(time, 256, torch.float64, 127).float(), stored["time_proj"], 1.2e-4)  # theirs are float32
    cfg: Any = from_config(load_json("diffusion/dit_tiny/model_a/config"), HOME)[1]
    close(position_embedding(cfg, torch.float64).float(), stored["pos_embed"], 1e-6)
    stored, (x, _, _) = given("flux_tiny/guided", torch.float32)
    cfg = from_config(load_json("diffusion/flux_tiny/model_dev/config"), HOME)[1]
    rows, columns = (n // 2 for n in x.shape[2:])
    for found, name in zip(rotary_cos_sin(cfg, len(stored["txt_ids"]), rows, columns, torch.float64), ("rope_cos", "rope_sin")):
        close(found[0].chunk(2, -1)[0].repeat_interleave(2, -1).float(), stored[name], 1e-6)
    assert torch.equal(pack_latents(x), stored["hidden_states"]) and torch.equal(unpack_latents(pack_latents(x), rows, columns), x)
