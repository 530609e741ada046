"""Triangle multiplication (Algorithms 11 and 12 of AlphaFold's supplement), without its projections.

Both factors are halves of one tensor, and so are their gradients: neither pass copies them.
B batch, C channels, I, J and K residues.
"""

from typing import Any

import torch
from torch import Tensor

from hpcai.kernels.triton_support import needs_plain_ops


def triangle_multiplication(ab: Tensor, outgoing: bool) -> Tensor:
    """Return the sum over k of a_ik b_jk if ``outgoing``, else of a_ki b_kj.

    Shape: ab [B, 2 C, I, K], or [B, 2 C, K, I]: the channels of a, then those of b -> [B, C, I, I]
    """
    if needs_plain_ops():
        return reference(ab, outgoing)
    return _TriangleMultiplication.apply(ab, outgoing)


def reference(ab: Tensor, outgoing: bool) -> Tensor:
    """Compute the triangle multiplication with the gradient of autograd."""
    a, b = ab.chunk(2, 1)
    return a @ b.transpose(-1, -2) if outgoing else a.transpose(-1, -2) @ b


class _TriangleMultiplication(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ab: Tensor, outgoing: bool) -> Tensor:
        ctx.save_for_backward(ab)
        ctx.outgoing = outgoing
        return reference(ab, outgoing)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (ab,) = ctx.saved_tensors
        grad_input = torch.empty_like(ab, memory_format=torch.contiguous_format)
        for factors, grad, out in zip(ab, grad_output, grad_input):  # the halves of one sample are contiguous
            (a, b), (grad_a, grad_b) = factors.chunk(2), out.chunk(2)
            if ctx.outgoing:
                torch.bmm(grad, b, out=grad_a)
                torch.bmm(grad.transpose(1, 2), a, out=grad_b)
            else:
                torch.bmm(b, grad.transpose(1, 2), out=grad_a)
                torch.bmm(a, grad, out=grad_b)
        return grad_input, None
