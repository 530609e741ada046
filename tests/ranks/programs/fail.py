"""One rank (or all) comes to grief as told: fail.py HOW RANK WHILE. The others compute, sleep or wait for it in a collective."""

import os
import signal
import sys
import time

import torch
import torch.distributed as torch_dist

from hpcai import dist
from hpcai.errors import DataError

how, who, meanwhile = sys.argv[1], sys.argv[2], sys.argv[3]


def come_to_grief(rank: int) -> None:
    os.write(1, f"GRIEF {time.time():.3f}\n".encode())
    if how == "raise":
        raise ValueError(f"no good at rank {rank}")
    if how == "full":
        raise OSError(28, "No space left on device", "/scratch/run")
    if how == "refuse":
        raise DataError("universe_0012.h5: dataset 'density' is missing")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))


with dist.start({"replicate": -1}) as mesh:
    torch_dist.all_reduce(torch.ones(1))
    time.sleep(0.2 if who != "all" else 0)
    if who in ("all", str(mesh.rank)):
        come_to_grief(mesh.rank)
    if meanwhile == "collective":
        torch_dist.all_reduce(torch.ones(1))
    elif meanwhile == "sleep":
        time.sleep(60)
    elif meanwhile == "compute":
        until = time.monotonic() + 60
        while time.monotonic() < until:
            torch.randn(500, 500) @ torch.randn(500, 500)
