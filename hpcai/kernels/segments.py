"""Segments of sorted rows, such as the edges of a node.   E rows, M segments, H columns"""

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_ends(ascending: Tensor, count: int) -> Tensor:
    """Return where the rows of each of ``count`` numbers begin, and the end of the last.   [E] -> [count + 1]"""
    return torch.searchsorted(ascending, torch.arange(count + 1, device=ascending.device))


def reduce_segments(values: Tensor, ends: Tensor, mode: str) -> Tensor:
    """Reduce the rows between ``ends``; 0 where there are none.   [E, H] -> [M, H]"""
    rows = torch.arange(len(values), device=values.device)
    return F.embedding_bag(rows, values, ends, mode=mode, include_last_offset=True)
