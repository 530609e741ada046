"""Layer normalisation over the last dim (Ba, Kiros and Hinton 2016): y = weight * (x - mean) / sqrt(variance + eps) + bias.

On CUDA and for up to 1,024 channels the forward pass is one Triton kernel, the backward pass one and a sum (``layernorm_triton``).
Elsewhere, and under ``torch.compile``, which fuses it with its neighbours, it is torch's operation.
"""

import torch
from torch import Tensor

from hpcai.kernels import triton_support

MAX_CHANNELS = 1024  # a program of the kernels holds full rows


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, autocast_output: bool = False) -> Tensor:
    """Return the normalised ``x``, contiguous, with statistics in float32 at least.

    Outside autocast the result has the dtype of ``x``, inside that of torch's layer norm: float32 on a GPU.

    ``autocast_output``: Return the dtype of autocast inside autocast, for results that only matrix products read, which would
    cast them anyway. float64 stays float64.
    Shape: x [..., C] of any strides; weight and bias [C] -> [..., C]
    """
    fused = not torch.compiler.is_compiling() and triton_support.is_supported_float(x) and 0 < x.shape[-1] <= MAX_CHANNELS
    if fused and weight is not None and bias is not None:
        from hpcai.kernels import layernorm_triton

        wide = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        return layernorm_triton.layer_norm(x, weight, bias, eps, _autocast_dtype(x) if autocast_output else wide)
    return reference(x, weight, bias, eps, autocast_output)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, autocast_output: bool = False) -> Tensor:
    """Compute ``layer_norm`` with torch's operation."""
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y.to(_autocast_dtype(y)) if autocast_output else y


def _autocast_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    enabled = not x.is_meta and torch.is_autocast_enabled(device) and x.dtype != torch.float64  # meta has no autocast
    return torch.get_autocast_dtype(device) if enabled else x.dtype
