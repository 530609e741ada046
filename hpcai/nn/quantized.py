"""Linear layers with frozen weights that are stored in int8 or bfloat16, whatever the dtype of the computation.

In int8, w = q s with one scale s for each output: the largest absolute weight / 127 (Dettmers et al., "LLM.int8()", 2022, for
weights only). y = (x q^T) s, for which q is cast to the dtype of x and not saved; the gradient of x is computed likewise, and q and
s have none. The mean error of a weight is 0.7 to 0.9 % of their size. With one scale for each 64 inputs it would be 0.6 %, but the
product would no longer be one of q alone. C inputs, C' outputs, T tokens
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.nn.matmul import FusedLinear, Matmul, Operands

WeightFormat = Literal["bf16", "8bit"]

_INT8_MAX = 127
_CHUNK = 1 << 20  # weights that are rounded at a time


class Int8Matmul(Matmul):
    """Matrix products with frozen weights in int8 or bfloat16, of which no copy is saved for the backward pass. A layer has two
    operands: weight [C', C], and scale [C'] or None."""

    def operands_of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return linear.weight, linear.scale

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        return [_linear(x, weight, scale) for weight, scale in _pairs(operands)], []

    def grad_input(self, grads: Sequence[Any], operands: Operands, saved: Sequence[Tensor]) -> Tensor:
        result: Tensor | None = None
        for grad, (weight, scale) in zip(grads, _pairs(operands)):
            grad = grad if scale is None else grad * scale.to(grad.dtype)
            result = grad @ weight.to(grad.dtype) if result is None else result.addmm_(grad, weight.to(grad.dtype))
        assert result is not None
        return result


class QuantizedLinear(FusedLinear):
    """A linear layer with a frozen weight in int8 or bfloat16, as ``bits`` says.   x [T, C] -> [T, C']

    Until ``post_materialize`` quantizes it, the weight is that of an ordinary layer, or on the meta device (``deferred_init``).
    """

    matmul: Matmul = Int8Matmul()
    bits: WeightFormat
    weight: nn.Parameter
    scale: nn.Parameter | None
    """[C'], if the weight is int8"""

    @torch.no_grad()
    def post_materialize(self) -> None:
        """Quantize the weight. ``deferred_init.materialize`` calls this before it allocates the weight of the next layer."""
        if self.weight.dtype == torch.int8:  # quantized when it was real, and then materialized by ``deferred``
            return
        scale = None
        if self.bits == "8bit":
            scale = int8_scales(self._amax(self.weight.abs().amax(1)))
            self.scale = _parameter_like(self.weight, scale)
            if (spec := getattr(self.weight, "shard_spec", None)) is not None:
                axes = spec.axes if spec.ranges[1] == ((0, spec.global_shape[1]),) else ()  # shards of the inputs have equal scales
                self.scale.shard_spec = replace(spec, global_shape=spec.global_shape[:1], ranges=spec.ranges[:1], axes=axes)  # type: ignore[attr-defined]
        self.weight = _parameter_like(self.weight, quantize_int8(self.weight, scale))

    def _amax(self, local: Tensor) -> Tensor:
        """Return the largest absolute weight of each output [C'], from that of the local inputs."""
        return local

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype) -> None:
        """Replace the weight by its dequantized values, in ``dtype``."""
        weight = self.weight.to(dtype)
        self.weight = _parameter_like(self.weight, weight if self.scale is None else weight.mul_(self.scale[:, None]))
        del self.scale


def _linear(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    y = F.linear(x, weight.to(x.dtype))
    return y if scale is None else y * scale.to(y.dtype)  # not in place: torch 2.11 traces in-place operations and returns wrongly


def _pairs(operands: Operands) -> Any:
    return zip(operands[::2], operands[1::2])


def int8_scales(amax: Tensor) -> Tensor:
    """Return the scales for these largest absolute weights: exact in bfloat16, so that any dtype of the model keeps them, and for
    this a little larger than needed.   [C'] -> [C']"""
    return torch.where(amax == 0, 1, (amax * ((1 + 2**-8) / _INT8_MAX))).bfloat16().to(amax.dtype)


def full_weight(layer: Any, name: str = "weight") -> Tensor:
    """Return a weight of a layer, quantized or not, in float32 or wider.   [..., C', C]"""
    weight, scale = getattr(layer, name).detach(), getattr(layer, "scale", None)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return weight if scale is None else weight * scale[:, None]


def quantize_int8(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``weight`` in int8, or in bfloat16 without a scale.   [C', C]"""
    if scale is None:
        return weight.bfloat16()
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    rows = max(1, _CHUNK // weight.shape[1])
    for out, w, s in zip(quantized.split(rows), weight.split(rows), scale.split(rows)):
        out.copy_((w / s[:, None]).round_())
    return quantized


def _parameter_like(weight: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a frozen parameter with the attributes of ``weight``: its shard, the file of its origin."""
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.__dict__.update(weight.__dict__)
    return parameter
