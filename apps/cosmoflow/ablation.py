"""What each optimisation brings CosmoFlow:  hpcai ablate cosmoflow [model.size=128 data.batch=4 ...]

Plain is what one would write first: torch's convolutions, contiguous, float32, torch's optimizer and DataLoader over h5py, and
training waits for its evaluation. Universes are random counts in files that the page cache holds. They are neither turned nor
whitened, and nothing is dropped out, so that all arrangements compute the same. An evaluation begins in the middle of each run
and has ended with it: what goes on in the background is counted too.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from apps.cosmoflow.data import Universes, _loader, _rows
from apps.cosmoflow.settings import Config, DataConfig
from hpcai.dist import Mesh
from hpcai.dist.host import Collector
from hpcai.models.cosmoflow import Batch, CosmoFlow, CosmoFlowConfig, error, loss, parallelize
from hpcai.models.cosmoflow.model import _SLOPE, Block
from hpcai.settings import StepConfig
from hpcai.train.ablation import Switch
from hpcai.train.choices import fast_bf16
from hpcai.train.measure import Value
from hpcai.train.optim import decayed
from hpcai.train.scoring import scoring
from hpcai.train.step import Step

_GPU = torch.cuda.is_available()
_EVALUATED = 2  # batches of an evaluation
_TORCH = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class CONFIG(Config):
    """A CosmoFlow run of a size that is measured in minutes."""

    model: CosmoFlowConfig = CosmoFlowConfig(size=128 if _GPU else 64)
    data: DataConfig = DataConfig(batch=16 if _GPU else 1, workers=4 if _GPU else 1)


def switches(cfg: Config, mesh: Mesh) -> list[Switch]:
    alone = mesh["replicate"].size == 1
    on_cpu = mesh.device.type == "cpu"
    precision = _precision(cfg.step, mesh)
    same = "this processor does not compute in bfloat16 at full speed" if precision == "fp32" else None
    no_gpu = f"there is no GPU: this process computes on {mesh.device.type}" if on_cpu else None
    unknown = None if cfg.step.optimizer in _TORCH else f"torch has no {cfg.step.optimizer} to compare with"
    uncut = "one process: the optimizer is divided among copies of the model" if alone else unknown
    return [
        Switch("kernels", "convolution in halves (one small volume on a CPU), and pooling before the rectifier"),
        Switch("channels-last", "weights and activations in channels-last memory, as the files have them"),
        Switch("precision", f"step.precision={precision}", same),
        Switch("compile", f"step.compile={_compile(cfg.step)}", _cannot_compile(on_cpu)),
        Switch("fused optimizer", f"{cfg.step.optimizer} in one pass, not operation by operation", unknown),
        Switch("capture", "step.capture: the step as a CUDA graph (of all but the update without fused optimizer)", no_gpu),
        Switch("sharded optimizer", "step.shard=optimizer (with fused optimizer only)", uncut),
        Switch("garbage collection", f"train.collect_every={cfg.train.collect_every}, not when Python likes"),
        Switch("direct I/O", f"our Loader with data.reader={cfg.data.reader}, not DataLoader over h5py", _cannot_share(cfg, mesh)),
        Switch("async evaluation", "train.evaluate=background, not wait"),
    ]


def _precision(cfg: StepConfig, mesh: Mesh) -> str:
    if cfg.precision in ("bf16", "bf16-params"):
        return cfg.precision
    return "bf16" if fast_bf16(mesh.device) else "fp32"


def _compile(cfg: StepConfig) -> str:
    return "whole" if cfg.compile == "none" else cfg.compile


def _cannot_compile(on_cpu: bool) -> str | None:
    if on_cpu:
        found = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
        return None if found else "there is no C++ compiler, which torch.compile needs on a CPU"
    return None if find_spec("triton") else "Triton is not installed, which torch.compile needs on a GPU"


def _cannot_share(cfg: Config, mesh: Mesh) -> str | None:
    """DataLoader's workers pass batches through /dev/shm, and die where it is too small: then all arrangements use our Loader."""
    batch = cfg.data.batch // mesh["replicate"].size * cfg.model.size**3 * cfg.model.channels * 2
    need = 2 * (cfg.data.workers + 1) * batch
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else need
    return f"/dev/shm has {free >> 20} MiB free, and DataLoader's workers need {need >> 20}" if free < need else None


@contextmanager
def trial(cfg: Config, mesh: Mesh, on: frozenset[str]) -> Iterator["_Trial"]:
    with ExitStack() as held:
        yield _Trial(cfg, mesh, on, held)


class _Trial:
    def __init__(self, cfg: Config, mesh: Mesh, on: frozenset[str], held: ExitStack) -> None:
        plain = {"turn": False, "whiten": False, "stage": None, "shards": 1, "directory": _universes(cfg.model, cfg.data.batch)}
        cfg = cfg.model_copy(
            update={
                "data": cfg.data.model_copy(update=plain),
                "model": cfg.model.model_copy(update={"dropout": 0.0, "mean": None, "mix": None}),
            }
        )
        self.cfg, self.mesh, self.held, self.samples = cfg, mesh, held, cfg.data.batch
        self.by_torch = "direct I/O" not in on and _cannot_share(cfg, mesh) is None
        self.collect = cfg.train.collect_every if "garbage collection" in on else None
        self.step = _step(cfg, mesh, on)
        self.step.model.train()
        validation = self._batches(_EVALUATED, "validation")
        self.scores = scoring(self.step, error, validation, "background" if "async evaluation" in on else "wait")
        self._training: tuple[int, Any] | None = None
        self._epoch = 0

    def numerics(self) -> tuple[float, Tensor]:
        cfg, device = self.cfg.model, self.mesh.device
        random = torch.Generator().manual_seed(self.cfg.train.seed + self.mesh.rank)
        count = self.samples // self.mesh["replicate"].size
        counts = torch.randint(0, 100, (count, *[cfg.size] * 3, cfg.channels), dtype=torch.int16, generator=random)
        target = 2 * torch.rand(count, len(cfg.parameters), generator=random) - 1
        values = self.step(Batch(counts.to(device), target.to(device)), 0.0)  # the whole step, at a rate that changes no weight
        head = values["loss"]
        assert isinstance(head, Tensor)
        return head.item(), self._gradient()

    def _gradient(self) -> Tensor:
        found: dict[str, Tensor] = {}
        for bucket in self.step.sums.buckets:
            if hasattr(bucket, "own"):  # this process has its share only
                torch_dist.all_gather_into_tensor(bucket.flat, bucket.own, group=bucket.cut.group)  # type: ignore[attr-defined]
            found |= {part.name: part.whole(bucket.flat) for part in bucket.parts}
        loose = {name: p.grad for name, p in self.step.model.named_parameters() if p.grad is not None}
        both = {**loose, **found}
        return torch.cat([both[name].detach().float().reshape(-1).cpu() for name in sorted(both)])

    def around(self) -> AbstractContextManager[Collector]:
        self.collector = Collector(self.collect)
        return self.collector

    def run(self, steps: int) -> None:
        if self._training is None or self._training[0] != steps:
            self._training = steps, self._batches(steps, "train")
        assert self.scores is not None
        with closing(self._training[1].epoch(self._epoch)) as batches:
            for number, batch in enumerate(batches):
                if number == steps // 2:
                    self.scores.start({"step": self.step.count})
                self.step(batch)
                self.collector.at(self.step.count)
        self.scores.results(wait=True)
        self._epoch += 1

    def _batches(self, count: int, split: str) -> Any:
        batch, shuffle = self.samples, split == "train"
        if self.by_torch:
            data = _Plain(self.cfg.data.directory / split / "universes.h5", count * batch)
            return self.held.enter_context(closing(_ByDataLoader(data, batch, self.cfg.data.workers, self.mesh, shuffle)))
        source = _Repeated(Universes(_rows(self.cfg, split, self.mesh), None), count * batch)
        words = {"accumulate": self.cfg.step.accumulate} if shuffle else {"shuffle": False, "last": "keep"}
        return self.held.enter_context(_loader(source, batch, self.cfg, self.mesh, name=split, **words))  # type: ignore[arg-type]


# ---- the step


def _step(cfg: Config, mesh: Mesh, on: frozenset[str]) -> Step:
    torch.manual_seed(cfg.train.seed)
    model = parallelize(CosmoFlow(cfg.model), mesh)
    if "kernels" not in on:
        for block in model.conv_seq:
            block.__class__ = _PlainBlock
            block.conv.__class__ = nn.Conv3d  # type: ignore[union-attr, assignment]
    if "channels-last" not in on:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        model.conv_seq.__class__ = _Contiguous
    fused = "fused optimizer" in on or cfg.step.optimizer not in _TORCH
    capture = "none" if "capture" not in on else "whole" if fused else "forward"
    shard = "optimizer" if fused and "sharded optimizer" in on else "none"
    changes = {
        "precision": _precision(cfg.step, mesh) if "precision" in on else "fp32",
        "compile": _compile(cfg.step) if "compile" in on else "none",
        "capture": capture, "shard": shard, "shard_within": cfg.step.shard_within if shard != "none" else None,
        "compile_cache": None,
    }  # fmt: skip
    return (Step if fused else _ByTorch)(model, loss, cfg.step.model_copy(update=changes), mesh)


class _PlainBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(F.leaky_relu(self.conv(x), _SLOPE), 2)


class _Contiguous(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())


class _ByTorch(Step):
    """A step whose update is torch's optimizer, one operation after the other, with neither guard nor norm."""

    def __init__(self, model: nn.Module, function: Any, cfg: StepConfig, mesh: Mesh) -> None:
        super().__init__(model, function, cfg, mesh)
        for state in self.optimizer.states:
            state.moments.clear()
        words: dict[str, Any] = {"foreach": False, "lr": cfg.lr}
        words |= {"momentum": cfg.momentum} if cfg.optimizer == "sgd" else {"betas": cfg.betas, "eps": cfg.eps}
        decays, named = decayed(model, cfg), dict(model.named_parameters())
        groups = [([p for n, p in named.items() if (n in decays) == yes], cfg.weight_decay * yes) for yes in (True, False)]
        self.by_torch = _TORCH[cfg.optimizer]([{"params": p, "weight_decay": d} for p, d in groups if p], fused=False, **words)

    def __call__(self, batch: Any, lr: float | None = None) -> dict[str, Value]:
        for group in self.by_torch.param_groups:
            group["lr"] = self.cfg.lr if lr is None else lr
        return super().__call__(batch, lr)

    @torch.no_grad()
    def _update(self, values: dict[str, Value]) -> None:
        if self.cfg.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.by_torch.step()
        if self.cfg.average is not None:
            averages = self.optimizer.averages()
            for name, parameter in self.model.named_parameters():
                averages[name].lerp_(parameter, 1 - self.cfg.average)  # type: ignore[union-attr]
        self._count += 1


# ---- the files


@cache
def _home() -> Any:
    return tempfile.TemporaryDirectory(prefix="hpcai-ablation-")


@cache
def _universes(cfg: CosmoFlowConfig, batch: int) -> Path:
    """A folder with two batches of random counts for each split, one after another in a file as data_prep writes them."""
    folder = Path(_home().name) / f"{cfg.size}-{cfg.channels}-{len(cfg.parameters)}-{batch}"
    row = np.random.default_rng(0).integers(0, 100, (cfg.size,) * 3 + (cfg.channels,), np.int16)
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / split / "universes.h5", "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            counts = file.create_dataset("counts", (2 * batch, *row.shape), "int16")
            for i in range(2 * batch):
                counts[i] = np.roll(row, i)
            file["target"] = np.random.default_rng(1).uniform(-1, 1, (2 * batch, len(cfg.parameters))).astype(np.float32)
    return folder


class _Repeated:
    """``count`` samples, of which ``source`` has a few."""

    def __init__(self, source: Universes, count: int) -> None:
        self.source, self.count, self.rows, self.close = source, count, source.rows, source.close

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int) -> Batch:
        return self.source.sample(index % len(self.source), epoch)

    def describe(self, index: int) -> str:
        return self.source.describe(index % len(self.source))


class _Plain(Dataset):
    """``count`` samples as anybody reads them."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count, self.file = path, count, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or h5py.File(self.path, "r")  # by each worker
        row = index % len(self.file["target"])
        return self.file["counts"][row], self.file["target"][row]


class _ByDataLoader:
    def __init__(self, data: _Plain, batch: int, workers: int, mesh: Mesh, shuffle: bool) -> None:
        self.device, copies = mesh.device, mesh["replicate"]
        self.loader: Any = DataLoader(
            data, batch // copies.size, num_workers=workers, persistent_workers=True, pin_memory=self.device.type == "cuda",
            sampler=DistributedSampler(data, copies.size, copies.rank, shuffle=shuffle),
        )  # fmt: skip

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for part in self.loader:
            yield Batch(*(tensor.to(self.device, non_blocking=True) for tensor in part))

    def close(self) -> None:
        self.loader = None  # whose workers end with it
