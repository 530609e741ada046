"""The Triton kernels of language models (root norms, rotations, SwiGLU): in Triton's interpreter they are the formulas."""


import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run

pytestmark = pytest.mark.slow

FORMULAS = """
import sys, torch, triton
from hpcai.kernels import activations_triton, rmsnorm_triton, rotary_triton
from tests.slow import formulas
some = sys.argv[1] == "some"
for number, shape in enumerate(formulas.ROOTS):
    rmsnorm_triton.PROGRAMS = (2, 528, 3)[number % 3]
    rmsnorm_triton.TILE = (256, 4096)[number % 2]
    for x, y in (formulas.KINDS[number % 4],) if some else (formulas.KINDS[number % 3], formulas.KINDS[3]):
        formulas.root(shape, x, y, "cpu", learns=number % 4 != 3)
rotary_triton.PAIRS = 512
for number, case in enumerate(formulas.TURNS):
    every = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    for kind, of in (every[number % 3],) if some else every:
        formulas.rotation(case, kind, of, number % 2 == 0, "cpu")
        formulas.rotation(case, kind, of, number % 2 == 1, "cpu", True)
activations_triton.TILE = 512
for shape in ((3, 7, 88), (5, 77), (1,), (0, 8)):
    for kind in (torch.float32, torch.bfloat16):
        formulas.swiglu(shape, kind, "cpu")
q, a = torch.ones(2, 3, 5, 4), torch.ones(1, 5, 4)
for wrong in (
    lambda: rmsnorm_triton.rms_norm(torch.ones(3, 8), torch.ones(9), 1e-5, torch.float32),
    lambda: activations_triton.swiglu(torch.ones(3, 8), torch.ones(4, 8)),
    lambda: rotary_triton.apply_rotary(q, q[:, :, :4], a, a),
    lambda: rotary_triton.apply_rotary(q, q, a[:, :4], a[:, :4]),
):
    try:
        wrong()
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError("a kernel read past an end")
print("all formulas")
"""


@pytest.mark.parametrize("which", ["some", pytest.param("all", marks=pytest.mark.claim)])
def test_kernels_are_the_formulas_over_shapes_strides_and_types(which: str) -> None:
    assert "all formulas" in run(FORMULAS, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
