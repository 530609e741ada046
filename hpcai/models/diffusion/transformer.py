"""What transformers over the tokens of a sample are made of (Peebles and Xie 2023, Esser et al. 2024).

Parameters bear the names that the files of diffusers have. B samples, T tokens of each, C channels, H heads, D channels of a head.
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.kernels.layernorm import _autocast_dtype
from hpcai.models.diffusion.condition import Condition
from hpcai.nn.recompute import recompute_cheap, cheap

TIME_CHANNELS = 256  # numbers that say a time
_ZERO_INIT, _EMBEDDINGS = re.compile(r"(.*\.)?norm\w*\.linear\.|proj_out"), re.compile(r"time_text_embed|norm1\.emb")


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """(1 + scale) (x - mean) / sqrt(variance + eps) + shift (Perez et al. 2018), as products read it; of the tokens ``x`` alone is
    kept.   x [B, T, C], shift and scale [B, C] -> [B, T, C]"""
    shift, scale = shift[:, None], scale[:, None]
    if torch.compiler.is_compiling():
        return (F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift).to(_autocast_dtype(x))
    found: Tensor = _Modulate.apply(x, shift, scale, eps, _autocast_dtype(x))
    return found


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
            ctx.save_for_backward(x, scale, mean, rstd)
            ctx.dtypes = shift.dtype, scale.dtype
            # A small scale is not lost in a sum with 1.
            return y.addcmul_(y, scale.to(y.dtype)).add_(shift).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, mean, rstd = ctx.saved_tensors
        grad = grad.to(x.dtype)
        by_norm, none = torch.addcmul(grad, grad, scale.to(x.dtype)), [True, False, False]
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(by_norm, x, x.shape[-1:], mean, rstd, None, None, none)
        hat = ((x - mean) * rstd).mul_(grad)
        by_shift, by_scale = (g.sum(1, keepdim=True, dtype=rstd.dtype).to(d) for g, d in zip((grad, hat), ctx.dtypes))
        return dx, by_shift, by_scale, None, None


class Modulation(nn.Module):
    """``parts`` shifts, scales and gates of all tokens, by what a sample is asked to be.   c [B, C] -> parts of [B, C]

    ``emb`` makes that, where a block makes it for itself.
    """

    float8 = False  # its products are too small to gain from it

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


class FeedForward(nn.Module):
    """x [B, T, C] -> the same"""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(GELUProjection(channels), nn.Identity(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all tokens to each other.   three of [B, H, T, D] -> [B, T, H D]"""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def split_heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H D] -> [B, H, T, D]"""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def run_block(block: nn.Module, recompute: str, *given: Any) -> Any:
    """``block(*given)``, which keeps for the backward pass what ``recompute`` leaves."""
    if recompute == "layers" and torch.is_grad_enabled():
        return checkpoint(block, *given, use_reentrant=False)
    with recompute_cheap(recompute == "selective"):
        return block(*given)


def init_weights(model: nn.Module, zero: bool) -> None:
    """First weights as published: uniform by the sums of inputs and outputs (Glorot and Bengio 2010), those that embed times,
    classes and whole texts normal with 0.02, biases zero; and with ``zero`` modulations and the last layer too."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or (zero and _ZERO_INIT.match(name)):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            bound = math.sqrt(6 / (len(parameter) + math.prod(parameter.shape[1:])))
            _ = nn.init.normal_(parameter, std=0.02) if _EMBEDDINGS.search(name) else nn.init.uniform_(parameter, -bound, bound)


def check_inputs(model: nn.Module, x: Tensor, time: Tensor, condition: Condition, needs: dict[str, tuple[int | str, ...]]) -> None:
    """Raises DataError for a time or a condition of another size than ``needs`` says (words: any), for one that is missing, and for
    one that a network has no use for."""
    kind, sizes = type(model).__name__, {"time": (), **needs}
    given = {"time": time} | {name: value for name, value in condition._asdict().items() if value is not None}
    for name in given | sizes:
        if name not in sizes:
            raise DataError(f"a {kind} of these settings has no use for condition.{name}; leave it out, or change its settings")
        size = (len(x), *sizes[name])
        if name not in given:
            raise DataError(f"a {kind} of these settings needs condition.{name} {_format_shape(size)}; give it")
        found = given[name].shape
        if len(found) != len(size) or any(isinstance(n, int) and n != m for n, m in zip(size, found)):
            what = "time" if name == "time" else f"condition.{name}"
            raise DataError(f"{kind}: {what} is {_format_shape(found)}, expected {_format_shape(size)} for samples {_format_shape(x.shape)}")


def _format_shape(size: Any) -> str:
    return f"[{', '.join(map(str, size))}]"
