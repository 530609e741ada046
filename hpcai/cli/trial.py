"""What an app declares of itself to be measured, and a training of its network on random samples with some switches on.

``apps/<name>/trial.py`` has a class ``Trial``, a ``Subject``: ``hpcai bench`` compares the app's step with its plain form, and
``hpcai ablate`` measures what each switch brings; ``hpcai bench gpu`` measures the published steps that the app lists. The plain
form is what one would write first: float32, torch's layers one after the other, torch's optimizer operation by operation, and
training waits for its evaluation.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from hpcai.cli import apps
from hpcai.data import Endless
from hpcai.data.collate import tree_map
from hpcai.dist import Mesh
from hpcai.dist.collect import gather_shares, sum_in_place
from hpcai.dist.host import Collector
from hpcai.kernels import triton_support
from hpcai.settings import RunConfig, StepConfig
from hpcai.train.choices import fast_bf16
from hpcai.train.evaluation import scoring
from hpcai.train.optim import decayed
from hpcai.train.step import Step

On = frozenset[str]
Row = dict[str, Any]
TORCH: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_EVALUATED = 2  # batches of an evaluation
_FILE = "samples.h5"


@dataclass(frozen=True)
class Switch:
    """One optimisation: ``what`` it is in a line, and why it cannot be had here (``why_not``), if so."""

    name: str
    what: str
    why_not: str | None = None


class Form(NamedTuple):
    """A network to be trained by torch alone; ``around`` is entered for forward and backward."""

    model: nn.Module
    loss: Callable[[Any, Any], dict[str, Any]]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Peer(NamedTuple):
    """The same network in a public package, which is measured where that is installed."""

    package: str
    form: Callable[[Any, Any], Form]
    """(cfg, batch on the device) -> the network and its loss on that batch"""


class Figure(NamedTuple):
    """What somebody has published of the same training step, for each of the GPUs of a job."""

    per_s: float
    """samples per second and GPU"""
    gpu: str
    conditions: str
    """GPUs of the job, samples of each, and what else differs from one GPU alone"""
    source: str


@dataclass(frozen=True)
class Case:
    """A training step at a published configuration, for ``hpcai bench gpu``: a YAML file of the app, and what one GPU changes."""

    name: str
    yaml: str
    """file in apps/<name>/configs"""
    words: Sequence[str] = ()
    """key=value words, such as data.batch, the samples of one GPU"""
    turns: Sequence[Sequence[str]] = ((),)
    """key=value words in which one batch differs from the next; they take turns"""
    figure: Figure | None = None
    asked: float | None = None
    """samples per second that we ask of one H200"""
    always: Sequence[str] = ()
    """key=value words that all variants begin with, such as a precision without which the model does not fit"""


class Subject:
    """What an app gives to be measured. ``cfg`` are its settings; a subclass has at least what is declared without a value."""

    settings: type[RunConfig]
    """a run of a size that is measured in minutes"""
    fields: Sequence[str]
    """datasets of a file"""
    flat: frozenset[str] = frozenset()
    """fields whose samples lie one after another along their first dim"""
    batch: type[Any]
    """named tuple of the fields, where samples of one shape are stacked"""
    variants: Mapping[str, Sequence[str]] = {}
    """forms of ours that other settings give, by name, as key=value words"""
    peers: Mapping[str, Peer] = {}
    gpu: Sequence[Case] = ()
    """what ``hpcai bench gpu`` measures"""
    unit: str = "samples"
    """what its samples are, in the plural"""
    published: type[RunConfig]
    """what the YAML files of the app complete, with what its random samples need to know"""
    tiny: Sequence[str] = ()
    """key=value words that make a published configuration a matter of seconds on one core"""
    compiled: Literal["whole", "blocks"] = "whole"
    """what is compiled where the settings do not say"""
    compiles_long: bool = False
    """whether torch.compile takes minutes on a CPU, where it is then measured only if the settings ask for it"""
    counted: Callable[[Any], Tensor] | None = None
    """what several means of the loss divide by (``Step``)"""

    def build(self, cfg: Any, mesh: Mesh, on: On) -> nn.Module:
        """The network over the mesh, with those of its own switches that are on; with none it is the plain form."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        raise NotImplementedError

    def metric(self, model: Any, batch: Any) -> dict[str, Any]:
        raise NotImplementedError

    def random(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        """A sample as the files have it: an array for each field."""
        raise NotImplementedError

    def loader(self, cfg: Any, mesh: Mesh, split: str, **words: Any) -> Any:
        """Our Loader over the samples in ``cfg.data.directory``."""
        raise NotImplementedError

    def together(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        """A batch of CPU tensors."""
        return self.batch(*(torch.from_numpy(np.stack(column)) for column in zip(*samples)))

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        """The switches of the network."""
        return []

    def known(self, cfg: Any) -> Any:
        """The settings as data would complete them."""
        return cfg

    def alike(self, cfg: Any) -> int:
        """Neighbouring copies whose samples are the same where loss and gradient are compared."""
        return 1

    def around(self, on: On) -> AbstractContextManager[Any]:
        """What is entered for forward and backward with the switches ``on``."""
        return nullcontext()

    def cases(self, on_gpu: bool) -> Sequence[Sequence[str]]:
        """Settings that are measured by default, as key=value words."""
        return [()]

    def forms(self, cfg: Any, batch: Any, mesh: Mesh) -> dict[str, Callable[[], Form]]:
        """Plain forms by name, made when they are called."""
        none: On = frozenset()
        return {"plain": lambda: Form(self.build(cfg, mesh, none), self.loss, lambda: self.around(none))}

    def datasets(self, cfg: Any) -> Sequence[str]:
        """``fields``, where they differ with the settings."""
        return self.fields

    # ---- what follows from it

    def whole(self, cfg: Any, mesh: Mesh) -> On:
        """All switches of the network that can be had here."""
        return frozenset(switch.name for switch in self.switches(cfg, mesh) if switch.why_not is None)

    def every_switch(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        every = [*self.switches(cfg, mesh), *of_the_loop(cfg, mesh, self.compiled)]
        if not self.compiles_long or mesh.device.type == "cuda" or cfg.step.compile != "none":
            return every
        minutes = f"torch.compile takes minutes for each arrangement on a CPU; ask for it with step.compile={self.compiled}"
        return [replace(one, why_not=one.why_not or minutes) if one.name == "compile" else one for one in every]

    def sample_bytes(self, cfg: Any) -> int:
        return sum(values.nbytes for values in self.random(cfg, np.random.default_rng(0)))

    def random_batch(self, cfg: Any, seeds: Sequence[Any], device: torch.device) -> Any:
        samples = [self.random(cfg, np.random.default_rng(seed)) for seed in seeds]
        return tree_map(self.together(cfg, samples), lambda tensor: tensor.to(device))

    @contextmanager
    def trial(self, cfg: Any, mesh: Mesh, on: On) -> Iterator["Training"]:
        cfg = self.in_files(self.known(cfg), _EVALUATED * cfg.data.batch)
        with ExitStack() as held:
            yield Training(self, cfg, mesh, on, held)

    def in_files(self, cfg: Any, rows: int, splits: Sequence[str] = ("train", "validation")) -> Any:
        """The settings with a folder of their own, where each split has so many random samples."""
        words = {"directory": _files(self, cfg, rows, splits), "stage": None, "shards": 1}
        return cfg.model_copy(update={"data": cfg.data.model_copy(update=words)})


def find(name: str) -> Subject:
    """What the app declares to be measured. Raises ConfigError, which lists the apps that declare it."""
    subject: Subject = apps.declared(name, "trial").Trial()
    return subject


def of_the_loop(cfg: Any, mesh: Mesh, compiled: str) -> list[Switch]:
    """The switches of step, loop and evaluation, which every app has."""
    kind, optimizer = mesh.device.type, cfg.step.optimizer
    asked = when_on(cfg.step, mesh, compiled)
    slow = f"this {kind} does not compute in bfloat16 at full speed" if asked["precision"] == "fp32" else None
    no_gpu = f"there is no GPU: this process computes on {kind}" if kind == "cpu" else None
    unknown = None if optimizer in TORCH else f"torch has no {optimizer} to compare with"
    alone = "one copy of the model: the optimizer is divided among copies" if mesh["replicate"].size == 1 else None
    return [
        Switch("precision", f"step.precision={asked['precision']}", slow),
        Switch("compile", f"step.compile={asked['compile']}", _cannot_compile(kind)),
        Switch("fused optimizer", f"{optimizer} in one pass over each row, not operation by operation", unknown),
        Switch("capture", "step.capture: the step as a CUDA graph (without fused optimizer, all but the update)", no_gpu),
        Switch("sharded optimizer", "step.shard=optimizer (with fused optimizer only)", alone),
        Switch("garbage collection", f"train.collect_every={cfg.train.collect_every}, not when Python likes"),
        Switch("async evaluation", "train.evaluate=background, not wait"),
    ]


def when_on(cfg: StepConfig, mesh: Mesh, compiled: str) -> dict[str, str]:
    """Precision and compilation when they are on: as the settings have it, or otherwise the best there is."""
    narrow = cfg.precision if cfg.precision.startswith("bf16") else "bf16" if fast_bf16(mesh.device) else "fp32"
    return {"precision": narrow, "compile": compiled if cfg.compile == "none" else cfg.compile}


def _cannot_compile(kind: str) -> str | None:
    if kind == "cuda":
        return triton_support.MISSING
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    return None if found else "there is no C++ compiler, which torch.compile needs here"


def exchange(model: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Modules of just these classes become modules of those, in place: weights and their names stay."""
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]


def torch_optimizer(model: nn.Module, cfg: StepConfig, decays: AbstractSet[str]) -> torch.optim.Optimizer:
    """torch's own, one operation after the other; the parameters named in ``decays`` decay."""
    words: Row = {"betas": cfg.betas, "eps": cfg.eps}
    if cfg.optimizer == "sgd":
        words = {"momentum": cfg.momentum, "nesterov": cfg.nesterov}
    groups = [{"params": [p], "weight_decay": cfg.weight_decay * (name in decays)} for name, p in model.named_parameters()]
    made: torch.optim.Optimizer = TORCH[cfg.optimizer](groups, lr=cfg.lr, foreach=False, fused=False, **words)
    return made


class Training:
    """A training with the switches ``on``, of an app's network and random samples, in files that the page cache holds.

    All trainings begin with the same weights. An evaluation begins in the middle of each run and ends with it: what it does in the
    background is counted too.
    """

    def __init__(self, app: Subject, cfg: Any, mesh: Mesh, on: On, held: ExitStack) -> None:
        self.app, self.cfg, self.mesh, self.on, self.held, self.samples = app, cfg, mesh, on, held, cfg.data.batch
        self.collector = Collector(cfg.train.collect_every if "garbage collection" in on else None)
        self.step = _step(app, cfg, mesh, on)
        self.step.model.train()
        validation = self._batches("validation", _EVALUATED)
        self.scores: Any = scoring(self.step, app.metric, validation, "background" if "async evaluation" in on else "wait")
        self.training, self.runs = cast(Any, None), 0

    def numerics(self) -> tuple[float, Tensor]:
        """Loss and flat float32 gradient [parameters], on the CPU, of one batch at the first weights; called before any update.

        The batch is the same over any number of copies, and nothing is dropped: processes would drop each something else.
        """
        copies, step = self.mesh["replicate"], self.step
        own = self.samples // copies.size
        first = copies.rank // self.app.alike(self.cfg) * own
        drops = [module for module in step.model.modules() if type(module).__name__.endswith("Dropout")]
        for module in drops:
            module.eval()
        with self.app.around(self.on):
            values: Any = step._gradients(self.app.random_batch(self.cfg, range(first, first + own), self.mesh.device))
        for module in drops:
            module.train()
        found = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
        for bucket in step.sums.buckets:  # an update may scale gradients where they lie
            if hasattr(bucket, "own"):  # of the sum each process has its share
                gather_shares(bucket.flat, bucket.own, copies).wait()
            found |= {part.name: part.whole(bucket.flat) for part in bucket.parts}
        loss = sum_in_place(values["loss"].detach().clone(), copies) / copies.size
        return loss.item(), torch.cat([found[name].detach().float().reshape(-1).cpu() for name in sorted(found)])

    @contextmanager
    def around(self) -> Iterator[None]:
        """What a training enters once, such as a policy of garbage collection: entered around each ``run``, and not timed."""
        with self.collector, self.app.around(self.on):
            yield

    def run(self, steps: int) -> None:
        """So many steps of the real thing: samples from files, update, and an evaluation that has ended when this returns."""
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
        endless = {"sampler": Endless(_EVALUATED * batch, count * batch), "accumulate": cfg.step.accumulate}
        words: Any = endless if split == "train" else {"shuffle": False, "last_batch": "keep"}
        return self.held.enter_context(self.app.loader(cfg, self.mesh, split, name=split, **words))


def _step(app: Subject, cfg: Any, mesh: Mesh, on: On) -> Step:
    torch.manual_seed(cfg.train.seed)
    model = app.build(cfg, mesh, on)
    fused = "fused optimizer" in on or cfg.step.optimizer not in TORCH
    shard = "optimizer" if fused and "sharded optimizer" in on else "none"
    changes = {"shard": shard, "shard_within": None, "compile_cache": None, "precision": "fp32", "compile": "none"}
    changes |= {name: value for name, value in when_on(cfg.step, mesh, app.compiled).items() if name in on}
    torch._dynamo.config.recompile_limit = 64  # of the versions of one forward, over all arrangements
    changes["capture"] = "none" if "capture" not in on else "whole" if fused else "forward"
    kind = Step if fused else ByTorch
    return kind(model, app.loss, cfg.step.model_copy(update=changes), mesh, counts=app.counted)


class ByTorch(Step):
    """A step whose update is torch's optimizer, one operation after the other, with neither guard nor norm."""

    def __init__(self, model: nn.Module, function: Any, cfg: Any, mesh: Mesh, **words: Any) -> None:
        super().__init__(model, function, cfg, mesh, **words)
        for state in self.optimizer.states:
            state.moments.clear()
        self.by_torch = torch_optimizer(model, cfg, decayed(model, cfg))

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
            averages[name].lerp_(parameter, self.optimizer.take.to(parameter.dtype))


# ---- samples in files


_HOME = tempfile.TemporaryDirectory(prefix="hpcai-ablation-")  # deleted when the process ends
_MADE: dict[tuple[type[Subject], str, int, tuple[str, ...]], Path] = {}


def _files(app: Subject, cfg: Any, rows: int, splits: Sequence[str]) -> Path:
    """A folder with so many random samples for each split, in the layout of data_prep; made once."""
    key = type(app), cfg.model_dump_json(), rows, tuple(splits)
    if key in _MADE:
        return _MADE[key]
    folder = Path(tempfile.mkdtemp(dir=_HOME.name))
    for split in splits:
        (folder / split).mkdir()
        with h5py.File(folder / split / _FILE, "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            for i in range(rows):
                for name, sample in zip(app.datasets(cfg), app.random(cfg, np.random.default_rng(i))):
                    part = sample if name in app.flat else sample[None]
                    whole = file.require_dataset(name, (rows * len(part), *part.shape[1:]), part.dtype)
                    whole[i * len(part) : (i + 1) * len(part)] = part
    return _MADE.setdefault(key, folder)
