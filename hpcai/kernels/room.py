"""How much of a large result is made at a time, where it is never needed whole."""

from collections.abc import Callable

import torch
from torch import Tensor

from hpcai.kernels import compiler

_GPU = 1 << 28  # bytes: enough to fill it


def several(x: Tensor, each: int, cpu: int) -> int:
    """How many things of ``each`` bytes are made at a time, at least one: where ``x`` is on a CPU, as many as fit ``cpu`` bytes of
    its cache."""
    return max(1, (cpu if compiler.on_cpu(x) else _GPU) // each)


def in_parts(
    function: Callable[[slice], Tensor], count: int, x: Tensor, each: int, cpu: int, dim: int, unit: int = 1,
) -> Tensor:  # fmt: skip
    """``function`` of 0 ... ``count`` - 1, ``several`` at a time, a multiple of ``unit``, with its results side by side along
    ``dim``; for each it holds ``each`` bytes meanwhile. All are computed at once where gradients are taken, which need them all, or
    code is compiled."""
    step = count if torch.is_grad_enabled() or torch.compiler.is_compiling() else max(several(x, each, cpu) // unit, 1) * unit
    if step >= count:
        return function(slice(0, count))
    first = function(slice(0, step))
    out = first.new_empty(*first.shape[:dim], count, *first.shape[dim + 1 :])
    out.narrow(dim, 0, step).copy_(first)
    del first
    for begin in range(step, count, step):
        some = slice(begin, min(begin + step, count))
        out.narrow(dim, begin, some.stop - begin).copy_(function(some))
    return out
