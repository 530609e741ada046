"""Layer norms: torch's own where no kernel runs, which runs where, and of which dtype the result is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.kernels.layernorm import layer_norm, reference
from hpcai.nn import LayerNorm

pytestmark = pytest.mark.usefixtures("one_thread")


def kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return reference(x, weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype)


def lying(how: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    forms = {"rows": x, "channels first": x.movedim(1, -1), "turned": x.transpose(0, 2), "apart": x[..., 1:4]}
    return forms[how].detach().requires_grad_()


@pytest.mark.parametrize("how", ["rows", "channels first", "turned", "apart"])
def test_it_is_the_formula_in_value_and_gradient(how: str) -> None:
    x = lying(how)
    weight, bias = torch.randn(2, x.shape[-1], dtype=torch.float64).unbind()
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(layer_norm, (x, weight.requires_grad_(), bias.requires_grad_()))


def test_it_has_the_keys_and_the_numbers_of_torch() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.LayerNorm(6, 1e-3), LayerNorm(6, 1e-3, autocast_output=True)
    nn.init.normal_(theirs.weight), nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 6)
    assert torch.equal(ours(x), theirs(x)) and repr(ours) == repr(theirs)
    assert LayerNorm([6], bias=False).bias is None and LayerNorm(6, elementwise_affine=False)(x).shape == (4, 6)
    with pytest.raises(ValueError, match=r"LayerNorm over \[4, 6\]; expected one number of channels"):
        LayerNorm((4, 6))


@pytest.mark.parametrize(
    "x, inside, narrow, found",
    [
        (torch.float32, None, True, torch.float32),
        (torch.bfloat16, None, True, torch.bfloat16),
        (torch.float32, torch.bfloat16, True, torch.bfloat16),
        (torch.float32, torch.bfloat16, False, torch.float32),
        (torch.float32, torch.float16, True, torch.float16),
        (torch.float64, torch.bfloat16, True, torch.float64),
    ],
)
def test_autocast_decides_only_what_products_read(x: Any, inside: Any, narrow: bool, found: Any) -> None:
    layer, wide = LayerNorm(6, autocast_output=narrow), torch.promote_types(x, torch.float32)
    with torch.autocast("cpu", inside, enabled=inside is not None):
        y = layer.to(torch.float64 if x == torch.float64 else wide)(torch.randn(4, 6).to(x))
    assert y.dtype == found


@pytest.mark.parametrize(("x", "narrow", "found"), [
    (torch.float32, False, torch.float32), (torch.float32, True, torch.bfloat16), (torch.bfloat16, False, torch.float32),
    (torch.bfloat16, True, torch.bfloat16),
])  # fmt: skip
def test_kernels_give_what_torch_gives_on_a_gpu(x: Any, narrow: bool, found: Any, asked: Any) -> None:
    """There its layer norm is float32 under autocast, whatever it is given."""
    given, layer = asked("layernorm", layer_norm=kernel), LayerNorm(6, autocast_output=narrow)
    assert layer(torch.ones(2, 6, dtype=x)).dtype == x
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 6, dtype=x)).dtype == found
    assert len(given) == 2


def test_kernels_get_what_they_have(asked: Any) -> None:
    given = asked("layernorm", layer_norm=kernel)
    for x in (torch.ones(2, 6, dtype=torch.float64), torch.ones(2, 6, dtype=torch.float16), torch.ones(2, 1025)):
        layer_norm(x, *torch.ones(2, x.shape[-1], dtype=x.dtype))
    layer_norm(torch.ones(2, 6), None, None), layer_norm(torch.ones(2, 6), torch.ones(6), None)
    assert not given, "torch's own"
    layer_norm(torch.ones(2, 1024), *torch.ones(2, 1024))
    assert len(given) == 1
