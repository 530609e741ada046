"""Diffusion models on a GPU: captured steps with counter-based noise in channels-last memory; steps and samples equal the CPU's."""

from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.models import diffusion
from hpcai.models.diffusion import Batch, Condition, Diffusion, DiffusionConfig
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GRAPH, disable_tf32

UNET: dict[str, Any] = {
    "inputs": 2, "outputs": 2, "field": 2, "tokens": None, "channels": (16, 32), "blocks": 1, "attention": ("none", "self"),
    "middle": "self", "heads": (1, 2), "groups": 4, "periodic": (True, False), "zero": False,
}  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "maps": {"unet": UNET},
    "volumes": {"unet": {**UNET, "dims": 3, "periodic": (True,) * 3, "attention": ("none", "none"), "patch": 2}},
    "dit": {"unet": None, "dit": {"inputs": 2, "outputs": 2, "size": 16, "layers": 2, "heads": 2, "head": 16, "classes": 5}},
    "flux": {
        "unet": None,
        "flux": {"inputs": 8, "double": 1, "single": 1, "heads": 2, "head": 16, "tokens": 16, "pooled": 16, "turned": (4, 6, 6)},
    },
    "latents": {
        "unet": {**UNET, "field": 0, "periodic": (), "tokens": 16, "attention": ("none", "cross"), "middle": "cross"},
        "latents": {"tokens": (5, 16)}, "unconditional": 0.3,
    },
}  # fmt: skip
FLOW = {"objective": {"prediction_type": "flow", "times": "logit_normal"}, "sampler": {"method": "heun", "steps": 3}}


def build_model(network: str) -> Diffusion:
    torch.manual_seed(0)
    return Diffusion(DiffusionConfig.model_validate({**NETWORKS[network], **FLOW}), seed=5)


def make_batch(network: str, number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)
    sides = (16,) * (3 if network == "volumes" else 2)
    sample = torch.randn(4, 4 if network == "latents" else 2, *sides, generator=draw)
    indices = torch.arange(4) + 4 * number
    parts: dict[str, Any] = {
        "maps": {"field": torch.randn(4, 2, 4, 4, generator=draw)},
        "volumes": {"field": torch.randn(4, 2, 4, 4, 4, generator=draw)},
        "dit": {"classes": torch.arange(4)},
        "latents": {"tokens": torch.randn(4, 5, 16, generator=draw).half()},
        "flux": {"tokens": torch.randn(4, 5, 16, generator=draw), "pooled": torch.randn(4, 16, generator=draw)},
    }[network]
    full = Batch(sample, indices, torch.full((4,), number), **parts)
    return Batch(*(None if x is None else x.to(DEVICE) for x in full))


def new_step(network: str, **overrides: Any) -> Step:
    cfg = StepConfig(lr=1e-3, clip=1.0, **overrides)
    return Step(build_model(network), diffusion.loss, cfg, dist.single_process(DEVICE), graph=GRAPH)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("network", NETWORKS)
def test_captured_is_eager(network: str, precision: str) -> None:
    disable_tf32()
    steps = [new_step(network, precision=precision, capture=mode, ema_decay=0.9) for mode in ("none", "whole")]
    for number in range(5):
        expected, actual = (float(step(make_batch(network, number))["loss"]) for step in steps)
        assert actual == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 2e-2)
    assert steps[1]._capture is not None and steps[1]._capture.recorded() == 1


@pytest.mark.parametrize("network", NETWORKS)
def test_a_step_is_that_of_a_cpu(network: str) -> None:
    disable_tf32()
    step = new_step(network)
    cpu_step = Step(build_model(network), diffusion.loss, StepConfig(lr=1e-3, clip=1.0), dist.single_process(torch.device("cpu")))
    for number in range(3):
        batch = make_batch(network, number)
        cpu_batch = Batch(*(None if x is None else x.cpu() for x in batch))
        assert float(step(batch)["loss"]) == pytest.approx(float(cpu_step(cpu_batch)["loss"]), rel=1e-3)


@pytest.mark.parametrize("network", ["maps", "volumes"])
def test_members_are_those_of_a_cpu(network: str) -> None:
    disable_tf32()
    model, cpu_model = build_model(network).to(DEVICE), build_model(network)
    field = make_batch(network, 1).field
    assert field is not None
    size = tuple(make_batch(network, 1).sample.shape[1:])
    members = model.sample(Condition(field=field), 2, size=size).cpu()
    torch.testing.assert_close(members, cpu_model.sample(Condition(field=field.cpu()), 2, size=size), rtol=0, atol=2e-3)
