"""Matrices in 8 bits of floating point, for the products of training (Micikevicius et al., "FP8 Formats for Deep Learning", 2022):
half the bytes of bfloat16, and on GPUs from Ada and Hopper on twice as many products a second.

Each matrix has one scale, found anew each time from its greatest absolute value. It is a power of two, so a number is rounded as
the format rounds it, whatever the scale is; it matters to the smallest alone, which fall below the format's range. So a matrix that
is cut over processes is rounded as the whole one, and no message is sent for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import compiler
from hpcai.kernels.fp8 import HALVINGS, UNIT, width


class Eighth(NamedTuple):
    """A matrix in 8 bits, as it is, transposed, or both: a product reads both of its matrices along the dim that it sums over."""

    rows: Tensor | None
    """[T, C], contiguous"""
    columns: Tensor | None
    """[C, T'], contiguous; T' is the next multiple of 16 of T, and zeros follow what was there"""
    scale: Tensor
    """[] float32: the matrix is about ``rows * scale``"""


def eighth(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, rows: bool = True, columns: bool = False, scale: Tensor | None = None,
) -> Eighth:  # fmt: skip
    """x [T, C] in 8 bits, without gradients. ``scale``: one that was found for the same matrix, which saves a pass over it.

    The scale found is the smallest power of two that brings every number into the format's range, 2^-126 at least; 1 for zeros
    alone. It is NaN where a number is not finite, which the format itself would hide: so whatever is made of the product shows it.
    Raises ConfigError for another ``dtype``.
    """
    if dtype not in HALVINGS:
        raise ConfigError(f"a matrix was to be cast to {dtype}; expected one of {', '.join(map(str, HALVINGS))}")
    if not torch.compiler.is_compiling() and _fused(x):
        from hpcai.kernels import eighths_triton

        return Eighth(*eighths_triton.eighth(x.detach(), dtype, rows, columns, scale))
    return plain(x.detach(), dtype, rows, columns, scale)


def plain(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, scale: Tensor | None) -> Eighth:
    """The same by operations of torch."""
    T, C = x.shape
    scale = _scale(_most(x), HALVINGS[dtype]) if scale is None else scale
    wide = torch.promote_types(x.dtype, torch.float32)
    cast, turned = (x.to(wide) * scale.reciprocal()).to(dtype).contiguous(), None
    if columns:
        turned = torch.zeros(C, width(T), dtype=dtype, device=x.device)
        turned[:, :T] = cast.t()
    return Eighth(cast if rows else None, turned, scale)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, exact: bool = True) -> Tensor:
    """a [M, K], b [N, K] in 8 bits -> a b^T scale_a scale_b [M, N] in ``dtype``.

    On GPUs that multiply 8 bits, sums are of float32 where ``exact``, as gradients want them; else Hopper keeps fewer bits of them,
    and is faster. Elsewhere, and for float64, the twin. Raises ConfigError for what no tensor core multiplies: two matrices of
    ``float8_e5m2``, K or N that are no multiples of 16.
    """
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ConfigError("a product of two matrices in float8_e5m2: no GPU multiplies them; cast one of them to float8_e4m3fn")
    (M, K), N = a.shape, len(b)
    if K % UNIT or N % UNIT:
        raise ConfigError(
            f"a product in 8 bits of [{M}, {K}] and [{N}, {K}] transposed: {K} and {N} must be multiples of {UNIT}; choose the "
            "sizes of the layer so (where it is cut, those of each part), or leave it in 16 bits"
        )
    if dtype != torch.float64 and compiler.on_gpu(a) and multiplies(a.device):
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=not exact)
    return plain_product(a, b, scale_a, scale_b, dtype)


def plain_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by a product of float32, or of float64 for that."""
    wide = torch.promote_types(dtype, torch.float32)
    return ((a.to(wide) @ b.to(wide).t()) * (scale_a.to(wide) * scale_b.to(wide))).to(dtype)


def _most(x: Tensor) -> Tensor:
    """The greatest absolute value [] float32, NaN where there is one."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).abs().float()


def _scale(most: Tensor, halvings: int) -> Tensor:
    """From the bits of float32: the exponent, one more for a fraction beyond 1.75, and less what the format has."""
    bits = most.view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - halvings).clamp(min=1).masked_fill(bits == 0, 127)
    return (exponent << 23).view(torch.float32).masked_fill(~most.isfinite(), torch.nan)


def _fused(x: Tensor) -> bool:
    """Whether the kernels take it: on a GPU that has the formats, in a type that they have, and with numbers."""
    return compiler.takes(x) and x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0 and multiplies(x.device)


def multiplies(device: torch.device) -> bool:
    """Whether a GPU casts to 8 bits and multiplies them: compute capability 8.9."""
    if compiler.PLANNED:
        return True
    gpu = torch.cuda.get_device_properties(device)  # a constant to torch.compile, as the capability by itself is not
    return (gpu.major, gpu.minor) >= (8, 9)
