"""One GPU: batch norm in Triton is the plain twin's, DeepCAM trains as on the CPU, captured as eager, without a host read."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist, train
from hpcai.kernels import batchnorm
from hpcai.models import deepcam
from hpcai.nn import BatchNorm
from hpcai.settings import StepConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")]
SHAPES = [(2, 728, 48, 72), (1, 48, 192, 288), (2, 91, 12, 18), (3, 6, 7, 5), (2, 32, 8, 16, 16)]


def passed(norm: nn.Module, x: torch.Tensor, plus: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    plus = None if plus is None else plus.detach().clone().requires_grad_()
    y = norm(x, plus)
    y.backward(dy)
    found = [y, x.grad, *([] if plus is None else [plus.grad]), *(p.grad for p in norm.parameters()), *norm.buffers()]
    return [t.detach().double().cpu() for t in found if t is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_plus", [False, True])
def test_batch_norm_in_triton_is_that_of_float64(shape: tuple[int, ...], dtype: torch.dtype, with_plus: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, plus, dy = (torch.randn(shape).to(dtype).cuda().contiguous(memory_format=form) for _ in range(3))
    norm = BatchNorm(shape[1], relu=True)
    nn.init.normal_(norm.weight)
    wide = BatchNorm(shape[1], relu=True).double()
    wide.load_state_dict(norm.state_dict())
    assert "triton" in str(batchnorm._passes(x))
    found = passed(norm.cuda(), 3 + x, plus if with_plus else None, dy)
    expected = passed(wide, (3 + x).double().cpu(), plus.double().cpu() if with_plus else None, dy.double().cpu())
    small = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=small, atol=small * max(1.0, float(b.abs().max())))


def new_step(device: str, **words: Any) -> train.Step:
    torch.manual_seed(0)
    model = deepcam.DeepCam(deepcam.DeepCamConfig(divide=8, middle=2))
    return train.Step(model, deepcam.loss, StepConfig(**words), dist.alone(torch.device(device)))


def batch(device: str, seed: int) -> deepcam.Batch:
    generator = torch.Generator().manual_seed(seed)
    fields = torch.rand(2, 96, 144, 16, generator=generator)
    return deepcam.Batch(fields.to(device), (fields[..., 0] * 3).to(torch.uint8).to(device))


def losses(step: train.Step, device: str) -> list[float]:
    return [step(batch(device, i), 1e-3)["loss"].item() for i in range(6)]


LAMB = {"optimizer": "lamb", "eps": 1e-6, "weight_decay": 0.01, "clip": 1.0, "decay_names": ("*",)}


def test_the_gpu_trains_as_the_cpu_does() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    assert losses(new_step("cuda", **LAMB), "cuda") == pytest.approx(losses(new_step("cpu", **LAMB), "cpu"), rel=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_is_eager(precision: str) -> None:
    eager, captured = (new_step("cuda", precision=precision, capture=how, **LAMB) for how in ("none", "whole"))
    assert losses(captured, "cuda") == pytest.approx(losses(eager, "cuda"), rel=1e-3 if precision == "fp32" else 2e-2)
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name].float(), tensor.float(), rtol=5e-2, atol=5e-3, msg=name)


def test_a_step_reads_nothing_from_the_gpu() -> None:
    step, data = new_step("cuda", precision="bf16", **LAMB), [batch("cuda", i) for i in range(3)]
    step(data[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in data[1:]:
            step(part)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.timing
def test_batch_norm_with_its_rectifier_is_faster_than_torchs_two_operations() -> None:
    x = torch.randn(4, 728, 48, 72, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    ours, theirs = BatchNorm(728, relu=True).cuda(), nn.BatchNorm2d(728).cuda()
    dy = torch.randn_like(x)

    def seconds(function: Any) -> float:
        for _ in range(5):
            function()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(50):
            function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    a = x.clone().requires_grad_()
    fused = seconds(lambda: ours(a).backward(dy))
    apart = seconds(lambda: torch.relu(theirs(a)).backward(dy))
    print(f"ours {fused / 50:.3f} ms, torch's {apart / 50:.3f} ms")
    assert fused < apart
