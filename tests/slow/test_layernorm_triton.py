"""The Triton kernels of layer norm, in Triton's interpreter, agree with their formulas."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch, triton
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
    try:
        fused.layer_norm(torch.ones(3, 8), *parameters, 1e-5, torch.float32)
    except ValueError as error:
        assert "the channels of x" in str(error)
    else:
        raise AssertionError("a kernel read past an end")
huge = torch.empty_strided((1 << 12, 1 << 12, 256), (1 << 12, 1, 1 << 24), device="meta")
assert fused._form(huge) is None and fused._form(huge[..., :64]) is not None, "offsets in a tile have 32 bits"
print(count + 1, "cases")
"""


@pytest.mark.parametrize("which, cases", [("quarter", 11), pytest.param("all", 42, marks=pytest.mark.claim)])
def test_kernels_agree_with_formulas_over_shapes_strides_and_dtypes(which: str, cases: int) -> None:
    assert f"{cases} cases" in run_program(PROGRAM, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
