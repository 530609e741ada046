"""DimeNet++ on a GPU: gradients of the CPU, deterministic, captured, compiled, in bf16."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.models.dimenet import Batch, DimeNetConfig, Sizes, collate, loss
from hpcai.settings import StepConfig
from tests.atoms import random_network, random_structure
from tests.gpu.device import DEVICE, GPU, GRAPH, cuda_only

CFG = DimeNetConfig(hidden=64, output=64, interaction=32, blocks=2, cutoff=4.0, most=None)


def make_batch(device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    structures = [random_structure(seed + k, CFG, 3 + k) for k in range(4)]
    graph = collate(structures, Sizes(20, 3000, 110, 110, 7)).to(device, dtype)
    generator = torch.Generator().manual_seed(seed)
    forces, mask = torch.randn(20, 3, generator=generator).to(dtype), (torch.arange(20) < 18).to(dtype)
    energy = torch.randn(4, generator=generator, dtype=torch.float64)
    return Batch(energy.to(device), forces.to(device), mask.to(device), graph)


def compute_gradients(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = random_network(CFG, dtype=dtype).to(device)
    loss(model, make_batch(device, dtype=dtype))["loss"].backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_it_is_what_the_cpu_computes() -> None:
    for actual, expected in zip(compute_gradients(GPU, torch.float64), compute_gradients("cpu", torch.float64)):
        assert (actual - expected).norm() <= 1e-9 * expected.norm()


def test_every_run_has_the_same_bits() -> None:
    first, *others = (compute_gradients(GPU) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))


def train_losses(**overrides: Any) -> tuple[list[float], train.Step]:
    dtype = torch.float64 if overrides["precision"] == "fp64" else torch.float32
    model, cfg = random_network(CFG, dtype=dtype), StepConfig(lr=1e-4, **overrides)
    step = train.Step(model, loss, cfg, dist.single_process(DEVICE), graph=GRAPH)
    return [step(make_batch(GPU, seed, dtype))["loss"].item() for seed in range(6)], step


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
def test_captured_is_eager(precision: str) -> None:
    eager, _ = train_losses(precision=precision)
    captured, step = train_losses(precision=precision, capture="whole")
    assert captured == pytest.approx(eager, rel=1e-4 if precision == "fp32" else 2e-2)
    assert step._capture is not None and step._capture.recorded() == 1


def test_bf16_is_close() -> None:
    fp32, _ = train_losses(precision="fp32")
    bf16, _ = train_losses(precision="bf16")
    assert bf16 == pytest.approx(fp32, rel=5e-2)


@cuda_only
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_compiled_is_close(precision: str) -> None:
    eager, _ = train_losses(precision=precision)
    compiled, _ = train_losses(precision=precision, compile="whole")
    assert compiled == pytest.approx(eager, rel=1e-9 if precision == "fp64" else 1e-3)
