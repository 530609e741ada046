"""Loss and scores of BERT.   B rows, T tokens, P packed sequences and M masked tokens of each, at most, H heads of all layers"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels.packed_attention import Packing
from hpcai.models.bert.model import SelfAttention
from hpcai.nn.lm_head import IGNORE_INDEX


class Batch(NamedTuple):
    """Packed rows of sequences with masked tokens."""

    tokens: Tensor
    """[B, T] int64"""
    lengths: Tensor
    """[B, P] tokens of each sequence, 0: none"""
    masked: Tensor
    """[B, M] columns of the tokens to predict"""
    targets: Tensor
    """[B, M] the original tokens there, IGNORE_INDEX: none"""
    types: Tensor | None = None
    """[B, T] 1 in second sentences; None: 0"""
    next_sentence: Tensor | None = None
    """[B, P] 0: the second sentence follows the first, 1: it does not, IGNORE_INDEX: no sequence"""
    baseline: Tensor | None = None
    """[B] cross entropy of the targets by a baseline, in nats, summed"""


def counted(batch: Batch) -> Tensor:
    """Return the numbers of masked tokens and of sequences with a next-sentence label.   [2]"""
    masked = (batch.targets != IGNORE_INDEX).sum()
    pairs = masked.new_zeros(()) if batch.next_sentence is None else (batch.next_sentence != IGNORE_INDEX).sum()
    return torch.stack((masked, pairs)).float()


def loss(model: Any, batch: Batch, counts: Tensor | None = None) -> dict[str, Any]:
    """Return the mean cross entropy of masked tokens plus that of next-sentence prediction, in nats; each of them as (sum, count).
    ``counts`` [2]: Masked tokens and sequences to divide by; None: those of the batch."""
    own = counted(batch)
    masked, pairs = (own if counts is None else counts).clamp(min=1e-9)  # the mean of replicas may be less than 1
    entropies, nsp = model(batch.tokens, batch.lengths, batch.types, batch.masked, batch.targets)
    mlm = entropies.sum()
    result = {"loss": mlm / masked, "mlm_loss": (mlm.detach(), own[0])}
    if nsp is not None and batch.next_sentence is not None:
        total = _nsp_loss(nsp, batch.next_sentence)
        result |= {"loss": result["loss"] + total / pairs, "nsp_loss": (total.detach(), own[1])}
    return result


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """Return sums and counts over masked tokens: ``mlm_accuracy``, the metric of MLPerf (target 0.72), ``mlm_loss`` in nats and its
    exponential ``perplexity``; with labels ``nsp_loss`` and ``nsp_accuracy``; and ``baseline_perplexity`` if the batch has it."""
    logits, nsp = model(batch.tokens, batch.lengths, batch.types, batch.masked)
    targets, (masked, pairs) = batch.targets, counted(batch)
    entropy = F.cross_entropy(_wide(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    correct = (logits.argmax(-1) == targets).sum()
    result: dict[str, Any] = {"mlm_accuracy": (correct, masked), "mlm_loss": (entropy, masked)}
    result["perplexity"] = (torch.stack((entropy, masked.to(entropy.dtype))), _Perplexity("perplexity"))
    if batch.baseline is not None:
        total = batch.baseline.to(entropy.dtype).sum()
        result["baseline"] = (torch.stack((total, masked.to(total.dtype))), _Perplexity("baseline_perplexity"))
    if nsp is not None and batch.next_sentence is not None:
        hits = ((nsp.argmax(-1) == batch.next_sentence) & (batch.next_sentence != IGNORE_INDEX)).sum()
        result |= {"nsp_loss": (_nsp_loss(nsp, batch.next_sentence), pairs), "nsp_accuracy": (hits, pairs)}
    return result


class _Perplexity(NamedTuple):
    name: str

    def __call__(self, sums: Tensor) -> dict[str, float]:
        total, count = sums.tolist()
        return {self.name: math.exp(min(total / max(count, 1.0), 700.0))}


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _nsp_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(_wide(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def attention_maps(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the attention of all layers and heads for the first sequence of each row: ``lengths`` [B], and ``attention``
    [B, H, T, T], 0 beyond the sequence; symmetric, and with the average product correction (Rao et al. 2021)."""
    lengths, width = batch.lengths[:, 0], batch.tokens.shape[1]
    inside = torch.arange(width, device=lengths.device) < lengths[:, None]
    maps: list[Tensor] = []

    def record(layer: SelfAttention, inputs: tuple[Tensor, Packing]) -> None:
        q, k, _ = (inputs[1].unflatten(y).transpose(1, 2) for y in layer.heads(inputs[0]))
        p = _wide(q @ k.transpose(-1, -2) * layer.head_dim**-0.5).masked_fill(~inside[:, None, None], -torch.inf).softmax(-1)
        p = p * inside[:, None, :, None]
        p = p + p.transpose(-1, -2)
        product = p.sum(-1, keepdim=True) * p.sum(-2, keepdim=True) / p.sum((-1, -2), keepdim=True)
        maps.append(layer.every_head(p - product, model.cfg.heads))

    handles = [part.register_forward_pre_hook(record) for part in model.modules() if isinstance(part, SelfAttention)]
    try:
        model(batch.tokens, lengths[:, None], batch.types, batch.masked)
    finally:
        for handle in handles:
            handle.remove()
    return {"lengths": lengths, "attention": torch.cat(maps, 1)}
