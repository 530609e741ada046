"""Declaration of a training to plan: ``apps/<name>/plan.py`` has a class ``Plan``, a ``PlannedTraining``."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from torch import nn

from hpcai.cli import apps
from hpcai.cli.benchmarks import Workload, read_published
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.parallel.pipeline import Pipeline
from hpcai.plan.machines import Machine


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is repeated during training."""

    samples: int
    cost: float
    """of one sample, in steps of one training sample"""
    every: float = 0.0
    """training samples between two evaluations"""
    steps: int = 0
    """steps between two evaluations, instead of ``every``"""
    start: float = 0.0
    """training samples before the first evaluation"""

    def count(self, samples: float, batch: int) -> float:
        """Return the number of evaluations in a training on ``samples``."""
        interval = self.every or self.steps * batch
        return max(samples - self.start, interval) / interval


@dataclass(frozen=True)
class Published:
    """A published result to compare predictions with: ``value`` is seconds of a ``step`` or minutes of a ``run``."""

    kind: Literal["step", "run"]
    value: float
    machine: str
    gpus: int
    """training GPUs"""
    batch: int
    ways: int = 1
    evaluating: int = 0
    """evaluation-only GPUs"""
    overrides: Sequence[str] = ()
    """key=value overrides: precision, and other differences from the settings"""
    publisher: str = "NVIDIA"


class PlannedTraining:
    """A training to plan. A subclass defines the attributes without a default.

    ``published[0]`` is a step on GPUs with one unsplit sample each, or nearly so: its slowdown relative to the machine's rates is
    applied to all predictions.
    """

    workload: Workload
    yaml: str
    """file in apps/<name>/configs"""
    split_axis: str | None = None
    """mesh axis along which one sample is split in a varying number of ways; the settings give the size of others
    (mesh.pipeline)"""
    step_variants: Mapping[Sequence[str], float] = {(): 1.0}
    """key=value overrides of the kinds of step, with their weights in the mean step"""
    memory_savings: Sequence[Sequence[str]] = ((),)
    """key=value overrides, fastest first, with decreasing memory"""
    depth: str | None = None
    """setting of the number of repeated layers: a deep model is recorded with few of them and extrapolated linearly"""
    recorded_layers: tuple[int, int] = (2, 4)
    """these numbers; at both, the memory peaks while all layers keep activations"""
    fixed_settings: Sequence[str] = ()
    """settings that a plan does not override, although others would be simpler to record"""
    max_samples: int = 1
    """maximum samples of a micro-batch on a process"""
    samples: Mapping[int, float]
    """samples to the target, by global batch size"""
    source: str
    """source of ``samples``"""
    evaluation: Evaluation
    preparation_seconds: Callable[[np.random.Generator, Any], np.ndarray] | None = None
    """(random, shape) -> seconds in which a worker prepares samples; None: negligible"""
    workers: int = 8

    @cached_property
    def published(self) -> Sequence[Published]:
        """The entries of published.toml beside the subclass. A step may have ``samples_per_s`` in place of ``value``."""
        entries = read_published(self)["published"]
        return [Published(**{"value": e["batch"] / e.pop("samples_per_s")} if "samples_per_s" in e else {}, **e) for e in entries]

    def build(self, cfg: Any, mesh: Mesh) -> nn.Module:
        return self.workload.build(cfg, mesh, self.workload.available_switches(cfg, mesh))

    def pipeline(self, cfg: Any, model: nn.Module, mesh: Mesh) -> Pipeline | None:
        """Return the pipeline of ``model``, if the mesh has the axis pipeline."""
        return None

    def stage_count(self, cfg: Any) -> int:
        """Return the total number of pipeline stages."""
        return int(getattr(cfg.mesh, "pipeline", 1))

    def layer_kinds(self, cfg: Any) -> Sequence[tuple[Sequence[str], Collection[int]]]:
        """Return the kinds of the repeated layers: overrides with which all layers are of it, and which of them are of it."""
        return [((), range(attrgetter(str(self.depth))(cfg)))]

    def meshes(self, cfg: Any, gpus: int, machine: Machine) -> Iterator[dict[str, int]]:
        """Yield the sizes of the axes of the meshes that a search compares."""
        raise ConfigError("this app has no meshes to search; set them by --ways and key=value words, without --search")

    def estimate(self, cfg: Any, gpus: int, machine: Machine) -> tuple[float, float]:
        """Return rough seconds of a step and bytes of memory, which decide in a search what is recorded first, and what is not."""
        return 0.0, 0.0

    def read_settings(self, cfg: Any) -> None:
        """Derive ``samples``, ``source`` and ``evaluation`` from the settings, if they describe another training."""

    def random_batch(self, cfg: Any, mesh: Mesh, count: int) -> Any:
        """Return this process's tensors for ``count`` samples; their values do not matter."""
        return self.workload.random_batch(cfg, range(count), mesh.device)

    def samples_needed(self, batch: int) -> float:
        """Return the samples to the target, interpolated between known batch sizes in log-log scale. Raises ConfigError outside."""
        low, high = min(self.samples), max(self.samples)
        if not low <= batch <= high:
            raise ConfigError(f"a batch of {batch} is not among {low} to {high}, the known ones ({self.source}); take one of these")
        sizes = sorted(self.samples)
        return math.exp(np.interp(math.log(batch), np.log(sizes), [math.log(self.samples[b]) for b in sizes]))


def find_training(name: str) -> PlannedTraining:
    """Return the training that the app declares. Raises ConfigError, which lists the apps that declare one."""
    training: PlannedTraining = apps.require_module(name, "plan").Plan()
    return training
