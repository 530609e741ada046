"""Latents and texts: sampling of latents from moments, the empty text for guidance, initial weights of diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.errors import CheckpointError, ConfigError
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig, load_deferred, loss, save_folder, score
from hpcai.models.diffusion.noise import EVAL_LATENTS, LATENTS, normals
from hpcai.nn.deferred_init import deferred, materialize

WORDS: dict[str, Any] = {
    "unet": {"inputs": 2, "outputs": 2, "tokens": 6, "channels": (8, 16), "blocks": 1, "attention": ("cross", "none"),
             "heads": (1, 2), "groups": 4, "zero": False},
    "flux": {"inputs": 8, "double": 1, "single": 1, "heads": 2, "head": 12, "tokens": 6, "pooled": 4, "turned": (2, 4, 6),
             "zero": False},
}  # fmt: skip


def model(kind: str = "unet", **words: Any) -> Diffusion:
    torch.manual_seed(0)
    latents = {"scale": 0.5, "shift": 0.25, "tokens": (3, 6), "pooled": 4 if kind == "flux" else None}
    flow = {"objective": {"prediction_type": "flow"}, "sampler": {"method": "euler"}}
    known = {"unet": None, kind: WORDS[kind], "latents": latents, **flow}
    made = Diffusion(DiffusionConfig.model_validate(known | words), seed=3).double()
    for name in ("tokens", "pooled"):
        empty = getattr(made, f"no_{name}")
        if empty is not None:
            empty.copy_(torch.randn(empty.shape))
    return made


def batch(count: int = 6, kind: str = "unet", epoch: int = 2) -> Batch:
    draw = torch.Generator().manual_seed(1)
    moments = torch.randn(count, 4, 8, 8, generator=draw).half()
    tokens, pooled = torch.randn(count, 3, 6, generator=draw).half(), torch.randn(count, 4, generator=draw).half()
    number = torch.arange(10, 10 + count)
    when = torch.full((count,), epoch)
    return Batch(moments, number, when, tokens=tokens, pooled=pooled if kind == "flux" else None)


class Recorder(nn.Module):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.seen = network, list[tuple[Tensor, Tensor, Condition]]()

    def forward(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        self.seen.append((x, time, condition))
        return self.network(x, time, condition)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", WORDS)
def test_latents_are_sampled_from_moments_by_counter_and_scaled(kind: str) -> None:
    made, whole = model(kind), batch(kind=kind)
    recorder = made.network = Recorder(made.network)
    loss(made, whole)
    score(made, whole)
    mean, logvar = whole.sample.double().chunk(2, 1)
    for (x, time, _), use, noise, epoch in zip(recorder.seen, (LATENTS, EVAL_LATENTS), (0, 5), (2, 0)):
        fresh, added = (normals(3, what, whole.indices, epoch, (2, 8, 8), dtype=torch.float64) for what in (use, noise))
        x0 = (mean + (logvar / 2).exp() * fresh - 0.25) * 0.5
        share = time.view(-1, 1, 1, 1)
        torch.testing.assert_close(x, (1 - share) * x0 + share * added, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.prepare_sample(whole.sample.double()), (mean - 0.25) * 0.5)


@pytest.mark.parametrize("kind", WORDS)
def test_a_fraction_of_training_samples_has_the_empty_text_and_guidance_compares_with_it(kind: str) -> None:
    made, whole = model(kind, unconditional=0.4), batch(100, kind)
    recorder = made.network = Recorder(made.network)
    loss(made, whole)
    score(made, whole)
    (_, _, left), (_, _, kept) = recorder.seen
    for name in ("tokens", "pooled") if kind == "flux" else ("tokens",):
        given, some, all_ = (getattr(one, name) for one in (whole, left, kept))
        gone = (some == getattr(made, f"no_{name}").to(some.dtype)).flatten(1).all(1)
        assert 20 < int(gone.sum()) < 60 and torch.equal(some[~gone], given[~gone]) and torch.equal(all_, given)

    recorder.seen.clear()
    sampler = made.cfg.sampler.model_copy(update={"guidance": 3.0, "steps": 1})
    few = batch(2, kind).condition
    found = made.sample(few, size=(2, 8, 8), sampler=sampler)
    nothing = made.unconditional(few)
    assert torch.equal(recorder.seen[0][2].tokens[-2:], nothing.tokens) and not torch.equal(nothing.tokens, few.tokens)  # type: ignore[index, arg-type]
    torch.testing.assert_close(made.sample(few, size=(2, 8, 8), sampler=sampler, unconditional=nothing), found, rtol=0, atol=0)


def test_unconditional_of_each_condition() -> None:
    words = {"inputs": 1, "outputs": 1, "tokens": None, "channels": (8,), "blocks": 1, "attention": ("none",), "middle": "none",
             "heads": (1,), "groups": 4, "classes": 5, "parameters": 3, "field": 1}  # fmt: skip
    made = Diffusion(DiffusionConfig.model_validate({"unet": words}))
    given = Condition(torch.tensor([0, 4]), torch.ones(2, 3), None, None, torch.ones(2, 1, 4, 4), torch.ones(2))
    found = made.unconditional(given)
    assert found.classes.tolist() == [5, 5] and not found.parameters.any() and not found.field.any()  # type: ignore[union-attr]
    assert found.tokens is None and torch.equal(found.guidance, torch.ones(2)), "the strength of guidance is no condition"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no embedding of the empty text: the settings have no latents\.tokens"):
        made.unconditional(Condition(tokens=torch.zeros(2, 3, 6)))


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("form", ["folder", "ours"])
def test_training_may_begin_with_weights_of_diffusers(kind: str, form: str, tmp_path: Path) -> None:
    made = model(kind).float()
    if form == "folder":
        save_folder(made.network.state_dict(), made.cfg.network, tmp_path)
    else:
        made.save(tmp_path / "model.safetensors")
        assert torch.equal(Diffusion.load(tmp_path).no_tokens, made.no_tokens) and made.no_tokens.any()
    with deferred(0):
        begun = load_deferred(Diffusion(made.cfg, seed=3), tmp_path, lambda model: model)
    materialize(begun, "cpu")
    assert begun.training and torch.equal(begun.no_tokens, made.no_tokens) == (form == "ours")
    for name, parameter in begun.named_parameters():
        assert torch.equal(parameter, made.get_parameter(name)), name

    words = {**WORDS[kind], "heads": (2, 2) if kind == "unet" else 1, "turned": (4, 8, 12), "head": 24}
    other = DiffusionConfig.model_validate({"unet": None, kind: {n: words[n] for n in WORDS[kind]}})
    with pytest.raises(CheckpointError, match="the settings|expected|not the weights"), deferred(0):
        load_deferred(Diffusion(other), tmp_path, lambda model: model)
    another = model("flux" if kind == "unet" else "unet")
    with pytest.raises(CheckpointError, match="the weights are of a (UNet|Flux), the settings of model name a (UNet|Flux)"):
        load_deferred(another, tmp_path, lambda model: model)
