"""How likely a language model finds texts.   B texts, T tokens"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.llm.gathered import override_attributes, active_pipeline, gather_overrides
from hpcai.nn.head import IGNORE


def likelihoods(model: Any, context: Sequence[int], choices: Sequence[Sequence[int]], pipeline: Any = None) -> list[float]:
    """The logarithm of the probability that each of ``choices`` follows ``context``: the sum over its tokens, in nats.
    ``log_likelihoods`` says the rest."""
    return log_likelihoods(model, [(context, choice) for choice in choices], pipeline=pipeline)


@torch.no_grad()
def log_likelihoods(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int = 32, pipeline: Any = None
) -> list[float]:
    """The logarithm of the probability that the second of each pair follows the first, the sum over its tokens, in nats. ``rows``
    of like length go through the model together. All ranks of a model that is cut call this together; ``act`` is its ``stages``.
    Raises DataError where one of them is empty."""
    if not all(first and second for first, second in pairs):
        raise DataError("a context and each choice need at least one token; a context begins with the token that begins a text")
    stages, device = active_pipeline(model, pipeline), next(model.parameters()).device
    aside = gather_overrides(model, stages)
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    found = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    was = model.training
    model.eval()
    try:
        with override_attributes(aside):
            for at in range(0, len(order), rows):
                some = order[at : at + rows]
                tokens, targets = (x.to(device) for x in _collate([pairs[number] for number in some]))
                ask = partial(_token_entropy, targets=targets)
                entropy = ask(model, tokens) if stages is None else stages.forward(ask, tokens, nullcontext)
                if entropy is not None:
                    found[torch.tensor(some, device=device)] = -entropy.double().sum(1)
    finally:
        model.train(was)
    if stages is not None:
        torch_dist.broadcast(found, group=stages.axis.group, group_src=stages.source)
    values: list[float] = found.tolist()
    return values


def _token_entropy(model: Any, tokens: Tensor, targets: Tensor) -> Any:
    return model(tokens, targets)


def _collate(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Tokens, and those that follow where they count.   two of [B, T]"""
    longest = max(len(first) + len(second) for first, second in pairs)
    whole, counted = torch.zeros(len(pairs), longest, dtype=torch.int64), torch.zeros(len(pairs), longest, dtype=torch.bool)
    for row, (first, second) in enumerate(pairs):
        end = len(first) + len(second)
        whole[row, :end] = torch.tensor([*first, *second])
        counted[row, len(first) : end] = True
    return whole[:, :-1], whole[:, 1:].where(counted[:, 1:], IGNORE)
