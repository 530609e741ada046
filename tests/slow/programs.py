"""Programs that test Triton kernels: run by its interpreter, or compiling ahead of time, which one process cannot do both."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The generations of GPUs that kernels are compiled for (A100, H100 and H200, B200; `make test` takes the second), and whether each
# kernel is compiled in its first and its last form, or in all.
_ALL = ("90", "sm_90a", "all"), ("80", "sm_80", "all"), ("100", "sm_100a", "all")
FORMED = [("90", "sm_90a", "ends"), *(pytest.param(*x, marks=pytest.mark.claim) for x in _ALL)]


# The interpreter of Triton 3.6 makes a bound of a loop of an array with one number in it, which numpy 2.4 does not convert.
_INTERPRETER = """
import triton.runtime.interpreter as inside
if patched := getattr(inside, "_patch_lang_tensor", None):
    def patch(tensor, scope):
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
    inside._patch_lang_tensor = patch
"""


def forms(variants: Iterable[Any], which: str) -> list[Any]:
    """All ``variants`` of a module's kernels, or at their "ends": the first and the last of each kernel."""
    every = list(variants)
    ends = {id(x[1]): x for x in every[::-1]}, {id(x[1]): x for x in every}
    return every if which == "all" else [x for of in ends for x in of.values()]


def run(program: str, *words: str, **environment: str) -> str:
    """What a program prints."""
    env = {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **environment}
    before = _INTERPRETER if "TRITON_INTERPRET" in environment else ""
    command = [sys.executable, "-W", "ignore", "-c", before + program, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
