"""Text from a language model, token by token.   B texts, T tokens, V words, S places in memory, H heads, D channels of one

The first call of the model is given the prompts, each further one the token that was chosen last. Where that is on a GPU, one call
starts all of it (a CUDA graph), so whatever changes from token to token lies on the device: the host knows how many there are, and
reads tokens while the next ones are computed.
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
from hpcai.models.llm.config import SamplingConfig
from hpcai.models.llm.model import LLM, Causal
from hpcai.models.llm.undivided import attentions, holding, last_stage, undivided
from hpcai.nn.graph import Graph, graph_factory, no_collection
from hpcai.nn.head import Head
from hpcai.parallel.pipeline import Pipeline

_BLOCK = 128  # places of the first recorded step; later ones look at twice as many each


class Generation(Iterator[list[int | None]]):
    """The next token of each text, again and again, None for one that has ended. ``ended`` says which have: whoever sets one of
    them ends that text. The model is as it was whenever this gives tokens, and after the last one nothing is kept."""

    def __init__(
        self, model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig, stop: Collection[int], seeds: Sequence[int],
        words: int | None, act: Pipeline | None, capture: bool, graph: Callable[[], Graph] | None,
    ) -> None:  # fmt: skip
        device = next(model.parameters()).device
        self.model, self.cfg, self.stop, self.act = model, cfg, frozenset(stop), act
        self.words = min(words or model.cfg.vocabulary, model.cfg.vocabulary)
        self.lengths, self.longest = [*map(len, prompts)], max(map(len, prompts))
        self.most = min(cfg.most, model.cfg.positions - min(self.lengths))
        self.ended, self.given, self.launched = [False] * len(prompts), 0, 0
        kind = device.type  # what is computed narrowly stays so, wherever the next token is asked for
        self._narrow: dict[str, Any] = {
            "device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind),
        }  # fmt: skip
        self.graph = graph or (graph_factory(self, device) if capture and _can_capture(model, act, device) else None)
        self._warm: dict[int, Graph] = {}  # by places that attention looks at
        self._graphs: dict[int, Graph] = {}  # those of them that are recorded
        self._sent: deque[tuple[Tensor, Any]] = deque()
        self._ahead = int(device.type == "cuda")  # of the host, which reads a token while the next one is computed
        self._hosts = [torch.empty(len(prompts), dtype=torch.int64, pin_memory=True) for _ in range(2 * self._ahead)]

        # What changes from token to token, on the device.
        self.prompts = torch.tensor([[0] * (self.longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
        self.next, self.number = self.prompts[:, -1:].clone(), torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = torch.tensor(self.lengths, device=device)[:, None]
        self.seen = torch.zeros(len(prompts), model.cfg.vocabulary, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            self.seen[row, torch.tensor([*prompt])] = True
        self.seen = self.seen.to(device)
        drawn = [torch.rand(self.most, dtype=torch.float32, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.chances = torch.stack(drawn, 1).to(device)  # [most, B]
        places = self._span(self.longest + self.most)
        self.memory = Memory(self.longest - self.positions, self.longest, places, len({*self.lengths}) > 1 or bool(self.graph))
        self._aside = undivided(model, act)
        for attention in attentions(model):
            layer = _Layer(self.memory)
            self._aside += [(attention, "remember", layer.remember), (attention, "attend", layer)]
        _open.add(self)

    def __next__(self) -> list[int | None]:
        if all(self.ended) or self.given == self.most:
            self.close()
            raise StopIteration
        while self.launched < min(self.given + 1 + self._ahead, self.most):
            self._launch()
        chosen, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        self.given += 1
        found = [None if over else token for token, over in zip(chosen.tolist(), self.ended)]
        for row, token in enumerate(found):
            if token is not None and (token in self.stop or self.lengths[row] + self.given >= self.model.cfg.positions):
                self.ended[row] = True
        return found

    def close(self) -> None:
        """End all texts, and give back memory. A graph that holds messages must go before its group of processes."""
        self.ended, self._aside, self.graph = [True] * len(self.ended), [], None
        if self._ahead and self._warm:
            torch.cuda.synchronize()  # a graph may be running
        for graph in self._warm.values():
            graph.reset()
        self._graphs.clear()
        self._warm.clear()
        self._sent.clear()

    # ---- one token of each text

    def _launch(self) -> None:
        with torch.no_grad(), torch.cuda.device(self.next.device) if self._ahead else nullcontext():
            if self.launched == 0:
                self._begin()
            else:
                self._go_on()
        self.launched += 1
        if not self._ahead:
            self._sent.append((self.next[:, 0].clone(), None))
            return
        host, event = self._hosts[self.launched % 2], torch.cuda.Event()
        host.copy_(self.next[:, 0], non_blocking=True)
        event.record()
        self._sent.append((host, event))

    def _begin(self) -> None:
        places = torch.arange(self.longest, device=self.next.device) - self.memory.filled
        documents = (places >= 0).long() if len({*self.lengths}) > 1 else None  # what fills rows up is of another one
        self._choose(self._logits(self.prompts, places.clamp(min=0), documents))

    def _go_on(self) -> None:
        span = self._span(self.longest + self.launched)
        step = partial(self._step, span)
        if self.graph is None:
            step()
        elif span not in self._warm:
            self._warm[span] = self.graph()
            self._warm[span].warm(step)  # libraries choose their algorithms, and collectives connect
        elif span not in self._graphs:
            try:
                with no_collection():
                    self._warm[span].record(step)
            except (RuntimeError, NotImplementedError) as problem:
                reason = next(iter(str(problem).strip().splitlines()), "")
                raise ConfigError(f"a step of generation cannot be recorded: {reason}; give capture=False") from problem
            self._graphs[span] = self._warm[span]
            self._warm[span].replay()
        else:
            self._warm[span].replay()

    def _step(self, span: int) -> None:
        self.memory.look(span)
        self._choose(self._logits(self.next, self.positions.clamp(max=self.model.cfg.positions - 1)))
        self.memory.at.add_(1)
        self.positions.add_(1)

    def _span(self, count: int) -> int:
        """Places that attention looks at, of which ``count`` hold tokens: where steps are recorded one of few numbers."""
        if self.graph is None:
            return count
        span, room = _BLOCK, -(-(self.longest + self.most) // _BLOCK) * _BLOCK
        while span < count:
            span *= 2
        return min(span, room)

    def _logits(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor | None:
        """Of the last token of each text, where the last layer is; None on other stages.   [B, T] -> [B, V]"""

        def ask(model: Any, tokens: Tensor) -> Any:
            return model(tokens, positions=positions, documents=documents)[:, -1]

        model, hook = self.model, None
        was = model.training
        if was:
            model.eval()
        if tokens.shape[1] > 1 and isinstance(model.lm_head, Head):
            hook = model.lm_head.register_forward_pre_hook(_last_alone)
        try:
            # A graph would read weights that autocast keeps when they are gone.
            with holding(self._aside), torch.autocast(**self._narrow, cache_enabled=self.graph is None):
                found: Tensor | None = ask(model, tokens) if self.act is None else self.act.forward(ask, tokens, nullcontext)
                return found
        finally:
            if hook is not None:
                hook.remove()
            if was:
                model.train()

    def _choose(self, logits: Tensor | None) -> None:
        if logits is not None:
            chances = self.chances.index_select(0, self.number)[0]
            self.next[:, 0] = choose(logits[:, : self.words], self.seen[:, : self.words], self.cfg, chances)
        if self.act is not None:
            torch_dist.broadcast(self.next, group=self.act.axis.group, group_src=self.act.source)
        self.seen.scatter_(1, self.next, True)
        self.number.add_(1)


def generate(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (),
    seed: int | Sequence[int] = 0, *, words: int | None = None, act: Any = None, capture: bool = True,
    graph: Callable[[], Graph] | None = None,
) -> Generation:  # fmt: skip
    """The next token of each of ``prompts``, again and again, None for a text that has ended: with a token of ``stop``, which is
    given, or after ``most`` tokens. What a text becomes depends on its prompt and its seed alone (``seed`` and the number of the
    prompt together, or one for each), not on the other texts. Only the first ``words`` of the vocabulary are chosen.

    All ranks of a model that is cut call this together; ``act`` is its ``stages``, where it has some. On a GPU steps are recorded,
    unless ``capture`` is off; ``graph`` makes what records them instead of CUDA. Raises DataError for a prompt that is empty, has a
    number that is no word, or leaves no position for a token; ConfigError for a model that is cut into stages without ``act``.
    """
    check(prompts, model.cfg.vocabulary, model.cfg.positions)
    seeds = [seed + row for row in range(len(prompts))] if isinstance(seed, int) else seed
    return Generation(model, prompts, cfg or SamplingConfig(), stop, seeds, words, last_stage(model, act), capture, graph)


def complete(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (),
    seed: int | Sequence[int] = 0, **others: Any,
) -> list[list[int]]:  # fmt: skip
    """All tokens that ``generate`` gives, by prompt."""
    steps = list(generate(model, prompts, cfg, stop, seed, **others))
    return [[token for token in row if token is not None] for row in zip(*steps)]


# ---- what is remembered


class Memory:
    """Where keys and values of tokens lie, alike in all layers: in places one behind another, of which the first of a short text
    hold nothing. ``filled`` [B, 1]: how many those are.   ``at`` [1]: the next place, which the device alone knows"""

    def __init__(self, filled: Tensor, first: int, room: int, masked: bool) -> None:
        self.filled, self.room, self.masked = filled, room, masked
        self.at = torch.full((1,), first, device=filled.device)
        self.span = first
        self.mask: Tensor | None = None

    def look(self, span: int) -> None:
        """A new token sees those in the first ``span`` places that are its text's, and itself."""
        self.span = span
        if self.masked:
            places = torch.arange(span, device=self.at.device)
            self.mask = ((places <= self.at) & (places >= self.filled))[:, None, None]


class _Layer(Causal):
    """Attention of one layer to what it remembers: in the first call that of prompts to themselves, then of one new token of each
    text to all of its tokens.   q [B, H, 1, D], k and v [B, H or fewer, S, D] -> [B, H, 1, D]"""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.kept: tuple[Tensor, ...] = ()

    def remember(self, *new: Tensor) -> tuple[Tensor, ...]:
        """k and v [B, H, T, D] of new tokens -> of all [B, H, S, D]"""
        if not self.kept:
            self.kept = tuple(x.new_zeros((*x.shape[:2], self.memory.room, x.shape[3])) for x in new)
            for whole, x in zip(self.kept, new):
                whole[:, :, : x.shape[2]] = x
            return new
        for whole, x in zip(self.kept, new):
            whole.index_copy_(2, self.memory.at, x)
        return tuple(whole[:, :, : self.memory.span] for whole in self.kept)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if q.shape[2] == k.shape[2]:
            return super().forward(q, k, v, documents)
        shared = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # queries of one head of keys, as if they were tokens
        return F.scaled_dot_product_attention(shared, k, v, self.memory.mask).flatten(1, 2).unsqueeze(2)


def _last_alone(head: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Logits of all tokens of a long prompt would be the largest tensor of all, and only those of the last are asked for."""
    return (given[0][:, -1:], *given[1:])


def _can_capture(model: LLM, act: Pipeline | None, device: torch.device) -> bool:
    """Whether steps can be captured on this device."""
    if device.type != "cuda" or act is not None or any(hasattr(part, "unshard") for part in model.modules()):  # fully sharded
        return False
    axes = [axis for part in model.modules() if isinstance(axis := getattr(part, "axis", None), Axis)]
    return all(get_backend(device, axis) in ("nccl", "none") for axis in axes)


_open: "weakref.WeakSet[Generation]" = weakref.WeakSet()


def close_all() -> None:
    """End what is under way."""
    for generation in list(_open):
        if generation._graphs:
            generation.close()


before_destroy_process_group.append(close_all)


# ---- which token


def choose(logits: Tensor, seen: Tensor, cfg: SamplingConfig, chances: Tensor | Sequence[float]) -> Tensor:
    """A token for each row.   logits [B, V], seen [B, V] which tokens were there, a number from 0 to 1 for each row [B] -> [B]"""
    left = filtered(logits.float(), seen, cfg)
    if cfg.temperature == 0:
        return left.argmax(-1)
    upto = left.double().softmax(-1).cumsum(-1)
    wanted = torch.as_tensor(chances, dtype=upto.dtype, device=upto.device)[:, None] * upto[:, -1:]
    found = torch.searchsorted(upto, wanted, right=True)
    return found.clamp(max=logits.shape[-1] - 1)[:, 0]


def filtered(logits: Tensor, seen: Tensor, cfg: SamplingConfig) -> Tensor:
    """The logits of tokens that may be chosen, -inf for others; each rule sees what those before it left.   [B, V]"""
    if cfg.repetition != 1:
        logits = torch.where(seen, torch.where(logits < 0, logits * cfg.repetition, logits / cfg.repetition), logits)
    if cfg.temperature > 0:
        logits = logits / cfg.temperature
    if cfg.top_k is not None:
        least = logits.topk(min(cfg.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if cfg.top_p < 1:
        ordered, order = logits.sort(-1)
        few = ordered.softmax(-1).cumsum(-1) <= 1 - cfg.top_p
        few[:, -1] = False  # one stays
        logits = logits.masked_fill(few.scatter(1, order, few), -torch.inf)
    if cfg.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < cfg.min_p * shares.amax(-1, keepdim=True), -torch.inf)
    return logits


def check(
    prompts: Sequence[Sequence[int]], vocabulary: int, positions: int, names: Callable[[int], str] = "prompt {}".format
) -> None:
    """Raises DataError for prompts of which one is empty, has a number that is no word, or leaves no position for a token.
    ``names``: what one is called, by its number."""
    if not prompts:
        raise DataError("there is no prompt; give one at least")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"{names(number)} has no token; give at least one, such as the token that begins a text")
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise DataError(f"{names(number)} has token {wrong[0]}, but the model knows {vocabulary}; is it of another tokenizer?")
        if len(prompt) >= positions:
            raise DataError(f"{names(number)} has {len(prompt)} tokens, the model {positions} positions in all; shorten it")
