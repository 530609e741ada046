"""U-Nets and autoencoders against those of diffusers: outputs, losses, gradients, steps of AdamW, names."""

import gzip
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.models.diffusion import VAE, Condition, UNet, UNetConfig, VAEConfig, load_network
from hpcai.models.diffusion.blocks import sinusoidal_embedding
from hpcai.models.diffusion.config import DiTConfig, FluxConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.load import DIFFUSERS_CLASSES
from tests.hash_values import fill_parameters
from tests.reference_data import DATA, load_arrays, load_json

pytestmark = pytest.mark.usefixtures("one_thread")
HOME = DATA / "diffusion"
SD2, PLAIN, CODERS = (load_json(f"diffusion/{name}/cases") for name in ("sd2_unet_tiny", "unet2d_tiny", "vae_tiny"))


def tensors(name: str) -> dict[str, Tensor]:
    """Stored arrays, floating ones in float64."""
    found = {key: torch.from_numpy(array) for key, array in load_arrays(f"diffusion/{name}").items()}
    return {key: x.double() if x.is_floating_point() else x for key, x in found.items()}


def near(found: Any, known: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(found.detach().numpy(), np.asarray(known), rtol=0, atol=tolerance)


def check_gradients(net: nn.Module, known: dict[str, float]) -> None:
    own = {name: parameter.grad.norm().item() for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert set(own) == set(known)
    largest = max(known.values())
    wrong = {name: (own[name], norm) for name, norm in known.items() if abs(own[name] - norm) > 1e-8 * (norm + 1e-4 * largest)}
    assert not wrong


def structured(case: str) -> UNet:
    """The network of a case of ``sd2_unet_tiny``, with weights by rule."""
    about = SD2[case]
    path = HOME / "sd2_unet_tiny" / f"{about['folder']}.json"
    cfg: Any = DIFFUSERS_CLASSES["UNet2DConditionModel"].from_config(json.loads(path.read_text()), path)
    net = UNet(cfg.model_copy(update={"groups": about["resnet_groups"], "attention_groups": about["transformer_groups"]})).double()
    fill_parameters(net)
    return net


@pytest.mark.parametrize("case", SD2)
def test_a_unet_with_attention_to_tokens(case: str) -> None:
    io, about, net = tensors(f"sd2_unet_tiny/{case}"), SD2[case], structured(case)
    given = io["sample"], io["timestep"], Condition(tokens=io["encoder_hidden_states"])
    near(sinusoidal_embedding(io["timestep"], net.cfg.channels[0], torch.float64), io["time_proj"], 1e-4)  # theirs in float32
    adamw = about["adamw"]
    how = {key: adamw[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer, losses = torch.optim.AdamW(net.parameters(), **how), []
    for step in range(4):
        out = net(*given)
        loss = (out - io["target"]).square().mean()
        losses.append(loss.item())
        if step < 3:
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            near(out, io["out_f64"])
            assert loss.item() == pytest.approx(about["loss_f64"], rel=1e-11)
            check_gradients(net, dict(zip(sorted(net.state_dict()), io["grad_l2"].tolist(), strict=True)))
        optimizer.step()
        if step == 2:
            total = sum(p.detach().square().sum() for p in net.parameters()) ** 0.5
            assert total.item() == pytest.approx(adamw["param_l2_total_after_3"], rel=1e-9)
    assert losses == pytest.approx(adamw["losses"], rel=1e-9)


@pytest.mark.parametrize("case", PLAIN)
def test_a_unet_with_attention_to_itself(case: str) -> None:
    io, net = tensors(f"unet2d_tiny/{case}"), load_network(HOME / "unet2d_tiny" / PLAIN[case]["folder"]).double()
    out = net(io["sample"], io["timestep"], Condition(classes=io.get("class_labels")))
    near(out, io["out_f64"])
    loss = (out - io["target"]).square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(PLAIN[case]["loss_f64"], rel=1e-11)
    check_gradients(net, PLAIN[case]["grad_l2"])


@pytest.mark.parametrize("case", CODERS)
def test_an_autoencoder(case: str) -> None:
    io, about, vae = tensors(f"vae_tiny/{case}"), CODERS[case], load_network(HOME / "vae_tiny" / CODERS[case]["folder"]).double()
    latents = vae.encode(io["image"])
    z, recon = latents.sample(io["noise"]), vae.decode(latents.mean)
    kl = 0.5 * (latents.mean.square() + latents.logvar.exp() - 1 - latents.logvar).flatten(1).sum(1)
    found = {"moments": latents.moments, "mean": latents.mean, "logvar": latents.logvar, "z": z, "z_scaled": vae.scale_latents(z)}
    found |= {"recon": recon, "decoded": vae.decode(io["latent"])}
    found |= {"decoded_unscaled": vae.decode(vae.unscale_latents(io["latent"]))}
    for name, value in found.items():
        near(value, io[f"{name}_f64"])
    np.testing.assert_allclose(kl.detach(), io["kl_f64"], rtol=1e-11)
    near(vae(io["image"]), io["recon_f64"])
    loss = (recon - io["image"]).square().mean() + about["kl_weight"] * kl.mean()
    loss.backward()
    assert loss.item() == pytest.approx(about["loss"], rel=1e-11)
    check_gradients(vae, about["grad_l2"])


def test_logarithms_of_variances_are_clamped() -> None:
    latents = VAE(VAEConfig(channels=(4,), groups=2, blocks=1)).encode(torch.zeros(1, 3, 4, 4))
    wild = latents._replace(moments=torch.tensor([0.0, 0.0, -1e3, 1e3]).view(1, 4, 1, 1))
    assert wild.logvar.flatten().tolist() == [-30.0, 20.0]
    assert wild.sample(torch.ones(1, 2, 1, 1)).flatten().tolist() == pytest.approx([np.exp(-15.0), np.exp(10.0)])


FLUX_VAE = VAEConfig(latents=16, quantised=False, scale=0.3611, shift=0.1159)
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "sd2_base_unet": (UNet, UNetConfig()), "sd_vae": (VAE, VAEConfig()), "flux_vae": (VAE, FLUX_VAE),
    "dit_xl_2_256": (DiT, DiTConfig()), "flux1_schnell": (Flux, FluxConfig()), "flux1_dev": (Flux, FluxConfig(guidance=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_of_published_networks(name: str) -> None:
    known, (kind, cfg) = json.loads(gzip.decompress((HOME / "names" / f"{name}.json.gz").read_bytes())), PUBLISHED[name]
    with torch.device("meta"):
        state = kind(cfg).state_dict()
    assert {key: list(x.shape) for key, x in state.items()} == dict(known["tensors"]) and len(state) == known["tensor_count"]
    assert sum(x.numel() for x in state.values()) == known["total"]
    assert DIFFUSERS_CLASSES[known["class"]].from_config({"_class_name": known["class"], **known["config"]}, HOME / "names") == cfg
