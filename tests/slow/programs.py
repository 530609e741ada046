"""Programs that test Triton kernels, in its interpreter or compiled ahead of time; one process cannot do both."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The GPU generations that kernels are compiled for (A100, H100 and H200, B200; `make test` takes the second), and how many variants
# of each kernel at most.
_ALL = ("90", "sm_90a", "8"), ("80", "sm_80", "8"), ("100", "sm_100a", "8")
TARGETS = [("90", "sm_90a", "1"), *(pytest.param(*x, marks=pytest.mark.claim) for x in _ALL)]


# Programs run in forks of one process, which has imported torch and the kernels. The interpreter replaces the functions of
# triton.language at each call of a function of a kernel, a third of its time: here once. Triton 3.6 takes arrays of one element as
# bounds of loops, which NumPy 2.4 does not convert to int.
_INTERPRETER = """
import json, os, pytest, sys, torch._dynamo
import triton.runtime.interpreter as inside
from types import SimpleNamespace
inside._patch_lang(SimpleNamespace(__globals__={"tl": inside.tl, "core": inside.tl.core}))
inside._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
inside.tl.tensor.__index__ = lambda self: int(self.handle.data.item())
from tests.slow import formulas
for name, program, *args in json.load(sys.stdin):
    print(name, end=": ", flush=True)
    if os.fork() == 0:
        sys.argv[1:] = args
        exec(program, {})
        break
    if os.wait()[1]:
        sys.exit(f"{name} failed")
"""


def run_program(program: str, *args: str, stdin: str = "", **environment: str) -> str:
    env = {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **environment}
    command = [sys.executable, "-W", "ignore", "-c", program, *args]
    result = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def interpret_programs(programs: Sequence[Sequence[str]]) -> list[str]:
    """Run programs in Triton's interpreter, each given as name, source and arguments. Return the lines that they print."""
    return run_program(_INTERPRETER, stdin=json.dumps(programs), TRITON_INTERPRET="1", OMP_NUM_THREADS="1").splitlines()
