"""Gates: their derivatives, which form runs where, and what a compiler sees. That fused is plain is in test_attention.py."""

from typing import Any

import pytest
import torch

from hpcai.kernels import gates

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("masked", [True, False])
def test_halves_of_a_product_with_channels_first(masked: bool) -> None:
    torch.manual_seed(0)
    both = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 3, 3, dtype=torch.float64).transpose(1, 2)[:, None] if masked else None
    assert torch.autograd.gradcheck(lambda both: gates.gate(*both.chunk(2, 1), mask), (both,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_keeps_its_type_under_a_wide_mask(dtype: torch.dtype) -> None:
    x, g = torch.randn(2, 3, 4, dtype=dtype).requires_grad_().unbind()
    y = gates.gate(x, g, torch.ones(3, 1))
    assert y.dtype == dtype and all(d.dtype == dtype for d in torch.autograd.grad(y.sum(), [x, g]))


def test_kernels_get_what_they_have_and_a_compiler_sees_operations_of_torch(asked: Any) -> None:
    given, one, wide = asked("gates", gate=gates.plain), torch.ones(2, 6), torch.ones(2, 6, dtype=torch.float64)
    for x, g in ((wide, wide), (one.half(), one.half()), (one[:1], one), (one.bfloat16(), one)):
        gates.gate(x, g)
    compiled = torch.compile(gates.gate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(one, 2 * one, None), gates.plain(one, 2 * one)) and not given, "the twin's"
    gates.gate(one, one, one[:, :1]), gates.gate(one.bfloat16(), one.bfloat16())
    assert given == [("gate", torch.float32), ("gate", torch.bfloat16)]
