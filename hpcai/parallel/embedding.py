"""Sharded embedding tables: ids travel to the ranks that hold their rows, and pooled embeddings travel back.

    shard_embedding_bags(bags, mesh, plan_shards(rows, hotness, dim, ranks=mesh["replicate"].size, memory=60e9, batch=65536))
    pending = bags.begin(bags.exchange.exchange(ids))            # the exchange may come before the step: shapes are static
    x = mlp(dense)                                               # while pooled embeddings travel, in the backward pass too
    pooled = bags.finish(pending)

Bags are padded, so that one all-to-all brings all ids. A shard of rows pools the ids of its rows, and the parts are added. The
gradients that come back are those of all ranks: a row is updated by its owner, once.
B samples of a rank, n ranks, T tables, D their dim, K ids of a sample, W channels that a rank pools
"""

from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dist.collectives import all_gather_numbers, all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.dynamo import UntransformedFunction
from hpcai.errors import ConfigError, MeshError
from hpcai.nn.embedding_bag import EmbeddingBags, TableGroup, check_ids
from hpcai.parallel.axial import AxisSeam
from hpcai.parallel.embedding_plan import Shard, ShardingPlan
from hpcai.parallel.expert import SendRows
from hpcai.parallel.sharding import ShardSpec


@torch.no_grad()
def shard_embedding_bags(bags: EmbeddingBags, mesh: Mesh, plan: ShardingPlan) -> None:
    """Shard the tables of ``bags``, in place, over the replicas of ``mesh`` by ``plan``. Tables without shards stay replicated:
    they are updated alike on all ranks, by the sum of their gradients. Raises ConfigError for a plan of other tables or ranks."""
    axis = mesh["replicate"]
    actual, planned = ((x.rows, x.hotness, x.dim, x.rowwise) for x in (bags, plan))
    if actual != planned or plan.ranks != axis.size:
        raise ConfigError(f"the plan is for tables {planned} on {plan.ranks} ranks, but there are {actual} on {axis.size}")
    if axis.size == 1:
        return
    if mesh.sizes["evaluate"]:
        raise MeshError("processes of mesh.evaluate would need all embedding tables; set mesh.evaluate to 0")
    owned = {shard.table: shard for shard in plan.owned(axis.rank)}
    for number in sorted({shard.table for shard in plan.shards}):
        shard, table = owned.get(number, Shard(number, (0, 0), (0, plan.dim), axis.rank)), bags.tables[number]
        table.first_row = shard.rows[0]
        for parameter in (table.weight, table.sum):
            columns = (0, 1) if plan.rowwise and parameter is table.sum else shard.columns
            ranges = ((shard.rows,) if shard.height else (), (columns,))
            spec = ShardSpec(tuple(parameter.shape), ranges, (axis,))
            parameter.data = parameter.data[slice(*shard.rows), slice(*columns)].clone()
            parameter.shard_spec = spec
    bags.exchange = Exchange(axis.init_group(), bags, plan)
    bags.groups = [*bags.exchange.owned, bags.exchange.replicated]


class Exchange(AxisSeam):
    """The exchange of ids and pooled embeddings: the seam ``exchange`` of ``EmbeddingBags``."""

    def __init__(self, axis: Axis, bags: EmbeddingBags, plan: ShardingPlan) -> None:
        super().__init__(axis)
        self.plan, self.send = plan, SendRows(axis, 0, 0)
        columns = list(pairwise(accumulate(bags.hotness, initial=0)))
        self.columns = [[columns[shard.table] for shard in plan.owned(rank)] for rank in range(axis.size)]
        self.local_columns = [columns[table] for table in plan.replicated]

        def group(tables: list[int], all_reduce: Any = None) -> TableGroup:
            return TableGroup([bags.tables[t] for t in tables], [bags.hotness[t] for t in tables], bags.tables[0], all_reduce)

        by_width = groupby(plan.owned(axis.rank), lambda shard: shard.width)
        self.owned = [group([shard.table for shard in shards]) for _, shards in by_width] or [group([])]
        self.replicated = group(list(plan.replicated), lambda dense: all_reduce_(dense, axis))

    @torch.no_grad()
    def exchange(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Send ids to the ranks that own their tables. All ranks have equally many samples; those that lack some pad them with -1.

        Shape: [B, K] -> ids of replicated tables [B, K'], and those that this rank looks up, of all ranks [B, n, K"]
        """
        if ids.device.type == "cpu":
            check_ids(ids, self.plan.rows, self.plan.hotness)
        blocks = [_take(ids, columns).flatten() for columns in self.columns]
        count, n = self.plan.ids(self.axis.rank), self.axis.size
        received = ids.new_empty(n * len(ids) * count)
        sizes = [len(ids) * count] * n, [len(block) for block in blocks]
        torch_dist.all_to_all_single(received, torch.cat(blocks), *sizes, group=self.axis.group)
        return _take(ids, self.local_columns), received.view(n, len(ids), count).transpose(0, 1).contiguous()

    def begin(self, ids: Any, *sizes: int) -> Any:
        """Pool what this rank owns, and start to send it. In an evaluation, ranks may have uneven numbers of samples."""
        samples = None
        if isinstance(ids, Tensor):
            if not self.training:
                samples, most = len(ids), int(all_gather_numbers([len(ids)], self.axis, torch.int64).max())
                ids = torch.cat((ids, ids.new_full((most - samples, ids.shape[1]), -1)))
            ids = self.exchange(ids)
        local, owned = ids
        count, n, hotness = len(owned), self.axis.size, [sum(group.layout.hotness) for group in self.owned]
        parts = owned.transpose(0, 1).reshape(n * count, -1).split(hotness, 1)
        pooled = torch.cat([group.pool(part) for group, part in zip(self.owned, parts)], 1)
        sent, received = [count * pooled.shape[1]] * n, [count * self.plan.width(rank) for rank in range(n)]
        return self.send.begin(pooled.view(-1, 1), *sent, *received), self.replicated.pool(local), samples

    def finish(self, handle: Any) -> Tensor:
        pending, local, samples = handle
        return _Assemble.apply(self.send.finish(pending), local, self.plan)[:samples]


def _take(x: Tensor, columns: list[tuple[int, int]]) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, a:b] for a, b in columns)], 1)


class _Assemble(UntransformedFunction):
    """Add the parts of all owners.   parts [sum of B W, 1], by owner, local [B, T' D] -> [B, T D]"""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, local: Tensor, plan: ShardingPlan) -> Tensor:
        ctx.plan, samples = plan, len(local)
        out = local.new_zeros(samples, len(plan.rows), plan.dim)
        for rank, block in enumerate(parts.view(-1).split([samples * plan.width(rank) for rank in range(plan.ranks)])):
            shards = plan.owned(rank)
            for shard, piece in zip(shards, block.view(samples, plan.width(rank)).split([shard.width for shard in shards], 1)):
                out[:, shard.table, slice(*shard.columns)] += piece
        for table, piece in zip(plan.replicated, local.split(plan.dim, 1)):
            out[:, table] = piece
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plan: ShardingPlan = ctx.plan
        grad = grad.unflatten(1, (len(plan.rows), plan.dim))
        empty = grad[:, 0, :0]
        blocks = [torch.cat([empty, *(grad[:, shard.table, slice(*shard.columns)] for shard in plan.owned(rank))], 1)
                  for rank in range(plan.ranks)]  # fmt: skip
        local = torch.cat([empty, *(grad[:, table] for table in plan.replicated)], 1)
        return torch.cat([block.flatten() for block in blocks])[:, None], local, None
