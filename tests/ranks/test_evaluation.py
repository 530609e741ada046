"""Metrics and predictions do not depend on the number of ranks, nor on uneven shards."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.data import Loader
from hpcai.dist import collectives
from hpcai.dist.collectives import gather_distinct, gather_rows_to_first
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from hpcai.train import Step, evaluate, predict
from hpcai.train.metrics import MetricSums
from tests.index_source import IndexSource
from tests.ranks.launch import on_ranks


class Rows(IndexSource):
    def sample(self, index: int, epoch: int) -> torch.Tensor:
        return torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def measured(mesh: Mesh, count: int, batch: int) -> tuple[dict[str, float], list[list[float]]]:
    torch.manual_seed(0)
    step = Step(nn.Linear(3, 2), lambda m, b: {"loss": m(b).mean()}, StepConfig(precision="fp64"), mesh)
    loader = Loader(Rows(count), batch, mesh, name="v", shuffle=False, last_batch="keep")
    values = evaluate(step, lambda m, b: {"mean": m(b).mean(), "rms": (m(b).square().sum(), 2 * len(b))}, loader)
    return values, predict(step, lambda m, b: {"y": m(b)}, loader).get("y", torch.zeros(0)).tolist()


@pytest.mark.parametrize("count, batch", [(13, 4), (5, 8), (17, 16), (8, 2)])
def test_cut_equals_whole(count: int, batch: int) -> None:
    values, rows = on_ranks({"replicate": 1}, measured, count, batch)[0]
    assert len(rows) == count
    for axes in ({"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}):
        for rank, (found, again) in enumerate(on_ranks(axes, measured, count, batch)):
            assert found == pytest.approx(values, rel=1e-12)
            assert np.allclose(sorted(again), [] if rank else sorted(rows), rtol=1e-12), "only the first process has rows"


# ---- sums of tensors

MESHES = [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}]
SIZES: dict[str, tuple[int, ...]] = {
    "all have some": (5, 3, 7, 1), "two have none": (9, 0, 0, 7), "the last has all": (0, 0, 0, 16), "nobody has any": (0, 0, 0, 0),
}  # fmt: skip
BINS, FEATURES = 32, 3


def rows(count: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    mixed = torch.tensor([[2.0, 1, 0], [0, 1, 3], [0, 0, 1]], dtype=torch.float64)
    features = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator) @ mixed
    scores = torch.randint(0, BINS, (count,), generator=generator)
    return features, scores, torch.arange(count) % 3 == 0


def area(signal: torch.Tensor, background: torch.Tensor) -> float:
    """The chance that a signal scores above a background, of counts by score; as much as half where they tie.   [K], [K]"""
    signal, background = signal.double(), background.double()
    below = background.cumsum(0) - background
    return float((signal * (below + background / 2)).sum() / (signal.sum() * background.sum()))


def covariance(total: torch.Tensor, outer: torch.Tensor, count: torch.Tensor) -> dict[str, float]:
    mean = total / count
    found = outer / count - mean.outer(mean)
    return {f"cov_{i}{j}": found[i, j] for i in range(FEATURES) for j in range(i + 1)}


def told(features: torch.Tensor, scores: torch.Tensor, signal: torch.Tensor) -> dict[str, Any]:
    return {
        "mean": features.mean(),
        "auc": ((scores[signal].bincount(minlength=BINS), scores[~signal].bincount(minlength=BINS)), area),
        "covariance": ((features.sum(0), features.T @ features, torch.tensor(len(features))), covariance),
    }


def added(mesh: Mesh, sizes: tuple[int, ...]) -> tuple[dict[str, float], list[int], list[str]]:
    """Return metrics of ranks with shards of the rows, in batches of 3; collectives by dtype; metrics finished on this rank."""
    axis, measured, done = mesh["replicate"], MetricSums(), list[str]()
    parts = [sum(sizes[r :: axis.size]) for r in range(axis.size)]
    first = sum(parts[: axis.rank])
    for start in range(first, first + parts[axis.rank], 3):
        stop = min(start + 3, first + parts[axis.rank])
        values = told(*(whole[start:stop] for whole in rows()))
        values["auc"] = values["auc"][0], lambda *whole: done.append("auc") or area(*whole)
        measured.add(values, stop - start)
    with mock.patch.object(torch_dist, "all_reduce", wraps=torch_dist.all_reduce) as sent:
        found = measured.reduce(axis, mesh.device, uneven=True)
    return found, [str(call.args[0].dtype) for call in sent.call_args_list], done


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sums_of_tensors_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    features, scores, signal = (whole.numpy() for whole in rows())
    every = np.cov(features.T, ddof=0)
    pairs = [(a > b) + (a == b) / 2 for a in scores[signal] for b in scores[~signal]]
    for axes in MESHES:
        ranks = on_ranks(axes, added, sizes)
        assert all(found == ranks[0][0] for found, _, _ in ranks), "the very same numbers on all"
        found = ranks[0][0]
        if not sum(sizes):
            assert found == {}
            continue
        assert found["auc"] == np.mean(pairs), axes
        assert found["mean"] == pytest.approx(features.mean(), rel=1e-12)
        assert [found[f"cov_{i}{j}"] for i in range(3) for j in range(i + 1)] == pytest.approx(every[np.tril_indices(3)], rel=1e-12)
        assert sum(len(done) for _, _, done in ranks) == len(ranks) // axes["replicate"], "finished once in each line of copies"
        if axes["replicate"] > 1:
            assert all(sent == ["torch.int64", "torch.float64", "torch.int64"] for _, sent, _ in ranks), "names, each dtype"


def fetched(mesh: Mesh, kind: str) -> tuple[str, list[Any]]:
    counts = [0, 3, 5, 0]
    first = sum(counts[: mesh.rank])
    values = torch.arange(2 * first, 2 * (first + counts[mesh.rank])).view(-1, 2).to(getattr(torch, kind))
    found = gather_rows_to_first(values, mesh["replicate"])
    return str(found.dtype), found.tolist()


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("kind", ["bfloat16", "bool"])
def test_rows_of_all_ranks_are_gathered_on_the_first_in_pieces(kind: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_CHUNK", 7)
    monkeypatch.setattr(collectives, "_MMAP_FROM", 1 if mapped else 1 << 30)
    (dtype, rows), *others = on_ranks({"replicate": 4}, fetched, kind, fresh=True)
    assert dtype == f"torch.{kind}" and rows == torch.arange(16).view(8, 2).to(getattr(torch, kind)).tolist()
    assert others == [(dtype, [])] * 3


def told_apart(mesh: Mesh, values: list[Any]) -> dict[int, Any]:
    with mock.patch.object(torch_dist, "all_gather_object", wraps=torch_dist.all_gather_object) as gathered:
        found = gather_distinct(values[mesh.rank], mesh.peers)
    return found | {-1: gathered.call_count}


@pytest.mark.parametrize(
    ("values", "found", "gathered"),
    [(["a", "a", "a"], {0: "a"}, 0), ([None, "a", "a"], {1: "a"}, 0), ([None] * 3, {}, 0), (["a", None, "b"], {0: "a", 2: "b"}, 1)],
)
def test_what_all_have_is_told_once(values: list[Any], found: dict[int, Any], gathered: int) -> None:
    assert on_ranks({"replicate": 3}, told_apart, values) == [found | {-1: gathered}] * 3
