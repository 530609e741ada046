"""A small language model for tests of the parallel forms.   B batch, T tokens, C channels, H heads, D of a head, V words"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS = 24, 16, 4, 4, 8


class Causal(nn.Module):
    """Attention of each token to itself and those before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, T, D] -> [B, H, T, D]"""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend: nn.Module = Causal()  # seam: where the tokens of a sample lie on several ranks

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, C], positions [T] -> [B, T, C]. With heads cut, H/n of them are here."""
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(rotated(q, positions), rotated(k, positions), v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """w2 (silu(w1 x) * w3 x), with w1 and w3 in one weight (Shazeer, "GLU variants", 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.feed = nn.LayerNorm(width), Feed(width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), positions)
        return x + self.feed(self.between(x))


class Entropy(nn.Module):
    """Cross entropy of each token."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [B, T, V], targets [B, T] (-1: does not count) -> [B, T]"""
        return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none")


class Transformer(nn.Module):
    """``own`` is what this rank has of the tokens [B, T], ``total`` the sum of what the ranks that share a sample counted."""

    def __init__(self, layers: int = LAYERS, tied: bool = False, width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.own: nn.Module = nn.Identity()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.entropy: nn.Module = Entropy()  # seam: where the words lie on several ranks
        self.total: nn.Module = nn.Identity()
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, T], positions [T] of them -> logits [B, T, V]"""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021).   x [B, H, T, D], positions [T]"""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def loss(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The mean over the tokens that count, as (sum, count)."""
    tokens, targets = model.own(batch["tokens"]), model.own(batch["targets"])
    positions = model.own(torch.arange(batch["tokens"].shape[1], device=tokens.device)[None])[0]
    entropy, counted = model.entropy(model(tokens, positions), targets), targets >= 0
    right = model.total(counted.sum().to(entropy.dtype))
    return {"loss": (model.total(entropy.sum()), right), "tokens": (right.detach(), 1.0)}


def mean_loss(model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """``loss`` as one number."""
    total, count = loss(model, batch)["loss"]
    return {"loss": total / count}


def batch(step: int, samples: int = 8, tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Samples that all ranks of a copy get; some tokens do not count."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, vocabulary, (samples, tokens + 1), generator=generator)
    targets = torch.where(torch.rand(samples, tokens, generator=generator) < 0.2, -1, words[:, 1:])
    return {"tokens": words[:, :-1], "targets": targets}
