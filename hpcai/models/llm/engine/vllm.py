"""vLLM (Kwon et al. 2023) as the generation engine of a model, by the Python interface of version 0.33.

    engine = VLLMEngine(model, EngineConfig(max_num_seqs=256), gpu_memory_utilization=0.4)
    pairs = engine.generate(prompts, SamplingConfig(temperature=1.0), seeds=range(len(prompts)), stop={2})
    engine.update(model)                                   # after a step of training
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from hpcai.errors import ConfigError
from hpcai.lazy import import_optional
from hpcai.models.llm.config import EngineConfig, SamplingConfig
from hpcai.models.llm.generation import check_prompts, is_fully_sharded
from hpcai.models.llm.load import save_folder
from hpcai.models.llm.model import LLM
from hpcai.nn.quantized import full_weight
from hpcai.parallel.pipeline_stages import StageOutput

_QUANTIZATION = {"none": None, "int8": "int8_per_channel_weight_only"}  # vLLM quantizes when it loads weights


class VLLMEngine:
    """Continues texts by a vLLM engine with the weights of ``model``, which it reads from a folder of Hugging Face.

    ``kwargs``: Further arguments of ``vllm.LLM``, such as ``tensor_parallel_size``. ``folder``: That of the weights, which the
    processes of vLLM read; by default one in ``TMPDIR``, as long as the engine is used. Raises MissingExtraError without vLLM,
    ConfigError for sharded weights and for ``quantization`` that vLLM has no method for, CheckpointError for a model that no family
    of Hugging Face has."""

    def __init__(self, model: LLM, cfg: EngineConfig | None = None, folder: str | Path | None = None, **kwargs: Any) -> None:
        self._vllm = import_optional("vllm", "generation by vLLM needs", "vllm")
        self.cfg, self.model_cfg = cfg or EngineConfig(), model.cfg
        if self.cfg.quantization not in _QUANTIZATION:
            problem = f"engine.quantization is {self.cfg.quantization}, to which vLLM rounds no weights that it reads"
            raise ConfigError(f"{problem}: expected one of {', '.join(_QUANTIZATION)}")
        self._temporary = TemporaryDirectory(prefix="hpcai-vllm-") if folder is None else None
        self.folder = Path(folder or self._temporary.name)  # type: ignore[union-attr]
        self._save(model)
        settings = {name: getattr(self.cfg, name) for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
        if self.cfg.cache_tokens is not None:
            settings["num_gpu_blocks_override"] = self.cfg.cache_tokens // self.cfg.block_size
        self._llm = self._vllm.LLM(**settings | {
            "model": str(self.folder), "skip_tokenizer_init": True, "max_model_len": model.cfg.max_length,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "logprobs_mode": "processed_logprobs",
            "quantization": _QUANTIZATION[self.cfg.quantization], **kwargs,
        })  # fmt: skip

    def generate(
        self, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, seeds: Sequence[int], stop: Collection[int]
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens after each prompt, with the one of ``stop`` at which it ended, and their log-probabilities at the
        temperature of ``cfg``, in nats. Raises DataError as ``check_prompts``, ConfigError for sampling from some tokens only:
        vLLM's log-probabilities would be relative to these."""
        if cfg != SamplingConfig(most=cfg.most, temperature=cfg.temperature):
            raise ConfigError(f"sampling is {cfg}, by which vLLM changes log-probabilities: expected most and temperature alone")
        check_prompts(prompts, self.model_cfg.vocabulary, self.model_cfg.max_length)
        params = [
            self._vllm.SamplingParams(temperature=cfg.temperature, max_tokens=cfg.most, seed=seed, stop_token_ids=[*stop],
                                      ignore_eos=True, logprobs=0, detokenize=False) for seed in seeds
        ]  # fmt: skip
        inputs = [self._vllm.TokensPrompt(prompt_token_ids=[*prompt]) for prompt in prompts]
        results = [x.outputs[0] for x in self._llm.generate(inputs, params, use_tqdm=False)]
        return [([*x.token_ids], [each[token].logprob for token, each in zip(x.token_ids, x.logprobs)]) for x in results]

    def update(self, model: LLM) -> None:
        """Have vLLM read the present weights of ``model``, and forget the keys and values of earlier ones."""
        self._save(model)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
        if not self._llm.reset_prefix_cache():
            raise ConfigError("vLLM keeps keys and values of earlier weights, since texts are not finished; end them before update")

    @torch.no_grad()
    def _save(self, model: LLM) -> None:
        is_stage = any(isinstance(part, StageOutput) for part in model.modules())
        if is_stage or is_fully_sharded(model) or any(hasattr(x, "shard_spec") for x in model.parameters()):
            expected = "expected full ones for vLLM; set mesh.tensor, mesh.pipeline and mesh.expert to 1, and leave step.shard out"
            raise ConfigError(f"the weights are sharded over ranks: {expected}")
        dtype, state = next(model.parameters()).dtype, model.state_dict()
        state = {name: x for name, x in state.items() if ".adapter." not in name and not name.endswith(".scale")}
        for name, part in model.named_modules():
            if f"{name}.weight" in state and isinstance(part, nn.Linear):
                weight, adapter = full_weight(part), getattr(part, "adapter", None)
                state[f"{name}.weight"] = (weight if adapter is None else weight + adapter.delta_weight).to(dtype)
        save_folder(state, model.cfg, self.folder, source=model.folder)
