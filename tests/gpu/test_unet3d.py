"""3D U-Net on a GPU, in channels-last: values and gradients of the CPU, captured equals eager, bf16 within tolerance."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from hpcai import dist, train
from hpcai.models import unet3d
from hpcai.nn import GroupNorm, InstanceNorm
from hpcai.settings import StepConfig
from tests.gpu.device import DEVICE, GPU, GRAPH, disable_tf32

SGD = {"optimizer": "sgd", "momentum": 0.9}


def build_model() -> unet3d.UNet3D:
    torch.manual_seed(0)
    return unet3d.UNet3D(unet3d.UNet3DConfig(filters=(8, 16, 32), window=(32, 32, 32)))


def make_batch(device: str, seed: int, size: int = 2) -> unet3d.Batch:
    image = torch.randn(size, 32, 32, 32, generator=torch.Generator().manual_seed(seed))
    return unet3d.Batch(image.to(device), (image > 0.5).to(torch.uint8).to(device))


@pytest.mark.parametrize("shape", [(1, 32, 16, 16, 16), (2, 32, 8, 9, 10), (3, 6, 7, 5, 4), (2, 91, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(("groups", "activation"), [(None, "relu"), (None, "silu"), (1, "relu"), (1, "silu"), (1, None)])
def test_norms_of_samples_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, form: torch.memory_format, groups: int | None, activation: Any,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).to(dtype).to(DEVICE).contiguous(memory_format=form) for _ in range(2))
    norm: Any = InstanceNorm(shape[1], activation) if groups is None else GroupNorm(groups, shape[1], activation)
    norm64 = deepcopy(norm).double()
    torch.nn.init.normal_(norm.weight)
    norm64.load_state_dict(norm.state_dict())

    def run_layer(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        return [t.double().cpu() for t in (y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy))]

    actual = run_layer(norm.to(DEVICE), 3 + x, dy)
    expected = run_layer(norm64, (3 + x).double().cpu().contiguous(), dy.double().cpu().contiguous())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


def loss_and_gradients(device: str, bf16: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    model = build_model().to(device)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        value = unet3d.loss(model, make_batch(device, 0))["loss"]
    value.backward()
    return value.item(), {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}


def check_against_cpu(bf16: bool, of_loss: float, of_gradient: float, of_largest: float) -> None:
    """Compare the loss relative to its value, and gradients relative to their norms and the largest of them."""
    (value, actual), (expected_value, expected) = loss_and_gradients(GPU, bf16), loss_and_gradients("cpu")
    assert value == pytest.approx(expected_value, rel=of_loss)
    largest = max(float(g.norm()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((actual[name] - gradient).norm()) < of_gradient * float(gradient.norm()) + of_largest * largest, name


def test_forward_and_backward_are_those_of_the_cpu() -> None:
    disable_tf32()
    check_against_cpu(False, 1e-5, 1e-3, 1e-5)


def test_bf16_is_close() -> None:
    check_against_cpu(True, 2e-2, 0.15, 0.02)


def test_every_volume_inside_is_channels_last() -> None:
    model, tensors = build_model().to(DEVICE), []
    for layer in model.modules():
        if isinstance(layer, InstanceNorm):
            layer.register_forward_hook(lambda _, x, y: tensors.extend([x[0], y]))
    model(torch.randn(1, 1, 32, 32, 32, device=GPU))
    assert len(tensors) >= 20 and all(t.is_contiguous(memory_format=torch.channels_last_3d) for t in tensors)


def new_step(**overrides: Any) -> train.Step:
    return train.Step(build_model(), unet3d.loss, StepConfig(**overrides, **SGD), dist.single_process(DEVICE), graph=GRAPH)


def train_losses(step: train.Step) -> list[float]:
    return [step(make_batch(GPU, i), 1e-2)["loss"].item() for i in range(6)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step(precision=precision, capture=mode) for mode in ("none", "whole"))
    assert train_losses(captured) == pytest.approx(train_losses(eager), rel=1e-3 if precision == "fp32" else 2e-2)
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name].float(), tensor.float(), rtol=5e-2, atol=5e-3, msg=name)
