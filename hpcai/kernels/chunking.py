"""Large results computed in chunks, where the full intermediate tensors would not fit the cache or the memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from hpcai.kernels import triton_support

_GPU = 1 << 28  # bytes: enough to fill it


def chunk_size(x: Tensor, item_bytes: int, cpu_bytes: int) -> int:
    """Return the number of items of ``item_bytes`` in a chunk, at least 1. A chunk takes ``cpu_bytes`` if ``x`` is a CPU tensor."""
    return max(1, (cpu_bytes if triton_support.on_cpu(x) else _GPU) // item_bytes)


def map_chunks(
    function: Callable[[slice], Tensor], count: int, x: Tensor, item_bytes: int, cpu_bytes: int, dim: int, multiple: int = 1,
) -> Tensor:  # fmt: skip
    """Call ``function`` with slices of ``range(count)``, and concatenate the results along ``dim``.

    With gradients, which need all intermediate tensors, ``torch.compile`` and ``torch.func`` there is one slice.

    Args:
        x: A tensor on the device of the computation.
        item_bytes: Memory that ``function`` takes for each item, in bytes.
        cpu_bytes: Memory of a chunk on a CPU, in bytes.
        multiple: Slices have multiples of so many items.
    """
    unchunked = torch.is_grad_enabled() or triton_support.needs_plain_ops()
    step = count if unchunked else max(chunk_size(x, item_bytes, cpu_bytes) // multiple, 1) * multiple
    if step >= count:
        return function(slice(0, count))
    first = function(slice(0, step))
    out = first.new_empty(*first.shape[:dim], count, *first.shape[dim + 1 :])
    out.narrow(dim, 0, step).copy_(first)
    del first
    for begin in range(step, count, step):
        chunk = slice(begin, min(begin + step, count))
        out.narrow(dim, begin, chunk.stop - begin).copy_(function(chunk))
    return out


def both(x: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x and g; without g they are the halves of x along dim 1."""
    x, g = x.chunk(2, 1) if g is None else (x, g)
    return x, g
