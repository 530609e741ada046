"""Attention whose heads of keys and values each serve several neighbouring heads of queries (Ainslie et al. 2023)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import compiler


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, causal: bool = False) -> Tensor:
    """q [B, H, T, D], k and v [B, H or a divisor of it, S, D] -> [B, H, T, D], by torch's kernels; ``mask`` as they have it."""
    grouped = k.shape[1] != q.shape[1]
    if grouped and not _takes_groups(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def _takes_groups(q: Tensor, mask: Any) -> bool:
    """Whether a kernel of torch takes fewer heads of keys. On a GPU that is FlashAttention alone, which has 16 bits, no masks of
    numbers, and up to 256 channels; for all else torch would make B H T S logits, which are more than keys for each head."""
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 256
    return not compiler.on_gpu(q) or (narrow and (mask is None or type(mask).__name__ == "CausalBias"))
