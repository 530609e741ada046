"""Causal attention within the documents of packed rows: a token attends to the tokens before it in its document, and to itself.

On a GPU in 16 bits this is torch's attention of sequences of variable length, which builds no [T, T] mask and needs no compiler, so
that it can be captured and planned. On a CPU each document has an attention of its own, in a third of the time of a masked one.
Elsewhere it is torch's attention with a mask.

B rows, H heads, T queries, which are the last of S keys, D channels of a head.
"""

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.grouped_query_attention import grouped_query_attention

_MIN_DOCUMENTS, _TOKENS_PER_DOCUMENT = 256, 64  # the most documents of a row on a GPU: 256, or one for every 64 tokens
_HEAD_DIMS = range(8, 257, 8)  # of FlashAttention


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None = None) -> Tensor:
    """Return the attention of each token to its document.

    On a GPU a row of more than ``max_documents(T)`` documents gives NaN: their number is not known on the host, so the list of
    sequences has a fixed length, and is padded with empty ones.

    ``documents``: The document of each token, integers that do not decrease along a row. ``window``: The number of tokens to which
    attention is limited, if ``supports_window``.
    Shape: q [B, H, T, D]; k and v [B, H or a divisor of it, S, D]; documents [B, S] -> [B, H, T, D]
    """
    if len(q) and q.shape[2] == k.shape[2] > 1 and not triton_support.needs_plain_ops():
        if triton_support.on_cpu(q) and not k.is_meta and documents.device.type == "cpu":
            return _per_document(q, k, v, documents)
        if _supports_packed(q):
            return _packed(q, k, v, documents, window)
    return reference(q, k, v, documents)


def supports_window(q: Tensor, k: Tensor) -> bool:
    """Return whether torch's attention of sequences of variable length computes these, and has a sliding window."""
    is_self = q.shape[2] == k.shape[2] > 1 and not triton_support.needs_plain_ops()
    return is_self and _supports_packed(q) and "window_size" in _varlen_attn()[1]


def _supports_packed(q: Tensor) -> bool:
    is_narrow = q.dtype in (torch.bfloat16, torch.float16)
    return triton_support.on_gpu(q) and is_narrow and q.shape[3] in _HEAD_DIMS


def reference(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Compute ``varlen_attention`` with a mask [B, 1, T, S]."""
    before = k.shape[2] - q.shape[2]
    mask = (documents[:, None, before:, None] == documents[:, None, None, :]).tril(before)
    return grouped_query_attention(q, k, v, mask)


def max_documents(tokens: int) -> int:
    """Return the most documents that a row of ``tokens`` may hold on a GPU."""
    return min(tokens, max(_MIN_DOCUMENTS, tokens // _TOKENS_PER_DOCUMENT))


def _per_document(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    starts = document_starts(documents).flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.full((1,), documents.numel())).tolist()
    sequences = zip(*(_flatten_batch(x)[None].transpose(1, 2).split(lengths, 2) for x in (q, k, v)))
    outs = [grouped_query_attention(q_i, k_i, v_i, causal=True).transpose(1, 2) for q_i, k_i, v_i in sequences]
    return torch.cat(outs, 1).view(q.shape[0], q.shape[2], *outs[0].shape[2:]).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int | None) -> Tensor:
    attention, parameters = _varlen_attn()
    tokens = q.shape[2]
    cu_seqlens, fits = _cu_seqlens(documents, len(documents) * max_documents(tokens))
    past = -1 if window is None else window - 1
    kwargs: dict[str, Any] = {"window_size": (past, 0)} if "window_size" in parameters else {"is_causal": True}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in parameters:
            kwargs["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = attention(*map(_flatten_batch, (q, k, v)), cu_seqlens, cu_seqlens, tokens, tokens, **kwargs)
    return out.where(fits, torch.nan).view(q.shape[0], tokens, *out.shape[1:]).transpose(1, 2)


@cache
def _varlen_attn() -> tuple[Any, frozenset[str]]:
    """Return ``torch.nn.attention.varlen.varlen_attn`` and the names of its parameters. Its import is that of torch's compiler."""
    function = import_module("torch.nn.attention.varlen").varlen_attn
    return function, frozenset(signature(function).parameters)


def _flatten_batch(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B T, H, D]"""
    return x.transpose(1, 2).flatten(0, 1)


def document_starts(documents: Tensor) -> Tensor:
    """Whether each token is the first of its document.   [B, T]"""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def _cu_seqlens(documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the cumulative lengths of ``count`` documents, the last of them empty, [count + 1] int32; and whether all fit."""
    starts = document_starts(documents).flatten()
    number = starts.cumsum(0) - starts.long()  # of the document that starts here
    padded = torch.full((count + 2,), len(starts), dtype=torch.int32, device=documents.device)
    token = torch.arange(len(starts), dtype=torch.int32, device=documents.device)
    padded.scatter_(0, number.where(starts, count + 1).clamp(max=count + 1), token)
    cu_seqlens = padded[: count + 1]
    return cu_seqlens, cu_seqlens[-1] == len(starts)
