"""Attention of rows that hold several documents one behind another: each token to those before it in its own, and itself.

On a GPU in 16 bits it is torch's attention of sequences of any lengths, which makes no mask of T x T and, unlike FlexAttention,
needs no compiler, so that it can be recorded and planned as it is; on a CPU one attention for each document, which takes a third
of the time of a mask's; elsewhere torch's with a mask.   B rows, H heads, T queries, the last of S keys, D channels of a head.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import compiler
from hpcai.kernels.grouped import grouped_attention

_ROOM, _TOKENS = 256, 64  # documents of a row on a GPU: as many as this, or one for so many tokens
_SIZES = range(8, 257, 8)  # channels of a head that FlashAttention has
_HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """q [B, H, T, D], k and v [B, H or fewer, S, D], documents [B, S] integers that do not decrease along a row -> [B, H, T, D]

    On a GPU a row of more documents than ``room(T)`` gives NaN: how many there are is not known on the host, so the sequences have
    a fixed number of places, of which the empty ones cost a little.
    """
    if len(q) and q.shape[2] == k.shape[2] > 1 and not torch.compiler.is_compiling():
        if compiler.on_cpu(q) and not k.is_meta and documents.device.type == "cpu":
            return _one_by_one(q, k, v, documents)
        if compiler.on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] in _SIZES and _HAS_VARLEN:
            return _together(q, k, v, documents)
    return plain(q, k, v, documents)


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """The same with a mask [B, 1, T, S]."""
    before = k.shape[2] - q.shape[2]
    mask = (documents[:, None, before:, None] == documents[:, None, None, :]).tril(before)
    return grouped_attention(q, k, v, mask)


def room(tokens: int) -> int:
    """How many documents a row may have on a GPU."""
    return min(tokens, max(_ROOM, tokens // _TOKENS))


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    lengths = torch.diff(_begins(documents).flatten().nonzero()[:, 0], append=torch.full((1,), documents.numel())).tolist()
    parts = zip(*(_side_by_side(x)[None].transpose(1, 2).split(lengths, 2) for x in (q, k, v)))
    outs = [grouped_attention(own, keys, values, causal=True).transpose(1, 2) for own, keys, values in parts]
    return torch.cat(outs, 1).view(q.shape[0], q.shape[2], *outs[0].shape[2:]).transpose(1, 2)


def _together(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    attention, known = _varlen()
    tokens = q.shape[2]
    ends, fits = _ends(documents, len(documents) * room(tokens))
    words: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in known:
            words["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out = attention(_side_by_side(q), _side_by_side(k), _side_by_side(v), ends, ends, tokens, tokens, **words)
    return out.where(fits, torch.nan).view(q.shape[0], tokens, *out.shape[1:]).transpose(1, 2)


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    """torch's attention of sequences of any lengths, and the words that it knows. Importing it imports torch's compiler."""
    function = import_module("torch.nn.attention.varlen").varlen_attn
    return function, frozenset(signature(function).parameters)


def _side_by_side(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B T, H, D]"""
    return x.transpose(1, 2).flatten(0, 1)


def _begins(documents: Tensor) -> Tensor:
    """Whether each token is the first of a document.   [B, T]"""
    found = torch.ones_like(documents, dtype=torch.bool)
    found[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return found


def _ends(documents: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Where ``places`` documents begin, the last ones empty, and all end, [places + 1] int32; and whether there are no more."""
    begins = _begins(documents).flatten()
    number = begins.cumsum(0) - begins.long()  # of the document that begins here
    ends = torch.full((places + 2,), len(begins), dtype=torch.int32, device=documents.device)
    at = torch.arange(len(begins), dtype=torch.int32, device=documents.device)
    ends.scatter_(0, number.where(begins, places + 1).clamp(max=places + 1), at)
    whole = ends[: places + 1]
    return whole, whole[-1] == len(begins)


