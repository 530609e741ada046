"""Products of edges over the third residues of their triangles (Algorithms 11 and 12 of AlphaFold's supplement).

Both factors are halves of one tensor, and so are their gradients: neither is ever copied together.
B batch, C channels, I, J and K residues.
"""

from typing import Any

import torch
from torch import Tensor


def product(ab: Tensor, outgoing: bool) -> Tensor:
    """The sum over k of a_ik b_jk where ``outgoing``, otherwise of a_ki b_kj.

    ab [B, 2 C, I, K], or [B, 2 C, K, I]: the channels of a, then those of b -> [B, C, I, I]
    """
    if torch.compiler.is_compiling():
        return plain(ab, outgoing)
    return _Product.apply(ab, outgoing)


def plain(ab: Tensor, outgoing: bool) -> Tensor:
    a, b = ab.chunk(2, 1)
    return a @ b.transpose(-1, -2) if outgoing else a.transpose(-1, -2) @ b


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ab: Tensor, outgoing: bool) -> Tensor:
        ctx.save_for_backward(ab)
        ctx.outgoing = outgoing
        return plain(ab, outgoing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ab,) = ctx.saved_tensors
        d = torch.empty_like(ab, memory_format=torch.contiguous_format)
        for each, above, into in zip(ab, grad, d):  # products are written where they belong, which is one piece within a sample
            (a, b), (d_a, d_b) = each.chunk(2), into.chunk(2)
            if ctx.outgoing:
                torch.bmm(above, b, out=d_a)
                torch.bmm(above.transpose(1, 2), a, out=d_b)
            else:
                torch.bmm(b, above.transpose(1, 2), out=d_a)
                torch.bmm(a, above, out=d_b)
        return d, None
