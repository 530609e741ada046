"""Matrices in 8 bits of floating point, for the products of training (Micikevicius et al., "FP8 Formats for Deep Learning", 2022):
a quarter of the bytes of float32, multiplied twice as fast as bfloat16 on GPUs from Ada and Hopper on.

Each matrix has one scale, found anew each time from its greatest absolute value. It is a power of two, so a number is rounded as the
format rounds it, whatever the scale is; only the smallest, which the scale takes out of the format's range, depend on it. So a matrix
that is cut over processes is rounded as the whole one, and no message is sent for it.

On CUDA Triton kernels find the scale and cast (``eighths_triton``), and tensor cores multiply; elsewhere the twins in this file.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import compiler

UNIT = 16  # tensor cores add up so many products of 8 bits at a time, and read them in as many bytes
HALVINGS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""The greatest number of each format is 1.75 times 2 to this power: 448, 57,344."""


class Eighth(NamedTuple):
    """A matrix in 8 bits, and its transpose, which products by the other dim read. No process reads what it did not ask for."""

    rows: Tensor | None
    """[T, C], contiguous"""
    columns: Tensor | None
    """[C, T'], contiguous; T' is the next multiple of 16 of T, and zeros follow"""
    scale: Tensor
    """[] float32: the matrix is about ``rows * scale``"""


def eighth(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, rows: bool = True, columns: bool = False, scale: Tensor | None = None,
) -> Eighth:  # fmt: skip
    """x [T, C] in 8 bits, without gradients. ``scale`` is one that was found for the same matrix before, which saves a pass over it.

    The scale found is the smallest power of two of which the greatest number of the format reaches every |x|, but not below 2^-126;
    1 for zeros alone, and NaN where a number is not finite: the format would hide an infinity, and so the product shows it.
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
    if scale is None:
        scale = _scale(_most(x), HALVINGS[dtype])
    wide = torch.promote_types(x.dtype, torch.float32)
    cast = (x * scale.reciprocal().to(wide)).to(dtype).contiguous()
    turned = None
    if columns:
        turned = cast.new_zeros(C, width(T))
        turned[:, :T] = cast.t()
    return Eighth(cast if rows else None, turned, scale)


def width(T: int) -> int:
    """Of the transpose of T rows."""
    return -(-T // UNIT) * UNIT


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, exact: bool = True) -> Tensor:
    """a [M, K], b [N, K] in 8 bits -> a b^T scale_a scale_b [M, N] in ``dtype``.

    On GPUs that multiply 8 bits, sums are of float32 where ``exact``, as gradients want them; else Hopper keeps fewer bits of them,
    and is faster. Elsewhere, and for float64, the twin. Raises ConfigError for what no tensor core multiplies: two matrices of
    ``float8_e5m2``, K or N that are no multiples of 16.
    """
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ConfigError("a product of two matrices in float8_e5m2 is made by no GPU; cast one of them to float8_e4m3fn")
    (M, K), N = a.shape, len(b)
    if K % UNIT or N % UNIT:
        raise ConfigError(
            f"a product in 8 bits of [{M}, {K}] and [{N}, {K}] transposed: {K} and {N} must be multiples of {UNIT}; choose such sizes "
            "for the layer (of a cut layer: for each part), or leave it in 16 bits"
        )
    if dtype != torch.float64 and _multiplied(a):
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=not exact)
    return plain_product(a, b, scale_a, scale_b, dtype)


def plain_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by a product of float32, or of float64 for that."""
    wide = torch.promote_types(dtype, torch.float32)
    return ((a.to(wide) @ b.to(wide).t()) * (scale_a.to(wide) * scale_b.to(wide))).to(dtype)


def _most(x: Tensor) -> Tensor:
    """The greatest absolute value [] float32, NaN where there is one."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def _scale(most: Tensor, halvings: int) -> Tensor:
    """From the bits of float32: a fraction beyond 1.75 is reached by the next power of two alone."""
    bits = most.view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - halvings).clamp(min=1).masked_fill(bits == 0, 127)
    return (exponent << 23).view(torch.float32).masked_fill(~most.isfinite(), torch.nan)


def _fused(x: Tensor) -> bool:
    """Whether the kernels take it: on a GPU that has the formats, in a type that they have, and with numbers."""
    return compiler.takes(x) and multiplies(x.device) and x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0


def _multiplied(x: Tensor) -> bool:
    return compiler.on_gpu(x) and multiplies(x.device)


def multiplies(device: torch.device) -> bool:
    """Whether a GPU casts to and multiplies 8 bits."""
    return compiler.PLANNED or torch.cuda.get_device_capability(device) >= (8, 9)
