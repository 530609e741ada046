"""Hybrid parallelism of DLRM-dcnv2: replicas of the dense network share the embedding tables; and the AUC of scores on all
ranks."""

from fractions import Fraction
from itertools import pairwise

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.dist.collectives import all_gather_numbers, all_gather_object
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.models.dlrm.model import DLRM
from hpcai.models.dlrm.objective import Batch, auc_of_wins, count_scores, count_wins
from hpcai.parallel.embedding import shard_embedding_bags
from hpcai.parallel.embedding_plan import ShardingPlan

_QUANTILES = 64  # of each rank, by which ranges of scores are chosen: no rank gets much more than its part


def parallelize(model: DLRM, mesh: Mesh, plan: ShardingPlan | None = None) -> DLRM:
    """Shard the embedding tables over the replicas by ``plan``, in place, and return ``model``. Without a plan every rank has all
    tables. Raises MeshError or ConfigError if mesh or plan do not fit."""
    mesh.check_axes("DLRM", "replicate")
    cfg, ranks = model.cfg, mesh["replicate"].size
    plan = plan or ShardingPlan(cfg.rows, cfg.hotness, cfg.dim, ranks, (), cfg.adagrad_rowwise)
    shard_embedding_bags(model.embedding, mesh, plan)
    return model


def exchange(model: DLRM, batch: Batch) -> Batch:
    """Send the ids of ``batch`` to the ranks of their tables, as a ``batch_transform``: outside of a captured step, and before it
    is split into micro-batches. Without it, the step does so. A collective call."""
    seam = model.embedding.exchange
    return batch if seam is None else batch._replace(ids=seam.exchange(batch.ids))


def auc_of_ranks(scores: Tensor, labels: Tensor, axis: Axis) -> Fraction:
    """Return the AUC of the scores of all ranks along ``axis``, as ``objective.auc``. A collective call, after which all ranks
    return the same, or raise DataError.   [N] each, N of each rank

    Each rank counts the pairs in one range of scores. It gets distinct scores with their numbers of positives and negatives: no
    rank has all scores, and one that many samples have is one row of each rank."""
    problem = ""
    try:
        counts = count_scores(scores, labels)
    except DataError as error:
        problem = str(error)
    if problems := [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_object(problem, axis)) if text]:
        raise DataError(problems[0])
    if axis.size > 1:
        counts = _by_range(*counts, axis)
    _, positives, negatives = counts
    local = [count_wins(positives, negatives), int(positives.sum()), int(negatives.sum())]
    rows = all_gather_numbers(local, axis, torch.int64).tolist()
    below = [sum(n for _, _, n in rows[:rank]) for rank in range(axis.size)]  # negatives in lower ranges
    wins = sum(wins + 2 * p * lower for (wins, p, _), lower in zip(rows, below))
    return auc_of_wins(wins, *(sum(column) for column in list(zip(*rows))[1:]))


def _by_range(keys: Tensor, positives: Tensor, negatives: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Send each score to the rank of its range; the ranges of ranks ascend."""
    index = torch.linspace(0, max(len(keys) - 1, 0), _QUANTILES, dtype=torch.float64, device=keys.device).long()
    local = keys[index].tolist() if len(keys) else [torch.inf] * _QUANTILES
    quantiles = all_gather_numbers(local, axis).flatten().sort().values.to(keys)
    inner = quantiles[[len(quantiles) * rank // axis.size for rank in range(1, axis.size)]]
    edges = [0, *torch.searchsorted(keys, inner).tolist(), len(keys)]
    sent = [b - a for a, b in pairwise(edges)]
    received = all_gather_numbers(sent, axis, torch.int64)[:, axis.rank].tolist()
    rows = torch.stack((keys.view(torch.int64), positives, negatives), 1)
    output = rows.new_empty(sum(received), 3)
    torch_dist.all_to_all_single(output, rows, received, sent, group=axis.group)
    keys, inverse = torch.unique(output[:, 0].contiguous().view(torch.float64), return_inverse=True)
    counts = output.new_zeros(len(keys), 2).index_add_(0, inverse, output[:, 1:])
    return keys, counts[:, 0], counts[:, 1]
