"""Continuous batching (Yu et al. 2022, "Orca"): the tokens of each step of a generation engine.

A text has tokens, of which the first ``computed`` have keys and values in the cache. Each step computes some of the others; when
all are computed, the next token is sampled. Prefill in chunks (Agrawal et al. 2023, "Sarathi"), decode, a prefix of another text
and the return of a preempted text are therefore one case.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hpcai.models.llm.config import SamplingConfig
from hpcai.models.llm.engine.blocks import BlockPool, Key, extend_keys

Processor = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(eq=False)
class Request:
    """A text to continue, and its state. ``processor(tokens, logits [V])`` returns changed logits of the token after ``tokens``."""

    prompt: Sequence[int]
    cfg: SamplingConfig
    seed: int = 0
    stop: Collection[int] = ()
    processor: Processor | None = None
    name: Any = None
    tokens: list[int] = field(default_factory=list)
    """of the prompt and generated"""
    log_probs: list[float] = field(default_factory=list)
    """of each generated token, at the temperature of ``cfg``, before tokens are excluded; in nats"""
    uniforms: list[float] = field(default_factory=list)
    """random numbers, one of each generated token"""
    ended: bool = False
    computed: int = 0
    drafted: int = 0
    """the number of its tokens with keys and values of the draft model"""
    cached: int = 0
    """the number of its blocks that other texts may use"""
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The generated tokens, with the token of ``stop`` at which the text ended."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """The number of tokens that ``cfg`` still allows."""
        return self.cfg.most + len(self.prompt) - len(self.tokens)


@dataclass
class Chunk:
    """Tokens of a request that a step computes: ``count`` from its ``computed`` on, and up to ``ahead`` of a draft model."""

    request: Request
    count: int
    ahead: int = 0
    proposed: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """Whether a next token is sampled after these."""
        return self.request.computed + self.count == len(self.request.tokens)


class Scheduler:
    """Chooses the tokens of each step: texts in progress go first, in the order of their arrival, then waiting ones, up to ``most``
    tokens of ``texts`` texts. If blocks run out, the text that came last is preempted: its blocks are given back, and it waits.
    ``ahead``: Tokens that a draft model proposes for a text in decode, at most."""

    def __init__(self, blocks: BlockPool, size: int, texts: int, most: int, ahead: int = 0) -> None:
        self.blocks, self.size, self.texts, self.most, self.ahead = blocks, size, texts, most, ahead
        self.waiting, self.running = deque[Request](), list[Request]()
        self.preempted = self.shared = 0
        """the number of preemptions, and of tokens whose keys and values another text had computed"""

    def add(self, request: Request) -> None:
        request.tokens = [*request.prompt]
        self.waiting.append(request)

    def next_chunks(self) -> list[Chunk]:
        """Return the chunks of the next step, whose blocks are allocated."""
        chunks, left = list[Chunk](), self.most
        while len(chunks) < len(self.running) and left:
            request = self.running[len(chunks)]
            count = min(len(request.tokens) - request.computed, left)
            while not self._reserve(request, count) and self._preempt_last() is not request:
                pass
            if request.blocks:
                chunks.append(self._chunk(request, count))
                left -= count
        while self.waiting and left and len(self.running) < self.texts:
            request = self.waiting[0]
            extend_keys(request.keys, request.tokens, self.size)
            request.blocks = self.blocks.share(request.keys[: (len(request.tokens) - 1) // self.size])  # one token at least is left
            request.computed = request.drafted = len(request.blocks) * self.size
            request.cached = len(request.blocks)
            count = min(len(request.tokens) - request.computed, left)
            if not self._reserve(request, count):
                self._release(request)
                break
            self.running.append(self.waiting.popleft())
            self.shared += request.computed
            chunks.append(self._chunk(request, count))
            left -= count
        return chunks

    def finish(self, request: Request) -> None:
        """Give back the blocks of a text that has ended."""
        self.running.remove(request)
        self._release(request)

    def _reserve(self, request: Request, count: int) -> bool:
        """Allocate the blocks of ``count`` further tokens, if there are enough free ones."""
        missing = -(-(request.computed + count) // self.size) - len(request.blocks)
        if missing > self.blocks.free:
            return False
        request.blocks += [self.blocks.allocate() for _ in range(missing)]
        return True

    def _chunk(self, request: Request, count: int) -> Chunk:
        """Return a chunk, whose full blocks other texts may use at once: a layer writes the keys of a step before it reads any."""
        full = (request.computed + count) // self.size
        if full > request.cached:
            extend_keys(request.keys, request.tokens, self.size)
            for index in range(request.cached, full):
                self.blocks.cache(request.blocks[index], request.keys[index])
            request.cached = full
        ahead = min(self.ahead, request.left - 1) if count == 1 and request.output else 0
        return Chunk(request, count, ahead if self._reserve(request, count + ahead) else 0)

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self._release(request)
        self.waiting.appendleft(request)
        self.preempted += 1
        return request

    def _release(self, request: Request) -> None:
        self.blocks.release(request.blocks)
        request.blocks, request.computed, request.drafted, request.cached = [], 0, 0, 0
