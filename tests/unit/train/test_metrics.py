"""Sums of tensors: their accumulation, and the scalars that metrics compute from them."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.errors import ConfigError
from hpcai.settings import StepConfig
from hpcai.train import Step
from hpcai.train.metrics import MetricSums

HERE, CPU = dist.single_process()["replicate"], torch.device("cpu")


def numbers(*batches: dict[str, Any]) -> dict[str, float]:
    measured = MetricSums()
    for batch in batches:
        measured.add(batch, 2)
    return measured.reduce(HERE, CPU)


def test_tensors_are_added_and_finished_once_beside_means_and_pairs() -> None:
    calls = []

    def finish(whole: torch.Tensor, count: torch.Tensor) -> dict[str, Any]:
        calls.append((whole.dtype, count.dtype, whole.device.type))
        return {"low": whole[0] / count, "high": (whole[1] / count).numpy()}

    def batch(k: float) -> dict[str, Any]:
        sums = torch.tensor([k, 2 * k]), torch.tensor(2)
        return {"mean": torch.tensor(k), "pair": (torch.tensor(k), 3), "power": (sums, finish)}

    found = numbers(batch(1.0), batch(4.0))
    assert found == {"high": 2.5, "low": 1.25, "mean": 2.5, "pair": 5 / 6}
    assert list(found) == sorted(found) and all(type(value) is float for value in found.values())
    assert calls == [(torch.float64, torch.int64, "cpu")]


def test_integers_are_added_exactly_and_floats_as_float64() -> None:
    large, small = 2**62, 2.0**-30
    found: list[torch.Tensor] = []
    parts = [(torch.tensor([[large]]), torch.tensor([True, False]), torch.tensor([1.0, 1.0])),
             (torch.tensor([[1]]), torch.tensor([True, True]), torch.tensor([small, small]))]  # fmt: skip
    numbers(*({"n": (part, lambda *sums: found.extend(sums) or 0)} for part in parts))
    assert found[0].tolist() == [[large + 1]] and found[1].tolist() == [2, 1] and found[2].tolist() == [1 + small] * 2


def test_values_of_a_metric_are_not_modified() -> None:
    mine = torch.ones(3, dtype=torch.float64)
    assert numbers(*[{"n": (mine, lambda whole: whole.sum())}] * 3) == {"n": 9}
    assert mine.tolist() == [1, 1, 1]


def test_changing_shapes_and_results_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"metric 'n': its sums are float64 \[2\] in one batch and float64 \[3\] in another"):
        numbers({"n": (torch.ones(3), torch.sum)}, {"n": (torch.ones(2), torch.sum)})
    with pytest.raises(ConfigError, match="metric 'n': a sum is a list; expected"):
        numbers({"n": ([[1.0]], torch.sum)})
    for wrong in (torch.ones(2), None, "many", np.ones(3)):
        with pytest.raises(ConfigError, match="metric 'n': finish returns no number"):
            numbers({"n": (torch.ones(2), lambda whole, wrong=wrong: wrong)})


def test_a_name_that_two_metrics_give_is_refused() -> None:
    for other in (torch.tensor(1.0), (torch.ones(1), torch.sum)):
        with pytest.raises(ConfigError, match="mae: returned by more than one metric"):
            numbers({"mae": other, "n": (torch.ones(2), lambda whole: {"mae": 1.0})})


def test_a_step_that_gives_tensors_is_refused() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": model(batch).mean(), "spectrum": (batch, torch.sum)}

    for words in ({}, {"accumulate": 2}):
        step = Step(torch.nn.Linear(2, 1), loss, StepConfig(**words), dist.single_process())
        with pytest.raises(ConfigError, match="the loss function returned spectrum as .sums, finish., which an eval"):
            step(torch.ones(2, 2))
