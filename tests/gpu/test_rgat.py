"""R-GAT on a GPU: losses of the CPU, and captured steps equal to eager ones."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.data.collate import tree_map
from hpcai.models import rgat
from hpcai.settings import StepConfig
from tests.gpu.device import DEVICE, GPU, GRAPH, disable_tf32, forbid_synchronization
from tests.subgraphs import random_batch

RELATIONS = "paper___cites___paper", "author___rev_written_by___paper", "paper___written_by___author"
CFG = rgat.RGATConfig(features=32, hidden=64, heads=4, layers=2, relations=RELATIONS, num_classes=5)


def new_step(device: str, **overrides: Any) -> train.Step:
    torch.manual_seed(0)
    cfg, mesh = StepConfig(**overrides), dist.single_process(torch.device(device))
    model = rgat.RGAT(CFG.model_copy(update={"dropout": 0.0}))
    return train.Step(model, rgat.loss, cfg, mesh, counts=rgat.counted, graph=GRAPH)


def make_batch(device: torch.device, seed: int) -> rgat.Batch:
    batch = random_batch(seed, RELATIONS, 32, 40, classes=5)
    return tree_map(batch, lambda x: x.to(device).half() if x.is_floating_point() else x.to(device))


def train_losses(step: train.Step) -> list[float]:
    return [float(step(make_batch(step.mesh.device, i), 1e-3)["loss"]) for i in range(5)]


def test_the_gpu_trains_as_the_cpu_does() -> None:
    disable_tf32()
    assert train_losses(new_step(GPU)) == pytest.approx(train_losses(new_step("cpu")), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step(GPU, precision=precision, capture=mode) for mode in ("none", "whole"))
    assert train_losses(captured) == train_losses(eager), "no sum has a random order"


def test_the_host_does_not_wait() -> None:
    model, batch = rgat.RGAT(CFG).to(DEVICE), make_batch(DEVICE, 0)
    with forbid_synchronization():
        rgat.loss(model, batch)["loss"].backward()
