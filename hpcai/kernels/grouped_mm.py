"""Products of groups of neighbouring rows, each with a matrix of its own, as of the experts of a mixture; also in FP8.

R rows, G groups, K channels of the input, N of an output
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction
from hpcai.kernels import triton_support
from hpcai.kernels.float8 import quantize

_torch_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # public since torch 2.12


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor], float8: bool = False) -> tuple[Tensor, ...]:
    """Return the products of ``x`` with each of ``weights``: rows from the end of the group before up to ``ends[g]`` are multiplied
    by the transpose of matrix g. Groups may be empty.

    ``float8``: As ``hpcai.nn.matmul.Float8Matmul``, with one scale for all groups. Triton multiplies E5M2 by E4M3 no faster than
    bfloat16, so that only the forward pass is faster.
    Shape: x [R, K], ends [G] int32, the last of them R, weights [G, N, K] -> [R, N] each
    """
    outputs: tuple[Tensor, ...] = _GroupedLinear.apply(x, ends, float8, *weights)
    return outputs


class _GroupedLinear(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, float8: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        (rows, scale), *matrices = factors = [_factor(each, float8) for each in (x, *weights)]
        ctx.save_for_backward(ends, x if any(ctx.needs_input_grad[3:]) else None, *weights, *(factor[1] for factor in factors))
        return tuple(grouped_mm(rows, matrix.mT, ends, x.dtype, scale, other) for matrix, other in matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ends, x, *others = ctx.saved_tensors
        weights, (scale, *scales) = others[: len(grads)], others[len(grads) :]
        rows, float8 = x, scale is not None
        if x is not None:
            rows, _ = _factor(x, float8, scale=scale)
        dx, dweights = None, list[Tensor | None]()
        for grad, weight, other, needs_grad in zip(grads, weights, scales, ctx.needs_input_grad[3:]):
            dy, dy_scale = _factor(grad, float8, torch.float8_e5m2)
            if ctx.needs_input_grad[0]:
                term = grouped_mm(dy, _factor(weight, float8, scale=other)[0], ends, grad.dtype, dy_scale, other)
                dx = term if dx is None else dx.add_(term)
            dweights.append(grouped_mm(dy.T, rows, ends, weight.dtype, dy_scale, scale) if needs_grad else None)
        return dx, None, None, *dweights


def _factor(
    x: Tensor, float8: bool, dtype: torch.dtype = torch.float8_e4m3fn, scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return ``x`` and no scale, or ``x`` in FP8 and its scale."""
    if not float8:
        return x.contiguous(), None
    rows, _, scale = quantize(x.flatten(0, -2), dtype, scale=scale)
    assert rows is not None
    return rows.view(x.shape), scale


def grouped_mm(
    a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype, scale_a: Tensor | None = None, scale_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return products of groups in ``dtype``, times the scales of factors in FP8: those of rows of a with the matrices b, or those
    of columns of a with rows of b. On a GPU the host reads no value where there is a kernel, and float32 is TF32 where it is in
    torch.

    Shape: a [R, K], b [G, K, N] -> [R, N]; a [N, R], b [R, K] -> [G, N, K]
    """
    scale = None if scale_a is None or scale_b is None else scale_a * scale_b
    by_torch = scale is None and has_torch_kernel(a, b)
    result: Tensor = _torch_grouped_mm(a, b, offs=ends) if by_torch else implementation(a, dtype)(a, b, ends, dtype, scale)
    return result


def implementation(a: Tensor, dtype: torch.dtype) -> Any:
    """Return the function of Triton, or that of torch, for results in ``dtype``."""
    if not has_triton_kernel(a) or dtype == torch.float64:
        return reference
    from hpcai.kernels import moe_triton

    return moe_triton.grouped_mm


def reference(a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return the same by a product of torch for each group, of FP8 in float32 or wider."""
    wide, sizes = a.dtype if scale is None else torch.promote_types(dtype, torch.float32), ends.diff(prepend=ends[:1] * 0).tolist()
    pairs = zip(a.split(sizes), b) if b.ndim == 3 else zip(a.split(sizes, 1), b.split(sizes))
    products = [x.to(wide) @ y.to(wide) for x, y in pairs]
    joined = torch.cat(products) if b.ndim == 3 else torch.stack(products)
    return (joined if scale is None else joined * scale).to(dtype)


def has_triton_kernel(x: Tensor) -> bool:
    """Whether kernels of ``moe_triton`` read ``x``."""
    return triton_support.is_supported(x) and x.dtype != torch.float64


def has_torch_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch has a kernel: elsewhere it multiplies one group after another, with sizes that it reads on the host."""
    if triton_support.on_cpu(a) or a.dtype != torch.bfloat16 or _torch_grouped_mm is None:
        return False
    major = torch.cuda.get_device_properties(a.device).major if a.is_cuda else 9
    channels = b.shape[1:] if b.ndim == 3 else (len(a), b.shape[1])
    return major in (9, 10) and not any(size % 8 for size in channels)
