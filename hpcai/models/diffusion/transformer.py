"""Building blocks of diffusion transformers (Peebles and Xie 2023, Esser et al. 2024).

Parameters have the names of diffusers' files. B samples, T tokens of each, C channels, H heads, D channels of a head
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.kernels.layernorm import _autocast_dtype
from hpcai.kernels.triton_support import needs_plain_ops
from hpcai.models.diffusion.condition import Condition
from hpcai.nn.recompute import cheap

_ZERO_INIT, _EMBEDDINGS = re.compile(r"(.*\.)?norm\w*\.linear\.|proj_out"), re.compile(r"time_text_embed|norm1\.emb")


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """Return (1 + scale) (x - mean) / sqrt(variance + eps) + shift (Perez et al. 2018), in the dtype of autocast. Of the tensors
    [B, T, C] only x is saved.   x [B, T, C], shift and scale [B, C] -> [B, T, C]"""
    shift, scale = shift[:, None], scale[:, None]
    if needs_plain_ops():
        return (F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift).to(_autocast_dtype(x))
    y: Tensor = _Modulate.apply(x, shift, scale, eps, _autocast_dtype(x))
    return y


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
            ctx.save_for_backward(x, scale, mean, rstd)
            ctx.dtypes = shift.dtype, scale.dtype
            # y + y scale, not y (1 + scale): a small scale would be rounded away in the sum with 1.
            return y.addcmul_(y, scale.to(y.dtype)).add_(shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        x, scale, mean, rstd = ctx.saved_tensors
        grad_output = grad_output.to(x.dtype)
        grad_norm, mask = torch.addcmul(grad_output, grad_output, scale.to(x.dtype)), [True, False, False]
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(grad_norm, x, x.shape[-1:], mean, rstd, None, None, mask)
        dscale = ((x - mean) * rstd).mul_(grad_output)
        grad_shift, grad_scale = (g.sum(1, keepdim=True, dtype=rstd.dtype).to(d) for g, d in zip((grad_output, dscale), ctx.dtypes))
        return grad_x, grad_shift, grad_scale, None, None


class Modulation(nn.Module):
    """Shifts, scales and gates of adaptive layer norm, from the conditioning embedding c.   c [B, C] -> ``parts`` of [B, C]

    ``emb``: the module that computes c, if a block has its own.
    """

    float8 = False  # matrices too small to gain from FP8

    def __init__(self, channels: int, parts: int, emb: nn.Module | None = None) -> None:
        super().__init__()
        self.parts, self.emb, self.linear = parts, emb or nn.Identity(), nn.Linear(channels, parts * channels)

    def forward(self, c: Tensor) -> tuple[Tensor, ...]:
        return self.linear(F.silu(c)).chunk(self.parts, -1)


class GELUProjection(nn.Module):
    """gelu(up(x))   x [B, T, C] -> [B, T, 4 C]"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return cheap(gelu, self.proj(x))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Self-attention without mask.   three of [B, H, T, D] -> [B, T, H D]"""
    return grouped_query_attention(q, k, v).transpose(1, 2).flatten(2)


def split_heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H D] -> [B, H, T, D]"""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def init_weights(model: nn.Module, zero: bool) -> None:
    """Initialize weights as published: Xavier uniform (Glorot and Bengio 2010), embeddings of times, classes and pooled texts
    normal with standard deviation 0.02, biases zero; with ``zero``, modulations and the last layer zero too."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or (zero and _ZERO_INIT.match(name)):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            bound = math.sqrt(6 / (len(parameter) + math.prod(parameter.shape[1:])))
            _ = nn.init.normal_(parameter, std=0.02) if _EMBEDDINGS.search(name) else nn.init.uniform_(parameter, -bound, bound)


def check_inputs(model: nn.Module, x: Tensor, time: Tensor, condition: Condition, needs: dict[str, tuple[int | str, ...]]) -> None:
    """Raise DataError for a time or a condition whose shape is not [B, *needs[name]] (strings: any size), for missing conditions,
    and for conditions that the network does not use."""
    kind, sizes = type(model).__name__, {"time": (), **needs}
    inputs = {"time": time} | {name: value for name, value in condition._asdict().items() if value is not None}
    for name in inputs | sizes:
        if name not in sizes:
            raise DataError(f"a {kind} of these settings has no use for condition.{name}; leave it out, or change its settings")
        size = (len(x), *sizes[name])
        if name not in inputs:
            raise DataError(f"a {kind} of these settings needs condition.{name} {_format(size)}; give it")
        actual = inputs[name].shape
        if len(actual) != len(size) or any(isinstance(n, int) and n != m for n, m in zip(size, actual)):
            argument = "time" if name == "time" else f"condition.{name}"
            raise DataError(f"{kind}: {argument} is {_format(actual)}, expected {_format(size)} for samples {_format(x.shape)}")


def _format(size: Any) -> str:
    return f"[{', '.join(map(str, size))}]"
