"""A generation engine: many texts at once, each with its own prompt, sampling and length, over a paged KV cache.

    engine = Engine(model)
    for request in engine.run(Request(prompt, SamplingConfig(most=200, temperature=1.0), seed=n) for n, prompt in enumerate(prompts)):
        print(request.output)

T tokens of a step, N texts of which it samples a token, V vocabulary entries
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.data.readers import available_memory
from hpcai.dist.collectives import all_reduce_min
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError
from hpcai.models.llm.config import EngineConfig
from hpcai.models.llm.engine.attention import Layout, PagedAttention
from hpcai.models.llm.engine.blocks import BlockPool
from hpcai.models.llm.engine.scheduler import Chunk, Request, Scheduler
from hpcai.models.llm.gathered import (
    active_pipeline,
    gather_overrides,
    local_attention,
    local_attentions,
    local_modules,
    override_attributes,
)
from hpcai.models.llm.generation import check_prompts, copy_weights, is_fully_sharded, sample_tokens
from hpcai.models.llm.model import LLM, depends_on_length
from hpcai.nn.lm_head import LMHead

logger = logging.getLogger(__name__)
_MEMORY = 0.5  # fraction of the free memory for the cache


@dataclass(frozen=True)
class _Step:
    """A step in the pipeline: its chunks, and their places on the device."""

    chunks: Sequence[Chunk]
    layout: Layout


class Engine:
    """Continues texts by continuous batching. A text depends on its prompt, sampling and seed only, to rounding: what shares its
    steps does not change the random numbers.

    ``vocab_size``: sample from the first so many vocabulary entries only. Collective over all ranks of a sharded model, which get the
    same requests; ``pipeline`` as ``build_pipeline`` returns it, whose stages then compute different texts at the same time. The
    weights may change between steps; call ``reset`` then. Raises ConfigError for a stage without ``pipeline``, and a cache that is
    smaller than a block.
    """

    def __init__(self, model: LLM, cfg: EngineConfig | None = None, *, vocab_size: int | None = None, pipeline: Any = None) -> None:
        self.model, self.cfg, self.pipeline = model, cfg or EngineConfig(), active_pipeline(model, pipeline)
        self.vocab_size = min(vocab_size or model.cfg.vocabulary, model.cfg.vocabulary)
        weight = next(model.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        size, count = self.cfg.block, self._count_blocks()
        self.blocks = BlockPool(count)
        stages = 1 if self.pipeline is None else self.pipeline.count
        texts, tokens = -(-self.cfg.texts // stages), -(-self.cfg.tokens // stages)
        self.schedulers = [Scheduler(self.blocks, size, texts, tokens) for _ in range(stages)]
        self.attentions = [PagedAttention(local_attention(each), count, size) for each in local_attentions(model)]
        self._turn, self._steps = 0, deque[_Step | None]([None] * stages)  # of the pipeline, of which the first stage has the first
        self._hidden: dict[int, Tensor] = {}  # the input of each local stage
        self._told = False
        self.reset()

    def reset(self) -> None:
        """Take account of changed weights: no text shares earlier keys and values. Raises ConfigError while texts are continued."""
        if self.unfinished:
            raise ConfigError(f"{self.unfinished} texts are not finished, whose keys and values are of earlier weights; end them first")
        self.blocks.clear_cache()
        self._on_cpu = self.device.type == "cpu" and not is_fully_sharded(self.model)  # whose weights would stay in inference mode
        self._overrides = gather_overrides(self.model, self.pipeline)
        for attention, paged in zip(local_attentions(self.model), self.attentions):
            self._overrides += [(attention, "update_cache", paged.update), (attention, "core_attention", paged)]
        if depends_on_length(self.model.cfg.rotary):  # keys must have the frequencies of later queries: those of the longest text
            length = torch.full((), self.model.cfg.max_length, device=self.device)
            self._overrides += [(module, "text_length", length) for module in local_modules(self.model, self.pipeline)]
        if self._on_cpu and not torch.is_autocast_enabled("cpu"):
            self._overrides += copy_weights(self.model)

    @property
    def unfinished(self) -> int:
        """The number of texts that have not ended."""
        return sum(len(each.running) + len(each.waiting) for each in self.schedulers)

    def add(self, request: Request) -> Request:
        """Add a text. Raises DataError as ``check_prompts``, ConfigError for one that the cache cannot hold."""
        check_prompts([request.prompt], self.model.cfg.vocabulary, self.model.cfg.max_length)
        longest = min(len(request.prompt) + request.cfg.most, self.model.cfg.max_length)
        if longest > (capacity := self.blocks.count * self.cfg.block):
            actual = f"a text of {len(request.prompt)} tokens and {request.cfg.most} further ones"
            raise ConfigError(f"{actual} does not fit into a cache of {capacity} tokens; set engine.cache to more, or most to less")
        generator = torch.Generator().manual_seed(request.seed)
        request.uniforms = torch.rand(request.cfg.most, dtype=torch.float32, generator=generator).tolist()
        min(self.schedulers, key=lambda each: len(each.waiting) + len(each.running)).add(request)
        return request

    def run(self, requests: Iterable[Request] = ()) -> Iterator[Request]:
        """Add texts, and yield each when it ends, until all have ended."""
        for request in requests:
            self.add(request)
        while self.unfinished:
            yield from (request for request in self.step() if request.ended)

    def step(self) -> list[Request]:
        """Compute the next step, and return the requests that have a new token."""
        scheduler = self.schedulers[self._turn]
        preempted, chunks = scheduler.preempted, scheduler.next_chunks()
        if scheduler.preempted > preempted and not self._told:
            self._told = True
            logger.warning(
                "the KV cache of %d tokens is full: texts are preempted and computed again; set engine.cache to more, or engine.texts "
                "to fewer", self.blocks.count * self.cfg.block,
            )  # fmt: skip
        chunks.sort(key=lambda chunk: chunk.count > 1)  # single tokens first
        self._turn = (self._turn + 1) % len(self.schedulers)
        self._steps.appendleft(_Step(chunks, Layout(chunks, self.cfg.block, self.device)) if chunks else None)
        self._steps.pop()
        kind = self.device.type
        with torch.no_grad(), torch.inference_mode() if self._on_cpu else nullcontext(), override_attributes(self._overrides):
            if training := self.model.training:
                self.model.eval()
            try:
                logits = self._compute()
            finally:
                if training:
                    self.model.train()
            done = self._steps[-1]
            return [] if done is None else self._finish(done, logits)

    # ---- a step

    def _compute(self) -> Tensor | None:
        """Run the local stages, each on its step, and return the logits of the last one.   [N, V], or None on other ranks"""
        if self.pipeline is None:
            return None if self._steps[0] is None else self._run_model(self.model, self._steps[0])
        stages, outputs = self.pipeline.stages, dict[int, Tensor]()
        for stage in stages.local_stages:
            if (step := self._steps[stage]) is not None:
                outputs[stage] = self._run_model(stages.module(stage), step, self._hidden.pop(stage, None))
        self._exchange(outputs)
        return outputs.get(self.pipeline.count - 1)

    def _exchange(self, outputs: dict[int, Tensor]) -> None:
        """Send the outputs of the local stages to the next ones, for the next step."""
        assert self.pipeline is not None
        ranks, axis, operations = self.pipeline.rank_of, self.pipeline.axis, []
        for stage, (step, rank, other) in enumerate(zip(self._steps, ranks, ranks[1:])):
            if step is None:
                continue
            if rank == axis.rank == other:
                self._hidden[stage + 1] = outputs[stage]
            elif rank == axis.rank:
                operations.append((torch_dist.isend, outputs[stage], other))
            elif other == axis.rank:
                size = 1, step.layout.tokens.shape[1], self.model.cfg.width
                self._hidden[stage + 1] = torch.empty(size, dtype=self._dtype, device=self.device)
                operations.append((torch_dist.irecv, self._hidden[stage + 1], rank))
        if operations:
            works = torch_dist.batch_isend_irecv([
                torch_dist.P2POp(kind, tensor, group=axis.group, group_peer=peer) for kind, tensor, peer in operations
            ])  # fmt: skip
            for work in works:
                work.wait()

    def _run_model(self, model: Any, step: _Step, hidden: Tensor | None = None) -> Tensor:
        """Return the logits after the chunks that sample, or what the next stage takes.   [N, V], or [1, T, C]"""
        for attention in self.attentions:
            attention.layout = step.layout
        rows, hook = step.layout.sampled, None
        if isinstance(model.lm_head, LMHead):
            hook = model.lm_head.register_forward_pre_hook(lambda head, args: (args[0][:, rows], *args[1:]))
        try:
            y: Tensor = model(step.layout.tokens if hidden is None else hidden, positions=step.layout.positions)
        finally:
            if hook is not None:
                hook.remove()
        return y if hook is None else y[0]

    def _finish(self, step: _Step, logits: Tensor | None) -> list[Request]:
        """Take account of a computed step, and return the requests with a new token."""
        requests = [chunk.request for chunk in step.chunks if chunk.samples]
        numbers = torch.empty(2, len(requests), dtype=torch.float64, device=self.device)
        if logits is not None and requests:
            numbers = self._sample(requests, logits[:, : self.vocab_size])
        if self.pipeline is not None and requests:
            torch_dist.broadcast(numbers, group=self.pipeline.axis.group, group_src=self.pipeline.source)
        for chunk in step.chunks:
            chunk.request.computed += chunk.count
        for request, token, log_prob in zip(requests, *numbers.tolist()):
            request.tokens.append(int(token))
            request.log_probs.append(log_prob)
            is_full = len(request.output) == request.cfg.most or len(request.tokens) == self.model.cfg.max_length
            if token in request.stop or is_full:
                request.ended = True
                next(each for each in self.schedulers if request in each.running).finish(request)
        return requests

    def _sample(self, requests: Sequence[Request], logits: Tensor) -> Tensor:
        """Return the next token of each text, and its log-probability.   logits [N, V] -> [2, N] float64"""
        logits = torch.stack([
            row if request.processor is None else request.processor(request.tokens, row) for request, row in zip(requests, logits)
        ]) if any(request.processor for request in requests) else logits  # fmt: skip
        numbers = torch.empty(2, len(requests), dtype=torch.float64, device=logits.device)
        settings = [request.cfg for request in requests]
        for cfg in dict.fromkeys(settings):
            rows = [row for row, other in enumerate(settings) if other == cfg]
            chosen = logits if len(rows) == len(requests) else logits[rows]
            seen = torch.zeros(len(rows), logits.shape[1] if cfg.repetition != 1 else 0, dtype=torch.bool, device=logits.device)
            uniforms = [requests[row].uniforms[len(requests[row].output)] for row in rows]
            if cfg.repetition != 1:
                for index, row in enumerate(rows):
                    seen[index, requests[row].tokens] = True
            tokens = sample_tokens(chosen, seen, cfg, uniforms)
            scaled = chosen.double() / (cfg.temperature or 1.0)
            numbers[0, rows] = tokens.double()
            numbers[1, rows] = scaled.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return numbers

    def _count_blocks(self) -> int:
        """Return the number of blocks of the cache, the same on all ranks of the model."""
        cfg, size, tokens = self.model.cfg, self.cfg.block, self.cfg.cache
        if tokens is None:
            parts = local_attentions(self.model)
            heads = (max(1, cfg.kv_heads * each.o_proj.weight.shape[1] // (cfg.heads * each.value_dim)) for each in parts)
            token = 2 * sum(heads) * cfg.head_dim * self._dtype.itemsize
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()
            tokens = min(self.cfg.texts * -(-cfg.max_length // size) * size, int(_MEMORY * free) // max(token, 1))
            axes = {axis for part in self.model.modules() if isinstance(axis := getattr(part, "axis", None), Axis)}
            for axis in sorted(axes | ({self.pipeline.axis} if self.pipeline else set()), key=lambda axis: axis.name):
                tokens = int(all_reduce_min(torch.tensor(tokens), axis))
        if tokens < size:
            raise ConfigError(f"a cache of {tokens} tokens is less than a block of {size} (engine.block); set engine.cache to more")
        return tokens // size
