"""Triton kernels in Triton's interpreter: those of LLMs (RMSNorm, rotary embeddings, SwiGLU), gates, focal loss, attention,
optimizers, and the norms of layers, batches, groups and instances agree with their formulas; FP8 quantization and Philox equal
their references. Tests on a GPU (tests/gpu) show that casts of the hardware round as in torch."""

import pytest

from tests.slow.programs import interpret_programs

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

DOT = """
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder
dot = InterpreterBuilder.create_dot
def dot_of_values(self, a, b, *args):  # the interpreter would multiply the bits of bfloat16
    return dot(self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *args)
InterpreterBuilder.create_dot = dot_of_values
"""

DECODER = """
import pytest, sys, torch
from hpcai.kernels import gates_triton, layernorm_triton, rotary_triton
from tests.slow import formulas
some = sys.argv[1] == "some"
for number, shape in enumerate(formulas.RMS_NORM_SHAPES):
    layernorm_triton.PROGRAMS = (2, 528, 3)[number % 3]
    layernorm_triton.TILE = (256, 4096)[number % 2]
    for x, y in (formulas.DTYPES[number % 4],) if some else (formulas.DTYPES[number % 3], formulas.DTYPES[3]):
        formulas.check_rms_norm(shape, x, y, "cpu", trainable=number % 4 != 3)
rotary_triton.PAIRS = 2048
for number, case in enumerate(formulas.ROTARY):
    dtypes = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    for dtype, table_dtype in (dtypes[number % 3],) if some else dtypes:
        formulas.check_rotary(case, dtype, table_dtype, number % 2 == 0, "cpu")
        formulas.check_rotary(case, dtype, table_dtype, number % 2 == 1, "cpu", True)
q, a = torch.ones(2, 3, 5, 4), torch.ones(1, 5, 4)
for call in (
    lambda: layernorm_triton.rms_norm(torch.ones(3, 8), torch.ones(9), 1e-5, torch.float32),
    lambda: gates_triton.swiglu(torch.ones(3, 8), torch.ones(4, 8)),
    lambda: rotary_triton.apply_rotary(q, q[:, :, :4], a, a),
    lambda: rotary_triton.apply_rotary(q, q, a[:, :4], a[:, :4]),
):
    with pytest.raises(ValueError, match="expected"):  # not read past an end
        call()
print("all formulas")
"""

GRAPH = """
import torch
from hpcai.kernels import graph_attention_triton
from tests.slow import formulas
for number, case in enumerate(formulas.GRAPHS):
    graph_attention_triton.EDGES = (16, 4)[number % 2]
    graph_attention_triton.WIDE = (1024, 16)[number % 2]
    formulas.check_graph_attention(case, torch.float32, "cpu")
formulas.check_graph_attention(formulas.GRAPHS[1], torch.bfloat16, "cpu")
print("all formulas")
"""

# The interpreter truncates in casts to 8 bits, which have to round, and takes the smallest values of bfloat16 for 0. torch's casts
# replace its casts here.
FLOAT8 = """
import itertools, sys, numpy as np, torch, triton.language as tl
from triton.runtime import interpreter
convert, formats = interpreter._convert_float, {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
def cast(x, source, target, rounding):
    if target in formats:
        return torch.from_numpy(x).to(formats[target]).view(torch.uint8).numpy()
    return x.astype(np.uint32) << 16 if (source, target) == (tl.bfloat16, tl.float32) else convert(x, source, target, rounding)
interpreter._convert_float = cast
from hpcai.kernels import float8_triton
from tests.slow import formulas
count = 0
for number, shape in enumerate(formulas.MATRICES):
    float8_triton.TILE, float8_triton.PROGRAMS = ((512, 2), (8192, 512), (512, 3))[number % 3]
    cases = list(itertools.product(formulas.MAX_EXPONENT, (torch.float32, torch.bfloat16)))
    for dtype, x_dtype in cases if sys.argv[1] == "all" else [cases[number // 3 * 2 + number % 2]]:
        formulas.check_quantize(shape, dtype, x_dtype, "cpu")
        count += 1
formulas.check_scales("cpu")
print(count, "cases")
"""

MOE = DOT + """
import pytest, sys, torch
from hpcai.kernels import moe_triton
from tests.slow import formulas
dtypes, count = (torch.float32, torch.bfloat16, torch.float16, None), 0
for number, case in enumerate(formulas.COMBINED + formulas.GROUPED):
    check = formulas.check_combine if number < len(formulas.COMBINED) else formulas.check_grouped_mm
    for dtype in dtypes[:3] if check is formulas.check_combine else dtypes:
        if sys.argv[1] == "all" or (number + dtypes.index(dtype)) % 2 == 0:
            count += [check(case, dtype, "cpu")] == [None]
ends = torch.ones(2, dtype=torch.int32)
for shapes in ((1, 8), (2, 7, 9)), ((1, 8), (3, 8, 9)), ((4, 1), (2, 5)):
    with pytest.raises(ValueError, match="expected equal inner sizes"):  # not read past an end
        moe_triton.grouped_mm(*map(torch.ones, shapes), ends, torch.float32, None)
print(count, "cases")
"""

PAGED = DOT + """
import pytest, sys, torch
from hpcai.kernels import paged_attention_triton as fused
from tests.slow import formulas
count = 0
for number, case in enumerate(formulas.PAGED):
    for n, dtype in enumerate(formulas.ULP):
        if sys.argv[1] == "all" or (number + n) % 3 == 0:
            fused.BYTES, fused.RANGE = ((8192, 128), (2048, 64), (4096, 10**6))[(number + 2 * n) % 3]
            formulas.check_paged_attention(case, dtype, "cpu")
            count += 1
q, pool, tables, positions = torch.ones(2, 4, 8), torch.ones(3, 2, 4, 8), torch.zeros(2, 2).long(), torch.ones(2).long()
for inputs in (q, pool[..., :4], tables), (q, pool, tables[:1]), (q.half(), pool, tables), (q[:, :3], pool, tables):
    with pytest.raises(ValueError, match="expected contiguous pools"):  # not read past an end
        fused.paged_attention(inputs[0], pool, *inputs[1:], positions, None, None, None)
print(count, "cases")
"""

GATES = """
import itertools, sys, torch
from hpcai.kernels import gates_triton as fused
from tests.slow import formulas
DTYPES = torch.float32, torch.bfloat16
cases = list(itertools.product(formulas.GATES, DTYPES))
for number, (case, dtype) in enumerate(cases if sys.argv[1] == "all" else cases[::8] + cases[7::8]):
    fused.TILE = (512, 4096, 2048)[number % 3]
    formulas.check_gate(case, dtype, "cpu")
for fused.TILE, dtype in ((512, DTYPES[0]), (4096, DTYPES[1]), (2048, DTYPES[0])):
    formulas.check_glu_halves(dtype, "cpu")
for case in ("triangles", "triangles in one protein", "channels last", "two halves of rows"):
    x, g, mask = formulas.GATES[case](torch.randn)
    plan = fused._plan(x, g, mask)
    assert plan.x is x and plan.g is g and plan.mask is mask, f"{case} are read in place"
x, g, mask = formulas.GATES["triangles, incoming"](torch.randn)
plan = fused._plan(x, g, mask)
assert plan.x is x and plan.g is g, "only the mask is copied"
print(number + 1, "cases")
"""

FOCAL = """
import itertools, pytest, sys, torch
from hpcai.kernels import focal_loss_triton
from tests.slow import formulas
cases = list(itertools.product(formulas.FOCAL, (torch.float32, torch.bfloat16)))[:: 1 if sys.argv[1] == "all" else 3]
for case, dtype in cases:
    formulas.check_focal_loss(case, dtype, "cpu")
with pytest.raises(ValueError, match="expected labels"):
    focal_loss_triton.focal_loss(torch.ones(3, 8), torch.zeros(4).long(), 0.25, 2.0)
print(len(cases), "cases")
"""

EMBEDDING = """
import itertools, sys, torch
from tests.slow import formulas
cases = list(itertools.product(formulas.TABLES, (False, True)))[:: 1 if sys.argv[1] == "all" else 3]
for case, rowwise in cases:
    formulas.check_embedding_update(case, rowwise, torch.float32, "cpu")
print(len(cases), "cases")
"""

LAYERNORM = """
import pytest, sys, torch, triton
from hpcai.kernels import layernorm_triton as fused
from tests.slow import formulas
cases = [(number, case, low_precision) for number, case in enumerate(formulas.LAYOUTS) for low_precision in (True, False)]
for count, (number, case, low_precision) in enumerate(cases if sys.argv[1] == "all" else cases[::8] + cases[7::8]):
    x, y = formulas.DTYPES[number % 3 if low_precision else 3]
    # Several tiles per case: full and partial ones, programs with one tile and with several.
    fused.TILE = triton.next_power_of_2(max(64, formulas.LAYOUTS[case][0] // (3, 8)[number % 2]))
    fused.PROGRAMS = (2, 528, 3)[count % 3]
    formulas.check_layer_norm(case, x, y, "cpu")
fused.TILE = 1024
for case in ("rows of 128", "rows of 384", "rows of 23", "channels first", "channels first, odd height and width"):
    for away in (1e4, -1e4) if sys.argv[1] == "all" else (1e4,):
        formulas.check_layer_norm(case, torch.float32, torch.float32, "cpu", away)
formulas.check_nonfinite_rows("cpu")
for parameters in ((torch.ones(9), torch.ones(8)), (torch.ones(8), torch.ones(1))):
    with pytest.raises(ValueError, match="the channels of x"):  # not read past an end
        fused.layer_norm(torch.ones(3, 8), *parameters, 1e-5, torch.float32)
huge = torch.empty_strided((1 << 12, 1 << 12, 256), (1 << 12, 1, 1 << 24), device="meta")
assert fused._form(huge) is None and fused._form(huge[..., :64]) is not None, "offsets in a tile have 32 bits"
print(count + 1, "cases")
"""

PHILOX = """
import torch
from hpcai.kernels import philox, philox_triton
DTYPES = {"bits": [torch.int64], "uniform": [torch.float32, torch.float64], "normal": [torch.float32, torch.float64]}
def check_equal(kind, actual, expected):
    if kind == "normal":
        double = actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=1e-12 if double else 2e-5, atol=1e-12 if double else 2e-6)
    else:
        assert torch.equal(actual, expected), kind
for kind, dtypes in DTYPES.items():
    for dtype in dtypes:
        kwargs = {} if kind == "bits" else {"dtype": dtype}
        make = getattr(philox, kind)
        for key in (2**64 - 5, torch.tensor(-77)):
            # The last overflows the low word of a counter.
            for first, n, upper in ((0, 1100, 0), (6, 5, 5), (2**34 - 3, 1100, 2**64 - 3)):
                actual = torch.empty(n, dtype=dtype)
                philox_triton.run(kind, key, first, upper, actual)
                check_equal(kind, actual, make(key, first, n, upper=upper, **kwargs))
            positions = torch.randint(0, 2**40, (7, 3))
            actual = torch.empty(7, 3, dtype=dtype)
            philox_triton.run(kind, key, positions, 0, actual)
            check_equal(kind, actual, make(key, positions, **kwargs))
            for count in (1, 3, 530):
                rows = torch.empty(7, 3, count, dtype=dtype)
                philox_triton.run(kind, key, positions, 7, rows)
                check_equal(kind, rows, make(key, positions, count, upper=7, **kwargs))
        keys = torch.randint(-(2**63), 2**63 - 1, (7, 1))
        uppers = torch.randint(-(2**63), 2**63 - 1, (3,))
        philox_triton.run(kind, keys, positions, uppers, rows)
        check_equal(kind, rows, make(keys, positions, 530, upper=uppers, **kwargs))
print("equal")
"""

ATTENTION = DOT + """
import pytest, sys, torch
from hypothesis import Phase, example, given, settings, strategies as st
from hpcai.kernels import attention, attention_triton as fused
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
full = int(sys.argv[1]) > 2
entries_and_tile = (1000, 512) if full else (300, 128)
@settings(max_examples=int(sys.argv[1]), derandomize=True, deadline=None, database=None, phases=[Phase.explicit, Phase.generate])
@given(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(16, 50), st.integers(1, 2), st.sampled_from([4, 8, 16, 32, 64])),
       st.sampled_from(["contiguous", "transposed", "sliced", "heads last"]), st.sampled_from([None, "rows", "columns"]),
       st.sampled_from([0.0, -300.0, 300.0]), st.sampled_from(["all", "some", "none in a row"]), st.sampled_from([64, 128]),
       st.sampled_from([1, 24, 528]), st.booleans())
@example((1, 1, entries_and_tile[0], 1, 8), "contiguous", "rows", 0.0, "some", entries_and_tile[1], 528, False)
@example((1, 5 if full else 2, 37, 3, 8), "transposed", "columns", 0.0, "none in a row", 64, 24, True)
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
check_float32(), check_bfloat16(), check_refused(), check_compiled() if full else None
print(len(examples), "examples")
"""

BATCHNORM = """
import itertools, pytest, random, sys, torch
from hpcai.kernels import batchnorm, batchnorm_triton as fused
from hpcai.nn import BatchNorm, GroupNorm, InstanceNorm
from hpcai.nn.groupnorm import PerSampleNorm
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter truncates to bfloat16
FORM = {4: torch.channels_last, 5: torch.channels_last_3d}
def check_close(name, actual, expected, terms):
    over = (actual.double() - expected).abs() - 1e-6 * terms - ULP[actual.dtype] * (expected.abs() + 2**-14)
    same = (actual == expected) | (actual.isnan() & expected.isnan()) | (expected.isfinite() & (over <= 0))
    assert actual.shape == expected.shape and same.all(), (name, over.max())

def check_example(r, k):
    fused.PROGRAMS, fused.PARTS, fused.SECTOR = r.choice([1, 3, 12, 24]), r.choice([2, 256]), r.choice([8, 64, 64])
    channels, dtype = [1, 6, 8, 38, 48, 91, 160, 728][k % 8], [torch.float32, torch.bfloat16, torch.float16][k % 3]
    shapes = (1, 1, 1), (7, 1, 1), (3, 5, 7), (1, 1, 1, 1), (3, 3, 4, 5), (2, 22, 25), (2, 7, 8, 9)
    batch, *spatial = r.choice(shapes[: 5 if channels > 160 and times == 1 else 7])  # a wide and large one takes seconds
    samples, group = r.choice([1, batch]), r.choice([n for n in (1, 1, 2, 7, 16, channels) if channels % n == 0])
    shape, dims, scale = (batch, channels, *spatial), [*[0] * (samples == 1), *range(2, 2 + len(spatial))], 10 ** r.uniform(-1, 1)
    away = scale * r.choice([0.0, 1.0, 1000.0 if dtype == torch.float32 else 3.0])
    offsets = away * (1 + torch.rand(channels, *[1] * len(spatial)))
    x, dy, y, residual = ((torch.randn(shape) * s + a).to(dtype).contiguous(memory_format=FORM[len(shape)])
                          for s, a in ((scale, offsets), (1.0, 0.1), (1.0, 0.0), (2.0, 0.0)))
    act = r.choice([None, "relu", "silu"])
    y = None if act in (None, "silu") else r.choice([None, y, y.trunc()])
    residual = r.choice([None, residual, residual.contiguous()])
    def exact(group):
        wide = x.double().reshape(samples, batch // samples, channels // group, -1)
        return wide.mean((1, 3)).flatten(), wide.var((1, 3), correction=0).flatten()
    (mean, variance), (exact_mean, exact_variance) = fused.moments(x, samples, group), exact(group)
    check_close("mean", mean, exact_mean, exact_variance.sqrt())
    check_close("variance", variance, exact_variance, (2 + 0.05 * away / scale) * exact_variance)
    mean, variance = (batchnorm.repeat_groups(t, group) for t in (mean, variance))
    (weight, bias), (a, b) = torch.randn(2, channels), torch.randn(2, samples * channels)
    for t in (x, dy, y, residual):
        if t is not None and r.random() < 0.3:
            t[0, -1].fill_(r.choice([torch.nan, torch.inf, -torch.inf]))
    for actual, expected in zip(fused.moments(x, samples, group), exact(group)):
        assert (actual.isfinite() == expected.isfinite()).all(), "non-finite values stay in their channel and sample"
    rule, over = batchnorm.NormParams(mean, variance, weight, bias, 1e-5, act), [samples, channels] + [1] * len(spatial)
    M, P, Q, I = (t.double().view(over) for t in (mean, a, b, (variance + 1e-5).rsqrt()))
    W, B = (t.double().view(1, *over[1:]) for t in (weight, bias))
    N, added = (x.double() - M) * I, 0.0 if residual is None else residual.double()
    z, terms, rules = W * N + B, (W * N).abs() + B.abs(), (rule, rule._replace(act=None))
    y_ = fused.normalise(x, rule, residual)
    check_close("y", y_, batchnorm.apply_activation(z + added, act), terms + abs(added))
    if act == "relu" and y is None:
        side = fused.normalise(x, rules[1], None)
        z = torch.where((side <= 0) == (z <= 0), z, side.double())  # forward and backward agree on the sign of values near 0
    before, actual = fused.sums(dy, x, y, rule)
    assert y is not None or before is dy, "a tensor that need not be saved was written"
    dz, point = dy.double(), z if y is None else y.double()
    if act == "silu":
        sigmoid = point.sigmoid()
        dz = dz * sigmoid * (1 + point * (1 - sigmoid))
    elif act:
        dz = torch.where(point <= 0, 0.0, dz)
    bound = dy.double().abs() * (1 + terms) if act == "silu" else dz.abs()  # the derivative of silu is that at a rounded z
    check_close("dz", before, dy.double() if y is None else dz, bound)
    check_close("grad_weight", actual[0], (dz * N).sum(dims).flatten(), (bound * N.abs()).sum(dims).flatten())
    check_close("grad_bias", actual[1], dz.sum(dims).flatten(), bound.sum(dims).flatten())
    dz, rule = (dz, rule) if y is None else (before.double(), rules[1])
    dx = fused.grad_input(before, x, rule, a, b)
    check_close("dx", dx, I * (W * dz - Q - N * P), I * ((W * bound).abs() + Q.abs() + (N * P).abs()))
    assert all(t.dtype == dtype and t.is_contiguous(memory_format=FORM[t.ndim]) for t in (y_, before, dx))

class RecordedAllReduce(torch.nn.Module):
    def forward(self, tensor):
        self.sent.append(tensor.clone())
        return tensor.add_(next(self.received, 0))

def check_network(r, channels, processes, group):
    # A batch norm over the batches of all processes, or (``group`` channels) a norm of samples whose maps are sharded.
    reference = torch.nn.GroupNorm(channels // group, channels) if group else torch.nn.BatchNorm2d(channels)
    act, residual = r.choice([None, "relu", *["silu"] * (group > 0)]), r.choice(["none", "fixed", "trained"])
    make = {0: lambda: BatchNorm(channels, act == "relu"), 1: lambda: InstanceNorm(channels, act)}
    make = make.get(group, lambda: GroupNorm(channels // group, channels, act))
    torch.nn.init.uniform_(reference.double().weight, 0.5, 1.5), torch.nn.init.uniform_(reference.bias, -1, 1)
    x, plus, dy = (3 * torch.randn(4, channels, 5, 6).contiguous(memory_format=torch.channels_last) + c for c in (5, 0, 0))
    x, plus = x.requires_grad_(), None if group or residual == "none" else plus.requires_grad_(residual == "trained")
    def run(layer, rows):
        form = torch.contiguous_format if layer is reference else torch.channels_last
        leaves = [t.detach()[rows].to(layer.weight.dtype).contiguous(memory_format=form).requires_grad_(t.requires_grad)
                  for t in (x, plus) if t is not None]
        y = layer(*leaves) if layer is not reference else layer(leaves[0]) + (0 if plus is None else leaves[1])
        y = batchnorm.apply_activation(y, act) if layer is reference else y
        y.backward(dy[rows].to(y.dtype))
        return [y, *(t.grad for t in leaves if t.requires_grad), layer.weight.grad, layer.bias.grad]
    shards = [slice(0, 3), slice(3, None)] if processes == 2 else [slice(None)]
    sent, rows = [[]] * processes, [(slice(None), slice(None), part) if group else part for part in shards]
    for _ in range(2 * processes - 1):  # on two processes each round has one more correct all-reduce, forward first
        layers = [make() for _ in rows]
        for layer, received in zip(layers, sent[::-1]):
            layer.load_state_dict(reference.state_dict())
            layer.all_reduce = RecordedAllReduce() if processes == 2 else layer.all_reduce
            layer.all_reduce.received, layer.all_reduce.sent = iter(received), []
        actual, sent = [run(layer, part) for layer, part in zip(layers, rows)], [layer.all_reduce.sent for layer in layers]
    for expected, *parts in zip(run(reference, slice(None)), *actual, strict=True):
        actual = sum(parts) if expected.ndim == 1 else torch.cat(parts, 2 if group else 0)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-4 if expected.ndim == 1 else 1e-5)  # 120 terms
    for (name, expected), layer in itertools.product(reference.named_buffers(), layers):
        torch.testing.assert_close(layer.get_buffer(name).double(), expected.double(), rtol=1e-6, atol=1e-6)
r, batchnorm._passes, _ = random.Random(7), lambda x: fused, torch.manual_seed(0)
times = int(sys.argv[1])  # 8 examples have every width, 24 each of them in every precision
PerSampleNorm._prefers_torch = lambda self, x: False
widths = (6, 91) * (times // 3) or (6,)
cases = [(channels, n, group) for channels in widths for n in (1, 2) for group in (0, 1, {6: 3, 91: 7}[channels])]
print(len([check_example(r, k) for k in range(8 * times)]), "examples", len([check_network(r, *case) for case in cases]))
with pytest.raises(ValueError, match="residual has shape"):
    fused.normalise(torch.ones(2, 1, 1, 1), batchnorm.NormParams(*torch.ones(4, 1), 0.1), torch.ones(1, 1, 1, 1))
"""

OPTIMIZERS = """
import random, sys, torch
from hpcai.kernels import fused_optimizer, fused_optimizer_triton
from hpcai.kernels.fused_optimizer import Segments, adagrad_, adam_, lamb_direction_, lars_, lars_norms, sgd_, lamb_update_

class TritonOperands(fused_optimizer.Operands):
    def __init__(self, *rows, **after):
        super().__init__(*rows, **after)
        self.triton = fused_optimizer_triton

def check_close(name, actual, expected):
    if actual.dtype != torch.bfloat16:
        torch.testing.assert_close(actual, expected, rtol=4e-6, atol=1e-6, msg=lambda m: f"{name}: {m}")
    else:  # low: the interpreter truncates; moments: equal bitwise unless float32 differs in the last place
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-7)
        assert name == "low" or (actual != expected).float().mean() < 0.02, f"{name}: different bits"

def run_example(r):
    n = r.choice([1, 15, 16, 1000, 1024, 2048, 3000, 5008])
    torch.manual_seed(r.randrange(10**6))
    rows = {"weights": torch.randn(n), "gradient": torch.randn(n) * 0.1, "first": torch.randn(n) * 0.1, "second": torch.rand(n)}
    for name in ("gradient", "first", "second"):
        rows[name] = rows[name].to(r.choice([torch.float32, torch.bfloat16] + [torch.float64] * (name == "gradient")))
    rows |= {"low": r.choice([torch.randn(n).bfloat16(), None]), "average": r.choice([torch.randn(n), None])}
    edges = sorted(r.choices(range(0, n + 1, r.choice([1, 16])), k=2 * r.randint(1, 4)))
    segments = Segments([(a, b - a) for a, b in zip(edges[::2], edges[1::2])], "cpu", n)
    kind = r.choice("adagrad adam adamw sgd keras lamb lars".split())
    lr, step = torch.tensor(r.choice([0.0, 1e-3, 0.3])), torch.tensor(r.choice([1.0, 2.0, 4.0, 50.0, 1e5]))
    scale, skip = r.choice([torch.tensor(0.37), torch.tensor(1.0), None]), torch.tensor(r.choice([0.0, 0.0, 0.0, 1.0]))
    rows["gradient"].fill_(torch.nan) if skip else None
    seed, offset = torch.tensor(r.choice([-5, 0, 7, 1 << 40])), r.choice([0, 5, 1 << 31, (1 << 33) + 3])
    decay, momentum, betas = r.choice([0.0, 0.1]), r.choice([0.0, 0.9]), r.choice([(0.9, 0.999), (0.0, 0.5)])
    nesterov = r.choice([True, False])
    take, ratio = torch.tensor(r.choice([1.0, 0.7, 0.5, 0.001])), torch.linspace(0.5, 2, segments.count)

    def run(row_class):
        fused_optimizer.Operands = row_class
        x = {k: None if t is None else t.clone() for k, t in rows.items()}
        after, rng = dict(bf16_copy=x["low"], average=x["average"], average_rate=take), dict(seed=seed, offset=offset)
        w, g, m, v, moments = *list(x.values())[:4], dict(scale=scale, found_inf=skip, weight_decay=decay)
        if kind in ("adam", "adamw"):
            adam_(w, g, m, v, lr=lr, step=step, betas=betas, eps=1e-8, decoupled=kind == "adamw", **moments, **after, **rng)
        elif kind == "adagrad":
            adagrad_(w, g, v, lr=lr, eps=1e-3, **moments, **after, **rng)
        elif kind in ("sgd", "keras"):
            sgd_(w, g, m, lr=lr, momentum=momentum, lr_in_momentum=kind == "keras", nesterov=nesterov, **moments, **after, **rng)
        elif kind == "lamb":
            x["direction"] = d = torch.zeros(n)
            x["sums"] = lamb_direction_(w, g, m, v, d, segments, step=step, betas=betas, eps=1e-6, **moments, **rng)
            lamb_update_(w, d, segments, ratio, lr=lr, found_inf=skip, **after)
        else:
            x["sums"] = lars_norms(w, g, segments, scale=scale)
            lars_(w, g, m, segments, ratio, lr=lr, momentum=momentum, **moments, **after, **rng)
        return x

    expected, fused = run(Reference), run(TritonOperands)
    for name, row in expected.items():
        if row is not None and skip and name in rows and name != "gradient":
            assert torch.equal(fused[name], rows[name]), f"{name} changed in a skipped update"
        elif row is not None and not skip:
            check_close(name, fused[name], row)

Reference, r, sums, total = fused_optimizer.Operands, random.Random(int(sys.argv[1])), torch.rand(1500, 2), torch.empty(2, 2)
fused_optimizer_triton.fold[(2,)](sums, torch.tensor([3, 1400, 1500]), total, BLOCK=512)
check_close("total", total, torch.stack([sums[3:1400].sum(0), sums[1400:].sum(0)]))
print(len([run_example(r) for k in range(int(sys.argv[2]))]), "examples")
"""

# By kernel: the program, its arguments and their output in the short form, and in full.
PROGRAMS = {
    "attention": (ATTENTION, ("2", "4 examples"), ("150", "152 examples")),
    "batchnorm": (BATCHNORM, ("1", "8 examples 6"), ("9", "72 examples 36")),
    "decoder": (DECODER, ("some", "all formulas"), ("all", "all formulas")),
    "embedding update": (EMBEDDING, ("some", "5 cases"), ("all", "14 cases")),
    "float8": (FLOAT8, ("some", "6 cases"), ("all", "24 cases")),
    "focal loss": (FOCAL, ("some", "4 cases"), ("all", "10 cases")),
    "graph attention": (GRAPH, ("", "all formulas")),
    "gates": (GATES, ("some", "7 cases"), ("all", "30 cases")),
    "layernorm": (LAYERNORM, ("some", "11 cases"), ("all", "42 cases")),
    "moe": (MOE, ("some", "18 cases"), ("all", "35 cases")),
    "optimizers": (OPTIMIZERS, ("1 50", "50 examples"), ("2 300", "300 examples")),
    "paged attention": (PAGED, ("some", "6 cases"), ("all", "18 cases")),
    "philox": (PHILOX, ("", "equal")),
}


@pytest.mark.parametrize(("names", "form"), [
    pytest.param([*PROGRAMS], 1, id="all"),
    *(pytest.param([name], 2, id=name, marks=pytest.mark.claim) for name, program in PROGRAMS.items() if len(program) > 2),
])  # fmt: skip
def test_kernels_agree_over_shapes_strides_dtypes_and_options(names: list[str], form: int) -> None:
    programs = {name: (PROGRAMS[name][0], *PROGRAMS[name][form][0].split()) for name in names}
    lines = interpret_programs([(name, *program) for name, program in programs.items()])
    assert lines == [f"{name}: {PROGRAMS[name][form][1]}" for name in names]
