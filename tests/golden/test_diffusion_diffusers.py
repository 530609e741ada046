"""U-Nets and autoencoders of ours against those of diffusers, of random shapes: from one to the other and back."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.models.diffusion import VAE, Condition, UNet, UNetConfig, VAEConfig, load_network, save_folder

_WHY = "diffusers is not installed: folders for others, and from them, are NOT tested; pip install hpcai-suite[peers]"
diffusers: Any = pytest.importorskip("diffusers", reason=_WHY)

from diffusers.models import embeddings  # noqa: E402

SEEDS = range(4)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """The embedding of times, which the others make in float32, is made in float64."""

    def embedding(times: Tensor, channels: int, **words: Any) -> Tensor:
        half = channels // 2
        angles = times[:, None].double() * torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10_000) / half))
        return torch.cat((angles.cos(), angles.sin()), -1)

    monkeypatch.setattr(embeddings, "get_timestep_embedding", lambda times, channels, *_, **words: embedding(times, channels))
    level = diffusers.logging.get_verbosity()
    diffusers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    yield
    diffusers.logging.set_verbosity(level)


def spread(net: nn.Module, seed: int) -> Any:
    """``net`` with weights so large that each of them shows in what it says."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return net.eval()


def shapes(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    levels = draw.choice((1, 2, 3))
    return {
        "channels": tuple(draw.choice((8, 12, 16)) for _ in range(levels)), "blocks": draw.choice((1, 2)),
        "groups": draw.choice((2, 4)), "inputs": draw.choice((1, 3)), "outputs": draw.choice((1, 2)),
    }  # fmt: skip


def unets(seed: int, kind: str) -> UNetConfig:
    draw, words = random.Random(100 + seed), shapes(seed)
    levels = len(words["channels"])
    attention = tuple(draw.choice((kind, "none")) for _ in range(levels))
    if kind == "self":
        seen = [one == kind for one in (*attention[:-1], kind)]  # the middle has the heads of the lowest level
        heads = tuple(n // 4 if one else 1 for n, one in zip(words["channels"], seen))
    else:
        heads = tuple(draw.choice((2, 4)) for _ in range(levels))
    tokens = 6 if kind == "cross" else None
    more = {"classes": draw.choice((None, 5)), "eps": draw.choice((1e-5, 1e-3))}
    return UNetConfig(**words, **more, attention=attention, middle=kind, heads=heads, tokens=tokens)


def both(net: UNet, theirs: Any, seed: int) -> tuple[Tensor, Tensor]:
    """What the two say of one sample."""
    generator = torch.Generator().manual_seed(seed)
    sides = (9, 12) if net.cfg.tokens else (8, 12)  # their UNet2DModel refuses odd ones
    x = torch.randn(2, net.cfg.inputs, *sides, generator=generator, dtype=torch.float64)
    times, classes = torch.tensor([3, 700]), torch.tensor([4, 0]) if net.cfg.classes else None
    tokens = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64) if net.cfg.tokens else None
    words = {"encoder_hidden_states": tokens} if tokens is not None else {}
    with torch.no_grad():
        own = net.double()(x, times, Condition(classes=classes, tokens=tokens))
        return own, theirs.double()(x, times, class_labels=classes, **words).sample


@pytest.mark.parametrize("kind", ["cross", "self"])
@pytest.mark.parametrize("seed", SEEDS)
def test_unets_both_ways(kind: str, seed: int, tmp_path: Path) -> None:
    cfg = unets(seed, kind)
    net = spread(UNet(cfg), seed)
    save_folder(net.state_dict(), cfg, tmp_path / "ours", shard=random.Random(seed).choice((10**9, 20_000)))
    other = diffusers.UNet2DConditionModel if kind == "cross" else diffusers.UNet2DModel
    theirs, told = other.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values())
    theirs.save_pretrained(tmp_path / "theirs")
    own, said = both(net, theirs.eval(), seed)
    assert own.abs().max() > 0.1
    torch.testing.assert_close(own, said, rtol=1e-11, atol=1e-11)
    again = load_network(tmp_path / "theirs")
    assert again.cfg.model_dump(exclude={"zero", "heads"}) == cfg.model_dump(exclude={"zero", "heads"})
    assert torch.equal(both(again, theirs, seed)[0], own)


@pytest.mark.parametrize("seed", SEEDS)
def test_autoencoders_both_ways(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    more = {"latents": draw.choice((2, 4)), "quantised": draw.random() < 0.5, "attention": draw.random() < 0.7}
    cfg = VAEConfig(**shapes(seed), **more, shift=draw.choice((0.0, 0.1)), scale=0.4)
    net = spread(VAE(cfg), seed)
    save_folder(net.state_dict(), cfg, tmp_path / "ours")
    theirs, told = diffusers.AutoencoderKL.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()) and theirs.config.scaling_factor == cfg.scale and (theirs.config.shift_factor or 0.0) == cfg.shift
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_network(tmp_path / "theirs").cfg == cfg
    x = torch.randn(2, cfg.inputs, 12, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        net, theirs = net.double(), theirs.eval().double()
        latents, known = net.encode(x), theirs.encode(x).latent_dist
        torch.testing.assert_close(latents.moments, known.parameters, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(latents.divergence(), known.kl(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(net.decode(known.mean), theirs.decode(known.mean).sample, rtol=1e-11, atol=1e-11)


def test_networks_that_they_made_are_read(tmp_path: Path) -> None:
    """With their own defaults where ours does not write any, and a convolution before and after transformers."""
    torch.manual_seed(0)
    made = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=6,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=4, attention_head_dim=2, use_linear_projection=False,
    )  # fmt: skip
    made.save_pretrained(tmp_path)
    torch.testing.assert_close(*both(load_network(tmp_path), made.eval(), 0), rtol=1e-11, atol=1e-11)
