"""Training loss and evaluation metrics of a language model.   B rows, T tokens of each"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels.varlen_attention import document_starts
from hpcai.nn.lm_head import IGNORE_INDEX
from hpcai.nn.moe import Router


class Batch(NamedTuple):
    """Rows of tokens for next-token prediction."""

    tokens: Tensor
    """[B, T + 1] int64"""
    documents: Tensor | None = None
    """[B, T + 1] document of each token within its row, which bounds attention; None: each row is one document"""
    loss_mask: Tensor | None = None
    """[B, T + 1] whether a token is a target, such as those of answers; None: all but the first of each document"""
    bytes: Tensor | None = None
    """[B] bytes of the text of the target tokens"""

    @property
    def targets(self) -> Tensor:
        """[B, T] the next token, or IGNORE_INDEX."""
        targets = self.tokens[:, 1:]
        if self.loss_mask is not None:
            return targets.where(self.loss_mask[:, 1:], IGNORE_INDEX)
        return targets if self.documents is None else targets.where(self.documents.diff(dim=1) == 0, IGNORE_INDEX)

    def further(self, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the k-th next tokens and those after them, IGNORE_INDEX in another document, for each depth k.   two of [B, T]"""
        for k in range(1, min(depths, self.tokens.shape[1] - 1) + 1):
            targets = self.targets[:, k:]
            if self.documents is not None:
                targets = targets.where(self.documents[:, k + 1 :] == self.documents[:, : -k - 1], IGNORE_INDEX)
            yield F.pad(self.tokens[:, k:], (0, k - 1)), F.pad(targets, (0, k), value=IGNORE_INDEX)


def loss(model: Any, batch: Batch) -> dict[str, Any]:
    """Return the mean cross entropy of target tokens, in nats, as (sum, count). A mixture of experts has ``expert_load`` too, the
    load of the busiest expert of any layer relative to a balanced one, ``router_entropy`` in nats, and the fraction ``dropped``.
    In training with multi-token prediction ``mtp_loss`` is the mean of all depths, and ``loss`` has the gradient, not the value, of
    the mean of their sums times ``cfg.mtp_loss``, over the count of the next tokens (DeepSeek-AI 2024, equations 24 and 25)."""
    further = list(batch.further(model.cfg.mtp_layers if model.training else 0))
    (entropy, *others), targets = _entropy(model, batch, further)
    count, total = (targets != IGNORE_INDEX).sum().to(entropy.dtype), model.all_reduce(entropy.sum())
    metrics = {"loss": (total, count), "tokens": count, **router_metrics(model)}
    if others:  # summed each: their gradients are one expanded value, as the output layer prefers
        mtp = model.all_reduce(torch.stack([each.sum() for each in others]).sum())
        metrics["loss"] = total + model.cfg.mtp_loss / len(others) * (mtp - mtp.detach()), count
        metrics["mtp_loss"] = mtp.detach(), torch.stack([each != IGNORE_INDEX for _, each in further]).sum().to(count.dtype)
    return metrics


def _router_stats(model: Any, part: Any) -> list[dict[str, Tensor]]:
    return [each.stats for each in part.modules() if isinstance(each, Router) and each.stats] if model.cfg.experts else []


def router_metrics(model: Any) -> dict[str, Any]:
    """Return what ``loss`` has of experts, for the last call of the model; nothing without experts."""
    if not (stats := _router_stats(model, model)):
        return {}
    loads, entropies, dropped = (torch.stack([each[name] for each in stats]) for name in ("load", "entropy", "dropped"))
    load = (loads.amax(-1) * loads.shape[-1] / loads.sum(-1)).amax()
    return {"expert_load": load, "router_entropy": entropies.mean(), "dropped": dropped.mean()}


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """Return ``loss``, in nats per token, and ``bits_per_byte`` if the batch has ``bytes``, each as (sum, count)."""
    metrics = {"loss": loss(model, batch)["loss"]}
    if batch.bytes is not None:
        total, count = metrics["loss"]
        metrics["bits_per_byte"] = (total / math.log(2), batch.bytes.sum().to(count.dtype))
    return metrics


def entropies(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return rows for reports: tokens [B, T + 1], the cross entropy of each target in nats [B, T], and whether it is a target; with
    experts, and without a pipeline, also the mean ``load`` of each expert by a row [B, layers, experts]."""
    (entropy,), targets = _entropy(model, batch)
    full = torch.zeros(targets.shape, dtype=entropy.dtype, device=entropy.device)
    full[:, model.local_tokens(torch.arange(targets.shape[1], device=entropy.device)[None])[0]] = entropy
    rows = {"tokens": batch.tokens, "nats": model.all_reduce(full), "counted": targets != IGNORE_INDEX}
    stats, experts = _router_stats(model, model.model.layers), model.cfg.experts
    if stats and len(stats) == model.cfg.layers - len(experts.dense_layers):
        load = model.all_reduce(torch.stack([each["load"] for each in stats]).to(full.dtype)) / len(full)
        rows["load"] = load.expand(len(full), -1, -1)
    return rows


def _entropy(model: Any, batch: Batch, further: Any = ()) -> tuple[tuple[Tensor, ...], Tensor]:
    targets, documents = batch.targets, None if batch.documents is None else batch.documents[:, :-1]
    positions = None if documents is None else document_positions(documents)
    losses = model(batch.tokens[:, :-1], targets, positions, documents, further)
    return losses if further else (losses,), targets


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token within its document.   [B, T] -> [B, T]"""
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return positions - positions.where(document_starts(documents), 0).cummax(1).values
