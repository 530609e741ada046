"""Language models agree with stored results of Hugging Face's transformers (tests/data/llm)."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from apps.llm.data import complete_settings
from apps.llm.settings import Config, StartConfig
from hpcai import dist, train
from hpcai.errors import CheckpointError, ConfigError, DataError, HpcaiError
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig, SamplingConfig, complete
from hpcai.models.llm.families import comparable, read_config
from hpcai.models.llm.generation import filter_logits, sample_tokens
from hpcai.models.llm.load import hub_state
from hpcai.models.llm.model import Layer, rotary_cos_sin, rotary_frequencies
from hpcai.models.llm.mxfp4 import Mxfp4View
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.nn.safetensors_files import open_tensors, read_full
from hpcai.settings import StepConfig
from tests.ranks.language_model import MODELS
from tests.reference_data import DATA, load_arrays, load_json

CASES = ["llama2_tiny", "llama31_tiny", "llama31_short_tiny", "gpt2_tiny"]
EXPERTS, OTHERS = ["mixtral_tiny", "qwen2moe_tiny"], ["mistral_tiny", "qwen2_tiny", "qwen3_tiny"]
SIZES = load_json("llm/real_sizes")
PRESETS = {size["preset"]: name for name, size in SIZES.items() if "preset" in size}


def model_folder(case: str) -> Path:
    return DATA / "llm" / case / "hf"


def load_model(case: str) -> Any:
    return LLM.load(model_folder(case)).double()


def load_batch(case: str) -> Batch:
    stored = load_arrays(f"llm/{case}/io")
    ids, labels = torch.from_numpy(stored["ids"]), torch.from_numpy(stored["labels"])
    return Batch(ids, loss_mask=labels != -100)


def to_hub(case: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of parameters with the names and layouts of the files."""
    return hub_state(tensors, read_config(model_folder(case)))


def check_checksums(tensors: dict[str, Tensor], expected: dict[str, Any], tolerance: float) -> None:
    """Compare the L2 norm, the sum, and the sum times cos(index), which differs for a transposed or permuted tensor."""
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        flat, sums = tensor.detach().flatten(), expected[name]
        values = {"l2": flat.norm(), "sum": flat.sum(), "cos": (flat * torch.arange(len(flat), dtype=flat.dtype).cos()).sum()}
        for kind, value in values.items():
            assert value.item() == pytest.approx(sums[kind], abs=tolerance * max(sums["l2"], 1e-3)), (name, kind)


@pytest.mark.parametrize("case", [*CASES, *EXPERTS, *OTHERS, "gpt2_hub_tiny"])
def test_logits(case: str) -> None:
    stored = load_arrays(f"llm/{case}/io")
    with torch.no_grad():
        np.testing.assert_allclose(load_model(case)(torch.from_numpy(stored["ids"])), stored["logits_f64"], rtol=0, atol=1e-10)


def check_training(model: LLM, case: str, expected: dict[str, Any], names: dict[str, str] | None = None) -> list[float]:
    """Compare loss and gradients with the reference, and return the losses of three steps. ``names``: hpcai -> reference."""
    cfg = StepConfig(
        precision="fp64", optimizer="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, decay_names=("*",),
        capture="none",
    )  # fmt: skip
    step = train.Step(model, llm.loss, cfg, dist.single_process())
    total, count = step._gradients(load_batch(case))["loss"]
    assert count.item() == expected.get("counted_tokens", count.item())
    assert total.item() / count.item() == pytest.approx(expected["loss"], abs=1e-10)
    gradients = {name: p.grad / count for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    check_checksums({names[name]: x for name, x in gradients.items()} if names else to_hub(case, gradients), expected["grad"], 1e-9)
    losses = []
    for _ in range(3):
        total, count = step(load_batch(case))["loss"]
        losses.append(total.item() / count.item())
    return losses


@pytest.mark.parametrize("case", [*CASES, *EXPERTS])
def test_loss_gradients_and_three_steps_of_adamw(case: str) -> None:
    model, expected = load_model(case).train(), load_json(f"llm/{case}/train")
    losses = check_training(model, case, expected)
    with torch.no_grad():
        total, count = llm.loss(model, load_batch(case))["loss"]
    assert [*losses, total.item() / count.item()] == pytest.approx(expected["adamw"]["losses"], abs=1e-9)
    trained = to_hub(case, {name: p.detach() for name, p in model.named_parameters()})
    assert {name: x.norm().item() for name, x in trained.items()} == pytest.approx(expected["adamw"]["param_l2_after"], abs=1e-8)


@pytest.mark.parametrize("case", ["llama31_tiny", "gpt2_tiny"])
def test_documents_of_a_row_are_independent(case: str) -> None:
    stored, expected, model = load_arrays(f"llm/{case}/packed"), load_json(f"llm/{case}/packed"), load_model(case)
    ids, positions, documents = (torch.from_numpy(stored[name]) for name in ("ids", "positions", "document"))
    assert torch.equal(llm.objective.document_positions(documents), positions)
    with torch.no_grad():
        logits = model(ids, positions=positions, documents=documents)
        total, count = llm.loss(model, Batch(ids, documents))["loss"]
    np.testing.assert_allclose(logits, stored["logits_f64"], rtol=0, atol=1e-10)
    assert count.item() == expected["counted_tokens"] and total.item() / count.item() == pytest.approx(expected["loss"], abs=1e-10)


def test_frequencies_of_published_models() -> None:
    stored, metadata = load_arrays("llm/rope_inv_freq"), load_json("llm/rope_inv_freq")
    for preset, name in (("llama2-7b", "llama2_7b"), ("llama3-8b", "llama3_8b"), ("llama3.1-8b", "llama31_8b"),
                         ("llama3.1-405b", "llama31_405b"), ("llama3.2-1b", "llama32_1b")):  # fmt: skip
        cfg = LLMConfig.preset(preset)
        assert cfg.head_dim == metadata[name]["head_dim"] and cfg.rotary is not None
        np.testing.assert_allclose(rotary_frequencies(cfg.rotary, cfg.head_dim), stored[name], rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", SIZES)
def test_settings_of_published_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES[name]["config"]))
    cfg = read_config(tmp_path)
    assert cfg.model_copy(update={"mtp_layers": 0}).num_parameters == SIZES[name]["parameters"]
    if "rope_theta" in SIZES[name]["config"] and (preset := SIZES[name].get("preset")):
        fixed = {"rotary", "window", "full_layers", "bias", "norm", "experts", "latent", "attention_scale", "qk_norm", "sinks"}
        assert comparable(LLMConfig.preset(preset)).model_dump(include=fixed) == comparable(cfg).model_dump(include=fixed)


@pytest.mark.parametrize(("preset", "name"), PRESETS.items())
def test_published_sizes(preset: str, name: str) -> None:
    cfg = LLMConfig.preset(preset)
    assert cfg.num_parameters == SIZES[name]["parameters"]
    single_layer = cfg.model_copy(update={"layers": 1, "mtp_layers": int(cfg.rotary is not None)})
    with torch.device("meta"):
        assert sum(p.numel() for p in LLM(single_layer).parameters()) == single_layer.num_parameters


@pytest.mark.parametrize("case", [*CASES[:3], *OTHERS[:2]])
def test_settings_of_older_files_are_equal(case: str, tmp_path: Path) -> None:
    shutil.copy(DATA / "llm" / "configs_4x" / f"{case}.json", tmp_path / "config.json")
    new, old = read_config(model_folder(case)), read_config(tmp_path)
    assert new.model_dump(exclude={"head"}) == old.model_dump(exclude={"head"}) and new.head_dim == old.head_dim


ADAPTERS = ["lora_qv", "lora_all_rs"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, tmp_path: Path) -> None:
    case, folder = "llama2_tiny", DATA / "llm" / "llama2_tiny" / name
    expected, stored = load_json(f"llm/{case}/{name}"), load_arrays(f"llm/{case}/{name}")
    ids = torch.from_numpy(load_arrays(f"llm/{case}/io")["ids"])
    model = LLM.load(model_folder(case)).double()
    cfg = llm.load_adapter(model, folder)
    assert cfg.scale == pytest.approx(expected["scale"]) and cfg.dropout == (0.05 if name == "lora_all_rs" else 0.0)
    with torch.no_grad():
        np.testing.assert_allclose(model(ids), stored["logits_f64"], rtol=0, atol=1e-10)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected["trainable_parameters"]
    names = {n: f"base_model.model.{n.replace('.adapter.', '.')}" for n, p in model.named_parameters() if p.requires_grad}
    assert check_training(model, case, expected, names) == pytest.approx(expected["adamw"]["losses"][:3], abs=1e-9)
    norms = {names[own]: p.norm().item() for own, p in model.named_parameters() if p.requires_grad}
    assert norms == pytest.approx(expected["adamw"]["param_l2_after"], abs=1e-9)
    llm.save_adapter(model, cfg, tmp_path)
    reloaded = LLM.load(model_folder(case)).double()
    assert llm.load_adapter(reloaded, tmp_path) == cfg
    with torch.no_grad():
        assert torch.equal(reloaded(ids), model.eval()(ids))


def test_new_adapters_change_no_output() -> None:
    model, ids = LLM.load(model_folder("llama31_tiny")), torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids)
        assert torch.equal(llm.adapt(model, LoRAConfig(rank=2))(ids), before)
        assert torch.equal(llm.merge(model)(ids), before)
    with pytest.raises(ConfigError, match="has adapters; merge them"):
        llm.adapt(llm.adapt(model, LoRAConfig(rank=2)), LoRAConfig(rank=2))
    with pytest.raises(ConfigError, match=r"targets has query; expected some of .*q_proj"):
        llm.adapt(LLM.load(model_folder("llama31_tiny")), LoRAConfig(targets=("query",)))
    tied = LLM(LLMConfig(vocabulary=9, width=8, layers=1, heads=2, inner=8, positions=4, tied=True))
    for module in ("lm_head", "embed_tokens", "q_proj"):
        with pytest.raises(ConfigError, match=f"modules_to_save has {module}; expected some of input_layernorm, norm, post_"):
            llm.adapt(tied, LoRAConfig(modules_to_save=(module,)))


ERRORS = load_json("llm/broken/errors")  # by fault, the folder's name


@pytest.mark.parametrize("fault", ERRORS)
def test_errors_of_a_folder_are_one_line_that_names_it(fault: str) -> None:
    folder, good = DATA / "llm" / "broken" / fault, LLM.load(DATA / "llm" / "broken" / "good")
    with pytest.raises(HpcaiError) as caught:
        llm.load_adapter(good, folder) if fault.startswith("adapter") else LLM.load(folder)
    message = str(caught.value)
    assert message.startswith(str(folder)) and ERRORS[fault] in message and "\n" not in message, message
    stored = load_arrays("llm/broken/good")  # a refused adapter leaves the model unchanged
    with torch.no_grad():
        logits = good.double()(torch.from_numpy(stored["ids"]))
    np.testing.assert_allclose(logits, stored["logits_f64"], rtol=0, atol=1e-10)
    assert all(p.requires_grad for p in good.parameters()) and not any("adapter" in name for name, _ in good.named_modules())


@pytest.mark.parametrize(("settings", "tensors", "text"), load_json("refused/adapters"))
def test_a_refused_adapter_is_named_by_its_setting_or_tensor(
    settings: dict[str, Any], tensors: dict[str, str], text: str, tmp_path: Path
) -> None:
    source, model = DATA / "llm" / "llama2_tiny" / "lora_qv", LLM.load(model_folder("llama2_tiny"))
    config, state = json.loads((source / "adapter_config.json").read_text()), load_file(source / "adapter_model.safetensors")
    for end, change in tensors.items():
        for name in [name for name in state if name.endswith(end)]:
            tensor = state.pop(name)
            if change in ("nan", "inf"):
                state[name] = tensor.index_fill(1, torch.tensor(1), float(change))
            elif change != "missing":
                state[name] = tensor.to(getattr(torch, change))
        if change == "added":
            state[f"base_model.model.model.{end}"] = torch.zeros(1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(HpcaiError) as caught:
        llm.load_adapter(model, tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and text in message and "\n" not in message, message
    assert model.adapters is None and all(parameter.requires_grad for parameter in model.parameters())


def test_other_models_are_refused(tmp_path: Path) -> None:
    config = json.loads((model_folder("llama2_tiny") / "config.json").read_text())
    gpt2 = json.loads((model_folder("gpt2_tiny") / "config.json").read_text())
    for change, message in (
        (config | {"model_type": "bloom"}, "a model of type 'bloom'; expected one of llama, gpt2, mistral, .*deepseek_v3$"),
        (config | {"hidden_size": "wide"}, "config.json: hidden_size: Input should be a valid integer$"),
        (config | {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
        (config | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "beta": 1}}, "type linear with beta, which"),
        (config | {"parallel_residual": True, "new": None}, "parallel_residual=True: no llama that hpcai computes"),
        (config | {"quantization_config": {"quant_method": "gptq"}}, "weights are quantized by gptq, expected 16 bits"),
        (config | {"layer_types": ["chunked_attention"] * 2}, "layer_types has chunked_attention, expected full_attention"),
        (config | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "has no 'factor'; expected settings"),
        (gpt2 | {"scale_attn_weights": False}, "scale_attn_weights=False: no gpt2"),
        (gpt2 | {"add_cross_attention": True}, "add_cross_attention=True: no gpt2"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(change))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            read_config(tmp_path)
    mixed = LLMConfig.preset("llama2-7b", layers=1, width=16, heads=2, inner=8, vocabulary=10, norm="layer")
    with pytest.raises(CheckpointError, match="no family of Hugging Face has the settings of this model"):
        llm.save_folder(LLM(mixed).state_dict(), mixed, tmp_path)


def test_weights_that_are_not_those_of_the_settings_are_refused_in_both_ways_of_reading(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder("llama31_short_tiny"), folder)
    good = load_file(folder / "model.safetensors")
    embedding, norm = good["model.embed_tokens.weight"], good["model.norm.weight"]
    for change, message in (
        ({"lm_head.weight": embedding + 1}, "lm_head.weight differs from model.embed_tokens.weight; set tie_word_emb"),
        ({"model.norm.weight": norm.int()}, "model.norm.weight is I32, expected BF16, F16, F32, F64"),
        ({"model.norm.weight": norm.to(torch.complex64)}, "model.norm.weight is C64, expected"),
        ({"model.norm.weight": norm / 0}, "model.norm.weight has elements that are not finite"),
    ):
        save_file(good | change, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            LLM.load(folder)
        with deferred(), pytest.raises(CheckpointError, match=message):
            materialize(llm.load_deferred(LLM(read_config(folder)), folder), "cpu")
    save_file(good | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert LLM.load(folder).lm_head.weight is not None
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights are pickled \(\*.bin\).*convert them with: python -c .*save_pretrained"):
        LLM.load(folder)


def test_weights_of_gpt_oss_in_mxfp4_are_read(tmp_path: Path) -> None:
    """The format: two numbers of sign, 2 bits of exponent and 1 of mantissa a byte, the low bits first; powers of two plus 127."""
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).expand(2, 6, 3, 16).contiguous()
    scales = torch.arange(36, dtype=torch.uint8).view(2, 6, 3) + 110
    save_file({"b": blocks, "s": scales}, tmp_path / "x.safetensors")
    stored = open_tensors(tmp_path / "x.safetensors")
    view = Mxfp4View(stored["b"], stored["s"])
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = torch.cat((positive, -positive)).repeat(6) * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    assert view.size == (2, 6, 96) and torch.equal(read_full(view).float(), expected)
    box = slice(1, 2), slice(2, 5), slice(30, 70)
    assert torch.equal(view[box], read_full(view)[box])


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_generated_tokens(case: str) -> None:
    expected, model = load_json(f"llm/{case}/generate"), LLM.load(model_folder(case))
    prompts, cfg = expected["prompts"], SamplingConfig(most=expected["new_tokens"])
    assert [complete(model, [prompt], cfg)[0] for prompt in prompts] == expected["tokens"]
    assert complete(model, prompts, cfg) == expected["left_padded"]["tokens"]
    for name in ("stop_one", "stop_two"):
        ends = expected[name]["eos_token_id"]
        stop = ends if isinstance(ends, list) else [ends]
        alone = [complete(model, [prompt], cfg, stop)[0] for prompt in prompts]
        assert complete(model, prompts, cfg, stop) == expected[name]["tokens"] == alone
    penalized = expected["repetition_penalty"]
    cfg = SamplingConfig(most=len(penalized["tokens"][0]), repetition=penalized["penalty"])
    assert complete(model, prompts, cfg) == penalized["tokens"]
    assert model.model.layers[0].self_attn.update_cache is None


def test_filters() -> None:
    stored, expected = load_arrays("llm/sampling/filters"), load_json("llm/sampling/filters")
    logits, used = torch.from_numpy(stored["logits"]), torch.zeros(*stored["logits"].shape, dtype=torch.bool)
    used.scatter_(1, torch.from_numpy(stored["ids"]), True)
    for number, setting in enumerate(expected["settings"]):
        kwargs = {name.replace("repetition_penalty", "repetition"): value for name, value in setting.items()}
        filtered = filter_logits(logits, used, SamplingConfig(**kwargs))
        np.testing.assert_allclose(filtered, stored[f"scores_{number}"], rtol=1e-6, atol=1e-5, err_msg=str(setting))
        assert filtered.isfinite().sum(1).tolist() == expected["kept"][number], setting
    ties = torch.from_numpy(stored["ties_logits"])
    for setting, count in zip(expected["ties_settings"], expected["ties_kept"]):
        assert filter_logits(ties, torch.zeros_like(ties, dtype=torch.bool), SamplingConfig(**setting)).isfinite().sum() == count


def test_tokens_are_sampled_by_their_probability() -> None:
    logits, cfg = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]), SamplingConfig(temperature=1.0)
    chances = [(i + 0.5) / 1000 for i in range(1000)]
    counts = sample_tokens(logits.expand(1000, 4), torch.zeros(1000, 4, dtype=torch.bool), cfg, chances).bincount(minlength=4)
    np.testing.assert_allclose(counts / 1000, logits[0].softmax(0), atol=1.5e-3)


def test_generation_ends_at_the_last_position() -> None:
    model = LLM.load(model_folder("gpt2_hub_tiny"))
    assert [len(text) for text in complete(model, [[1] * 23, [2] * 20])] == [1, 4]
    with torch.no_grad(), pytest.raises(DataError, match="25 tokens, the model 24 positions"):
        model(torch.zeros(1, 25, dtype=torch.int64))


def test_likelihoods_of_choices() -> None:
    model = load_model("llama2_tiny")
    for item in load_json("llm/llama2_tiny/choices"):
        assert llm.likelihoods(model, item["context_ids"], item["choice_ids"]) == pytest.approx(item["loglik"], abs=1e-9)
    with pytest.raises(DataError, match="at least one token"):
        llm.likelihoods(model, [], [[1]])


def build_mtp(model: dict[str, Any], **settings: Any) -> LLM:
    torch.manual_seed(0)
    built = LLM(LLMConfig(**model, mtp_layers=2, **settings)).double()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built


@pytest.mark.parametrize("packed", [False, True])
def test_multi_token_prediction_has_losses_and_gradients_of_its_formulas(packed: bool) -> None:
    model = build_mtp(MODELS["llama"], mtp_loss=0.3, scaled_embedding=True, recompute="selective")
    tokens, counted, states = torch.randint(0, 25, (3, 17)), torch.rand(3, 17) < 0.8, list[Tensor]()
    documents = (torch.rand(3, 17) < 0.2).cumsum(1) * packed
    batch = Batch(tokens, documents if packed else None, counted)
    (total, count), (further, further_count) = (llm.loss(model, batch)[name] for name in ("loss", "mtp_loss"))
    actual = torch.autograd.grad(total, list(model.parameters()))
    hook = model.model.norm.register_forward_hook(lambda *call: states.append(call[2]))
    positions = llm.objective.document_positions(documents)[:, :-1]
    main = model(tokens[:, :-1], batch.targets, positions, documents[:, :-1]).sum()
    hook.remove()
    rotary, (h,) = [rotary_cos_sin(cfg, 4, positions, torch.float64) for cfg in model.rotary_cfgs * 2], states
    sums, number = main.new_zeros(()), 0
    for k, layer in enumerate(model.model.mtp.layers, 1):  # type: ignore[union-attr]
        later = 4 * model.model.embed_tokens(torch.cat((tokens[:, k:], tokens.new_zeros(3, k)), 1)[:, :16])
        parts = F.rms_norm(later, (16,), layer.enorm.weight, 1e-5), F.rms_norm(h, (16,), layer.hnorm.weight, 1e-5)
        h = Layer.forward(layer, torch.cat(parts, -1) @ layer.eh_proj.weight.T, rotary, documents[:, :-1])
        h = F.rms_norm(h, (16,), layer.norm.weight, 1e-5)
        for row, t in ((row, t) for row in range(3) for t in range(16 - k)):
            if counted[row, t + k + 1] and documents[row, t] == documents[row, t + k + 1]:
                sums, number = sums + F.cross_entropy(model.lm_head.weight @ h[row, t], tokens[row, t + k + 1]), number + 1
    expected = torch.autograd.grad(main + 0.3 / 2 * sums, list(model.parameters()))
    assert number == further_count < count * 2 and llm.loss(model.eval(), batch).keys() == {"loss", "tokens"}
    for a, b in zip((total, further, *actual), (main, sums, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1.0, b.abs().max().item()))


def test_files_have_multi_token_prediction_with_copies_of_embedding_and_output_layer(tmp_path: Path) -> None:
    model = build_mtp(MODELS["deepseek"] | {"experts": {**MODELS["deepseek"]["experts"], "shared": 16}})
    state, tokens, (file, ours) = model.state_dict(), torch.tensor([[1, 2]]), (tmp_path / "model.safetensors", tmp_path / "ours")
    llm.save_folder(state, model.cfg, tmp_path)
    model.save(ours)
    for path in (tmp_path, ours):
        torch.testing.assert_close(dict(LLM.load(path).state_dict()), dict(state), rtol=0, atol=0)
        for count in (0, 1):
            cfg = complete_settings(Config(model=LLMConfig(mtp_layers=count), start=StartConfig(weights=path))).model
            assert cfg.mtp_layers == count and torch.equal(LLM.load(path, cfg)(tokens), model(tokens))
    stored, copy, norm = load_file(file), "model.layers.3.embed_tokens.weight", "model.layers.3.enorm.weight"
    assert torch.equal(stored["model.layers.2.shared_head.head.weight"], stored["lm_head.weight"])
    changed, missing = stored | {copy: stored[copy] + 1}, {name: x for name, x in stored.items() if name != norm}
    for tensors, text in (changed, f"{copy} differs from model.embed_tokens.weight; set num_next"), (missing, f"has no {norm}"):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=text):
            LLM.load(tmp_path)
