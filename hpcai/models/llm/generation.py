"""Autoregressive generation with a KV cache.   B texts, T tokens, V vocabulary entries, S cache entries, H heads, D channels of one

The first call of the model (prefill) computes the prompts, each further one (decode) the last token of each text. On a GPU a decode
step is one CUDA graph. All state that changes from token to token is therefore on the device, and the host reads tokens while the
next ones are computed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.dist.collectives import get_backend
from hpcai.dist.mesh import Axis
from hpcai.dist.watchdog import before_destroy_process_group
from hpcai.errors import ConfigError, DataError
from hpcai.kernels.causal_attention import decode_attention
from hpcai.models.llm import gathered
from hpcai.models.llm.config import SamplingConfig
from hpcai.models.llm.model import LLM, MLP, CausalAttention, GatedMLP, depends_on_length
from hpcai.nn.cuda_graph import Graph, graph_factory
from hpcai.nn.lm_head import LMHead
from hpcai.parallel.pipeline import Pipeline

_MANY = 32  # tokens that save more time than copies of weights take
_COPIES = 1 << 29  # bytes of these copies, at most
_BLOCK = 128  # cache entries that the first captured step attends to; each further one attends to twice as many


class StepGraphs:
    """Graphs of steps by a key, such as a shape: a step is warmed up in its first call, captured in the second, and then replayed.
    They share a memory pool. ``graph``: A factory of graphs in place of CUDA's. Raises ConfigError if a step cannot be captured."""

    def __init__(self, device: torch.device, graph: Callable[[], Graph] | None = None) -> None:
        self._device, self._graph = device, graph
        self._warmed_up: dict[Any, Graph] = {}
        self.captured: dict[Any, Graph] = {}  # of these
        _open.add(self)

    def run(self, key: Any, step: Callable[[], Any]) -> None:
        if key not in self._warmed_up:
            if not self._warmed_up:  # also after ``close``: the pool of deleted graphs takes no other ones
                self._new_graph = self._graph or graph_factory(self, self._device)
            self._warmed_up[key] = self._new_graph()
            self._warmed_up[key].warm_up(step)  # libraries select algorithms, and communicators connect
            return
        if key not in self.captured:
            try:
                self._warmed_up[key].capture(step)
            except (RuntimeError, NotImplementedError) as problem:
                reason = next(iter(str(problem).strip().splitlines()), "")
                raise ConfigError(f"a step of generation cannot be captured: {reason}; give capture=False") from problem
            self.captured[key] = self._warmed_up[key]
        self.captured[key].replay()

    def close(self) -> None:
        """Delete all graphs; later steps are captured anew. A graph with collectives must be deleted before its process group."""
        if self._device.type == "cuda" and self._warmed_up:
            torch.cuda.synchronize(self._device)  # a graph may be running
        for graph in self._warmed_up.values():
            graph.reset()
        self.captured.clear()
        self._warmed_up.clear()


class Generation(Iterator[list[int | None]]):
    """An iterator over the next token of each text, None for a text that has ended. Set an item of ``ended`` to end that text.
    Between steps the model is unchanged, and memory is freed after the last one."""

    def __init__(
        self, model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, stop: Collection[int], seeds: Sequence[int],
        vocab_size: int | None, pipeline: Pipeline | None, capture: bool, graph: Callable[[], Graph] | None,
    ) -> None:  # fmt: skip
        device = next(model.parameters()).device
        self.model, self.cfg, self.stop, self.pipeline = model, cfg, frozenset(stop), pipeline
        self.vocab_size = min(vocab_size or model.cfg.vocabulary, model.cfg.vocabulary)
        self.lengths, self.max_length = [*map(len, prompts)], max(map(len, prompts))
        self.max_tokens = min(cfg.most, model.cfg.max_length - min(self.lengths))
        self.ended, self.emitted, self.launched = [False] * len(prompts), 0, 0
        self._autocast = autocast_state(device)  # that of the call of ``generate`` holds for all steps
        self.graphs = step_graphs(model, pipeline, capture, graph)  # by the span of attention
        self._in_flight: deque[tuple[Tensor, Any]] = deque()
        self._lookahead = int(device.type == "cuda")  # steps launched before the host reads a token
        self._host_buffers = [torch.empty(len(prompts), dtype=torch.int64, pin_memory=True) for _ in range(2 * self._lookahead)]

        # Decoding state, on the device.
        self.prompts = torch.tensor([[0] * (self.max_length - len(prompt)) + [*prompt] for prompt in prompts], device=device)
        self.last_tokens, self.step = self.prompts[:, -1:].clone(), torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = torch.tensor(self.lengths, device=device)[:, None]
        self.seen = torch.zeros(len(prompts), model.cfg.vocabulary, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            self.seen[row, torch.tensor([*prompt])] = True
        self.seen = self.seen.to(device)
        rows = [torch.rand(self.max_tokens, dtype=torch.float32, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.uniforms = torch.stack(rows, 1).to(device)  # [max_tokens, B]
        size = self._span(self.max_length + self.max_tokens)
        self.cache = KVCache(self.max_length - self.positions, self.max_length, size, len({*self.lengths}) > 1 or bool(self.graphs))
        self._overrides = gathered.gather_overrides(model, pipeline)
        if depends_on_length(model.cfg.rotary):  # cached keys must have the frequencies of later queries
            length = torch.full((), self.max_length + self.max_tokens, device=device)
            self._overrides += [(module, "text_length", length) for module in gathered.local_modules(model, pipeline)]
        for attention in gathered.local_attentions(model):
            cached = _CachedAttention(self.cache, gathered.local_attention(attention))
            self._overrides += [(attention, "update_cache", cached.update), (attention, "core_attention", cached)]
        self._on_cpu = device.type == "cpu" and not is_fully_sharded(model)  # whose weights would stay in inference mode
        if self._on_cpu and self.max_tokens >= _MANY and not self._autocast["enabled"]:
            self._overrides += copy_weights(model)

    def __next__(self) -> list[int | None]:
        if all(self.ended) or self.emitted == self.max_tokens:
            self.close()
            raise StopIteration
        while self.launched < min(self.emitted + 1 + self._lookahead, self.max_tokens):
            self._launch()
        host, event = self._in_flight.popleft()
        if event is not None:
            event.synchronize()
        self.emitted += 1
        tokens = [None if ended else token for token, ended in zip(host.tolist(), self.ended)]
        for row, token in enumerate(tokens):
            if token is not None and (token in self.stop or self.lengths[row] + self.emitted >= self.model.cfg.max_length):
                self.ended[row] = True
        return tokens

    def close(self) -> None:
        """End all texts and free memory."""
        self.ended, self._overrides = [True] * len(self.ended), []
        if self.graphs is not None:
            self.graphs.close()
        self._in_flight.clear()

    # ---- steps

    def _launch(self) -> None:
        device = torch.cuda.device(self.last_tokens.device) if self._lookahead else nullcontext()
        with torch.no_grad(), torch.inference_mode() if self._on_cpu else device:
            (self._decode if self.launched else self._prefill)()
        self.launched += 1
        if not self._lookahead:
            self._in_flight.append((self.last_tokens[:, 0].clone(), None))
            return
        host, event = self._host_buffers[self.launched % 2], torch.cuda.Event()
        host.copy_(self.last_tokens[:, 0], non_blocking=True)
        event.record()
        self._in_flight.append((host, event))

    def _prefill(self) -> None:
        positions = torch.arange(self.max_length, device=self.last_tokens.device) - self.cache.padding
        documents = (positions >= 0).long() if len({*self.lengths}) > 1 else None  # padding is a document of its own
        self._sample(self._logits(self.prompts, positions.clamp(min=0), documents))

    def _decode(self) -> None:
        span = self._span(self.max_length + self.launched)
        if self.graphs is None:
            self._step(span)
        else:
            self.graphs.run(span, partial(self._step, span))

    def _step(self, span: int) -> None:
        self.cache.set_span(span)
        self._sample(self._logits(self.last_tokens, self.positions.clamp(max=self.model.cfg.max_length - 1)))
        self.cache.position.add_(1)
        self.positions.add_(1)

    def _span(self, count: int) -> int:
        """Return the number of cache entries to attend to, at least ``count``; one of few sizes if steps are captured."""
        if self.graphs is None:
            return count
        span, capacity = _BLOCK, -(-(self.max_length + self.max_tokens) // _BLOCK) * _BLOCK
        while span < count:
            span *= 2
        return min(span, capacity)

    def _logits(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor | None:
        """Return the logits of the last token of each text, or None on all pipeline stages but the last.   [B, T] -> [B, V]"""

        def run(model: Any, tokens: Tensor) -> Any:
            return model(tokens, positions=positions, documents=documents)[:, -1]

        model, hook = self.model, None
        training = model.training
        if training:
            model.eval()
        if tokens.shape[1] > 1 and isinstance(model.lm_head, LMHead):
            hook = model.lm_head.register_forward_pre_hook(keep_last_token)
        try:
            with gathered.override_attributes(self._overrides), torch.autocast(**self._autocast, cache_enabled=self.graphs is None):
                y: Tensor | None = run(model, tokens) if self.pipeline is None else self.pipeline.forward(run, tokens, nullcontext)
                return y
        finally:
            if hook is not None:
                hook.remove()
            if training:
                model.train()

    def _sample(self, logits: Tensor | None) -> None:
        if logits is not None:
            u = self.uniforms.index_select(0, self.step)[0]
            self.last_tokens[:, 0] = sample_tokens(logits[:, : self.vocab_size], self.seen[:, : self.vocab_size], self.cfg, u)
        if self.pipeline is not None:
            torch_dist.broadcast(self.last_tokens, group=self.pipeline.axis.group, group_src=self.pipeline.source)
        self.seen.scatter_(1, self.last_tokens, True)
        self.step.add_(1)


def generate(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (),
    seed: int | Sequence[int] = 0, *, vocab_size: int | None = None, pipeline: Any = None, capture: bool = True,
    graph: Callable[[], Graph] | None = None,
) -> Generation:  # fmt: skip
    """Generate tokens after each of ``prompts``, up to a token of ``stop``, which is returned too, or ``cfg.most`` tokens.

    A text depends on its prompt and its seed only. ``seed``: one for each prompt, or that of the first, to which the index is
    added. ``vocab_size``: sample from the first so many vocabulary entries only. Collective over all ranks of a sharded model;
    ``pipeline`` as ``build_pipeline`` returns it. On a GPU decode steps are captured in CUDA graphs, unless ``capture`` is False;
    ``graph`` is a factory of graphs in place of CUDA's. Raises DataError as ``check_prompts``, ConfigError for a stage without
    ``pipeline``.
    """
    check_prompts(prompts, model.cfg.vocabulary, model.cfg.max_length)
    seeds = [seed + n for n in range(len(prompts))] if isinstance(seed, int) else seed
    pipeline = gathered.active_pipeline(model, pipeline)
    return Generation(model, prompts, cfg or SamplingConfig(), stop, seeds, vocab_size, pipeline, capture, graph)


def complete(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (),
    seed: int | Sequence[int] = 0, **kwargs: Any,
) -> list[list[int]]:  # fmt: skip
    """Return all tokens that ``generate`` yields, for each prompt."""
    steps = list(generate(model, prompts, cfg, stop, seed, **kwargs))
    return [[token for token in row if token is not None] for row in zip(*steps)]


# ---- KV cache


class KVCache:
    """The layout of the KV cache, the same in all layers: S consecutive entries, the first of them padding for short prompts.
    ``padding`` [B, 1]: padding entries of each text; ``position`` [1]: the next free entry, on the device only"""

    def __init__(self, padding: Tensor, length: int, capacity: int, masked: bool) -> None:
        self.padding, self.capacity, self.masked = padding, capacity, masked
        self.position = torch.full((1,), length, device=padding.device)
        self.span = length
        self.mask: Tensor | None = None

    def set_span(self, span: int) -> None:
        """Limit attention to the first ``span`` entries. The mask leaves out padding and entries after the new token."""
        self.span = span
        if self.masked:
            entries = torch.arange(span, device=self.position.device)
            self.mask = ((entries <= self.position) & (entries >= self.padding))[:, None, None]

    def window_mask(self, window: int | None) -> Tensor | None:
        """Return the mask of a sliding window, or None if attention is to all entries of the span."""
        if window is None or window >= self.span:
            return self.mask
        is_near = torch.arange(self.span, device=self.position.device) > self.position - window
        return is_near[None, None, None] if self.mask is None else self.mask & is_near


class _CachedAttention(CausalAttention):
    """Attention of one layer with its cached keys and values: in prefill of prompts to themselves, in decode of one new token of
    each text to all of its tokens.   q [B, H, 1, D], k and v [B, H or a divisor of it, S, D] -> [B, H, 1, D]"""

    def __init__(self, cache: KVCache, attention: CausalAttention) -> None:
        super().__init__(attention.window, attention.softcap)
        self.cache = cache
        self.kv: tuple[Tensor, ...] = ()

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append k and v of new tokens, and return those to attend to.   two of [B, H, T, D] -> two of [B, H, S, D]"""
        if not self.kv:
            self.kv = tuple(x.new_zeros((*x.shape[:2], self.cache.capacity, x.shape[3])) for x in new)
            for cached, x in zip(self.kv, new):
                cached[:, :, : x.shape[2]] = x
            return new
        for cached, x in zip(self.kv, new):
            cached.index_copy_(2, self.cache.position, x)
        return tuple(cached[:, :, : self.cache.span] for cached in self.kv)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        if q.shape[2] == k.shape[2]:
            return super().forward(q, k, v, documents, sinks)
        return decode_attention(q, k, v, self.cache.window_mask(self.window), self.softcap, sinks)


@torch.no_grad()
def copy_weights(model: nn.Module) -> list[gathered.Override]:
    """Return overrides by copies of weights, of layers with the same input in one. A CPU multiplies few tokens with a column-major
    matrix of more outputs than inputs in half of the time. Weights that are sharded, quantized or adapted are left out."""
    overrides, left = list[gathered.Override](), _COPIES
    for part in model.modules():
        linears: Any = [part] if isinstance(part, LMHead) else [part.up_proj] if isinstance(part, MLP) else []
        linears = [part.gate_proj, part.up_proj] if isinstance(part, GatedMLP) else getattr(part, "first_layers", linears)
        is_plain = all(type(x) in (nn.Linear, LMHead) and x.weight.itemsize >= 4 and not x._forward_hooks for x in linears)
        size, sizes = sum(x.weight.nbytes for x in linears), [x.out_features for x in linears]
        if not linears or not is_plain or size > left or sum(sizes) <= linears[0].in_features:
            continue
        left -= size
        weight = torch.cat([x.weight.t() for x in linears], 1).t()
        if len(linears) == 1:
            overrides.append((linears[0], "weight", nn.Parameter(weight, requires_grad=False)))
        else:
            biases = [weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
            bias = None if all(x.bias is None for x in linears) else torch.cat(biases)
            overrides.append((part, "fused_linear", lambda x, *_, w=weight, b=bias, n=sizes: F.linear(x, w, b).split(n, -1)))
    return overrides


def is_fully_sharded(model: LLM) -> bool:
    return any(hasattr(part, "unshard") for part in model.modules())


def keep_last_token(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop all hidden states but the last: the logits of a long prompt would be the largest tensor, and only the last are used."""
    return (args[0][:, -1:], *args[1:])


def autocast_state(device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``torch.autocast`` for its present state. For a step that is captured, ``cache_enabled=False`` is one
    more: a graph would read weights from the cache of autocast after they are freed."""
    kind = device.type
    return {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}


def step_graphs(model: LLM, pipeline: Pipeline | None, capture: bool, graph: Callable[[], Graph] | None) -> StepGraphs | None:
    """Return the graphs of steps of ``model``, none yet, or None if its steps are not to be captured, or cannot be."""
    device = next(model.parameters()).device
    if graph is None and (not capture or device.type != "cuda" or pipeline is not None or is_fully_sharded(model)):
        return None
    axes = [axis for part in model.modules() if isinstance(axis := getattr(part, "axis", None), Axis)]
    can_capture = graph is not None or all(get_backend(device, axis) in ("nccl", "none") for axis in axes)
    return StepGraphs(device, graph) if can_capture else None


_open: "weakref.WeakSet[StepGraphs]" = weakref.WeakSet()


def close_all() -> None:
    """Delete all graphs of steps."""
    for graphs in list(_open):
        graphs.close()


before_destroy_process_group.append(close_all)


# ---- sampling


def sample_tokens(logits: Tensor, seen: Tensor, cfg: SamplingConfig, uniforms: Tensor | Sequence[float]) -> Tensor:
    """Sample a token for each row by inverse transform.   logits [B, V], earlier tokens [B, V], uniforms [B] in [0, 1) -> [B]"""
    logits = filter_logits(logits.float(), seen, cfg)
    if cfg.temperature == 0:
        return logits.argmax(-1)
    cdf = logits.double().softmax(-1).cumsum(-1)
    target = torch.as_tensor(uniforms, dtype=cdf.dtype, device=cdf.device)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True)
    return tokens.clamp(max=logits.shape[-1] - 1)[:, 0]


def filter_logits(logits: Tensor, seen: Tensor, cfg: SamplingConfig) -> Tensor:
    """Apply repetition penalty, temperature, top-k, top-p and min-p in this order; excluded tokens become -inf.   [B, V]"""
    if cfg.repetition != 1:
        logits = torch.where(seen, torch.where(logits < 0, logits * cfg.repetition, logits / cfg.repetition), logits)
    if cfg.temperature > 0:
        logits = logits / cfg.temperature
    if cfg.top_k is not None:
        least = logits.topk(min(cfg.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if cfg.top_p < 1:
        ordered, order = logits.sort(-1)
        excluded = ordered.softmax(-1).cumsum(-1) <= 1 - cfg.top_p
        excluded[:, -1] = False  # at least one token remains
        logits = logits.masked_fill(excluded.scatter(1, order, excluded), -torch.inf)
    if cfg.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < cfg.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return logits


def check_prompts(
    prompts: Sequence[Sequence[int]], vocabulary: int, positions: int, names: Callable[[int], str] = "prompt {}".format
) -> None:
    """Raise DataError for no prompt, or one that is empty, too long to continue, or has a token outside of the vocabulary.
    ``names``: the name of a prompt in errors, by its index."""
    if not prompts:
        raise DataError("there is no prompt; give one at least")
    for n, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"{names(n)} has no token; give at least one, such as the token that begins a text")
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise DataError(f"{names(n)} has token {wrong[0]}, the model's vocabulary {vocabulary}; is it of another tokenizer?")
        if len(prompt) >= positions:
            raise DataError(f"{names(n)} has {len(prompt)} tokens, the model {positions} positions in all; shorten it")
