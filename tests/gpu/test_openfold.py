"""OpenFold on a GPU: gradients of the CPU, bf16, capture with two numbers of passes, compilation by blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai import dist, train
from hpcai.models.openfold import OpenFold, loss
from hpcai.settings import StepConfig
from tests import proteins
from tests.gpu.device import GPU, GRAPH, cuda_only, disable_tf32


def build_network(device: str, dtype: torch.dtype = torch.float32, checkpoint: bool = False) -> OpenFold:
    return proteins.without_dropout(proteins.random_network(torch.float32, checkpoint=checkpoint)).to(device, dtype)


def make_batch(device: str, dtype: torch.dtype = torch.float32, passes: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Return two proteins of 16 residues, with MSA features rolled by ``seed`` residues."""
    features = {name: x.to(device) for name, x in proteins.random_batch([16, 16], dtype=dtype).items()}
    features["msa_feat"] = features["msa_feat"].roll(seed, 2)
    return {name: x[..., :passes].contiguous() for name, x in features.items()}


def loss_and_gradients(device: str, dtype: torch.dtype = torch.float32, bf16: bool = False) -> tuple[float, dict[str, Tensor]]:
    model = build_network(device, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        value = loss(model, make_batch(device, dtype))["loss"]
    value.backward()
    return value.item(), {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def train_losses(device: str, checkpoint: bool = False, **overrides: Any) -> tuple[list[float], train.Step]:
    """Return the losses of nine steps with 2, 1, 2, 2, 1, 2, ... passes, and the step."""
    cfg = StepConfig.model_validate({"optimizer": "adam", **overrides})
    mesh = dist.single_process(torch.device(device))
    step = train.Step(build_network(device, checkpoint=checkpoint), loss, cfg, mesh, graph=GRAPH)
    return [step(make_batch(device, passes=passes, seed=seed))["loss"].item() for seed, passes in enumerate((2, 1, 2) * 3)], step


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_it_is_what_the_cpu_computes(dtype: torch.dtype, tolerance: float) -> None:
    disable_tf32()
    (value, actual), (expected_value, expected) = loss_and_gradients(GPU, dtype), loss_and_gradients("cpu", dtype)
    assert value == pytest.approx(expected_value, rel=tolerance) and actual.keys() == expected.keys() and len(actual) > 100
    max_norm = max(float(gradient.norm()) for gradient in expected.values())
    # The norm of some gradients is only rounding.
    errors = {name: float((actual[name] - g).norm() / (g.norm() + 1e-2 * max_norm)) for name, g in expected.items()}
    assert max(errors.values()) <= tolerance, "; ".join(f"{x:.0e} {name}" for name, x in errors.items() if x > tolerance)


def test_bf16_is_close() -> None:
    assert loss_and_gradients(GPU, bf16=True)[0] == pytest.approx(loss_and_gradients(GPU)[0], rel=2e-2)


@cuda_only  # one_hot reads its input on a CPU
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager_with_two_numbers_of_passes(precision: str, checkpoint: bool) -> None:
    eager, _ = train_losses(GPU, precision=precision, checkpoint=checkpoint)
    captured, step = train_losses(GPU, precision=precision, checkpoint=checkpoint, capture="whole")
    tolerance = 1e-4 if precision == "fp32" else 1e-2  # the gradient of gather is summed in any order
    assert captured == pytest.approx(eager, rel=tolerance)
    assert step._capture is not None and step._capture.recorded() == 2


@cuda_only
def test_compiled_by_blocks_is_close() -> None:
    eager, _ = train_losses(GPU)
    compiled, step = train_losses(GPU, compile="blocks")
    assert compiled == pytest.approx(eager, rel=1e-3) and step.news()[0].startswith("compiled")
