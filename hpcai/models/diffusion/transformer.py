"""Building blocks of diffusion transformers (Peebles and Xie 2023, Esser et al. 2024).

Parameters have the names of diffusers' files. B samples, T tokens of each, N text tokens, C channels, H heads, D channels of a head
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.kernels.layernorm import _autocast_dtype
from hpcai.kernels.rotary import apply_rotary
from hpcai.kernels.triton_support import needs_plain_ops
from hpcai.models.diffusion.blocks import FeedForward, TimeEmbedding, sinusoidal_embedding
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import TIME_CHANNELS
from hpcai.nn.matmul import fused_linear
from hpcai.nn.recompute import cheap
from hpcai.nn.rmsnorm import RMSNorm

Rotary = tuple[Tensor, Tensor] | tuple[()]  # cosines and sines
FLOW_SCALE = 1000.0  # of times of a flow, before their sinusoidal embedding
_EPS = 1e-6
_ZERO_INIT, _EMBEDDINGS = re.compile(r"(.*\.)?norm\w*\.linear\.|proj_out"), re.compile(r"time_text_embed|norm1\.emb")


def modulate(x: Tensor, shift: Tensor, scale: Tensor, eps: float = _EPS) -> Tensor:
    """Return (1 + scale) (x - mean) / sqrt(variance + eps) + shift (Perez et al. 2018), in the dtype of autocast. Of the tensors
    [B, T, C] only x is saved.   x [B, T, C], shift and scale [B, C] -> [B, T, C]"""
    shift, scale = shift[:, None], scale[:, None]
    if needs_plain_ops():
        return (F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift).to(_autocast_dtype(x))
    return _Modulate.apply(x, shift, scale, eps, _autocast_dtype(x))


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


class Attention(nn.Module):
    """Attention with RMS norm of queries and keys, if ``normalized``, and their rotary embedding, if given.

    ``size``: channels of a head. Shape: v, q, k [B, T, C] -> [B, T, C]
    """

    def __init__(self, channels: int, size: int, normalized: bool = True) -> None:
        super().__init__()
        self.size, self.normalized = size, normalized
        self.norm_q, self.norm_k = self.make_norms()
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))

    def make_norms(self) -> Iterator[nn.Module]:
        return (RMSNorm(self.size, _EPS) if self.normalized else nn.Identity() for _ in range(2))

    def forward(self, v: Tensor, rotary: Rotary, *qk: Tensor) -> Tensor:
        # q and k are saved for the norms anyway; without these the results are views of them
        q, k = cheap(self.normalize_rotate, rotary, *qk) if self.normalized else self.normalize_rotate(rotary, *qk)
        return attend(q, k, v.unflatten(-1, (-1, self.size)).transpose(1, 2))

    def normalize_rotate(self, rotary: Rotary, *qk: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.transpose(1, 2) for x in self.normalize(*(x.unflatten(-1, (-1, self.size)) for x in qk)))
        return apply_rotary(q, k, *rotary, interleaved=True) if rotary else (q, k)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm_q(q), self.norm_k(k)


class SelfAttention(Attention):
    """x [B, T, C] -> the same"""

    def __init__(self, channels: int, size: int, normalized: bool = True) -> None:
        super().__init__(channels, size, normalized)
        self.to_out = nn.Sequential(nn.Linear(channels, channels))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = fused_linear(x, self.to_q, self.to_k, self.to_v)
        return self.to_out(super().forward(v, (), q, k))


class JointAttention(Attention):
    """x [B, T, C], text [B, N, C] -> the same. ``last``: text has no output layer"""

    def __init__(self, channels: int, size: int, normalized: bool = True, last: bool = False) -> None:
        super().__init__(channels, size, normalized)
        self.norm_added_q, self.norm_added_k = self.make_norms()
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels))
        self.to_add_out = None if last else nn.Linear(channels, channels)

    def forward(self, x: Tensor, text: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = fused_linear(x, self.to_q, self.to_k, self.to_v)
        text_q, text_k, text_v = fused_linear(text, self.add_q_proj, self.add_k_proj, self.add_v_proj)
        y = super().forward(torch.cat((text_v, v), 1), rotary, q, k, text_q, text_k)
        text, x = y.split((text.shape[1], x.shape[1]), 1)
        return self.to_out(x), text if self.to_add_out is None else self.to_add_out(text)

    def normalize(self, q: Tensor, k: Tensor, text_q: Tensor, text_k: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.cat((self.norm_added_q(text_q), self.norm_q(q)), 1), torch.cat((self.norm_added_k(text_k), self.norm_k(k)), 1)


class DoubleStreamBlock(nn.Module):
    """A block with separate weights for image and text.   x [B, T, C], text [B, N, C], c [B, C] -> x and text

    ``dual``: a second attention, of the image alone. ``last``: text is an input only, and returned unchanged.
    """

    float8 = True  # linear layers may use FP8

    def __init__(self, channels: int, size: int, normalized: bool = True, dual: bool = False, last: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm1_context = Modulation(channels, 9 if dual else 6), Modulation(channels, 2 if last else 6)
        self.attn = JointAttention(channels, size, normalized, last)
        self.attn2 = SelfAttention(channels, size, normalized) if dual else None
        self.ff = FeedForward(channels, GELUProjection(channels))
        self.ff_context = None if last else FeedForward(channels, GELUProjection(channels))

    def forward(self, x: Tensor, text: Tensor, c: Tensor, rotary: Rotary = ()) -> tuple[Tensor, Tensor]:
        mod, text_mod = self.norm1(c), self.norm1_context(c)
        shift, scale = text_mod[:2] if self.ff_context is not None else reversed(text_mod)  # in this order in files
        y, text_y = self.attn(cheap(modulate, x, *mod[:2]), cheap(modulate, text, shift, scale), rotary)
        if self.attn2 is not None:
            x = x + mod[8][:, None] * self.attn2(cheap(modulate, x, *mod[6:8]))
        x = _feed_forward(x, y, self.ff, *mod[2:6])
        return x, text if self.ff_context is None else _feed_forward(text, text_y, self.ff_context, *text_mod[2:])


def _feed_forward(x: Tensor, y: Tensor, feed: nn.Module, gate: Tensor, shift: Tensor, scale: Tensor, feed_gate: Tensor) -> Tensor:
    x = x + gate[:, None] * y
    return x + feed_gate[:, None] * feed(cheap(modulate, x, shift, scale))


class CombinedTimestepGuidanceTextProjEmbeddings(nn.Module):
    """The conditioning embedding of adaptive layer norm: time, pooled text and guidance.

    Shape: sinusoidal time [B, 256], pooled text [B, J'], sinusoidal guidance [B, 256] -> [B, C]
    """

    def __init__(self, channels: int, pooled: int, guidance: bool = False) -> None:
        super().__init__()
        self.timestep_embedder, self.text_embedder = TimeEmbedding(TIME_CHANNELS, channels), TimeEmbedding(pooled, channels)
        self.guidance_embedder = TimeEmbedding(TIME_CHANNELS, channels) if guidance else None

    def forward(self, time: Tensor, pooled: Tensor, guidance: Tensor | None = None) -> Tensor:
        c = self.timestep_embedder(time) + self.text_embedder(pooled)
        return c if self.guidance_embedder is None else c + self.guidance_embedder(guidance)


def position_embedding(places: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines of the column of each patch, then of its row, computed in float32 at least.   [n] -> [n n, C]"""
    n, wide = len(places), torch.promote_types(torch.promote_types(dtype, torch.float32), places.dtype)
    axis = sinusoidal_embedding(places, channels // 2, wide).roll(channels // 4, -1).to(dtype)  # sines first
    return torch.cat((axis[None].expand(n, -1, -1), axis[:, None].expand(-1, n, -1)), -1).flatten(0, 1)


def unpatchify(y: Tensor, patch: int, rows: int, columns: int) -> Tensor:
    """Return ``rows`` x ``columns`` patches as samples.   [B, T, P P C] -> [B, C, P rows, P columns]"""
    y = y.unflatten(2, (patch, patch, -1)).unflatten(1, (rows, columns))
    return y.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def init_weights(model: nn.Module, zero: bool) -> None:
    """Initialize weights as published: Xavier uniform (Glorot and Bengio 2010), embeddings of times, classes and pooled texts
    normal with standard deviation 0.02, biases zero; with ``zero``, modulations and the last layer zero too."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or (zero and _ZERO_INIT.match(name)):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            bound = math.sqrt(6 / (len(parameter) + math.prod(parameter.shape[1:])))
            _ = nn.init.normal_(parameter, std=0.02) if _EMBEDDINGS.search(name) else nn.init.uniform_(parameter, -bound, bound)


def check_inputs(
    model: nn.Module, x: Tensor, time: Tensor, condition: Condition, needs: dict[str, tuple[int | str, ...]]
) -> list[Tensor]:
    """Return the conditions that ``needs`` names. Raises DataError for a time or a condition whose shape is not [B, *needs[name]]
    (strings: any size), for missing conditions, and for conditions that the network does not use."""
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
    return [inputs[name] for name in needs]


def _format(size: Any) -> str:
    return f"[{', '.join(map(str, size))}]"
