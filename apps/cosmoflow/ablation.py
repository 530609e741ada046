"""What each optimisation brings CosmoFlow:  hpcai ablate cosmoflow [model.size=128 data.batch=4 ...]

Plain is what one would write first: torch's layers in their usual order, contiguous, float32, torch's optimizer and DataLoader over
h5py, and training waits for its evaluation. Universes are random counts in files that the page cache holds. They are neither turned
nor whitened, and nothing is dropped out, so that all arrangements compute the same. An evaluation begins in the middle of each run
and ends with it: what it does in the background is counted too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from apps.cosmoflow.data import _rows, batches, universe
from apps.cosmoflow.settings import Config, DataConfig
from hpcai.data import Endless
from hpcai.dist import Mesh
from hpcai.dist.collect import gather_shares
from hpcai.dist.host import Collector
from hpcai.models.cosmoflow import Batch, CosmoFlow, CosmoFlowConfig, error, loss, parallelize
from hpcai.models.cosmoflow.model import _SLOPE, Block
from hpcai.nn import Conv3d
from hpcai.settings import StepConfig
from hpcai.train.ablation import Switch
from hpcai.train.choices import fast_bf16
from hpcai.train.optim import decayed
from hpcai.train.scoring import scoring
from hpcai.train.step import Step

_GPU = torch.cuda.is_available()
_EVALUATED = 2  # batches of an evaluation
_TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class CONFIG(Config):
    """A CosmoFlow run of a size that is measured in minutes."""

    model: CosmoFlowConfig = CosmoFlowConfig(size=128 if _GPU else 64)
    data: DataConfig = DataConfig(batch=16 if _GPU else 1, workers=4 if _GPU else 1)


def switches(cfg: Config, mesh: Mesh) -> list[Switch]:
    kind, optimizer = mesh.device.type, cfg.step.optimizer
    asked = _asked(cfg.step, mesh)
    slow = f"this {kind} does not compute in bfloat16 at full speed" if asked["precision"] == "fp32" else None
    no_gpu = f"there is no GPU: this process computes on {kind}" if kind == "cpu" else None
    unknown = None if optimizer in _TORCH else f"torch has no {optimizer} to compare with"
    alone = "one process: the optimizer is divided among copies" if mesh["replicate"].size == 1 else None
    return [
        Switch("kernels", "convolutions that halve a single small volume (on a CPU), and pooling before the rectifier"),
        Switch("channels-last", "weights and activations in channels-last memory, as the files have them"),
        Switch("precision", f"step.precision={asked['precision']}", slow),
        Switch("compile", f"step.compile={asked['compile']}", _cannot_compile(kind)),
        Switch("fused optimizer", f"{optimizer} in one pass over each row, not operation by operation", unknown),
        Switch("capture", "step.capture: the step as a CUDA graph (without fused optimizer, all but the update)", no_gpu),
        Switch("sharded optimizer", "step.shard=optimizer (with fused optimizer only)", alone),
        Switch("garbage collection", f"train.collect_every={cfg.train.collect_every}, not when Python likes"),
        Switch("direct I/O", f"our Loader with data.reader={cfg.data.reader}, not DataLoader over h5py", _cannot_share(cfg, mesh)),
        Switch("async evaluation", "train.evaluate=background, not wait"),
    ]


def _asked(cfg: StepConfig, mesh: Mesh) -> dict[str, str]:
    """Precision and compilation when they are on: as the settings have it, else the best there is."""
    narrow = cfg.precision if cfg.precision.startswith("bf16") else "bf16" if fast_bf16(mesh.device) else "fp32"
    return {"precision": narrow, "compile": "whole" if cfg.compile == "none" else cfg.compile}


def _cannot_compile(kind: str) -> str | None:
    found = find_spec("triton") if kind == "cuda" else shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return None if found else f"there is no {'Triton' if kind == 'cuda' else 'C++ compiler'}, which torch.compile needs here"


def _cannot_share(cfg: Config, mesh: Mesh) -> str | None:
    """DataLoader's workers pass batches through /dev/shm, and die where it is too small: then all arrangements use our Loader."""
    batch = cfg.data.batch * cfg.model.size**3 * cfg.model.channels * 2
    need = 2 * (cfg.data.workers + 1) * batch  # on one node, for all its processes
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else need
    return f"/dev/shm has {free >> 20} MiB free, and DataLoader's workers need {need >> 20}" if free < need else None


@contextmanager
def trial(cfg: Config, mesh: Mesh, on: frozenset[str]) -> Iterator["_Trial"]:
    same: dict[str, Any] = {"turn": False, "whiten": False, "stage": None, "shards": 1}
    data = cfg.data.model_copy(update={**same, "directory": _universes(cfg.model, cfg.data.batch)})
    model = cfg.model.model_copy(update={"dropout": 0.0, "mean": None, "mix": None})
    with ExitStack() as held:
        yield _Trial(cfg.model_copy(update={"data": data, "model": model}), mesh, on, held)


class _Trial:
    def __init__(self, cfg: Config, mesh: Mesh, on: frozenset[str], held: ExitStack) -> None:
        self.cfg, self.mesh, self.held, self.samples = cfg, mesh, held, cfg.data.batch
        self.by_torch = "direct I/O" not in on and _cannot_share(cfg, mesh) is None
        self.collector = Collector(cfg.train.collect_every if "garbage collection" in on else None)
        self.step = _step(cfg, mesh, on)
        self.step.model.train()
        validation = self._batches("validation", _EVALUATED)
        self.scores: Any = scoring(self.step, error, validation, "background" if "async evaluation" in on else "wait")
        self.training, self.runs = cast(Any, None), 0

    def numerics(self) -> tuple[float, Tensor]:
        cfg, count = self.cfg.model, self.samples // self.mesh["replicate"].size
        random = torch.Generator().manual_seed(self.mesh.rank)
        counts = torch.randint(0, 100, (count, *[cfg.size] * 3, cfg.channels), dtype=torch.int16, generator=random)
        target = 2 * torch.rand(count, len(cfg.parameters), generator=random) - 1
        device, step = self.mesh.device, self.step
        values: Any = step._gradients(Batch(counts.to(device), target.to(device)))  # an update may scale them where they lie
        found = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
        for bucket in step.sums.buckets:
            if hasattr(bucket, "own"):  # of the sum each process has its share
                gather_shares(bucket.flat, bucket.own, self.mesh["replicate"]).wait()
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
        cfg, mesh, batch = self.cfg, self.mesh, self.samples
        if self.by_torch:
            return self.held.enter_context(closing(_ByDataLoader(cfg, mesh, split, count)))
        source = universe(_rows(cfg, split, mesh), None)
        endless = {"sampler": Endless(len(source), count * batch), "accumulate": cfg.step.accumulate}
        words: Any = endless if split == "train" else {"shuffle": False, "last": "keep"}
        return self.held.enter_context(batches(source, batch, cfg, mesh, name=split, **words))


def _step(cfg: Config, mesh: Mesh, on: frozenset[str]) -> Step:
    torch.manual_seed(cfg.train.seed)
    model: Any = parallelize(CosmoFlow(cfg.model), mesh)
    if "kernels" not in on:
        for block in model.conv_seq:
            block.__class__, block.conv.__class__ = _Usual, _Whole
    if "channels-last" not in on:
        model.to(memory_format=torch.contiguous_format).conv_seq.__class__ = _Contiguous
    fused = "fused optimizer" in on or cfg.step.optimizer not in _TORCH
    shard = "optimizer" if fused and "sharded optimizer" in on else "none"
    changes = {"shard": shard, "shard_within": None, "compile_cache": None, "precision": "fp32", "compile": "none"}
    changes |= {name: value for name, value in _asked(cfg.step, mesh).items() if name in on}
    torch._dynamo.config.recompile_limit = 64  # of the versions of one forward, over all arrangements
    changes["capture"] = "none" if "capture" not in on else "whole" if fused else "forward"
    return (Step if fused else _ByTorch)(model, loss, cfg.step.model_copy(update=changes), mesh)


class _Usual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(F.leaky_relu(self.conv(x), _SLOPE), 2)


class _Whole(Conv3d):
    def _would_be_unrolled(self, x: Tensor) -> bool:
        return False


class _Contiguous(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())


class _ByTorch(Step):
    """A step whose update is torch's optimizer, one operation after the other, with neither guard nor norm."""

    def __init__(self, model: nn.Module, function: Any, cfg: StepConfig, mesh: Mesh) -> None:
        super().__init__(model, function, cfg, mesh)
        for state in self.optimizer.states:
            state.moments.clear()
        words = {"momentum": cfg.momentum} if cfg.optimizer == "sgd" else {"betas": cfg.betas, "eps": cfg.eps}
        decays = decayed(model, cfg)
        groups = [{"params": [p], "weight_decay": cfg.weight_decay * (name in decays)} for name, p in model.named_parameters()]
        self.by_torch = _TORCH[cfg.optimizer](groups, lr=cfg.lr, foreach=False, fused=False, **words)

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


@cache
def _universes(cfg: CosmoFlowConfig, batch: int) -> Path:
    """A folder with some batches of random counts for each split, in the layout of data_prep."""
    folder = Path(tempfile.mkdtemp(dir=_HOME.name))
    random, rows = np.random.default_rng(0), _EVALUATED * batch
    row = random.integers(0, 100, (*[cfg.size] * 3, cfg.channels), np.int16)
    for split in ("train", "validation"):
        (folder / split).mkdir()
        with h5py.File(folder / split / "universes.h5", "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            counts = file.create_dataset("counts", (rows, *row.shape), "int16")
            for i in range(rows):
                counts[i] = np.roll(row, i)
            file["target"] = random.uniform(-1, 1, (rows, len(cfg.parameters))).astype(np.float32)
    return folder


class _Plain(Dataset):
    def __init__(self, path: Path) -> None:
        self.path, self.file = path, cast(Any, None)

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or h5py.File(self.path, "r")  # by each worker
        return self.file["counts"][index], self.file["target"][index]


class _ByDataLoader:
    def __init__(self, cfg: Config, mesh: Mesh, split: str, count: int) -> None:
        copies, self.device = mesh["replicate"], mesh.device
        batch, rows = cfg.data.batch // copies.size, _EVALUATED * cfg.data.batch
        mine = range(copies.rank, rows, copies.size)
        order = RandomSampler(range(rows), replacement=True, num_samples=count * batch) if split == "train" else mine
        words = {"persistent_workers": True, "pin_memory": self.device.type == "cuda"}
        data = _Plain(cfg.data.directory / split / "universes.h5")
        self.loader: Any = DataLoader(data, batch, sampler=order, num_workers=cfg.data.workers, **words)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for part in self.loader:
            yield Batch(*(tensor.to(self.device, non_blocking=True) for tensor in part))

    def close(self) -> None:
        self.loader = None  # whose workers end with it
