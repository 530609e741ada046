"""U-Nets and autoencoders have the outputs, losses, gradients, AdamW steps and tensor names of diffusers."""

import gzip
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.models.diffusion import VAE, Condition, UNet, UNetConfig, VAEConfig, load_network
from hpcai.models.diffusion.blocks import sinusoidal_embedding
from hpcai.models.diffusion.config import DiTConfig, FluxConfig, SD3Config
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.load import DIFFUSERS_CLASSES
from hpcai.models.diffusion.sd3 import SD3
from tests.hash_values import fill_parameters
from tests.reference_data import DATA, load_json, load_tensors

HOME = DATA / "diffusion"
SD2, UNET2D, VAES = (load_json(f"diffusion/{name}/cases") for name in ("sd2_unet_tiny", "unet2d_tiny", "vae_tiny"))


def check_close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), np.asarray(expected), rtol=0, atol=tolerance)


def check_gradients(net: nn.Module, expected: dict[str, float]) -> None:
    norms = {name: parameter.grad.norm().item() for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert set(norms) == set(expected)
    largest = max(expected.values())
    off = {name: (norms[name], x) for name, x in expected.items() if abs(norms[name] - x) > 1e-8 * (x + 1e-4 * largest)}
    assert not off


def build_unet(case: str) -> UNet:
    """Return the network of a case of ``sd2_unet_tiny``, with weights by the hash rule."""
    settings = SD2[case]
    path = HOME / "sd2_unet_tiny" / f"{settings['folder']}.json"
    cfg: Any = DIFFUSERS_CLASSES["UNet2DConditionModel"].from_config(json.loads(path.read_text()), path)
    groups = {"groups": settings["resnet_groups"], "attention_groups": settings["transformer_groups"]}
    net = UNet(cfg.model_copy(update=groups)).double()
    fill_parameters(net)
    return net


@pytest.mark.parametrize("case", SD2)
def test_a_unet_with_cross_attention(case: str) -> None:
    io, expected, net = load_tensors(f"diffusion/sd2_unet_tiny/{case}"), SD2[case], build_unet(case)
    texts = {"pooled": io.get("text_embeds"), "sizes": io.get("time_ids")}  # of Stable Diffusion XL
    inputs = io["sample"], io["timestep"], Condition(tokens=io["encoder_hidden_states"], **texts)
    check_close(sinusoidal_embedding(io["timestep"], net.cfg.channels[0], torch.float64), io["time_proj"], 1e-4)  # float32
    adamw = expected["adamw"]
    settings = {key: adamw[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer, losses = torch.optim.AdamW(net.parameters(), **settings), []
    for step in range(4):
        out = net(*inputs)
        loss = (out - io["target"]).square().mean()
        losses.append(loss.item())
        if step < 3:
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            check_close(out, io["out_f64"])
            assert loss.item() == pytest.approx(expected["loss_f64"], rel=1e-11)
            check_gradients(net, dict(zip(sorted(net.state_dict()), io["grad_l2"].tolist(), strict=True)))
        optimizer.step()
        if step == 2:
            total = sum(p.detach().square().sum() for p in net.parameters()) ** 0.5
            assert total.item() == pytest.approx(adamw["param_l2_total_after_3"], rel=1e-9)
    assert losses == pytest.approx(adamw["losses"], rel=1e-9)


@pytest.mark.parametrize("case", UNET2D)
def test_a_unet_with_self_attention(case: str) -> None:
    io, net = load_tensors(f"diffusion/unet2d_tiny/{case}"), load_network(HOME / "unet2d_tiny" / UNET2D[case]["folder"]).double()
    out = net(io["sample"], io["timestep"], Condition(classes=io.get("class_labels")))
    check_close(out, io["out_f64"])
    loss = (out - io["target"]).square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(UNET2D[case]["loss_f64"], rel=1e-11)
    check_gradients(net, UNET2D[case]["grad_l2"])


@pytest.mark.parametrize("case", VAES)
def test_an_autoencoder(case: str) -> None:
    io, expected = load_tensors(f"diffusion/vae_tiny/{case}"), VAES[case]
    vae = load_network(HOME / "vae_tiny" / expected["folder"]).double()
    latents = vae.encode(io["image"])
    z, recon = latents.sample(io["noise"]), vae.decode(latents.mean)
    kl = 0.5 * (latents.mean.square() + latents.logvar.exp() - 1 - latents.logvar).flatten(1).sum(1)
    scale, shift = vae.cfg.scale, vae.cfg.shift
    outputs = {"moments": latents.moments, "mean": latents.mean, "logvar": latents.logvar, "z": z, "z_scaled": (z - shift) * scale}
    outputs |= {"recon": recon, "decoded": vae.decode(io["latent"])}
    outputs |= {"decoded_unscaled": vae.decode(io["latent"] / scale + shift)}
    for name, value in outputs.items():
        check_close(value, io[f"{name}_f64"])
    np.testing.assert_allclose(kl.detach(), io["kl_f64"], rtol=1e-11)
    check_close(vae(io["image"]), io["recon_f64"])
    loss = (recon - io["image"]).square().mean() + expected["kl_weight"] * kl.mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-11)
    check_gradients(vae, expected["grad_l2"])


def test_log_variances_are_clamped() -> None:
    latents = VAE(VAEConfig(channels=(4,), groups=2, blocks=1)).encode(torch.zeros(1, 3, 4, 4))
    wild = latents._replace(moments=torch.tensor([0.0, 0.0, -1e3, 1e3]).view(1, 4, 1, 1))
    assert wild.logvar.flatten().tolist() == [-30.0, 20.0]
    assert wild.sample(torch.ones(1, 2, 1, 1)).flatten().tolist() == pytest.approx([np.exp(-15.0), np.exp(10.0)])


FLUX_VAE = VAEConfig(latents=16, quantised=False, scale=0.3611, shift=0.1159)
SDXL = UNetConfig(channels=(320, 640, 1280), attention=("none", "cross", "cross"), heads=(5, 10, 20), tokens=2048, pooled=1280,
                  sizes=256, transformer_layers=(1, 2, 10))  # fmt: skip
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "sd2_base_unet": (UNet, UNetConfig()), "sd_vae": (VAE, VAEConfig()), "flux_vae": (VAE, FLUX_VAE),
    "dit_xl_2_256": (DiT, DiTConfig()), "flux1_schnell": (Flux, FluxConfig()), "flux1_dev": (Flux, FluxConfig(guidance=True)),
    "sdxl_unet": (UNet, SDXL), "sd35_medium": (SD3, SD3Config()),
    "sd35_large": (SD3, SD3Config(positions=192, layers=38, heads=38, dual_attention=())),
    "sd3_medium": (SD3, SD3Config(positions=192, dual_attention=(), qk_norm=None)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_of_published_networks(name: str) -> None:
    known, (kind, cfg) = json.loads(gzip.decompress((HOME / "names" / f"{name}.json.gz").read_bytes())), PUBLISHED[name]
    with torch.device("meta"):
        state = kind(cfg).state_dict()
    assert {key: list(x.shape) for key, x in state.items()} == dict(known["tensors"]) and len(state) == known["tensor_count"]
    assert sum(x.numel() for x in state.values()) == known["total"]
    assert DIFFUSERS_CLASSES[known["class"]].from_config({"_class_name": known["class"], **known["config"]}, HOME / "names") == cfg
