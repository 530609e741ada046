"""Ranks read a set of volumes together; something happens to the data of rank 1: read.py FOLDER WHAT [AXIS]."""

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

steps = 0


class Volumes:
    replicated = True

    def __init__(self, folder: Path, what: str) -> None:
        reader = Reader("auto", files=2, preadv=failing if what == "EIO" else os.preadv)
        self.rows, self.what = Rows(folder, {"counts": ("float32", (16, 16, 16))}, "make it again", reader=reader), what

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        if self.what == "killed" and index == 43:
            grief()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rows.read(index)

    def describe(self, index: int) -> str:
        return self.rows.describe(index)


def failing(descriptor: int, views: Any, offset: int) -> int:
    if torch_dist.get_rank() == 1 and steps > 2:
        grief()
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return os.preadv(descriptor, views, offset)


def grief() -> None:
    os.write(1, f"GRIEF {time.time():.3f}\n".encode())


def spoil(folder: Path, what: str) -> None:
    """The files that hold the second half of the set."""
    grief()
    for path in sorted(folder.glob("*.h5"))[8:]:
        if what == "vanished":
            path.unlink()
        elif what == "truncated":
            os.truncate(path, path.stat().st_size // 2)


def main(folder: Path, what: str, axis: str = "replicate") -> None:
    global steps
    with dist.start({axis: -1}) as mesh:
        source = Volumes(folder, what)
        words: dict[str, Any] = {"shuffle": False, "prefetch": 1 << 10, "processes": what == "killed", "scatter": "auto"}
        with Loader(source, 4, mesh, name="train", **words) as loader:
            for batch in loader.epoch(0):
                torch_dist.all_reduce(torch.full((1,), float(batch["counts"].sum())))
                steps += 1
                if steps == 3 and mesh.is_first:
                    spoil(folder, what)
                torch_dist.barrier()
                time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
