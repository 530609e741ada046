"""Text from a language model, token by token.   B texts, T tokens, V words"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from hpcai.config import Length, Positive, Settings, Weight
from hpcai.errors import DataError
from hpcai.models.llm.model import LLM
from hpcai.parallel.tensor import tokens_whole


class SamplingConfig(Settings):
    """How the next token is chosen, in this order; the likeliest one where nothing is said."""

    most: Positive = 256
    """tokens that are made at most"""
    repetition: Length = 1.0
    """by how much tokens that were there, also in the prompt, are less likely (Keskar et al. 2019)"""
    temperature: Weight = 0.0
    """0: the likeliest token"""
    top_k: Positive | None = None
    """so many of the likeliest tokens, and those as likely as the last of them"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """the likeliest tokens that together have this probability (Holtzman et al. 2020)"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """those that have at least this share of the likeliest one's"""


class Cache:
    """Keys and values of the tokens so far, of one layer, in memory for ``room`` of them; it takes the place of ``remember``."""

    def __init__(self, room: int) -> None:
        self.room, self.count = room, 0
        self.kept: tuple[Tensor, ...] = ()

    def __call__(self, *new: Tensor) -> tuple[Tensor, ...]:
        """k and v [B, H, T, D] of new tokens -> of all [B, H, S, D]"""
        if not self.kept:
            self.kept = tuple(x.new_empty((*x.shape[:2], self.room, x.shape[3])) for x in new)
        first, self.count = self.count, self.count + new[0].shape[2]
        for whole, x in zip(self.kept, new):
            whole[:, :, first : self.count] = x
        return tuple(whole[:, :, : self.count] for whole in self.kept)


def generate(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (), seed: int = 0,
) -> Iterator[list[int | None]]:  # fmt: skip
    """The next token of each of ``prompts``, again and again, None for a text that has ended: with a token of ``stop``, which is
    given, or after ``most`` tokens. What a text becomes depends on its prompt, the seed and its place alone, not on the others.

    All ranks of a model that is cut over ``tensor`` call this together. Raises DataError for a prompt that is empty, has a number
    that is no word, or leaves no position for a token.
    """
    cfg = cfg or SamplingConfig()
    _check(prompts, model.cfg.vocabulary, model.cfg.positions)
    longest = max(map(len, prompts))
    most = min(cfg.most, model.cfg.positions - min(map(len, prompts)))
    device = model.lm_head.weight.device
    tokens = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
    places = torch.arange(longest, device=device) - (longest - lengths)
    documents = None if len({*map(len, prompts)}) == 1 else (places >= 0).long()  # what fills rows up is of another one
    seen = torch.zeros(len(prompts), model.cfg.vocabulary, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        seen[row, torch.tensor([*prompt], device=device)] = True
    random = [torch.Generator().manual_seed(seed + row) for row in range(len(prompts))]
    ended, room, positions = [False] * len(prompts), model.cfg.positions, places.clamp(min=0)
    with torch.no_grad(), remembering(model, longest + most):
        for _ in range(most):
            logits = model(tokens, positions=positions, documents=documents)[:, -1]
            chosen = choose(logits, seen, cfg, [float(torch.rand((), generator=one)) for one in random])
            found = [None if over else int(token) for token, over in zip(chosen, ended)]
            yield found
            positions = positions[:, -1:] + 1
            ended = [over or int(token) in stop or int(at) + 1 >= room for token, over, at in zip(chosen, ended, positions)]
            if all(ended):
                return
            tokens, positions = chosen[:, None], positions.clamp(max=room - 1)
            seen.scatter_(1, tokens, True)
            documents = None if documents is None else torch.cat((documents, torch.ones_like(tokens)), 1)


def complete(
    model: LLM, prompts: Sequence[Sequence[int]], cfg: SamplingConfig | None = None, stop: Collection[int] = (), seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """All tokens that ``generate`` gives, by prompt."""
    steps = list(generate(model, prompts, cfg, stop, seed))
    return [[token for token in row if token is not None] for row in zip(*steps)]


@contextmanager
def remembering(model: LLM, room: int) -> Iterator[None]:
    """Inside, each call of ``model`` is given the tokens that follow those of the calls before, ``room`` in all."""
    was = model.training
    layers: Any = model.eval().model.layers
    parts = [layer.self_attn for layer in layers]
    for attention in parts:
        attention.remember = Cache(room)
    try:
        with tokens_whole(model):
            yield
    finally:
        for attention in parts:
            attention.remember = None
        model.train(was)


def choose(logits: Tensor, seen: Tensor, cfg: SamplingConfig, chances: Sequence[float]) -> Tensor:
    """A token for each row.   logits [B, V], seen [B, V] which tokens were there, a number from 0 to 1 for each row -> [B]"""
    left = filtered(logits.float(), seen, cfg)
    if cfg.temperature == 0:
        return left.argmax(-1)
    upto = left.double().softmax(-1).cumsum(-1)
    wanted = torch.tensor(chances, dtype=upto.dtype, device=upto.device)[:, None] * upto[:, -1:]
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


def _check(prompts: Sequence[Sequence[int]], vocabulary: int, positions: int) -> None:
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise DataError(f"prompt {number} has no token; give at least one, such as the token that begins a text")
        if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
            raise DataError(f"prompt {number} has token {wrong[0]}, but the model knows {vocabulary}; is it of another tokenizer?")
        if len(prompt) >= positions:
            raise DataError(f"prompt {number} has {len(prompt)} tokens, the model {positions} positions in all; shorten it")
