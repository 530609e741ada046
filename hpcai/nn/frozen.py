"""Linear layers whose weights are not trained, and lie in memory in 8 or 16 bits whatever is computed with.

In 8 bits w = q s, with q in int8 and a scale s of each output: the greatest of its weights / 127 (Dettmers et al., "LLM.int8()",
2022, of weights alone). y = (x q^T) s, where q is converted to the dtype of x for this product and then forgotten; the gradient of
x goes the same way back, and q and s have none. On average a weight is off by 0.7 to 0.9 % of their size, and by 0.6 % with a scale
for each 64 inputs, after which no product of q alone would be left. C inputs, C' outputs, T tokens
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.nn.products import Joint, Operands, Products

Kind = Literal["bf16", "8bit"]

_MOST = 127
_BLOCK = 1 << 20  # weights that are rounded at a time


class Rounded(Products):
    """With weights of 8 or 16 bits that have no gradients: two operands of a layer, weight [C', C] and scale [C'] or None. Of the
    weight is kept what lies in memory anyway."""

    def of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return linear.weight, linear.scale

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        return [_product(x, weight, scale) for weight, scale in _pairs(operands)], []

    def by_input(self, slopes: Sequence[Any], operands: Operands, kept: Sequence[Tensor]) -> Tensor:
        found: Tensor | None = None
        for slope, (weight, scale) in zip(slopes, _pairs(operands)):
            slope = slope if scale is None else slope * scale.to(slope.dtype)
            found = slope @ weight.to(slope.dtype) if found is None else found.addmm_(slope, weight.to(slope.dtype))
        assert found is not None
        return found


class Frozen(Joint):
    """A linear layer without gradients of its own.   x [T, C] -> [T, C']

    ``weights_made`` turns its weight to what ``bits`` says; until then it is that of an ordinary layer, or has no numbers
    (``hpcai.nn.deferred``).
    """

    products: Products = Rounded()
    bits: Kind
    weight: nn.Parameter
    scale: nn.Parameter | None
    """of each output [C'] where weights have 8 bits"""

    @torch.no_grad()
    def weights_made(self) -> None:
        """``deferred.make`` calls this when the weight has numbers, before that of the next layer is made."""
        if self.weight.dtype == torch.int8:  # one that was real when it was frozen, and within ``deferred`` is made again
            return
        scale = None
        if self.bits == "8bit":
            scale = scales(self._greatest(self.weight.abs().amax(1)))
            self.scale = _like(self.weight, scale)
            if (spec := getattr(self.weight, "shard_spec", None)) is not None:
                axes = spec.axes if spec.ranges[1] == ((0, spec.global_shape[1]),) else ()  # equal where inputs are sharded
                self.scale.shard_spec = replace(spec, global_shape=spec.global_shape[:1], ranges=spec.ranges[:1], axes=axes)  # type: ignore[attr-defined]
        self.weight = _like(self.weight, rounded(self.weight, scale))

    def _greatest(self, top: Tensor) -> Tensor:
        """The greatest absolute weights of outputs [C'], from those of the inputs that are here."""
        return top

    @torch.no_grad()
    def widen(self, dtype: torch.dtype) -> None:
        """Make the weight what is computed with, in ``dtype``."""
        weight = self.weight.to(dtype)
        self.weight = _like(self.weight, weight if self.scale is None else weight.mul_(self.scale[:, None]))
        del self.scale


def _product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    y = F.linear(x, weight.to(x.dtype))
    return y if scale is None else y * scale.to(y.dtype)  # torch 2.11 traces what a function changes in place and returns wrongly


def _pairs(operands: Operands) -> Any:
    return zip(operands[::2], operands[1::2])


def scales(top: Tensor) -> Tensor:
    """Scales with which weights of at most ``top`` have 8 bits, a little greater than need be: such as bfloat16 has, so that they
    stay the same in whatever dtype a model is converted to.   [C'] -> [C']"""
    return torch.where(top == 0, 1, (top * ((1 + 2**-8) / _MOST))).bfloat16().to(top.dtype)


def rounded(weight: Tensor, scale: Tensor | None) -> Tensor:
    """``weight`` in int8, or without a scale in bfloat16.   [C', C]"""
    if scale is None:
        return weight.bfloat16()
    found = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    rows = max(1, _BLOCK // weight.shape[1])
    for into, some, by in zip(found.split(rows), weight.split(rows), scale.split(rows)):
        into.copy_((some / by[:, None]).round_())
    return found


def _like(weight: nn.Parameter, numbers: Tensor) -> nn.Parameter:
    """A parameter that is not trained, of which is known what is known of ``weight``: where it lies, and of which file it is."""
    made = nn.Parameter(numbers, requires_grad=False)
    made.__dict__.update(weight.__dict__)
    return made
