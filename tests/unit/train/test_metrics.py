"""Metrics: accumulation of sums of tensors, and scalars computed from them."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.settings import StepConfig
from hpcai.train import Step
from hpcai.train.metrics import MetricSums

AXIS, CPU = dist.single_process()["replicate"], torch.device("cpu")


def reduce_batches(*batches: dict[str, Any]) -> dict[str, float]:
    sums = MetricSums()
    for batch in batches:
        sums.add(batch, 2)
    return sums.reduce(AXIS, CPU)


def test_tensors_are_added_and_finished_once_beside_means_and_pairs() -> None:
    calls = []

    def finish(total: torch.Tensor, count: torch.Tensor) -> dict[str, Any]:
        calls.append((total.dtype, count.dtype, total.device.type))
        return {"low": total[0] / count, "high": (total[1] / count).numpy()}

    def batch(k: float) -> dict[str, Any]:
        sums = torch.tensor([k, 2 * k]), torch.tensor(2)
        return {"mean": torch.tensor(k), "pair": (torch.tensor(k), 3), "power": (sums, finish)}

    result = reduce_batches(batch(1.0), batch(4.0))
    assert result == {"high": 2.5, "low": 1.25, "mean": 2.5, "pair": 5 / 6}
    assert list(result) == sorted(result) and all(type(value) is float for value in result.values())
    assert calls == [(torch.float64, torch.int64, "cpu")]


def test_integers_are_added_exactly_and_floats_as_float64() -> None:
    large, small = 2**62, 2.0**-30
    result: list[torch.Tensor] = []
    parts = [(torch.tensor([[large]]), torch.tensor([True, False]), torch.tensor([1.0, 1.0])),
             (torch.tensor([[1]]), torch.tensor([True, True]), torch.tensor([small, small]))]  # fmt: skip
    reduce_batches(*({"n": (part, lambda *sums: result.extend(sums) or 0)} for part in parts))
    assert result[0].tolist() == [[large + 1]] and result[1].tolist() == [2, 1] and result[2].tolist() == [1 + small] * 2


def test_values_of_a_metric_are_not_modified() -> None:
    values = torch.ones(3, dtype=torch.float64)
    assert reduce_batches(*[{"n": (values, lambda total: total.sum())}] * 3) == {"n": 9}
    assert values.tolist() == [1, 1, 1]


def test_changing_shapes_and_results_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"metric 'n': its sums are float64 \[2\] in one batch and float64 \[3\] in another"):
        reduce_batches({"n": (torch.ones(3), torch.sum)}, {"n": (torch.ones(2), torch.sum)})
    with pytest.raises(ConfigError, match="metric 'n': a sum is a list; expected"):
        reduce_batches({"n": ([[1.0]], torch.sum)})
    for result in (torch.ones(2), None, "many", np.ones(3)):
        with pytest.raises(ConfigError, match="metric 'n': finish returns no number"):
            reduce_batches({"n": (torch.ones(2), lambda total, result=result: result)})


def test_a_name_returned_by_two_metrics_is_refused() -> None:
    for other in (torch.tensor(1.0), (torch.ones(1), torch.sum)):
        with pytest.raises(ConfigError, match="mae: returned by more than one metric"):
            reduce_batches({"mae": other, "n": (torch.ones(2), lambda total: {"mae": 1.0})})


def test_a_training_loss_that_returns_tensor_sums_is_refused() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": model(batch).mean(), "spectrum": (batch, torch.sum)}

    for overrides in ({}, {"accumulate": 2}):
        step = Step(torch.nn.Linear(2, 1), loss, StepConfig(**overrides), dist.single_process())
        with pytest.raises(ConfigError, match="the loss function returned spectrum as .sums, finish., which an eval"):
            step(torch.ones(2, 2))
