"""Run a script in a fork of the test process, which has imported torch: 0.1 s instead of 3 s for a new interpreter."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

_FORK = multiprocessing.get_context("fork")


def fork_script(program: Path, *args: str, out: Path, err: Path, **environ: str) -> ForkProcess:
    """Start ``program`` with arguments and additional environment variables; append its output to the files ``out`` and ``err``."""
    process = _FORK.Process(target=_run_script, args=(program, args, out, err, environ))
    process.start()
    return process


def _run_script(program: Path, args: tuple[str, ...], out: Path, err: Path, environ: dict[str, str]) -> None:
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # not pytest's
    os.environ |= environ
    sys.argv = [str(program), *args]
    torch.set_num_threads(1)
    runpy.run_path(str(program), run_name="__main__")
