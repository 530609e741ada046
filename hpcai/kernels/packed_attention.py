"""Bidirectional attention within the sequences of packed rows, without scores across sequences.

On a CPU padding is left out, and sequences of one length have an attention together. On a GPU in 16 bits this is torch's attention
of sequences of variable length, to which the padding of a row is one more sequence. Elsewhere it is torch's attention with a mask.

B rows, T tokens of each, P sequences of a row at most, N tokens of all rows, H heads, D channels of a head
"""

from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.varlen_attention import _supports_packed


@dataclass(eq=False)
class Packing:
    """The sequences of rows whose tokens are flattened: on a CPU without padding, and by the lengths of sequences."""

    index: Tensor | None                        # [N] tokens of [B T], or None for all
    flat: Tensor                                # [B, T] flat token of each token of the rows
    positions: Tensor                           # [N] within the sequence
    starts: Tensor                              # [B, P] first flat token of each sequence
    ends: Tensor                                # [B, P + 1] of each sequence and of the padding in its row
    lengths: list[int] | None                   # of the sequences, if they are read on the host

    @classmethod
    def of(cls, lengths: Tensor, width: int, padded: bool = False) -> "Packing":
        """Return the packing of rows of ``width`` tokens, which begin with sequences of ``lengths`` [B, P], 0 for none. ``padded``:
        Keep the padding on a CPU too."""
        lengths, column = lengths.long(), torch.arange(width, device=lengths.device)
        ends = lengths.cumsum(1)
        begun = column >= (ends - lengths)[:, :, None]  # [B, P, T]
        positions = (column - ((ends - lengths)[:, :, None] * begun).amax(1)).flatten()
        flat, index, host = torch.arange(len(lengths) * width, device=lengths.device), None, None
        if not padded and triton_support.on_cpu(lengths) and not lengths.is_meta and not triton_support.needs_plain_ops():
            own = (lengths[:, :, None] * (begun & (column < ends[:, :, None]))).sum(1).flatten()  # length of a token's sequence
            index = own.argsort(stable=True)[int((own == 0).sum()) :]
            flat, positions = torch.zeros_like(own).scatter_(0, index, torch.arange(len(index))), positions[index]
            host = sorted(n for n in lengths.flatten().tolist() if n)
        flat = flat.view(-1, width)
        starts = flat.gather(1, (ends - lengths).clamp(max=width - 1))
        return cls(index, flat, positions, starts, F.pad(ends, (0, 1), value=width), host)

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x.flatten(0, 1) if self.index is None else x.flatten(0, 1)[self.index]

    def unflatten(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], 0 in the padding that was left out"""
        if self.index is not None:
            x = x.new_zeros(self.flat.numel(), *x.shape[1:]).index_copy(0, self.index, x)
        return x.unflatten(0, self.flat.shape)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float = 0.0) -> Tensor:
    """Return the attention of each token to its sequence.

    ``dropout``: Of probabilities.   Shape: q, k, v [N, H, D] -> [N, H, D]
    """
    if packing.lengths is not None:
        return _per_length(q, k, v, packing.lengths, dropout)
    if not triton_support.needs_plain_ops() and _supports_packed(q[None]):
        width = packing.flat.shape[1]
        cu_seqlens = F.pad((packing.ends + packing.flat[:, :1]).flatten(), (1, 0)).int()
        return _flash_attention(q, k, v, cu_seqlens, width, dropout)
    return reference(q, k, v, packing, dropout)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, dropout: float) -> Tensor:
    """Compute what torch.nn.attention.varlen does, which has no dropout."""
    kernel = torch.ops.aten._flash_attention_forward
    return cast(Tensor, kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, False, False)[0])


def reference(q: Tensor, k: Tensor, v: Tensor, packing: Packing, dropout: float = 0.0) -> Tensor:
    """Compute ``packed_attention`` with a mask [B, 1, T, T]."""
    column = torch.arange(packing.flat.shape[1], device=q.device)
    number = (column >= packing.ends[:, :-1, None]).sum(1)  # of the sequence of each token   [B, T]
    mask = number[:, None, :, None] == number[:, None, None, :]
    q, k, v = (packing.unflatten(x).transpose(1, 2) for x in (q, k, v))
    return packing.flatten(F.scaled_dot_product_attention(q, k, v, mask, dropout).transpose(1, 2))


def _per_length(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], dropout: float) -> Tensor:
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]
    parts = zip(runs, *(x.split([length * count for length, count in runs]) for x in (q, k, v)))
    outs = []
    for (length, count), *qkv in parts:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        outs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
