"""The adapter of vLLM, beside a module with the signatures of vLLM 0.33 and our engine within: vLLM itself is not installed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import pytest
import torch
from torch import nn

from hpcai.errors import ConfigError, DataError, MissingExtraError
from hpcai.models.llm import LLM, Engine, EngineConfig, LLMConfig, LoRAConfig, Request, SamplingConfig, adapt
from hpcai.models.llm.engine.vllm import VLLMEngine
from tests.ranks.language_model import LLAMA
from tests.unit.models.llm.test_engine import prompts


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


class SamplingParams:
    def __init__(
        self, temperature: float = 1.0, seed: int | None = None, stop_token_ids: list[int] | None = None, ignore_eos: bool = False,
        max_tokens: int | None = 16, logprobs: int | None = None, detokenize: bool = True,
    ) -> None:  # fmt: skip
        assert logprobs == 0 and ignore_eos and not detokenize
        self.request = SamplingConfig(most=max_tokens, temperature=temperature), seed or 0, stop_token_ids or ()


class FakeLLM:
    """``vllm.LLM``: ``kwargs`` are fields of ``EngineArgs``."""

    arguments: Any = None  # of the last one
    engine_args = {"max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "logprobs_mode",
                   "num_gpu_blocks_override"}  # fmt: skip

    def __init__(
        self, model: str, *, skip_tokenizer_init: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto",
        quantization: str | None = None, gpu_memory_utilization: float = 0.92, **kwargs: Any,
    ) -> None:  # fmt: skip
        assert kwargs.keys() <= self.engine_args and skip_tokenizer_init
        memory = {"gpu_memory_utilization": gpu_memory_utilization}
        FakeLLM.arguments = {"model": model, "dtype": dtype, "quantization": quantization} | memory | kwargs
        self.model, self.is_current = LLM.load(model), True

    def generate(
        self, prompts: Sequence[TokensPrompt], sampling_params: Sequence[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Any]:
        assert self.is_current and not use_tqdm
        pairs = zip(prompts, sampling_params, strict=True)
        requests = [Request(prompt["prompt_token_ids"], *params.request) for prompt, params in pairs]
        outputs = []
        for r in sorted(Engine(self.model).run(requests), key=requests.index):
            log_probs = [{t: SimpleNamespace(logprob=x, rank=1, decoded_token=None)} for t, x in zip(r.output, r.log_probs)]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(r.output), logprobs=log_probs)]))
        return outputs

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        def reload_weights(weights_iterator: Any = None, weights_path: str = "", is_checkpoint_format: bool = True) -> None:
            assert is_checkpoint_format
            self.model, self.is_current = LLM.load(weights_path), False

        assert method == "reload_weights"
        return [reload_weights(*args, **(kwargs or {}))]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.is_current = True
        return True


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=SamplingParams, TokensPrompt=TokensPrompt)
    monkeypatch.setitem(sys.modules, "vllm", module)


def new_model() -> LLM:
    torch.manual_seed(0)
    model = LLM(LLMConfig(**LLAMA | {"positions": 40}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def check(engine: VLLMEngine, model: LLM) -> None:
    for cfg in (SamplingConfig(most=6), SamplingConfig(most=6, temperature=0.8)):
        requests = [Request(prompt, cfg, 5 + n, {3}) for n, prompt in enumerate(prompts())]
        assert {*Engine(model).run(requests)} == {*requests}
        results = engine.generate(prompts(), cfg, range(5, 5 + len(requests)), {3})
        for (tokens, log_probs), request in zip(results, requests, strict=True):
            assert tokens == request.output and log_probs == pytest.approx(request.log_probs, abs=1e-3)


@pytest.mark.usefixtures("fake_vllm")
def test_vllm_gets_settings_prompts_and_present_weights(tmp_path: Path) -> None:
    model = new_model()
    cfg = EngineConfig(max_num_seqs=9, cache_tokens=100, quantization="int8")
    engine = VLLMEngine(model, cfg, tmp_path / "weights", gpu_memory_utilization=0.3)
    assert FakeLLM.arguments == {
        "model": str(tmp_path / "weights"), "dtype": "float32", "quantization": "int8_per_channel_weight_only",
        "gpu_memory_utilization": 0.3, "max_model_len": 40, "max_num_seqs": 9, "max_num_batched_tokens": 1024, "block_size": 16,
        "num_gpu_blocks_override": 6, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    check(engine, model)
    adapt(model, LoRAConfig(rank=2, base_dtype="8bit"))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.4)
    engine.update(model)
    check(engine, model.eval())


@pytest.mark.usefixtures("fake_vllm")
def test_what_vllm_would_do_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    with pytest.raises(ConfigError, match="engine.quantization is int4, .* expected one of none, int8"):
        VLLMEngine(model, EngineConfig(quantization="int4"))
    engine = VLLMEngine(model)
    folder = engine.folder
    with pytest.raises(ConfigError, match="top_k=5.* by which vLLM changes log-probabilities"):
        engine.generate([[1]], SamplingConfig(top_k=5), [0], ())
    with pytest.raises(DataError, match="prompt 1 has token 25"):
        engine.generate([[1], [25]], SamplingConfig(), [0, 1], ())
    monkeypatch.setattr(FakeLLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(ConfigError, match="vLLM keeps keys and values of earlier weights"):
        engine.update(model)
    model.lm_head.weight.shard_spec = None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="sharded over ranks: expected full ones for vLLM; set mesh.tensor"):
        engine.update(model)
    del engine
    assert not folder.exists()


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"generation by vLLM needs vllm: pip install 'hpcai-suite\[vllm\]'"):
        VLLMEngine(new_model())
