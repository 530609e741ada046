"""BERT on a GPU: losses of the CPU, captured steps equal to eager ones, and packed attention with dropout."""

from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.kernels.packed_attention import Packing, packed_attention, reference
from hpcai.models import bert
from hpcai.settings import StepConfig
from tests.gpu.device import DEVICE, GPU, GRAPH, cuda_only, disable_tf32, forbid_synchronization

LAMB: dict[str, Any] = {"optimizer": "lamb", "eps": 1e-6, "weight_decay": 0.01, "clip": 1.0, "decay_names": ("*[!m].weight",)}
LENGTHS = torch.tensor([[20, 12, 0], [9, 9, 9], [32, 0, 0], [7, 0, 0]])


def new_step(device: str, **overrides: Any) -> train.Step:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocabulary": 96, "width": 64, "layers": 2, "heads": 4, "inner": 96, "positions": 32}
    model = bert.Bert(bert.BertConfig(**sizes, dropout=0.0, attention_dropout=0.0))
    cfg, mesh = StepConfig(**LAMB, **overrides), dist.single_process(torch.device(device))
    return train.Step(model, bert.loss, cfg, mesh, counts=bert.counted, graph=GRAPH)


def make_batch(device: torch.device, seed: int) -> bert.Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens, masked = torch.randint(5, 96, (4, 32), generator=draw), torch.randint(0, 7, (4, 6), generator=draw)
    targets, following = torch.randint(-1, 96, (4, 6), generator=draw), torch.randint(0, 2, (4, 3), generator=draw)
    parts = tokens, LENGTHS, masked, targets, tokens % 2, following.where(LENGTHS > 0, -1)
    return bert.Batch(*(x.to(device) for x in parts))


def train_losses(step: train.Step) -> list[float]:
    return [float(step(make_batch(step.mesh.device, i), 1e-3)["loss"]) for i in range(6)]


def test_the_gpu_trains_as_the_cpu_does() -> None:
    disable_tf32()
    assert train_losses(new_step(GPU)) == pytest.approx(train_losses(new_step("cpu")), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step(GPU, precision=precision, capture=mode) for mode in ("none", "whole"))
    for step in (eager, captured):
        step.model.bert.padded = True  # without effect on a GPU
    assert train_losses(captured) == pytest.approx(train_losses(eager), rel=1e-4 if precision == "fp32" else 1e-2)


@cuda_only
def test_packed_attention_is_that_of_a_mask_and_its_dropout_has_one_mask() -> None:
    draw, packing = torch.Generator(GPU).manual_seed(0), Packing.of(LENGTHS.to(DEVICE), 32)
    q, k, v, weight = (torch.randn(128, 4, 64, device=GPU, generator=draw, dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with forbid_synchronization():
        out = packed_attention(q, k, v, packing)
        grads = torch.autograd.grad(out, leaves, weight)
        dropped = packed_attention(q, k, v, packing, 0.3)
        (grad,) = torch.autograd.grad(dropped, v, weight)
    leaves64 = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(*leaves64, packing)
    for actual, exact in zip([out, *grads], [expected, *torch.autograd.grad(expected, leaves64, weight.double())], strict=True):
        assert float((actual.double() - exact).detach().norm()) <= 1e-2 * float(exact.detach().norm())
    # The output is linear in v, if forward and backward drop the same probabilities
    with torch.no_grad():
        totals = [float((a.double() * b.double()).sum()) for a, b in ((dropped, weight), (grad, v))]
        assert totals[0] == pytest.approx(totals[1], rel=1e-2, abs=0.05 * float(dropped.double().norm()))
        many = sum(packed_attention(q, k, v, packing, 0.3).double() for _ in range(300)) / 300
        assert float((many - expected).norm()) < 0.1 * float(expected.norm()) < float((dropped - expected).norm())
