"""Linear layers with the initial weights of AlphaFold (supplement 1.11.4), transitions, and dropout that rows or columns share."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpcai.kernels.chunking import map_chunks
from hpcai.nn.layernorm import LayerNorm

Start = Literal["lecun", "relu", "glorot", "final"]
_CPU = 32 << 20  # bytes of widened rows at a time, where there are no gradients
_CUT = 0.87962566103423978  # deviation of a normal distribution that is cut at two of its deviations


class Linear(nn.Linear):
    """``start``: LeCun's normal distribution, He's before a rectifier, Glorot's uniform one, or 0 for the last of a branch."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, start: Start = "lecun") -> None:
        self.start = start
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        draw(self.weight, self.start)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def draw(weight: Tensor, start: Start) -> None:
    """Draw the first values of a weight [outputs, inputs], in place."""
    if start == "final":
        nn.init.zeros_(weight)
    elif start == "glorot":
        nn.init.xavier_uniform_(weight)
    else:
        deviation = ((2.0 if start == "relu" else 1.0) / weight.shape[1]) ** 0.5 / _CUT
        nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


class Transition(nn.Module):
    """Two linear layers on every entry, the inner one wider (Algorithms 9 and 15).   [..., C] -> [..., C]"""

    def __init__(self, channels: int, widen: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(channels, autocast_output=True)
        self.linear_1 = Linear(channels, widen * channels, start="relu")
        self.linear_2 = Linear(widen * channels, channels, start="final")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        each = self.linear_1.out_features * x.element_size()
        return map_chunks(lambda some: self._of(rows[some]), len(rows), x, each, _CPU, 0).view(x.shape)

    def _of(self, x: Tensor) -> Tensor:
        return self.linear_2(self.linear_1(self.layer_norm(x)).relu())  # in place would copy gradients: a linear layer gives a view


class Dropout(nn.Module):
    """``to`` + ``x``, of which the same entries are dropped all along dim ``shared``."""

    def __init__(self, rate: float, shared: int) -> None:
        super().__init__()
        self.rate, self.shared = rate, shared

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return to + x
        shape = list(x.shape)
        shape[self.shared] = 1
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 / (1 - rate) in bfloat16 would be off by up to 0.4 %
        kept = torch.empty(shape, dtype=wide, device=x.device).bernoulli_(1 - self.rate).div_(1 - self.rate)
        return to + (x * kept).to(x.dtype) if torch.compiler.is_compiling() else _AddKept.apply(to, x, kept)


class _AddKept(torch.autograd.Function):
    """to + x * kept, in one operation each way."""

    @staticmethod
    def forward(ctx: Any, to: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.kind = x.dtype
        with torch.autocast(x.device.type, enabled=False):  # its casts would be operations of their own
            return torch.addcmul(to, x, kept, out=to.new_empty(to.shape, dtype=torch.promote_types(to.dtype, x.dtype)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return grad, torch.mul(grad, kept, out=torch.empty_like(grad, dtype=ctx.kind)), None


def channels_first(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """A linear layer whose channels come out in front, for products over the other dims.   x [B, I, J, C] -> [B, C', I, J]"""
    if torch.compiler.is_compiling():
        found = weight @ x.flatten(1, 2).transpose(1, 2)
        return (found if bias is None else found + bias[:, None]).unflatten(2, x.shape[1:3])
    device = x.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):  # written in place, where autocast does not reach
        given = weight.to(kind), None if bias is None else bias.to(kind), x.to(kind)
        return _ChannelsFirst.apply(*given)


class _ChannelsFirst(torch.autograd.Function):
    """Products that read and write each tensor as it lies; torch's own transpose by copies."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.biased = bias is not None
        out = x.new_empty(len(x), len(weight), *x.shape[1:3])
        for rows, into in zip(x.flatten(1, 2), out.flatten(2)):
            torch.mm(weight, rows.T, out=into) if bias is None else torch.addmm(bias[:, None], weight, rows.T, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        grad = grad.flatten(2)
        d_x, d_weight = torch.empty_like(x, memory_format=torch.contiguous_format), None
        for above, rows, into in zip(grad, x.flatten(1, 2), d_x.flatten(1, 2)):
            torch.mm(above.T, weight, out=into)
            d_weight = above @ rows if d_weight is None else d_weight.addmm_(above, rows)
        return d_weight, grad.sum((0, 2)) if ctx.biased else None, d_x


def one_hot(index: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    return nn.functional.one_hot(index, classes).to(dtype)
