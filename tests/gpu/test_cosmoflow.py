"""CosmoFlow on a GPU: losses of the CPU, bf16 close to fp32, no host synchronization in a step, and peak memory."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.models import cosmoflow
from hpcai.settings import StepConfig
from hpcai.train.metrics import MetricSums
from tests.gpu.device import GPU, GRAPH, cuda_only, disable_tf32, forbid_synchronization

SIZE = 32


def make_batch(seed: int, count: int = 4, device: torch.device | str = GPU) -> cosmoflow.Batch:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (count, SIZE, SIZE, SIZE, 4), dtype=torch.int16, generator=generator)
    return cosmoflow.Batch(counts.to(device), (2 * torch.rand(count, 4, generator=generator) - 1).to(device))


def new_step(device: str = GPU, dropout: float = 0.0, **overrides: Any) -> train.Step:
    torch.manual_seed(0)
    model = cosmoflow.CosmoFlow(cosmoflow.CosmoFlowConfig(size=SIZE, filters=8, dropout=dropout))
    return train.Step(model, cosmoflow.loss, StepConfig(**overrides), dist.single_process(torch.device(device)), graph=GRAPH)


def train_losses(step: train.Step) -> list[float]:
    return [step(make_batch(i, device=step.mesh.device), 1e-3)["loss"].item() for i in range(6)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_gpu_trains_as_the_cpu_does(optimizer: str) -> None:
    disable_tf32()
    cfg = {"optimizer": optimizer, "ema_decay": 0.9, "clip": 1.0}
    assert train_losses(new_step(**cfg)) == pytest.approx(train_losses(new_step("cpu", **cfg)), rel=2e-4)


def test_bf16_is_close_to_fp32() -> None:
    assert train_losses(new_step(precision="bf16")) == pytest.approx(train_losses(new_step()), rel=3e-2)


@pytest.mark.parametrize("words", [{"optimizer": "sgd", "clip": 1.0, "ema_decay": 0.9}, {"precision": "bf16", "accumulate": 2}])
def test_a_step_reads_nothing_from_the_gpu(words: dict) -> None:
    step, sums = new_step(**words), MetricSums()
    batches = [make_batch(i) for i in range(4)]
    step(batches[0])
    with forbid_synchronization():
        for batch in batches[1:]:
            sums.add(step(batch, 1e-3), 4)


@cuda_only
def test_peak_memory_is_no_more_than_a_plain_networks() -> None:
    from hpcai.cli.bench.app import AppBenchmark
    from hpcai.cli.benchmarks import find_workload

    case, peaks = ["model.size=64", "data.batch=4"], {}
    for kind in ("plain", "ours"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        bench = AppBenchmark("cosmoflow", find_workload("cosmoflow"), ["memory", *case, "--precision", "bf16"])
        peaks[kind] = bench.peak(kind, case)["mb"]
    assert peaks["ours"] <= peaks["plain"] * 1.02
