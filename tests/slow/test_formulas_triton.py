"""Triton kernels in Triton's interpreter: those of LLMs (RMSNorm, rotary embeddings, SwiGLU), gates and layer norm agree with their
formulas; FP8 quantization and Philox equal their references. Tests on a GPU (tests/gpu) show that casts of the hardware round as in
torch."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

DECODER = """
import pytest, sys, torch
from hpcai.kernels import activations_triton, rmsnorm_triton, rotary_triton
from tests.slow import formulas
some = sys.argv[1] == "some"
for number, shape in enumerate(formulas.RMS_NORM_SHAPES):
    rmsnorm_triton.PROGRAMS = (2, 528, 3)[number % 3]
    rmsnorm_triton.TILE = (256, 4096)[number % 2]
    for x, y in (formulas.DTYPES[number % 4],) if some else (formulas.DTYPES[number % 3], formulas.DTYPES[3]):
        formulas.check_rms_norm(shape, x, y, "cpu", trainable=number % 4 != 3)
rotary_triton.PAIRS = 512
for number, case in enumerate(formulas.ROTARY):
    dtypes = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    for dtype, table_dtype in (dtypes[number % 3],) if some else dtypes:
        formulas.check_rotary(case, dtype, table_dtype, number % 2 == 0, "cpu")
        formulas.check_rotary(case, dtype, table_dtype, number % 2 == 1, "cpu", True)
activations_triton.TILE = 512
for shape in ((3, 7, 88), (5, 77), (1,), (0, 8)):
    for dtype in (torch.float32, torch.bfloat16):
        formulas.check_swiglu(shape, dtype, "cpu")
q, a = torch.ones(2, 3, 5, 4), torch.ones(1, 5, 4)
for call in (
    lambda: rmsnorm_triton.rms_norm(torch.ones(3, 8), torch.ones(9), 1e-5, torch.float32),
    lambda: activations_triton.swiglu(torch.ones(3, 8), torch.ones(4, 8)),
    lambda: rotary_triton.apply_rotary(q, q[:, :, :4], a, a),
    lambda: rotary_triton.apply_rotary(q, q, a[:, :4], a[:, :4]),
):
    with pytest.raises(ValueError, match="expected"):  # not read past an end
        call()
print("all formulas")
"""

# The interpreter truncates in casts to 8 bits, which have to round, and takes the smallest values of bfloat16 for 0. torch's casts
# replace its casts here.
FLOAT8 = """
import sys, numpy as np, torch, triton.language as tl
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
    for i, dtype in enumerate(formulas.MAX_EXPONENT):
        dtypes = torch.float32, torch.bfloat16
        for x_dtype in dtypes if sys.argv[1] == "all" else (dtypes[(number + i) % 2],):
            formulas.check_quantize(shape, dtype, x_dtype, "cpu")
            count += 1
formulas.check_scales("cpu")
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
            for first in (0, 6, 2**34 - 3):  # the last overflows the low word of a counter
                for n in (5, 1100):
                    actual = torch.empty(n, dtype=dtype)
                    upper = (0, 5, 2**64 - 3)[n % 3]
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

PROGRAMS = {"decoder": DECODER, "float8": FLOAT8, "gates": GATES, "layernorm": LAYERNORM, "philox": PHILOX}
SOME = {"decoder": "all formulas", "float8": "12 cases", "gates": "7 cases", "layernorm": "11 cases"}
ALL = {"decoder": "all formulas", "float8": "24 cases", "gates": "30 cases", "layernorm": "42 cases"}


@pytest.mark.parametrize(("name", "which", "output"), [
    *((name, "some", output) for name, output in SOME.items()), ("philox", "all", "equal"),
    *(pytest.param(name, "all", output, marks=pytest.mark.claim) for name, output in ALL.items()),
])  # fmt: skip
def test_kernels_agree_over_shapes_strides_and_dtypes(name: str, which: str, output: str) -> None:
    assert output in run_program(PROGRAMS[name], which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
