"""Layer normalisation over the last dim (Ba, Kiros and Hinton 2016): y = weight * (x - mean) / sqrt(variance + eps) + bias.

On CUDA and for up to 1,024 channels the forward pass is one Triton kernel, the backward pass one and a sum (``layernorm_triton``);
elsewhere, and under ``torch.compile``, which fuses it with what is around it, it is torch's own operation.
"""

import torch
from torch import Tensor

from hpcai.kernels import compiler

WIDEST = 1024  # channels: a program of the kernels holds whole rows


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, narrow: bool = False) -> Tensor:
    """``x`` [..., C] of any strides, weight and bias [C] -> [..., C], contiguous; statistics in float32 at least.

    Outside autocast the result has the dtype of ``x``. Inside, it is what torch gives, float32 on a GPU, for what is added or
    averaged; ``narrow`` gives autocast's own dtype instead, for what only products read: they would round it to that themselves.
    float64 stays float64.
    """
    if weight is not None and bias is not None and not torch.compiler.is_compiling() and _fused(x):
        from hpcai.kernels import layernorm_triton

        return layernorm_triton.layer_norm(x, weight, bias, eps, _narrow(x) if narrow else _usual(x))
    return plain(x, weight, bias, eps, narrow)


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, narrow: bool = False) -> Tensor:
    """The same by torch's operation."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y.to(_narrow(y)) if narrow else y


def _fused(x: Tensor) -> bool:
    """Whether the kernels take it: on a GPU, in a type and a width that they have."""
    return compiler.takes(x) and x.dtype in (torch.bfloat16, torch.float32) and 0 < x.shape[-1] <= WIDEST


def _narrow(x: Tensor) -> torch.dtype:
    device = x.device.type
    narrows = not x.is_meta and torch.is_autocast_enabled(device) and x.dtype != torch.float64  # meta knows no autocast
    return torch.get_autocast_dtype(device) if narrows else x.dtype


def _usual(x: Tensor) -> torch.dtype:
    return torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
