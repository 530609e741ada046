"""Language models of random shapes, converted to and from transformers and peft, have equal outputs and gradients."""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from apps.llm.benchmarks import Benchmark
from apps.llm.settings import Config, DataConfig
from hpcai import dist
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig, SamplingConfig, complete
from hpcai.models.llm.load import hub_state
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, export
from hpcai.train.step import Step
from tests.reference_data import DATA, load_json

_WHY = "{} is not installed: conversion to and from it is NOT tested; pip install hpcai-suite[peers]"
transformers: Any = pytest.importorskip("transformers", reason=_WHY.format("transformers"))
peft: Any = pytest.importorskip("peft", reason=_WHY.format("peft"))

from transformers.core_model_loading import revert_weight_conversion  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # from peft's call of transformers
ROPES = load_json("llm/small_peers")["ropes"]
SEEDS = range(3)
CONFIGS = load_json("llm/small_peers")["configs"]


FAMILIES = load_json("llm/small_peers")["families"]


@pytest.fixture(autouse=True)
def compute_in_float64(monkeypatch: pytest.MonkeyPatch, quiet_hugging_face: None) -> None:
    """Have Llama of transformers compute norms, angles and softmax in float64 instead of float32."""
    dtypes = {"float32": torch.float64, "float": torch.float64}
    monkeypatch.setattr(modeling_llama, "torch", SimpleNamespace(**vars(torch) | dtypes))


@contextmanager
def computing_in_float64(peer: Any) -> Iterator[None]:
    """Context manager: the same for a model of any family."""
    module = sys.modules[type(peer).__module__]
    wide = SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})

    def widen(x: Tensor) -> Tensor:  # positions and exponents of frequencies stay in float32
        return x.double() if x.is_floating_point() else x.to(torch.float32)

    with patch.object(module, "torch", wide), patch.object(torch.Tensor, "float", widen):
        yield


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """Return ``model`` with weights so large that each of them affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for name, parameter in [*model.named_parameters(), *buffers]:
            is_norm = "norm.weight" in name or "ln_" in name
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + is_norm)
    return model


def hf_llama(seed: int) -> nn.Module:
    draw = random.Random(seed)
    keys, size = draw.choice([1, 2, 3]), draw.choice([4, 6, 8])
    heads, rope = keys * draw.choice([1, 2]), ROPES[seed % 3]
    positions = draw.choice([24, 40])
    cfg = transformers.LlamaConfig(
        vocab_size=draw.randrange(30, 70), hidden_size=heads * size if seed % 2 else draw.choice([10, 22]),
        num_hidden_layers=draw.choice([1, 2, 3]), num_attention_heads=heads, num_key_value_heads=keys, head_dim=size,
        intermediate_size=draw.randrange(9, 33), max_position_embeddings=positions, rms_norm_eps=draw.choice([1e-5, 1e-3]),
        tie_word_embeddings=seed in (1, 4), rope_parameters=rope | {"rope_theta": draw.choice([1e2, 1e4])},
    )  # fmt: skip
    return randomize(transformers.LlamaForCausalLM(cfg), seed)


def hf_gpt2(seed: int) -> nn.Module:
    cfg = transformers.GPT2Config(
        vocab_size=40 + seed, n_embd=12, n_layer=2, n_head=3, n_inner=None if seed % 2 else 20, n_positions=24,
        layer_norm_epsilon=1e-3, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function=("gelu_new", "gelu")[seed % 2],
    )  # fmt: skip
    return randomize(transformers.GPT2LMHeadModel(cfg), seed)


def hf_family(case: str) -> nn.Module:
    kind = case.split(",")[0]
    cfg = transformers.AutoConfig.for_model(kind, **FAMILIES["common"] | FAMILIES["cases"][case])
    return randomize(transformers.AutoModelForCausalLM.from_config(cfg), 1)


def load_hf(folder: Path, unused: str = " ") -> Any:
    """Load a folder with transformers in float64; its weights must be exactly those of the model, and some with ``unused``."""
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with patch.object(modeling_llama, "torch", torch):  # both libraries compute frequencies in float32
        model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **implementations)
    kinds = "missing_keys", "unexpected_keys", "mismatched_keys"
    assert not [name for kind in kinds for name in loading_info[kind] if unused not in str(name)], loading_info
    assert not loading_info.get("error_msgs"), loading_info
    return model.double().eval()


def random_tokens(vocabulary: int) -> Tensor:
    return torch.randint(1, vocabulary, (3, 21), generator=torch.Generator().manual_seed(vocabulary))


def check_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * max(1.0, expected.abs().max().item()))


def check_same(model: Any, peer: Any) -> None:
    """Assert that logits, gradients of the cross entropy and greedily generated tokens are equal."""
    ids = random_tokens(model.cfg.vocabulary)
    prompts = ids[:, :5]
    kwargs = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with computing_in_float64(peer):
        expected_logits = peer(ids[:, :-1]).logits
        F.cross_entropy(expected_logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
        generated = peer.generate(prompts, pad_token_id=0, **kwargs)
    check_close(model(ids[:, :-1]), expected_logits)
    llm.loss(model, Batch(ids))["loss"][0].backward()
    expected = revert_weight_conversion(peer, {name: p.grad for name, p in peer.named_parameters()})
    gradients = {name: p.grad for name, p in model.named_parameters()}
    actual = hub_state(gradients, model.cfg, peer.config.model_type)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        check_close(gradient, expected[name])
    assert complete(model, prompts.tolist(), SamplingConfig(most=12)) == generated[:, 5:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*(f"llama {seed}" for seed in SEEDS), "gpt2 0", "gpt2 1"])
def test_files_of_transformers_give_the_same_model(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, seed = case.split()
    peer: Any = {"llama": hf_llama, "gpt2": hf_gpt2}[kind](int(seed))
    peer.to(dtype).save_pretrained(tmp_path, max_shard_size="3KB" if int(seed) % 2 else "5GB")
    model = LLM.load(tmp_path)
    assert model.lm_head.weight.dtype == dtype
    check_same(model.double(), load_hf(tmp_path))


@pytest.mark.parametrize("case", FAMILIES["cases"])
def test_a_family_is_the_same_model_in_transformers_and_back(case: str, tmp_path: Path) -> None:
    peer: Any = hf_family(case)
    peer.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    model = LLM.load(tmp_path / "theirs")
    assert model.cfg.num_parameters == sum(parameter.numel() for parameter in peer.parameters())
    llm.save_folder(model.state_dict(), model.cfg, tmp_path / "ours", source=tmp_path / "theirs")
    back = load_hf(tmp_path / "ours")
    assert back.config.model_type == peer.config.model_type and back.config.eos_token_id == 7
    for name, parameter in peer.named_parameters():
        assert torch.equal(parameter.double(), back.get_parameter(name)), name
    check_same(model.double(), back)
    llm.save_folder(model.state_dict(), model.cfg, tmp_path / "any")  # of the first family with these settings
    check_close(LLM.load(tmp_path / "any").double()(random_tokens(50)), model(random_tokens(50)))


def build_model(kind: str) -> LLM:
    sizes = {"vocabulary": 50, "width": 24, "layers": 2, "heads": 4, "inner": 20, "positions": 24}
    return randomize(LLM(LLMConfig(**sizes | CONFIGS[kind])), 1).eval()  # type: ignore[return-value]


def test_transformers_leaves_out_the_multi_token_prediction_of_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf_family("deepseek_v3").save_pretrained(tmp_path / "theirs")
    plain = LLM.load(tmp_path / "theirs")
    assert plain.cfg.mtp_layers == 0 and "no tensors of the 1 layers of multi-token prediction" in caplog.text
    model = LLM(plain.cfg.model_copy(update={"mtp_layers": 1}))
    folder = write_outputs(train_model(model), tmp_path)
    torch.testing.assert_close(dict(LLM.load(folder).state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    peer, tokens = load_hf(folder, f".layers.{plain.cfg.layers}."), random_tokens(50)
    with computing_in_float64(peer):
        check_close(model.double()(tokens), peer(tokens).logits)


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_reads_saved_folders(kind: str, tmp_path: Path) -> None:
    model = build_model(kind)
    for folder, shard in ((tmp_path / "one", 1 << 30), (tmp_path / "several", 10_000)):
        llm.save_folder(model.state_dict(), model.cfg, folder, shard)
        check_same(LLM.load(folder).double(), load_hf(folder))


def write_outputs(step: Step, tmp_path: Path) -> Path:
    """Export the weights of ``step`` as a run does at its end, and return their folder."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(), step.mesh)
    saved = checkpoints.save(step, Progress(step=2)).path
    for name, write in step.model.output_files(lambda path, **kwargs: export(saved, path, LLM.load, **kwargs)).items():  # type: ignore[operator]
        (tmp_path / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "export" / name)
    return tmp_path / "export"


def train_model(model: LLM) -> Step:
    step = Step(model.train(), llm.loss, StepConfig(capture="none", lr=0.05), dist.single_process())
    for _ in range(2):
        step(Batch(random_tokens(model.cfg.vocabulary)))
    model.eval()
    return step


@pytest.mark.parametrize("documents", ["joined", "apart"])
@pytest.mark.parametrize("kind", [*CONFIGS][:-1])
def test_the_reference_of_bench_llm_has_the_same_loss(kind: str, documents: str) -> None:
    benchmark, model = Benchmark(), build_model(kind).double().train()
    rows = DataConfig(batch=2, evaluation_batch=2, workers=1, documents=documents)
    cfg = Config(model=model.cfg, data=rows)
    batch: Any = benchmark.random_batch(cfg, range(2), torch.device("cpu"))
    assert (batch.documents is not None) == (documents == "apart")
    with patch.object(modeling_llama, "torch", torch):  # both libraries compute frequencies in float32
        peer = benchmark.peers["transformers"].build(cfg, batch)
    keys: Any = peer.model.double().load_state_dict(hub_state(dict(model.state_dict()), model.cfg), strict=False)
    assert not keys.unexpected_keys and keys.missing_keys == ["lm_head.weight"] * model.cfg.tied
    with computing_in_float64(peer.model):
        losses = [benchmark.loss(model, batch)["loss"], peer.loss(peer.model, batch)["loss"]]
        for value in losses:
            value.backward()
    torch.testing.assert_close(losses[1].double(), losses[0], rtol=1e-6, atol=0)  # the peer's cross entropy is in float32
    gradients = hub_state({name: p.grad for name, p in model.named_parameters()}, model.cfg)
    for name, parameter in peer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6 * gradients[name].abs().max().item())


@pytest.mark.parametrize("kind", ["llama", "llama3, tied", "gpt2", "experts"])
def test_transformers_reads_the_files_of_a_run(kind: str, tmp_path: Path) -> None:
    model = build_model(kind)
    vars(model)["_tokenizer"] = SimpleNamespace(bos=None, eos=17)
    step = train_model(model)
    folder, model, ids = write_outputs(step, tmp_path), step.model.double(), random_tokens(50)  # type: ignore[assignment]
    check_close(model(ids), LLM.load(folder).double()(ids))
    check_same(LLM.load(folder).double(), peer := load_hf(folder))
    assert peer.generation_config.eos_token_id == peer.config.eos_token_id == 17, "its generation stops at the end of a text"
    assert LLM.load(folder, model.cfg).cfg == model.cfg
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt", "transformers 4 refuses a file without this entry"


ADAPTERS = {
    "qv": ("llama", LoRAConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj"))),
    "all, stabilised": ("llama", LoRAConfig(
        rank=4, stabilised=True, targets=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    )),
    "patterns": ("llama", LoRAConfig(
        rank=2, targets=("model.layers.1.self_attn.k_proj", "q_proj"), modules_to_save=("lm_head", "model.norm"),
        rank_pattern={"model.layers.0.self_attn.q_proj": 3}, alpha_pattern={"model.layers.1.self_attn.k_proj": 5.0},
    )),
    "gpt2, qv": ("gpt2", LoRAConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj"))),
    "gpt2, all, stabilised": ("gpt2", LoRAConfig(
        rank=4, stabilised=True, targets=("down_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    )),
    "gpt2, patterns": ("gelu by erf", LoRAConfig(
        rank=2, targets=("k_proj", "model.layers.1.self_attn.o_proj", "q_proj", "v_proj"), modules_to_save=("model.norm",),
        rank_pattern={"model.layers.0.self_attn.q_proj": 3}, alpha_pattern={"k_proj": 5.0},
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_reads_saved_adapters(name: str, tmp_path: Path) -> None:
    (kind, cfg), base, ids = ADAPTERS[name], tmp_path / "base", random_tokens(50)
    llm.save_folder(build_model(kind).state_dict(), build_model(kind).cfg, base)
    step = train_model(llm.adapt(LLM.load(base), cfg))
    model: Any = step.model
    trained = {name.rpartition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if ".adapter." not in name} == set(cfg.modules_to_save)
    llm.save_adapter(model, cfg, tmp_path / "adapter", str(base))
    for folder in (tmp_path / "adapter", write_outputs(step, tmp_path) / "adapter"):
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        peer = peft.PeftModel.from_pretrained(load_hf(base), folder).double()
        reloaded = LLM.load(base).double()
        before = reloaded(ids)
        assert llm.load_adapter(reloaded, folder) == cfg or name == "gpt2, patterns", "one alpha for c_attn"
        check_close(reloaded(ids), peer(ids).logits)
        assert (reloaded(ids) - before).abs().max() > 1e-3, "two steps have changed the adapter"
        llm.merge(reloaded)
        merged = dict(peer.merge_and_unload().named_parameters())
        for key, value in hub_state(dict(reloaded.named_parameters()), reloaded.cfg).items():
            check_close(value, merged[key])
    for key, value in llm.merge(model.double()).named_parameters():
        torch.testing.assert_close(reloaded.get_parameter(key), value, rtol=0, atol=1e-6)


PEFT_CONFIGS = load_json("llm/small_peers")["peft"]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("name", PEFT_CONFIGS)
def test_adapters_of_peft_are_read(name: str, tmp_path: Path) -> None:
    (kind, settings), base, ids = PEFT_CONFIGS[name], tmp_path / "base", random_tokens(50)
    llm.save_folder(build_model(kind).state_dict(), build_model(kind).cfg, base)
    kwargs = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 7} | settings
    peer = peft.get_peft_model(load_hf(base), peft.LoraConfig(**kwargs)).double()
    for number, (_, parameter) in enumerate((name, p) for name, p in peer.named_parameters() if p.requires_grad):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    peer.eval().save_pretrained(tmp_path / "peft")
    model = LLM.load(base).double()
    cfg = llm.load_adapter(model, tmp_path / "peft")
    check_close(model(ids), peer(ids).logits)
    llm.save_adapter(model, cfg, tmp_path / "ours", str(base))
    saved = peft.PeftModel.from_pretrained(load_hf(base), tmp_path / "ours").double()
    check_close(saved(ids).logits, peer(ids).logits)
    check_close(llm.merge(model)(ids), peer.merge_and_unload()(ids).logits)


def test_a_reward_model_is_read(tmp_path: Path) -> None:
    """A folder for the classification of sequences, with one label, of a model with tied embeddings."""
    kind, folder = transformers.AutoModelForSequenceClassification, DATA / "llm" / "qwen2_tiny" / "hf"
    peer = kind.from_pretrained(folder, num_labels=1, pad_token_id=0, dtype=torch.float32)
    peer.save_pretrained(tmp_path)
    tokens = torch.arange(1, 13).view(2, 6)
    rewards = llm.answer_rewards(llm.Critic.load(tmp_path), llm.PreferenceBatch(tokens, tokens > 0))
    torch.testing.assert_close(rewards, peer.eval()(tokens).logits[:, 0], rtol=0, atol=1e-6)
