"""FP8 on a GPU: quantized matrices equal the reference bitwise, products agree with float64, and casts run at memory speed."""

from types import SimpleNamespace

import pytest
import torch

from hpcai.kernels import float8, triton_support
from hpcai.kernels.float8 import MAX_EXPONENT, quantize, scaled_mm
from tests.gpu.device import DEVICE, GPU, ON_GPU, cuda_only, forbid_synchronization

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NO_FP8 = ON_GPU and torch.cuda.is_available() and not float8.is_supported(torch.device(DEVICE))
needs_fp8 = pytest.mark.skipif(NO_FP8, reason="this GPU has no FP8: it needs compute capability 8.9")


@needs_fp8
@cuda_only  # elsewhere Triton's interpreter has run these cases
@pytest.mark.skipif(triton_support.MISSING is not None, reason=f"kernels cannot be compiled: {triton_support.MISSING}")
@pytest.mark.parametrize("dtype", MAX_EXPONENT)
def test_the_kernels_of_matrices_in_8_bits_are_their_twin(dtype: torch.dtype) -> None:
    from tests.slow import formulas

    for kind in (torch.float32, torch.bfloat16):
        for shape in (*formulas.MATRICES, (2048, 4096), (5000, 1000)):
            formulas.check_quantize(shape, dtype, kind, GPU)
    formulas.check_scales(GPU)


@needs_fp8
@cuda_only
def test_a_matrix_of_more_than_two_thousand_million_numbers_has_its_last_row() -> None:
    if torch.cuda.get_device_properties(DEVICE).total_memory < 16e9:
        pytest.skip("needs 9 GB of the GPU")
    x = torch.zeros((1 << 17) + 3, 1 << 14, dtype=torch.bfloat16, device=DEVICE)
    x[-1].normal_()
    full, last_row = quantize(x, columns=True), quantize(x[-1:])
    assert full.rows is not None and full.columns is not None and last_row.rows is not None
    assert torch.equal(full.scale, last_row.scale) and not full.columns[:, len(x) :].float().any()
    for last in (full.rows[-1], full.columns[:, len(x) - 1]):
        assert torch.equal(last.float(), last_row.rows[0].float())


@pytest.mark.parametrize("dtype", MAX_EXPONENT)
def test_a_cast_of_the_gpu_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    """Inputs: the FP8 values, midpoints between them and their neighbours, and random elements."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    midpoints = (values[1:] + values[:-1]) / 2
    around = [midpoints * (1 + 2.0**-20), midpoints * (1 - 2.0**-20)]
    x = torch.cat([values, midpoints, *around, torch.randn(5000), torch.randn(5000) * 2.0**-8])
    x = x.view(-1, 1).expand(-1, 2)
    expected, actual = (quantize(x.to(device), dtype, columns=True) for device in ("cpu", GPU))
    for actual_field, expected_field in zip(actual, expected, strict=True):
        assert actual_field is not None and expected_field is not None and actual_field.dtype == expected_field.dtype
        assert torch.equal(actual_field.cpu().double(), expected_field.double())


@needs_fp8
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 16), (5, 32, 48), (1000, 512, 2048)])
@pytest.mark.parametrize("exact", [True, False])
def test_a_product_of_the_gpu_is_its_twin(kinds: tuple[torch.dtype, torch.dtype], M: int, N: int, K: int, exact: bool) -> None:
    """The tolerance is relative to the magnitudes of the summands: Hopper's fast accumulation keeps 13 bits of a fraction."""
    draw = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(rows, K, generator=draw).to(DEVICE), kind) for rows, kind in zip((M, N), kinds))
    assert a.rows is not None and b.rows is not None
    factors, scales = (a.rows, b.rows), (a.scale, b.scale)
    expected = float8.reference_scaled_mm(*factors, *scales, torch.float64)
    terms = (a.rows.double() * a.scale).abs() @ (b.rows.double() * b.scale).abs().t()
    for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        actual = scaled_mm(*factors, *scales, dtype, exact)
        assert actual.dtype == dtype and actual.shape == (M, N) and torch.equal(actual, scaled_mm(*factors, *scales, dtype, exact))
        assert ((actual.double() - expected).abs() <= (2.0**-12 if exact else 2.0**-8) * terms + rounding * expected.abs()).all()


@needs_fp8
@cuda_only
def test_casts_and_products_are_captured_without_waiting_and_an_infinity_shows() -> None:
    x, w = torch.randn(40, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)

    def run() -> torch.Tensor:
        a, b = quantize(x.bfloat16()), quantize(w.bfloat16())
        assert a.rows is not None and b.rows is not None
        return scaled_mm(a.rows, b.rows, a.scale, b.scale, torch.bfloat16)

    run()
    with forbid_synchronization():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for factor in (1.0, 1e-3, torch.inf):
        x[3, 4].mul_(factor)
        graph.replay()
        assert torch.equal(out, run()) if factor < 2 else out.isnan().all()


@needs_fp8
@cuda_only
@pytest.mark.timing
def test_casts_run_at_the_speed_of_memory() -> None:
    from hpcai.cli.bench import gpu_kernels, timing

    options = SimpleNamespace(tiny=False, repeats=7, variants=["ours"], rates=timing.peak_rates(DEVICE))
    rows = [row for name in ("float8-tokens", "float8-activations") for row in gpu_kernels.measure(name, options)]
    assert all(row["graph"] and row["of_copy"] >= 0.6 for row in rows), rows
