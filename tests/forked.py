"""A script in a child forked from the tests, which have imported torch: 0.1 s where a fresh Python takes 3."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

_FORK = multiprocessing.get_context("fork")


def script(program: Path, *words: str, out: Path, err: Path, **environ: str) -> ForkProcess:
    """``program`` has begun with the words and, beside the tests' own, these variables; it adds what it writes to two files."""
    process = _FORK.Process(target=_become, args=(program, words, out, err, environ))
    process.start()
    return process


def _become(program: Path, words: tuple[str, ...], out: Path, err: Path, environ: dict[str, str]) -> None:
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # not pytest's
    os.environ |= environ
    sys.argv = [str(program), *words]
    torch.set_num_threads(1)
    runpy.run_path(str(program), run_name="__main__")
