"""Weights of 8 or 4 bits in the generation engine: those of linear layers and experts of decoder layers.

int8: w = q s, with one scale of each output (``hpcai.nn.quantized``). int4: w = (q - 8) s + z, with a scale and a zero point of
each group of inputs of an output, from the range of its weights and 0. Scales and zero points are exact in bfloat16, as torch's
kernels take them, which multiply few rows in bfloat16. Other products are those of the dequantized weights in the dtype of the
model: of many rows, and where no kernel takes the device, dtype or size.
R rows, C inputs, C' outputs, G groups of inputs, E experts
"""

import logging
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError
from hpcai.models.llm.config import EngineConfig
from hpcai.models.llm.gathered import Override
from hpcai.models.llm.generation import is_fully_sharded
from hpcai.models.llm.model import LLM, MLP, Attention, GatedMLP
from hpcai.nn.matmul import FusedLinear, cast_to_autocast
from hpcai.nn.moe import MoE
from hpcai.nn.quantized import full_weight, int8_scales, quantize_int8
from hpcai.parallel.sharding import shard_spec

logger = logging.getLogger(__name__)
_torch: Any = torch  # its kernels have private names
_ROWS = {"cpu": 4, "cuda": 16}  # up to which kernels are faster


class QuantizedLayers:
    """The quantized weights of the local layers of ``model``. They stay in their memory, and the model keeps its own. Raises
    ConfigError for fully sharded weights, and for int4 if a shard of the inputs has a part of a group."""

    def __init__(self, model: LLM, cfg: EngineConfig) -> None:
        if is_fully_sharded(model):
            problem = f"engine.quantization is {cfg.quantization}, and the weights are fully sharded (step.shard)"
            raise ConfigError(f"{problem}: expected full layers on each rank; set engine.quantization to none")
        self.cfg, self.dtype, self._weights = cfg, next(model.parameters()).dtype, list[tuple[Any, str, _Weight]]()
        for where, part in model.model.layers.named_modules(prefix="layers"):
            if isinstance(part, MoE):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    axis = getattr(part.tensor, "axis", None) if name == "down_proj" else None
                    self._weights.append((part, "", _Weight(part.experts, name, cfg, self.dtype, f"{where}.{name}", axis)))
            for name, linear in part.named_children() if isinstance(part, Attention | GatedMLP | MLP) else ():
                if isinstance(linear, nn.Linear):
                    weight = _Weight(linear, "weight", cfg, self.dtype, f"{where}.{name}", getattr(linear, "axis", None))
                    self._weights.append((part, name, weight))

    @torch.no_grad()
    def refresh(self) -> list[Override]:
        """Quantize the present weights, and return the overrides by them. Collective over the ranks of sharded inputs."""
        overrides, is_first = list[Override](), any(weight.packed is None for *_, weight in self._weights)
        for part, name, weight in self._weights:
            weight.refresh()
            overrides.append((weight.owner, weight.name, nn.Parameter(weight.values, requires_grad=False)))
            if getattr(weight.owner, "scale", None) is not None:
                overrides.append((weight.owner, "scale", None))
            if name and weight.packed:
                overrides.append((part, name, _PackedLinear(weight)))
        if is_first and not any(weight.packed for *_, weight in self._weights):
            dtype = str(self.dtype).removeprefix("torch.")
            logger.warning("engine.quantization is %s, for which torch has no kernel in %s with these sizes on this device: "
                           "weights are rounded, and nothing is faster", self.cfg.quantization, dtype)  # fmt: skip
        return overrides


class _Weight:
    """The parameter ``name`` of ``owner``, [C', C] or of experts [E, C', C], as quantized ``values``, and in the format of a kernel
    (``packed``), if there is one. ``axis``: That over which the layer is sharded."""

    def __init__(self, owner: Any, name: str, cfg: EngineConfig, dtype: torch.dtype, where: str, axis: Axis | None) -> None:
        self.owner, self.name, weight = owner, name, getattr(owner, name)
        self.values = weight.new_empty(weight.shape, dtype=dtype)
        self.packed: tuple[Tensor, ...] | None = None  # until it is known
        self.group, inputs = cfg.quantization_group_size if cfg.quantization == "int4" else 0, shard_spec(weight).global_shape[-1]
        self.axis = axis if inputs > weight.shape[-1] else None
        if self.axis and self.group and inputs % (self.group * self.axis.size):
            raise ConfigError(
                f"engine.quantization is int4, and {where} has {inputs} inputs, sharded over {self.axis.size} ranks: expected "
                f"whole groups of {self.group} on each; set engine.quantization_group_size to less, or engine.quantization to int8"
            )

    def refresh(self) -> None:
        weight = full_weight(self.owner, self.name).flatten(0, -2)
        codes, scales = quantize_int4(weight, self.group) if self.group else self._quantize_int8(weight)
        self.values.copy_(dequantize(codes, scales, self.group).view_as(self.values))
        if self.packed is None:
            self.packed = _try_pack(codes, scales, self.group, self.values) if self.name == "weight" else ()
        elif self.packed:
            for old, new in zip(self.packed, _pack(codes, scales, self.group)):
                old.copy_(new)

    def _quantize_int8(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        top = weight.abs().amax(1)
        if self.axis is not None:
            torch_dist.all_reduce(top, torch_dist.ReduceOp.MAX, group=self.axis.group)
        return quantize_int8(weight, scale := int8_scales(top)), scale


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return q, uint8 from 0 to 15, and scales and zero points of groups of inputs, of which the last may be smaller.   [C', C] ->
    [C', C], [C', G, 2]"""
    padded = torch.cat((weight, weight[:, -1:].expand(-1, -weight.shape[1] % group)), 1).unflatten(1, (-1, group))
    low, high = padded.amin(-1, keepdim=True).clamp(max=0), padded.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().to(weight)
    scale = scale.where(scale != 0, 1)
    zero = (low + 8 * scale).bfloat16().to(weight)
    codes = ((padded - zero) / scale).round_().add_(8).clamp_(0, 15).to(torch.uint8)
    return codes.flatten(1)[:, : weight.shape[1]].contiguous(), torch.cat((scale, zero), -1)


def dequantize(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return weights, from q and the scales [C'] of int8 or [C', G, 2] of int4, in the dtype of these.   [C', C]"""
    if not group:
        return codes * scales[:, None]
    scale, zero = (x.repeat_interleave(group, 1)[:, : codes.shape[1]] for x in scales.unbind(-1))
    return torch.addcmul(zero, codes.to(scales.dtype).sub_(8), scale)


def _pack(codes: Tensor, scales: Tensor, group: int) -> tuple[Tensor, ...]:
    """Return the tensors of a kernel. Raises errors of torch for sizes that it does not take."""
    if not group:
        return codes, scales.bfloat16()
    scales, inputs = scales.bfloat16().transpose(0, 1).contiguous(), codes.shape[1]
    if codes.device.type == "cpu":
        return _torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1), scales
    tiles = next((n for n in (8, 4) if inputs % (16 * n) == 0), 2)
    return _torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles), scales


def _multiply(x: Tensor, packed: tuple[Tensor, ...], group: int) -> Any:
    """Return the product by a kernel.   [R, C] -> [R, C'], both bfloat16"""
    if not group:
        return _torch._weight_int8pack_mm(x, *packed)
    return getattr(torch, f"_weight_int4pack_mm{'_for_cpu' * (x.device.type == 'cpu')}")(x, packed[0], group, packed[1])


def _try_pack(codes: Tensor, scales: Tensor, group: int, values: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of a kernel that multiplies a row right, or none. That of int8 for GPUs is slower than no kernel."""
    x = torch.arange(codes.shape[1], device=codes.device).cos()[None].bfloat16()
    if cast_to_autocast(x.to(values.dtype)).dtype != x.dtype or (not group and x.device.type != "cpu"):
        return ()
    try:
        packed = _pack(codes, scales, group)
        y, expected = _multiply(x, packed, group).float(), x.float() @ values.float().T
    except (RuntimeError, NotImplementedError, AttributeError):
        return ()
    return packed if (y - expected).norm() <= 0.02 * expected.norm() else ()


class _PackedLinear(nn.Module):
    """A linear layer, sharded and adapted as its owner, that multiplies few rows by a kernel.   [..., C] -> [..., C']"""

    def __init__(self, weight: _Weight) -> None:
        super().__init__()
        self.linear, self.weight = weight.owner, weight

    def forward(self, x: Tensor) -> Tensor:
        linear, rows = self.linear, cast_to_autocast(x)
        if rows.dtype != torch.bfloat16 or rows.numel() > _ROWS[x.device.type] * x.shape[-1]:
            return linear(x)
        y = _multiply(rows.flatten(0, -2), self.weight.packed or (), self.weight.group)
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))  # no view: it may be reduced in place
        y = linear.finish(y) if isinstance(linear, FusedLinear) else y if linear.bias is None else y + linear.bias.to(y.dtype)
        for hook in linear._forward_hooks.values():  # adapters
            changed = hook(linear, (x,), y)
            y = y if changed is None else changed
        return y
