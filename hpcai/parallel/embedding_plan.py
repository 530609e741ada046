"""Plans of sharded embedding tables: lists of shards, so that table-wise, row-wise, column-wise and grid sharding (torchrec's
words) can be mixed. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
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

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class ShardingPlan:
    """The shards of tables with ``rows``, ``hotness`` and ``dim`` on so many ``ranks``; a table without shards is replicated.
    ``network``: Time of a byte on the network, in that of a byte of a lookup (NVIDIA, MLPerf v3.1: 7/4 within a node, 67/4 between
    nodes). Raises ConfigError if the shards of a table do not cover it once, or a rank has two of them."""

    rows: tuple[int, ...]
    hotness: tuple[int, ...]
    dim: int
    ranks: int
    shards: tuple[Shard, ...]
    rowwise: bool = False
    network: float = 1.75

    def __post_init__(self) -> None:
        for table in sorted({shard.table for shard in self.shards}):
            mine = [shard for shard in self.shards if shard.table == table]
            owners, n, d = {shard.owner for shard in mine}, self.rows[table], self.dim
            inside = all(0 <= s.rows[0] < s.rows[1] <= n and 0 <= s.columns[0] < s.columns[1] <= d for s in mine)
            apart = all(a[1] <= b[0] or b[1] <= a[0] or c[1] <= e[0] or e[1] <= c[0]
                        for k, (_, a, c, _) in enumerate(mine) for _, b, e, _ in mine[:k])  # fmt: skip
            covered = inside and apart and sum(s.height * s.width for s in mine) == n * d
            if not covered or len(owners) < len(mine) or not owners <= {*range(self.ranks)}:
                raise ConfigError(f"table {table} has the shards {mine}; expected {n} rows and {d} columns once, each shard on "
                                  f"another of {self.ranks} ranks")  # fmt: skip
            if self.rowwise and any(s.width != d for s in mine):
                raise ConfigError(f"table {table} has shards of columns, but row-wise Adagrad needs full rows; shard its rows")

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The tables that every rank holds."""
        return tuple(sorted({*range(len(self.rows))} - {shard.table for shard in self.shards}))

    def owned(self, rank: int) -> list[Shard]:
        """Return the shards on ``rank``, by their number of columns."""
        return sorted((shard for shard in self.shards if shard.owner == rank), key=lambda shard: (shard.width, shard))

    def ids(self, rank: int) -> int:
        """Return the ids of a sample that ``rank`` receives."""
        return sum(self.hotness[shard.table] for shard in self.owned(rank))

    def width(self, rank: int) -> int:
        """Return the channels of a sample that ``rank`` pools."""
        return sum(shard.width for shard in self.owned(rank))

    def memory(self, rank: int) -> int:
        """Return the bytes of tables and states on ``rank``."""
        boxes = [(self.rows[t], self.dim) for t in self.replicated] + [(shard.height, shard.width) for shard in self.owned(rank)]
        return sum(_bytes(*box, self.rowwise) for box in boxes)

    def sent(self, rank: int, samples: int) -> list[int]:
        """Return the bytes of ids, of pooled embeddings, and of the gradients of those of others, that ``rank`` sends in a step
        with ``samples`` on each rank, in float32."""
        others = [other for other in range(self.ranks) if other != rank]
        numbers = sum(map(self.ids, others)), len(others) * self.width(rank), sum(map(self.width, others))
        return [ITEMSIZE * samples * number for number in numbers]

    def cost(self, rank: int) -> float:
        """Return the time of ``rank`` for a sample of the batch, in lookups of full rows: those in its shards, plus ``network``
        times the channels that it sends and the ids that it receives."""
        lookups = sum(self.hotness[s.table] * s.height / self.rows[s.table] * s.width for s in self.owned(rank))
        return (lookups + self.network * (self.width(rank) + self.ids(rank))) / self.dim


def plan_shards(
    rows: Sequence[int], hotness: Sequence[int], dim: int, *, ranks: int, memory: float, batch: int, rowwise: bool = False,
    replicated_bytes: float | None = None, network: float = ShardingPlan.network,
) -> ShardingPlan:  # fmt: skip
    """Return a plan for a global ``batch`` whose tables and states take at most ``memory`` bytes of each rank.

    Tables are replicated if the all-reduce of their gradients sends fewer bytes than an exchange, or if they and their states
    have fewer than ``replicated_bytes``. The others begin table-wise. Again and again all are placed, the costliest first, each
    on the rank with the least cost that has room; then the costliest shard, or the largest if there was no room, is halved by
    columns, or by rows where columns would be few; the best plan is kept. Raises ConfigError with the number of ranks that would
    hold the tables."""
    size, room, replicated = [_bytes(n, dim, rowwise) for n in rows], memory / 2, set[int]()  # at least half is for shards
    for table in sorted(range(len(rows)), key=size.__getitem__) if ranks > 1 else ():
        less_traffic = 2 * rows[table] * dim <= batch // ranks * (2 * dim + hotness[table])
        if size[table] <= room and (less_traffic if replicated_bytes is None else size[table] < replicated_bytes):
            room -= size[table]
            replicated.add(table)
    shared = sum(size[table] for table in replicated)

    def find(ranks: int) -> ShardingPlan | None:
        splits, best, least = {t: (1, 1) for t in range(len(rows)) if t not in replicated}, None, math.inf  # parts of rows, columns
        while True:
            costs = {t: hotness[t] / r / c + network * (1 / c + hotness[t] / dim) for t, (r, c) in splits.items()}
            shards = [shard for t in sorted(splits, key=lambda t: (-costs[t], t)) for shard in _boxes(t, rows[t], dim, *splits[t])]
            if (placed := _place(shards, costs, ranks, memory - shared, rowwise)) is not None:
                plan = ShardingPlan(tuple(rows), tuple(hotness), dim, ranks, tuple(placed), rowwise, network)
                if (slowest := max(map(plan.cost, range(ranks)))) < least - 1e-9:
                    best, least = plan, slowest
            keys = costs if best else {t: size[t] / r / c for t, (r, c) in splits.items()}
            for table in sorted(splits, key=keys.__getitem__, reverse=True)[: 1 if best else None]:
                r, c = splits[table]
                by_columns = not rowwise and dim % (2 * c) == 0 and dim // (2 * c) >= _MIN_COLUMNS
                if 2 * r * c <= ranks and (by_columns or 2 * r <= rows[table]):
                    splits[table] = (r, 2 * c) if by_columns else (2 * r, c)
                    break
            else:
                return best

    if (plan := find(ranks)) is not None:
        return plan
    least = max(ranks + 1, -int(-(sum(size) - shared) // (memory - shared))) if memory > shared else 0
    enough = next((n for n in range(least, 4 * least) if find(n)), None)
    held = f"{enough} ranks would hold them" if enough else "no number of ranks would hold them"
    raise ConfigError(
        f"embedding tables and their states have {sum(size) / 1e9:,.4g} GB, but {ranks} ranks with {memory / 1e9:,.4g} GB each "
        f"cannot hold them; {held}" + ("" if rowwise else ", and row-wise Adagrad takes half the memory")
    )


def _bytes(rows: int, columns: int, rowwise: bool) -> int:
    return rows * (columns + (1 if rowwise else columns)) * ITEMSIZE


def _boxes(table: int, rows: int, dim: int, row_parts: int, column_parts: int) -> list[Shard]:
    ends = [[min(-(-n // parts) * k, n) for k in range(parts + 1)] for n, parts in ((rows, row_parts), (dim, column_parts))]
    return [Shard(table, r, c, -1) for r, c in product(*map(pairwise, ends)) if r[0] < r[1]]


def _place(shards: list[Shard], costs: dict[int, float], ranks: int, memory: float, rowwise: bool) -> list[Shard] | None:
    """Return the shards with their owners, or None if they do not fit."""
    load, used, placed = [0.0] * ranks, [0] * ranks, list[Shard]()
    for shard in shards:
        size, taken = _bytes(shard.height, shard.width, rowwise), {other.owner for other in placed if other.table == shard.table}
        free = [rank for rank in range(ranks) if rank not in taken and used[rank] + size <= memory]
        if not free:
            return None
        owner = min(free, key=lambda rank: (load[rank], used[rank], rank))
        load[owner], used[owner] = load[owner] + costs[shard.table], used[owner] + size
        placed.append(shard._replace(owner=owner))
    return placed
