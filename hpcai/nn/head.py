"""The last layer of a language model, and the cross entropy of its words without all logits at a time.

T tokens, C channels, V words; n processes that each have some of the words, 1 outside a cluster.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.kernels.chunking import chunk_size
from hpcai.untraced import untraced

IGNORE = -1  # a target that does not count
_CPU = 8 << 20  # bytes of logits that a CPU computes at a time


class Words:
    """What a process has of the words: all of them. Where they are cut, ``hpcai.parallel.tensor`` gives another one."""

    first = 0  # of this process's words

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens, of which this process may have some."""
        return hidden

    def agree(self, logs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of sums of exponentials, and logits of targets, of this process's words [T] -> of all words."""
        return logs, target

    def join(self, logits: Tensor) -> Tensor:
        """Logits of all words [..., V], from those of this process's words."""
        return logits

    def leave(self, gradient: Tensor) -> Tensor:
        """The gradient of ``enter``'s input, from that of its output by this process's words."""
        return gradient


class Head(nn.Linear):
    """hidden [..., C] -> logits [..., V]; with ``targets`` [...] the cross entropy of each [...] in float32 or wider, 0 where the
    target is ``IGNORE``. Then logits are computed some tokens at a time, and again in the backward pass. A target that is no word
    costs NaN."""

    words = Words()

    def __init__(self, channels: int, words: int) -> None:
        super().__init__(channels, words, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.words.join(F.linear(self.words.enter(hidden), self.weight))
        return self._entropy(hidden, targets)

    @untraced
    def _entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        kind, weight = hidden.device.type, self.weight
        if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:  # which does not see a function of ours
            hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
        found = _Entropy.apply(hidden, weight, targets, self.words)
        return found.masked_fill((targets != IGNORE) & ((targets < 0) | (targets >= self.out_features)), torch.nan)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, words: Words) -> Tensor:
        whole = words.enter(hidden)
        rows, own = whole.reshape(-1, whole.shape[-1]), targets.reshape(-1) - words.first
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logs, target = (torch.empty(len(rows), dtype=wide, device=rows.device) for _ in range(2))
        for some in _parts(rows, weight):
            logits = F.linear(rows[some], weight).to(wide)
            at, is_own = _placed(own[some], weight)
            target[some] = logits.gather(-1, at)[:, 0].where(is_own, 0)
            top = logits.amax(-1)
            logs[some] = logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top)  # logsumexp, which would need as much again
            del logits  # or it lives while the next are made
        logs, target = words.agree(logs, target)
        ctx.save_for_backward(hidden, weight, targets, logs)
        ctx.words = words
        return (logs - target).view(targets.shape).where(targets != IGNORE, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, targets, logs = ctx.saved_tensors
        words: Words = ctx.words
        whole = words.enter(hidden)
        rows, own = whole.reshape(-1, whole.shape[-1]), targets.reshape(-1) - words.first
        scale = grad.reshape(-1).where(targets.reshape(-1) != IGNORE, 0)
        by_rows = torch.empty_like(rows)
        by_weight = torch.zeros_like(weight, dtype=logs.dtype) if ctx.needs_input_grad[1] else None
        for some in _parts(rows, weight):
            slope = F.linear(rows[some], weight).to(logs.dtype).sub_(logs[some, None]).exp_()
            at, is_own = _placed(own[some], weight)
            slope.scatter_add_(-1, at, -is_own[:, None].to(slope.dtype))
            slope = slope.mul_(scale[some, None]).to(weight.dtype)
            torch.mm(slope, weight, out=by_rows[some])
            if by_weight is not None:
                by_weight += slope.T @ rows[some]
            del slope
        return words.leave(by_rows.view(whole.shape)), None if by_weight is None else by_weight.to(weight.dtype), None, None


def _parts(rows: Tensor, weight: Tensor) -> Iterator[slice]:
    step = chunk_size(rows, 4 * len(weight), _CPU)
    return (slice(begin, begin + step) for begin in range(0, len(rows), step))


def _placed(targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Which of this process's words each target is [T, 1], and whether it is one of them [T]."""
    is_own = (targets >= 0) & (targets < len(weight))
    return targets.where(is_own, 0)[:, None], is_own
