"""Read volumes on all ranks, with a fault in the data of rank 1: read.py FOLDER FAULT [AXIS]."""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist

from hpcai import dist
from hpcai.data import Loader, Reader, Rows
from hpcai.dist import watchdog

steps, watchdog._EXIT_DELAY = 0, 1.0


class Volumes:
    replicated = True

    def __init__(self, folder: Path, fault: str) -> None:
        reader = Reader("auto", files=2, preadv=failing_preadv if fault == "EIO" else os.preadv)
        self.rows, self.fault = Rows(folder, {"counts": ("float32", (16, 16, 16))}, "make it again", reader=reader), fault

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        if self.fault == "killed" and index == 43:
            print_fault_time()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows.read(index)

    def describe(self, index: int) -> str:
        return self.rows.describe(index)


def failing_preadv(descriptor: int, views: Any, offset: int) -> int:
    if torch_dist.get_rank() == 1 and steps > 2:
        print_fault_time()
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return os.preadv(descriptor, views, offset)


def print_fault_time() -> None:
    os.write(1, f"FAULT {time.time():.3f}\n".encode())


def damage_files(folder: Path, fault: str) -> None:
    """Delete or truncate the files of the second half of the data set."""
    print_fault_time()
    for path in sorted(folder.glob("*.h5"))[8:]:
        if fault == "vanished":
            path.unlink()
        elif fault == "truncated":
            os.truncate(path, path.stat().st_size // 2)


def main(folder: Path, fault: str, axis: str = "replicate") -> None:
    global steps
    with dist.start({axis: -1}) as mesh:
        source = Volumes(folder, fault)
        kwargs: dict[str, Any] = {"shuffle": False, "prefetch": 1 << 10, "processes": fault == "killed", "scatter": "auto"}
        kwargs |= {"workers": 1} if fault == "killed" else {}  # each imports this program
        with Loader(source, 4, mesh, name="train", **kwargs) as loader:
            for batch in loader.epoch(0):
                torch_dist.all_reduce(torch.full((1,), float(batch["counts"].sum())))
                steps += 1
                if steps == 3 and mesh.is_first:
                    damage_files(folder, fault)
                torch_dist.barrier()
                time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
