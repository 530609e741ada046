"""Language models under EleutherAI's lm-evaluation-harness (Gao et al. 2021): ``simple_evaluate(model=HarnessLM(model))``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError
from hpcai.lazy import import_optional
from hpcai.models.llm.likelihood import greedy_log_likelihoods, log_likelihoods
from hpcai.models.llm.model import LLM
from hpcai.models.llm.text import Completions

_api, _utils, _model_utils = (import_optional(f"lm_eval.{name}", "evaluation tasks need", "lm-eval")
                              for name in ("api.model", "utils", "models.utils"))  # fmt: skip
_SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "repetition"}


class HarnessLM(_api.TemplateLM):  # type: ignore[name-defined]
    """A model as the harness calls it, with the contexts, windows and stop strings of its ``HFLM``.

    Each replica of ``mesh`` evaluates a part of the documents. ``pipeline``: As ``build_pipeline`` returns it. ``batch``: Texts
    of a batch. A sampled text depends on ``seed`` and the index of its request."""

    eot_token_id = prefix_token_id = tokenizer_name = None

    def __init__(self, model: LLM, mesh: Mesh | None = None, pipeline: Any = None, batch: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.model, self.pipeline, self.batch_size, self.seed = model, pipeline, batch, seed
        self.max_length, self.max_gen_toks, self.tokenizer = model.cfg.max_length, 256, model.tokenizer
        self.tokenizer_name, self.eot_token_id, bos = self.tokenizer.identity, self.tokenizer.eos, self.tokenizer.bos
        self.prefix_token_id = self.eot_token_id if bos is None else bos
        if self.prefix_token_id is None:
            raise DataError(f"{self.tokenizer.where}: names no token that begins or ends a text; empty contexts need one")
        mesh = mesh or Mesh({})
        mesh.check_axes("a model under the harness", "replicate", "tensor", "context", "pipeline")
        axis = mesh["replicate"]
        self._device, self._rank, self._world_size = mesh.device, axis.rank, axis.size
        # A group with a long timeout: replicas wait for the slowest one.
        self._replicas = axis if axis.dimension is None else mesh.subgroup("evaluate", axis.dimension.ranks)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(all_gather_object(tensor.cpu(), self._replicas))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        values = all_gather_object(obj, self._replicas)
        return values if self.rank == dst else None

    def barrier(self) -> None:
        all_gather_object(None, self._replicas)

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages as text, up to the next message of the assistant, or else to the end of the last message."""
        text, last = self.tokenizer.render_chat(chat_history, True).text, chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return [*(self.tokenizer.prefix if add_special_tokens else ()), *self.tokenizer.encode(string, special=True)]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        for (_, text), _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(f"continuation {text[:60]!r} has {len(continuation)} tokens, expected 1 to {self.max_length}")
        return greedy_log_likelihoods(self.model, [
            ((context or [self.prefix_token_id])[len(continuation) - self.max_length - 1 :], continuation)
            for _, context, continuation in requests], self.batch_size, self.pipeline)  # fmt: skip

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows of at most all positions that share no scored token."""
        windows = [(index, _utils.make_disjoint_window(window)) for index, request in enumerate(requests)
                   for window in _utils.get_rolling_token_windows(
                       self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)]  # fmt: skip
        totals = [0.0] * len(requests)
        values = log_likelihoods(self.model, [window for _, window in windows], self.batch_size, self.pipeline)
        for (index, _), value in zip(windows, values):
            totals[index] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, which is truncated from its beginning if ``max_gen_toks`` tokens would not fit.
        Raises ConfigError for settings of generation that are not available."""
        completions = Completions(self.model, pipeline=self.pipeline)
        for index, request in enumerate(requests):
            kwargs, seed = self._sampling(request.args[1]), self.seed + index * self.world_size + self.rank
            prompt: Any = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            completions.add(index, prompt[kwargs["most"] - self.max_length :], seed=seed, fresh=True, **kwargs)
        return [text for _, text in sorted(completions)]

    def _sampling(self, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of ``Completions.add`` for those of a task."""
        kwargs = _model_utils.normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        most, is_greedy, stop = kwargs.pop("max_gen_toks"), not kwargs.pop("do_sample"), [*filter(None, kwargs.pop("until"))]
        if kwargs.pop("num_beams", 1) != 1 or kwargs.keys() - _SAMPLING:
            raise ConfigError(f"generation_kwargs {gen_kwargs}: expected until, max_gen_toks, do_sample and {', '.join(_SAMPLING)}")
        if not 0 < most < self.max_length:
            raise ConfigError(f"max_gen_toks is {most}, expected fewer than the {self.max_length} positions of the model")
        stop += [] if self.eot_token_id is None else [self.tokenizer.decode([self.eot_token_id])]
        sampling = {} if is_greedy else {_SAMPLING[name]: value for name, value in kwargs.items()}
        return {"most": most, "stop": stop, **sampling}
