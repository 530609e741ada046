"""The Triton kernels of layer norms: in Triton's interpreter they are the formulas."""


import pytest

from tests.slow.programs import run

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

FORMULAS = """
import sys, torch, triton
from hpcai.kernels import layernorm_triton as fused
from tests.slow import formulas
cases = [(number, case, narrow) for number, case in enumerate(formulas.NORMS) for narrow in (True, False)]
for count, (number, case, narrow) in enumerate(cases if sys.argv[1] == "all" else cases[::8] + cases[7::8]):
    x, y = formulas.KINDS[number % 3 if narrow else 3]
    # Some tiles for each: rows that fill them and that end within one, programs with one tile and with several.
    fused.TILE = triton.next_power_of_2(max(64, formulas.NORMS[case][0] // (3, 8)[number % 2]))
    fused.PROGRAMS = (2, 528, 3)[count % 3]
    formulas.norm(case, x, y, "cpu")
fused.TILE = 1024
for case in ("rows of 128", "rows of 384", "rows of 23", "channels first", "channels first in odd pictures"):
    for away in (1e4, -1e4) if sys.argv[1] == "all" else (1e4,):
        formulas.norm(case, torch.float32, torch.float32, "cpu", away)
formulas.norm_of_bad_rows("cpu")
for wrong in ((torch.ones(9), torch.ones(8)), (torch.ones(8), torch.ones(1))):
    try:
        fused.layer_norm(torch.ones(3, 8), *wrong, 1e-5, torch.float32)
    except ValueError as error:
        assert "the channels of x" in str(error)
    else:
        raise AssertionError("a kernel read past an end")
far = torch.empty_strided((1 << 12, 1 << 12, 256), (1 << 12, 1, 1 << 24), device="meta")
assert fused._form(far) is None and fused._form(far[..., :64]) is not None, "places of a tile are 32 bits"
print(count + 1, "cases")
"""


@pytest.mark.parametrize("which, cases", [("quarter", 11), pytest.param("all", 42, marks=pytest.mark.claim)])
def test_kernels_are_the_formulas_over_shapes_strides_and_types(which: str, cases: int) -> None:
    assert f"{cases} cases" in run(FORMULAS, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
