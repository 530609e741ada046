"""The Triton kernels of matrices in 8 bits: in Triton's interpreter they are the twin, bit for bit, and they compile for H100 and
B200 to the casts of the hardware. That those round as torch does, a GPU alone can show (tests/gpu)."""

from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")

from tests.slow.programs import FORMED, run
from tests.slow.test_layernorm_triton import COMPILED

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
from hpcai.kernels import eighths_triton
from tests.slow import formulas
count = 0
for number, shape in enumerate(formulas.MATRICES):
    eighths_triton.TILE, eighths_triton.PROGRAMS = ((512, 2), (8192, 512), (512, 3))[number % 3]
    for at, dtype in enumerate(formulas.HALVINGS):
        kinds = torch.float32, torch.bfloat16
        for kind in kinds if sys.argv[1] == "all" else (kinds[(number + at) % 2],):
            formulas.eighth(shape, dtype, kind, "cpu")
            count += 1
formulas.scales("cpu")
print(count, "cases")
"""

ROUNDED = """
import re
for name, kernel, signature, constexprs, options in forms(importlib.import_module(module).variants(), which):
    if name.startswith("_cast"):
        attrs = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        ptx = made.asm["ptx"]
        form = "e4m3" if "fp8e4nv" in name else "e5m2"
        assert set(re.findall(r"cvt\\.\\S*e[45]m[0-9]\\S*", ptx)) == {f"cvt.rn.satfinite.{form}x2.f32"}, name
        assert ".ftz" not in ptx, f"{name}: numbers below the normal ones are no zeros"
        open(cubin, "wb").write(made.asm["cubin"])
        code = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        pointer = re.findall(r"LOP3\\S* R\\d+, R1\\b[^;]*|ST[GS]\\S* [^;]*, R1 *;", code)
        assert not pointer, f"{name} writes the stack pointer: {pointer[0]}"
        print("rounds to nearest:", name)
"""


@pytest.mark.parametrize("which, cases", [("half", 12), pytest.param("all", 24, marks=pytest.mark.claim)])
def test_kernels_are_the_twin_bit_for_bit(which: str, cases: int) -> None:
    assert f"{cases} cases" in run(TWIN, which, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("arch, name, which", [x for x in FORMED if "sm_80" not in str(x)])
def test_every_kernel_compiles_without_spills_moves_vectors_and_rounds_to_nearest(
    tmp_path: Path, arch: str, name: str, which: str
) -> None:
    most = "120" if metadata.version("triton").startswith("3.6.") else "64"  # there a cast to rows and columns takes 118
    words = str(tmp_path / "cubin"), which, "hpcai.kernels.eighths_triton", arch, "0", "0", "0", "64", most
    print(made := run(COMPILED + ROUNDED, *words, TRITON_CACHE_DIR=str(tmp_path)))
    casts = {"ends": 2, "all": 20}[which]
    assert made.count(f"{name}|") == 2 + casts and made.count("rounds to nearest: ") == casts
