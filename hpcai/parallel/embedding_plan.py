"""Plans of sharded embedding tables: which rank holds which rows and columns of which table. Imports no torch.

A plan is a list of shards, so that table-wise, row-wise, column-wise and grid sharding (torchrec's words) can be mixed. A table
without shards is replicated (data_parallel). The cost of a rank is the time of its lookups plus that of its exchange, in lookups of
full rows; the slowest rank counts. One exchange for each batch of B samples over n ranks:

    ids        a rank sends 4 B/n bytes for each id of a bag to every shard of the table on another rank
    embeddings a rank sends 4 (n - 1) B/n bytes for each column of its shards, and as many gradients come back
    gradients  of replicated tables are all-reduced: 2 (n - 1)/n of their bytes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from hpcai.errors import ConfigError

ITEMSIZE = 4  # bytes of an element and of an id
_MIN_COLUMNS = 16  # of a shard: 64 bytes


class Shard(NamedTuple):
    """A box of a table, on the rank ``owner``."""

    table: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    owner: int


@dataclass(frozen=True)
class ShardingPlan:
    """The shards of tables with ``rows``, ``hotness`` and ``dim`` on so many ``ranks``. Raises ConfigError if shards of a table do
    not cover it once, or a rank has two of them."""

    rows: tuple[int, ...]
    hotness: tuple[int, ...]
    dim: int
    ranks: int
    shards: tuple[Shard, ...]
    rowwise: bool = False
    network: float = 1.75
    """time of a byte on the network, in that of a byte of a lookup: 7/4 within a node, 67/4 between nodes (NVIDIA, MLPerf v3.1)"""

    def __post_init__(self) -> None:
        for table in sorted({shard.table for shard in self.shards}):
            mine = [shard for shard in self.shards if shard.table == table]
            owners, boxes = [shard.owner for shard in mine], [(*shard.rows, *shard.columns) for shard in mine]
            n, d = (self.rows[table], self.dim) if 0 <= table < len(self.rows) else (0, 0)
            inside = all(0 <= a < b <= n and 0 <= c < e <= d for a, b, c, e in boxes)
            apart = all(a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2] for k, a in enumerate(boxes) for b in boxes[:k])
            if not (inside and apart and sum((b - a) * (e - c) for a, b, c, e in boxes) == n * d):
                raise ConfigError(f"shards of table {table} do not cover its {n} rows and {d} columns once: {boxes}")
            if len(set(owners)) < len(owners) or not all(0 <= owner < self.ranks for owner in owners):
                raise ConfigError(f"shards of table {table} are on ranks {owners}, expected different ones below {self.ranks}")
            if self.rowwise and any(shard.columns != (0, d) for shard in mine):
                raise ConfigError(f"table {table} has shards of columns, but row-wise Adagrad needs full rows; shard its rows")

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The tables that every rank holds."""
        return tuple(sorted(set(range(len(self.rows))) - {shard.table for shard in self.shards}))

    def owned(self, rank: int) -> list[Shard]:
        """Return the shards on ``rank``, by their number of columns."""
        return sorted((shard for shard in self.shards if shard.owner == rank), key=lambda s: (s.columns[1] - s.columns[0], s))

    def ids(self, rank: int) -> int:
        """Return the ids of a sample that ``rank`` receives."""
        return sum(self.hotness[shard.table] for shard in self.owned(rank))

    def width(self, rank: int) -> int:
        """Return the channels of a sample that ``rank`` pools for others."""
        return sum(shard.columns[1] - shard.columns[0] for shard in self.owned(rank))

    def memory(self, rank: int) -> int:
        """Return the bytes of tables and states on ``rank``."""
        boxes = [(self.rows[table], self.dim) for table in self.replicated]
        boxes += [(shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0]) for shard in self.owned(rank)]
        return sum(_bytes(n, d, self.rowwise) for n, d in boxes)

    def sent(self, rank: int, samples: int) -> dict[str, int]:
        """Return the bytes that ``rank`` sends to others for ``samples`` of each rank: ids, pooled embeddings, their gradients, and
        gradients of replicated tables."""
        others = [other for other in range(self.ranks) if other != rank]
        dense = self.dim * sum(self.rows[table] for table in self.replicated) * ITEMSIZE
        return {
            "ids": ITEMSIZE * samples * sum(map(self.ids, others)),
            "embeddings": ITEMSIZE * samples * len(others) * self.width(rank),
            "gradients": ITEMSIZE * samples * sum(map(self.width, others)),
            "replicated": 2 * len(others) * dense // self.ranks,
        }

    def cost(self, rank: int) -> float:
        """Return the cost of ``rank`` in lookups of full rows for a sample of the batch: lookups in its shards, plus ``network``
        times the channels that it sends and the ids that it receives."""
        lookups = sum(self.hotness[s.table] * (s.rows[1] - s.rows[0]) / self.rows[s.table] * (s.columns[1] - s.columns[0])
                      for s in self.owned(rank)) / self.dim  # fmt: skip
        return lookups + self.network * (self.width(rank) + self.ids(rank)) / self.dim

    @property
    def max_cost(self) -> float:
        """The cost of the slowest rank."""
        return max(map(self.cost, range(self.ranks)))


def plan_shards(
    rows: Sequence[int], hotness: Sequence[int], dim: int, *, ranks: int, memory: float, batch: int, rowwise: bool = False,
    replicated_bytes: float | None = None, network: float = ShardingPlan.network,
) -> ShardingPlan:  # fmt: skip
    """Return a plan for a global ``batch`` whose tables and states take at most ``memory`` bytes of each rank.

    Tables are replicated if the all-reduce of their gradients sends fewer bytes than an exchange, or if they and their states have
    fewer than ``replicated_bytes``. The others begin table-wise. Again and again all are distributed, the costliest first, each to
    the rank with the least cost that has room; then the costliest shard, or the largest if there was no room, is halved by columns,
    or by rows where columns would be few, and the best plan is kept. Raises ConfigError with the number of ranks that would hold
    tables that do not fit.
    """
    tables, size = range(len(rows)), [_bytes(n, dim, rowwise) for n in rows]
    by_traffic = [2 * n * dim <= batch // ranks * (2 * dim + h) for n, h in zip(rows, hotness)]
    small = [by_traffic[t] if replicated_bytes is None else size[t] < replicated_bytes for t in tables]
    replicated = set[int]()
    for table in sorted((t for t in tables if small[t]), key=lambda t: size[t]):
        if sum(size[t] for t in replicated) + size[table] <= memory / 2:  # the rest is for shards
            replicated.add(table)
    if ranks == 1:
        replicated = set()
    shared = sum(size[t] for t in replicated)
    place_on = partial(_place_and_split, tuple(rows), tuple(hotness), dim, memory=memory, replicated=replicated, rowwise=rowwise,
                       network=network)  # fmt: skip
    best = place_on(ranks)
    if best is None:
        needed = max(ranks + 1, math.ceil((sum(size) - shared) / (memory - shared))) if memory > shared else 0
        tries = (n for n in range(needed, 4 * needed) if place_on(n))
        enough = next(tries, None)
        held = f"{enough} ranks would hold them" if enough else "no number of ranks would hold them"
        advice = "" if rowwise else ", and row-wise Adagrad takes half the memory"
        raise ConfigError(
            f"embedding tables and their states have {sum(size) / 1e9:,.4g} GB, but {ranks} ranks with {memory / 1e9:,.4g} GB each "
            f"cannot hold them; {held}{advice}"
        )
    return best


def _bytes(rows: int, columns: int, rowwise: bool) -> int:
    return rows * (columns + (1 if rowwise else columns)) * ITEMSIZE


def _place_and_split(
    rows: tuple[int, ...], hotness: tuple[int, ...], dim: int, ranks: int, memory: float, replicated: set[int], rowwise: bool,
    network: float,
) -> ShardingPlan | None:  # fmt: skip
    splits = {table: (1, 1) for table in range(len(rows)) if table not in replicated}  # parts of rows and of columns
    best: ShardingPlan | None = None
    while True:
        shards = {table: _boxes(table, rows[table], dim, *parts) for table, parts in splits.items()}
        costs = {t: _cost(hotness[t], dim, network, *parts) for t, parts in splits.items()}
        placed = _place(shards, costs, ranks, memory - sum(_bytes(rows[t], dim, rowwise) for t in replicated), rowwise)
        if placed is not None:
            plan = ShardingPlan(rows, hotness, dim, ranks, tuple(placed), rowwise, network)
            best = plan if best is None or plan.max_cost < best.max_cost - 1e-9 else best
        largest = {t: _bytes(rows[t] // splits[t][0], dim // splits[t][1], rowwise) for t in splits}
        for table in sorted(splits, key=(largest if best is None else costs).__getitem__, reverse=True):
            row_parts, column_parts = splits[table]
            by_columns = not rowwise and dim % (2 * column_parts) == 0 and dim // (2 * column_parts) >= _MIN_COLUMNS
            if 2 * row_parts * column_parts <= ranks and (by_columns or 2 * row_parts <= rows[table]):
                splits[table] = (row_parts, 2 * column_parts) if by_columns else (2 * row_parts, column_parts)
                break
            if best is not None:
                return best  # the costliest table has a shard on every rank
        else:
            return best


def _boxes(table: int, rows: int, dim: int, row_parts: int, column_parts: int) -> list[Shard]:
    step, width = -(-rows // row_parts), dim // column_parts
    starts = [min(k * step, rows) for k in range(row_parts + 1)]
    pairs = [(a, b) for a, b in zip(starts, starts[1:]) if a < b]
    return [Shard(table, pair, (c, c + width), -1) for pair in pairs for c in range(0, dim, width)]


def _cost(hotness: int, dim: int, network: float, row_parts: int, column_parts: int) -> float:
    """Return the cost of one shard, as in ``ShardingPlan.cost``."""
    return hotness / row_parts / column_parts + network * (1 / column_parts + hotness / dim)


def _place(
    shards: dict[int, list[Shard]], costs: dict[int, float], ranks: int, memory: float, rowwise: bool
) -> list[Shard] | None:  # fmt: skip
    """Return the shards with their owners, or None if they do not fit."""
    load, used, placed = [0.0] * ranks, [0] * ranks, list[Shard]()
    for table in sorted(shards, key=lambda t: (-costs[t], t)):
        taken = set[int]()
        for shard in shards[table]:
            size = _bytes(shard.rows[1] - shard.rows[0], shard.columns[1] - shard.columns[0], rowwise)
            free = [rank for rank in range(ranks) if rank not in taken and used[rank] + size <= memory]
            if not free:
                return None
            owner = min(free, key=lambda rank: (load[rank], used[rank], rank))
            taken.add(owner)
            load[owner], used[owner] = load[owner] + costs[table], used[owner] + size
            placed.append(shard._replace(owner=owner))
    return placed
