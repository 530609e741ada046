"""Causal attention within documents, with a sliding window, soft-capped logits or attention sinks.

Attention with a window (Beltagy et al. 2020) is computed in blocks of as many tokens as the window, each of which attends to itself
and to the block before it: its cost is that of two windows for each token. A sink is a further key of each head, whose product with
a query is a learned logit and whose value is 0; as a key in front of the others it needs no kernel of its own.

B rows, H heads, T queries, which are the last of S keys, D channels of a head, W tokens of a window.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import varlen_attention as varlen
from hpcai.kernels.grouped_query_attention import grouped_query_attention


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of each token to itself and the tokens before it.

    Args:
        documents: The document of each key, for attention within it, as for ``varlen_attention``.
        window: The number of tokens to which attention is limited, with the token itself.
        softcap: Logits are softcap * tanh(logits / softcap) (Gemma Team 2024).
        sinks: The logit of the sink of each head (Xiao et al. 2023; learned as in gpt-oss).

    Shape: q [B, H, T, D]; k and v [B, H or a divisor of it, S, D]; documents [B, S]; sinks [H] -> [B, H, T, D]
    """
    queries, keys = q.shape[2], k.shape[2]
    window = None if window is None or window >= keys else window
    plain = softcap is None and sinks is None
    if plain and (window is None or varlen.supports_window(q, k)):
        if documents is not None or window is not None:
            documents = torch.zeros(len(q), keys, dtype=torch.int64, device=q.device) if documents is None else documents
            return varlen.varlen_attention(q, k, v, documents, window)
        if queries in (1, keys):
            return grouped_query_attention(q, k, v, causal=queries > 1)
    if window is not None and queries > 2 * window:
        return _blocks(q, k, v, documents, window, softcap, sinks)
    if documents is None and window is None and softcap is None:
        return _attend(q, k, v, None, softcap, sinks)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries - window + 1)
    if documents is not None:
        mask = mask & (documents[:, None, keys - queries :, None] == documents[:, None, None])
    return _attend(q, k, v, mask, softcap, sinks)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the attention of one new token of each text to the keys in ``mask`` [B, 1, 1, S], or to all.

    Shape: q [B, H, 1, D]; k and v [B, H or a divisor of it, S, D] -> [B, H, 1, D]
    """
    if softcap is not None or sinks is not None:
        mask = torch.ones(1, k.shape[2], dtype=torch.bool, device=q.device) if mask is None else mask
        return _attend(q, k, v, mask, softcap, sinks)
    grouped = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # query heads of one KV head, in place of tokens
    return F.scaled_dot_product_attention(grouped, k, v, mask).flatten(1, 2).unsqueeze(2)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    rows, queries = len(q), q.shape[2]
    count, before = -(-queries // window), k.shape[2] - queries
    after = count * window - queries
    if documents is None:
        documents = torch.zeros(1, k.shape[2], dtype=torch.int64, device=q.device).expand(rows, -1)

    def key_blocks(x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """Split keys into overlapping blocks of two windows.   [..., S, ...] -> [..., count, ..., 2 W]"""
        x = x.narrow(dim, max(before - window, 0), min(before, window) + queries)
        return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), max(window - before, 0), after), value=fill).unfold(dim, 2 * window, window)

    # Padding is a document of its own, so that no query is left without a key.
    keys, position = key_blocks(documents, 1, -1), torch.arange(2 * window, device=q.device)
    band = (position > position[:window, None]) & (position <= position[:window, None] + window)
    mask = (band & (keys[:, :, window:, None] == keys[:, :, None])).flatten(0, 1)[:, None]
    blocks = F.pad(q, (0, 0, 0, after)).unflatten(2, (count, window)).transpose(1, 2).flatten(0, 1)
    k, v = (key_blocks(x, 2).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (k, v))
    out = _attend(blocks, k, v, mask, softcap, sinks)
    return out.unflatten(0, (rows, count)).transpose(1, 2).flatten(2, 3)[:, :, :queries]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the attention to the keys in ``mask``; None: to the keys before each of the last T tokens."""
    if softcap is None:
        size = q.shape[3]
        if sinks is not None:  # a channel that is 1 in the key of the sink alone; 8 channels keep memory aligned
            logit = (sinks * math.sqrt(size + 8)).to(q.dtype)[:, None, None].expand(len(q), -1, q.shape[2], 1)
            q = F.pad(torch.cat((q * math.sqrt((size + 8) / size), logit), -1), (0, 7))
            k, v = (F.pad(x, (0, 8, 1, 0)) for x in (k, v))
            k[:, :, 0, size] = 1
            mask = mask if mask is None else F.pad(mask.expand(*mask.shape[:-1], k.shape[2] - 1), (1, 0), value=True)
        if mask is None:
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

            return grouped_query_attention(q, k, v, causal_lower_right(q.shape[2], k.shape[2]))[..., :size]
        return grouped_query_attention(q, k, v, mask)[..., :size]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = softcap * torch.tanh((q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 / softcap))
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)), -1)
    weights = logits.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return weights[..., : k.shape[2]] @ v
