"""The Triton kernels of matrices in 8 bits: in Triton's interpreter they are the twin, bit for bit; that the casts of the hardware
round as torch does, a GPU alone can show (tests/gpu)."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run

pytestmark = pytest.mark.slow

# The interpreter cuts off what a cast to 8 bits has to round, and takes the smallest numbers of bfloat16 for 0. Here torch's own
# casts are in that place.
TWIN = """
import sys, numpy as np, torch, triton.language as tl
from triton.runtime import interpreter
theirs, formats = interpreter._convert_float, {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
def cast(x, kind, to, how):
    if to in formats:
        return torch.from_numpy(x).to(formats[to]).view(torch.uint8).numpy()
    return x.astype(np.uint32) << 16 if (kind, to) == (tl.bfloat16, tl.float32) else theirs(x, kind, to, how)
interpreter._convert_float = cast
from hpcai.kernels import float8_triton
from tests.slow import formulas
count = 0
for number, shape in enumerate(formulas.MATRICES):
    float8_triton.TILE, float8_triton.PROGRAMS = ((512, 2), (8192, 512), (512, 3))[number % 3]
    for at, dtype in enumerate(formulas.MAX_EXPONENT):
        kinds = torch.float32, torch.bfloat16
        for kind in kinds if sys.argv[1] == "all" else (kinds[(number + at) % 2],):
            formulas.quantize(shape, dtype, kind, "cpu")
            count += 1
formulas.scales("cpu")
print(count, "cases")
"""


@pytest.mark.parametrize("which, cases", [("half", 12), pytest.param("all", 24, marks=pytest.mark.claim)])
def test_kernels_are_the_twin_bit_for_bit(which: str, cases: int) -> None:
    assert f"{cases} cases" in run(TWIN, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
