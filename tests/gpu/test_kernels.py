"""Kernels on a GPU equal their references in plain PyTorch, which also run there without a compiler."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcai.kernels import attention, batchnorm, float8, fused_optimizer, philox, triton_support
from hpcai.models.diffusion import noise
from hpcai.nn import BatchNorm
from hpcai.nn.deferred_init import materialize
from tests.gpu.device import DEVICE, GPU, ON_GPU, cuda_only, disable_tf32
from tests.unit.nn.test_deferred_init import build, build_and_materialize, values

MISSING = triton_support.MISSING
pytestmark = pytest.mark.skipif(ON_GPU and MISSING is not None, reason=f"kernels cannot be compiled: {MISSING}")
SHAPES = [(2, 728, 48, 72), (1, 48, 192, 288), (2, 91, 12, 18), (3, 6, 7, 5), (2, 32, 8, 16, 16)]


# ---- attention


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("length", "channels"), [(256, 32), (200, 8), (384, 16), (24, 64)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_kernels_of_attention_are_its_twin(dtype: torch.dtype, rtol: float, length: int, channels: int, biased: bool) -> None:
    """Results and gradients agree relative to their norms, and are bitwise equal in a second call."""
    disable_tf32()
    draw = torch.Generator(GPU).manual_seed(0)
    shapes = (2, length, 12, 4, 4, channels), (4 * channels,), (2, 4, length, length), (2, 12, length, 4 * channels)
    qkvg, gate_bias, bias, weight = (torch.randn(shape, device=GPU, generator=draw).to(dtype) for shape in shapes)
    mask = (torch.rand(2, 12, length, device=GPU, generator=draw) > 0.3).float()
    mask[0, 0] = 0

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = qkvg.transpose(1, 2), gate_bias, *([bias.transpose(2, 3)] if biased else [])
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves[:2], mask, *leaves[2:])
        return [out, *torch.autograd.grad(out, leaves, weight.to(dtype))]

    assert attention._fused(qkvg) is ON_GPU
    actual, repeated = run(attention.gated_attention, dtype), run(attention.gated_attention, dtype)
    for result, other, expected in zip(actual, repeated, run(attention.reference, torch.float32), strict=True):
        assert result.dtype == dtype and torch.equal(result, other)
        assert float((result.float() - expected).detach().norm()) <= rtol * float(expected.detach().norm())


# ---- layer norm, gates


@cuda_only  # elsewhere Triton's interpreter has run these cases
@pytest.mark.parametrize("of", ["norms", "gates", "embeddings", "experts", "graph attention", "paged attention"])
def test_the_kernels_of_norms_gates_embeddings_experts_and_attention_are_their_formulas(of: str) -> None:
    from tests.slow import formulas

    if of == "experts":
        disable_tf32()
        for dtype in formulas.ULP:
            for combined in formulas.COMBINED:
                formulas.check_combine(combined, dtype, GPU)
        for grouped, kind in product(formulas.GROUPED, (*formulas.ULP, *[None] * float8.is_supported(DEVICE))):
            formulas.check_grouped_mm(grouped, kind, GPU)
        return
    if of == "graph attention":
        for graph, kind in product(formulas.GRAPHS, (torch.float32, torch.bfloat16)):
            formulas.check_graph_attention(graph, kind, GPU)
        return
    if of == "paged attention":
        disable_tf32()
        for case, kind in product(formulas.PAGED, formulas.ULP):
            formulas.check_paged_attention(case, kind, GPU)
        return
    if of == "norms":
        for case, (x, y) in product(formulas.LAYOUTS, formulas.DTYPES):
            formulas.check_layer_norm(case, x, y, GPU)
        formulas.check_nonfinite_rows(GPU)
        return
    if of == "embeddings":
        for table, rowwise, kind in product(formulas.TABLES, (False, True), (torch.float32, torch.float64)):
            formulas.check_embedding_update(table, rowwise, kind, GPU)
        return
    for kind in (torch.float32, torch.bfloat16):
        for case in formulas.GATES:
            formulas.check_gate(case, kind, GPU)
        for focal in formulas.FOCAL:
            formulas.check_focal_loss(focal, kind, GPU)
        formulas.check_glu_halves(kind, GPU)


# ---- batch norm


def run_layer(norm: nn.Module, x: torch.Tensor, residual: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    residual = None if residual is None else residual.detach().clone().requires_grad_()
    y = norm(x, residual)
    y.backward(dy)
    tensors = [y, x.grad, *([] if residual is None else [residual.grad]), *(p.grad for p in norm.parameters()), *norm.buffers()]
    return [t.detach().double().cpu() for t in tensors if t is not None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_plus", [False, True])
def test_batch_norm_in_triton_is_that_of_float64(shape: tuple[int, ...], dtype: torch.dtype, with_plus: bool) -> None:
    torch.manual_seed(0)
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, residual, dy = (torch.randn(shape).to(dtype).to(DEVICE).contiguous(memory_format=memory_format) for _ in range(3))
    norm = BatchNorm(shape[1], relu=True)
    nn.init.normal_(norm.weight)
    norm64 = BatchNorm(shape[1], relu=True).double()
    norm64.load_state_dict(norm.state_dict())
    assert ("triton" in str(batchnorm._passes(x))) is ON_GPU
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    linear = deepcopy(norm64)
    linear.relu = False
    preactivation = linear((3 + x).double().cpu(), residual.double().cpu() if with_plus else None)
    dy.masked_fill_((preactivation.abs() < 3 * tolerance).to(DEVICE), 0)  # rounding may change their sign before ReLU
    actual = run_layer(norm.to(DEVICE), 3 + x, residual if with_plus else None, dy)
    expected = run_layer(norm64, (3 + x).double().cpu(), residual.double().cpu() if with_plus else None, dy.double().cpu())
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max())))


# ---- the update


@pytest.mark.parametrize("kind", ["fp32", "bf16 gradient", "bf16 moments"])
def test_the_kernel_is_its_twin(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 100_003
    rows = {name: torch.randn(n, generator=generator) for name in ("weights", "gradient", "first", "second", "average")}
    rows["second"] = rows["second"].square()
    if kind == "bf16 gradient":
        rows["gradient"] = rows["gradient"].bfloat16()
    if kind == "bf16 moments":
        rows |= {name: rows[name].bfloat16() for name in ("first", "second")}
    results = []
    for device in ("cpu", GPU):
        x = {name: row.clone().to(device) for name, row in rows.items()}
        bf16_copy = x["weights"].bfloat16()
        values = {"lr": 1e-3, "step": 3.0, "scale": 0.5, "found_inf": 0.0, "average_rate": 0.1}
        scalars = {name: torch.tensor(value, device=device) for name, value in values.items()}
        fused_optimizer.adam_(x["weights"], x["gradient"], x["first"], x["second"], **scalars, betas=(0.9, 0.99), eps=1e-8,
                     weight_decay=0.1, bf16_copy=bf16_copy, average=x["average"], seed=torch.tensor(7, device=device))  # fmt: skip
        results.append({name: row.cpu().float() for name, row in {**x, "low": bf16_copy}.items()})
    for name, row in results[0].items():
        loose = name == "low" or (kind == "bf16 moments" and name in ("first", "second"))
        torch.testing.assert_close(results[1][name], row, rtol=8e-3 if loose else 2e-6, atol=1e-6)


# ---- random numbers


@pytest.mark.parametrize("key", [0, 7, (1 << 63) - 1, -5])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 100_003), (3, 4096), ((1 << 33) + 5, 999)])
def test_numbers_of_the_gpu_are_those_of_the_cpu(key: int, first: int, count: int) -> None:
    assert torch.equal(philox.bits(key, first, count, device=GPU).cpu(), philox.bits(key, first, count))
    assert torch.equal(philox.uniform(key, first, count, device=GPU).cpu(), philox.uniform(key, first, count))
    actual, expected = philox.normal(key, first, count, device=GPU).cpu(), philox.normal(key, first, count)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    starts = torch.tensor([first, first + 17, 2])
    actual = philox.bits(torch.tensor(key, device=DEVICE), starts.to(DEVICE), 33)
    assert torch.equal(actual.cpu(), philox.bits(key, starts, 33))


@cuda_only
def test_noise_of_samples_is_that_of_the_cpu_also_by_a_graph_whose_samples_change() -> None:
    size, box = (3, 9, 10, 7), (slice(None), slice(2, 5), slice(4, 9))
    index, epoch = torch.tensor([3, 2**33, 5]), torch.tensor([0, 1, 70])
    gpu_index, gpu_epoch = index.to(DEVICE), epoch.to(DEVICE)

    def draw(index: Tensor, epoch: Tensor) -> list[Tensor]:
        full, window = (noise.normals(7, noise.NOISE, index, epoch, size, box=x) for x in (None, box))
        return [full, window, noise.uniforms(7, noise.TIMES, index, epoch)]

    actual = draw(gpu_index, gpu_epoch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = draw(gpu_index, gpu_epoch)
    for _ in range(2):
        gpu_index.copy_(index)
        gpu_epoch.copy_(epoch)
        graph.replay()
        for result, expected in zip(actual, draw(index, epoch)):
            torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)
        index, epoch = index + 1, epoch.flip(0)


def test_weights_drawn_on_the_gpu_are_those_of_the_cpu() -> None:
    expected = values(build_and_materialize())
    for name, x in materialize(build(), GPU).named_parameters():
        torch.testing.assert_close(x.detach().cpu(), expected[name], rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


# ---- without a compiler


def normed() -> list[Tensor]:
    torch.manual_seed(0)
    x = (3 + torch.randn(2, 91, 12, 18)).to(DEVICE).contiguous(memory_format=torch.channels_last)
    return run_layer(BatchNorm(91).to(DEVICE), x, x.flip(0), x.roll(1, 0))  # no ReLU, which rounding would switch


def attended() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 12, 40, 4, 4, 8), (32,), (2, 4, 40, 40)
    leaves = [torch.randn(shape, generator=draw).to(DEVICE).requires_grad_() for shape in shapes]
    mask = (torch.rand(2, 12, 40, generator=draw) > 0.3).float().to(DEVICE)
    out = attention.gated_attention(leaves[0], leaves[1], mask, leaves[2])
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("compute", [normed, attended])
def test_without_a_compiler_the_plain_twins_give_the_same(compute: Callable[[], list[Tensor]], monkeypatch: Any) -> None:
    disable_tf32()
    by_kernels = compute()
    monkeypatch.setattr(triton_support, "MISSING", "there is no gcc")
    assert not triton_support.is_supported(torch.empty(1, device=GPU))
    for actual, expected in zip(compute(), by_kernels, strict=True):
        assert float((actual - expected).detach().norm()) <= 4e-5 * float(expected.detach().norm())
