"""DiT and Flux against numbers that diffusers produced (tests/data/diffusion), and against diffusers where it is installed."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models.diffusion.blocks import sinusoidal
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import DiTConfig, FluxConfig
from hpcai.models.diffusion.dit import DiT, positions
from hpcai.models.diffusion.flux import Flux, angles, packed, unpacked
from hpcai.models.diffusion.load import from_config, load_network, read_folder, save_folder, to_config
from tests.stored import DATA, arrays, told

pytestmark = pytest.mark.usefixtures("one_thread")
HOME = DATA / "diffusion"
CASES = {  # case: folder of the model, greatest error of its outputs in float32
    "dit_tiny/dit": ("dit_tiny/model_a", 6e-5), "flux_tiny/plain": ("flux_tiny/model_schnell", 3e-4),
    "flux_tiny/guided": ("flux_tiny/model_dev", 3e-4),
}  # fmt: skip
LARGE = {"dit_xl_2_256": DiTConfig(), "flux1_schnell": FluxConfig(), "flux1_dev": FluxConfig(guidance=True)}
_WHY = "diffusers is not installed: DiT and Flux are NOT compared with it; pip install hpcai-suite[peers]"


def network(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_network(folder).to(dtype)


@pytest.mark.parametrize("folder", sorted({folder for folder, _ in CASES.values()}))
def test_what_is_written_is_read_again(folder: str, tmp_path: Path) -> None:
    model = network(HOME / folder)
    save_folder(model.state_dict(), model.cfg, tmp_path)
    cfg, state = read_folder(tmp_path)
    assert cfg == model.cfg and state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def given(case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Condition]]:
    found = {name: torch.from_numpy(value) for name, value in arrays(f"diffusion/{case}").items()}
    if case.startswith("dit"):
        return found, (found["sample"].to(dtype), found["timestep"], Condition(classes=found["class_labels"]))
    asked = Condition(
        tokens=found["encoder_hidden_states"], pooled=found["pooled_projections"], guidance=found.get("guidance")
    )  # fmt: skip
    return found, (found["x_t"].to(dtype), found["timestep"], asked)


def as_theirs(case: str, found: Tensor) -> Tensor:
    return found if case.startswith("dit") else packed(found)


def close(found: Tensor, right: Tensor, most: float) -> None:
    torch.testing.assert_close(found.detach(), right, rtol=0, atol=most)


@pytest.mark.parametrize("case", CASES)
def test_outputs_losses_and_gradients(case: str) -> None:
    model, known = network(HOME / CASES[case][0]).double(), told(f"diffusion/{case}")
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
    total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert total.item() == pytest.approx(known["grad_l2_total"], rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_outputs_in_float32_and_under_autocast(case: str) -> None:
    model = network(HOME / CASES[case][0])
    stored, inputs = given(case, torch.float32)
    close(as_theirs(case, model(*inputs)), stored["out_f32"], CASES[case][1])
    with torch.autocast("cpu", torch.bfloat16):
        found = as_theirs(case, model(*inputs))
    assert (found - stored["out_f32"]).norm() < 0.02 * stored["out_f32"].norm()
    found = as_theirs(case, model.bfloat16()(inputs[0].bfloat16(), *inputs[1:]))
    assert found.dtype == torch.bfloat16 and (found - stored["out_f32"]).norm() < 0.04 * stored["out_f32"].norm()


def test_tables_of_times_and_places() -> None:
    stored, (_, time, _) = given("dit_tiny/dit", torch.float32)
    for dtype in (torch.float32, torch.float64):  # those stored are float32
        close(sinusoidal(time, 256, dtype, 127).float(), stored["time_proj"], 1.2e-4)
        cfg: Any = from_config(told("diffusion/dit_tiny/model_a/config"), HOME)[1]
        close(positions(cfg, dtype).float(), stored["pos_embed"], 1e-6)
    for case in ("flux_tiny/plain", "flux_tiny/guided"):
        stored, (x, _, _) = given(case, torch.float32)
        cfg = from_config(told(f"diffusion/{CASES[case][0]}/config"), HOME)[1]
        rows, columns = (n // 2 for n in x.shape[2:])
        words = len(stored["txt_ids"])
        for found, name in zip(angles(cfg, words, rows, columns, torch.float64), ("rope_cos", "rope_sin")):
            close(found[0].chunk(2, -1)[0].repeat_interleave(2, -1).float(), stored[name], 1e-6)
        assert torch.equal(packed(x), stored["hidden_states"]) and torch.equal(unpacked(packed(x), rows, columns), x)


@pytest.mark.parametrize("name", LARGE)
def test_published_sizes_have_their_names_and_totals(name: str) -> None:
    known = json.loads(gzip.decompress((HOME / "names" / f"{name}.json.gz").read_bytes()))
    cfg: Any = from_config({"_class_name": known["class"], **known["config"]}, HOME)[1]
    assert cfg == LARGE[name]
    with torch.device("meta"):
        model = DiT(cfg) if isinstance(cfg, DiTConfig) else Flux(cfg)
    found = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert found == dict(known["tensors"]) and len(found) == known["tensor_count"]
    assert sum(parameter.numel() for parameter in model.parameters()) == known["total"]
    assert to_config(cfg)[1].items() <= {"_diffusers_version": "0.42.1", "_class_name": known["class"], **known["config"]}.items()


# ---- diffusers itself


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, whose sinusoids and rotations are made in float64 too."""
    diffusers = pytest.importorskip("diffusers", reason=_WHY)
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_flux

    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    for module in (embeddings, transformer_flux):
        monkeypatch.setattr(module, "torch", wide)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return diffusers


DITS: list[dict[str, Any]] = [
    {"inputs": 3, "outputs": 3, "size": 6, "patch": 3, "layers": 1, "heads": 3, "head": 4, "classes": 5, "zero": False},
    {"inputs": 1, "outputs": 2, "size": 8, "patch": 1, "layers": 3, "heads": 1, "head": 8, "classes": 1, "zero": False},
]
FLUXES: list[dict[str, Any]] = [
    {"inputs": 4, "double": 1, "single": 3, "heads": 3, "head": 8, "tokens": 6, "pooled": 5, "turned": (4, 2, 2), "zero": False},
    {"inputs": 8, "double": 3, "single": 1, "heads": 1, "head": 6, "tokens": 9, "pooled": 2, "turned": (2, 2, 2), "zero": False,
     "guidance": True},
]  # fmt: skip


def compared(ours: Any, theirs: Any, seed: int) -> None:
    """Outputs, and gradients by name."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    time, cfg = torch.rand(2, generator=draw, dtype=torch.float64), ours.cfg
    if isinstance(cfg, DiTConfig):
        x, classes = numbers(2, cfg.inputs, cfg.size, cfg.size), torch.tensor([cfg.classes, cfg.classes - 1])
        found = ours(x, 900 * time, Condition(classes=classes))
        right = theirs(x, timestep=900 * time, class_labels=classes).sample
    else:
        x, words, whole = numbers(2, cfg.inputs // 4, 4, 6), numbers(2, 3, cfg.tokens), numbers(2, cfg.pooled)
        strength = time + 1 if cfg.guidance else None
        found = packed(ours(x, time, Condition(tokens=words, pooled=whole, guidance=strength)))
        places = torch.tensor([[0.0, i, j] for i in range(2) for j in range(3)], dtype=torch.float64)
        right = theirs(
            hidden_states=packed(x), timestep=time, encoder_hidden_states=words, pooled_projections=whole, guidance=strength,
            img_ids=places, txt_ids=torch.zeros(3, 3, dtype=torch.float64),
        ).sample  # fmt: skip
    close(found, right.detach(), 1e-10)
    weights = numbers(*found.shape)
    (found * weights).sum().backward(), (right * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(gradients)
    for name, parameter in ours.named_parameters():
        np.testing.assert_allclose(parameter.grad, gradients[name], rtol=0, atol=1e-9 * max(1.0, gradients[name].abs().max()))


def spread(model: Any) -> Any:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64) + (parameter.ndim == 1))
    return model.eval()


@pytest.mark.parametrize("words", [*DITS, *FLUXES], ids=str)
def test_we_and_diffusers_read_each_others_files(theirs: Any, words: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    ours: Any = spread((Flux(FluxConfig(**words)) if "turned" in words else DiT(DiTConfig(**words))).double())
    (tmp_path / "config.json").write_text(json.dumps(to_config(ours.cfg)[1]))
    save_file(ours.state_dict(), tmp_path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    kind = getattr(theirs, to_config(ours.cfg)[1]["_class_name"])
    peer, about = kind.from_pretrained(tmp_path, torch_dtype=torch.float64, output_loading_info=True)
    assert not any(about.values()), about
    compared(ours, peer.eval(), 0)
    spread(peer).save_pretrained(tmp_path / "theirs")
    back = network(tmp_path / "theirs", torch.float64)
    assert back.cfg == ours.cfg.model_copy(update={"zero": True})
    peer.zero_grad()
    compared(back, peer, 1)
