"""Grouped-query attention (Ainslie et al. 2023): neighbouring query heads share one head of keys and values."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpcai.dynamo import is_transformed, needs_plain_derivatives
from hpcai.kernels import triton_support


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, causal: bool = False) -> Tensor:
    """Return the attention of torch's kernels; ``mask`` as they take it.

    Shape: q [B, H, T, D]; k and v [B, H or a divisor of it, S, D] -> [B, H, T, D]
    """
    enable_gqa = k.shape[1] != q.shape[1]
    if enable_gqa and not _supports_gqa(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        enable_gqa = False
    # Under torch.func only torch's plain attention has second and forward derivatives.
    with sdpa_kernel(SDPBackend.MATH) if is_transformed() and needs_plain_derivatives() else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=enable_gqa)


def _supports_gqa(q: Tensor, mask: Any) -> bool:
    """Whether one of torch's fused kernels takes fewer heads of keys. On a GPU that is FlashAttention alone: 16 bits, no additive
    mask, at most 256 channels. All else would compute [B, H, T, S] logits, which are larger than repeated keys."""
    flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 256
    return not triton_support.on_gpu(q) or (flash and (mask is None or type(mask).__name__ == "CausalBias"))
