"""Language models against those of transformers and peft, of random shapes, converted in both directions."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from apps.llm.benchmarks import Benchmark, BenchmarkConfig
from apps.llm.settings import DataConfig
from hpcai import dist
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig, SamplingConfig, complete
from hpcai.models.llm.load import _to_hub
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, export
from hpcai.train.step import Step

_WHY = "{} is not installed: files for others, and from them, are NOT tested; pip install hpcai-suite[peers]"
transformers: Any = pytest.importorskip("transformers", reason=_WHY.format("transformers"))
peft: Any = pytest.importorskip("peft", reason=_WHY.format("peft"))

from transformers.models.llama import modeling_llama  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 12},
]  # fmt: skip
SEEDS = range(3)
OURS: dict[str, dict[str, Any]] = {
    "llama": {"key_heads": 2},
    "llama3, tied": {"tied": True, "head": 10, "rotary": {"theta": 7e4, "scaling": {"factor": 4.0, "original": 16}}},
    "linear": {"key_heads": 1, "rotary": {"scaling": {"kind": "linear", "factor": 3.0}}},
    "gpt2": {"rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True},
    "gelu by erf": {"rotary": None, "norm": "layer", "feed": "gelu_erf", "bias": True, "tied": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    """Compute in float64 what Llama of transformers casts to float32: norms, angles and softmax."""
    dtypes = {"float32": torch.float64, "float": torch.float64}
    monkeypatch.setattr(modeling_llama, "torch", SimpleNamespace(**vars(torch) | dtypes))
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)


def spread(model: nn.Module, seed: int) -> nn.Module:
    """``model`` with weights so large that each of them shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm.weight" in name or "ln_" in name))
    return model


def their_llama(seed: int) -> nn.Module:
    draw = random.Random(seed)
    keys, size = draw.choice([1, 2, 3]), draw.choice([4, 6, 8])
    heads, rope = keys * draw.choice([1, 2]), ROPES[seed % 3]
    positions = draw.choice([24, 40])
    cfg = transformers.LlamaConfig(
        vocab_size=draw.randrange(30, 70), hidden_size=heads * size if seed % 2 else draw.choice([10, 22]),
        num_hidden_layers=draw.choice([1, 2, 3]), num_attention_heads=heads, num_key_value_heads=keys, head_dim=size,
        intermediate_size=draw.randrange(9, 33), max_position_embeddings=positions, rms_norm_eps=draw.choice([1e-5, 1e-3]),
        tie_word_embeddings=seed in (1, 4),
        rope_parameters=rope | {"rope_theta": draw.choice([1e2, 1e4])},
    )  # fmt: skip
    return spread(transformers.LlamaForCausalLM(cfg), seed)


def their_gpt2(seed: int) -> nn.Module:
    cfg = transformers.GPT2Config(
        vocab_size=40 + seed, n_embd=12, n_layer=2, n_head=3, n_inner=None if seed % 2 else 20, n_positions=24,
        layer_norm_epsilon=1e-3, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function=("gelu_new", "gelu")[seed % 2],
    )  # fmt: skip
    return spread(transformers.GPT2LMHeadModel(cfg), seed)


def theirs_from(folder: Path) -> Any:
    """Return their model in float64; ``folder`` must have exactly its weights."""
    with patch.object(modeling_llama, "torch", torch):  # frequencies are in float32 everywhere
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert not told.get("error_msgs"), told
    return model.eval()


def tokens_for(words: int) -> Tensor:
    return torch.randint(1, words, (3, 21), generator=torch.Generator().manual_seed(words))


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=0, atol=1e-10 * max(1.0, right.abs().max().item()))


def same(ours: Any, theirs: Any) -> None:
    """Logits, gradients of the cross entropy by name, and the likeliest texts."""
    ids = tokens_for(ours.cfg.vocabulary)
    logits = theirs(ids).logits
    close(ours(ids), logits)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    llm.loss(ours, Batch(ids))["loss"][0].backward()
    right = {name: p.grad for name, p in theirs.named_parameters()}
    found = _to_hub({name: p.grad for name, p in ours.named_parameters()}, ours.cfg)
    assert found.keys() == right.keys()
    for name, gradient in found.items():
        close(gradient, right[name])
    prompts = ids[:, :5]
    words = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    made = theirs.generate(prompts, pad_token_id=0, **words)
    assert complete(ours, prompts.tolist(), SamplingConfig(most=12)) == made[:, 5:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [*(f"llama {seed}" for seed in SEEDS), "gpt2 0", "gpt2 1"])
def test_their_files_give_the_same_model(make: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, seed = make.split()
    model: Any = {"llama": their_llama, "gpt2": their_gpt2}[kind](int(seed))
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="3KB" if int(seed) % 2 else "5GB")
    ours = LLM.load(tmp_path)
    assert ours.lm_head.weight.dtype == dtype
    same(ours.double(), theirs_from(tmp_path))


def ours_of(kind: str) -> LLM:
    sizes = {"vocabulary": 50, "width": 24, "layers": 2, "heads": 4, "inner": 20, "positions": 24}
    return spread(LLM(LLMConfig(**sizes | OURS[kind])), 1).eval()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", OURS)
def test_they_read_our_folders(kind: str, tmp_path: Path) -> None:
    model = ours_of(kind)
    for folder, shard in ((tmp_path / "one", 1 << 30), (tmp_path / "several", 10_000)):
        llm.save_folder(model.state_dict(), model.cfg, folder, shard)
        same(LLM.load(folder).double(), theirs_from(folder))


def left(step: Step, tmp_path: Path) -> Path:
    """Return the folder of the last checkpoint of a run."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(), step.mesh)
    saved = checkpoints.save(step, Progress(step=2)).path
    for name, write in step.model.output_files(lambda path, **words: export(saved, path, LLM.load, **words)).items():  # type: ignore[operator]
        (tmp_path / "left" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "left" / name)
    return tmp_path / "left"


def trained(model: LLM) -> Step:
    step = Step(model.train(), llm.loss, StepConfig(capture="none", lr=0.05), dist.single_process())
    for _ in range(2):
        step(Batch(tokens_for(model.cfg.vocabulary)))
    model.eval()
    return step


@pytest.mark.parametrize("documents", ["joined", "apart"])
@pytest.mark.parametrize("kind", OURS)
def test_the_reference_of_bench_llm_has_the_same_loss(kind: str, documents: str) -> None:
    subject, ours = Benchmark(), ours_of(kind).double().train()
    rows = DataConfig(batch=2, evaluation_batch=2, workers=1, documents=documents)
    cfg = BenchmarkConfig(model=ours.cfg, data=rows)
    batch: Any = subject.random_batch(cfg, range(2), torch.device("cpu"))
    assert (batch.documents is not None) == (documents == "apart")
    with patch.object(modeling_llama, "torch", torch):  # frequencies are in float32 everywhere
        form = subject.peers["transformers"].build(cfg, batch)
    told: Any = form.model.double().load_state_dict(_to_hub(dict(ours.state_dict()), ours.cfg), strict=False)
    assert not told.unexpected_keys and told.missing_keys == ["lm_head.weight"] * ours.cfg.tied
    losses = [subject.loss(ours, batch)["loss"], form.loss(form.model, batch)["loss"]]
    for value in losses:
        value.backward()
    torch.testing.assert_close(losses[1].double(), losses[0], rtol=1e-6, atol=0)  # their entropy is in float32
    found = _to_hub({name: p.grad for name, p in ours.named_parameters()}, ours.cfg)
    for name, parameter in form.model.named_parameters():
        torch.testing.assert_close(parameter.grad, found[name], rtol=1e-4, atol=1e-6 * found[name].abs().max().item())


@pytest.mark.parametrize("kind", ["llama", "llama3, tied"])
def test_they_read_the_files_of_a_run(kind: str, tmp_path: Path) -> None:
    step = trained(ours_of(kind))
    folder, model, ids = left(step, tmp_path), step.model.double(), tokens_for(50)
    close(model(ids), theirs_from(folder)(ids).logits)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt", "without which transformers 4 refuses the file"


ADAPTERS = {
    "qv": LoRAConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj")),
    "all, stabilised": LoRAConfig(
        rank=4, stabilised=True, targets=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_reads_our_adapters(name: str, tmp_path: Path) -> None:
    base, ids = tmp_path / "base", tokens_for(50)
    llm.save_folder(ours_of("llama").state_dict(), ours_of("llama").cfg, base)
    step = trained(llm.adapt(LLM.load(base), ADAPTERS[name]))
    model: Any = step.model
    llm.save_adapter(model, ADAPTERS[name], tmp_path / "own", str(base))
    for folder in (tmp_path / "own", left(step, tmp_path) / "adapter"):
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
        theirs = peft.PeftModel.from_pretrained(theirs_from(base), folder).double()
        own = LLM.load(base).double()
        plain = own(ids)
        assert llm.load_adapter(own, folder) == ADAPTERS[name]
        close(own(ids), theirs(ids).logits)
        assert (own(ids) - plain).abs().max() > 1e-3, "two steps have changed something"
        llm.merge(own)
        merged = theirs.merge_and_unload()
        for key, value in own.named_parameters():
            close(value, merged.get_parameter(key))


@pytest.mark.parametrize("name", ADAPTERS)
def test_we_read_their_adapters(name: str, tmp_path: Path) -> None:
    cfg, base, ids = ADAPTERS[name], tmp_path / "base", tokens_for(50)
    llm.save_folder(ours_of("llama").state_dict(), ours_of("llama").cfg, base)
    words = {"r": cfg.rank, "lora_alpha": cfg.alpha, "use_rslora": cfg.stabilised, "target_modules": list(cfg.targets)}
    theirs = peft.get_peft_model(theirs_from(base), peft.LoraConfig(task_type="CAUSAL_LM", **words)).double()
    for number, (_, parameter) in enumerate((name, p) for name, p in theirs.named_parameters() if p.requires_grad):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    theirs.eval().save_pretrained(tmp_path / "theirs")
    own = LLM.load(base).double()
    assert llm.load_adapter(own, tmp_path / "theirs") == cfg
    close(own(ids), theirs(ids).logits)
    close(llm.merge(own)(ids), theirs.merge_and_unload()(ids).logits)
