"""The Triton kernels of Philox: run by Triton's interpreter they are the plain-torch twin, and they compile for A100 and H100."""

from pathlib import Path

import pytest

from tests.slow.programs import FORMED, run

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

TWIN = """
import torch
from hpcai.kernels import philox, philox_triton
DTYPES = {"bits": [torch.int64], "uniform": [torch.float32, torch.float64], "normal": [torch.float32, torch.float64]}
def same(kind, found, expected):
    if kind == "normal":
        wide = found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-12 if wide else 2e-5, atol=1e-12 if wide else 2e-6)
    else:
        assert torch.equal(found, expected), kind
for kind, dtypes in DTYPES.items():
    for dtype in dtypes:
        words = {} if kind == "bits" else {"dtype": dtype}
        make = getattr(philox, kind)
        for key in (0, 2**64 - 5, torch.tensor(-77)):
            for first in (0, 1, 6, 2**34 - 3):  # the last goes on where the low word of a counter ends
                for n in (1, 5, 1100):
                    found = torch.empty(n, dtype=dtype)
                    upper = (0, 5, 2**64 - 3)[n % 3]
                    philox_triton.run(kind, key, first, upper, found)
                    same(kind, found, make(key, first, n, upper=upper, **words))
            places = torch.randint(0, 2**40, (7, 3))
            found = torch.empty(7, 3, dtype=dtype)
            philox_triton.run(kind, key, places, 0, found)
            same(kind, found, make(key, places, **words))
            for count in (1, 2, 3, 9, 530):
                rows = torch.empty(7, 3, count, dtype=dtype)
                philox_triton.run(kind, key, places, 7, rows)
                same(kind, rows, make(key, places, count, upper=7, **words))
        keys = torch.randint(-(2**63), 2**63 - 1, (7, 1))
        uppers = torch.randint(-(2**63), 2**63 - 1, (3,))
        philox_triton.run(kind, keys, places, uppers, rows)
        same(kind, rows, make(keys, places, 530, upper=uppers, **words))
print("the same")
"""

COMPILED = """
import re, subprocess, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.slow.programs import forms
from hpcai.kernels.philox_triton import WARPS, variants
tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
for name, kernel, signature, constexprs in forms(variants(), sys.argv[2]):
    attrs = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    for arch in map(int, sys.argv[3:]):
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": WARPS})
        open(sys.argv[1], "wb").write(made.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True).stdout
        registers, local = (int(re.search(rf"\\b{x}:(\\d+)", usage)[1]) for x in ("REG", "LOCAL"))
        print(made.asm["ptx"].split(".target ")[1].split()[0].rstrip(","), registers, local, name, sep="|")
        assert registers <= 128 and local == 0, f"{name} on {arch} spills, or few programs fit a multiprocessor"
"""


def test_kernels_give_the_numbers_of_the_twin() -> None:
    assert "the same" in run(TWIN, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize(("arch", "name", "which"), FORMED)
def test_every_kernel_compiles_without_spills(tmp_path: Path, arch: str, name: str, which: str) -> None:
    print(made := run(COMPILED, str(tmp_path / "cubin"), which, arch, TRITON_CACHE_DIR=str(tmp_path)))
    assert made.count(f"{name}|") == {"ends": 4, "all": 10}[which]
