"""OpenFold on a GPU: what the CPU computes, in bf16, captured with two numbers of passes, compiled by blocks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai import dist, train
from hpcai.models.openfold import OpenFold, OpenFoldConfig, loss
from hpcai.models.openfold.layers import Dropout
from hpcai.settings import StepConfig
from tests import proteins
from tests.gpu.machine import GPU, GRAPH, cuda_alone, precisely


def network(device: str, dtype: torch.dtype = torch.float32, checkpoint: bool = False) -> OpenFold:
    """Tiny, without dropout; the last weights of its branches, 0 in a new one, are drawn, or no gradient would pass."""
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny", checkpoint=checkpoint))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.rate = 0.0
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model.to(device, dtype)


def batch(device: str, dtype: torch.dtype = torch.float32, passes: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Two proteins of 16 residues, of which ``seed`` says which residues come first."""
    features = {name: x.to(device) for name, x in proteins.random_batch([16, 16], dtype=dtype).items()}
    features["msa_feat"] = features["msa_feat"].roll(seed, 2)
    return {name: x[..., :passes].contiguous() for name, x in features.items()}


def learnt(device: str, dtype: torch.dtype = torch.float32, narrow: bool = False) -> tuple[float, dict[str, Tensor]]:
    model = network(device, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=narrow):
        value = loss(model, batch(device, dtype))["loss"]
    value.backward()
    return value.item(), {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def losses(device: str, checkpoint: bool = False, **words: Any) -> tuple[list[float], train.Step]:
    """Of nine steps, each third of which has one pass, the others two."""
    step = train.Step(network(device, checkpoint=checkpoint), loss, StepConfig.model_validate({"optimizer": "adam", **words}),
                      dist.single_process(torch.device(device)), graph=GRAPH)  # fmt: skip
    return [step(batch(device, passes=passes, seed=seed))["loss"].item() for seed, passes in enumerate((2, 1, 2) * 3)], step


@pytest.mark.parametrize(("dtype", "small"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_it_is_what_the_cpu_computes(dtype: torch.dtype, small: float) -> None:
    precisely()
    (value, found), (right, expected) = learnt(GPU, dtype), learnt("cpu", dtype)
    assert value == pytest.approx(right, rel=small) and found.keys() == expected.keys() and len(found) > 100
    largest = max(float(gradient.norm()) for gradient in expected.values())
    off = {name: float((found[name] - gradient).norm() / (gradient.norm() + 1e-2 * largest)) for name, gradient in expected.items()}
    # Some are 0 but for rounding.
    assert max(off.values()) <= small, "; ".join(f"{part:.0e} {name}" for name, part in off.items() if part > small)


def test_bf16_is_close() -> None:
    assert learnt(GPU, narrow=True)[0] == pytest.approx(learnt(GPU)[0], rel=2e-2)


@cuda_alone  # one_hot reads its input on a CPU
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager_with_two_numbers_of_passes(precision: str, checkpoint: bool) -> None:
    eager, _ = losses(GPU, precision=precision, checkpoint=checkpoint)
    captured, step = losses(GPU, precision=precision, checkpoint=checkpoint, capture="whole")
    small = 1e-4 if precision == "fp32" else 1e-2  # the gradient of gather adds up in any order
    assert captured == pytest.approx(eager, rel=small)
    assert step._capture is not None and step._capture.recorded() == 2


@cuda_alone
def test_compiled_by_blocks_is_close() -> None:
    eager, _ = losses(GPU)
    compiled, step = losses(GPU, compile="blocks")
    assert compiled == pytest.approx(eager, rel=1e-3) and step.news()[0].startswith("compiled")
