"""Whether Triton can make kernels on this machine: it compiles a launcher in C for each, and a slim container may lack what that
needs. Where it cannot, the plain-torch twins run on the GPU too.

A plan (``hpcai.plan``) counts what a GPU would do, on tensors of a CPU that hold nothing: meanwhile ``PLANNED`` is true, and they
count as tensors of a GPU.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """What Triton lacks here, and how to get it; None where it has all."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton, in the version that this torch names)"
    named = os.environ.get("CC")
    if not shutil.which(named) if named else not (shutil.which("gcc") or shutil.which("clang")):
        found = f"CC={named} is no program" if named else "there is no gcc and no clang"
        return f"{found}, and Triton needs a C compiler (install gcc, or set CC)"
    scheme = sysconfig.get_default_scheme()  # Triton looks where Debian's own Python has its headers
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
    return None if header.is_file() else f"there is no {header}, which Triton compiles against (install python3-dev)"


MISSING = missing()
PLANNED = False


def takes(x: Any) -> bool:
    """Whether a Triton kernel can be given a tensor: it lies on a GPU, and kernels can be made."""
    return MISSING is None and on_gpu(x)


def on_gpu(x: Any) -> bool:
    return bool(x.is_cuda or PLANNED)


def on_cpu(x: Any) -> bool:
    return x.device.type == "cpu" and not PLANNED
