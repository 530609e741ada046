"""Latents and texts: sampling of latents from moments, the empty text for guidance, initial weights from diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig, load_deferred, loss, save_folder, score
from hpcai.models.diffusion.noise import EVAL_LATENTS, LATENTS, normals
from hpcai.nn.deferred_init import deferred, materialize

NETWORKS: dict[str, Any] = {
    "unet": {"inputs": 2, "outputs": 2, "tokens": 6, "channels": (8, 16), "blocks": 1, "attention": ("cross", "none"),
             "heads": (1, 2), "groups": 4, "zero": False},
    "flux": {"inputs": 8, "double": 1, "single": 1, "heads": 2, "head": 12, "tokens": 6, "pooled": 4, "turned": (2, 4, 6),
             "zero": False},
    "sd3": {"inputs": 2, "outputs": 2, "size": 8, "positions": 4, "layers": 2, "heads": 2, "head": 12, "tokens": 6, "pooled": 4,
            "dual_attention": (0,), "zero": False},
}  # fmt: skip
NETWORKS["sdxl"] = {**NETWORKS["unet"], "transformer_layers": (2, 1), "pooled": 4, "sizes": 4}


FIELDS = {"sdxl": "unet"}


def new_model(kind: str = "unet", **overrides: Any) -> Diffusion:
    torch.manual_seed(0)
    latents = {"scale": 0.5, "shift": 0.25, "tokens": (3, 6), "pooled": None if kind == "unet" else 4}
    flow = {"objective": {"prediction_type": "flow"}, "sampler": {"method": "euler"}}
    settings = {"unet": None, FIELDS.get(kind, kind): NETWORKS[kind], "latents": latents, **flow}
    diffusion = Diffusion(DiffusionConfig.model_validate(settings | overrides), seed=3).double()
    for name in ("tokens", "pooled"):
        empty = getattr(diffusion, f"no_{name}")
        if empty is not None:
            empty.copy_(torch.randn(empty.shape))
    return diffusion


def random_batch(count: int = 6, kind: str = "unet", epoch: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1)
    moments = torch.randn(count, 4, 8, 8, generator=generator).half()
    tokens, pooled = torch.randn(count, 3, 6, generator=generator).half(), torch.randn(count, 4, generator=generator).half()
    indices = torch.arange(10, 10 + count)
    epochs = torch.full((count,), epoch)
    sizes = torch.arange(6 * count).view(count, 6) if kind == "sdxl" else None
    return Batch(moments, indices, epochs, tokens=tokens, pooled=None if kind == "unet" else pooled, sizes=sizes)


class Recorder(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.calls = network, list[tuple[Tensor, Tensor, Condition]]()

    def forward(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        self.calls.append((x, time, condition))
        return self.network(x, time, condition)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", NETWORKS)
def test_latents_are_sampled_from_moments_by_counter_and_scaled(kind: str) -> None:
    model, batch = new_model(kind), random_batch(kind=kind)
    recorder = model.network = Recorder(model.network)
    loss(model, batch)
    score(model, batch)
    mean, logvar = batch.sample.double().chunk(2, 1)
    for (x, time, _), use, noise, epoch in zip(recorder.calls, (LATENTS, EVAL_LATENTS), (0, 5), (2, 0)):
        fresh, added = (normals(3, stream, batch.indices, epoch, (2, 8, 8), dtype=torch.float64) for stream in (use, noise))
        x0 = (mean + (logvar / 2).exp() * fresh - 0.25) * 0.5
        weight = time.view(-1, 1, 1, 1)
        torch.testing.assert_close(x, (1 - weight) * x0 + weight * added, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.prepare_sample(batch.sample.double()), (mean - 0.25) * 0.5)


@pytest.mark.parametrize("kind", NETWORKS)
def test_training_drops_a_fraction_of_texts_and_guidance_uses_the_empty_text(kind: str) -> None:
    model, batch = new_model(kind, unconditional=0.4), random_batch(100, kind)
    recorder = model.network = Recorder(model.network)
    loss(model, batch)
    score(model, batch)
    (_, _, training), (_, _, evaluation) = recorder.calls
    assert kind != "sdxl" or torch.equal(training.sizes, batch.sizes), "sizes are kept"
    for name in ("tokens",) if kind == "unet" else ("tokens", "pooled"):
        texts, trained, evaluated = (getattr(source, name) for source in (batch, training, evaluation))
        dropped = (trained == getattr(model, f"no_{name}").to(trained.dtype)).flatten(1).all(1)
        assert 20 < int(dropped.sum()) < 60 and torch.equal(trained[~dropped], texts[~dropped]) and torch.equal(evaluated, texts)

    recorder.calls.clear()
    sampler = model.cfg.sampler.model_copy(update={"guidance": 3.0, "steps": 1})
    condition = random_batch(2, kind).condition
    samples = model.sample(condition, size=(2, 8, 8), sampler=sampler)
    empty = model.unconditional(condition)
    assert torch.equal(recorder.calls[0][2].tokens[-2:], empty.tokens) and not torch.equal(empty.tokens, condition.tokens)  # type: ignore[index, arg-type]
    explicit = model.sample(condition, size=(2, 8, 8), sampler=sampler, unconditional=empty)
    torch.testing.assert_close(explicit, samples, rtol=0, atol=0)


def test_unconditional_of_each_condition() -> None:
    unet = {"inputs": 1, "outputs": 1, "tokens": None, "channels": (8,), "blocks": 1, "attention": ("none",), "middle": "none",
             "heads": (1,), "groups": 4, "classes": 5, "parameters": 3, "field": 1}  # fmt: skip
    model = Diffusion(DiffusionConfig.model_validate({"unet": unet}))
    condition = Condition(torch.tensor([0, 4]), torch.ones(2, 3), None, None, torch.ones(2, 1, 4, 4), torch.ones(2))
    empty = model.unconditional(condition)
    assert empty.classes.tolist() == [5, 5] and not empty.parameters.any() and not empty.field.any()  # type: ignore[union-attr]
    assert empty.tokens is None and torch.equal(empty.guidance, torch.ones(2)), "guidance strength is kept"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no embedding of the empty text: the settings have no latents\.tokens"):
        model.unconditional(Condition(tokens=torch.zeros(2, 3, 6)))


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("form", ["folder", "hpcai"])
def test_training_may_begin_with_weights_of_diffusers(kind: str, form: str, tmp_path: Path) -> None:
    model = new_model(kind).float()
    if form == "folder":
        save_folder(model.network.state_dict(), model.cfg.network, tmp_path)
    else:
        model.save(tmp_path / "model.safetensors")
        assert torch.equal(Diffusion.load(tmp_path).no_tokens, model.no_tokens) and model.no_tokens.any()
    with deferred(0):
        loaded = load_deferred(Diffusion(model.cfg, seed=3), tmp_path, lambda x: x)
    materialize(loaded, "cpu")
    assert loaded.training and torch.equal(loaded.no_tokens, model.no_tokens) == (form == "hpcai")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name

    is_unet = kind in ("unet", "sdxl")
    settings = {**NETWORKS[kind], "heads": (2, 2) if is_unet else 1, "turned": (4, 8, 12), "head": 24}
    network = {"unet": None, FIELDS.get(kind, kind): {n: settings[n] for n in NETWORKS[kind]}}
    other = DiffusionConfig.model_validate(network)
    with pytest.raises(CheckpointError, match="the settings|expected|not the weights"), deferred(0):
        load_deferred(Diffusion(other), tmp_path, lambda x: x)
    another = new_model("flux" if is_unet else "unet")
    with pytest.raises(CheckpointError, match="the weights are of a (UNet|Flux|SD3), the settings of model name a (UNet|Flux)"):
        load_deferred(another, tmp_path, lambda x: x)
