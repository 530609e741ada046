"""Networks against those of diffusers, of random shapes, converted in both directions: outputs and gradients."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.models.diffusion import VAE, Condition, UNet, UNetConfig, VAEConfig, load_network, save_folder
from hpcai.models.diffusion.config import DiTConfig, FluxConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux, pack_latents

_WHY = "diffusers is not installed: folders for others, and from them, are NOT tested; pip install hpcai-suite[peers]"
diffusers: Any = pytest.importorskip("diffusers", reason=_WHY)

from diffusers.models import embeddings  # noqa: E402
from diffusers.models.transformers import transformer_flux  # noqa: E402


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Compute in float64 what diffusers computes in float32: sinusoidal and rotary embeddings."""
    double = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    for module in (embeddings, transformer_flux):
        monkeypatch.setattr(module, "torch", double)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    level = diffusers.logging.get_verbosity()
    diffusers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    yield
    diffusers.logging.set_verbosity(level)


def shapes(draw: random.Random) -> dict[str, Any]:
    levels = draw.choice((1, 2, 3))
    return {
        "channels": tuple(draw.choice((8, 12, 16)) for _ in range(levels)), "blocks": draw.choice((1, 2)),
        "groups": draw.choice((2, 4)), "inputs": draw.choice((1, 3)), "outputs": draw.choice((1, 2)),
    }  # fmt: skip


def unet(seed: int, kind: str) -> UNetConfig:
    draw = random.Random(seed)
    words = shapes(draw)
    attention = tuple(draw.choice((kind, "none")) for _ in words["channels"])
    heads = tuple(draw.choice((2, 4)) for _ in attention)
    if kind == "self":
        seen = [one == kind for one in (*attention[:-1], kind)]  # the middle has the heads of the lowest level
        heads = tuple(n // 4 if one else 1 for n, one in zip(words["channels"], seen))
    more = {"classes": draw.choice((None, 5)), "eps": draw.choice((1e-5, 1e-3)), "tokens": 6 if kind == "cross" else None}
    return UNetConfig(**words, **more, attention=attention, middle=kind, heads=heads)


def vae(seed: int) -> VAEConfig:
    draw = random.Random(seed)
    more = {"latents": draw.choice((2, 4)), "quantised": draw.random() < 0.5, "attention": draw.random() < 0.7}
    return VAEConfig(**shapes(draw), **more, shift=draw.choice((0.0, 0.1)), scale=0.4)


CONFIGS: dict[str, Any] = {
    **{f"{kind} attention {seed}": unet(seed, kind) for kind in ("cross", "self") for seed in range(4)},
    **{f"autoencoder {seed}": vae(seed) for seed in range(4)},
    "dit": DiTConfig(inputs=3, outputs=3, size=6, patch=3, layers=1, heads=3, head=4, classes=5),
    "dit of two outputs": DiTConfig(inputs=1, outputs=2, size=8, patch=1, layers=3, heads=1, head=8, classes=1),
    "flux": FluxConfig(inputs=4, double=1, single=3, heads=3, head=8, tokens=6, pooled=5, turned=(4, 2, 2)),
    "flux with guidance": FluxConfig(
        inputs=8, double=3, single=1, heads=1, head=6, tokens=9, pooled=2, turned=(2, 2, 2), guidance=True
    ),
}  # fmt: skip


def outputs(ours: Any, theirs: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of both networks for one sample."""
    draw, cfg = torch.Generator().manual_seed(0), ours.cfg

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    if isinstance(cfg, VAEConfig):
        x = numbers(2, cfg.inputs, 12, 20)
        latents, known = ours.encode(x), theirs.encode(x).latent_dist
        torch.testing.assert_close(latents.moments, known.parameters, rtol=1e-11, atol=1e-11)
        return ours.decode(latents.mean), theirs.decode(known.mean).sample
    if isinstance(cfg, FluxConfig):
        x, time = numbers(2, cfg.inputs // 4, 4, 6), torch.rand(2, generator=draw, dtype=torch.float64)
        strength = time + 1 if cfg.guidance else None
        asked = Condition(tokens=numbers(2, 3, cfg.tokens), pooled=numbers(2, cfg.pooled), guidance=strength)
        right = theirs(
            hidden_states=pack_latents(x), timestep=time, encoder_hidden_states=asked.tokens, pooled_projections=asked.pooled,
            guidance=strength, txt_ids=torch.zeros(3, 3, dtype=torch.float64),
            img_ids=torch.tensor([[0.0, i, j] for i in range(2) for j in range(3)], dtype=torch.float64),
        ).sample  # fmt: skip
        return pack_latents(ours(x, time, asked)), right
    times = torch.tensor([3, 700])
    if isinstance(cfg, DiTConfig):
        x, classes = numbers(2, cfg.inputs, cfg.size, cfg.size), torch.tensor([cfg.classes, cfg.classes - 1])
        return ours(x, times, Condition(classes=classes)), theirs(x, timestep=times, class_labels=classes).sample
    x = numbers(2, cfg.inputs, *((9, 12) if cfg.tokens else (8, 12)))  # their UNet2DModel refuses odd sides
    classes, tokens = torch.tensor([4, 0]) if cfg.classes else None, numbers(2, 5, 6) if cfg.tokens else None
    words = {"encoder_hidden_states": tokens} if cfg.tokens else {}
    return ours(x, times, Condition(classes=classes, tokens=tokens)), theirs(x, times, class_labels=classes, **words).sample


def compared(ours: nn.Module, theirs: nn.Module) -> None:
    found, right = outputs(ours.zero_grad() or ours.double().eval(), theirs.zero_grad() or theirs.double().eval())
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10 * max(1, right.abs().max().item()))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for value in (found, right):
        (value * weights).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:
            known = gradients[name].view_as(parameter)
            torch.testing.assert_close(parameter.grad, known, rtol=0, atol=1e-9 * max(1.0, known.abs().max().item()))


@pytest.mark.parametrize("name", CONFIGS)
def test_we_and_diffusers_read_each_others_folders(name: str, tmp_path: Path) -> None:
    cfg = CONFIGS[name]
    torch.manual_seed(0)
    ours: Any = {UNetConfig: UNet, VAEConfig: VAE, DiTConfig: DiT, FluxConfig: Flux}[type(cfg)](cfg)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.3)
    save_folder(ours.state_dict(), cfg, tmp_path / "ours", shard=random.Random(name).choice((10**9, 20_000)))
    kind = json.loads((tmp_path / "ours/config.json").read_text())["_class_name"]
    theirs, told = getattr(diffusers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    compared(ours, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_network(tmp_path / "theirs")
    assert back.cfg.model_dump(exclude={"zero", "heads"}) == cfg.model_dump(exclude={"zero", "heads"})
    compared(back, theirs)


def test_networks_that_they_made_are_read(tmp_path: Path) -> None:
    """With their defaults for settings that we do not write, and a convolution before and after transformers."""
    torch.manual_seed(0)
    made = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=6,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=4, attention_head_dim=2, use_linear_projection=False,
    )  # fmt: skip
    made.save_pretrained(tmp_path)
    compared(load_network(tmp_path), made)
