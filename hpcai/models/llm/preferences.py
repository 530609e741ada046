"""Pairs of a chosen and a rejected answer as a data source of the training loop, for DPO, IPO and reward models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.alignment import PreferenceBatch, answer_log_probs
from hpcai.models.llm.rollouts import Network, Source, fit_columns, policy_of


@dataclass
class Pair:
    """A prompt and two answers to it, in tokens; the second answer is rejected. ``where``: Its file and line, for errors."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    where: str = "a pair"


class Preferences(Source):
    """The data source of preferences, with the interface of a loader. A sample is a pair.

    ``batch``: The pairs of an optimizer step, over all replicas. ``reference``: The frozen ``Network`` whose log-probabilities
    ``preference_loss`` needs; None for ``reward_loss``. Raises ConfigError for sizes that do not fit, DataError for an answer
    without tokens, or pairs that are too long.
    """

    def __init__(
        self, step: Any, pairs: Sequence[Pair], batch: int, *, reference: Network | None = None, pad_to: int = 8, seed: int = 0
    ) -> None:
        super().__init__(step, 2 * batch, pad_to, seed)
        self.pairs, self.batch_size, self.reference = pairs, batch, reference
        parts, most = self.replicas.size * step.cfg.accumulate, policy_of(step.model).cfg.max_length
        if batch % parts:
            raise ConfigError(f"data.batch is {batch} pairs, no multiple of {parts} micro-batches; take a multiple of {parts}")
        if len(pairs) < batch:
            raise ConfigError(f"there are {len(pairs)} pairs, data.batch is {batch}; take fewer, or more data")
        for pair in pairs:
            self._check(pair, most)
        self.check_vocabulary(reference=reference)
        self.samples, self.dataset_size = len(pairs) // batch * batch, len(pairs)
        self.identity = f"pairs {sha256(repr([(p.prompt, p.chosen, p.rejected) for p in pairs]).encode()).hexdigest()[:16]}"

    def _check(self, pair: Pair, most: int) -> None:
        vocabulary = policy_of(self.step.model).cfg.vocabulary
        for answer in pair.chosen, pair.rejected:
            tokens = [*pair.prompt, *answer]
            if not pair.prompt or not answer:
                raise DataError(f"{pair.where}: a prompt or an answer has no token; leave it out")
            if len(tokens) > most:
                raise DataError(f"{pair.where}: has {len(tokens)} tokens, the model {most} positions; shorten it")
            if (largest := max(tokens)) >= vocabulary:
                raise DataError(f"{pair.where}: has token {largest}, the vocabulary {vocabulary} entries; is it of another model?")

    def __len__(self) -> int:
        return self.samples // self.batch_size

    def epoch(self, epoch: int, first: int = 0, deferred: Sequence[int] = (), more: bool = False) -> Iterator[PreferenceBatch]:
        for begin in range(first, self.samples, self.batch_size):
            yield self._batch([self.pairs[n] for n in self._indices(epoch, begin)])

    def _indices(self, epoch: int, begin: int) -> list[int]:
        """Return the indices of this replica's pairs of a step."""
        each = self.batch_size // self.replicas.size
        begin += self.replicas.rank * each
        return self.order(epoch, len(self.pairs))[begin : begin + each]

    @torch.no_grad()
    def _batch(self, pairs: Sequence[Pair]) -> PreferenceBatch:
        answers = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        longest = max(len(prompt) + len(answer) for prompt, answer in answers)
        tokens, mask = torch.zeros(len(answers), longest, dtype=torch.int64), torch.zeros(len(answers), longest, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(answers):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            mask[row, len(prompt) : len(prompt) + len(answer)] = True
        log_probs, device = None, self.step.mesh.device
        columns = self.round_length(longest)  # a reward model reads all of them
        if self.reference is not None:
            columns = self.round_length(longest - 1) + 1
            log_probs = self.compute(self.reference, answer_log_probs, {"tokens": tokens, "loss_mask": mask}).to(device)
        return PreferenceBatch(fit_columns(tokens, columns).to(device), fit_columns(mask, columns).to(device), log_probs)

    def validation(self, pairs: Sequence[Pair]) -> list[PreferenceBatch]:
        """Return batches of held-out pairs of this replica, for a loss as metric. Raises DataError as the constructor."""
        for pair in pairs:
            self._check(pair, policy_of(self.step.model).cfg.max_length)
        mine, each = pairs[self.replicas.rank :: self.replicas.size], max(self.batch_size // self.replicas.size, 1)
        return [self._batch(mine[n : n + each]) for n in range(0, len(mine), each)]

    def describe(self, epoch: int, first: int) -> str:
        names = [self.pairs[n].where for n in self._indices(epoch, first)]
        return f"pairs {', '.join([*names[:4], *['...'] * (len(names) > 4)])}"

    def deferred(self) -> list[int]:
        return []

    def news(self) -> list[str]:
        return []
