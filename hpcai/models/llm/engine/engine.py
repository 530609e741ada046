"""A generation engine: many texts at once, each with its own prompt, sampling and length, over a paged KV cache.

    engine = Engine(model)
    cfg = SamplingConfig(most=200, temperature=1.0)
    for request in engine.run(Request(prompt, cfg, seed=n) for n, prompt in enumerate(prompts)):
        print(request.output)

T tokens of a step, N of which logits are needed, V vocabulary entries
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor

from hpcai.data.readers import available_memory
from hpcai.dist.collectives import all_reduce_min
from hpcai.dist.mesh import Axis
from hpcai.dist.watchdog import HEARTBEAT
from hpcai.errors import ConfigError
from hpcai.models.llm import gathered
from hpcai.models.llm.config import EngineConfig, SamplingConfig
from hpcai.models.llm.engine.attention import FEW, Layout, PagedAttention, Span, device_tensor
from hpcai.models.llm.engine.blocks import BlockPool
from hpcai.models.llm.engine.quantization import QuantizedLayers
from hpcai.models.llm.engine.scheduler import Chunk, Request, Scheduler
from hpcai.models.llm.generation import autocast_state, check_prompts, copy_weights, is_fully_sharded, sample_tokens, step_graphs
from hpcai.models.llm.model import LLM, depends_on_length
from hpcai.nn.cuda_graph import Graph
from hpcai.nn.lm_head import LMHead
from hpcai.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)
_MEMORY = 0.5  # fraction of the free memory for the cache
_COLUMNS = 4  # blocks of a table of a captured step, at least


class CachedModel:
    """A model with paged keys and values. The weights may change; ``refresh`` takes account of it.

    On a GPU, steps of queries alone are captured, by the rounded numbers of queries and of blocks of a text. Padding queries write
    into a block behind those of the pool, and attend to nothing. ``capture`` and ``graph`` as for ``Engine``.
    """

    def __init__(
        self, model: LLM, pipeline: Pipeline | None, cfg: EngineConfig, capture: bool, graph: Callable[[], Graph] | None
    ) -> None:
        self.model, self.pipeline = model, pipeline
        self.quantized = None if cfg.quantization == "none" else QuantizedLayers(model, cfg)
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.attentions: list[PagedAttention] = []
        self._has_tables = self.device.type == "cuda" or graph is not None
        self.graphs = step_graphs(model, pipeline, capture, graph)
        self._layouts, self._addresses = dict[Any, Layout](), list[Any]()
        self._logits: Any = None  # of a captured step, of all the same: they are read before the next step
        self._length = torch.full((), model.cfg.max_length, device=self.device)

    def allocate(self, count: int, size: int, queries: int) -> None:
        """Allocate ``count`` blocks of ``size`` tokens. ``queries``: The largest number of those of captured steps."""
        self.count, self.size, self.queries = count, size, _round_queries(queries)
        blocks, attentions = count + self._has_tables, gathered.local_attentions(self.model)
        self.attentions = [PagedAttention(gathered.local_attention(each), blocks, size) for each in attentions]
        self.refresh()

    def refresh(self) -> None:
        if self.graphs is not None:  # they are right for all values of weights in the same memory, as optimizers write them
            tensors = *self.model.parameters(), *self.model.buffers()
            addresses = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors]
            if addresses != self._addresses:
                self.graphs.close()
            self._addresses = addresses
        self._on_cpu = self.device.type == "cpu" and not is_fully_sharded(self.model)  # whose weights would stay in inference mode
        self._overrides = gathered.gather_overrides(self.model, self.pipeline)
        for attention, paged in zip(gathered.local_attentions(self.model), self.attentions):
            self._overrides += [(attention, "update_cache", paged.update), (attention, "core_attention", paged)]
        if depends_on_length(self.model.cfg.rotary):  # keys must have the frequencies of later queries: those of the longest text
            modules = gathered.local_modules(self.model, self.pipeline)
            self._overrides += [(module, "text_length", self._length) for module in modules]
        if self.quantized is not None:
            self._overrides += self.quantized.refresh()
        if self._on_cpu and self.graphs is None and not torch.is_autocast_enabled("cpu"):
            self._overrides += copy_weights(self.model if self.quantized is None else self.model.lm_head)

    def token_bytes(self) -> int:
        """Return the bytes of the keys and values of a token on this rank."""
        cfg = self.model.cfg
        heads = (max(1, cfg.kv_heads * each.o_proj.weight.shape[1] // (cfg.heads * each.value_dim))
                 for each in gathered.local_attentions(self.model))  # fmt: skip
        return 2 * sum(heads) * cfg.head_dim * self.dtype.itemsize

    def run(self, function: Callable[[], Any]) -> Any:
        """Return ``function()``, in which the model uses the cache."""
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.no_grad(), torch.inference_mode() if self._on_cpu else device, gathered.override_attributes(self._overrides):
            if not self.model.training:
                return function()
            self.model.eval()
            try:
                return function()
            finally:
                self.model.train()

    def lay_out(self, spans: Sequence[Span]) -> Layout:
        """Return the layout of a step, that of its graph if it is captured."""
        few, count = [span for span in spans if len(span.tokens) <= FEW], sum(len(span.tokens) for span in spans)
        columns = max((len(span.blocks) for span in few), default=0)
        if self.graphs is None or count > self.queries or len(few) < len(spans):
            return Layout(spans, self.size, self.device, columns * self._has_tables)
        rows, columns = _round_queries(count), max(_COLUMNS, 1 << (columns - 1).bit_length())
        key = rows, columns, *autocast_state(self.device).values()
        new = Layout([*spans, *[Span([self.count], -1, [0], 0)] * (rows - count)], self.size, self.device, columns)
        new.key, new.sampled = key, F.pad(new.sampled, (0, rows - len(new.sampled)))
        return self._layouts.setdefault(key, new).copy_(new)

    def forward(self, layout: Layout) -> Tensor:
        """Return logits, those of a captured step with further rows behind.   [N, V]"""
        if self.graphs is None or layout.key is None:
            return self.forward_module(layout)
        self.graphs.run(layout.key, partial(self._captured_step, layout))
        y: Tensor = self._logits[: len(layout.sampled)]
        return y

    def _captured_step(self, layout: Layout) -> None:
        layout.row_cache.clear()
        with torch.autocast(**autocast_state(self.device), cache_enabled=False):
            logits = self.forward_module(layout)
        if self._logits is None:
            self._logits = logits.new_empty(self.queries, logits.shape[1])
        self._logits[: len(logits)].copy_(logits)

    def forward_module(self, layout: Layout, module: Any = None, hidden: Tensor | None = None) -> Tensor:
        """Return logits, or what the next pipeline stage takes. ``module``: The stage.   [N, V], or [1, T, C]"""
        module = module or self.model
        for attention in self.attentions:
            attention.layout = layout
        hook = None
        if isinstance(module.lm_head, LMHead):
            hook = module.lm_head.register_forward_pre_hook(lambda head, args: (args[0][:, layout.sampled], *args[1:]))
        try:
            y: Tensor = module(layout.tokens if hidden is None else hidden, positions=layout.positions.clamp(min=0))
        finally:
            if hook is not None:
                hook.remove()
        return y if hook is None else y[0]


def _round_queries(count: int) -> int:
    """Return a number of queries of captured steps, at least ``count``: 1, 2, 4, 8, 16, 24 and so on."""
    return -(-count // 8) * 8 if count > 8 else 1 << (count - 1).bit_length()


class _Step(NamedTuple):
    """A step, which may be at any stage of the pipeline. ``chunks``: In the order of the spans of ``layout``."""

    chunks: list[Chunk]
    layout: Layout


class Engine:
    """Continues texts by continuous batching. A text depends on its prompt, sampling and seed only, to rounding: other texts of its
    steps change neither its random numbers nor its tokens.

    ``draft``: A small model with the same tokens, which proposes the next ones of each text (Leviathan et al. 2023): those that
    ``model`` samples as well are taken, so that it changes no token. ``vocab_size``: Sample from the first so many vocabulary
    entries only. Collective over all ranks of a sharded model, which get the same requests; ``pipeline`` as ``build_pipeline``
    returns it, whose stages compute different texts at the same time. The weights may change between texts; call ``reset`` then.
    Raises ConfigError for a stage without ``pipeline``, a draft model beside it or with other tokens, and a cache smaller than a
    block.

    On a GPU steps without prefill are captured in CUDA graphs, unless ``capture`` is False; ``graph`` is a factory of graphs in
    place of CUDA's. ``reset`` keeps them while parameters and buffers stay in their memory.
    """

    def __init__(
        self, model: LLM, cfg: EngineConfig | None = None, *, draft: LLM | None = None, vocab_size: int | None = None,
        pipeline: Any = None, capture: bool = True, graph: Callable[[], Graph] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.cfg, self.pipeline = model, cfg or EngineConfig(), gathered.active_pipeline(model, pipeline)
        self.vocab_size = min(vocab_size or model.cfg.vocabulary, model.cfg.vocabulary)
        self.target = CachedModel(model, self.pipeline, self.cfg, capture, graph)
        self.draft = None if draft is None else CachedModel(draft, None, self.cfg, capture, graph)
        self.max_length, self.device = model.cfg.max_length, self.target.device
        if draft is not None:
            if draft.cfg.vocabulary != model.cfg.vocabulary or self.pipeline is not None:
                fault = f"a draft model of {draft.cfg.vocabulary} vocabulary entries, the model has {model.cfg.vocabulary}"
                raise ConfigError(f"{fault}; expected as many, and no pipeline")
            self.max_length = min(self.max_length, draft.cfg.max_length)
        size, count, ahead = self.cfg.block_size, self._count_blocks(), self.cfg.num_speculative_tokens if draft else 0
        self.blocks = BlockPool(count)
        for each in self._models:
            each.allocate(count, size, self.cfg.max_num_seqs * (1 + ahead))
        stages = 1 if self.pipeline is None else self.pipeline.count
        sizes = -(-self.cfg.max_num_seqs // stages), -(-self.cfg.max_num_batched_tokens // stages)
        self.schedulers = [Scheduler(self.blocks, size, *sizes, ahead) for _ in range(stages)]
        self._turn, self._steps = 0, deque[_Step | None]([None] * stages)  # by stage
        self._hidden: dict[int, Tensor] = {}  # the input of each local stage
        self.proposed = self.accepted = 0
        """the numbers of tokens that the draft model proposed, and of these that were taken"""

    @property
    def _models(self) -> list[CachedModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def unfinished(self) -> int:
        """The number of texts that have not ended."""
        return sum(len(each.running) + len(each.waiting) for each in self.schedulers)

    def reset(self) -> None:
        """Take account of changed weights: no text shares earlier keys and values. Raises ConfigError while texts are continued."""
        if self.unfinished:
            raise ConfigError(f"{self.unfinished} texts are not finished, and have keys of earlier weights; end them first")
        self.blocks.clear_cache()
        for each in self._models:
            each.refresh()

    def update(self, model: LLM) -> None:
        """Take account of the present weights of ``model``, that of the engine."""
        self.reset()

    def add(self, request: Request) -> Request:
        """Add a text. Raises DataError as ``check_prompts``, ConfigError for one that the cache cannot hold."""
        named = f"prompt {0 if request.name is None else request.name}"
        check_prompts([request.prompt], self.model.cfg.vocabulary, self.max_length, lambda _: named)
        longest = min(len(request.prompt) + request.cfg.most, self.max_length)
        if longest > (capacity := self.blocks.count * self.cfg.block_size):
            fault = f"a text of {len(request.prompt)} tokens and {request.cfg.most} further ones does not fit into a cache of"
            raise ConfigError(f"{fault} {capacity} tokens; set engine.cache_tokens to more, or most to less")
        generator = torch.Generator().manual_seed(request.seed)
        request.uniforms = torch.rand(request.cfg.most, dtype=torch.float32, generator=generator).tolist()
        min(self.schedulers, key=lambda each: len(each.waiting) + len(each.running)).add(request)
        return request

    def end(self, request: Request) -> None:
        """End a text before its time. Between steps only."""
        request.ended = True
        if not any(chunk.request is request for step in [*self._steps][:-1] if step for chunk in step.chunks):
            self._release(request)  # otherwise later stages still read and write its blocks

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Request]:
        """Add texts, and yield each when it ends, until all have ended."""
        for request in requests:
            self.add(request)
        while self.unfinished:
            yield from (request for request in self.step() if request.ended)

    def generate(
        self, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, seeds: Sequence[int], stop: Collection[int] = ()
    ) -> list[tuple[list[int], list[float]]]:
        """Return the tokens after each prompt, with a token of ``stop`` at the end, and their log-probabilities."""
        requests = [self.add(Request(prompt, cfg, seed, stop, name=n)) for n, (prompt, seed) in enumerate(zip(prompts, seeds))]
        while self.unfinished:
            self.step()
            HEARTBEAT.beats += 1
        return [(request.output, request.log_probs) for request in requests]

    def step(self) -> list[Request]:
        """Compute the next step, and return the requests that have new tokens."""
        scheduler = self.schedulers[self._turn]
        self._turn = (self._turn + 1) % len(self.schedulers)
        before, chunks = scheduler.preempted, scheduler.next_chunks()
        if before == 0 and scheduler.preempted:
            logger.warning(
                "the KV cache of %d tokens is full: texts are preempted, and computed again later; set engine.cache_tokens to "
                "more, or engine.max_num_seqs to fewer", self.blocks.count * self.cfg.block_size,
            )  # fmt: skip
        if self.draft is not None and chunks:
            self.draft.run(lambda: self._propose(chunks))
        self._steps.appendleft(self._lay_out(chunks) if chunks else None)
        self._steps.pop()
        logits = self.target.run(self._compute)
        return [] if self._steps[-1] is None else self._finish(self._steps[-1], logits)

    # ---- a step

    def _release(self, request: Request) -> None:
        scheduler = next(each for each in self.schedulers if request in each.running or request in each.waiting)
        scheduler.waiting.remove(request) if request in scheduler.waiting else scheduler.finish(request)

    def _lay_out(self, chunks: Sequence[Chunk]) -> _Step:
        spans = []
        for chunk in chunks:
            request, end = chunk.request, chunk.request.computed + chunk.count
            tokens = [*request.tokens[request.computed : end], *chunk.proposed]
            spans.append(Span(request.blocks, request.computed, tokens, (1 + len(chunk.proposed)) * chunk.samples))
        order = sorted(range(len(chunks)), key=lambda n: len(spans[n].tokens) > FEW)
        return _Step([chunks[n] for n in order], self.target.lay_out([spans[n] for n in order]))

    def _propose(self, chunks: Sequence[Chunk]) -> None:
        """Have the draft model compute the tokens of the chunks, and propose the next ones of texts in decode."""
        assert self.draft is not None
        new = [(chunk, chunk.request.tokens[chunk.request.drafted : chunk.request.computed + chunk.count]) for chunk in chunks]
        while new:
            new.sort(key=lambda pair: len(pair[1]) > FEW)
            asked = [chunk for chunk, _ in new if chunk.ahead]
            spans = [Span(chunk.request.blocks, chunk.request.drafted, tokens, int(chunk.ahead > 0)) for chunk, tokens in new]
            logits = self.draft.forward(self.draft.lay_out(spans))
            for chunk, tokens in new:
                chunk.request.drafted += len(tokens)
            if asked:
                tokens, _ = self._sample([(chunk.request, chunk.proposed) for chunk in asked], logits).tolist()
                for chunk, token in zip(asked, tokens):
                    chunk.proposed.append(int(token))
            new = [(chunk, chunk.proposed[-1:]) for chunk in asked if len(chunk.proposed) < chunk.ahead]

    def _compute(self) -> Tensor | None:
        """Run the local stages, each on its step, and return the logits of the last one.   [N, V], or None on other ranks"""
        if self.pipeline is None:
            return None if self._steps[0] is None else self.target.forward(self._steps[0].layout)
        stages, outputs = self.pipeline.stages, dict[int, Tensor]()
        for stage in stages.local_stages:
            if (step := self._steps[stage]) is not None:
                outputs[stage] = self.target.forward_module(step.layout, stages.module(stage), self._hidden.pop(stage, None))
        self._exchange(outputs)
        return outputs.get(self.pipeline.count - 1)

    def _exchange(self, outputs: dict[int, Tensor]) -> None:
        """Send the outputs of the local stages to the next ones, for the next step."""
        assert self.pipeline is not None
        ranks, axis, operations = self.pipeline.rank_of, self.pipeline.axis, list[tuple[Any, Tensor, int]]()
        for stage, (step, rank, other) in enumerate(zip(self._steps, ranks, ranks[1:])):
            if step is None:
                continue
            if rank == axis.rank == other:
                self._hidden[stage + 1] = outputs[stage]
            elif rank == axis.rank:
                operations.append((torch_dist.isend, outputs[stage], other))
            elif other == axis.rank:
                size = 1, step.layout.tokens.shape[1], self.model.cfg.width
                self._hidden[stage + 1] = torch.empty(size, dtype=self.target.dtype, device=self.device)
                operations.append((torch_dist.irecv, self._hidden[stage + 1], rank))
        if operations:
            works = torch_dist.batch_isend_irecv([
                torch_dist.P2POp(kind, tensor, group=axis.group, group_peer=peer) for kind, tensor, peer in operations
            ])  # fmt: skip
            for work in works:
                work.wait()

    def _finish(self, step: _Step, logits: Tensor | None) -> list[Request]:
        """Take account of a computed step, and return the requests with new tokens."""
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        rows = [(chunk.request, chunk.proposed[:n]) for chunk in sampling for n in range(1 + len(chunk.proposed))]
        numbers = torch.empty(2, len(rows), dtype=torch.float64, device=self.device)
        if logits is not None and rows:
            numbers = self._sample(rows, logits)
        if self.pipeline is not None and rows:
            torch_dist.broadcast(numbers, group=self.pipeline.axis.group, group_src=self.pipeline.source)
        sampled, changed = zip(*numbers.tolist()), list[Request]()
        for chunk in step.chunks:
            request, count = chunk.request, len(chunk.request.tokens)
            pairs = [next(sampled) for _ in range((1 + len(chunk.proposed)) * chunk.samples)]
            for n, (token, log_prob) in enumerate(() if request.ended else pairs):
                request.tokens.append(int(token))
                request.log_probs.append(log_prob)
                request.ended = token in request.stop or not request.left or len(request.tokens) >= self.max_length
                if request.ended or n == len(chunk.proposed) or token != chunk.proposed[n]:
                    break
            accepted = max(len(request.tokens) - count - 1, 0)
            self.proposed, self.accepted = self.proposed + len(chunk.proposed), self.accepted + accepted
            request.computed += chunk.count + accepted
            request.drafted = min(request.drafted, request.computed)
            if len(request.tokens) > count:
                changed.append(request)
            if request.ended:
                self._release(request)
        return changed

    def _sample(self, rows: Sequence[tuple[Request, Sequence[int]]], logits: Tensor) -> Tensor:
        """Return the token after those of each text and the further ones of its row, and its log-probability.   logits [N, V] ->
        [2, N] float64"""
        logits = logits[: len(rows), : self.vocab_size]
        if any(request.processor for request, _ in rows):
            logits = torch.stack([
                row if request.processor is None else request.processor([*request.tokens, *further], row)
                for (request, further), row in zip(rows, logits)
            ])  # fmt: skip
        numbers, places = torch.empty(2, len(rows), dtype=torch.float64, device=logits.device), dict[SamplingConfig, list[int]]()
        for n, (request, _) in enumerate(rows):
            places.setdefault(request.cfg, []).append(n)
        for cfg, place in places.items():
            index = slice(None) if len(places) == 1 else device_tensor(place, logits.device)
            chosen = logits[index]
            seen = torch.zeros(len(place), self.model.cfg.vocabulary * (cfg.repetition != 1), dtype=torch.bool)
            if cfg.repetition != 1:
                for row, n in enumerate(place):
                    seen[row, [*rows[n][0].tokens, *rows[n][1]]] = True
            seen = device_tensor(seen[:, : self.vocab_size], logits.device, torch.bool)
            uniforms = [rows[n][0].uniforms[len(rows[n][0].output) + len(rows[n][1])] for n in place]
            tokens = sample_tokens(chosen, seen, cfg, device_tensor(uniforms, logits.device, torch.float64))
            scaled = chosen.double() / (cfg.temperature or 1.0)
            numbers[0, index] = tokens.double()
            numbers[1, index] = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return numbers

    def _count_blocks(self) -> int:
        """Return the number of blocks of the cache, the same on all ranks of the model."""
        size, tokens = self.cfg.block_size, self.cfg.cache_tokens
        if tokens is None:
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
            fitting = int(_MEMORY * free) // max(sum(each.token_bytes() for each in self._models), 1)
            tokens = min(self.cfg.max_num_seqs * -(-self.max_length // size) * size, fitting)
            axes = {axis for part in self.model.modules() if isinstance(axis := getattr(part, "axis", None), Axis)}
            for axis in sorted(axes | ({self.pipeline.axis} if self.pipeline else set()), key=lambda axis: axis.name):
                tokens = int(all_reduce_min(torch.tensor(tokens), axis))
        if tokens < size:
            fault = f"a cache of {tokens} tokens is less than a block of {size} (engine.block_size)"
            raise ConfigError(f"{fault}; set engine.cache_tokens to more")
        return tokens // size
