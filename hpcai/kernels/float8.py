"""FP8 matrices for the products of training (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): half the bytes of
bfloat16, and on GPUs from Ada and Hopper on twice its FLOP/s.

Each matrix has one dynamic scale, computed from its largest absolute value (amax). The scale is a power of two: an element is
rounded as the format rounds it, unless it falls below the range of the format. The shards of a matrix are therefore rounded as the
full matrix is, and scales need no communication.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import triton_support
from hpcai.kernels.float8_formats import ALIGNMENT, MAX_EXPONENT, padded_width


class Float8Tensor(NamedTuple):
    """A matrix in FP8, its transpose, or both. A product reads both of its factors along the dim that it sums over."""

    rows: Tensor | None
    """[T, C], contiguous"""
    columns: Tensor | None
    """[C, T'], contiguous, the transpose; T' is the next multiple of 16 of T, padded with zeros"""
    scale: Tensor
    """[] float32; the matrix is about ``rows * scale``"""


def quantize(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, rows: bool = True, columns: bool = False, scale: Tensor | None = None,
) -> Float8Tensor:  # fmt: skip
    """Cast a matrix to FP8, without gradients.

    The scale is the smallest power of two that brings every element into the range of the format, 2^-126 at least, and 1 for a
    matrix of zeros. It is NaN if an element is not finite, so that products show it; E4M3 itself has no infinity.

    Args:
        x: The matrix [T, C].
        scale: A scale that was computed for the same matrix, which saves a pass over it.

    Raises ConfigError if ``dtype`` is no FP8 format of tensor cores.
    """
    if dtype not in MAX_EXPONENT:
        raise ConfigError(f"a matrix cannot be quantized to {dtype}; expected one of {', '.join(map(str, MAX_EXPONENT))}")
    has_kernels = not torch.compiler.is_compiling() and triton_support.is_supported_float(x) and is_supported(x.device)
    if has_kernels and x.numel() > 0:
        from hpcai.kernels import float8_triton

        return Float8Tensor(*float8_triton.quantize(x.detach(), dtype, rows, columns, scale))
    return reference(x.detach(), dtype, rows, columns, scale)


def reference(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, scale: Tensor | None) -> Float8Tensor:
    """Return the same, by operations of torch."""
    T, C = x.shape
    scale = _scale(_amax(x), MAX_EXPONENT[dtype]) if scale is None else scale
    wide = torch.promote_types(x.dtype, torch.float32)
    cast, transposed = (x.to(wide) * scale.reciprocal()).to(dtype).contiguous(), None
    if columns:
        transposed = torch.zeros(C, padded_width(T), dtype=dtype, device=x.device)
        transposed[:, :T] = cast.t()
    return Float8Tensor(cast if rows else None, transposed, scale)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, exact: bool = True) -> Tensor:
    """Return a b^T scale_a scale_b in ``dtype``, by tensor cores where the GPU multiplies FP8.

    ``exact``: Accumulate in float32, as gradients need. Otherwise Hopper accumulates in fewer bits, which is faster.
    Shape: a [M, K], b [N, K] in FP8 -> [M, N]
    Raises ConfigError if no tensor core computes the product: both factors are E5M2, or K or N is no multiple of 16.
    """
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ConfigError("a product of two matrices in float8_e5m2: no GPU multiplies them; cast one of them to float8_e4m3fn")
    (M, K), N = a.shape, len(b)
    if K % ALIGNMENT or N % ALIGNMENT:
        fault = f"an FP8 product of [{M}, {K}] and [{N}, {K}] transposed: {K} and {N} must be multiples of {ALIGNMENT}"
        raise ConfigError(f"{fault}; choose such sizes for the layer (if it is sharded, for each shard), or leave it in 16 bits")
    if dtype != torch.float64 and triton_support.on_gpu(a) and is_supported(a.device):
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=not exact)
    return reference_scaled_mm(a, b, scale_a, scale_b, dtype)


def reference_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same by a product in float32, or in float64 if ``dtype`` is float64."""
    wide = torch.promote_types(dtype, torch.float32)
    return ((a.to(wide) @ b.to(wide).t()) * (scale_a.to(wide) * scale_b.to(wide))).to(dtype)


def _amax(x: Tensor) -> Tensor:
    """Return the largest absolute value [] float32, or NaN if there is one."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).abs().float()


def _scale(amax: Tensor, max_exponent: int) -> Tensor:
    """Return the scale for an amax, from its float32 bits: its exponent, plus one for a fraction above 1.75, minus the maximum
    exponent of the format."""
    bits = amax.view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - max_exponent).clamp(min=1).masked_fill(bits == 0, 127)
    return (exponent << 23).view(torch.float32).masked_fill(~amax.isfinite(), torch.nan)


def is_supported(device: torch.device) -> bool:
    """Whether a GPU has FP8 tensor cores: compute capability 8.9 or higher."""
    if triton_support.PLANNED:
        return True
    gpu = torch.cuda.get_device_properties(device)  # a constant to torch.compile, as the capability by itself is not
    return (gpu.major, gpu.minor) >= (8, 9)
