"""`python -m hpcai.cli.accept.killed_rank APP CONFIG key=value ...`: train as `hpcai run` does, and kill the last rank of the job
after the first checkpoint. The others must end the job."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import run
from hpcai.dist.environment import read_rank_info

KILLED = Path("killed.txt")
"""Rank, node, and time of the kill in seconds since 1970."""


def main(args: Sequence[str]) -> None:
    rank_info, folder = read_rank_info(), next(arg for arg in args if arg.startswith("report.directory=")).partition("=")[2]
    if rank_info.rank == (rank_info.world or 1) - 1:
        threading.Thread(target=_kill_after_checkpoint, args=(Path(folder, "checkpoints"), rank_info.rank), daemon=True).start()
    run.main(args)


def _kill_after_checkpoint(folder: Path, rank: int) -> None:
    while not any(folder.glob("step-*/index.json")):
        time.sleep(0.02)
    KILLED.write_text(f"{rank} {socket.gethostname()} {time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
