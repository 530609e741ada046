"""FP8 matrices: one scale per tensor, rounding independent of the scale, non-finite elements, and matrix products."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcai.kernels import float8, triton_support
from hpcai.kernels.float8 import quantize, scaled_mm
from hpcai.plan.cost import estimate_cost
from hpcai.plan.machines import find_machine
from hpcai.plan.step_trace import Kernel, traced_job

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = torch.bfloat16, torch.float16, torch.float32, torch.float64
TINY = torch.finfo(torch.float32).smallest_normal


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def all_values(dtype: torch.dtype) -> Tensor:
    """Return all finite values of a format, in ascending order."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def same_bits(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def dequantize(x: Tensor, dtype: torch.dtype) -> Tensor:
    quantized = quantize(x, dtype)
    assert quantized.rows is not None
    return quantized.rows.double() * quantized.scale


# ---- the scale


@pytest.mark.parametrize(("dtype", "max_value"), [(E4, 448.0), (E5, 57344.0)])
@pytest.mark.parametrize("amax", [1.0, 448.0, 448.0001, 447.9, 57344.0, 57345.0, 3e38, 1e-20, 2.0**-100])
def test_the_scale_is_the_smallest_sufficient_power_of_two(amax: float, dtype: torch.dtype, max_value: float) -> None:
    x = torch.zeros(3, 5)
    x[1, 2], x[2, 3] = -amax, amax / 3
    scale, largest = quantize(x, dtype).scale, float(x.abs().max())
    assert scale.shape == () and scale.dtype == torch.float32 and math.frexp(float(scale))[0] == 0.5
    assert largest <= max_value * float(scale) and largest > max_value * float(scale) / 2


@pytest.mark.parametrize("dtype", [E4, E5])
def test_zeros_and_subnormal_numbers_have_a_scale(dtype: torch.dtype) -> None:
    for x in (torch.zeros(3, 5), -torch.zeros(3, 5), torch.zeros(0, 5), torch.zeros(3, 0)):
        quantized = quantize(x, dtype, columns=True)
        assert float(quantized.scale) == 1 and quantized.rows is not None and quantized.columns is not None
        assert quantized.rows.shape == x.shape and quantized.columns.shape == (x.shape[1], 16 * (len(x) > 0))
        assert not quantized.rows.double().any() and not quantized.columns.double().any()
    for tiny in (1e-45, 1e-40, TINY):
        quantized = quantize(torch.full((2, 2), tiny), dtype)
        assert float(quantized.scale) == TINY and quantized.rows is not None and quantized.rows.double().isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_elements_give_nan_in_the_product(bad: float, kind: torch.dtype) -> None:
    x, w = draw(16, 32).to(kind), quantize(draw(16, 32))
    x[3, 4] = bad
    for dtype in (E4, E5):
        quantized = quantize(x, dtype)
        assert quantized.scale.isnan() and quantized.rows is not None and w.rows is not None
        assert scaled_mm(quantized.rows, w.rows, quantized.scale, w.scale, torch.float32).isnan().all()


def test_a_given_scale_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(5, 7).float()
    expected = quantize(x, columns=True)
    monkeypatch.setattr(float8, "_amax", None)
    actual = quantize(x, columns=True, scale=expected.scale)
    assert actual.scale is expected.scale and same_bits(actual.rows, expected.rows) and same_bits(actual.columns, expected.columns)


# ---- rounding


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4, E5])
def test_elements_are_rounded_to_nearest(dtype: torch.dtype, kind: torch.dtype) -> None:
    table, x = all_values(dtype), (draw(64, 48) * (3 * draw(64, 48, seed=1)).exp()).to(kind)
    scale = quantize(x, dtype).scale.double()
    error = (x.double().flatten() / scale)[:, None].sub(table).abs().amin(1).view_as(x)
    assert torch.equal((dequantize(x, dtype) - x.double()).abs() / scale, error)


@pytest.mark.parametrize("power", [-90, -1, 0, 1, 40])
@pytest.mark.parametrize(("dtype", "small"), [(E4, 2.0**-4), (E5, 2.0**-3)])
def test_rounding_does_not_depend_on_the_scale(dtype: torch.dtype, small: float, power: int) -> None:
    x = draw(40, 48).float()
    x = torch.where(x.abs() < 0.01, 0.01, x)  # 2^-9 of the largest: far from underflow
    rounded = dequantize(x, dtype)
    assert ((rounded - x).abs() <= small * x.abs()).all() and ((rounded - x).abs() > small / 2 * x.abs()).any()
    assert torch.equal(dequantize(x * 2.0**power, dtype), rounded * 2.0**power)
    for dim in (0, 1):
        parts = [dequantize(part, dtype) for part in x.mul(torch.arange(1.0, 49)).split(8, dim)]
        assert torch.equal(torch.cat(parts, dim), dequantize(x.mul(torch.arange(1.0, 49)), dtype)), "shards are rounded equally"


# ---- rows and columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "C"), [(32, 16), (37, 24), (1, 5), (16, 1)])
def test_columns_are_the_rows_transposed_and_padded_with_zeros(T: int, C: int, kind: torch.dtype) -> None:
    x = draw(C, T).to(kind).t()
    assert T == 1 or C == 1 or not x.is_contiguous()
    quantized = quantize(x.requires_grad_(), columns=True)
    assert quantized.rows is not None and quantized.columns is not None and not quantized.rows.requires_grad
    assert quantized.rows.is_contiguous() and quantized.columns.is_contiguous() and quantized.columns.shape == (C, -(-T // 16) * 16)
    assert same_bits(quantized.columns[:, :T], quantized.rows.t()) and not quantized.columns[:, T:].double().any()
    assert same_bits(quantized.rows, quantize(x.contiguous()).rows)
    alone = quantize(x, rows=False, columns=True)
    assert alone.rows is None and same_bits(alone.columns, quantized.columns) and quantize(x).columns is None


# ---- products


def make_operands(M: int = 5, N: int = 32, K: int = 48, first: torch.dtype = E4, second: torch.dtype = E4) -> tuple[Any, ...]:
    a, b = quantize(3 * draw(M, K), first), quantize(0.1 * draw(N, K, seed=1), second)
    return a.rows, b.rows, a.scale, b.scale


@pytest.mark.parametrize("dtypes", [(E4, E4), (E5, E4), (E4, E5)])
def test_scaled_mm_equals_torch(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    a, b, *scales = make_operands(first=dtypes[0], second=dtypes[1])
    exact = (a.double() * scales[0]) @ (b.double() * scales[1]).t()
    torch.testing.assert_close(scaled_mm(a, b, *scales, torch.float64), exact, rtol=1e-14, atol=1e-14)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
        actual = scaled_mm(a, b, *scales, dtype)
        assert actual.dtype == dtype and ((actual.double() - exact).abs() <= tolerance * (exact.abs() + 1)).all()
    expected = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.float32)
    torch.testing.assert_close(scaled_mm(a, b, *scales, torch.float32), expected, rtol=2e-6, atol=2e-6)
    expected = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    torch.testing.assert_close(scaled_mm(a, b, *scales, torch.bfloat16), expected, rtol=2.0**-7, atol=1e-5)


def test_very_different_scales_do_not_underflow() -> None:
    a, b, *_ = make_operands()
    scales = torch.full((), 2.0**-126), torch.full((), 2.0**119)
    actual, expected = scaled_mm(a, b, *scales, torch.float32), scaled_mm(a, b, *(torch.ones(()) for _ in scales), torch.float32)
    assert torch.equal(actual, expected * 2.0**-7)


# ---- selection of the implementation


def test_kernels_run_for_their_dtypes_and_gpus_only(kernel_calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gpu = kernel_calls("float8", quantize=float8.reference), SimpleNamespace(major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for shape, dtype in (((2, 3), torch.float16), ((2, 3), torch.float64), ((0, 3), torch.float32)):
        quantize(torch.ones(shape, dtype=dtype))
    assert not calls, "the reference"
    quantize(torch.ones(2, 3)), quantize(torch.ones(2, 3).bfloat16())
    gpu.minor = 6
    quantize(torch.ones(2, 3))
    assert calls == [("quantize", torch.float32), ("quantize", torch.bfloat16)], "an older GPU has no FP8"


def test_a_gpu_runs_torchs_scaled_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, torch_scaled_mm, calls = make_operands(), torch._scaled_mm, []

    def multiply(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return torch_scaled_mm(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    expected = scaled_mm(*operands, torch.float32)
    monkeypatch.setattr(triton_support, "PLANNED", True)
    torch.testing.assert_close(scaled_mm(*operands, torch.float32), expected)
    scaled_mm(*operands, torch.bfloat16, exact=False)
    assert calls == [{"out_dtype": torch.float32, "use_fast_accum": False}, {"out_dtype": torch.bfloat16, "use_fast_accum": True}]
    scaled_mm(*operands, torch.float64)
    monkeypatch.setattr(triton_support, "PLANNED", False)
    scaled_mm(*operands, torch.bfloat16)
    assert len(calls) == 2, "the reference runs for float64 and on a CPU"


# ---- plans


@pytest.mark.skipif(triton_support.MISSING is not None, reason=f"kernels cannot be compiled: {triton_support.MISSING}")
def test_a_plan_counts_the_work_of_a_gpu() -> None:
    T, C, N = 1000, 64, 32
    with traced_job(1) as tracer, tracer.fake_tensors():
        x, w = torch.empty(T, C, dtype=torch.bfloat16), torch.empty(N, C, dtype=E4)
        with tracer.record() as record:
            quantized = quantize(x, columns=True)
            assert quantized.rows is not None
            y = scaled_mm(quantized.rows, w, quantized.scale, quantized.scale, torch.bfloat16)
        assert y.shape == (T, N) and y.dtype == torch.bfloat16
        with tracer.record() as wide:
            torch.mm(torch.empty(T, C, dtype=torch.bfloat16), torch.empty(C, N, dtype=torch.bfloat16))
    first, second, third = record.events
    assert isinstance(first, Kernel) and (first.name, first.bytes) == ("_amax", T * C * 2 + 8 * 4), "8 programs, one element each"
    assert isinstance(second, Kernel) and (second.name, second.bytes) == ("_cast", T * C * 3 + C * 1008 + 8 * 4 + 4)
    assert third == Kernel("_scaled_mm", 2 * T * C * N, T * C + N * C + T * N * 2 + 8, 1)
    for gpu, faster in (("h100", 2.0), ("b200", 2.0), ("a100", 1.0)):
        machine = find_machine(gpu, bandwidth=1e30, kernel_overhead=0.0)
        seconds = [estimate_cost([event], machine).seconds for event in (third, *wide.events)]
        assert seconds[0] * faster == pytest.approx(seconds[1], rel=1e-3)
