"""Declaration of an app's benchmarks, and a training of its network on random samples with some optimisations enabled.

``apps/<name>/benchmarks.py`` has a class ``Benchmark``, a ``Workload``: ``hpcai bench`` compares the app's step with its plain
implementation, ``hpcai ablate`` measures the gain of each switch, and ``hpcai bench gpu`` measures the steps at published
configurations. The plain implementation is the straightforward one in PyTorch: float32, separate torch layers, torch's unfused
optimizer, and evaluation that blocks training.
"""

import inspect
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai import config
from hpcai.cli import apps
from hpcai.data import Endless
from hpcai.data.collate import tree_map
from hpcai.data.splits import Samples, make_loader, open_split
from hpcai.dist import Mesh
from hpcai.dist.collectives import all_gather, all_reduce_
from hpcai.dist.host import ManualGC
from hpcai.kernels import triton_support
from hpcai.nn import BatchNorm
from hpcai.settings import RunConfig, StepConfig
from hpcai.train.auto_settings import has_fast_bf16
from hpcai.train.evaluation import choose_evaluation
from hpcai.train.optim import match_names
from hpcai.train.step import Step

Enabled = frozenset[str]
Row = dict[str, Any]
TORCH_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
_EVALUATION_BATCHES = 2  # batches in an evaluation
_FILE = "samples.h5"
_TEMPORARY = tempfile.TemporaryDirectory(prefix="hpcai-ablation-")  # deleted when the process ends
_SAMPLE_FOLDERS: dict[tuple[type["Workload"], str, int, tuple[str, ...]], Path] = {}


@dataclass(frozen=True)
class Switch:
    """One optimisation: ``what`` it is in a line, and the reason if it is not available (``why_not``)."""

    name: str
    what: str
    why_not: str | None = None


class Implementation(NamedTuple):
    """A network to be trained by torch alone; forward and backward pass run inside ``context``."""

    model: nn.Module
    loss: Callable[[Any, Any], dict[str, Any]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class Peer(NamedTuple):
    """The same network in a public package, which is measured if the package is installed."""

    package: str
    build: Callable[[Any, Any], Implementation]
    """(cfg, batch on the device) -> the network and its loss on that batch"""


class PublishedRate(NamedTuple):
    """A published throughput of the same training step."""

    samples_per_s: float
    """samples per second and GPU"""
    gpu: str
    conditions: str
    """GPUs of the job, samples per GPU, and other differences from a single GPU"""
    source: str


@dataclass(frozen=True)
class Case:
    """A training step at a published configuration, for ``hpcai bench gpu``: a YAML file of the app, and overrides for one GPU."""

    name: str
    yaml: str
    """file in apps/<name>/configs"""
    overrides: Sequence[str] = ()
    """key=value overrides, such as data.batch, the samples of one GPU, or a precision without which the model does not fit"""
    step_variants: Sequence[Sequence[str]] = ((),)
    """key=value overrides that differ between batches; steps cycle through them"""
    published: PublishedRate | None = None
    goal: float | None = None
    """target in samples per second on one H200"""


class Workload:
    """The benchmarks of an app. ``cfg`` is its settings; a subclass defines at least the attributes without a default."""

    settings: type[RunConfig]
    """schema of the YAML files of the app, with the sizes of random samples; a benchmark takes minutes with the defaults, or with
    those that published.toml has in their place"""
    fields: Sequence[str]
    """datasets of a file"""
    ragged: frozenset[str] = frozenset()
    """fields whose samples are concatenated along dim 0, and may differ in length"""
    batch: type[Any]
    """named tuple of the fields, if samples of one shape are stacked"""
    variants: Mapping[str, Sequence[str]] = {}
    """our implementation with other settings, by name, as key=value overrides"""
    peers: Mapping[str, Peer] = {}
    unit: str = "samples"
    """unit of its samples, in the plural"""
    compile_scope: Literal["whole", "blocks"] = "whole"
    """step.compile if the settings do not set it"""
    slow_compile: bool = False
    """whether torch.compile takes minutes on a CPU; it is then measured there only if the settings enable it"""
    counts: Callable[[Any], Tensor] | None = None
    """denominators of a loss that is several means (``Step``)"""

    @cached_property
    def gpu_cases(self) -> Sequence[Case]:
        """The cases of ``hpcai bench gpu``, from published.toml beside the subclass; each may name one of its ``rates``."""
        content = read_published(self)
        rates = {name: PublishedRate(**rate) for name, rate in content.get("rates", {}).items()}
        return [Case(**case | {"published": rates.get(case.get("published", ""))}) for case in content.get("gpu_cases", ())]

    @cached_property
    def tiny(self) -> Sequence[str]:
        """The key=value overrides with which a published configuration takes seconds on one core, from published.toml as well."""
        return tuple(read_published(self).get("tiny", ()))

    def load(self, overrides: Sequence[str], path: str | Path | None = None) -> Any:
        """Return the settings of a run whose benchmark takes minutes, with a YAML file and key=value overrides of the user."""
        return config.load(self.settings, path, overrides, self.defaults(torch.cuda.is_available()))

    def defaults(self, on_gpu: bool) -> Sequence[str]:
        """Return key=value texts in place of defaults of ``settings``, from published.toml."""
        return tuple(self._sizes(on_gpu).get("defaults", ()))

    def default_overrides(self, on_gpu: bool) -> Sequence[Sequence[str]]:
        """Return the settings measured by default, as sets of key=value overrides, from published.toml."""
        return tuple(self._sizes(on_gpu).get("measured", [()]))

    def _sizes(self, on_gpu: bool) -> Any:
        return read_published(self).get("gpu" if on_gpu else "cpu", {})

    def build(self, cfg: Any, mesh: Mesh, enabled: Enabled) -> nn.Module:
        """Return the network on the mesh with the given switches enabled; without any, the plain implementation."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        raise NotImplementedError

    def metric(self, model: Any, batch: Any) -> dict[str, Any]:
        raise NotImplementedError

    def random_sample(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        """Return a sample in the layout of the files: an array for each field."""
        raise NotImplementedError

    def loader(self, cfg: Any, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        """Return our Loader over the samples in ``cfg.data.directory``: by default those of ``random_sample``, as they are."""
        sample = self.random_sample(cfg, np.random.default_rng(0))
        fields: Any = {name: (str(value.dtype), value.shape) for name, value in zip(self.fields, sample)}
        source = _Written(open_split(cfg.data.directory / split, fields, "", cfg.data, mesh))
        source.batch = self.batch
        return make_loader(source, cfg.data.batch, cfg.data, mesh, **kwargs)

    def collate(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        return self.batch(*(torch.from_numpy(np.stack(column)) for column in zip(*samples)))

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        return []

    def complete_settings(self, cfg: Any) -> Any:
        """Return the settings with the values that a data set would determine."""
        return cfg

    def duplicate_replicas(self, cfg: Any) -> int:
        """Return the number of neighbouring replicas that get the same samples when loss and gradient are compared."""
        return 1

    def context(self, enabled: Enabled) -> AbstractContextManager[Any]:
        """Return the context manager of forward and backward pass with the given switches enabled."""
        return nullcontext()

    def implementations(self, cfg: Any, batch: Any, mesh: Mesh) -> dict[str, Callable[[], Implementation]]:
        """Return functions that build the plain implementations, by name."""
        none: Enabled = frozenset()
        return {"plain": lambda: Implementation(self.build(cfg, mesh, none), self.loss, lambda: self.context(none))}

    def dataset_names(self, cfg: Any) -> Sequence[str]:
        """Return ``fields``; a subclass may derive them from the settings."""
        return self.fields

    # ---- derived

    def available_switches(self, cfg: Any, mesh: Mesh) -> Enabled:
        return frozenset(switch.name for switch in self.switches(cfg, mesh) if switch.why_not is None)

    def build_step(self, cfg: Any, mesh: Mesh) -> Step:
        """Return our training step, with all available switches of the network enabled."""
        torch.manual_seed(cfg.train.seed)
        model = self.build(cfg, mesh, self.available_switches(cfg, mesh)).train()
        return Step(model, self.loss, cfg.step, mesh, counts=self.counts)

    def all_switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        switches = [*self.switches(cfg, mesh), *loop_switches(cfg, mesh, self.compile_scope)]
        if not self.slow_compile or mesh.device.type == "cuda" or cfg.step.compile != "none":
            return switches
        reason = f"torch.compile takes minutes for each arrangement on a CPU; enable it with step.compile={self.compile_scope}"
        return [replace(switch, why_not=switch.why_not or reason) if switch.name == "compile" else switch for switch in switches]

    def sample_bytes(self, cfg: Any) -> int:
        return sum(values.nbytes for values in self.random_sample(cfg, np.random.default_rng(0)))

    def random_batch(self, cfg: Any, seeds: Sequence[Any], device: torch.device) -> Any:
        samples = [self.random_sample(cfg, np.random.default_rng(seed)) for seed in seeds]
        return tree_map(self.collate(cfg, samples), lambda tensor: tensor.to(device))

    @contextmanager
    def training(self, cfg: Any, mesh: Mesh, enabled: Enabled) -> Iterator["Training"]:
        cfg = self.write_files(self.complete_settings(cfg), _EVALUATION_BATCHES * cfg.data.batch)
        with ExitStack() as exit_stack:
            yield Training(self, cfg, mesh, enabled, exit_stack)

    def write_files(self, cfg: Any, rows: int, splits: Sequence[str] = ("train", "validation")) -> Any:
        """Write random samples for each split to a temporary folder, in the layout of data_prep, and return the settings with this
        folder. The result is cached."""
        key = type(self), cfg.model_dump_json(), rows, tuple(splits)
        if key not in _SAMPLE_FOLDERS:
            folder = _SAMPLE_FOLDERS[key] = Path(tempfile.mkdtemp(dir=_TEMPORARY.name))
            for split in splits:
                (folder / split).mkdir()
                with h5py.File(folder / split / _FILE, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
                    for i in range(rows):
                        for name, sample in zip(self.dataset_names(cfg), self.random_sample(cfg, np.random.default_rng(i))):
                            part = sample if name in self.ragged else sample[None]
                            dataset = file.require_dataset(name, (rows * len(part), *part.shape[1:]), part.dtype)
                            dataset[i * len(part) : (i + 1) * len(part)] = part
        changes = {"directory": _SAMPLE_FOLDERS[key], "stage": None, "shards": 1}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update=changes)})


def read_published(declaration: object) -> dict[str, Any]:
    """Return the content of published.toml beside the class of ``declaration``; empty without one."""
    path = Path(inspect.getfile(type(declaration))).with_name("published.toml")
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find_workload(name: str) -> Workload:
    """Return the benchmarks that the app declares. Raises ConfigError, which lists the apps that declare any."""
    return apps.require_module(name, "benchmarks").Benchmark()


def loop_switches(cfg: Any, mesh: Mesh, compile_scope: str) -> list[Switch]:
    """Return the switches of step, loop and evaluation, which every app has."""
    kind, optimizer = mesh.device.type, cfg.step.optimizer
    enabled = enabled_settings(cfg.step, mesh, compile_scope)
    slow = f"this {kind} does not compute in bfloat16 at full speed" if enabled["precision"] == "fp32" else None
    no_gpu = f"there is no GPU: this process computes on {kind}" if kind == "cpu" else None
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    no_compiler = None if compiler else "there is no C++ compiler, which torch.compile needs here"
    unknown = None if optimizer in TORCH_OPTIMIZERS else f"torch has no {optimizer} for comparison"
    alone = "a single replica: there is nothing to shard the optimizer over" if mesh["replicate"].size == 1 else None
    return [
        Switch("precision", f"step.precision={enabled['precision']}", slow),
        Switch("compile", f"step.compile={enabled['compile']}", triton_support.MISSING if kind == "cuda" else no_compiler),
        Switch("fused optimizer", f"{optimizer} fused over each flat parameter, not one operation at a time", unknown),
        Switch("capture", "step.capture: the step as a CUDA graph (without fused optimizer: all but the update)", no_gpu),
        Switch("sharded optimizer", "step.shard=optimizer (with fused optimizer only)", alone),
        Switch("garbage collection", f"train.collect_every={cfg.train.collect_every}, not at Python's own times"),
        Switch("async evaluation", "train.evaluate=background, not wait"),
    ]


def enabled_settings(cfg: StepConfig, mesh: Mesh, compile_scope: str) -> dict[str, str]:
    """Return precision and compile scope when enabled: those of the settings, or the best available ones."""
    precision = cfg.precision if cfg.precision.startswith("bf16") else "bf16" if has_fast_bf16(mesh.device) else "fp32"
    return {"precision": precision, "compile": compile_scope if cfg.compile == "none" else cfg.compile}


def swap_classes(model: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Change the class of modules in place, by exact type: weights and their names are unchanged."""
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]


def plain_form(model: Any, enabled: Enabled, kernels: Mapping[Any, Any], contiguous: Mapping[Any, Any]) -> nn.Module:
    """Swap the classes of ``model`` for each of the switches kernels and channels-last that is not enabled, and return it."""
    if "kernels" not in enabled:
        swap_classes(model, kernels)
    if "channels-last" not in enabled:
        swap_classes(model.to(memory_format=torch.contiguous_format), contiguous)
    return model


class _Written(Samples):
    batch: Callable[..., Any]

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Any:
        return self.batch(**values)


class ReferenceBatchNorm(BatchNorm):
    """Torch's batch norm, then the sum and the rectifier, in place of ``BatchNorm``."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = nn.BatchNorm2d.forward(self, x)
        if residual is not None:
            y += residual
        return F.relu(y, inplace=True) if self.relu else y


def torch_optimizer(model: nn.Module, cfg: StepConfig, decays: AbstractSet[str]) -> torch.optim.Optimizer:
    """Return torch's unfused optimizer; the parameters named in ``decays`` have weight decay."""
    kwargs: Row = {"betas": cfg.betas, "eps": cfg.eps}
    if cfg.optimizer == "sgd":
        kwargs = {"momentum": cfg.momentum, "nesterov": cfg.nesterov}
    elif cfg.optimizer == "adagrad":
        kwargs.pop("betas")
    groups = [{"params": [p], "weight_decay": cfg.weight_decay * (name in decays)} for name, p in model.named_parameters()]
    return TORCH_OPTIMIZERS[cfg.optimizer](groups, lr=cfg.lr, foreach=False, fused=False, **kwargs)


class Training:
    """A training of an app's network with the switches ``enabled``, on random samples in files that the page cache holds.

    All trainings start from the same weights. An evaluation starts within each run and ends with it, so that all of it is timed.
    """

    def __init__(self, workload: Workload, cfg: Any, mesh: Mesh, enabled: Enabled, exit_stack: ExitStack) -> None:
        self.workload, self.cfg, self.mesh, self.samples = workload, cfg, mesh, cfg.data.batch
        self.enabled, self.exit_stack = enabled, exit_stack
        self.collector = ManualGC(cfg.train.collect_every if "garbage collection" in enabled else None)
        torch.manual_seed(cfg.train.seed)
        model = workload.build(cfg, mesh, enabled)
        fused = "fused optimizer" in enabled or cfg.step.optimizer not in TORCH_OPTIMIZERS
        shard = "optimizer" if fused and "sharded optimizer" in enabled else "none"
        changes = {"shard": shard, "shard_within": None, "compile_cache": None, "precision": "fp32", "compile": "none"}
        settings = enabled_settings(cfg.step, mesh, workload.compile_scope)
        changes |= {name: value for name, value in settings.items() if name in enabled}
        changes["capture"] = "none" if "capture" not in enabled else "whole" if fused else "forward"
        torch._dynamo.config.recompile_limit = 64  # versions of one forward, over all arrangements
        step_class = Step if fused else TorchOptimizerStep
        self.step = step_class(model, workload.loss, cfg.step.model_copy(update=changes), mesh, counts=workload.counts)
        self.step.model.train()
        validation = self._loader("validation", _EVALUATION_BATCHES)
        mode: Any = "background" if "async evaluation" in enabled else "wait"
        self.scores: Any = choose_evaluation(self.step, workload.metric, validation, mode)
        self.train_loader, self.epoch = cast(Any, None), 0

    def loss_and_gradient(self) -> tuple[float, Tensor]:
        """Return loss and flat float32 gradient [parameters], on the CPU, of one batch at the initial weights, before any update.

        The batch is the same for any number of replicas, and dropout is disabled, since its masks would differ between processes.
        """
        replicas, step = self.mesh["replicate"], self.step
        per_replica = self.samples // replicas.size
        first = replicas.rank // self.workload.duplicate_replicas(self.cfg) * per_replica
        dropouts = [module for module in step.model.modules() if type(module).__name__.endswith("Dropout")]
        for module in dropouts:
            module.eval()
        with self.workload.context(self.enabled):
            values: Any = step._gradients(self.workload.random_batch(self.cfg, range(first, first + per_replica), self.mesh.device))
        for module in dropouts:
            module.train()
        gradients = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
        for bucket in step.reducer.buckets:  # an update may scale gradients in place
            if hasattr(bucket, "gradient_shard"):  # each rank has a shard of the sum
                all_gather(bucket.gradients, bucket.gradient_shard, replicas).wait()
            gradients |= {part.name: part.full(bucket.gradients) for part in bucket.flat_views}
        loss = all_reduce_(values["loss"].detach().clone(), replicas) / replicas.size
        return loss.item(), torch.cat([gradients[name].detach().float().reshape(-1).cpu() for name in sorted(gradients)])

    @contextmanager
    def context(self) -> Iterator[None]:
        """Context manager of each ``run``, outside the timing, such as the garbage collection policy."""
        with self.collector, self.workload.context(self.enabled):
            yield

    def run(self, steps: int) -> None:
        """Run ``steps`` complete steps: samples from files, update, and an evaluation that has ended on return."""
        if self.train_loader is None:
            self.train_loader = self._loader("train", steps)
            for batch in self.train_loader.epoch(0):  # compile and capture before an evaluation runs concurrently
                self.step(batch)
        with closing(self.train_loader.epoch(self.epoch)) as batches:
            for index, batch in enumerate(batches):
                if index == steps // 2:
                    self.scores.start({"step": self.step.count})
                self.step(batch)
                self.collector.collect_at(self.step.count)
        self.scores.results(wait=True)
        self.epoch += 1

    def _loader(self, split: str, count: int) -> Any:
        cfg, batch = self.cfg, self.samples
        endless = {"sampler": Endless(_EVALUATION_BATCHES * batch, count * batch), "accumulate": cfg.step.accumulate}
        kwargs: Any = endless if split == "train" else {"shuffle": False, "last_batch": "keep"}
        return self.exit_stack.enter_context(self.workload.loader(cfg, self.mesh, split, name=split, **kwargs))


class TorchOptimizerStep(Step):
    """A step whose update is torch's unfused optimizer, without the guard against non-finite values and without norms."""

    def __init__(self, model: nn.Module, function: Any, cfg: Any, mesh: Mesh, **kwargs: Any) -> None:
        super().__init__(model, function, cfg, mesh, **kwargs)
        for state in self.optimizer.states:
            state.moments.clear()
        self.torch_optimizer = torch_optimizer(model, cfg, match_names(model, cfg))

    def __call__(self, batch: Any, lr: float | None = None) -> dict[str, Any]:
        for group in self.torch_optimizer.param_groups:
            group["lr"] = self.cfg.lr if lr is None else lr
        return super().__call__(batch, lr)

    @torch.no_grad()
    def _update(self, values: Any) -> None:
        if self.cfg.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.torch_optimizer.step()
        for part in self.self_updating:
            part.update_(self.optimizer.lr, None, torch.zeros_like(self.optimizer.lr))
        averages: Any = self.optimizer.averages()  # none without step.average
        for name, parameter in self.model.named_parameters() if averages else ():
            averages[name].lerp_(parameter, self.optimizer.take.to(parameter.dtype))
