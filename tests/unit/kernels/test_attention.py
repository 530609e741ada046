"""Attention and outer products equal their references in values and gradients, with chunks of any size; gates run their kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.kernels import attention, gates, outer_product


def compare(fused: Callable[..., Tensor], reference: Callable[..., Tensor], args: Sequence[Tensor | None], wrt: list[int]) -> None:
    results = []
    for function in (fused, reference):
        leaves = [x.detach().requires_grad_(i in wrt) if x is not None else None for i, x in enumerate(args)]
        out = function(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        grads = torch.autograd.grad((out * weight).sum(), [x for i, x in enumerate(leaves) if x is not None and i in wrt])
        results.append([out, *grads])
    for result, expected in zip(*results):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bytes_", [1, 3000, 1 << 20])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_attention(bytes_: int, biased: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CPU", bytes_)
    torch.manual_seed(0)
    batch, rows, entries, heads, channels = 2, 5, 6, 3, 4
    shape = (batch, entries, rows, 4, heads, channels) if transposed else (batch, rows, entries, 4, heads, channels)
    qkvg = torch.randn(shape, dtype=torch.float64)
    qkvg = qkvg.transpose(1, 2) if transposed else qkvg
    mask = (torch.rand(batch, rows, entries) > 0.3).double()
    bias = torch.randn(batch, heads, entries, entries, dtype=torch.float64) if biased else None
    inputs = [qkvg, torch.randn(heads * channels, dtype=torch.float64), mask, bias]
    compare(attention.gated_attention, attention.reference, inputs, [0, 1, *([3] if biased else [])])


def test_logits_of_half_precision_are_float32() -> None:
    torch.manual_seed(0)
    qkvg, mask = torch.randn(1, 3, 16, 4, 2, 8, dtype=torch.bfloat16), torch.ones(1, 3, 16)
    none, high = (torch.full((1, 2, 16, 16), value, dtype=torch.bfloat16) for value in (0.0, 64.0))
    out = [attention.gated_attention(qkvg, torch.zeros(16), mask, bias).float() for bias in (none, high)]
    assert (out[0] - out[1]).norm() <= 0.01 * out[0].norm(), "a constant added to a row changes nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_fully_masked_row_is_the_mean_of_the_values(dtype: torch.dtype) -> None:
    qkvg = torch.randn(1, 1, 5, 4, 1, 8, dtype=dtype)
    qkvg[..., 0, :, :] = 0
    out = attention.gated_attention(qkvg, torch.full((8,), 50.0).to(dtype), torch.zeros(1, 1, 5))
    torch.testing.assert_close(out[0, 0, 0], qkvg[0, 0, :, 2, 0].mean(0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bytes_", [1, 3000, 1 << 20])
def test_outer_products(bytes_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_product, "_CPU", bytes_)
    torch.manual_seed(0)
    shapes = (2, 3, 5, 4), (2, 3, 6, 4), (7, 16), (7,)
    inputs = [*(torch.randn(shape, dtype=torch.float64) for shape in shapes), torch.rand(2, 5, 6, dtype=torch.float64) + 1]
    compare(outer_product.outer_product, outer_product.reference, inputs, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_of_half_precision_keep_their_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkvg, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((1, 3, 4, 4, 2, 8), (1, 2, 4, 4)))
    gate_bias = torch.zeros(16, requires_grad=True)
    out = attention.gated_attention(qkvg, gate_bias, torch.ones(1, 3, 4), bias)
    grads = torch.autograd.grad(out.float().sum(), [qkvg, gate_bias, bias])
    assert out.dtype == dtype and [g.dtype for g in grads] == [dtype, torch.float32, dtype]
    wide = attention.reference(qkvg.double(), gate_bias.double(), torch.ones(1, 3, 4).double(), bias.double())
    assert (out.double() - wide).norm() <= torch.finfo(dtype).eps * wide.norm()


# ---- gates


def test_kernels_run_for_their_dtypes_only_and_torch_compile_traces_the_reference(kernel_calls: Any) -> None:
    calls, narrow, wide = kernel_calls("gates", gate=gates.reference), torch.ones(2, 6), torch.ones(2, 6, dtype=torch.float64)
    for x, g in ((wide, wide), (narrow.half(), narrow.half()), (narrow[:1], narrow), (narrow.bfloat16(), narrow)):
        gates.gate(x, g)
    compiled = torch.compile(gates.gate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(narrow, 2 * narrow, None), gates.reference(narrow, 2 * narrow)) and not calls, "the reference"
    gates.gate(narrow, narrow, narrow[:, :1]), gates.gate(narrow.bfloat16(), narrow.bfloat16())
    assert calls == [("gate", torch.float32), ("gate", torch.bfloat16)]
