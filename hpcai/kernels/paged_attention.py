"""Attention of single tokens to a paged KV cache (Kwon et al. 2023), whose blocks are read by the table of each text.

N queries, H heads, K KV heads, D channels of a head, P tokens of a block, M blocks of a table
"""

import torch
from torch import Tensor

from hpcai.kernels import triton_support
from hpcai.kernels.causal_attention import decode_attention


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of each query to the tokens of its text up to its own position.

    Queries may be of one text, and texts may share blocks. On a GPU the host reads no value. For inference: there is no gradient.

    Args:
        tables: The blocks of the text of each query in ``k`` and ``v``; those after its position are any.
        positions: The position of each query in its text, or -1 for a padding row, whose output is 0.
        window, softcap, sinks: As for ``causal_attention``.

    Shape: q [N, H, D]; k and v [blocks, K, P, D]; tables [N, M] and positions [N], int64 or int32; sinks [H] -> [N, H, D]
    """
    if not triton_support.is_supported(q) or q.dtype == torch.float64:
        return reference(q, k, v, tables, positions, window, softcap, sinks)
    from hpcai.kernels import paged_attention_triton

    return paged_attention_triton.paged_attention(q, k, v, tables, positions, window, softcap, sinks)


def reference(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the same from a copy of all blocks of the tables."""
    keys, values = (pool[tables.long()].transpose(1, 2).flatten(2, 3) for pool in (k, v))  # [N, K, M P, D]
    distance = positions[:, None] - torch.arange(keys.shape[2], device=q.device)
    mask = (distance >= 0) & (distance < window) if window is not None else distance >= 0
    y = decode_attention(q[:, :, None], keys, values, mask[:, None, None], softcap, sinks)[:, :, 0]
    return torch.where(positions[:, None, None] >= 0, y, 0)
