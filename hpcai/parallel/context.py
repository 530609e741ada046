"""Context parallelism: the tokens of a sample are sharded over ranks, and attention all-gathers keys and values.

    model.own, model.total = LocalChunk(axis, dim=1), ContextSum(axis)     # local tokens; sums over all tokens
    for block in model.blocks:
        block.attention.attend = ContextParallelAttention(axis)
    sum_gradients_over(model, axis)

Of 2n equal chunks of tokens, rank r holds chunks r and 2n-1-r, so that causal attention has the same cost on each rank (Brandon et
al., "Striped Attention", 2023, give the reason; this order is Llama 3's, Dubey et al. 2024, section 3.3.2). Every other layer is
local. B batch, H heads, T tokens, D channels of a head, n the size of the axis.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dist.collectives import ReduceScatter, all_gather, all_reduce
from hpcai.dist.mesh import Axis
from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import DataError
from hpcai.kernels.causal_attention import causal_attention
from hpcai.parallel.axial import AxisSeam


class LocalChunk(nn.Module):
    """Select this rank's two chunks of tokens along ``dim``.   [B, T, ...] -> [B, T/n, ...]

    Raises DataError if the tokens do not divide into 2n chunks.
    """

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__()
        self.axis, self.dim = axis, dim

    def forward(self, x: Tensor) -> Tensor:
        n, tokens = self.axis.size, x.shape[self.dim]
        if n == 1:
            return x
        if tokens % (2 * n):
            advice = f"pad samples to a multiple of {2 * n} tokens, or set mesh.{self.axis.name} to another size"
            raise DataError(f"a sample of {tokens} tokens does not divide into 2 x {n} chunks (mesh.{self.axis.name}); {advice}")
        blocks = x.chunk(2 * n, self.dim)
        return torch.cat((blocks[self.axis.rank], blocks[2 * n - 1 - self.axis.rank]), self.dim)


class ContextSum(AxisSeam):
    """Sum over ranks of sums over local tokens. All ranks compute the same loss from it, which counts once."""

    def forward(self, x: Tensor, *sizes: int) -> Tensor:
        return all_reduce(x, self.axis, identity_backward=True)


class ContextParallelAttention(nn.Module):
    """Causal attention of local queries to the keys and values of all ranks, computed by ``attention`` for each chunk.

    Keys and values take one all-gather, and their gradients one reduce-scatter. With ``regather`` only local keys and values are
    saved, and the backward pass gathers all of them again, since saving them takes n times the memory in every layer. Set it to
    False for layers under activation checkpointing, which gathers them anyway.

    ``documents``: The document of each token of the full sample; tokens attend within their document. ``args``: Passed on.
    Shape: q [B, H, T/n, D]; k and v [B, H or a divisor of it, T/n, D]; documents [B, T] -> [B, H, T/n, D]
    """

    def __init__(self, axis: Axis, regather: bool = True, attention: Callable[..., Tensor] = causal_attention) -> None:
        super().__init__()
        self.axis, self.regather, self.local_attention = axis.init_group(), regather, attention

    @disable_dynamo
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *args: Any) -> Tensor:
        n, rank, tokens = self.axis.size, self.axis.rank, q.shape[2]
        local = torch.stack((k, v))
        if torch.is_autocast_enabled(q.device.type):  # attention with this mask would not cast, and the all-gather halves
            q, local = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, local))
        gathered = _GatheredKV(local, self.axis)
        full = _AllGatherKV.apply(local, gathered) if n > 1 else local
        ends = (tokens,) if n == 1 else ((rank + 1) * tokens // 2, (2 * n - rank) * tokens // 2)
        outs = []
        with gathered.drop_saved(full) if self.regather and n > 1 else nullcontext():
            for end, chunk in zip(ends, q.chunk(len(ends), 2)):
                keys, values = full[..., :end, :]
                outs.append(self.local_attention(chunk, keys, values, None if documents is None else documents[:, :end], *args))
        return torch.cat(outs, 2)


class _GatheredKV:
    """Keys and values of all ranks, in the order of the tokens, for one attention and its backward pass."""

    def __init__(self, local: Tensor, axis: Axis) -> None:
        self.local, self.axis = local.detach(), axis
        self.cached: Tensor | None = None

    def gather(self) -> Tensor:
        """All-gather.   [2, B, H, T/n, D] -> [2, B, H, T, D]"""
        blocks = self.local.unflatten(3, (2, -1)).movedim(3, 0).contiguous()  # [2, 2, B, H, T/2n, D]
        gathered = blocks.new_empty((self.axis.size, *blocks.shape))
        all_gather(gathered.flatten(), blocks.flatten(), self.axis).wait()
        return torch.cat((*gathered[:, 0], *gathered.flip(0)[:, 1]), 3)

    def scatter(self, sums: Tensor) -> Tensor:
        """Reduce-scatter, the adjoint.   [2, B, H, T, D] -> [2, B, H, T/n, D]"""
        blocks = torch.stack(sums.chunk(2 * self.axis.size, 3))
        pairs = torch.stack((blocks[: self.axis.size], blocks.flip(0)[: self.axis.size]), 1)
        local = pairs.new_empty(pairs[0].shape)
        ReduceScatter(local.view(-1), pairs.view(-1), self.axis).wait()
        return torch.cat((local[0], local[1]), 3)

    def drop_saved(self, full: Tensor) -> AbstractContextManager[Any]:
        """Context manager: views of ``full`` are not saved for the backward pass; the first one unpacked gathers all again."""
        storage = full.untyped_storage()._cdata  # not the tensor: autograd holds the functions below

        def pack(tensor: Tensor) -> Any:
            is_view = tensor.untyped_storage()._cdata == storage
            return (tensor.size(), tensor.stride(), tensor.storage_offset()) if is_view else tensor

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if self.cached is None:
                self.cached = self.gather()
            return self.cached.as_strided(*packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _AllGatherKV(UntransformedFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, gathered: _GatheredKV) -> Tensor:
        ctx.gathered = gathered
        return gathered.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ctx.gathered.cached = None
        return ctx.gathered.scatter(grad_output), None
