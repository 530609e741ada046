"""The Triton kernels of LLMs (RMSNorm, rotary embeddings, SwiGLU), in Triton's interpreter, agree with their formulas."""

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import run_program

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch, triton
from hpcai.kernels import activations_triton, rmsnorm_triton, rotary_triton
from tests.slow import formulas
subset = sys.argv[1] == "subset"
for number, shape in enumerate(formulas.RMS_NORM_SHAPES):
    rmsnorm_triton.PROGRAMS = (2, 528, 3)[number % 3]
    rmsnorm_triton.TILE = (256, 4096)[number % 2]
    for x, y in (formulas.DTYPES[number % 4],) if subset else (formulas.DTYPES[number % 3], formulas.DTYPES[3]):
        formulas.check_rms_norm(shape, x, y, "cpu", trainable=number % 4 != 3)
rotary_triton.PAIRS = 512
for number, case in enumerate(formulas.ROTARY):
    dtypes = (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)
    for dtype, table_dtype in (dtypes[number % 3],) if subset else dtypes:
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
    try:
        call()
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError("a kernel read past an end")
print("all formulas")
"""


@pytest.mark.parametrize("which", ["subset", pytest.param("all", marks=pytest.mark.claim)])
def test_kernels_agree_with_formulas_over_shapes_strides_and_dtypes(which: str) -> None:
    assert "all formulas" in run_program(PROGRAM, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
