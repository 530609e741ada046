"""One GPU: the same training as on the CPU, bf16 close to it, no host read in a step, resumed bit for bit."""


import pytest
import torch

from hpcai import dist, train
from hpcai.models import cosmoflow
from hpcai.settings import StepConfig
from hpcai.train.metrics import MetricSums
from tests.gpu.machine import GPU, cuda_alone, nothing_waits, precisely

SIZE = 32


def batch(device: str, count: int = 4, seed: int = 0) -> cosmoflow.Batch:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (count, SIZE, SIZE, SIZE, 4), dtype=torch.int16, generator=generator)
    return cosmoflow.Batch(counts.to(device), (2 * torch.rand(count, 4, generator=generator) - 1).to(device))


def new_step(device: str, dropout: float = 0.0, **words) -> train.Step:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = cosmoflow.CosmoFlow(cosmoflow.CosmoFlowConfig(size=SIZE, filters=8, dropout=dropout))
    return train.Step(model, cosmoflow.loss, StepConfig(**words), dist.single_process(torch.device(device)))


def losses(step: train.Step, device: str, steps: int = 6) -> list[float]:
    return [step(batch(device, seed=i), 1e-3)["loss"].item() for i in range(steps)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_gpu_trains_as_the_cpu_does(optimizer: str) -> None:
    precisely()
    words = {"optimizer": optimizer, "ema_decay": 0.9, "clip": 1.0}
    assert losses(new_step(GPU, **words), GPU) == pytest.approx(losses(new_step("cpu", **words), "cpu"), rel=2e-4)


def test_bf16_is_close_to_fp32() -> None:
    assert losses(new_step(GPU, precision="bf16"), GPU) == pytest.approx(losses(new_step(GPU), GPU), rel=3e-2)


@pytest.mark.parametrize("words", [{"optimizer": "sgd", "clip": 1.0, "ema_decay": 0.9}, {"precision": "bf16", "accumulate": 2}])
def test_a_step_reads_nothing_from_the_gpu(words: dict) -> None:
    step, sums = new_step(GPU, **words), MetricSums()
    data = [batch(GPU, seed=i) for i in range(4)]
    step(data[0])
    with nothing_waits():
        for part in data[1:]:
            sums.add(step(part, 1e-3), 4)


@cuda_alone
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
