"""A run of light processes from its start to its end, with what each act takes on the first and on the last of them."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from hpcai import dist
from hpcai.cli.bench.growth.ledger import Found, Ledger
from hpcai.cli.bench.timing import processes
from hpcai.data.index import write_index
from hpcai.data.loader import Loader
from hpcai.data.splits import Samples, load, open_split
from hpcai.dist.mesh import Mesh
from hpcai.settings import RunConfig
from hpcai.train import Step, fit
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.loop import _Training
from hpcai.train.run import Run
from hpcai.train.signals import StopSignals

ACTS = ("start", "step", "report", "evaluation", "save", "resume", "end")
_FIELDS: Any = {"x": ("float32", (8,))}
_ROWS = 16  # of a file


@dataclass(frozen=True)
class Job:
    """So many ranks train a model of so many tensors for so many steps, on samples of so many files, and resume so often."""

    ranks: int = 2
    files: int = 64
    tensors: int = 1000
    steps: int = 8
    resumes: int = 3

    @property
    def epoch(self) -> int:
        """Steps of an epoch: the files are enough for it."""
        return max(1, min(self.files * _ROWS // self.ranks, max(4, self.steps // 4)))

    def settings(self, folder: Path) -> RunConfig:
        quarter = max(2, self.steps // 4)
        train = {"steps": self.steps, "report_every": min(quarter, 100), "evaluate_every": max(1, self.steps // self.epoch // 2)}
        return RunConfig.model_validate({
            "data": {"reader": "buffered", "workers": 1}, "train": train, "checkpoint": {"every_steps": quarter},
            "report": {"directory": folder / "run", "sinks": ()},
        })  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What each act took on the first and the last rank, and messages that sums of gradients need in a step. Sockets of the last
    are the most of any but the first: ranks that write checkpoints, and those in the middle of a tree, have more of them."""

    first: Found
    last: Found
    sums: int


class Light(nn.Module):
    """Many small tensors, which are used at once."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((8,), 0.01) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)).view(-1, 8) * x[:, None]).sum((1, 2))


def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": (model(batch["x"]) - 1).square().mean()}


def error(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"error": ((model(batch["x"]) - 1).square().sum(), len(batch["x"]))}


def make_data(folder: Path, files: int) -> Path:
    """A split of so many files with an index, all with the same rows."""
    split = folder / f"split-{files}"
    split.mkdir()
    with h5py.File(split / "f000000.h5", "w") as file:
        file["x"] = np.linspace(0, 1, 8 * _ROWS, dtype=np.float32).reshape(_ROWS, 8)
    first, names = split / "f000000.h5", [f"f{number:06d}.h5" for number in range(files)]
    for name in names[1:]:
        shutil.copyfile(first, split / name)
    write_index(split, {"files": [{"name": name, "rows": _ROWS, "bytes": first.stat().st_size} for name in names]})
    return split


def measured(job: Job, split: Path, trace: bool = False) -> Measured:
    """What ``job`` takes. With ``trace`` file operations are those that strace sees, in a run of its own: it costs time."""
    plain = _on_ranks(job, split, trace=False)
    if not trace:
        return plain
    traced = _on_ranks(job, split, trace=True)
    for ours, theirs in ((plain.first, traced.first), (plain.last, traced.last)):
        for act, found in ours.items():
            found["file operations"] = theirs[act]["file operations"]
    return plain


def _on_ranks(job: Job, split: Path, trace: bool) -> Measured:
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        _forget(split)
        with processes(job.ranks, fresh=False) as pool:
            ranks = [pool.submit(live, rank, job, split, Path(name), port, trace) for rank in range(job.ranks)]
            found = [rank.result() for rank in ranks]
    first, last = found[0][0], found[-1][0]
    for act, each in last.items():
        each["sockets"] = max(other[act]["sockets"] for other, _ in found[1:] or found)
    return Measured(first, last, found[0][1])


def live(rank: int, job: Job, split: Path, folder: Path, port: int, trace: bool) -> tuple[Found, int]:
    """The life of a rank -> what its acts took, and messages that sums of gradients need in a step."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    cfg = job.settings(folder)
    ledger = Ledger(folder / f"trace-{rank}" if trace and rank in (0, job.ranks - 1) else None)
    ledger.now("start")
    with dist.start(cfg.mesh, torch.device("cpu")) as mesh:
        with _seams(ledger):
            sums = _trained(job, cfg, split, mesh)
        for _ in range(job.resumes):
            ledger.now("again")
            if rank == 0:
                _forget(folder)
            with _seam(ledger, Checkpoints, "resume", "resume"):
                _trained(job, cfg, split, mesh)
        ledger.now("end", times=0)
    return ledger.close(), sums


def _trained(job: Job, cfg: RunConfig, split: Path, mesh: Mesh) -> int:
    """Train, or find that all is done -> messages that sums of gradients need in a step."""
    rows = open_split(split, _FIELDS, "", cfg.data, mesh)
    torch.manual_seed(0)

    def loader(name: str, count: int, **words: Any) -> Loader:
        return load(Samples(rows, count), mesh.world, cfg.data, mesh, name=name, **words)

    with (
        loader("training", job.epoch * mesh.world) as training,
        loader("validation", 2 * mesh.world, shuffle=False, last="keep") as validation,
        Run("growth", cfg, mesh) as run,
    ):
        step = Step(Light(job.tensors), loss, cfg.step, mesh)
        fit(step, training, cfg.train, validation=validation, evaluate=error, run=run)
    return sum(len(bucket.axes) for bucket in getattr(step.sums, "buckets", ()))


def _forget(folder: Path) -> None:
    """Have the next one who reads these files read them from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _seams(ledger: Ledger) -> Iterator[None]:
    """Within, the loop's acts are told apart; a save is waited for, so that what its thread does counts as its own."""
    before = _Training._epochs, _Training._save

    def epochs(self: _Training, signals: StopSignals) -> str:
        ledger.now("step", times=self.steps)
        try:
            return before[0](self, signals)
        finally:
            ledger.now("end")

    def save(self: _Training, final: bool = False) -> None:
        with ledger.act("save"):
            before[1](self, final=True)

    parts = (("_read", "report", 0), ("_tell", "report", 1), ("_evaluate", "evaluation", 1), ("_judge", "evaluation", 0))
    due: dict[str, Callable[..., bool]] = {
        "_read": lambda training, report, compare: report or compare,
        "_tell": lambda training: training._reading is not None,
    }  # fmt: skip
    seams = [_seam(ledger, _Training, name, act, times, due.get(name)) for name, act, times in parts]
    _Training._epochs, _Training._save = epochs, save  # type: ignore[method-assign]
    try:
        with seams[0], seams[1], seams[2], seams[3]:
            yield
    finally:
        _Training._epochs, _Training._save = before  # type: ignore[method-assign]


@contextmanager
def _seam(
    ledger: Ledger, owner: type, name: str, act: str, times: int = 1, due: Callable[..., bool] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within, the method ``name`` of ``owner`` is an act, where it is ``due``."""
    before = getattr(owner, name)

    @wraps(before)
    def counted(*given: Any, **words: Any) -> Any:
        with ledger.act(act, times) if due is None or due(*given, **words) else nullcontext():
            return before(*given, **words)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, before)
