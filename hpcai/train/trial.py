"""A training with some switches on, of an app's network and random samples: what ``hpcai ablate`` measures.

Plain is what one would write first: float32, torch's optimizer operation by operation and DataLoader over h5py, and training waits
for its evaluation. Samples are in files that the page cache holds. An evaluation begins in the middle of each run and ends with it:
what it does in the background is counted too.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from hpcai.data import Endless
from hpcai.data.assemble import tree_map
from hpcai.dist import Mesh
from hpcai.dist.collect import gather_shares
from hpcai.dist.host import Collector
from hpcai.train.ablation import TORCH, On, cannot_share, when_on
from hpcai.train.evaluation import Metric
from hpcai.train.optim import decayed
from hpcai.train.scoring import scoring
from hpcai.train.step import Loss, Step

_EVALUATED = 2  # batches of an evaluation
_FILE = "samples.h5"


@dataclass(frozen=True)
class Subject:
    """What an app gives for its trials. ``cfg`` are its settings, with ``data``, ``step`` and ``train``."""

    build: Callable[[Any, Mesh, On], nn.Module]
    """(cfg, mesh, on) -> the network over the mesh, with those of its own switches that are on"""
    loss: Loss
    metric: Metric
    fields: Sequence[str]
    """the datasets of a file"""
    random: Callable[[Any, np.random.Generator], tuple[Any, ...]]
    """(cfg, generator) -> a sample as the files have it: an array for each field"""
    loader: Callable[..., Any]
    """(cfg, mesh, split, **words) -> our Loader over the samples in ``cfg.data.directory``"""
    together: Callable[[Any, list[tuple[Any, ...]]], Any]
    """(cfg, samples) -> a batch of CPU tensors"""
    flat: frozenset[str] = frozenset()
    """fields whose samples lie one after another along their first dim"""

    def sample_bytes(self, cfg: Any) -> int:
        return sum(values.nbytes for values in self.random(cfg, np.random.default_rng(0)))


@contextmanager
def trial(app: Subject, cfg: Any, mesh: Mesh, on: On, alike: int = 1) -> Iterator["Training"]:
    """``alike``: neighbouring copies whose samples are the same where loss and gradient are compared."""
    words = {"directory": _files(app, cfg), "stage": None, "shards": 1}
    with ExitStack() as held:
        yield Training(app, cfg.model_copy(update={"data": cfg.data.model_copy(update=words)}), mesh, on, alike, held)


class Training:
    """A ``Trial``."""

    def __init__(self, app: Subject, cfg: Any, mesh: Mesh, on: On, alike: int, held: ExitStack) -> None:
        self.app, self.cfg, self.mesh, self.alike, self.held, self.samples = app, cfg, mesh, alike, held, cfg.data.batch
        self.by_torch = "direct I/O" not in on and cannot_share(cfg, app.sample_bytes(cfg)) is None
        self.collector = Collector(cfg.train.collect_every if "garbage collection" in on else None)
        self.step = _step(app, cfg, mesh, on)
        self.step.model.train()
        validation = self._batches("validation", _EVALUATED)
        self.scores: Any = scoring(self.step, app.metric, validation, "background" if "async evaluation" in on else "wait")
        self.training, self.runs = cast(Any, None), 0

    def numerics(self) -> tuple[float, Tensor]:
        copies, step = self.mesh["replicate"], self.step
        seeds = [[copies.rank // self.alike, i] for i in range(self.samples // copies.size)]
        samples = [self.app.random(self.cfg, np.random.default_rng(seed)) for seed in seeds]
        batch = tree_map(self.app.together(self.cfg, samples), lambda tensor: tensor.to(self.mesh.device))
        values: Any = step._gradients(batch)  # an update may scale them where they lie
        found = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
        for bucket in step.sums.buckets:
            if hasattr(bucket, "own"):  # of the sum each process has its share
                gather_shares(bucket.flat, bucket.own, copies).wait()
            found |= {part.name: part.whole(bucket.flat) for part in bucket.parts}
        return values["loss"].item(), torch.cat([found[name].detach().float().reshape(-1).cpu() for name in sorted(found)])

    def around(self) -> Collector:
        return self.collector

    def run(self, steps: int) -> None:
        if self.training is None:
            self.training = self._batches("train", steps)
            for batch in self.training.epoch(0):  # compiled and captured before an evaluation runs beside it
                self.step(batch)
        with closing(self.training.epoch(self.runs)) as batches:
            for number, batch in enumerate(batches):
                if number == steps // 2:
                    self.scores.start({"step": self.step.count})
                self.step(batch)
                self.collector.at(self.step.count)
        self.scores.results(wait=True)
        self.runs += 1

    def _batches(self, split: str, count: int) -> Any:
        cfg, batch = self.cfg, self.samples
        if self.by_torch:
            return self.held.enter_context(closing(_ByDataLoader(self.app, cfg, self.mesh, split, count)))
        endless = {"sampler": Endless(_EVALUATED * batch, count * batch), "accumulate": cfg.step.accumulate}
        words: Any = endless if split == "train" else {"shuffle": False, "last": "keep"}
        return self.held.enter_context(self.app.loader(cfg, self.mesh, split, name=split, **words))


@dataclass(frozen=True)
class Stacked:
    """``Subject.together`` of samples of one shape: a ``batch``, a named tuple of the fields."""

    batch: type[Any]

    def __call__(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        return self.batch(*(torch.from_numpy(np.stack(column)) for column in zip(*samples)))


def exchange(model: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Modules of just these classes become modules of those, in place: weights and their names stay."""
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]


def _step(app: Subject, cfg: Any, mesh: Mesh, on: On) -> Step:
    torch.manual_seed(cfg.train.seed)
    model = app.build(cfg, mesh, on)
    fused = "fused optimizer" in on or cfg.step.optimizer not in TORCH
    shard = "optimizer" if fused and "sharded optimizer" in on else "none"
    changes = {"shard": shard, "shard_within": None, "compile_cache": None, "precision": "fp32", "compile": "none"}
    changes |= {name: value for name, value in when_on(cfg.step, mesh).items() if name in on}
    torch._dynamo.config.recompile_limit = 64  # of the versions of one forward, over all arrangements
    changes["capture"] = "none" if "capture" not in on else "whole" if fused else "forward"
    return (Step if fused else ByTorch)(model, app.loss, cfg.step.model_copy(update=changes), mesh)


class ByTorch(Step):
    """A step whose update is torch's optimizer, one operation after the other, with neither guard nor norm."""

    def __init__(self, model: nn.Module, function: Any, cfg: Any, mesh: Mesh) -> None:
        super().__init__(model, function, cfg, mesh)
        for state in self.optimizer.states:
            state.moments.clear()
        momentum = {"momentum": cfg.momentum, "nesterov": cfg.nesterov}
        words = momentum if cfg.optimizer == "sgd" else {"betas": cfg.betas, "eps": cfg.eps}
        decays = decayed(model, cfg)
        groups = [{"params": [p], "weight_decay": cfg.weight_decay * (name in decays)} for name, p in model.named_parameters()]
        self.by_torch = TORCH[cfg.optimizer](groups, lr=cfg.lr, foreach=False, fused=False, **words)

    def __call__(self, batch: Any, lr: float | None = None) -> dict[str, Any]:
        for group in self.by_torch.param_groups:
            group["lr"] = self.cfg.lr if lr is None else lr
        return super().__call__(batch, lr)

    @torch.no_grad()
    def _update(self, values: Any) -> None:
        if self.cfg.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.by_torch.step()
        averages: Any = self.optimizer.averages()  # none without step.average
        for name, parameter in self.model.named_parameters() if averages else ():
            averages[name].lerp_(parameter, 1 - (self.cfg.average or 0))


_HOME = tempfile.TemporaryDirectory(prefix="hpcai-ablation-")  # deleted when the process ends


_MADE: dict[tuple[Subject, str], Path] = {}


def _files(app: Subject, cfg: Any) -> Path:
    """A folder with some batches of random samples for each split, in the layout of data_prep; made once."""
    key = app, cfg.model_dump_json()
    if key not in _MADE:
        _MADE[key] = _written(app, cfg)
    return _MADE[key]


def _written(app: Subject, cfg: Any) -> Path:
    folder, rows = Path(tempfile.mkdtemp(dir=_HOME.name)), _EVALUATED * cfg.data.batch
    for split in ("train", "validation"):
        (folder / split).mkdir()
        with h5py.File(folder / split / _FILE, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            for i in range(rows):
                for name, values in zip(app.fields, app.random(cfg, np.random.default_rng(i))):
                    each = (len(values),) if name in app.flat else ()
                    shape = (rows * len(values), *values.shape[1:]) if each else (rows, *values.shape)
                    dataset = file.require_dataset(name, shape, values.dtype)
                    dataset[_place(i, *each)] = values
    return folder


def _place(row: int, each: int | None = None) -> int | slice:
    """Of a sample, of which a flat dataset has ``each`` rows."""
    return row if each is None else slice(row * each, (row + 1) * each)


class _Plain(Dataset):
    def __init__(self, path: Path, app: Subject, rows: int) -> None:
        self.path, self.app, self.rows, self.file = path, app, rows, cast(Any, None)

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or h5py.File(self.path, "r")  # by each worker
        data = [(self.file[name], name in self.app.flat) for name in self.app.fields]
        return tuple(values[_place(index, len(values) // self.rows if flat else None)] for values, flat in data)


class _ByDataLoader:
    def __init__(self, app: Subject, cfg: Any, mesh: Mesh, split: str, count: int) -> None:
        copies, self.device = mesh["replicate"], mesh.device
        batch, rows = cfg.data.batch // copies.size, _EVALUATED * cfg.data.batch
        mine = range(copies.rank, rows, copies.size)
        order = RandomSampler(range(rows), replacement=True, num_samples=count * batch) if split == "train" else mine
        words = {"persistent_workers": True, "pin_memory": self.device.type == "cuda"}
        data = _Plain(cfg.data.directory / split / _FILE, app, rows)
        join = partial(app.together, cfg)
        self.loader: Any = DataLoader(data, batch, sampler=order, num_workers=cfg.data.workers, collate_fn=join, **words)

    def epoch(self, epoch: int) -> Iterator[Any]:
        for part in self.loader:
            yield tree_map(part, lambda tensor: tensor.to(self.device, non_blocking=True))

    def close(self) -> None:
        self.loader = None  # whose workers end with it
