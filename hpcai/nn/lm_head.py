"""The output layer of a language model, and its cross entropy in chunks of tokens, which never materialises all logits.

T tokens, C channels, V vocabulary entries, sharded over n ranks or, without ``hpcai.parallel.tensor``, on one.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import ConfigError
from hpcai.kernels.chunking import chunk_size
from hpcai.kernels.triton_support import needs_plain_ops, on_cpu
from hpcai.nn.matmul import cast_to_autocast

IGNORE_INDEX = -1  # a target that does not count
_CPU = 8 << 20  # bytes of the logits of a chunk on a CPU
_CPU_TOKENS = 256  # of a chunk on a CPU, at least: with fewer, products take much longer for reading weights and adding gradients


class VocabShard:
    """The vocabulary entries held by this rank. The default holds all; ``hpcai.parallel.tensor`` substitutes a shard."""

    ranks, start = 1, 0  # ranks that share the vocabulary, the first local entry

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
    tokens, once if the loss is a multiple of the sum over tokens, otherwise again in the backward pass. Those of the cross entropy
    are divided by ``temperature``. Raises ConfigError for a temperature with ``softcap``.

    Args:
        softcap: Logits, also those that are returned, are softcap * tanh(logits / softcap) (Gemma 2; Gemma Team 2024).
        bias: Add a bias [V] to the logits.
        z_loss: In training mode, z_loss * logsumexp(logits)**2 is added to the loss of each counted token, which keeps logits from
            growing (PaLM; Chowdhery et al. 2022). In evaluation mode the loss is the cross entropy alone.
    """

    vocab = VocabShard()

    def __init__(
        self, channels: int, vocab_size: int, softcap: float | None = None, z_loss: float = 0.0, bias: bool = False
    ) -> None:
        super().__init__(channels, vocab_size, bias)
        self.softcap, self.z_loss = softcap, z_loss

    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        if targets is None:
            return self.vocab.gather_logits(self._cap(F.linear(self.vocab.gather_hidden(hidden), self.weight, self.bias)))
        if self.softcap is not None and temperature != 1.0:
            raise ConfigError(f"temperature is {temperature:g}, but logits have a soft cap (logit_softcap); set temperature to 1")
        return self._cross_entropy(hidden if temperature == 1.0 else hidden / temperature, targets)

    def _cap(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_() * self.softcap

    @disable_dynamo
    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        hidden, weight, z_loss = cast_to_autocast(hidden), cast_to_autocast(self.weight), self.z_loss if self.training else 0.0
        bias = None if self.bias is None else cast_to_autocast(self.bias)
        if needs_plain_ops() and type(self.vocab) is VocabShard:
            logits = self._cap(F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)))
            target = logits.gather(-1, targets.clamp(0, len(weight) - 1)[..., None])[..., 0]
            return self._losses(logits.logsumexp(-1), target, targets, z_loss)
        return _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, self, z_loss, torch.is_grad_enabled())

    def _losses(self, logsumexp: Tensor, target: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        """Return the losses, from logsumexp and the logits of the targets, all [...]."""
        loss = logsumexp - target + (z_loss * logsumexp.square() if z_loss else 0.0)
        return loss.where(self._is_counted(targets), torch.nan).masked_fill(targets == IGNORE_INDEX, 0)

    def _is_counted(self, targets: Tensor) -> Tensor:
        return (targets >= 0) & (targets < self.out_features)


@dataclass(eq=False)
class _Gradients:
    """Gradients of the rows [T, C], if needed, and of the weight [V, C] and bias [V], in float32 or wider, as far as computed."""

    rows: Tensor | None
    needs_weight: bool
    weight: Any = None
    bias: Any = None


# Gradients that the forward pass of a head has computed, by its id, until a backward pass takes them. Further forward passes before
# it leave theirs to the backward pass: memory holds one gradient of the weight, not that of each micro-batch in a pipeline.
_pending = WeakValueDictionary[int, _Gradients]()


class _ChunkedCrossEntropy(UntransformedFunction):
    """The loss is linear in its upstream gradient: the forward pass computes the gradients for 1 from the logits that it has (as
    Hsu et al., "Liger Kernel", 2024), and the backward pass scales them. That of the weight is a sum over tokens, which can be
    scaled if autograd expands one upstream gradient to all tokens, as for their sum. Otherwise, as for weights of tokens or
    ``mean``, logits and this gradient are computed again: strides tell, without waiting for a GPU."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: LMHead, z_loss: float, is_grad: bool
    ) -> Tensor:
        needs_rows, needs_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        rows = head.vocab.gather_hidden(hidden).reshape(-1, hidden.shape[-1])
        ctx.head, ctx.z_loss, ctx.gradients = head, z_loss, None
        if is_grad and (needs_rows or needs_weight) and not (needs_weight and id(head) in _pending):
            ctx.gradients = _pending[id(head)] = _Gradients(torch.empty_like(rows) if needs_rows else None, needs_weight)
        scale = head._is_counted(targets).reshape(-1).to(torch.promote_types(hidden.dtype, torch.float32))
        logsumexp, target = torch.empty_like(scale), torch.empty_like(scale)
        _run_chunks(rows, weight, bias, targets, head, z_loss, scale, ctx.gradients, logsumexp, target)
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp)
        return head._losses(logsumexp.view(targets.shape), target.view(targets.shape), targets, z_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, targets, logsumexp = ctx.saved_tensors
        head, needs_rows, needs_weight = ctx.head, ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        scale = grad.where(head._is_counted(targets), 0).reshape(-1)
        gradients = ctx.gradients or _Gradients(None, False)
        drows, dweight, dbias = gradients.rows, gradients.weight, gradients.bias
        ctx.gradients = None  # scaled in place: another backward pass computes them again
        if drows is not None:
            drows.mul_(scale[:, None])
        if dweight is not None:  # without strides, ``grad`` is one value, expanded
            factor = None if any(grad.stride()) else grad.flatten()[:1].sum()
            dweight, dbias = (None if x is None or factor is None else x.mul_(factor) for x in (dweight, dbias))
        if (needs_rows and drows is None) or (needs_weight and dweight is None):
            rows = head.vocab.gather_hidden(hidden).reshape(-1, hidden.shape[-1])
            gradients = _Gradients(torch.empty_like(rows) if needs_rows and drows is None else None, needs_weight)
            _run_chunks(rows, weight, bias, targets, head, ctx.z_loss, scale, gradients, logsumexp)
            drows, dweight, dbias = gradients.rows if drows is None else drows, gradients.weight, gradients.bias
        dhidden = None if drows is None else head.vocab.reduce_grad_input(drows.view(*targets.shape, hidden.shape[-1]))
        dweight, dbias = (None if x is None else x.to(weight.dtype) for x in (dweight, dbias))
        return dhidden, dweight, dbias, None, None, None, None


def _run_chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: LMHead, z_loss: float, scale: Tensor,
    gradients: _Gradients | None, logsumexp: Tensor, target: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute ``gradients`` for the upstream gradients ``scale``; and ``logsumexp`` and the logits of targets, unless ``target`` is
    None and ``logsumexp`` known. These three are [T]."""
    softcap, entry = head.softcap or 0.0, targets.reshape(-1) - head.vocab.start
    is_local = (entry >= 0) & (entry < len(weight))
    index = entry.where(is_local, 0)[:, None]
    item_bytes = 4 * -(-head.out_features // head.vocab.ranks)  # equal on all ranks, so that they have equally many chunks
    step = chunk_size(rows, item_bytes, max(_CPU, _CPU_TOKENS * item_bytes))
    for begin in range(0, max(len(rows), 1), step):
        chunk = slice(begin, begin + step)
        logits = F.linear(rows[chunk], weight, bias).to(logsumexp.dtype)
        tanh = logits.div_(softcap).tanh_() if softcap else None
        logits = logits if tanh is None else tanh * softcap
        factor = scale[chunk]
        if target is None:
            logits.sub_(logsumexp[chunk, None]).exp_()
        else:
            at_target = logits.gather(-1, index[chunk])[:, 0].where(is_local[chunk], 0)
            top = logits.amax(-1)
            logits = torch.softmax(logits, -1, out=logits if on_cpu(logits) else None)  # reads each row before it writes it
            local = top.sub_(logits.amax(-1).log_())  # logsumexp: the largest probability is exp(top - logsumexp)
            logsumexp[chunk], target[chunk] = head.vocab.all_reduce(local, at_target)
            factor = factor * (local - logsumexp[chunk]).exp()
        if gradients is not None:
            factor = factor * (1 + 2 * z_loss * logsumexp[chunk]) if z_loss else factor
            logits.mul_(factor[:, None]).scatter_add_(-1, index[chunk], -(scale[chunk] * is_local[chunk])[:, None])
            if tanh is not None:
                logits.mul_(tanh.square_().neg_().add_(1))
            if bias is not None and gradients.needs_weight:
                gradients.bias = logits.sum(0) if gradients.bias is None else gradients.bias.add_(logits.sum(0))
            logits = logits.to(weight.dtype)
            if gradients.rows is not None:
                torch.mm(logits, weight, out=gradients.rows[chunk])
            if gradients.needs_weight and begin and weight.dtype == logsumexp.dtype:
                gradients.weight.addmm_(logits.T, rows[chunk])
            elif gradients.needs_weight and begin:
                gradients.weight += logits.T @ rows[chunk]
            elif gradients.needs_weight:
                gradients.weight = (logits.T @ rows[chunk]).to(logsumexp.dtype)
        del logits, tanh  # before those of the next chunk are allocated
