"""What an app offers in ``apps/<name>/ablation.py`` to ``hpcai ablate``, which measures what each of its switches brings.

``CONFIG`` is a settings class with ``mesh``; ``switches(cfg, mesh)`` lists the switches in the order in which they are added up;
``trial(cfg, mesh, on)`` is a context manager that gives a ``Trial`` with the switches named in ``on``, and releases it at its end.
``hpcai.train.trial`` makes such trials of a network and random samples; ``of_the_loop`` lists the switches that it knows.
"""

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcai.dist import Mesh
from hpcai.settings import StepConfig
from hpcai.train.choices import fast_bf16

On = frozenset[str]
TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Switch:
    """One optimisation: ``what`` it is in a line, and why it cannot be had here (``why_not``), if so."""

    name: str
    what: str
    why_not: str | None = None


class Trial(Protocol):
    """A training with some of the switches on. All trials begin with the same weights."""

    samples: int
    """per step, over all processes"""

    def numerics(self) -> tuple[float, Tensor]:
        """Loss and flat float32 gradient [parameters], on the CPU, of one batch at the first weights; called before any update."""

    def around(self) -> AbstractContextManager[object]:
        """What a training enters once, such as a policy of garbage collection: entered around each ``run``, and not timed."""

    def run(self, steps: int) -> None:
        """So many steps of the real thing: samples from files, update, and an evaluation that has ended when this returns."""


def of_the_loop(cfg: Any, mesh: Mesh, sample: int) -> list[Switch]:
    """The switches of step, loader and evaluation, which every app has; ``sample``: bytes of one in a file."""
    kind, optimizer = mesh.device.type, cfg.step.optimizer
    asked = when_on(cfg.step, mesh)
    slow = f"this {kind} does not compute in bfloat16 at full speed" if asked["precision"] == "fp32" else None
    no_gpu = f"there is no GPU: this process computes on {kind}" if kind == "cpu" else None
    unknown = None if optimizer in TORCH else f"torch has no {optimizer} to compare with"
    alone = "one process: the optimizer is divided among copies" if mesh["replicate"].size == 1 else None
    return [
        Switch("precision", f"step.precision={asked['precision']}", slow),
        Switch("compile", f"step.compile={asked['compile']}", _cannot_compile(kind)),
        Switch("fused optimizer", f"{optimizer} in one pass over each row, not operation by operation", unknown),
        Switch("capture", "step.capture: the step as a CUDA graph (without fused optimizer, all but the update)", no_gpu),
        Switch("sharded optimizer", "step.shard=optimizer (with fused optimizer only)", alone),
        Switch("garbage collection", f"train.collect_every={cfg.train.collect_every}, not when Python likes"),
        Switch("direct I/O", f"our Loader with data.reader={cfg.data.reader}, not DataLoader over h5py", cannot_share(cfg, sample)),
        Switch("async evaluation", "train.evaluate=background, not wait"),
    ]


def when_on(cfg: StepConfig, mesh: Mesh) -> dict[str, str]:
    """Precision and compilation when they are on: as the settings have it, else the best there is."""
    narrow = cfg.precision if cfg.precision.startswith("bf16") else "bf16" if fast_bf16(mesh.device) else "fp32"
    return {"precision": narrow, "compile": "whole" if cfg.compile == "none" else cfg.compile}


def _cannot_compile(kind: str) -> str | None:
    found = find_spec("triton") if kind == "cuda" else shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return None if found else f"there is no {'Triton' if kind == 'cuda' else 'C++ compiler'}, which torch.compile needs here"


def cannot_share(cfg: Any, sample: int) -> str | None:
    """DataLoader's workers pass batches through /dev/shm, and die where it is too small: then all arrangements use our Loader."""
    need = 2 * (cfg.data.workers + 1) * cfg.data.batch * sample  # on one node, for all its processes
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else need
    return f"/dev/shm has {free >> 20} MiB free, and DataLoader's workers need {need >> 20}" if free < need else None
