"""The Triton kernels of gates: run by Triton's interpreter they are the formulas."""


import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run

pytestmark = pytest.mark.slow

FORMULAS = """
import itertools, sys, torch
from hpcai.kernels import gates_triton as fused
from tests.slow import formulas
KINDS = torch.float32, torch.bfloat16
cases = list(itertools.product(formulas.GATES, KINDS))
for number, (case, kind) in enumerate(cases if sys.argv[1] == "all" else cases[::8] + cases[7::8]):
    fused.TILE = (512, 4096, 2048)[number % 3]
    formulas.gates(case, kind, "cpu")
for fused.TILE, kind in ((512, KINDS[0]), (4096, KINDS[1]), (2048, KINDS[0])):
    formulas.halves(kind, "cpu")
for case in ("triangles", "triangles in one protein", "channels last", "two halves of rows"):
    x, g, mask = formulas.GATES[case](torch.randn)
    plan = fused._plan(x, g, mask)
    assert plan.x is x and plan.g is g and plan.mask is mask, f"{case} are read as they are"
x, g, mask = formulas.GATES["triangles, incoming"](torch.randn)
plan = fused._plan(x, g, mask)
assert plan.x is x and plan.g is g, "a mask alone is copied"
print(number + 1, "cases")
"""


@pytest.mark.parametrize("which, cases", [("quarter", 7), pytest.param("all", 30, marks=pytest.mark.claim)])
def test_kernels_are_the_formulas_over_shapes_strides_and_masks(which: str, cases: int) -> None:
    assert f"{cases} cases" in run(FORMULAS, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
