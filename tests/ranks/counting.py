"""A short run on local processes, with the numbers of sockets, messages and file operations in each of its phases.

Messages are calls of a process group (torch's collectives) and messages to the hub. File operations are Python's audit events, its
``stat``, and files opened by HDF5.
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
from tests.reference_data import load_json

PHASES = ("start", "step", "report", "evaluation", "save", "resume", "end")
PhaseCounts = dict[str, dict[str, float]]
"""by phase: messages and file operations of one repetition, sockets at its end"""
_FIELDS: Any = {"x": ("float32", (8,))}
_ROWS, _STEPS, _UNCOUNTED = 16, 4, "not counted"
_CALLS, _EVENTS = load_json("counted_calls").values()


@dataclass(frozen=True)
class RunCounts:
    """Counts of the first and the last rank, and messages of gradient all-reduces in a step. Sockets of ``last`` are the maximum
    over all ranks but the first: checkpoint writers and inner nodes of a tree have more of them."""

    first: PhaseCounts
    last: PhaseCounts
    all_reduces: int


class PhaseCounter:
    """A counter of this process, from its construction to the end of the process."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.times: Counter[str] = Counter()
        self.phases = ["start"]
        self._inherited = _open_sockets()  # a forked process inherits those of its parent
        group: Any = torch_dist.ProcessGroup
        methods = [("messages", group, name) for name in _CALLS if hasattr(group, name)] + [("messages", watchdog, "_send")]
        methods += [("file operations", owner, name) for owner, name in ((os, "stat"), (os, "lstat"), (h5py.File, "__init__"))]
        for kind, owner, name in methods:
            self._patch_counter(kind, owner, name)
        sys.addaudithook(lambda event, args: self._add("file operations") if _is_file_operation(event, args) else None)

    def set_phase(self, phase: str) -> None:
        """Begin a phase. Nested phases are counted as their own."""
        self._count_sockets()
        self.phases[0] = phase

    @contextmanager
    def phase(self, name: str, times: int = 1) -> Iterator[None]:
        self._count_sockets()
        self.phases.append(name)
        self.times[name] += times
        try:
            yield
        finally:
            self._count_sockets()
            self.phases.pop()

    def patch_phase(self, owner: type, name: str, phase: str, times: int = 1, when: Callable[..., bool] = lambda *_, **__: True,
                    following: str | None = None) -> None:  # fmt: skip
        """Patch the method ``name`` of ``owner``: a call is a phase if ``when`` holds, and ``following`` begins at its end."""
        original = getattr(owner, name)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                with self.phase(phase, times) if when(*args, **kwargs) else nullcontext():
                    return original(*args, **kwargs)
            finally:
                self.set_phase(following or self.phases[0])

        setattr(owner, name, counted)

    def close(self) -> PhaseCounts:
        self._count_sockets()
        kinds = ("messages", "file operations")
        return {phase: {**{kind: self.counts[phase][kind] / max(self.times[phase], 1) for kind in kinds},
                        "sockets": self.counts[phase]["sockets"]} for phase in PHASES}  # fmt: skip

    def _count_sockets(self) -> None:
        self.phases.append(_UNCOUNTED)  # counting reads files itself
        self.counts[self.phases[-2]]["sockets"] = _open_sockets() - self._inherited
        self.phases.pop()

    def _add(self, kind: str) -> None:
        self.counts[self.phases[-1]][kind] += 1

    def _patch_counter(self, kind: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(kind)
            return original(*args, **kwargs)

        setattr(owner, name, counted)


def _is_file_operation(event: str, args: tuple[Any, ...]) -> bool:
    return event in _EVENTS and not isinstance(args[0], int)


def _open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the descriptor of the listing
            continue
    return count


class ManyTensors(nn.Module):
    """A model of many small parameters, all used in one operation."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((8,), 0.01) for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)).view(-1, 8) * x[:, None]).sum((1, 2))


def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": (model(batch["x"]) - 1).square().mean()}


def error(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"error": ((model(batch["x"]) - 1).square().sum(), len(batch["x"]))}


def write_split(folder: Path, files: int) -> Path:
    """Write a split of ``files`` files with the same rows, and an index."""
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


def count_run(ranks: int, split: Path, tensors: int = 20) -> RunCounts:
    """Count a run of four steps on ``ranks`` ranks, with reports, evaluations and saves, that is resumed once."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
            futures = [pool.submit(_run_rank, rank, ranks, split, tensors, Path(folder), port) for rank in range(ranks)]
            results = [rank.result() for rank in futures]
    first, last = results[0][0], results[-1][0]
    for phase, counts in last.items():
        counts["sockets"] = max(other[phase]["sockets"] for other, _ in results[1:] or results)
    return RunCounts(first, last, results[0][1])


def _run_rank(rank: int, ranks: int, split: Path, tensors: int, folder: Path, port: int) -> tuple[PhaseCounts, int]:
    """Return the counts of a rank, from its start to its end, and messages of gradient all-reduces in a step."""
    torch.set_num_threads(1)
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environ.items()} | {"MASTER_ADDR": "127.0.0.1"}
    cfg = RunConfig.model_validate({
        "data": {"reader": "buffered", "workers": 1}, "train": {"steps": _STEPS, "report_every": 2, "evaluate_every": 1},
        "checkpoint": {"every_steps": 2}, "report": {"directory": folder / "run", "sinks": ()},
    })  # fmt: skip
    counter, save = PhaseCounter(), _Training._save

    def save_and_wait(self: _Training, final: bool = False) -> None:
        """Save and wait for the thread, so that its operations are counted in this phase."""
        save(self, final=True)

    _Training._save = save_and_wait  # type: ignore[method-assign]
    counter.patch_phase(_Training, "_epochs", "step", _STEPS, following="end")
    counter.patch_phase(_Training, "_save", "save")
    counter.patch_phase(_Training, "_start_reading", "report", 0, when=lambda _, report, check_replicas: report or check_replicas)
    counter.patch_phase(_Training, "_log_reading", "report", when=lambda training: training._reading is not None)
    counter.patch_phase(_Training, "_evaluate", "evaluation")
    counter.patch_phase(_Training, "_log_evaluation", "evaluation", 0)
    with dist.start(cfg.mesh, torch.device("cpu")) as mesh:
        all_reduces = _train(cfg, split, tensors, mesh)
        counter.set_phase(_UNCOUNTED)
        counter.patch_phase(Checkpoints, "resume", "resume")
        _train(cfg, split, tensors, mesh)
        counter.set_phase("end")
    return counter.close(), all_reduces


def _train(cfg: RunConfig, split: Path, tensors: int, mesh: Mesh) -> int:
    """Train, or resume a finished run, and return the messages of gradient all-reduces in a step."""
    rows = open_split(split, _FIELDS, "", cfg.data, mesh)
    torch.manual_seed(0)
    epoch = max(1, min(len(rows) // mesh.world, _STEPS))
    samples, validation_rows = Samples(rows, epoch * mesh.world), Samples(rows, 2 * mesh.world)
    with (
        make_loader(samples, mesh.world, cfg.data, mesh, name="training") as training,
        make_loader(validation_rows, mesh.world, cfg.data, mesh, name="validation", shuffle=False, last_batch="keep") as validation,
        Run("growth", cfg, mesh) as run,
    ):
        step = Step(ManyTensors(tensors), loss, cfg.step, mesh)
        fit(step, training, cfg.train, validation=validation, evaluate=error, run=run)
    return sum(len(bucket.axes) for bucket in getattr(step.reducer, "buckets", ()))
