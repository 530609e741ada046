"""A training step of DLRM beside torch's EmbeddingBag and Adagrad, in CPU seconds of one run, and one on tables without room for
dense gradients."""

import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import pytest
import torch

from apps.dlrm.benchmarks import with_torch_bags
from hpcai import dist, train
from hpcai.models.dlrm import DLRM, Batch, DLRMConfig, loss

pytestmark = pytest.mark.timing
SIZES: dict[str, Any] = {"dim": 32, "bottom": (64, 32), "cross_rank": 64, "top": (128, 64, 1), "hotness": (20, 10, 3, 1, 1)}
BATCH, SMALL = 1024, (400_000, 40_000, 4000, 400, 40)


def make_batches(rows: tuple[int, ...], count: int) -> list[Batch]:
    """Return batches whose ids have a Zipf-like distribution."""
    draw, batches = torch.Generator().manual_seed(0), []
    for _ in range(count):
        ids = [(n * torch.rand(BATCH, most, generator=draw) ** 3).int() for n, most in zip(rows, SIZES["hotness"])]
        label = (torch.rand(BATCH, generator=draw) < 0.1).float()
        batches.append(Batch(torch.randn(BATCH, 13, generator=draw), torch.cat(ids, 1), label))
    return batches


def test_a_step_is_faster_than_with_dense_gradients() -> None:
    cfg, batches = DLRMConfig(rows=SMALL, **SIZES), make_batches(SMALL, 8)
    torch.manual_seed(0)
    ours = DLRM(cfg)
    peer = with_torch_bags(DLRM(cfg))
    for layer, table in zip(peer.embedding.layers, ours.embedding.tables):
        layer.weight.data.copy_(table.weight)
    peer.load_state_dict({k: v for k, v in ours.state_dict().items() if not k.startswith("embedding")}, strict=False)
    step = train.Step(ours, loss, train.StepConfig(optimizer="adagrad", lr=4e-3, eps=1e-8), dist.single_process())
    optimizer = torch.optim.Adagrad(peer.parameters(), 4e-3, eps=1e-8)

    def peer_step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = loss(peer, batch)["loss"]
        value.backward()
        optimizer.step()
        return value

    def measure(run: Any, batch: Batch) -> tuple[float, float]:
        start = time.process_time()
        value = run(batch)
        return time.process_time() - start, value.item()

    pairs = [[measure(run, batch) for run in (peer_step, lambda some: step(some, 4e-3)["loss"])] for batch in batches]
    for (_, theirs), (_, own) in pairs:
        assert own == pytest.approx(theirs, rel=1e-4)
    theirs, own = (median(pair[which][0] for pair in pairs[1:]) for which in (0, 1))
    print(f"torch's EmbeddingBag and Adagrad {theirs:.4f} s, ours {own:.4f} s: {theirs / own:.2f}")
    assert theirs / own > 1.5


def test_a_step_on_a_hundred_million_rows_takes_the_memory_of_tables_and_states() -> None:
    code = "from tests.slow.test_bench_dlrm import large_step; large_step()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    tables, peak, _ = map(float, result.stdout.split())
    assert peak < tables + 1.0


def large_step() -> None:
    """Print the GB of tables and states, those of the peak, and the CPU seconds of a step."""
    torch.set_num_threads(1)
    rows = (50_000_000, 30_000_000, 15_000_000, 4_999_000, 1000)
    cfg, batches = DLRMConfig(rows=rows, **SIZES | {"dim": 16, "bottom": (64, 16)}), make_batches(rows, 4)
    with train.seeds(0):
        model = DLRM(cfg)
    step = train.Step(model, loss, train.StepConfig(optimizer="adagrad", lr=4e-3, eps=1e-8), dist.single_process())
    seconds = []
    for batch in batches:
        start = time.process_time()
        assert step(batch, 4e-3)["loss"].isfinite()
        seconds.append(time.process_time() - start)
    print(2 * 4 * 16 * sum(rows) / 1e9, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, median(seconds[1:]))
