"""Metrics and predictions do not depend on the number of ranks, nor on uneven shards."""

from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.data import Loader
from hpcai.dist import collectives
from hpcai.dist.collectives import all_gather_object, gather_distinct, gather_rows_to_first
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import DataError
from hpcai.settings import StepConfig
from hpcai.train import Step, evaluate, predict
from hpcai.train.evaluation import _eval_mode_batches
from hpcai.train.metrics import MetricSums, PerSample
from tests.index_source import IndexSource
from tests.ranks.launch import on_ranks


class Rows(IndexSource):
    def sample(self, index: int, epoch: int) -> torch.Tensor:
        return torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def evaluate_and_predict(mesh: Mesh, count: int, batch: int, shard: Any = "none") -> tuple[dict[str, float], list[list[float]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2)), nn.Linear(3, 2))  # two blocks
    step = Step(model, lambda m, b: {"loss": m(b).mean()}, StepConfig(precision="fp64", shard=shard), mesh)
    loader = Loader(Rows(count), batch, mesh, name="v", shuffle=False, last_batch="keep")
    values = evaluate(step, lambda m, b: {"mean": m(b).mean(), "rms": (m(b).square().sum(), 2 * len(b))}, loader)
    return values, predict(step, lambda m, b: {"y": m(b)}, loader).get("y", torch.zeros(0)).tolist()


@pytest.mark.parametrize("count, batch", [(13, 4), (5, 8), (17, 16), (8, 2)])
def test_sharded_equals_full(count: int, batch: int) -> None:
    values, rows = on_ranks({"replicate": 1}, evaluate_and_predict, count, batch)[0]
    assert len(rows) == count
    for axes in ({"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}):
        for shard in ("none", "weights") if batch >= axes["replicate"] and "depth" not in axes else ("none",):
            for rank, (metrics, predictions) in enumerate(on_ranks(axes, evaluate_and_predict, count, batch, shard)):
                assert metrics == pytest.approx(values, rel=1e-12), shard
                assert np.allclose(sorted(predictions), [] if rank else sorted(rows), rtol=1e-12), "only the first process has rows"


def test_a_rank_without_samples_is_named_if_others_need_its_weights() -> None:
    mesh = Mesh({"replicate": 4}, world=4)
    step: Any = SimpleNamespace(mesh=mesh, cfg=StepConfig(shard="weights"))
    loader = Loader(Rows(8), 2, mesh, name="v", shuffle=False, last_batch="keep")
    with pytest.raises(DataError, match=r"replica 0 of 4 has no sample to evaluate.*batches of at least 4 samples"):
        list(_eval_mode_batches(step, nn.Identity(), loader))


def largest_gap(values: torch.Tensor, axis: Axis) -> torch.Tensor:
    return torch.cat(all_gather_object(values, axis)).sort().values.diff().max()


def evaluate_gap(mesh: Mesh, count: int, batch: int) -> float | str:
    step = Step(nn.Linear(3, 1), lambda m, b: {"loss": m(b).mean()}, StepConfig(precision="fp64"), mesh)
    loader = Loader(Rows(count), batch, mesh, name="v", shuffle=False, last_batch="keep")
    try:
        return evaluate(step, lambda m, b: {"gap": PerSample((b.sum(1),), largest_gap)}, loader)["gap"]
    except DataError as error:
        return str(error)


def test_a_metric_of_all_samples_is_computed_by_all_ranks_together() -> None:
    expected = float(torch.stack([Rows(13).sample(k, 0).sum() for k in range(13)]).sort().values.diff().max())
    for axes in ({"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}):
        assert on_ranks(axes, evaluate_gap, 13, 4) == [expected] * prod(axes.values())
    text = "rank 0 of 4 has no sample for the metric gap; take batches of at least 4 samples"
    assert on_ranks({"replicate": 4}, evaluate_gap, 8, 2) == [text] * 4


# ---- sums of tensors

MESHES = [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}]
SIZES: dict[str, tuple[int, ...]] = {
    "all have some": (5, 3, 7, 1), "two have none": (9, 0, 0, 7), "the last has all": (0, 0, 0, 16), "none has any": (0, 0, 0, 0),
}  # fmt: skip
BINS, FEATURES = 32, 3


def rows(count: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mixed = torch.tensor([[2.0, 1, 0], [0, 1, 3], [0, 0, 1]], dtype=torch.float64)
    features = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator) @ mixed
    scores = torch.randint(0, BINS, (count,), generator=generator)
    return features, scores, torch.arange(count) % 3 == 0


def area(signal: torch.Tensor, background: torch.Tensor) -> float:
    """Return the probability that a signal scores above a background, from counts by score; ties count half.   [K], [K]"""
    signal, background = signal.double(), background.double()
    below = background.cumsum(0) - background
    return float((signal * (below + background / 2)).sum() / (signal.sum() * background.sum()))


def covariance(total: torch.Tensor, outer: torch.Tensor, count: torch.Tensor) -> dict[str, float]:
    mean = total / count
    matrix = outer / count - mean.outer(mean)
    return {f"cov_{i}{j}": matrix[i, j] for i in range(FEATURES) for j in range(i + 1)}


def metric_values(features: torch.Tensor, scores: torch.Tensor, signal: torch.Tensor) -> dict[str, Any]:
    return {
        "mean": features.mean(),
        "auc": ((scores[signal].bincount(minlength=BINS), scores[~signal].bincount(minlength=BINS)), area),
        "covariance": ((features.sum(0), features.T @ features, torch.tensor(len(features))), covariance),
    }


def reduce_metrics(mesh: Mesh, sizes: tuple[int, ...]) -> tuple[dict[str, float], list[int], list[str]]:
    """Return metrics of ranks with shards of the rows, in batches of 3; collectives by dtype; metrics finished on this rank."""
    axis, sums, finished = mesh["replicate"], MetricSums(), list[str]()
    parts = [sum(sizes[r :: axis.size]) for r in range(axis.size)]
    first = sum(parts[: axis.rank])
    for start in range(first, first + parts[axis.rank], 3):
        stop = min(start + 3, first + parts[axis.rank])
        values = metric_values(*(tensors[start:stop] for tensors in rows()))
        values["auc"] = values["auc"][0], lambda *tensors: finished.append("auc") or area(*tensors)
        sums.add(values, stop - start)
    with mock.patch.object(torch_dist, "all_reduce", wraps=torch_dist.all_reduce) as sent:
        metrics = sums.reduce(axis, mesh.device, uneven=True)
    return metrics, [str(call.args[0].dtype) for call in sent.call_args_list], finished


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sums_of_tensors_equal_those_of_one_process(sizes: tuple[int, ...]) -> None:
    features, scores, signal = (tensor.numpy() for tensor in rows())
    cov = np.cov(features.T, ddof=0)
    pairs = [(a > b) + (a == b) / 2 for a in scores[signal] for b in scores[~signal]]
    for axes in MESHES:
        ranks = on_ranks(axes, reduce_metrics, sizes)
        assert all(metrics == ranks[0][0] for metrics, _, _ in ranks), "bitwise equal on all ranks"
        metrics = ranks[0][0]
        if not sum(sizes):
            assert metrics == {}
            continue
        assert metrics["auc"] == np.mean(pairs), axes
        assert metrics["mean"] == pytest.approx(features.mean(), rel=1e-12)
        assert [metrics[f"cov_{i}{j}"] for i in range(3) for j in range(i + 1)] == pytest.approx(cov[np.tril_indices(3)], rel=1e-12)
        assert sum(len(finished) for _, _, finished in ranks) == len(ranks) // axes["replicate"], "on one rank of each group"
        if axes["replicate"] > 1:
            assert all(dtypes == ["torch.int64", "torch.float64", "torch.int64"] for _, dtypes, _ in ranks), "names, each dtype"


def gather_rows(mesh: Mesh, dtype: str) -> tuple[str, list[Any]]:
    counts = [0, 3, 5, 0]
    first = sum(counts[: mesh.rank])
    values = torch.arange(2 * first, 2 * (first + counts[mesh.rank])).view(-1, 2).to(getattr(torch, dtype))
    rows = gather_rows_to_first(values, mesh["replicate"])
    return str(rows.dtype), rows.tolist()


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("kind", ["bfloat16", "bool"])
def test_rows_of_all_ranks_are_gathered_on_the_first_in_pieces(kind: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_CHUNK", 7)
    monkeypatch.setattr(collectives, "_MMAP_FROM", 1 if mapped else 1 << 30)
    (dtype, rows), *others = on_ranks({"replicate": 4}, gather_rows, kind, fresh=True)
    assert dtype == f"torch.{kind}" and rows == torch.arange(16).view(8, 2).to(getattr(torch, kind)).tolist()
    assert others == [(dtype, [])] * 3


def gather_values(mesh: Mesh, values: list[Any]) -> dict[int, Any]:
    with mock.patch.object(torch_dist, "all_gather_object", wraps=torch_dist.all_gather_object) as gathered:
        by_rank = gather_distinct(values[mesh.rank], mesh.peers)
    return by_rank | {-1: gathered.call_count}


@pytest.mark.parametrize(
    ("values", "expected", "calls"),
    [(["a", "a", "a"], {0: "a"}, 0), ([None, "a", "a"], {1: "a"}, 0), ([None] * 3, {}, 0), (["a", None, "b"], {0: "a", 2: "b"}, 1)],
)
def test_values_are_gathered_from_all_ranks_only_if_they_differ(values: list[Any], expected: dict[int, Any], calls: int) -> None:
    assert on_ranks({"replicate": 3}, gather_values, values) == [expected | {-1: calls}] * 3
