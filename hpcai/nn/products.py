"""Products of an input with the weights of the linear layers that read it, and their gradients.

    q, k, v = together(x, attention.q_proj, attention.k_proj, attention.v_proj)

Layers of one input compute together: what other processes have of it arrives once, it is rounded once, and its gradient is summed
before it leaves. T tokens, C channels of the input, C' of an output
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.errors import ConfigError
from hpcai.kernels.float8 import quantize, scaled_mm
from hpcai.untraced import untraced

Operands = Sequence[Any]  # tensors, of which some kinds of products have None


class Products:
    """Those of an ordinary layer. A layer has one operand, its weight [C', C], or as many as ``of`` says."""

    def of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return (computed(linear.weight),)

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        """x [..., C] -> the output of each layer [..., C'], and what is kept for the other three"""
        return [F.linear(x, weight) for weight in operands], []

    def slopes(self, dys: Sequence[Tensor], by_input: bool, by_weights: bool) -> Sequence[Any]:
        """Gradients of outputs [T, C'] as those of the input and of the weights want them."""
        return dys

    def by_input(self, slopes: Sequence[Any], operands: Operands, kept: Sequence[Tensor]) -> Tensor:
        """The gradient of the input [T, C]"""
        found: Tensor = slopes[0] @ operands[0]
        for slope, weight in zip(slopes[1:], operands[1:]):
            found.addmm_(slope, weight)
        return found

    def by_weights(self, slopes: Sequence[Any], x: Tensor, operands: Operands, kept: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each operand, from x [T, C]"""
        return [slope.T @ x for slope in slopes]


class Eighths(Products):
    """Both factors rounded to 8 bits of floating point, gradients of outputs to those that have a wider range (Micikevicius et al.,
    "FP8 Formats for Deep Learning", 2022), with a scale for each matrix that is found anew each time. Sums and results have the
    width that they would have without."""

    def of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return (linear.weight,)  # in its own precision: it is rounded once

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        rows: Any = quantize(x.reshape(-1, x.shape[-1]))
        ys, scales = [], [rows.scale]
        for weight in operands:
            narrow: Any = quantize(weight)
            y = scaled_mm(rows.rows, narrow.rows, rows.scale, narrow.scale, x.dtype, exact=False)
            ys.append(torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight))))  # what is no view may be summed in place
            scales.append(narrow.scale)
        return ys, scales

    def slopes(self, dys: Sequence[Tensor], by_input: bool, by_weights: bool) -> Sequence[Any]:
        return [(quantize(dy, torch.float8_e5m2, rows=by_input, columns=by_weights), dy.dtype) for dy in dys]

    def by_input(self, slopes: Sequence[Any], operands: Operands, kept: Sequence[Tensor]) -> Tensor:
        found: Tensor | None = None
        for (slope, dtype), weight, scale in zip(slopes, operands, kept[1:]):
            narrow: Any = quantize(weight, rows=False, columns=True, scale=scale)
            part = scaled_mm(slope.rows, narrow.columns, slope.scale, scale, dtype)
            found = part if found is None else found.add_(part)
        assert found is not None
        return found

    def by_weights(self, slopes: Sequence[Any], x: Tensor, operands: Operands, kept: Sequence[Tensor]) -> list[Tensor | None]:
        columns: Any = quantize(x, rows=False, columns=True, scale=kept[0]).columns
        return [
            scaled_mm(slope.columns, columns, slope.scale, kept[0], weight.dtype)
            for (slope, _), weight in zip(slopes, operands)
        ]


class Waiting(Protocol):
    def wait(self) -> Tensor: ...


class Here:
    """What need not come from elsewhere."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class Tokens:
    """What a process has of the tokens between layers: all of them. Where these or outputs are cut, ``hpcai.parallel.tensor`` gives
    another one."""

    def gather(self, x: Tensor) -> Waiting:
        """All tokens, from those that are here."""
        return Here(x)

    def sum(self, gradient: Tensor) -> Waiting:
        """The gradient of what is here, from that of all tokens by the outputs that are here."""
        return Here(gradient)


class Joint(nn.Linear):
    """A linear layer whose product is of some kind, and which computes together with others of its kind.   x [T, C] -> [T, C']"""

    products: Products = Products()
    sends = False  # messages are not for a compiler's graph

    @property
    def tokens(self) -> Tokens:
        return Tokens()

    def finish(self, y: Tensor) -> Tensor:
        """The output, from the product."""
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _outputs(x, (self,))[0]


def together(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of several layers of one input."""
    if not isinstance(linears[0], Joint) or len({(type(linear), getattr(linear, "products", None)) for linear in linears}) > 1:
        return tuple(linear(x) for linear in linears)
    found = []
    for linear, y in zip(linears, _outputs(x, linears)):
        for hook in linear._forward_hooks.values():  # adapters
            changed = hook(linear, (x,), y)
            y = y if changed is None else changed
        found.append(y)
    return tuple(found)


def multiply_in_eighths(linear: nn.Linear, name: str) -> None:
    """Let ``linear``, in place, multiply in 8 bits of floating point. Raises ConfigError for one whose weight has other bits, and
    for sizes that a GPU does not multiply so."""
    wide = linear.weight.dtype.is_floating_point
    if type(linear) is nn.Linear:
        linear.__class__ = Joint
    elif not isinstance(linear, Joint) or not wide:
        bits = f"a weight of {linear.weight.dtype}".replace("torch.", "") if not wide else f"a {type(linear).__name__}"
        raise ConfigError(f"step.products is fp8, but {name} is {bits}; leave it as precision, or lora.frozen as bf16")
    if odd := [size for size in linear.weight.shape if size % 16]:
        raise ConfigError(
            f"step.products is fp8, but {name} has a weight of {list(linear.weight.shape)} on this process: expected multiples of "
            f"16, found {odd[0]}; take other sizes or fewer ranks, or leave step.products as precision"
        )
    linear.products = EIGHTHS  # type: ignore[assignment]


def computed(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast gives a product, which does not see an autograd function."""
    is_on = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_on else x


def _outputs(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return _untraced(x, linears) if linears[0].sends else _multiplied(x, linears)


def _multiplied(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    how = linears[0].products
    operands = [operand for linear in linears for operand in how.of(linear)]
    ys = _Multiplied.apply(computed(x), how, linears[0].tokens, *operands)
    return tuple(linear.finish(y) for linear, y in zip(linears, ys))


_untraced = untraced(_multiplied)


class _Multiplied(torch.autograd.Function):
    """The input's gradient leaves while those of weights are computed, for which the input arrives again while it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Products, tokens: Tokens, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.how, ctx.tokens, ctx.operands = how, tokens, len(operands)
        ys, kept = how.outputs(tokens.gather(x).wait(), operands)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *operands, *kept)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        how, tokens, operands, kept = ctx.how, ctx.tokens, others[: ctx.operands], others[ctx.operands :]
        by_input, by_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        again = tokens.gather(x) if by_weights else None
        slopes = how.slopes([dy.reshape(-1, dy.shape[-1]) for dy in dys], by_input, by_weights)
        dx = tokens.sum(how.by_input(slopes, operands, kept).view(*dys[0].shape[:-1], -1)) if by_input else None
        found: list[Tensor | None] = [None] * len(operands)
        if again is not None:
            whole = again.wait()
            found = how.by_weights(slopes, whole.reshape(-1, whole.shape[-1]), operands, kept)
        return dx and dx.wait(), None, None, *found


EIGHTHS = Eighths()
