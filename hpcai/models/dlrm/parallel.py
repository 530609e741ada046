"""Hybrid parallelism of DLRM-dcnv2: replicas of the dense network share the embedding tables; and the AUC of scores on all ranks."""

from fractions import Fraction

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.dist.collectives import all_gather_numbers, all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.models.dlrm.model import DLRM
from hpcai.models.dlrm.objective import Batch, auc_of_counts, count_scores, count_wins
from hpcai.parallel.embedding import shard_embedding_bags
from hpcai.parallel.embedding_plan import ShardingPlan

_QUANTILES = 64  # of each rank, by which ranges of scores are chosen: no rank gets much more than its part


def parallelize(model: DLRM, mesh: Mesh, plan: ShardingPlan | None = None) -> DLRM:
    """Shard the embedding tables over the replicas by ``plan``, in place, and return ``model``; without a plan, or on one rank, they
    are not sharded. Raises MeshError or ConfigError if mesh or plan do not fit."""
    mesh.check_axes("DLRM", "replicate")
    if mesh["replicate"].size > 1:
        shard_embedding_bags(model.embedding, mesh, plan or replicated_plan(model, mesh))
    return model


def replicated_plan(model: DLRM, mesh: Mesh) -> ShardingPlan:
    """Return the plan without shards."""
    bags = model.embedding
    return ShardingPlan(bags.rows, bags.hotness, bags.dim, mesh["replicate"].size, (), bags.rowwise)


def exchange(model: DLRM, batch: Batch) -> Batch:
    """Send the ids of ``batch`` to the ranks of their tables, as a ``batch_transform``: outside of a captured step, and before it is
    split into micro-batches. Without it, the step does so. A collective call."""
    seam = model.embedding.exchange
    return batch if seam is None else batch._replace(ids=seam.exchange(batch.ids))


def auc_of_ranks(scores: Tensor, labels: Tensor, axis: Axis) -> Fraction:
    """Return the AUC of the scores of all ranks along ``axis``, the same on each, as ``objective.auc``. A collective call.

    Each rank counts the pairs in one range of scores: distinct scores are sent there with their numbers of positives and negatives, so
    that no rank has all of them, and one score that many samples have takes one row of each rank.   [N] each, N of each rank
    """
    problem: DataError | None = None
    try:
        keys, positives, negatives = count_scores(scores, labels)
    except DataError as error:
        problem, keys = error, scores[:0].double()
        positives = negatives = keys.long()
    if all_reduce_(torch.tensor(float(problem is not None), device=scores.device), axis):
        raise problem or DataError("another rank has scores that are NaN, or labels that are not 0 or 1; see its message")
    if axis.size > 1:
        keys, positives, negatives = _by_range(keys, positives, negatives, axis)
    totals = torch.stack((positives.sum(), negatives.sum()))
    before = _numbers(totals, axis)[: axis.rank, 1].sum()
    wins = count_wins(positives, negatives) + 2 * int(totals[0]) * int(before)
    total = all_reduce_(torch.tensor([wins, *totals.tolist()], device=scores.device), axis)
    return auc_of_counts(*(int(x) for x in total))


def _numbers(values: Tensor, axis: Axis) -> Tensor:
    return all_gather_numbers(values.tolist(), axis, values.dtype)


def _by_range(keys: Tensor, positives: Tensor, negatives: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Send each score to the rank of its range; the ranges of ranks ascend."""
    n = axis.size
    index = torch.linspace(0, max(len(keys) - 1, 0), _QUANTILES, dtype=torch.float64).long()
    local = keys[index.to(keys.device)] if len(keys) else keys.new_full((_QUANTILES,), torch.nan)
    quantiles = _numbers(local, axis).flatten()
    quantiles = quantiles[~quantiles.isnan()].sort().values
    edges = quantiles[[len(quantiles) * rank // n for rank in range(1, n)]].to(keys) if len(quantiles) else keys.new_zeros(n - 1)
    bounds = [0, *torch.searchsorted(keys, edges).tolist(), len(keys)]
    sent = [b - a for a, b in zip(bounds, bounds[1:])]
    received = _numbers(torch.tensor(sent), axis)[:, axis.rank].tolist()
    rows = torch.stack((keys.view(torch.int64), positives, negatives), 1)
    output = rows.new_empty(sum(received), 3)
    torch_dist.all_to_all_single(output, rows, received, sent, group=axis.group)
    keys, inverse = torch.unique(output[:, 0].contiguous().view(torch.float64), return_inverse=True)
    counts = output.new_zeros(len(keys), 2).index_add_(0, inverse, output[:, 1:])
    return keys, counts[:, 0], counts[:, 1]
