"""Matrix products of linear layers, in the dtype of autocast, in FP8 or with quantized weights, and their gradients.

    q, k, v = fused_linear(x, attention.q_proj, attention.k_proj, attention.v_proj)

Layers with the same input are computed together: the input is gathered once and quantized once, and its gradient is summed before
it is reduced. T tokens, C channels of the input, C' of an output
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo, is_transformed
from hpcai.errors import ConfigError
from hpcai.kernels.float8 import quantize, scaled_mm

Operands = Sequence[Any]  # tensors; some subclasses of Matmul have None among them


class Matmul:
    """The matrix products of ordinary layers. Each layer has the operands that ``operands_of`` returns: its weight [C', C]."""

    def operands_of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return (cast_to_autocast(linear.weight),)

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        """Return the output of each layer, and tensors to save for the backward pass.   x [..., C] -> [..., C'] each"""
        return [F.linear(x, weight) for weight in operands], []

    def quantize_grad(self, grads: Sequence[Tensor], need_input: bool, need_weight: bool) -> Sequence[Any]:
        """Return the gradients of the outputs [T, C'] in the form that ``grad_input`` and ``grad_weight`` take."""
        return grads

    def grad_input(self, grads: Sequence[Any], operands: Operands, saved: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the input [T, C]."""
        result: Tensor = grads[0] @ operands[0]
        for grad, weight in zip(grads[1:], operands[1:]):
            result.addmm_(grad, weight)
        return result

    def grad_weight(self, grads: Sequence[Any], x: Tensor, operands: Operands, saved: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradient of each operand, from x [T, C]."""
        return [grad.T @ x for grad in grads]


class Float8Matmul(Matmul):
    """FP8 matrix products: E4M3 for inputs and weights, E5M2 for gradients, with one dynamic scale per tensor (Micikevicius et al.,
    "FP8 Formats for Deep Learning", 2022). Sums and results have the dtype that they have without FP8."""

    def operands_of(self, linear: Any) -> tuple[Tensor | None, ...]:
        return (linear.weight,)  # in its own precision: it is rounded once

    def outputs(self, x: Tensor, operands: Operands) -> tuple[list[Tensor], list[Tensor]]:
        x8: Any = quantize(x.reshape(-1, x.shape[-1]))
        ys, scales = [], [x8.scale]
        for weight in operands:
            weight8: Any = quantize(weight)
            y = scaled_mm(x8.rows, weight8.rows, x8.scale, weight8.scale, x.dtype, exact=False)
            ys.append(torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight))))  # no view: it may be reduced in place
            scales.append(weight8.scale)
        return ys, scales

    def quantize_grad(self, grads: Sequence[Tensor], need_input: bool, need_weight: bool) -> Sequence[Any]:
        return [(quantize(grad, torch.float8_e5m2, rows=need_input, columns=need_weight), grad.dtype) for grad in grads]

    def grad_input(self, grads: Sequence[Any], operands: Operands, saved: Sequence[Tensor]) -> Tensor:
        result: Tensor | None = None
        for (grad, dtype), weight, scale in zip(grads, operands, saved[1:]):
            weight8: Any = quantize(weight, rows=False, columns=True, scale=scale)
            term = scaled_mm(grad.rows, weight8.columns, grad.scale, scale, dtype)
            result = term if result is None else result.add_(term)
        assert result is not None
        return result

    def grad_weight(self, grads: Sequence[Any], x: Tensor, operands: Operands, saved: Sequence[Tensor]) -> list[Tensor | None]:
        columns: Any = quantize(x, rows=False, columns=True, scale=saved[0]).columns
        return [scaled_mm(g.columns, columns, g.scale, saved[0], weight.dtype) for (g, _), weight in zip(grads, operands)]


class Pending(Protocol):
    def wait(self) -> Tensor: ...


class LocalResult:
    """A result without communication."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class SequenceShard:
    """The tokens held by this rank between layers. The default holds all; ``hpcai.parallel.tensor`` substitutes a shard."""

    def all_gather(self, x: Tensor) -> Pending:
        """Start to gather all tokens."""
        return LocalResult(x)

    def reduce_scatter(self, grad: Tensor) -> Pending:
        """Start to sum the gradients of all tokens by the local outputs; the result is that of the local tokens."""
        return LocalResult(grad)


class FusedLinear(nn.Linear):
    """A linear layer with a ``Matmul``, which ``fused_linear`` computes together with others of its kind.   [T, C] -> [T, C']"""

    matmul: Matmul = Matmul()
    communicates = False  # then it is not traced by torch.compile

    @property
    def sequence_shard(self) -> SequenceShard:
        return SequenceShard()

    def finish(self, y: Tensor) -> Tensor:
        """Return the output, from the matrix product."""
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _forward(x, (self,))[0]


def fused_linear(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Return the outputs of several layers for one input, computed together if all are a ``FusedLinear`` of one kind."""
    if not isinstance(linears[0], FusedLinear) or len({(type(linear), getattr(linear, "matmul", None)) for linear in linears}) > 1:
        return tuple(linear(x) for linear in linears)
    outputs = []
    for linear, y in zip(linears, _forward(x, linears)):
        for hook in linear._forward_hooks.values():  # adapters
            changed = hook(linear, (x,), y)
            y = y if changed is None else changed
        outputs.append(y)
    return tuple(outputs)


def convert_to_float8(linear: nn.Linear, name: str) -> None:
    """Let ``linear`` compute its products in FP8, in place. Raises ConfigError for a weight that is quantized, and for sizes that
    FP8 tensor cores do not support."""
    is_floating = linear.weight.dtype.is_floating_point
    if type(linear) is nn.Linear:
        linear.__class__ = FusedLinear
    elif not isinstance(linear, FusedLinear) or not is_floating:
        kind = f"a weight of {linear.weight.dtype}".replace("torch.", "") if not is_floating else f"a {type(linear).__name__}"
        raise ConfigError(f"step.matmul is fp8, but {name} is {kind}; leave it as precision, or lora.base_dtype as bf16")
    check_float8_size(name, linear.weight.shape)
    linear.matmul = FLOAT8  # type: ignore[assignment]


def check_float8_size(name: str, shape: Sequence[int]) -> None:
    if odd := [size for size in shape if size % 16]:
        expected = f"multiples of 16, found {odd[0]}; take other sizes or fewer ranks, or leave step.matmul as precision"
        raise ConfigError(f"step.matmul is fp8, but {name} has a weight of {list(shape)} on this process: expected {expected}")


def cast_to_autocast(x: Tensor) -> Tensor:
    """Cast ``x`` to the dtype of matrix products under autocast, which does not see a custom autograd function."""
    is_on = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_on else x


def _forward(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return _untraced(x, linears) if linears[0].communicates else _apply_matmul(x, linears)


def _apply_matmul(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    matmul = linears[0].matmul
    operands = [operand for linear in linears for operand in matmul.operands_of(linear)]
    if is_transformed() and type(matmul) is not Float8Matmul and type(linears[0].sequence_shard) is SequenceShard:
        ys, _ = matmul.outputs(cast_to_autocast(x), operands)
    else:
        ys = _FusedMatmul.apply(cast_to_autocast(x), matmul, linears[0].sequence_shard, *operands)
    return tuple(linear.finish(y) for linear, y in zip(linears, ys))


_untraced = disable_dynamo(_apply_matmul)


class _FusedMatmul(UntransformedFunction):
    """In the backward pass, the input is gathered again while its gradient is computed, and its gradient is reduced while those of
    the weights are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matmul: Matmul, shard: SequenceShard, *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.matmul, ctx.shard, ctx.operands = matmul, shard, len(operands)
        ys, saved = matmul.outputs(shard.all_gather(x).wait(), operands)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *operands, *saved)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        matmul, shard, operands, saved = ctx.matmul, ctx.shard, others[: ctx.operands], others[ctx.operands :]
        need_input, need_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        gathered = shard.all_gather(x) if need_weight else None
        grads = matmul.quantize_grad([dy.reshape(-1, dy.shape[-1]) for dy in dys], need_input, need_weight)
        dx = shard.reduce_scatter(matmul.grad_input(grads, operands, saved).view(*dys[0].shape[:-1], -1)) if need_input else None
        dweights: list[Tensor | None] = [None] * len(operands)
        if gathered is not None:
            full = gathered.wait()
            dweights = matmul.grad_weight(grads, full.reshape(-1, full.shape[-1]), operands, saved)
        return dx and dx.wait(), None, None, *dweights


FLOAT8 = Float8Matmul()
