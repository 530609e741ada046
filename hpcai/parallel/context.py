"""Context parallelism: the tokens of a sample lie on several processes; each gathers the keys and values of all.

    model.own, model.total = Own(axis, dim=1), Total(axis)     # its tokens; sums of what ranks counted
    for block in model.blocks:
        block.attention.attend = CausalContext(axis)
    sum_over(model, axis)

Of 2n equal blocks of tokens, rank r holds block r and block 2n-1-r, so that causal attention costs each rank the same (Brandon et
al., "Striped Attention", 2023, give the reason; this order is Llama 3's, Dubey et al. 2024, section 3.3.2). Every other layer works
on its tokens alone. B batch, H heads, T tokens, D channels of a head, n the size of the axis.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dist.collectives import ReduceScatter, all_gather, all_reduce
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError
from hpcai.kernels.grouped_query_attention import grouped_query_attention
from hpcai.untraced import untraced


class Own(nn.Module):
    """This rank's tokens of a whole, along ``dim``.   [B, T, ...] -> [B, T/n, ...]

    Raises DataError when the tokens do not divide into 2n blocks.
    """

    def __init__(self, axis: Axis, dim: int) -> None:
        super().__init__()
        self.axis, self.dim = axis, dim

    def forward(self, x: Tensor) -> Tensor:
        n, tokens = self.axis.size, x.shape[self.dim]
        if n == 1:
            return x
        if tokens % (2 * n):
            raise DataError(
                f"a sample of {tokens} tokens does not divide into 2 x {n} blocks (mesh.{self.axis.name}); fill samples up to a "
                f"multiple of {2 * n} tokens, or set mesh.{self.axis.name} to another size"
            )
        blocks = x.chunk(2 * n, self.dim)
        return torch.cat((blocks[self.axis.rank], blocks[2 * n - 1 - self.axis.rank]), self.dim)


class Total(nn.Module):
    """The sum of what the ranks counted of their tokens. All make the same loss of it, which counts once."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.axis, identity_backward=True)


class CausalContext(nn.Module):
    """Attention of each token to itself and those before it, whichever ranks hold them.

    q [B, H, T/n, D], k and v [B, H or fewer, T/n, D] -> [B, H, T/n, D]; a head of k and v serves as many neighbouring ones of q.
    ``documents`` [B, T]: the number of each token's document, of the whole sample; tokens attend to those of their own only.
    Keys and values travel in one message, and so do the sums of their gradients. The backward pass keeps those of this rank and
    gathers the others ``again``, since all of them would be n times as much in every layer; where layers are computed again anyway
    (activation checkpoints), set it to False.
    """

    def __init__(self, axis: Axis, again: bool = True) -> None:
        super().__init__()
        self.axis, self.again = axis.init_group(), again

    @untraced
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        from torch.nn.attention.bias import causal_lower_right  # it imports torch's compiler

        n, rank, tokens = self.axis.size, self.axis.rank, q.shape[2]
        own = torch.stack((k, v))
        if torch.is_autocast_enabled(q.device.type):  # attention with this mask would not; and half as much travels
            q, own = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, own))
        gathered = _Gathered(own, self.axis)
        whole = _Gather.apply(own, gathered) if n > 1 else own
        ends = (tokens,) if n == 1 else ((rank + 1) * tokens // 2, (2 * n - rank) * tokens // 2)
        outs = []
        with gathered.left_out(whole) if self.again and n > 1 else nullcontext():
            for end, part in zip(ends, q.chunk(len(ends), 2)):
                (keys, values), first = whole[..., :end, :], end - part.shape[2]
                mask: Any = causal_lower_right(part.shape[2], end)
                if documents is not None:
                    mask = (documents[:, None, first:end, None] == documents[:, None, None, :end]).tril(first)
                outs.append(grouped_query_attention(part, keys, values, mask))
        return torch.cat(outs, 2)


class _Gathered:
    """Keys and values of all ranks, in the order of the tokens, for one use of attention and its backward pass."""

    def __init__(self, own: Tensor, axis: Axis) -> None:
        self.own, self.axis = own.detach(), axis
        self.found: Tensor | None = None

    def gather(self) -> Tensor:
        """[2, B, H, T/n, D] of each rank -> [2, B, H, T, D]"""
        blocks = self.own.unflatten(3, (2, -1)).movedim(3, 0).contiguous()  # [2, 2, B, H, T/2n, D]
        every = blocks.new_empty((self.axis.size, *blocks.shape))
        all_gather(every.flatten(), blocks.flatten(), self.axis).wait()
        return torch.cat((*every[:, 0], *every.flip(0)[:, 1]), 3)

    def scatter(self, sums: Tensor) -> Tensor:
        """The adjoint.   [2, B, H, T, D] -> [2, B, H, T/n, D]"""
        blocks = torch.stack(sums.chunk(2 * self.axis.size, 3))
        pairs = torch.stack((blocks[: self.axis.size], blocks.flip(0)[: self.axis.size]), 1)
        own = pairs.new_empty(pairs[0].shape)
        ReduceScatter(own.view(-1), pairs.view(-1), self.axis).wait()
        return torch.cat((own[0], own[1]), 3)

    def left_out(self, whole: Tensor) -> AbstractContextManager[Any]:
        """Inside, views of ``whole`` that the backward pass wants are not kept: all are gathered again when it asks for one."""
        memory = whole.untyped_storage()._cdata  # and not the tensor: autograd holds the functions below

        def pack(tensor: Tensor) -> Any:
            is_view = tensor.untyped_storage()._cdata == memory
            return (tensor.size(), tensor.stride(), tensor.storage_offset()) if is_view else tensor

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            if self.found is None:
                self.found = self.gather()
            return self.found.as_strided(*kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, gathered: _Gathered) -> Tensor:
        ctx.gathered = gathered
        return gathered.gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gathered.found = None
        return ctx.gathered.scatter(gradient), None
