"""Multi-token prediction has the losses and gradients of its formulas, and is read and written as DeepSeek-V3 is published."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from apps.llm.data import complete_settings
from apps.llm.memory import flops_per_token
from apps.llm.settings import Config, StartConfig
from hpcai.errors import CheckpointError
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, SamplingConfig
from hpcai.models.llm.load import read_settings
from hpcai.models.llm.model import Layer, rotary_cos_sin
from hpcai.models.llm.objective import document_positions
from tests.ranks.language_model import LLAMA, MODELS

EXPERTS = {**MODELS["deepseek"]["experts"], "shared": 16}  # two shared experts in files


def build(seed: int = 0, **settings: Any) -> LLM:
    torch.manual_seed(seed)
    model = LLM(LLMConfig(**settings)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_the_formulas(packed: bool) -> None:
    model = build(**LLAMA, mtp_layers=2, mtp_loss=0.3, scaled_embedding=True, recompute="selective")
    tokens, counted = torch.randint(0, 25, (3, 17)), torch.rand(3, 17) < 0.8
    documents = (torch.rand(3, 17) < 0.2).cumsum(1) if packed else torch.zeros(3, 17, dtype=torch.int64)
    batch = Batch(tokens, documents if packed else None, counted)
    (total, count), (further, further_count) = (llm.loss(model, batch)[name] for name in ("loss", "mtp_loss"))
    actual = torch.autograd.grad(total, list(model.parameters()))

    states = list[Tensor]()
    hook = model.model.norm.register_forward_hook(lambda module, args, y: states.append(y))
    positions = document_positions(documents[:, :-1])
    main = model(tokens[:, :-1], batch.targets, positions, documents[:, :-1]).sum()
    hook.remove()
    rotary, (h,) = [rotary_cos_sin(cfg, 4, positions, torch.float64) for cfg in model.rotary_cfgs * 2], states
    sums, number = main.new_zeros(()), 0
    for k, layer in enumerate(model.model.mtp.layers, 1):  # type: ignore[union-attr]
        later = torch.cat((tokens[:, k:], tokens.new_zeros(3, k)), 1)[:, :16]
        joined = torch.cat((rms_norm(4 * model.model.embed_tokens(later), layer.enorm.weight), rms_norm(h, layer.hnorm.weight)), -1)
        h = rms_norm(Layer.forward(layer, joined @ layer.eh_proj.weight.T, rotary, documents[:, :-1]), layer.norm.weight)
        for row in range(3):
            for t in range(16 - k):
                if counted[row, t + k + 1] and documents[row, t] == documents[row, t + k + 1]:
                    sums, number = sums + F.cross_entropy(model.lm_head.weight @ h[row, t], tokens[row, t + k + 1]), number + 1
    expected = torch.autograd.grad(main + 0.3 / 2 * sums, list(model.parameters()))
    assert number == further_count < count * 2
    for a, b in zip((total, further, *actual), (main, sums, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1.0, b.abs().max().item()))
    assert llm.loss(model.eval(), batch).keys() == {"loss", "tokens"}


def test_folders_have_the_layers_with_copies_of_embedding_and_output_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(**MODELS["deepseek"] | {"experts": EXPERTS}, mtp_layers=2)
    state, cfg, file, ours = model.state_dict(), model.cfg, tmp_path / "model.safetensors", tmp_path / "ours.safetensors"
    llm.save_folder(state, cfg, tmp_path)
    model.save(ours)
    for loaded in (LLM.load(tmp_path), LLM.load(ours)):
        torch.testing.assert_close(dict(loaded.state_dict()), dict(state), rtol=0, atol=0)
    stored, without = load_file(file), cfg.model_copy(update={"mtp_layers": 0})
    assert torch.equal(stored["model.layers.3.embed_tokens.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(stored["model.layers.2.shared_head.head.weight"], state["lm_head.weight"])
    models = model, LLM.load(tmp_path, without), LLM.load(ours, without)
    sampled = [llm.complete(each, [[1, 2, 3]], SamplingConfig(most=8)) for each in models]
    assert sampled[0] == sampled[1] == sampled[2]
    for settings, layers in ({}, 2), ({"mtp_layers": 1}, 1), ({"mtp_layers": 0}, 0):
        chosen = complete_settings(Config(model=LLMConfig(**settings), start=StartConfig(weights=tmp_path))).model
        assert chosen.mtp_layers == LLM.load(tmp_path, chosen).cfg.mtp_layers == layers and not caplog.records
    save_file(stored | {"model.layers.3.embed_tokens.weight": stored["lm_head.weight"]}, file)
    with pytest.raises(CheckpointError, match="layers.3.embed_tokens.weight differs from model.embed_tokens.weight; set num_nextn"):
        LLM.load(tmp_path)
    save_file({name: value for name, value in stored.items() if "layers.3.enorm" not in name}, file)
    with pytest.raises(CheckpointError, match=r"has no model\.layers\.3\.enorm\.weight"):
        LLM.load(tmp_path)
    save_file({name: value for name, value in stored.items() if "layers.2." not in name and "layers.3." not in name}, file)
    assert read_settings(tmp_path).mtp_layers == 0 and "no tensors of the 2 layers" in caplog.text


def test_parameters_and_flops_of_deepseek_v3() -> None:
    with pytest.raises(ValueError, match="mtp_layers is 1, but positions are learned"):
        LLMConfig(mtp_layers=1, rotary=None)
    plain, cfg = (LLMConfig.preset("deepseek-v3", mtp_layers=n) for n in (0, 1))
    added, active = (getattr(cfg, name) - getattr(plain, name) for name in ("num_parameters", "num_active_parameters"))
    assert plain.num_parameters == 671_026_419_200 - 58 * 256 and round((added - 2 * 7168**2) / 1e9, 1) == 11.5, (
        "published: with biases of experts, which are buffers; without eh_proj, embedding and output layer"
    )
    flops = [flops_per_token(Config(model=each), 4096, False) for each in (plain, cfg)]
    assert flops[1] - flops[0] == 6 * (active + 129_280 * 7168) + 12 * 128 * 192 * 4096
