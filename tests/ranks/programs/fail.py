"""Fail on one rank, or on all: fail.py FAILURE RANK MEANWHILE. The others compute, sleep or wait for it in a collective."""

import os
import signal
import sys
import time

import torch
import torch.distributed as torch_dist

from hpcai import dist
from hpcai.dist import watchdog
from hpcai.errors import DataError

failure, failing_rank, meanwhile = sys.argv[1], sys.argv[2], sys.argv[3]
watchdog._EXIT_DELAY = 1.0


def fail(rank: int) -> None:
    os.write(1, f"FAULT {time.time():.3f}\n".encode())
    if failure == "raise":
        raise ValueError(f"injected on rank {rank}")
    if failure == "full":
        raise OSError(28, "No space left on device", "/scratch/run")
    if failure == "refuse":
        raise DataError("universe_0012.h5: dataset 'density' is missing")
    if failure == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(failure))


with dist.start({"replicate": -1}) as mesh:
    torch_dist.all_reduce(torch.ones(1))
    time.sleep(0.2 if failing_rank != "all" else 0)
    if failing_rank in ("all", str(mesh.rank)):
        fail(mesh.rank)
    if meanwhile == "collective":
        torch_dist.all_reduce(torch.ones(1))
    elif meanwhile == "sleep":
        time.sleep(60)
    elif meanwhile == "compute":
        until = time.monotonic() + 60
        while time.monotonic() < until:
            torch.randn(500, 500) @ torch.randn(500, 500)
