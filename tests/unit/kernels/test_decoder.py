"""Functions of a language model: equality with their references, selection of the implementation, and saved tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from hpcai.kernels import activations, packed_attention, rmsnorm, rotary, triton_support, varlen_attention
from hpcai.kernels.grouped_query_attention import grouped_query_attention


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


ANGLE = draw(2, 5, 3).repeat(1, 1, 2)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms norm": (rmsnorm.rms_norm, rmsnorm.reference, (draw(3, 4, 7).transpose(0, 1), draw(7))),
    "swiglu": (activations.swiglu, activations.reference_swiglu, (draw(5, 9), draw(5, 9) + 1)),
    "swiglu, small": (activations.swiglu, activations.reference_swiglu, (draw(3, 9), draw(3, 9) + 1)),
    "swiglu, transposed": (activations.swiglu, activations.reference_swiglu, (30 * draw(9, 5).T, draw(5, 9) + 1)),
    "gelu": (activations.gelu, lambda x: F.gelu(x, approximate="tanh"), (3 * draw(4, 11).T,)),
    "rotary": (
        lambda q, k: rotary.apply_rotary(q, k, ANGLE.cos(), ANGLE.sin()),
        lambda q, k: tuple(rotary.reference(x, ANGLE.cos(), ANGLE.sin()) for x in (q, k)),
        (draw(2, 3, 5, 6), draw(2, 5, 1, 6).transpose(1, 2)),
    ),
    "rotary, interleaved": (
        lambda q, k: rotary.apply_rotary(q, k, ANGLE.cos(), ANGLE.sin(), True),
        lambda q, k: tuple(rotate_complex(x) for x in (q, k)),
        (draw(2, 3, 5, 6), draw(2, 5, 1, 6).transpose(1, 2)),
    ),
}  # fmt: skip


def rotate_complex(x: Tensor) -> Tensor:
    """Rotate pairs of neighbouring channels as real and imaginary parts."""
    rotation = torch.polar(torch.ones_like(ANGLE), ANGLE)[:, None, :, :3]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * rotation).flatten(-2)


def as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_reference(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations, rmsnorm):
        monkeypatch.setattr(module, "_CPU", 64)  # several chunks, the last one shorter
    function, reference, inputs = CASES[case]
    leaves = [x.detach().requires_grad_() for x in inputs]
    for actual, expected in zip(as_list(function(*leaves)), as_list(reference(*leaves)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("case", CASES)
def test_half_precision_keeps_its_dtype_and_saves_few_tensors(case: str) -> None:
    function, reference, inputs = CASES[case]
    leaves, saved = [x.bfloat16().requires_grad_() for x in inputs], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        outputs = as_list(function(*leaves))
    gradients = torch.autograd.grad(sum(x.float().square().sum() for x in outputs), leaves)  # type: ignore[arg-type]
    for actual, expected in zip(outputs, as_list(reference(*(x.detach().double() for x in leaves))), strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=1.6e-2, atol=2e-2)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    input_storages = {x.untyped_storage().data_ptr() for x in leaves}
    angles = 2 * 8 * 2 * ANGLE.numel()  # cosines and sines
    new = {"rms norm": 4 * 4 * 3, "rotary": angles, "rotary, interleaved": angles}.get(case, 0)  # of a norm one element per row
    assert sum(x.numel() * x.element_size() for x in saved if x.untyped_storage().data_ptr() not in input_storages) <= new


def test_norms_for_matmuls_have_the_dtype_of_autocast() -> None:
    x, weight = torch.ones(2, 6), torch.ones(6)
    with torch.autocast("cpu", torch.bfloat16):
        assert rmsnorm.rms_norm(x, weight).dtype == torch.float32
        assert rmsnorm.rms_norm(x, weight, autocast_output=True).dtype == torch.bfloat16
        assert rmsnorm.rms_norm(x.double(), weight, autocast_output=True).dtype == torch.float64
    assert rmsnorm.rms_norm(x, weight, autocast_output=True).dtype == torch.float32


@pytest.fixture
def calls(kernel_calls: Any) -> list[tuple[str, torch.dtype]]:
    kernel_calls("layernorm", rms_norm=lambda x, weight, eps, dtype: rmsnorm.reference(x, weight, eps).to(dtype))
    kernel_calls("gates", swiglu=lambda gate, up: gate)
    recorded: list[tuple[str, torch.dtype]] = kernel_calls("rotary", apply_rotary=lambda q, k, *_: (q, k))
    return recorded


def test_kernels_run_for_their_dtypes_only(calls: list[tuple[str, torch.dtype]]) -> None:
    def run_all(dtype: torch.dtype) -> None:
        x = torch.ones(1, 1, 2, 6, dtype=dtype)
        rmsnorm.rms_norm(x, x[0, 0, 0]), activations.swiglu(x, x), rotary.apply_rotary(x, x, x[0], x[0])

    run_all(torch.float64), run_all(torch.float16)
    rmsnorm.rms_norm(torch.ones(2, 8193), torch.ones(8193))
    ones = torch.ones(1, 1, 2, 6)
    activations.swiglu(ones, ones.bfloat16()), rotary.apply_rotary(ones, ones.bfloat16(), ones[0], ones[0])
    assert not calls, "the reference"
    run_all(torch.float32), run_all(torch.bfloat16)
    assert calls == [(name, kind) for kind in (torch.float32, torch.bfloat16) for name in ("rms_norm", "swiglu", "apply_rotary")]


ROWS = torch.tensor([[0, 0, 0, 1, 1, 4, 4, 4, 4], [2, 3, 3, 3, 3, 3, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5]])


@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.parametrize("strided", [True, False])
def test_attention_per_document_equals_masked_attention(keys: int, strided: bool) -> None:
    q, k, v = (draw(3, 9, heads, 8).transpose(1, 2) + n for n, heads in enumerate((4, keys, keys)))
    leaves = [(x if strided else x.contiguous()).detach().requires_grad_() for x in (q, k, v)]
    actual, expected = varlen_attention.varlen_attention(*leaves, ROWS), varlen_attention.reference(*leaves, ROWS)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = draw(*actual.shape)
    for actual_grad, expected_grad in zip(*(torch.autograd.grad(x, leaves, weight) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("supports_gqa", [True, False])
def test_varlen_sequences_are_the_documents_and_too_many_give_nan(supports_gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute replaces torch's varlen_attn, which requires CUDA."""
    ends, fits = varlen_attention._cu_seqlens(ROWS, 9)
    assert ends.tolist() == [0, 3, 5, 9, 10, 18, 27, 27, 27, 27] and ends.dtype == torch.int32 and fits
    ends, fits = varlen_attention._cu_seqlens(ROWS, 6)
    assert ends.tolist() == [0, 3, 5, 9, 10, 18, 27] and fits
    assert not varlen_attention._cu_seqlens(ROWS, 5)[1] and not varlen_attention._cu_seqlens(ROWS, 3)[1]

    def sequences(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, same: Tensor, max_q: int, max_k: int, enable_gqa: bool = False,
                  **kwargs: Any) -> Tensor:  # fmt: skip
        assert begin is same and max_q == max_k == 9 and kwargs == {"window_size": (-1, 0)}
        assert enable_gqa == supports_gqa
        lengths = [*begin.diff().tolist(), len(q) - int(begin[-1])]
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)))
        outs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=enable_gqa) for part in parts if part[0].numel()]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    parameters = {"window_size", "enable_gqa"} if supports_gqa else {"window_size"}
    monkeypatch.setattr(varlen_attention, "_varlen_attn", lambda: (sequences, parameters))
    monkeypatch.setattr(triton_support, "PLANNED", True)
    q, k, v = (draw(3, 9, heads, 8).transpose(1, 2).bfloat16() + n for n, heads in enumerate((4, 2, 2)))
    expected = varlen_attention.reference(*(x.double() for x in (q, k, v)), ROWS)
    torch.testing.assert_close(varlen_attention.varlen_attention(q, k, v, ROWS).double(), expected, rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(varlen_attention, "max_documents", lambda tokens: 1)
    assert varlen_attention.varlen_attention(q, k, v, ROWS).isnan().all()
    assert torch.equal(varlen_attention.varlen_attention(q.double(), k.double(), v.double(), ROWS), expected), "in 16 bits only"


def test_sequences_of_packed_rows_are_those_of_a_gpu_with_padding_as_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute replaces torch's kernel, which requires CUDA."""
    lengths, rates = torch.tensor([[4, 3, 0], [9, 0, 0], [2, 2, 2]]), list[float]()

    def sequences(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, dropout: float) -> Tensor:
        rates.append(dropout)
        parts = zip(*(x.transpose(0, 1)[None].split(ends.diff().tolist(), 2) for x in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(*part) for part in parts if part[0].numel()], 2)[0].transpose(0, 1)

    monkeypatch.setattr(packed_attention, "_flash_attention", sequences)
    q, k, v = (draw(27, 4, 8) + n for n in range(3))
    packing = packed_attention.Packing.of(lengths, 9, padded=True)
    expected = packed_attention.reference(q, k, v, packing)
    assert torch.equal(packed_attention.packed_attention(q, k, v, packing), expected) and not rates
    monkeypatch.setattr(triton_support, "PLANNED", True)
    actual = packed_attention.packed_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), packing, 0.1)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=2e-2)
    assert rates == [0.1]


@pytest.mark.parametrize("case", CASES)
def test_a_few_tokens_without_gradients_have_equal_values(case: str) -> None:
    function, reference, inputs = CASES[case]
    with torch.no_grad():
        for actual, expected in zip(as_list(function(*inputs)), as_list(reference(*inputs)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        with_leaves = as_list(function(*leaves))
    assert all(map(torch.equal, with_leaves, as_list(function(*leaves)))), "recomputation depends on it"


CAUSAL, MASK = causal_lower_right(5, 5), torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.mark.parametrize("kind, mask, repeated", [
    (torch.bfloat16, None, False), (torch.bfloat16, CAUSAL, False), (torch.bfloat16, MASK, True), (torch.float32, None, True),
    (torch.float32, MASK, True),
])  # fmt: skip
def test_keys_of_grouped_heads_are_repeated_where_a_gpu_would_materialize_all_logits(
    kind: torch.dtype, mask: Any, repeated: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v = (draw(2, heads, 5, 8).to(kind) + n for n, heads in enumerate((4, 2, 2)))
    expected, torch_attention, calls = grouped_query_attention(q, k, v, mask, mask is None), F.scaled_dot_product_attention, []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        calls.append((k.shape[1], kwargs["enable_gqa"]))
        return torch_attention(q, k, v, MASK if mask is CAUSAL else mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(triton_support, "PLANNED", True)
    torch.testing.assert_close(grouped_query_attention(q, k, v, mask, mask is None), expected)
    assert calls == [(4, False) if repeated else (2, True)]
