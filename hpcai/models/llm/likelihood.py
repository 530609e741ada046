"""Log-likelihoods of texts under a language model.   B texts, T tokens, C channels, N scored tokens"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hpcai.errors import DataError
from hpcai.models.llm.gathered import active_pipeline, gather_overrides, local_modules, override_attributes
from hpcai.parallel.pipeline_stages import StageOutput

Pairs = Sequence[tuple[Sequence[int], Sequence[int]]]
_CHUNK = 512  # tokens whose logits are in memory


def likelihoods(model: Any, context: Sequence[int], choices: Sequence[Sequence[int]], pipeline: Any = None) -> list[float]:
    """Return the log-probability of each of ``choices`` after ``context``, by ``log_likelihoods``."""
    return log_likelihoods(model, [(context, choice) for choice in choices], pipeline=pipeline)


def log_likelihoods(model: Any, pairs: Pairs, rows: int = 32, pipeline: Any = None) -> list[float]:
    """Return log P(second | first) of each pair (first, second) of token lists: the sum over the tokens of the second, in nats. A
    batch is ``rows`` texts of similar length; pairs that differ in their last token share one. Collective over all ranks of a
    sharded model; ``pipeline`` as ``build_pipeline`` returns it. Raises DataError for an empty list of tokens."""
    return [value for value, _ in greedy_log_likelihoods(model, pairs, rows, pipeline)]


@torch.no_grad()
def greedy_log_likelihoods(model: Any, pairs: Pairs, rows: int = 32, pipeline: Any = None) -> list[tuple[float, bool]]:
    """Return ``log_likelihoods``, and for each pair whether greedy decoding of the first gives the second."""
    texts = dict[tuple[int, ...], list[int]]()
    for index, (first, second) in enumerate(pairs):
        if not first or not second:
            raise DataError("a context or a choice is empty; expected at least one token, such as the one that begins a text")
        texts.setdefault((*first, *second)[:-1], []).append(index)
    order = sorted(texts, key=len, reverse=True)
    pipeline, device, training = active_pipeline(model, pipeline), next(model.parameters()).device, model.training
    heads = [(part, "lm_head", _TokenScores(part.lm_head)) for part in local_modules(model, pipeline)
             if not isinstance(part.lm_head, StageOutput)]  # fmt: skip
    overrides, sums = gather_overrides(model, pipeline) + heads, torch.zeros(len(pairs), 2, dtype=torch.float64, device=device)
    model.eval()
    try:
        with override_attributes(overrides):
            for batch in (order[start : start + rows] for start in range(0, len(order), rows)):
                tokens = pad_sequence([torch.tensor(text) for text in batch], batch_first=True).to(device)
                items = [(row, len(text) - len(pairs[index][1]) + n, token, index) for row, text in enumerate(batch)
                         for index in texts[text] for n, token in enumerate(pairs[index][1])]  # fmt: skip
                *selected, pair = torch.tensor(items, device=device).T
                for _, _, head in heads:
                    head.selected = selected
                scores = _call(model, tokens) if pipeline is None else pipeline.forward(_call, tokens, nullcontext)
                if scores is not None:
                    sums.index_add_(0, pair, scores)
    finally:
        model.train(training)
    if pipeline is not None:
        torch_dist.broadcast(sums, group=pipeline.axis.group, group_src=pipeline.source)
    return [(value, not misses) for value, misses in sums.tolist()]


def _call(model: Any, tokens: Tensor) -> Any:
    return model(tokens)


class _TokenScores(nn.Module):
    """In place of the output layer: hidden [B, T, C] -> [N, 2], the log-probability of each token of ``selected`` (its row, column
    and id, [N] each), and 1 if it is not the most probable one."""

    selected: list[Tensor]

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: None = None) -> Tensor:
        row, column, ids = self.selected
        parts = []
        for chunk, target in zip(hidden[row, column].split(_CHUNK), ids.split(_CHUNK)):
            logits = self.head(chunk[None])[0]
            log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            parts.append(torch.stack([log_p.gather(-1, target[:, None])[:, 0].double(), log_p.argmax(-1).ne(target).double()], 1))
        return torch.cat(parts)
