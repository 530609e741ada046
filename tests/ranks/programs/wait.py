"""Train on two ranks, one of which is stopped, or sleeps, at PLACE: wait.py PLACE LATE_RANK FOLDER"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcai import config, dist, stop
from hpcai.data.loader import Loader
from hpcai.data.stage import stage_in
from hpcai.data.stage.copy import RingCopy
from hpcai.dist import launch, watchdog
from hpcai.dist.collectives import broadcast_object
from hpcai.settings import CheckpointConfig, StepConfig, TrainConfig
from hpcai.train import evaluation, loop, shard_file
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.run import Run
from hpcai.train.step import Step

place, late_rank, folder, rank = sys.argv[1], sys.argv[2], Path(sys.argv[3]), os.environ.get("RANK") or os.environ["PMI_RANK"]
watchdog.FIRST_REPORT, watchdog._ANSWER_TIMEOUT = 0.2, 5.0 if place in ("preparation", "batch") else 0.3
PLACES: dict[str, tuple[Any, str]] = {
    "staging": (RingCopy, "run"), "resume": (Checkpoints, "resume"), "first collective": (loop, "warm_up_collectives"),
    "step": (Step, "__call__"), "save": (shard_file, "write"), "evaluation": (evaluation, "compute_metrics"),
    "end": (watchdog.Watchdog, "_leave"), "MPI_Init_thread": (launch, "_init_mpi"),
}  # fmt: skip


def stop_here(function: Any) -> Any:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return function(*args, **kwargs)

    return stopped


class Source:
    def __len__(self) -> int:
        return 8

    def sample(self, index: int, epoch: int) -> np.ndarray:
        if place == "batch" and rank == late_rank and epoch == 0:
            time.sleep(3)
        return np.ones(3, np.float32)

    def describe(self, index: int) -> str:
        return f"row {index}"


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": model(batch).square().mean()}


def main(settings: config.Settings) -> None:
    if place in PLACES and rank == late_rank:
        owner, name = PLACES[place]
        setattr(owner, name, stop_here(getattr(owner, name)))
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    with dist.start({"evaluate": 1} if place == "evaluation" else {"replicate": 2}) as mesh:
        if place == "MPI_Finalize":
            atexit.register(lambda: rank == late_rank and os.kill(os.getpid(), signal.SIGSTOP))
            return
        if place == "preparation" and rank == late_rank:
            time.sleep(99)
        broadcast_object(None, mesh.job)
        if place == "staging":
            stage_in(folder / "source", folder / rank, mesh, node=rank)
        step, run = Step(nn.Linear(3, 1), loss, StepConfig(), mesh), Run("", None, mesh)
        run.checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(), mesh)
        loader = Loader(Source(), 4, mesh, name="train")
        cfg = TrainConfig(steps={"save": 1, "batch": 999}.get(place, 3), hang_after=None)
        result = loop.fit(step, loader, cfg, validation=[torch.ones(1, 3)], evaluate=loss, run=run)
    sys.exit(stop.REQUEUE if result.reason == "signal" else 0)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in commands in the background
sys.argv[1:] = []
config.run(config.Settings, main)
