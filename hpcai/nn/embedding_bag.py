"""Embedding tables with pooled lookups, whose rows are updated by a sparse Adagrad of their own.

No optimizer and no gradient bucket sees a table: a backward pass keeps the ids and the gradients of pooled embeddings, and after
the optimizer step ``update_`` updates the touched rows (``hpcai.kernels.embedding_update``).

B bags of each table, T tables, D their dim, K the sum of their hotness (the most ids of a bag)"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcai.dynamo import UntransformedFunction, disable_dynamo
from hpcai.errors import DataError
from hpcai.kernels.embedding_update import Layout, adagrad_, dense_gradients, pool
from hpcai.nn.matmul import cast_to_autocast


class EmbeddingTable(nn.Module):
    """A table, or the shard of it from ``first_row`` on. ``weight`` [R, D] and ``sum``, the state of Adagrad, are frozen for
    optimizers: parameters, so that a model on the meta device has no memory for them, and checkpoints hold them, sharded."""

    wide = True  # stays in float32

    def __init__(self, rows: int, dim: int, rowwise: bool) -> None:
        super().__init__()
        self.first_row = 0
        self.weight = nn.Parameter(torch.empty(rows, dim), requires_grad=False)
        self.sum = nn.Parameter(torch.empty(rows, 1 if rowwise else dim), requires_grad=False)
        nn.init.uniform_(self.weight, -(rows**-0.5), rows**-0.5)
        nn.init.zeros_(self.sum)


class TableGroup:
    """Tables, or shards of them, of one width that are looked up together. ``saved``: Ids and gradients of each backward pass
    since the last update. ``like``: A table with their dtype, also if there is none. ``all_reduce``: For replicated tables, sums
    their dense gradients over all ranks."""

    def __init__(self, tables: list[EmbeddingTable], hotness: Sequence[int], like: EmbeddingTable, all_reduce: Any = None) -> None:
        self.tables, self.like, self.all_reduce = tables, like, all_reduce
        rows, first_rows = [len(table.weight) for table in tables], [table.first_row for table in tables]
        self.layout = Layout(tuple(hotness), tuple(rows), tuple(first_rows))
        self.saved: list[tuple[Tensor, Tensor]] = []

    def pool(self, ids: Tensor) -> Tensor:
        """Return the sums of the rows of each bag.   [B, K] -> [B, T D]"""
        anchor = torch.empty(0, device=ids.device, requires_grad=torch.is_grad_enabled())
        return cast_to_autocast(_Pool.apply(anchor, ids, self))

    def update_(self, lr: Tensor, scale: Tensor | None, skip: Tensor, eps: float) -> None:
        saved, self.saved = self.saved, []
        if not saved or not self.tables:
            return
        weights, sums = [table.weight for table in self.tables], [table.sum for table in self.tables]
        ids, grad = (parts[0] if len(saved) == 1 else torch.cat(parts) for parts in zip(*saved))
        scalars: dict[str, Any] = {"lr": lr, "scale": scale, "found_inf": skip, "eps": eps}
        grad = grad.contiguous().unflatten(1, (len(weights), -1))
        if self.all_reduce is None:
            adagrad_(weights, sums, self.layout, ids, grad, **scalars)
            return
        dense = self.all_reduce(dense_gradients(self.layout, ids, grad)).split(list(self.layout.rows))
        for weight, state, part in zip(weights, sums, dense):  # each row is a bag, of one id
            index = torch.arange(len(part), dtype=ids.dtype, device=ids.device)[:, None]
            adagrad_([weight], [state], Layout((1,), (len(part),), (0,)), index, part[:, None], **scalars)


class _Pool(UntransformedFunction):
    """Pooled embeddings of a group; the backward pass saves their gradient. ``anchor`` requires a gradient, since no table does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, group: TableGroup) -> Tensor:
        ctx.ids, ctx.group = ids, group
        weights = [table.weight for table in group.tables]
        width = weights[0].shape[1] if weights else 0
        out = group.like.weight.new_empty(len(ids), len(weights), width)
        pool(ids, weights, group.layout, out)
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.group.saved.append((ctx.ids, grad))
        return None, None, None


class EmbeddingBags(nn.Module):
    """Embedding tables (torchrec's EmbeddingBagCollection): the rows of the ids of a bag are summed.   [B, K] -> [B, T, D]

    A row of the ids has all bags of a sample, table after table, each padded with -1 to its ``hotness``: ``pad_bags`` makes it of
    ragged bags. An id that is there twice counts twice, and an empty bag gives 0. What is computed between ``begin`` and
    ``finish`` overlaps with the communication of sharded tables (``hpcai.parallel.embedding``). ``rowwise``: Adagrad has one
    state for each row, in place of one for each element. A step calls ``update_``."""

    def __init__(self, rows: Sequence[int], dim: int, hotness: Sequence[int], *, rowwise: bool = False, eps: float = 1e-8) -> None:
        super().__init__()
        self.rows, self.dim, self.hotness, self.rowwise, self.eps = tuple(rows), dim, tuple(hotness), rowwise, eps
        for number, n in enumerate(rows):
            self.add_module(str(number), EmbeddingTable(n, dim, rowwise))
        self.groups = [TableGroup(self.tables, hotness, self.tables[0])]
        self.exchange: Any = None  # seam of sharded tables

    @property
    def tables(self) -> list[Any]:
        return [self.get_submodule(str(number)) for number in range(len(self.rows))]

    def forward(self, ids: Any) -> Tensor:
        return self.finish(self.begin(ids))

    @disable_dynamo
    def begin(self, ids: Any) -> Any:
        """Start to look up ids, or what ``exchange`` has made of them before the step. On a CPU ids are checked."""
        if isinstance(ids, Tensor) and ids.device.type == "cpu":
            check_ids(ids, self.rows, self.hotness)
        return self.groups[0].pool(ids) if self.exchange is None else self.exchange.begin(ids)

    @disable_dynamo
    def finish(self, pending: Any) -> Tensor:
        return (pending if self.exchange is None else self.exchange.finish(pending)).unflatten(1, (len(self.rows), self.dim))

    @torch.no_grad()
    def update_(self, lr: Tensor, scale: Tensor | None, skip: Tensor) -> None:
        """Update the rows that were looked up since the last update by Adagrad with ``scale`` (None: 1) times their gradients,
        summed over micro-batches and ranks, unless ``skip`` is 1. All are device scalars."""
        for group in self.groups:
            group.update_(lr, scale, skip, self.eps)


def check_ids(ids: Tensor, rows: Sequence[int], hotness: Sequence[int]) -> None:
    """Raise DataError if padded ids [B, K] are not those of tables with so many ``rows``. It reads them: call it on the host."""
    if ids.ndim != 2 or ids.shape[1] != sum(hotness):
        raise DataError(f"ids are {list(ids.shape)}, expected [samples, {sum(hotness)}]: the sum of the hotness of all tables")
    for number, (part, n) in enumerate(zip(ids.split(list(hotness), 1), rows)):
        if part.numel() and (int(part.min()) < -1 or int(part.max()) >= n):
            sample, place = ((part < -1) | (part >= n)).nonzero()[0].tolist()
            raise DataError(f"table {number}: sample {sample} has the id {int(part[sample, place])}, expected 0 to {n - 1}")


def pad_bags(ids: Sequence[Tensor], offsets: Sequence[Tensor], rows: Sequence[int], hotness: Sequence[int]) -> Tensor:
    """Return the padded ids of ragged bags, on the host: bag b of a table has its ids from ``offsets[b]`` to ``offsets[b + 1]``,
    as of torch's EmbeddingBag with ``include_last_offset``. Raises DataError for ids that a table does not have, for offsets that
    are not ascending, and for bags longer than the hotness.   ids [N_t], offsets [B + 1] of each table -> [B, K]"""
    padded = []
    for number, (values, ends, most) in enumerate(zip(ids, offsets, hotness, strict=True)):
        lengths = ends.diff()
        wrong = ((lengths < 0) | (lengths > most)).nonzero().flatten().tolist()
        if wrong or (int(ends[0]), int(ends[-1])) != (0, len(values)):
            bag = f", but bag {wrong[0]} is {ends[wrong[0] : wrong[0] + 2].tolist()}" if wrong else ""
            raise DataError(f"table {number}: offsets are {int(ends[0])} to {int(ends[-1])}{bag}; expected ascending ones from 0 "
                            f"to {len(values)}, and at most {most} ids in a bag (hotness)")  # fmt: skip
        if (values < 0).any():
            raise DataError(f"table {number}: the id {int(values.min())} is negative, expected 0 to {rows[number] - 1}")
        mask = torch.arange(most) < lengths[:, None]
        padded.append(values.new_full(mask.shape, -1).masked_scatter_(mask, values))
    result = torch.cat(padded, 1)
    check_ids(result, rows, hotness)
    return result.int() if max(rows) < 2**31 else result
