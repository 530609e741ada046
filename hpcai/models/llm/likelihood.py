"""Log-likelihoods of texts under a language model.   B texts, T tokens"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.llm.gathered import active_pipeline, gather_overrides, override_attributes
from hpcai.nn.lm_head import IGNORE_INDEX


def likelihoods(model: Any, context: Sequence[int], choices: Sequence[Sequence[int]], pipeline: Any = None) -> list[float]:
    """Return the log-probability of each of ``choices`` after ``context``, by ``log_likelihoods``."""
    return log_likelihoods(model, [(context, choice) for choice in choices], pipeline=pipeline)


@torch.no_grad()
def log_likelihoods(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rows: int = 32, pipeline: Any = None
) -> list[float]:
    """Return log P(second | first) of each pair (first, second) of token lists: the sum over the tokens of the second, in nats. A
    batch is ``rows`` pairs of similar length. Collective over all ranks of a sharded model; ``pipeline`` as ``build_pipeline``
    returns it. Raises DataError for an empty list of tokens."""
    if not all(first and second for first, second in pairs):
        raise DataError("a context or a choice is empty; expected at least one token, such as the one that begins a text")
    pipeline, device = active_pipeline(model, pipeline), next(model.parameters()).device
    overrides = gather_overrides(model, pipeline)
    order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    sums = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    try:
        with override_attributes(overrides):
            for start in range(0, len(order), rows):
                batch = order[start : start + rows]
                tokens, targets = (x.to(device) for x in _collate([pairs[index] for index in batch]))
                forward = partial(lambda model, tokens, targets: model(tokens, targets), targets=targets)
                entropy = forward(model, tokens) if pipeline is None else pipeline.forward(forward, tokens, nullcontext)
                if entropy is not None:
                    sums[torch.tensor(batch, device=device)] = -entropy.double().sum(1)
    finally:
        model.train(training)
    if pipeline is not None:
        torch_dist.broadcast(sums, group=pipeline.axis.group, group_src=pipeline.source)
    values: list[float] = sums.tolist()
    return values


def _collate(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, two of [B, T], padded on the right; targets of the context and of padding are ``IGNORE_INDEX``."""
    length = max(len(first) + len(second) for first, second in pairs)
    tokens, mask = torch.zeros(len(pairs), length, dtype=torch.int64), torch.zeros(len(pairs), length, dtype=torch.bool)
    for row, (first, second) in enumerate(pairs):
        end = len(first) + len(second)
        tokens[row, :end] = torch.tensor([*first, *second])
        mask[row, len(first) : end] = True
    return tokens[:, :-1], tokens[:, 1:].where(mask[:, 1:], IGNORE_INDEX)
