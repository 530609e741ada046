"""Layer norms: values of the reference, selection of the implementation, and the dtype of the result."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.kernels.layernorm import layer_norm, reference
from hpcai.nn import LayerNorm


def kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return reference(x, weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype)


def make_input(layout: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    forms = {"rows": x, "channels first": x.movedim(1, -1), "turned": x.transpose(0, 2), "apart": x[..., 1:4]}
    return forms[layout].detach().requires_grad_()


@pytest.mark.parametrize("layout", ["rows", "channels first", "turned", "apart"])
def test_values_and_gradients_equal_the_formula(layout: str) -> None:
    x = make_input(layout)
    weight, bias = torch.randn(2, x.shape[-1], dtype=torch.float64).unbind()
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(layer_norm, (x, weight.requires_grad_(), bias.requires_grad_()))


def test_layer_norm_has_the_keys_and_values_of_torch() -> None:
    torch.manual_seed(0)
    torch_norm, norm = nn.LayerNorm(6, 1e-3), LayerNorm(6, 1e-3, autocast_output=True)
    nn.init.normal_(torch_norm.weight), nn.init.normal_(torch_norm.bias)
    norm.load_state_dict(torch_norm.state_dict())
    x = torch.randn(4, 6)
    assert torch.equal(norm(x), torch_norm(x)) and repr(norm) == repr(torch_norm)
    assert LayerNorm([6], bias=False).bias is None and LayerNorm(6, elementwise_affine=False)(x).shape == (4, 6)
    with pytest.raises(ValueError, match=r"LayerNorm over \[4, 6\]; expected one number of channels"):
        LayerNorm((4, 6))


@pytest.mark.parametrize(
    "x, autocast, autocast_output, expected",
    [
        (torch.float32, None, True, torch.float32),
        (torch.bfloat16, None, True, torch.bfloat16),
        (torch.float32, torch.bfloat16, True, torch.bfloat16),
        (torch.float32, torch.bfloat16, False, torch.float32),
        (torch.float32, torch.float16, True, torch.float16),
        (torch.float64, torch.bfloat16, True, torch.float64),
    ],
)
def test_autocast_sets_the_dtype_only_with_autocast_output(x: Any, autocast: Any, autocast_output: bool, expected: Any) -> None:
    layer, wide = LayerNorm(6, autocast_output=autocast_output), torch.promote_types(x, torch.float32)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = layer.to(torch.float64 if x == torch.float64 else wide)(torch.randn(4, 6).to(x))
    assert y.dtype == expected


@pytest.mark.parametrize(("x", "autocast_output", "expected"), [
    (torch.float32, False, torch.float32), (torch.float32, True, torch.bfloat16), (torch.bfloat16, False, torch.float32),
    (torch.bfloat16, True, torch.bfloat16),
])  # fmt: skip
def test_kernels_have_the_dtype_of_torch_on_a_gpu(x: Any, autocast_output: bool, expected: Any, kernel_calls: Any) -> None:
    """On a GPU, torch's layer norm is float32 under autocast, for every input dtype."""
    calls, layer = kernel_calls("layernorm", layer_norm=kernel), LayerNorm(6, autocast_output=autocast_output)
    assert layer(torch.ones(2, 6, dtype=x)).dtype == x
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 6, dtype=x)).dtype == expected
    assert len(calls) == 2


def test_kernels_run_for_their_dtypes_and_sizes_only(kernel_calls: Any) -> None:
    calls = kernel_calls("layernorm", layer_norm=kernel)
    for x in (torch.ones(2, 6, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float16), torch.ones(2, 1025)):
        layer_norm(x, *torch.ones(2, x.shape[-1], dtype=x.dtype))
    layer_norm(torch.ones(2, 6), None, None), layer_norm(torch.ones(2, 6), torch.ones(6), None)
    assert not calls, "torch's operation"
    layer_norm(torch.ones(2, 1024), *torch.ones(2, 1024))
    assert len(calls) == 1
