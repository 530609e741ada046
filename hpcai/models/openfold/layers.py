"""Linear layers with AlphaFold's initialisation (supplement 1.11.4), transitions, and dropout shared along rows or columns."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hpcai.dynamo import is_transformed
from hpcai.kernels.chunking import map_chunks
from hpcai.kernels.triton_support import needs_plain_ops
from hpcai.nn.layernorm import LayerNorm

Init = Literal["lecun", "relu", "glorot", "final"]
_CPU = 32 << 20  # bytes of hidden rows in a chunk, without gradients
_CUT = 0.87962566103423978  # standard deviation of a normal distribution truncated at two of its deviations


class Linear(nn.Linear):
    """``init``: LeCun's truncated normal, He's (before ReLU), Glorot's uniform, or zeros ("final", for the end of a branch)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, init: Init = "lecun") -> None:
        self.init = init
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        init_weight_(self.weight, self.init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def init_weight_(weight: Tensor, init: Init) -> None:
    """Initialise a weight [outputs, inputs], in place."""
    if init == "final":
        nn.init.zeros_(weight)
    elif init == "glorot":
        nn.init.xavier_uniform_(weight)
    else:
        deviation = ((2.0 if init == "relu" else 1.0) / weight.shape[1]) ** 0.5 / _CUT
        nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


class Transition(nn.Module):
    """Two linear layers on the last dim, the hidden one wider (Algorithms 9 and 15).   [..., C] -> [..., C]"""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.layer_norm = LayerNorm(channels, autocast_output=True)
        self.linear_1 = Linear(channels, factor * channels, init="relu")
        self.linear_2 = Linear(factor * channels, channels, init="final")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        row_bytes = self.linear_1.out_features * x.element_size()
        return map_chunks(  # a ReLU in place would copy: linear returns a view
            lambda chunk: self.linear_2(self.linear_1(self.layer_norm(rows[chunk])).relu()), len(rows), x, row_bytes, _CPU, 0
        ).view(x.shape)


class Dropout(nn.Module):
    """``residual`` + dropout of ``x``, with one mask for all elements along ``shared_dim``."""

    def __init__(self, rate: float, shared_dim: int) -> None:
        super().__init__()
        self.rate, self.shared_dim = rate, shared_dim

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return residual + x
        shape = list(x.shape)
        shape[self.shared_dim] = 1
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 / (1 - rate) in bfloat16 would be off by up to 0.4 %
        if is_transformed():  # with a mask for each entry of vmap
            return residual + (x * nn.functional.dropout(torch.ones(shape, dtype=wide, device=x.device), self.rate)).to(x.dtype)
        mask = torch.empty(shape, dtype=wide, device=x.device).bernoulli_(1 - self.rate).div_(1 - self.rate)
        return residual + (x * mask).to(x.dtype) if torch.compiler.is_compiling() else _DropoutAdd.apply(residual, x, mask)


class _DropoutAdd(torch.autograd.Function):
    """residual + x * mask, in one operation each for forward and backward."""

    @staticmethod
    def forward(ctx: Any, to: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.kind = x.dtype
        with torch.autocast(x.device.type, enabled=False):  # its casts would be operations of their own
            return torch.addcmul(to, x, mask, out=to.new_empty(to.shape, dtype=torch.promote_types(to.dtype, x.dtype)))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad_output, torch.mul(grad_output, mask, out=torch.empty_like(grad_output, dtype=ctx.kind)), None


def channels_first(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return a linear layer's output with channels in front, for products over the other dims.   x [B, I, J, C] -> [B, C', I, J]"""
    if needs_plain_ops():
        out = weight @ x.flatten(1, 2).transpose(1, 2)
        return (out if bias is None else out + bias[:, None]).unflatten(2, x.shape[1:3])
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with torch.autocast(device, enabled=False):  # autocast does not apply to out= operations
        args = weight.to(dtype), None if bias is None else bias.to(dtype), x.to(dtype)
        return _ChannelsFirst.apply(*args)


class _ChannelsFirst(torch.autograd.Function):
    """Products that read and write each tensor in its own layout; torch's would copy to transpose."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        ctx.biased = bias is not None
        out = x.new_empty(len(x), len(weight), *x.shape[1:3])
        for rows, out_matrix in zip(x.flatten(1, 2), out.flatten(2)):
            torch.mm(weight, rows.T, out=out_matrix) if bias is None else torch.addmm(bias[:, None], weight, rows.T, out=out_matrix)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        weight, x = ctx.saved_tensors
        grad_output = grad_output.flatten(2)
        grad_input, grad_weight = torch.empty_like(x, memory_format=torch.contiguous_format), None
        for grad_matrix, rows, grad_rows in zip(grad_output, x.flatten(1, 2), grad_input.flatten(1, 2)):
            torch.mm(grad_matrix.T, weight, out=grad_rows)
            grad_weight = grad_matrix @ rows if grad_weight is None else grad_weight.addmm_(grad_matrix, rows)
        return grad_weight, grad_output.sum((0, 2)) if ctx.biased else None, grad_input


def one_hot(index: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    return nn.functional.one_hot(index, classes).to(dtype)
