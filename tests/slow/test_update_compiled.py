"""Every kernel of ``hpcai.kernels.update_triton`` compiles for A100 and H100 without a GPU, in registers, with vector loads."""

from pathlib import Path

import pytest

from tests.slow.programs import ARCHITECTURES, run

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT compiled")

PROGRAM = """
import re, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hpcai.kernels.update_triton import variants

tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for name, kernel, signature, constexprs in variants():
    attrs = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*" or x == "n"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    for arch in map(int, sys.argv[2:]):
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": max(4, constexprs["BLOCK"] // 256)})
        Path(sys.argv[1]).write_bytes(made.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (re.search(rf"\\b{x}:(\\d+)", usage)[1] for x in ("REG", "STACK", "LOCAL"))
        rows = re.findall(r"(?:ld|st)\\.global\\S*\\.(v[248])\\.", made.asm["ptx"])
        print(made.asm["ptx"].split(".target ")[1].split()[0], registers, stack, local, len(rows), name, sep="|")
"""


@pytest.mark.parametrize(("arch", "name"), ARCHITECTURES)
def test_every_kernel_compiles_without_spills_and_moves_whole_vectors(tmp_path: Path, arch: str, name: str) -> None:
    made = run(PROGRAM, str(tmp_path / "cubin"), arch, TRITON_CACHE_DIR=str(tmp_path))
    print("architecture | registers | stack | local | vector loads and stores | kernel", made, sep="\n")
    found = [line.split("|") for line in made.splitlines()]
    assert {target.rstrip(",") for target, *_ in found} == {name} and len(found) == 8
    for _, registers, stack, local, vectors, kernel in found:
        assert stack == local == "0", f"{kernel} on {name} spills"
        assert int(registers) <= 64, f"{kernel} on {name}: fewer than half of a multiprocessor's threads"
        assert int(vectors) >= (0 if kernel == "fold" else 3), f"{kernel} on {name} moves single elements"
