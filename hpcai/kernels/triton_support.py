"""Availability of Triton kernels: Triton must be installed, and it compiles a launcher in C for each kernel, for which slim
containers may lack a compiler or headers. Where kernels cannot be compiled, the reference implementations run on the GPU, too.

While ``PLANNED`` is true, CPU tensors count as GPU tensors: ``hpcai plan`` traces the step of a GPU with tensors without data.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hpcai.dynamo import is_transformed


def missing_requirement() -> str | None:
    """Return what must be installed before Triton can compile kernels, or None if nothing is missing."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton, in the version that this torch names)"
    compiler = os.environ.get("CC")
    if not shutil.which(compiler) if compiler else not (shutil.which("gcc") or shutil.which("clang")):
        problem = f"CC={compiler} is no program" if compiler else "there is no gcc and no clang"
        return f"{problem}, and Triton needs a C compiler (install gcc, or set CC)"
    scheme = sysconfig.get_default_scheme()  # Triton looks where Debian's own Python has its headers
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
    return None if header.is_file() else f"there is no {header}, which Triton compiles against (install python3-dev)"


MISSING = missing_requirement()
PLANNED = False


def is_supported(x: Any) -> bool:
    """Whether Triton kernels can read ``x``: it is a GPU tensor, and kernels can be compiled. ``torch.func`` transforms none."""
    return MISSING is None and on_gpu(x) and not is_transformed()


def is_supported_float(x: Any) -> bool:
    """The same for kernels of bfloat16 and float32."""
    return is_supported(x) and x.dtype in (torch.bfloat16, torch.float32)


def needs_plain_ops() -> bool:
    """Whether only operations of torch that return new tensors are supported: ``torch.compile``, which fuses them, traces them, or
    ``torch.func`` transforms them, and knows neither functions of ours nor memory formats nor writes into tensors."""
    return torch.compiler.is_compiling() or is_transformed()


def signed(number: int, bits: int = 64) -> int:
    """Return the signed integer with the lower ``bits`` of a number."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def on_gpu(x: Any) -> bool:
    return bool(x.is_cuda or PLANNED)


def on_cpu(x: Any) -> bool:
    return x.device.type == "cpu" and not PLANNED
