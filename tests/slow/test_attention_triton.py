"""The Triton kernels of gated attention, in Triton's interpreter, agree with their reference."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

PROGRAM = """
import pytest, sys, torch, triton.language as tl
from hypothesis import Phase, example, given, settings, strategies as st
from triton.runtime.interpreter import InterpreterBuilder
from hpcai.kernels import attention, attention_triton as fused
dot = InterpreterBuilder.create_dot
def dot_of_values(self, a, b, *args):  # the interpreter would multiply the bits of bfloat16
    return dot(self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *args)
InterpreterBuilder.create_dot = dot_of_values
attention._fused = lambda x: True  # as on CUDA

def with_layout(x, layout):  # equal values in another memory layout
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        return torch.cat((x, x), -2)[..., : x.shape[-2], :]
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "heads last" else x

def run(function, qkvg, gate_bias, mask, bias, weight):
    inputs = [x.detach().requires_grad_() for x in (qkvg, gate_bias, bias) if x is not None]
    out = function(*inputs[:2], mask, *inputs[2:])
    return [out, *torch.autograd.grad((out * weight).sum() if weight is not None else out.sum(), inputs)]

def check_close(results, references, tolerance):
    for name, actual, expected in zip("out qkvg gate_bias bias".split(), results, references, strict=False):
        over = (actual.double() - expected.double()).abs().max() / (1 + expected.double().abs().max())
        assert actual.shape == expected.shape and over <= tolerance, (name, float(over))  # NaN fails too

examples = []
entries_and_tile = (1000, 512) if int(sys.argv[1]) > 2 else (500, 256)
@settings(max_examples=int(sys.argv[1]), derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
@given(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(16, 50), st.integers(1, 2), st.sampled_from([4, 8, 16, 32, 64])),
       st.sampled_from(["contiguous", "transposed", "sliced", "heads last"]), st.sampled_from([None, "rows", "columns"]),
       st.sampled_from([0.0, -300.0, 300.0]), st.sampled_from(["all", "some", "none in a row"]), st.sampled_from([64, 128]),
       st.sampled_from([1, 24, 528]), st.booleans())
@example((1, 1, entries_and_tile[0], 1, 8), "contiguous", "rows", 0.0, "some", entries_and_tile[1], 528, False)
@example((1, 5, 37, 3, 8), "transposed", "columns", 0.0, "none in a row", 64, 24, True)
def check_float32(shape, layout, bias_layout, far, present, tile, programs, spread):
    torch.manual_seed(len(examples))
    examples.append(0)
    fused.TILE, fused.PROGRAMS, (batch, rows, entries, heads, channels) = tile, programs, shape
    qkvg = with_layout(torch.randn(batch, rows, entries, 4, heads, channels), layout)
    mask = (torch.rand(batch, entries, rows) > (0.0 if present == "all" else 0.4)).float().transpose(1, 2)
    if present == "none in a row":
        mask[-1, -1] = 0
    bias = None if bias_layout is None else torch.randn(batch, heads, entries, entries) + far
    bias = bias.transpose(2, 3) if bias_layout == "columns" else bias
    weight = None if spread else torch.randn(batch, rows, entries, heads * channels)
    inputs = qkvg, torch.randn(heads * channels), mask, bias, weight
    results, references = run(attention.gated_attention, *inputs), run(attention.reference, *inputs)
    check_close(results, references, 3e-6 if bias is None or not far else 1e-4)  # float32 has 5 digits after 300
    if layout in ("contiguous", "transposed"):
        assert results[1].stride() == qkvg.stride(), "the gradient has the layout of its input"
    if present == "none in a row":
        qkvg, large = qkvg.detach(), torch.full_like(inputs[1], 50.0)
        plain_mean = qkvg[-1, -1, :, 2].mean(0) * torch.sigmoid(qkvg[-1, -1, :, 3] + 50)
        out = attention.gated_attention(qkvg, large, mask, bias)[-1, -1].unflatten(-1, (heads, channels))
        torch.testing.assert_close(out, plain_mean, rtol=1e-5, atol=1e-6)

def check_bfloat16():
    fused.TILE = 64
    qkvg, bias = torch.randn(1, 3, 40, 4, 2, 16).bfloat16(), torch.randn(1, 2, 40, 40).bfloat16()
    mask, gate_bias, weight = torch.ones(1, 3, 40), torch.randn(32), torch.randn(1, 3, 40, 32).bfloat16()
    results = run(attention.gated_attention, qkvg, gate_bias, mask, bias, weight)
    assert [x.dtype for x in results] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    references = run(attention.reference, *(x.double() for x in (qkvg, gate_bias, mask, bias, weight)))
    for actual, expected in zip(results, references):
        assert (actual - expected).norm() <= 0.015 * expected.norm(), float((actual - expected).norm() / expected.norm())

def check_compiled():
    mask = torch.ones(1, 2, 20)
    shapes = (1, 2, 20, 4, 2, 8), (16,), (1, 2, 20, 20), (1, 2, 20, 16)
    qkvg, gate_bias, bias, weight = (torch.randn(shape) for shape in shapes)
    def block(qkvg, *args):
        return attention.gated_attention(qkvg + 1, *args) * 2
    inputs = with_layout(qkvg, "transposed"), gate_bias, mask, bias, weight
    check_close(run(torch.compile(block, backend="aot_eager", fullgraph=True), *inputs), run(block, *inputs), 0)
    qkvg, gate_bias, bias = (x.requires_grad_() for x in (inputs[0], gate_bias, bias))
    torch.library.opcheck(fused._attend, (qkvg, gate_bias, mask, bias))

def check_refused():
    for args in ((torch.ones(1, 2, 19), torch.ones(1, 2, 20, 20)), (torch.ones(1, 2, 20), torch.ones(1, 2, 20, 19))):
        with pytest.raises(RuntimeError, match="expand"):  # not read past an end
            attention.gated_attention(torch.ones(1, 2, 20, 4, 2, 8), torch.ones(16), *args)
check_float32(), check_bfloat16(), check_compiled(), check_refused()
print(len(examples), "examples")
"""


@pytest.mark.parametrize("examples", [2, pytest.param(150, marks=pytest.mark.claim)])
def test_kernels_agree_with_the_reference_over_random_shapes_strides_and_masks(examples: int) -> None:
    assert f"{examples + 2} examples" in run_program(PROGRAM, str(examples), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
