"""The output layer of a language model, and its cross entropy in chunks of tokens, which never materialises all logits.

T tokens, C channels, V vocabulary entries, sharded over n ranks or, without ``hpcai.parallel.tensor``, on one.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.kernels.chunking import chunk_size
from hpcai.kernels.triton_support import needs_plain_ops

IGNORE_INDEX = -1  # a target that does not count
_CPU = 8 << 20  # bytes of the logits of a chunk on a CPU


class VocabShard:
    """The vocabulary entries held by this rank. The default holds all; ``hpcai.parallel.tensor`` substitutes a shard."""

    start = 0  # the first local entry

    def gather_hidden(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all tokens, from those of this rank."""
        return hidden

    def all_reduce(self, logsumexp: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logsumexp and the logits of the targets over all entries [T], from those over the local entries [T]."""
        return logsumexp, target

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of all entries [..., V], from those of the local entries."""
        return logits

    def reduce_grad_input(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input of ``gather_hidden``, from that of its output by the local entries."""
        return grad


class LMHead(nn.Linear):
    """hidden [..., C] -> logits [..., V]; with ``targets`` [...] -> the cross entropy of each token [...], in float32 or wider.

    It is 0 where the target is ``IGNORE_INDEX``, and NaN where the target is no vocabulary entry. Logits are computed in chunks of
    tokens, and recomputed in the backward pass.
    """

    vocab = VocabShard()

    def __init__(self, channels: int, vocab_size: int) -> None:
        super().__init__(channels, vocab_size, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.vocab.gather_logits(F.linear(self.vocab.gather_hidden(hidden), self.weight))
        return self._cross_entropy(hidden, targets)

    @disable_dynamo
    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        device, weight = hidden.device.type, self.weight
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:  # autocast does not see a custom function
            hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
        if needs_plain_ops() and type(self.vocab) is VocabShard:
            logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(-1)
            loss = -logits.gather(-1, targets.clamp(0, len(weight) - 1)[..., None])[..., 0].where(targets != IGNORE_INDEX, 0)
        else:
            loss = _ChunkedCrossEntropy.apply(hidden, weight, targets, self.vocab)
        return loss.masked_fill((targets != IGNORE_INDEX) & ((targets < 0) | (targets >= self.out_features)), torch.nan)


class _ChunkedCrossEntropy(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab: VocabShard) -> Tensor:
        full = vocab.gather_hidden(hidden)
        rows, local = full.reshape(-1, full.shape[-1]), targets.reshape(-1) - vocab.start
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logsumexp, target = (torch.empty(len(rows), dtype=wide, device=rows.device) for _ in range(2))
        for chunk in _chunks(rows, weight):
            logits = F.linear(rows[chunk], weight).to(wide)
            index, is_local = _local_targets(local[chunk], weight)
            target[chunk] = logits.gather(-1, index)[:, 0].where(is_local, 0)
            top = logits.amax(-1)
            logsumexp[chunk] = logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top)  # torch's would need as much again
            del logits  # before the next chunk is allocated
        logsumexp, target = vocab.all_reduce(logsumexp, target)
        ctx.save_for_backward(hidden, weight, targets, logsumexp)
        ctx.vocab = vocab
        return (logsumexp - target).view(targets.shape).where(targets != IGNORE_INDEX, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, targets, logsumexp = ctx.saved_tensors
        vocab: VocabShard = ctx.vocab
        full = vocab.gather_hidden(hidden)
        rows, local = full.reshape(-1, full.shape[-1]), targets.reshape(-1) - vocab.start
        scale = grad.reshape(-1).where(targets.reshape(-1) != IGNORE_INDEX, 0)
        drows = torch.empty_like(rows)
        dweight = torch.zeros_like(weight, dtype=logsumexp.dtype) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(rows, weight):
            grad_logits = F.linear(rows[chunk], weight).to(logsumexp.dtype).sub_(logsumexp[chunk, None]).exp_()
            index, is_local = _local_targets(local[chunk], weight)
            grad_logits.scatter_add_(-1, index, -is_local[:, None].to(grad_logits.dtype))
            grad_logits = grad_logits.mul_(scale[chunk, None]).to(weight.dtype)
            torch.mm(grad_logits, weight, out=drows[chunk])
            if dweight is not None:
                dweight += grad_logits.T @ rows[chunk]
            del grad_logits
        return vocab.reduce_grad_input(drows.view(full.shape)), None if dweight is None else dweight.to(weight.dtype), None, None


def _chunks(rows: Tensor, weight: Tensor) -> Iterator[slice]:
    step = chunk_size(rows, 4 * len(weight), _CPU)
    return (slice(begin, begin + step) for begin in range(0, len(rows), step))


def _local_targets(targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local vocabulary entry of each target [T, 1], 0 if it is on another rank, and whether it is local [T]."""
    is_local = (targets >= 0) & (targets < len(weight))
    return targets.where(is_local, 0)[:, None], is_local
