"""Networks of random shapes, converted to and from diffusers, have equal outputs and gradients."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.diffusion import VAE, Condition, Diffusion, UNet, UNetConfig, VAEConfig, draw_samples, load_network, save_folder
from hpcai.models.diffusion.config import DiffusionConfig, DiffusionLoRAConfig, DiTConfig, FluxConfig, SD3Config
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux, pack_latents
from hpcai.models.diffusion.load import to_config
from hpcai.models.diffusion.lora import adapt, load_adapter, merge, save_adapter
from hpcai.models.diffusion.sd3 import SD3
from tests.captions import save_text_encoders

_WHY = "diffusers is not installed: conversion to and from diffusers is NOT tested; pip install hpcai-suite[peers]"
diffusers: Any = pytest.importorskip("diffusers", reason=_WHY)

from diffusers.models import embeddings, normalization  # noqa: E402
from diffusers.models.transformers import transformer_flux  # noqa: E402


@pytest.fixture(autouse=True)
def compute_in_float64(monkeypatch: pytest.MonkeyPatch, quiet_hugging_face: None) -> None:
    """Have diffusers compute sinusoidal and rotary embeddings and norms in float64 instead of float32."""
    double = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
    for module in (embeddings, normalization, transformer_flux):
        monkeypatch.setattr(module, "torch", double)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def draw_shapes(draw: random.Random) -> dict[str, Any]:
    levels = draw.choice((1, 2, 3))
    return {
        "channels": tuple(draw.choice((8, 12, 16)) for _ in range(levels)), "blocks": draw.choice((1, 2)),
        "groups": draw.choice((2, 4)), "inputs": draw.choice((1, 3)), "outputs": draw.choice((1, 2)),
    }  # fmt: skip


def random_unet(seed: int, kind: str) -> UNetConfig:
    draw = random.Random(seed)
    sizes = draw_shapes(draw)
    attention = tuple(draw.choice((kind, "none")) for _ in sizes["channels"])
    heads = tuple(draw.choice((2, 4)) for _ in attention)
    if kind == "self":
        attends = [level == kind for level in (*attention[:-1], kind)]  # the middle has the heads of the lowest level
        heads = tuple(n // 4 if attend else 1 for n, attend in zip(sizes["channels"], attends))
    extra = {"classes": draw.choice((None, 5)), "eps": draw.choice((1e-5, 1e-3)), "tokens": 6 if kind == "cross" else None}
    return UNetConfig(**sizes, **extra, attention=attention, middle=kind, heads=heads)


def random_vae(seed: int) -> VAEConfig:
    draw = random.Random(seed)
    extra = {"latents": draw.choice((2, 4)), "quantised": draw.random() < 0.5, "attention": draw.random() < 0.7}
    return VAEConfig(**draw_shapes(draw), **extra, shift=draw.choice((0.0, 0.1)), scale=0.4)


SIZES = torch.tensor([[512, 768, 0, 17, 256, 384], [64, 64, 3, 0, 1024, 1024]])
CONFIGS: dict[str, Any] = {
    **{f"{kind} attention {seed}": random_unet(seed, kind) for kind in ("cross", "self") for seed in range(4)},
    **{f"autoencoder {seed}": random_vae(seed) for seed in range(4)},
    "dit": DiTConfig(inputs=3, outputs=3, size=6, patch=3, layers=1, heads=3, head=4, classes=5),
    "dit of two outputs": DiTConfig(inputs=1, outputs=2, size=8, patch=1, layers=3, heads=1, head=8, classes=1),
    "flux": FluxConfig(inputs=4, double=1, single=3, heads=3, head=8, tokens=6, pooled=5, turned=(4, 2, 2)),
    "sdxl": UNetConfig(
        inputs=2, outputs=2, channels=(8, 12, 16), blocks=1, groups=4, attention=("none", "cross", "cross"), heads=(1, 2, 4),
        tokens=6, pooled=7, sizes=4, transformer_layers=(1, 3, 2),
    ),
    "sd3": SD3Config(
        inputs=3, outputs=1, size=10, positions=5, layers=2, heads=3, head=8, tokens=6, pooled=5, dual_attention=(), qk_norm=None
    ),
    "sd3.5": SD3Config(
        inputs=2, outputs=2, size=8, positions=9, layers=3, heads=1, head=12, tokens=7, pooled=4, dual_attention=(0, 2)
    ),
    "flux with guidance": FluxConfig(
        inputs=8, double=3, single=1, heads=1, head=6, tokens=9, pooled=2, turned=(2, 2, 2), guidance=True
    ),
}  # fmt: skip


def compute_outputs(model: Any, peer: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of both networks for one sample."""
    draw, cfg = torch.Generator().manual_seed(0), model.cfg

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    if isinstance(cfg, VAEConfig):
        x = randn(2, cfg.inputs, 12, 20)
        latents, peer_latents = model.encode(x), peer.encode(x).latent_dist
        torch.testing.assert_close(latents.moments, peer_latents.parameters, rtol=1e-11, atol=1e-11)
        return model.decode(latents.mean), peer.decode(peer_latents.mean).sample
    if isinstance(cfg, FluxConfig):
        x, time = randn(2, cfg.inputs // 4, 4, 6), torch.rand(2, generator=draw, dtype=torch.float64)
        strength = time + 1 if cfg.guidance else None
        condition = Condition(tokens=randn(2, 3, cfg.tokens), pooled=randn(2, cfg.pooled), guidance=strength)
        expected = peer(
            hidden_states=pack_latents(x), timestep=time, encoder_hidden_states=condition.tokens,
            pooled_projections=condition.pooled, guidance=strength, txt_ids=torch.zeros(3, 3, dtype=torch.float64),
            img_ids=torch.tensor([[0.0, i, j] for i in range(2) for j in range(3)], dtype=torch.float64),
        ).sample  # fmt: skip
        return pack_latents(model(x, time, condition)), expected
    if isinstance(cfg, SD3Config):
        x, time = randn(2, cfg.inputs, 6, 10), torch.rand(2, generator=draw, dtype=torch.float64)
        condition = Condition(tokens=randn(2, 3, cfg.tokens), pooled=randn(2, cfg.pooled))
        return model(x, time, condition), peer(x, condition.tokens, condition.pooled, 1000 * time).sample
    times = torch.tensor([3, 700])
    if isinstance(cfg, DiTConfig):
        x, classes = randn(2, cfg.inputs, cfg.size, cfg.size), torch.tensor([cfg.classes, cfg.classes - 1])
        return model(x, times, Condition(classes=classes)), peer(x, timestep=times, class_labels=classes).sample
    x = randn(2, cfg.inputs, *((9, 12) if cfg.tokens else (8, 12)))  # UNet2DModel of diffusers refuses odd sides
    classes, tokens = torch.tensor([4, 0]) if cfg.classes else None, randn(2, 5, 6) if cfg.tokens else None
    kwargs: dict[str, Any] = {"encoder_hidden_states": tokens} if cfg.tokens else {}
    condition = Condition(classes=classes, tokens=tokens)
    if cfg.pooled:
        condition = condition._replace(pooled=randn(2, cfg.pooled), sizes=SIZES)
        kwargs["added_cond_kwargs"] = {"text_embeds": condition.pooled, "time_ids": SIZES}
    return model(x, times, condition), peer(x, times, class_labels=classes, **kwargs).sample


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "sd3 without T5"])
def test_texts_are_encoded_as_by_pipelines(kind: str, tmp_path: Path) -> None:
    why = "diffusers cannot import its pipelines with these versions: texts of SDXL and SD3 are NOT tested"
    names = {"sdxl": "stable_diffusion_xl.pipeline_stable_diffusion_xl", "sd3": "stable_diffusion_3.pipeline_stable_diffusion_3"}
    transformers = pytest.importorskip("transformers", reason=why)
    module = pytest.importorskip(f"diffusers.pipelines.{names[kind.split()[0]]}", reason=why, exc_type=ImportError)
    from data_prep import encoders

    torch.manual_seed(1)
    save_text_encoders(tmp_path, kind)
    (tmp_path / "vae").mkdir()
    absent = ("unet",) if kind == "sdxl" else ("transformer", "text_encoder_3", "tokenizer_3")
    parts: dict[str, Any] = dict.fromkeys(("vae", "scheduler", *absent))
    for folder in sorted(tmp_path.glob("text_encoder*")):
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        tokenizer = folder.name.replace("text_encoder", "tokenizer")
        parts[folder.name] = getattr(transformers, architecture).from_pretrained(folder).eval()
        parts[tokenizer] = transformers.AutoTokenizer.from_pretrained(tmp_path / tokenizer, model_max_length=9)
    pipeline = (module.StableDiffusionXLPipeline if kind == "sdxl" else module.StableDiffusion3Pipeline)(**parts)
    kwargs: dict[str, Any] = {}
    if kind != "sdxl":
        pipeline.transformer = SimpleNamespace(config=SimpleNamespace(joint_attention_dim=40))
        kwargs = {"prompt_2": None, "prompt_3": None, "max_sequence_length": 5, "device": torch.device("cpu")}
    captions = ["a red cat", "the moon on a dog and a cat on the moon", ""]
    with torch.no_grad():
        tokens, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, **kwargs)
    cfg = encoders.resolve_networks(tmp_path, None, None, None, kwargs.get("max_sequence_length"), True, "float32", "cpu")
    texts = encoders.load_networks(replace(cfg, vae=None)).text_encoders
    for name, expected in (("tokens", tokens), ("pooled", pooled)):
        actual, truncated = texts[name].encode(captions, captions)
        assert actual.shape[1:] == texts[name].shape and truncated == 1
        torch.testing.assert_close(actual, expected.double(), rtol=1e-5, atol=1e-6)
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    with pytest.raises(ConfigError, match="model_index.json: a KandinskyPipeline, expected SDXL or SD3; name the encoders singly"):
        encoders.resolve_networks(tmp_path, None, None, None, None, True, "float32", "cpu")


# Blocks with attention of "sdxl", by their names in the code of latent diffusion and in kohya's files, and their channels
LDM = {"input_blocks_3_1": 12, "input_blocks_5_1": 16, "middle_block_1": 16, "output_blocks_1_1": 16, "output_blocks_2_1": 12}
KINDS = {"cross attention 1": "unet", "sdxl": "unet", "flux": "flux", "sd3.5": "sd3"}


@pytest.mark.parametrize("name", KINDS)
def test_adapters_of_diffusers_and_kohya_are_read_and_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: files of adapters are NOT tested; pip install hpcai-suite[peers]")
    why = "diffusers cannot import its loaders with these versions: files of adapters are NOT tested"
    conversion = pytest.importorskip("diffusers.loaders.lora_conversion_utils", reason=why, exc_type=ImportError)
    pytest.importorskip("diffusers.pipelines.pipeline_loading_utils", reason=why, exc_type=ImportError)

    kind, prefix = KINDS[name], "unet" if KINDS[name] == "unet" else "transformer"
    cfg, path = CONFIGS[name].model_copy(update={"zero": False}), tmp_path / "kohya.safetensors"

    def new_model(adapters: Path | None = None) -> Any:
        torch.manual_seed(0)
        model = Diffusion(DiffusionConfig(**{"unet": None, kind: cfg})).double().eval()
        _ = adapters and load_adapter(model, adapters)
        return model

    def check(source: Any, *models: Any, **kwargs: Any) -> Any:
        save_folder(new_model().network.state_dict(), cfg, tmp_path)
        peer = diffusers.AutoModel.from_pretrained(str(tmp_path), torch_dtype=torch.float64)
        peer.load_lora_adapter(source, prefix=prefix, adapter_name="default", **kwargs)
        for model in models:
            actual, expected = compute_outputs(model.network, peer)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        assert (compute_outputs(new_model().network, peer)[0] - expected).abs().max() > 1e-3
        return peer

    model, pattern = new_model(), {"attn1.to_q" if kind == "unet" else "transformer_blocks.0.attn.to_q": 3}
    adapt(model, DiffusionLoRAConfig(rank=2, alpha=6.0, rank_pattern=pattern, alpha_pattern=pattern))
    for parameter in (p for p in model.parameters() if p.requires_grad):
        nn.init.normal_(parameter, std=0.3)
    save_adapter(model, tmp_path)
    peer = check(tmp_path, model, new_model(tmp_path), weight_name="pytorch_lora_weights.safetensors")
    peer.save_lora_adapter(tmp_path / "theirs")
    check(tmp_path, merge(model), new_model(tmp_path / "theirs"), weight_name="pytorch_lora_weights.safetensors")

    if kind == "sd3":
        return
    layers = {key.replace(".", "_"): x.weight.shape for key, x in new_model().network.named_modules() if key.endswith("to_out.0")}
    if name == "sdxl":
        layers = {f"{block}_transformer_blocks_0_attn2_to_out_0": (n, n) for block, n in LDM.items()}
    fused = {"double_blocks_0_img_attn_qkv": (72, 24), "single_blocks_1_linear2": (24, 120)}
    state = {"lora_te_text_model.lora_up.weight": torch.ones(2)}
    for rank, (key, (rows, columns)) in enumerate((fused if kind == "flux" else layers).items(), 2):
        up, down = torch.randn(rows, rank, dtype=torch.float64), torch.randn(rank, columns, dtype=torch.float64)
        state |= {f"lora_unet_{key}.{part}": x for part, x in (("lora_down.weight", down), ("lora_up.weight", up))}
        state[f"lora_unet_{key}.alpha"] = torch.tensor(1.0)  # diffusers reads one alpha for all attention layers of a U-Net
    save_file(state, path)
    unet = {name: x for name, x in state.items() if "unet" in name}
    if kind == "unet":
        theirs = diffusers.UNet2DConditionModel.load_config(str(tmp_path))
        in_blocks = conversion._maybe_map_sgm_blocks_to_diffusers(dict(unet), SimpleNamespace(**theirs))
        converted, alphas = conversion._convert_non_diffusers_lora_to_diffusers(in_blocks)
    else:
        converted, alphas = conversion._convert_kohya_flux_lora_to_diffusers(dict(unet)), None
    check(converted, new_model(path), network_alphas=alphas)
    for fault, tensor in (("dora_scale", torch.ones(2)), ("lora_up.weight", torch.ones(5, 2))):
        save_file({**unet, f"lora_unet_{key}.{fault}": tensor}, path)
        with pytest.raises(CheckpointError, match="is it of this network"):
            new_model(path)


EULER: dict[str, Any] = {"method": "euler", "steps": 5}
SCHEDULERS: dict[str, tuple[dict[str, Any], Any]] = {  # of published folders
    "sdxl": ({"objective": {"prediction_type": "epsilon"}, "sampler": {**EULER, "spacing": "leading", "offset": 1}},
             diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1,
                                              timestep_spacing="leading")),
    "sd3.5": ({"objective": {"prediction_type": "flow"}, "sampler": {**EULER, "spacing": "linspace", "shift": 3.0}},
              diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_samples_are_those_of_the_loop_of_a_pipeline(name: str) -> None:
    (settings, scheduler), cfg = SCHEDULERS[name], CONFIGS[name].model_copy(update={"zero": False})
    torch.manual_seed(0)
    model = Diffusion(DiffusionConfig(**{"unet": None, KINDS[name]: cfg, **settings})).double().eval()
    config = to_config(cfg) or {}
    peer = getattr(diffusers, config["_class_name"]).from_config(config).double().eval()
    peer.load_state_dict(model.network.state_dict())
    tokens, pooled, noise = (torch.randn(2, *n, dtype=torch.float64) for n in ((3, cfg.tokens), (cfg.pooled,), (2, 8, 12)))
    condition, kwargs = Condition(tokens=tokens, pooled=pooled), {"pooled_projections": pooled}
    if name == "sdxl":
        condition, kwargs = condition._replace(sizes=SIZES), {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": SIZES}}
    scheduler.set_timesteps(5)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    with torch.no_grad():
        for time in scheduler.timesteps:
            y = scheduler.scale_model_input(x, time) if name == "sdxl" else x
            output = peer(y, timestep=time.expand(2), encoder_hidden_states=tokens, **kwargs).sample
            x = scheduler.step(output, time, x).prev_sample.double()
    actual = draw_samples(model.network, model.objective, model.cfg.sampler, noise, condition)
    torch.testing.assert_close(actual, x, rtol=0, atol=2e-5 * x.abs().max().item())  # steps of diffusers are in float32


def test_adapters_in_the_names_of_stable_diffusion_3_are_read(tmp_path: Path) -> None:
    """In kohya's files. diffusers converts weights of these names, here their changes."""
    why = "diffusers cannot import its loaders with these versions: adapters in the names of Stable Diffusion 3 are NOT tested"
    module = pytest.importorskip("diffusers.loaders.single_file_utils", reason=why, exc_type=ImportError)
    x, text = "x_block", "context_block"
    shapes = {
        f"0.{x}.attn2.qkv": (36, 12), f"2.{x}.attn2.proj": (12, 12), f"1.{x}.attn.proj": (12, 12), f"0.{text}.attn.proj": (12, 12),
        f"1.{x}.mlp.fc1": (48, 12), f"2.{x}.mlp.fc2": (12, 48), f"0.{text}.mlp.fc1": (48, 12), f"1.{text}.mlp.fc2": (12, 48),
        f"0.{x}.adaLN_modulation.1": (108, 12), f"1.{text}.adaLN_modulation.1": (72, 12), f"2.{text}.adaLN_modulation.1": (24, 12),
        **{f"{n}.{part}.attn.qkv": (36, 12) for part in (x, text) for n in range(3)},
    }  # fmt: skip
    state, kind = dict[str, Tensor](), type("Changes", (dict,), {"pop": lambda self, key, *_: self.get(key, torch.zeros(6))})
    changes: Any = kind({"context_embedder.weight": torch.zeros(12, 7)})  # zero for other weights
    for name, (rows, columns) in shapes.items():
        up, down = torch.randn(rows, 4, dtype=torch.float64), torch.randn(4, columns, dtype=torch.float64)
        key, changes[f"joint_blocks.{name}.weight"] = f"lora_unet_joint_blocks_{name.replace('.', '_')}", up @ down / 2
        state |= {f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down, f"{key}.alpha": torch.tensor(2.0)}
    save_file(state, tmp_path / "kohya.safetensors")
    model = Diffusion(DiffusionConfig(unet=None, sd3=CONFIGS["sd3.5"])).double()
    before = {name: x.clone() for name, x in model.network.state_dict().items()}
    load_adapter(model, tmp_path / "kohya.safetensors")
    converted = module.convert_sd3_transformer_checkpoint_to_diffusers(changes)
    expected = {name: change for name, change in converted.items() if change.any()}
    assert len(expected) == sum(3 if "qkv" in name else 1 for name in shapes)
    for name, weight in merge(model).network.state_dict().items():
        torch.testing.assert_close(weight - before[name], expected.get(name, torch.zeros_like(weight)), rtol=1e-12, atol=1e-12)


def check_same(model: nn.Module, peer: nn.Module) -> None:
    actual, expected = compute_outputs(model.zero_grad() or model.double().eval(), peer.zero_grad() or peer.double().eval())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * max(1, expected.abs().max().item()))
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for value in (actual, expected):
        (value * weights).sum().backward()
    gradients = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = gradients[name].view_as(parameter)
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-9 * max(1.0, gradient.abs().max().item()))


@pytest.mark.parametrize("name", CONFIGS)
def test_hpcai_and_diffusers_read_each_others_folders(name: str, tmp_path: Path) -> None:
    cfg = CONFIGS[name]
    torch.manual_seed(0)
    model: Any = {UNetConfig: UNet, VAEConfig: VAE, DiTConfig: DiT, FluxConfig: Flux, SD3Config: SD3}[type(cfg)](cfg)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.3)
    save_folder(model.state_dict(), cfg, tmp_path / "hpcai", shard=random.Random(name).choice((10**9, 20_000)))
    kind = json.loads((tmp_path / "hpcai/config.json").read_text())["_class_name"]
    peer, loading_info = getattr(diffusers, kind).from_pretrained(tmp_path / "hpcai", output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    check_same(model, peer)
    peer.save_pretrained(tmp_path / "diffusers")
    reloaded = load_network(tmp_path / "diffusers")
    assert reloaded.cfg.model_dump(exclude={"zero", "heads"}) == cfg.model_dump(exclude={"zero", "heads"})
    check_same(reloaded, peer)


def test_networks_saved_by_diffusers_load(tmp_path: Path) -> None:
    """The folder omits settings that hpcai writes; each transformer begins and ends with a convolution."""
    torch.manual_seed(0)
    peer = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=6,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=4, attention_head_dim=2, use_linear_projection=False,
    )  # fmt: skip
    peer.save_pretrained(tmp_path)
    check_same(load_network(tmp_path), peer)
