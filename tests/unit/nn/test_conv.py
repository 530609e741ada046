"""Convolutions equal those of torch in values, gradients and keys, with every implementation."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hpcai.nn import Conv2d, Conv3d, ConvTranspose2d, ConvTranspose3d
from hpcai.nn.conv import _winograd_tile, channels_last, conv3d
from tests.reference_data import load_json

LAST = torch.channels_last_3d
LAYOUTS = [torch.contiguous_format, LAST]


def run_backward(function: Any, leaves: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check_equal(function: Any, reference: Any, leaves: list[torch.Tensor], tolerance: float) -> None:
    """Assert that outputs and gradients equal torch's in float64 and contiguous memory, within ``tolerance`` of the largest."""
    wide = [t.double().contiguous() for t in leaves]
    dy = torch.randn(reference(*wide).shape)
    for actual, expected in zip(run_backward(function, leaves, dy), run_backward(reference, wide, dy.double()), strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * max(1e-3, float(expected.abs().max())))


def call(function: Any, bias: Any, args: tuple[Any, ...], *leaves: torch.Tensor) -> torch.Tensor:
    return function(*leaves, *(bias or []), *args)


def with_weights(layer: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), weights)), (x,))


SHAPES = load_json("convolutions")["shapes"]  # channels in and out, volume, kernel, stride, padding, dilation


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_conv3d_equals_torch(case: list[Any], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    inputs, outputs, volume, *args = case
    kernel, stride, padding, dilation = ((x,) * 3 if isinstance(x, int) else tuple(x) for x in args)
    for batch, groups, bias, dtype in itertools.product((1, 2), (1, 2), (False, True), (torch.float64, torch.float32)):
        if inputs % groups or outputs % groups:
            continue
        x = torch.randn(batch, inputs, *volume).to(dtype, memory_format=layout)
        weight = torch.randn(outputs, inputs // groups, *kernel).to(dtype, memory_format=layout)
        leaves = [x, weight, *([torch.randn(outputs, dtype=dtype)] if bias else [])]

        args = None if bias else [None], (stride, padding, dilation, groups)
        check_equal(partial(call, conv3d, *args), partial(call, F.conv3d, *args), leaves, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("padding", [(1, 1, 1), (0, 1, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_no_convolution_of_a_small_volume_is_unrolled(channels: int, padding: tuple[int, ...], stride: int) -> None:
    x = torch.randn(1, channels, 16, 16, 16)
    layer = Conv3d(channels, 5, 3, stride, padding)
    names = profile_operations(lambda: layer(x.requires_grad_()).sum().backward())
    assert "aten::mkldnn_convolution" in names and not any("slow_conv3d" in name for name in names)
    y = layer(x)
    assert y.stride(1) == 1, "channels-last memory, even with one channel: the next layer needs no copy"
    assert not any("slow" in name for name in profile_operations(lambda: Conv3d(channels, 5, 1, 1, 0)(channels_last(x))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel, kwargs", [
    (2, {"stride": 2}), ((1, 2, 3), {"stride": (1, 2, 3)}), (3, {"stride": 2, "padding": 1, "output_padding": 1}),
    (2, {"stride": 2, "output_padding": 1}), (3, {"stride": 1, "dilation": 2}), (2, {"stride": 2, "groups": 2}), (1, {}),
], ids=str)  # fmt: skip
def test_conv_transpose3d_equals_torch(kernel: Any, kwargs: dict[str, Any], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    for inputs, batch, bias, dtype in itertools.product((1, 6), (1, 2), (False, True), (torch.float64, torch.float32)):
        if inputs % kwargs.get("groups", 1):
            continue
        reference = nn.ConvTranspose3d(inputs, 4, kernel, bias=bias, **kwargs)
        layer = ConvTranspose3d(inputs, 4, kernel, bias=bias, **kwargs).to(dtype, memory_format=layout)  # type: ignore[call-overload]
        layer.load_state_dict(reference.state_dict())
        assert list(reference.state_dict()) == list(layer.state_dict())

        x = torch.randn(batch, inputs, 3, 4, 5).to(dtype, memory_format=layout)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        leaves = [x, *(p.detach() for p in layer.parameters())]
        check_equal(partial(with_weights, layer), partial(with_weights, reference.double()), leaves, tolerance)


def test_a_transposed_convolution_without_overlap_is_a_matmul_in_channels_last_memory() -> None:
    layer, x = ConvTranspose3d(6, 4, 2, 2), channels_last(torch.randn(1, 6, 3, 4, 5))
    names = profile_operations(lambda: layer(x))
    assert "aten::addmm" in names and not any("conv" in name for name in names)
    assert layer(x).is_contiguous(memory_format=LAST)
    assert layer(x[..., :4], [7, 8, 9]).shape[2:] == (7, 8, 9), "torch's implementation, for a given output size"


@pytest.mark.parametrize("shape, kwargs", [
    ((1, 4, 8, 8, 8), {"padding": "same"}), ((1, 4, 8, 8, 8), {"padding": 1, "padding_mode": "circular"}),
    ((4, 6, 6, 6), {"padding": 1}),
], ids=str)  # fmt: skip
def test_other_paddings_and_an_unbatched_volume_equal_torch(shape: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    conv, x = Conv3d(4, 5, 3, **kwargs), torch.randn(shape)
    torch.testing.assert_close(conv(x), nn.Conv3d.forward(conv, x))


def profile_operations(function: Any) -> set[str]:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    return {event.key for event in trace.key_averages()}


def fill_free_memory_with_nan() -> None:
    """Fill the memory that torch will allocate next with NaN."""
    tensors = [torch.full((2**k,), torch.nan, dtype=dtype) for k in range(6, 22) for dtype in (torch.float32, torch.bfloat16)]
    del tensors


@pytest.mark.parametrize("mode", ["autocast", "bf16 weights"])
@pytest.mark.parametrize("kernel, size", [(3, (2, 8, 8)), (3, (1, 8, 8)), (5, (4, 8, 8)), (5, (3, 8, 8)), (3, (1, 1)), (3, (2, 1))])
def test_gradients_of_small_volumes_and_maps_in_bf16_are_fully_written(mode: str, kernel: int, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    three = len(size) == 3
    layer: Any = Conv3d(16, 32, kernel, padding=kernel // 2) if three else Conv2d(16, 32, kernel, 2, padding=kernel // 2)
    x = torch.randn(2, 16, *size).to(memory_format=torch.channels_last_3d if three else torch.channels_last)
    expected = torch.autograd.grad(layer(x).square().mean(), layer.parameters())
    narrow = layer if mode == "autocast" else layer.bfloat16()
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = narrow(x if mode == "autocast" else x.bfloat16())
        assert y.dtype == torch.bfloat16
        fill_free_memory_with_nan()
        for grad, expected_grad in zip(torch.autograd.grad(y.float().square().mean(), narrow.parameters()), expected):
            assert (grad.float() - expected_grad).norm() < 2e-2 * expected_grad.norm()


@pytest.mark.parametrize("stride", [1, 2, (1, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_1x1_convolution_is_a_matmul(stride: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference, layer = nn.Conv2d(6, 10, 1, stride, bias=bias).double(), Conv2d(6, 10, 1, stride, bias=bias).to(dtype)
    assert list(reference.state_dict()) == list(layer.state_dict())
    x = torch.randn(2, 6, 9, 8).to(dtype, memory_format=torch.channels_last)
    assert layer._is_product(x) and not layer._is_product(x.contiguous())
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    leaves = [x, *(p.detach() for p in layer.parameters())]
    check_equal(partial(with_weights, layer), partial(with_weights, reference), leaves, tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("kernel, padding, shape", [(1, 0, (2, 8, 16, 16)), (1, 0, (2, 8, 2, 4)), (3, 1, (2, 8, 9, 6)),
                                                    (3, (0, 2), (3, 8, 8, 5)), (3, 0, (1, 8, 6, 7))])
def test_fast_convolutions_equal_torch(kernel: int, padding: Any, shape: tuple[int, ...], tile: int, bias: bool,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    torch.manual_seed(0)
    monkeypatch.setattr("hpcai.nn.conv._winograd_tile", lambda x, weight, *_: tile * (weight.shape[2] > 1))  # of few channels
    reference, layer = (build(8, 16, kernel, 1, padding, bias=bias) for build in (nn.Conv2d, Conv2d))
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    leaves = [x, *(p.detach() for p in layer.parameters())]
    for block in (1 << 22, 1 << 11):  # all at once; by images and rows
        monkeypatch.setattr("hpcai.nn.conv._WINOGRAD_BLOCK", block)
        y = layer(x)
        assert "_FastConv" in type(y.grad_fn).__name__ and y.is_contiguous(memory_format=torch.channels_last)
        assert not y._is_view(), "which in-place operations could not change"
        check_equal(partial(with_weights, layer), partial(with_weights, reference.double()), leaves, 2e-6)

    second = []
    for conv, leaf in ((layer, x.clone().requires_grad_()), (reference, x.double().requires_grad_())):
        conv.load_state_dict(layer.state_dict())
        grads = torch.autograd.grad(conv(leaf).square().sum(), [leaf, *conv.parameters()], create_graph=True)
        second += [torch.autograd.grad(sum(g.square().sum() for g in grads), leaf)[0]]
    torch.testing.assert_close(second[0].double(), second[1], rtol=1e-4, atol=1e-4 * float(second[1].abs().max()))


def test_wide_3x3_convolutions_use_winograd_and_others_torch() -> None:
    layer, x = Conv2d(256, 256, 3, padding=1), torch.randn(2, 256, 16, 16).contiguous(memory_format=torch.channels_last)
    function: Any = layer(x).grad_fn
    assert "_FastConv" in type(function).__name__ and function.tile == 2
    sizes = (8, 256, 16, 16), (8, 256, 14, 14), (2, 256, 8, 8), (8, 64, 16, 16)  # 14 is no multiple of 4
    assert [_winograd_tile(torch.empty(n), torch.empty(n[1], n[1], 3, 3), (1, 1), (1, 1)) for n in sizes] == [4, 2, 0, 0]
    layer(x[:0]).sum().backward()
    assert not layer.weight.grad.any(), "an empty batch"  # type: ignore[union-attr]
    for other in (x[..., 1:], x.contiguous(memory_format=torch.contiguous_format), torch.randn(2, 256, 2, 256)):
        assert "_FastConv" not in type(layer(other).grad_fn).__name__
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        tangent = torch.autograd.forward_ad.make_dual(x, x)
        y, dy = torch.autograd.forward_ad.unpack_dual(layer(tangent))
    torch.testing.assert_close(dy, y - layer.bias[:, None, None], rtol=1e-4, atol=1e-4)  # type: ignore[index]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["dilated", "transposed"])
def test_gradients_in_mixed_memory_formats_equal_torch(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    kwargs = {"padding": 2, "dilation": 2} if kind == "dilated" else {"stride": 2, "padding": 1, "output_padding": 1}
    classes = (nn.Conv2d, Conv2d) if kind == "dilated" else (nn.ConvTranspose2d, ConvTranspose2d)
    reference, layer = (build(5, 16, 3, bias=bias, **kwargs) for build in classes)  # type: ignore[operator]
    layer.to(memory_format=torch.channels_last)
    x = torch.randn(2, 5, 9, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    assert "_FastConv" in type(y.grad_fn).__name__ and y.is_contiguous(memory_format=torch.channels_last)
    leaves = [x.detach(), *(p.detach() for p in layer.parameters())]
    check_equal(partial(with_weights, layer), partial(with_weights, reference.double()), leaves, 1e-5)
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None and all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
def test_gradients_of_dilated_depthwise_convolutions_in_bf16_are_fully_written(mode: str) -> None:
    """For 16 maps of 48 x 72, oneDNN's gradient of the weights in channels-last memory is infinite or NaN."""
    torch.manual_seed(0)
    conv, x = Conv2d(16, 16, 3, 1, 2, 2, groups=16, bias=False), torch.randn(2, 16, 48, 72)
    wide = nn.Conv2d(16, 16, 3, 1, 2, 2, groups=16, bias=False)
    wide.load_state_dict(conv.state_dict())
    wide(x).square().mean().backward()
    conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv, x = (conv.bfloat16(), x.bfloat16()) if mode == "bf16" else (conv, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        y = conv(x.contiguous(memory_format=torch.channels_last))
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    y.float().square().mean().backward()
    assert conv.weight.grad is not None and wide.weight.grad is not None
    torch.testing.assert_close(conv.weight.grad.float(), wide.weight.grad, rtol=0.02, atol=1e-3)
