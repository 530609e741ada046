"""Evaluation by the training ranks, inline or in the background, or by dedicated ranks: the same metrics of the same steps."""

import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.models import cosmoflow
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.spatial import SpatialPartition
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train import evaluation
from hpcai.train.loop import fit
from hpcai.train.run import Result
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

Rows = list[tuple[int, dict[str, float]]]
EVERY = 3  # steps of an epoch, which ends with an evaluation


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def batches(count: int, size: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 5, generator=generator) for _ in range(count)]


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    return {"loss": (model(batch[:, :4])[:, 0] - batch[:, 4]).square().mean()}


def metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    assert not model.training and not torch.is_grad_enabled()
    error = (model(batch[:, :4])[:, 0] - batch[:, 4]).abs()
    return {"mae": (error.sum(), len(batch)), "mse": (error.square().sum(), len(batch)), "quarters": (error.histc(8, 0, 2), ratios)}


def ratios(counts: torch.Tensor) -> dict[str, float]:
    """Return the fraction of the errors below 2 in each quarter of the range."""
    return {f"quarter_{k}": part.sum() / counts.sum() for k, part in enumerate(counts.chunk(4))}


def run(mesh: Mesh, evaluate: str = "wait", score: Any = metric, cfg: dict[str, Any] | None = None, **settings: Any) -> Result:
    torch.manual_seed(0)
    model = Network()
    sum_gradients_over(model, mesh["depth"])
    step = Step(model, loss, StepConfig(ema_decay=0.8, lr=0.01, **settings), mesh)
    axis = mesh["replicate"]
    training = [b.chunk(axis.size)[axis.rank] for b in batches(EVERY, 8, 1)]
    validation = [b.chunk(axis.size)[axis.rank] for b in batches(2, 8, 2)]
    train_cfg = TrainConfig(**{"epochs": 3, "report_every": 2, "evaluate": evaluate} | (cfg or {}))
    return fit(step, training, train_cfg, validation=validation, evaluate=score)


def summarize_run(mesh: Mesh, *args: Any, **kwargs: Any) -> tuple[Rows, list[float], str, bool]:
    result = run(mesh, *args, **kwargs)
    return [(r.step, r.values) for r in result.evaluations], [r["loss"] for r in result.reports], result.reason, mesh.trains


def run_cases(mesh: Mesh, evaluate: str, cases: list[dict[str, Any]]) -> list[Any]:
    return [summarize_run(mesh, evaluate, **settings) for settings in cases]


CASES = [{}, {"shard": "optimizer"}, {"precision": "bf16-params"}, {"shard": "weights"}]


@cache
def inline_results(**axes: int) -> list[list[Any]]:
    """Return the results of each rank with each of the settings, if training waits for evaluation."""
    return on_ranks(axes, run_cases, "wait", CASES)


@pytest.mark.parametrize("axes", [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}], ids=str)
def test_background_evaluation_equals_inline_evaluation_exactly(axes: dict[str, int]) -> None:
    for actual, expected in zip(on_ranks(axes, run_cases, "background", CASES[:3]), inline_results(**axes), strict=True):
        assert actual == expected[:3]


@pytest.mark.parametrize(
    "axes", [{"replicate": 1, "evaluate": 1}, {"replicate": 2, "evaluate": 2}, {"replicate": 2, "depth": 2, "evaluate": 2}], ids=str
)
def test_dedicated_ranks_compute_the_same_metrics(axes: dict[str, int]) -> None:
    expected = inline_results(**{name: size for name, size in axes.items() if name != "evaluate"})[0]
    for rank in on_ranks(axes, run_cases, "wait", CASES):
        for (rows, losses, reason, trains), inline, settings in zip(rank, expected, CASES, strict=True):
            assert reason == "finished", settings
            if not trains:
                continue
            assert [step for step, _ in rows] == [EVERY, 2 * EVERY, 3 * EVERY], settings
            assert losses == pytest.approx(inline[1], rel=1e-5), settings
            for (_, metrics), (_, values) in zip(rows, inline[0]):
                assert metrics == pytest.approx(values, rel=1e-5), settings


def train_sharded_model(mesh: Mesh, settings: dict[str, Any]) -> tuple[Rows, list[float]]:
    """Train CosmoFlow, whose ranks exchange slices in every forward pass, with an evaluation pending in each step."""
    cfg = cosmoflow.CosmoFlowConfig(size=16, filters=4, blocks=3, dropout=0.0)
    torch.manual_seed(0)
    step = Step(cosmoflow.parallelize(cosmoflow.CosmoFlow(cfg), mesh), cosmoflow.loss, StepConfig(lr=1e-3), mesh)
    axis, part = mesh["replicate"], SpatialPartition.from_mesh(mesh).local_slices((16, 16, 16))

    def universes(count: int, seed: int) -> list[cosmoflow.Batch]:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 50, (count, axis.size, 16, 16, 16, 4), generator=generator, dtype=torch.int16)
        targets = torch.rand(count, axis.size, 4, generator=generator)
        own = slice(axis.rank, axis.rank + 1)
        return [cosmoflow.Batch(c[(own, *part)], t[own]) for c, t in zip(counts, targets)]

    train_cfg = TrainConfig(epochs=3, report_every=100, **settings)
    result = fit(step, universes(3, 1), train_cfg, validation=universes(3, 2), evaluate=cosmoflow.error)
    return [(r.step, r.values) for r in result.evaluations], [r["loss"] for r in result.reports]


@pytest.mark.parametrize("axes", [{"depth": 2}, {"replicate": 2, "depth": 2}], ids=str)
def test_background_evaluation_of_a_sharded_replica_has_its_own_process_groups(axes: dict[str, int]) -> None:
    expected = on_ranks(axes, train_sharded_model, {"evaluate": "wait"})
    assert [step for step, _ in expected[0][0]] == [3, 6, 9]
    assert on_ranks(axes, train_sharded_model, {"evaluate": "background"}) == expected


def train_with_slow_evaluation(mesh: Mesh, evaluate: str, step_file: Path) -> tuple[Rows, int]:
    """Train with an evaluation that ends only after training has continued; each step appends a byte to ``step_file``."""
    calls = 0

    def slow_metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        nonlocal calls
        evaluated, until = EVERY * (calls // 2 + 1), time.monotonic() + 20
        calls += 1
        while evaluated < 3 * EVERY and step_file.stat().st_size <= evaluated:
            assert time.monotonic() < until, "training waits for the evaluation"
            time.sleep(0.002)
        return metric(model, batch)

    def counted_loss(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        with step_file.open("ab") as file:
            file.write(b".")
        return loss(model, batch)

    step = Step(Network(), counted_loss, StepConfig(), mesh)
    cfg = TrainConfig(epochs=3, evaluate=evaluate, report_every=2)
    result = fit(step, batches(EVERY, 8, 1), cfg, validation=batches(2, 8, 2), evaluate=slow_metric)
    return [(r.step, r.values) for r in result.evaluations], result.progress.step


@pytest.mark.parametrize("axes, evaluate", [({"replicate": 1}, "background"), ({"replicate": 1, "evaluate": 1}, "wait")], ids=str)
def test_training_does_not_stop_for_an_evaluation(tmp_path: Path, axes: dict[str, int], evaluate: str) -> None:
    step_file = tmp_path / "done"
    step_file.touch()
    rows, steps = on_ranks(axes, train_with_slow_evaluation, evaluate, step_file)[0]
    assert steps == 3 * EVERY == step_file.stat().st_size and [step for step, _ in rows] == [EVERY, 2 * EVERY, 3 * EVERY]


def train_to_target(mesh: Mesh, evaluate: str) -> tuple[str, list[int], int]:
    """Train to a target, with results of background evaluation that arrive later on one rank."""
    original = evaluation.TrainingRanksEvaluation._evaluate

    def delayed(self: Any, weights: Any) -> Any:
        metrics = original(self, weights)
        time.sleep(0.02 * mesh.rank)
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation.TrainingRanksEvaluation, "_evaluate", delayed)
        result = run(mesh, evaluate, cfg={"epochs": 200, "metric": "mae", "target": 2.0, "report_every": 1})
    return result.reason, [r.step for r in result.evaluations], result.progress.step


@pytest.mark.parametrize("axes, evaluate", [({"replicate": 2}, "background"), ({"replicate": 2, "evaluate": 2}, "wait")])
def test_a_run_stops_on_all_ranks_when_a_result_reaches_the_target(axes: dict[str, int], evaluate: str) -> None:
    results = on_ranks(axes, train_to_target, evaluate)
    for reason, steps, last in results[:2]:
        assert reason == "target" and steps[0] == EVERY
        assert EVERY <= last == results[0][2] < 200 * EVERY, "all ranks stop at the same step, soon after the evaluated step"
    assert all(reason == "target" for reason, *_ in results)


def background_error(mesh: Mesh) -> str:
    def broken(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        raise RuntimeError("no such class")

    with pytest.raises(RuntimeError) as error:
        run(mesh, "background", broken)
    return str(error.value)


def test_an_error_in_the_background_is_raised_in_training() -> None:
    assert on_ranks({"replicate": 2}, background_error) == ["no such class"] * 2


def test_cached_validation_samples_are_read_once() -> None:
    epochs = []

    class Counted:
        samples, size = 24, 8

        def epoch(self, epoch: int) -> Any:
            epochs.append(epoch)
            return iter(batches(3, 8, 2))

        def news(self) -> list[str]:
            return []

    metrics = []
    for keep, times in ((True, 1), (False, 3)):
        epochs.clear()
        torch.manual_seed(0)
        step = Step(Network(), loss, StepConfig(), Mesh({}))
        cfg = TrainConfig(epochs=3, keep_validation=keep)
        metrics.append([r.values for r in fit(step, batches(6, 8, 1), cfg, validation=Counted(), evaluate=metric).evaluations])
        assert len(epochs) == times
    assert metrics[0] == metrics[1]


def test_the_background_thread_never_clears_the_autocast_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing takes a lock that the main thread may hold while it waits for the GIL."""
    threads: list[str] = []
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (threads.append(threading.current_thread().name), clear())[1])
    run(Mesh({}), "background", precision="bf16")
    assert "MainThread" in threads and "evaluation" not in threads
