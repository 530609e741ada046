"""Rows of a table that is sharded by contiguous ranges over an axis, looked up by id with an all-to-all.

N ids of this rank, F elements of a row, n ranks"""

import math

import torch
from torch import Tensor

from hpcai.dist.collectives import all_to_all
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError, DataError


def rows_per_rank(rows: int, axis: Axis) -> int:
    """Return the rows of a shard: rank r of the axis holds rows r * n to (r + 1) * n - 1, the last rank fewer."""
    return -(-rows // axis.size)


def check_shard_fits(name: str, size: int, available: int, axis: Axis, remedy: str) -> None:
    """Raise ConfigError if a shard of a table of ``size`` bytes exceeds ``available`` bytes of this rank."""
    if (shard := -(-size // axis.size)) > available:
        ranks = f"{-(-size // available):,} ranks or more would hold it" if available > 0 else "no memory is left"
        sizes = f"{shard / 1e9:,.3g} GB, but {max(available, 0) / 1e9:,.3g} GB are available"
        raise ConfigError(f"{name}: a shard on each of {axis.size} ranks has {sizes}; {ranks}, or {remedy}")


class LookupPlan:
    """The exchange of rows for some ids: which ranks hold them, and which rows of this shard others need. A collective call; ranks
    may have different numbers of ids, also none. -1 has no row. All ranks raise DataError if an id of one of them is not among
    the ``rows`` of the table.   [N] int64

    ``gather`` may be called for several tables. Gradients of a trainable one would go the opposite way: those of the outputs at
    ``positions``, with the sizes ``sent``, to be added to the rows ``requested`` of the shard.
    """

    def __init__(self, ids: Tensor, rows: int, axis: Axis) -> None:
        self.axis, self.count, each = axis, len(ids), rows_per_rank(rows, axis)
        exists = (ids >= 0) & (ids < rows)
        owner = torch.where(exists, ids // each, axis.size)
        sent = torch.bincount(owner, minlength=axis.size + 1)[: axis.size]
        self.positions = torch.argsort(owner, stable=True)[: int(sent.sum())]  # of ids with a row, by owner
        invalid = (~exists & (ids != -1)).any().to(sent.dtype)
        counts = torch.stack((sent, invalid.expand(axis.size)), 1)
        received = counts
        if axis.size > 1:
            all_to_all(received := torch.empty_like(counts), counts, axis).wait()
        if wrong := received[:, 1].nonzero().flatten().tolist():
            raise DataError(f"rank {wrong[0]} of {axis.name} looks up a row that is not among the {rows:,} of the table")
        self.sent, self.received = sent.tolist(), received[:, 0].tolist()
        self.requested = self._exchange(ids[self.positions] % each, self.sent, self.received)

    def gather(self, shard: Tensor) -> Tensor:
        """Return the rows of the ids, zero for -1. A collective call, without gradients.   [rows / n, F] -> [N, F]"""
        with torch.no_grad():
            rows = self._exchange(shard[self.requested], self.received, self.sent)
            return shard.new_zeros((self.count, *shard.shape[1:])).index_copy_(0, self.positions, rows)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows from all ranks, by rank. Bytes are sent: gloo does not know every dtype."""
        if self.axis.size == 1:
            return rows
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        row = rows.element_size() * math.prod(rows.shape[1:])
        into, flat = (part.contiguous().flatten().view(torch.uint8) for part in (output, rows))
        all_to_all(into, flat, self.axis, [row * count for count in received], [row * count for count in sent]).wait()
        return output
