"""The Triton kernels of gates, in Triton's interpreter, agree with their formulas."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run_program

pytestmark = pytest.mark.slow

PROGRAM = """
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


@pytest.mark.parametrize("which, cases", [("quarter", 7), pytest.param("all", 30, marks=pytest.mark.claim)])
def test_kernels_agree_with_formulas_over_shapes_strides_and_masks(which: str, cases: int) -> None:
    assert f"{cases} cases" in run_program(PROGRAM, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
