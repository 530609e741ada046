"""What a language model learns and is measured by."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcai.nn.head import IGNORE


class Batch(NamedTuple):
    """Rows of tokens, each with the one that follows."""

    tokens: Tensor
    """[B, T + 1] int64"""
    documents: Tensor | None = None
    """[B, T + 1] which document of its row each token is read in; None: tokens see all those before them"""
    loss_mask: Tensor | None = None
    """[B, T + 1] whether a token is to be learnt, such as those of answers; None: those read in the document of the one before"""
    bytes: Tensor | None = None
    """[B] of the text that the counted tokens say"""

    @property
    def targets(self) -> Tensor:
        """[B, T] the token that follows, where it counts."""
        found = self.tokens[:, 1:]
        if self.loss_mask is not None:
            return found.where(self.loss_mask[:, 1:], IGNORE)
        return found if self.documents is None else found.where(self.documents.diff(dim=1) == 0, IGNORE)


def loss(model: Any, batch: Batch) -> dict[str, Any]:
    """The mean cross entropy of the tokens that count, in nats, as (sum, count)."""
    entropy, targets = _entropy(model, batch)
    count = (targets != IGNORE).sum().to(entropy.dtype)
    return {"loss": (model.all_reduce(entropy.sum()), count), "tokens": count}


def score(model: Any, batch: Batch) -> dict[str, Any]:
    """``loss``, nats of a token, and where the text is known ``bits_per_byte``, each as (sum, count)."""
    entropy, targets = _entropy(model, batch)
    total, count = model.all_reduce(entropy.sum()), (targets != IGNORE).sum().to(entropy.dtype)
    found = {"loss": (total, count)}
    if batch.bytes is not None:
        found["bits_per_byte"] = (total / math.log(2), batch.bytes.sum().to(entropy.dtype))
    return found


def entropies(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Rows for reports: tokens [B, T + 1]; of each that follows the cross entropy in nats [B, T], and whether it counts."""
    entropy, targets = _entropy(model, batch)
    whole = torch.zeros(targets.shape, dtype=entropy.dtype, device=entropy.device)
    whole[:, model.local_tokens(torch.arange(targets.shape[1], device=entropy.device)[None])[0]] = entropy
    return {"tokens": batch.tokens, "nats": model.all_reduce(whole), "counted": targets != IGNORE}


def _entropy(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets, documents = batch.targets, None if batch.documents is None else batch.documents[:, :-1]
    positions = None if documents is None else document_positions(documents)
    return model(batch.tokens[:, :-1], targets, positions, documents), targets


def document_positions(documents: Tensor) -> Tensor:
    """The place of each token in its document.   [B, T] -> [B, T]"""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(1).values
