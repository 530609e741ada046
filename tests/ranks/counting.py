"""A short run on light processes of this machine, and the sockets, messages and file operations of each of its acts.

Messages are calls of a process group (torch's collectives) and texts to the hub. File operations are Python's audit events, its
``stat``, and what HDF5 opens.
"""

import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai import dist
from hpcai.data.index import write_index
from hpcai.data.splits import Samples, make_loader, open_split
from hpcai.dist import watchdog
from hpcai.dist.mesh import Mesh
from hpcai.settings import RunConfig
from hpcai.train import Step, fit
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.loop import _Training
from hpcai.train.run import Run

ACTS = ("start", "step", "report", "evaluation", "save", "resume", "end")
Found = dict[str, dict[str, float]]
"""by act: messages and file operations of one time of it, sockets at its end"""
_FIELDS: Any = {"x": ("float32", (8,))}
_ROWS, _STEPS, _OWN = 16, 4, "what counts"
_CALLS = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "gather", "scatter", "send", "recv", "recv_anysource", "barrier", "monitored_barrier",
)  # fmt: skip
_EVENTS = {
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink",
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Counts of the first and the last rank, and messages that sums of gradients need in a step. Sockets of the last are the most
    of any but the first: ranks that write checkpoints, and those in the middle of a tree, have more of them."""

    first: Found
    last: Found
    sums: int


class Counts:
    """Counts in the process that makes it, until this ends."""

    def __init__(self) -> None:
        self.found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.times: Counter[str] = Counter()
        self.acts = ["start"]
        self._inherited = _sockets()  # a process that was forked has those of the other one
        group: Any = torch_dist.ProcessGroup
        named = [("messages", group, name) for name in _CALLS if hasattr(group, name)] + [("messages", watchdog, "_send")]
        named += [("file operations", owner, name) for owner, name in ((os, "stat"), (os, "lstat"), (h5py.File, "__init__"))]
        for what, owner, name in named:
            self._count(what, owner, name)
        sys.addaudithook(lambda event, given: self._note("file operations") if _names_a_file(event, given) else None)

    def now(self, act: str) -> None:
        """From here on all belongs to ``act``, but for what is within others."""
        self._sockets()
        self.acts[0] = act

    @contextmanager
    def act(self, name: str, times: int = 1) -> Iterator[None]:
        """What is done within belongs to ``name``."""
        self._sockets()
        self.acts.append(name)
        self.times[name] += times
        try:
            yield
        finally:
            self._sockets()
            self.acts.pop()

    def seam(self, owner: type, name: str, act: str, times: int = 1, due: Callable[..., bool] = lambda *_, **__: True,
             then: str | None = None) -> None:  # fmt: skip
        """From here on the method ``name`` of ``owner`` is an act where it is ``due``; another one begins when it ends."""
        before = getattr(owner, name)

        @wraps(before)
        def counted(*given: Any, **kwargs: Any) -> Any:
            try:
                with self.act(act, times) if due(*given, **kwargs) else nullcontext():
                    return before(*given, **kwargs)
            finally:
                self.now(then or self.acts[0])

        setattr(owner, name, counted)

    def close(self) -> Found:
        self._sockets()
        spent = ("messages", "file operations")
        return {act: {**{what: self.found[act][what] / max(self.times[act], 1) for what in spent},
                      "sockets": self.found[act]["sockets"]} for act in ACTS}  # fmt: skip

    def _sockets(self) -> None:
        self.acts.append(_OWN)  # to count them is to ask for files
        self.found[self.acts[-2]]["sockets"] = _sockets() - self._inherited
        self.acts.pop()

    def _note(self, what: str) -> None:
        self.found[self.acts[-1]][what] += 1

    def _count(self, what: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def noted(*given: Any, **kwargs: Any) -> Any:
            self._note(what)
            return function(*given, **kwargs)

        setattr(owner, name, noted)


def _names_a_file(event: str, given: tuple[Any, ...]) -> bool:
    return event in _EVENTS and not isinstance(given[0], int)


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # that of the listing
            continue
    return count


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
    first, *others = names = [f"f{number:06d}.h5" for number in range(files)]
    with h5py.File(split / first, "w") as file:
        file["x"] = np.linspace(0, 1, 8 * _ROWS, dtype=np.float32).reshape(_ROWS, 8)
    for name in others:
        shutil.copyfile(split / first, split / name)
    size = (split / first).stat().st_size
    write_index(split, {"files": [{"name": name, "rows": _ROWS, "bytes": size} for name in names]})
    return split


def measured(ranks: int, split: Path, tensors: int = 20) -> Measured:
    """A run of four steps by so many ranks, with reports, evaluations and saves, which is resumed once."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
            started = [pool.submit(_live, rank, ranks, split, tensors, Path(name), port) for rank in range(ranks)]
            found = [rank.result() for rank in started]
    first, last = found[0][0], found[-1][0]
    for act, each in last.items():
        each["sockets"] = max(other[act]["sockets"] for other, _ in found[1:] or found)
    return Measured(first, last, found[0][1])


def _live(rank: int, ranks: int, split: Path, tensors: int, folder: Path, port: int) -> tuple[Found, int]:
    """The whole life of a rank -> its counts, and messages that sums of gradients need in a step."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    cfg = RunConfig.model_validate({
        "data": {"reader": "buffered", "workers": 1}, "train": {"steps": _STEPS, "report_every": 2, "evaluate_every": 1},
        "checkpoint": {"every_steps": 2}, "report": {"directory": folder / "run", "sinks": ()},
    })  # fmt: skip
    counts, save = Counts(), _Training._save

    def finished_save(self: _Training, final: bool = False) -> None:
        """A save that is waited for, so that what its thread does counts as its own."""
        save(self, final=True)

    _Training._save = finished_save  # type: ignore[method-assign]
    counts.seam(_Training, "_epochs", "step", _STEPS, then="end")
    counts.seam(_Training, "_save", "save")
    counts.seam(_Training, "_start_reading", "report", 0, due=lambda training, report, check_replicas: report or check_replicas)
    counts.seam(_Training, "_log_reading", "report", due=lambda training: training._reading is not None)
    counts.seam(_Training, "_evaluate", "evaluation")
    counts.seam(_Training, "_log_evaluation", "evaluation", 0)
    with dist.start(cfg.mesh, torch.device("cpu")) as mesh:
        sums = _trained(cfg, split, tensors, mesh)
        counts.now(_OWN)
        counts.seam(Checkpoints, "resume", "resume")
        _trained(cfg, split, tensors, mesh)
        counts.now("end")
    return counts.close(), sums


def _trained(cfg: RunConfig, split: Path, tensors: int, mesh: Mesh) -> int:
    """Train, or find that all is done -> messages that sums of gradients need in a step."""
    rows = open_split(split, _FIELDS, "", cfg.data, mesh)
    torch.manual_seed(0)
    epoch = max(1, min(len(rows) // mesh.world, _STEPS))
    samples, held_out = Samples(rows, epoch * mesh.world), Samples(rows, 2 * mesh.world)
    with (
        make_loader(samples, mesh.world, cfg.data, mesh, name="training") as training,
        make_loader(held_out, mesh.world, cfg.data, mesh, name="validation", shuffle=False, last_batch="keep") as validation,
        Run("growth", cfg, mesh) as run,
    ):
        step = Step(Light(tensors), loss, cfg.step, mesh)
        fit(step, training, cfg.train, validation=validation, evaluate=error, run=run)
    return sum(len(bucket.axes) for bucket in getattr(step.reducer, "buckets", ()))
