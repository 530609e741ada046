"""The Triton kernels of FP8 quantization, in Triton's interpreter, equal their reference bitwise. Tests on a GPU (tests/gpu) show
that casts of the hardware round as in torch."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run_program

pytestmark = pytest.mark.slow

# The interpreter truncates in casts to 8 bits, which have to round, and takes the smallest values of bfloat16 for 0. torch's casts
# replace its casts here.
PROGRAM = """
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


@pytest.mark.parametrize("which, cases", [("half", 12), pytest.param("all", 24, marks=pytest.mark.claim)])
def test_kernels_equal_the_reference_bitwise(which: str, cases: int) -> None:
    assert f"{cases} cases" in run_program(PROGRAM, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
