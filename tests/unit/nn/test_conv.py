"""Our convolutions are those of torch, in value, gradient and names, whichever way they go."""

import pytest
import torch
from torch import nn

from hpcai.nn import Conv2d, Conv3d, ConvTranspose2d


@pytest.mark.parametrize("shape", [(1, 4, 16, 16, 16), (1, 8, 4, 6, 10), (1, 3, 8, 5, 7)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_halves_are_the_whole(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain, ours = nn.Conv3d(shape[1], 5, 3, padding=1), Conv3d(shape[1], 5, 3, padding=1)
    ours.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(ours.state_dict())
    x = torch.randn(shape).contiguous(memory_format=layout)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert ours._would_be_unrolled(b)
    expected, found = plain(a), ours(b)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last_3d), "no copy is needed behind it"
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "conv, shape",
    [
        (Conv3d(4, 4, 3, padding=1), (2, 4, 8, 8, 8)),
        (Conv3d(4, 4, 3, padding=1), (1, 4, 7, 8, 8)),
        (Conv3d(4, 4, 3, padding=1), (1, 4, 128, 128, 8)),
        (Conv3d(4, 4, 3), (1, 4, 8, 8, 8)),
        (Conv3d(4, 4, 3, padding=1, stride=2), (1, 4, 8, 8, 8)),
        (Conv3d(4, 4, 3, padding=1, dilation=2), (1, 4, 8, 8, 8)),
        (Conv3d(4, 4, 5, padding=2), (1, 4, 8, 8, 8)),
        (Conv3d(4, 4, 3, padding=1, groups=2), (1, 4, 8, 8, 8)),
        (Conv3d(4, 4, 3, padding=1).double(), (1, 4, 8, 8, 8)),
    ],
)
def test_everything_else_is_left_to_torch(conv: Conv3d, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=conv.weight.dtype)
    assert not conv._would_be_unrolled(x)
    torch.testing.assert_close(conv(x), nn.Conv3d.forward(conv, x))


def test_torch_still_unrolls_what_we_think_it_does() -> None:
    """When this fails, torch has moved the boundary: measure again, and drop ``Conv3d`` or its limit."""
    from torch.profiler import ProfilerActivity, profile

    def kernels(size: int) -> set[str]:
        layer, x = nn.Conv3d(4, 4, 3, padding=1), torch.randn(1, 4, size, size, 4)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            layer(x)
        return {event.key for event in trace.key_averages()}

    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    assert "aten::slow_conv3d_forward" in kernels(64)  # 1*4*64*64 = 16384
    assert "aten::mkldnn_convolution" in kernels(72)  # 1*4*72*72 = 20736


def spoil_memory() -> None:
    """Leave NaN in what torch will allocate next."""
    kept = [torch.full((2**k,), torch.nan, dtype=dtype) for k in range(6, 22) for dtype in (torch.float32, torch.bfloat16)]
    del kept


@pytest.mark.parametrize("how", ["autocast", "bf16 weights"])
@pytest.mark.parametrize("depth, kernel", [(2, 3), (1, 3), (4, 5), (3, 5)])
def test_gradients_of_a_shallow_volume_in_bf16_hold_nothing_that_nobody_wrote(how: str, depth: int, kernel: int) -> None:
    torch.manual_seed(0)
    layer = Conv3d(16, 32, kernel, padding=kernel // 2)
    x = torch.randn(2, 16, depth, 8, 8).to(memory_format=torch.channels_last_3d)
    expected = torch.autograd.grad(layer(x).square().mean(), layer.parameters())
    narrow = layer if how == "autocast" else layer.bfloat16()
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            y = narrow(x if how == "autocast" else x.bfloat16())
        assert y.dtype == torch.bfloat16
        spoil_memory()
        for found, right in zip(torch.autograd.grad(y.float().square().mean(), narrow.parameters()), expected):
            assert (found.float() - right).norm() < 2e-2 * right.norm()


@pytest.mark.parametrize("stride", [1, 2, (1, 3)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_1x1_convolution_is_a_matrix_product(stride: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(6, 10, 1, stride, bias=bias).double()
    ours = Conv2d(6, 10, 1, stride, bias=bias).to(dtype)
    ours.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(ours.state_dict())
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 9, 8).to(dtype).contiguous(memory_format=torch.channels_last)
    a, b = x.double().clone().requires_grad_(), x.clone().requires_grad_()
    assert ours._is_product(b) and not ours._is_product(x.contiguous())
    expected, found = plain(a), ours(b)
    assert found.is_contiguous(memory_format=torch.channels_last)
    weight = torch.randn(expected.shape).to(dtype)
    (expected * weight.double()).sum().backward()
    (found * weight).sum().backward()
    small = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=small, atol=small)
    for p, q in ((b.grad, a.grad), *((p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters()))):
        assert p is not None
        torch.testing.assert_close(p.double(), q, rtol=small, atol=10 * small)


@pytest.mark.parametrize("conv", [Conv2d(4, 4, 3), Conv2d(4, 4, 1, padding=1), Conv2d(4, 4, 1, groups=2)], ids=str)
def test_other_convolutions_of_maps_go_through_unchanged(conv: Conv2d) -> None:
    plain = nn.Conv2d(4, 4, conv.kernel_size, padding=conv.padding, groups=conv.groups)  # type: ignore[arg-type]
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(conv(x), plain(x))


def test_the_gradient_of_a_strided_1x1_convolution_that_ends_torchs_process() -> None:
    conv = Conv2d(8, 16, 1, 2, bias=False).to(memory_format=torch.channels_last)
    y = conv(torch.randn(2, 8, 48, 72).contiguous(memory_format=torch.channels_last))
    y.sum().backward()
    assert conv.weight.grad is not None and bool(conv.weight.grad.isfinite().all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["holes", "transposed"])
def test_gradients_in_two_memory_formats_are_those_of_one(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    words = {"padding": 2, "dilation": 2} if kind == "holes" else {"stride": 2, "padding": 1, "output_padding": 1}
    classes = (nn.Conv2d, Conv2d) if kind == "holes" else (nn.ConvTranspose2d, ConvTranspose2d)
    plain, ours = (made(5, 16, 3, bias=bias, **words) for made in classes)  # type: ignore[operator]
    ours.load_state_dict(plain.state_dict())
    ours.to(memory_format=torch.channels_last)
    x = torch.randn(2, 5, 9, 8).contiguous(memory_format=torch.channels_last)
    a, b = x.contiguous().requires_grad_(), x.clone().requires_grad_()
    expected, found = plain(a), ours(b)
    assert "_Apart" in type(found.grad_fn).__name__ and found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    ours.requires_grad_(False)
    found = ours(b)
    found.sum().backward()
    assert all(p.grad is not None for p in plain.parameters())
