"""What an app declares of itself to be planned: ``apps/<name>/plan.py`` has a class ``Plan``, a ``Workload``."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from hpcai.cli import apps
from hpcai.cli.benchmarks import Workload
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated between two stretches of training."""

    samples: int
    cost: float
    """one of them, in steps of one training sample"""
    every: float = 0.0
    """samples that are trained on in between"""
    steps: int = 0
    """steps in between, in place of ``every``"""
    start: float = 0.0
    """samples that are trained on before it is worth while"""

    def count(self, samples: float, batch: int) -> float:
        """How often it happens in a training on ``samples``."""
        every = self.every or self.steps * batch
        return max(samples - self.start, every) / every


@dataclass(frozen=True)
class Published:
    """What somebody has published of a run, to be planned and compared: ``value`` seconds of a ``step`` or minutes of a ``run``."""

    kind: Literal["step", "run"]
    value: float
    machine: str
    gpus: int
    """that train"""
    batch: int
    ways: int = 1
    evaluating: int = 0
    """GPUs that only evaluate"""
    overrides: Sequence[str] = ()
    """key=value words: precision, and what else its settings differ in"""
    publisher: str = "NVIDIA"


class PlannedTraining:
    """A training to be planned. A subclass has what is declared without a value.

    ``published[0]`` is a step on GPUs that hold a sample each and are not cut, or nearly: how much slower it was than the machine's
    rates allow is what the others are planned with.
    """

    workload: Workload
    yaml: str
    """file in apps/<name>/configs"""
    split_axis: str | None = None
    """axis of the mesh over which one sample is cut, in several ways; along others as the settings say (mesh.pipeline)"""
    step_variants: Mapping[Sequence[str], float] = {(): 1.0}
    """key=value words of the kinds of step, and how much each weighs in the mean step"""
    memory_savings: Sequence[Sequence[str]] = ((),)
    """key=value words, the fastest first, that take ever less memory"""
    depth: str | None = None
    """setting of the number of repeated layers: a deep model is recorded with few of them, and each further one takes as much"""
    fixed_settings: Sequence[str] = ()
    """settings that a plan leaves as they are, though others could be recorded more simply"""
    max_samples: int = 1
    """samples that a process takes at a time; more are micro-batches"""
    samples: Mapping[int, float]
    """samples until the target is reached, by global batch"""
    source: str
    """where ``samples`` come from"""
    evaluation: Evaluation
    preparation_seconds: Callable[[np.random.Generator, Any], np.ndarray] | None = None
    """(random, shape) -> seconds that a worker needs for samples; None: next to nothing"""
    workers: int = 8
    published: Sequence[Published]

    def build(self, cfg: Any, mesh: Mesh) -> nn.Module:
        return self.workload.build(cfg, mesh, self.workload.available_switches(cfg, mesh))

    def pipeline(self, cfg: Any, model: nn.Module, mesh: Mesh) -> Pipeline | None:
        """The stages of ``model``, where the mesh has the axis pipeline."""
        return None

    def stage_count(self, cfg: Any) -> int:
        """How many these are in all."""
        return int(getattr(cfg.mesh, "pipeline", 1))

    def read_settings(self, cfg: Any) -> None:
        """Take over what the settings say of ``samples``, ``source`` and ``evaluation``, where they are of another training."""

    def random_batch(self, cfg: Any, mesh: Mesh, count: int) -> Any:
        """Tensors as this process gets them for ``count`` samples; their numbers do not count."""
        return self.workload.random_batch(cfg, range(count), mesh.device)

    def samples_needed(self, batch: int) -> float:
        """Samples to the target, on the line between the batches that are known, in logarithms. Raises ConfigError outside."""
        low, high = min(self.samples), max(self.samples)
        if not low <= batch <= high:
            raise ConfigError(f"a batch of {batch} is not among {low} to {high}, the known ones ({self.source}); take one of these")
        known = sorted(self.samples)
        return math.exp(np.interp(math.log(batch), np.log(known), [math.log(self.samples[b]) for b in known]))


def find_training(name: str) -> PlannedTraining:
    """What the app declares to be planned. Raises ConfigError, which lists the apps that declare it."""
    workload: PlannedTraining = apps.require_module(name, "plan").Plan()
    return workload
