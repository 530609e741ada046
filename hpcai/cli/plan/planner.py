"""Traces of an app's steps, and predictions of a step and of a whole training on a machine."""

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from hpcai import config
from hpcai.cli.plan.training import Published, find_training
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.nn.deferred_init import deferred
from hpcai.parallel import data_parallel
from hpcai.parallel.pipeline_stages import balanced_split
from hpcai.plan import machines
from hpcai.plan.cost import Cost, estimate_cost
from hpcai.plan.loader_queue import simulate_waits
from hpcai.plan.machines import Machine
from hpcai.plan.pipeline_schedule import Pass, SequentialStages, StageTrace, peak_memory, simulate_schedule
from hpcai.plan.step_trace import Communication, Event, StepTracer, Trace, traced_job
from hpcai.settings import AXES
from hpcai.train import Step

Overrides = Sequence[str]
_MARGIN = 0.8  # of the estimates of a search
_PATIENCE = 12  # meshes that are recorded in a search although none of them is among the fastest
_MIN_ESTIMATE = 0.9  # ratio of needed to estimated memory, at least
_USABLE_MEMORY = 0.92  # share of a GPU's memory for tensors; fragmentation, graphs and libraries take the rest
_LOADER_WARMUP, _LOADER_STEPS = 20, 100  # simulated steps of the loader; during warmup the queue fills
_MAX_REPLICAS = 8  # of the recorded job, if nothing is sharded over them: a collective of all is scaled to another job
# A sharded optimizer communicates as much as an all-reduce.
_BASE_OVERRIDES = (
    "step.capture=none", "step.compile=none", "step.compile_cache=null", "step.shard=none", "step.shard_within=null",
    "start.weights=null", "start.sha256=null",
)  # fmt: skip
# Their segment tables need values, which traced tensors lack; their moments are those of these optimizers.
_SAME_MOMENTS = {"lamb": "adamw", "lars": "sgd"}


class InfeasibleError(ConfigError):
    """A job that is not possible; the app itself can be planned."""


class Fit(NamedTuple):
    """The mean step of one process, its peak memory of tensors in bytes, and the overrides needed for it."""

    step: Cost
    peak: float
    held: float
    """bytes of tensors between steps"""
    memory_savings: Overrides = ()


class Recorded(NamedTuple):
    """A recorded step of one process; with pipeline stages, the part shared by all micro-batches, and the stages."""

    record: Trace
    stages: list[StageTrace]
    orders: list[list[Pass]]
    """order of passes of each rank along the axis pipeline"""


@dataclass(frozen=True)
class Job:
    """GPUs, the layout of the job on them, and the predictions."""

    gpus: int
    ways: int
    batch: int
    fit: Fit
    loader: float
    """seconds that a step waits for samples"""
    steps: float
    """to the target"""
    minutes: float
    evaluation: float
    """minutes in which training waits for evaluation"""
    mesh: Mapping[str, int]
    """sizes of its axes"""
    overrides: Overrides

    @property
    def seconds(self) -> float:
        return self.fit.step.seconds + self.loader


class Planner:
    """Predicts trainings of an app, with the settings ``overrides`` and ``yaml``. Steps are recorded once for each split."""

    def __init__(self, name: str, overrides: Overrides = (), yaml: str | Path | None = None) -> None:
        self.name, self.training, self.overrides = name, find_training(name), tuple(overrides)
        self._default_yaml = Path(inspect.getfile(type(self.training))).parent / "configs" / self.training.yaml
        self.yaml = yaml or self._default_yaml
        self.report: Callable[[str], object] = lambda text: None  # called before each step is traced, which takes seconds
        self._stage_output: Any = None  # what a stage sends
        self._recorded: dict[Any, list[tuple[float, Recorded]]] = {}
        self._settings: dict[Overrides, Any] = {}
        self.training.read_settings(self.settings())

    def settings(self, *overrides: str) -> Any:
        workload = self.training.workload
        if overrides not in self._settings:
            keys = {setting: setting.partition("=")[0] for setting in _BASE_OVERRIDES}
            schema, fixed = workload.settings, self.training.fixed_settings
            base = [setting for setting, key in keys.items() if _has_setting(schema, key) and key not in fixed]
            cfg = config.load(schema, self.yaml, [*self.overrides, *overrides, *base])
            self._settings[overrides] = workload.complete_settings(cfg)
        return self._settings[overrides]

    def fixed_axes(self, overrides: Overrides = ()) -> dict[str, int]:
        """Return the axes along which a sample is split as the settings say, with their sizes."""
        excluded = {"replicate", "expert", "evaluate", self.training.split_axis}
        return {name: size for name, size in self.settings(*overrides).mesh if name not in excluded and size > 1}

    def fixed_processes(self, overrides: Overrides = ()) -> int:
        """Return the number of processes along these axes."""
        return math.prod(self.fixed_axes(overrides).values())

    @property
    def ways(self) -> list[int]:
        """The default numbers of ways to split a sample along the axis ``split_axis``."""
        axis = self.training.split_axis
        return [1] if axis is None else [getattr(self.settings().mesh, axis)] if self.fixed_axes() else [1, 2, 4, 8]

    def record_steps(
        self, ways: int, replicas: int, per_replica: int, overrides: Overrides, stage_rank: int = 0, micro_batches: int = 1,
    ) -> list[tuple[float, Recorded]]:  # fmt: skip
        """Return the weights and recordings of the step variants, for one process of ``replicas``, each of ``ways`` processes and
        ``per_replica`` samples, at ``stage_rank`` along the axis pipeline, with ``micro_batches`` times as many samples."""
        key = ways, replicas, per_replica, tuple(overrides), stage_rank, micro_batches
        if key not in self._recorded:
            layout = f"{replicas} replicas over {ways} GPUs each, {per_replica} samples a replica"
            self.report(f"step {len(self._recorded) + 1}, traced once: {layout} {' '.join(overrides)}")
            self._recorded[key] = [(weight, self._record(*key, variant)) for variant, weight in self.training.step_variants.items()]
        return self._recorded[key]

    def _record(
        self, ways: int, replicas: int, per_replica: int, overrides: Overrides, stage_rank: int, micro_batches: int,
        variant: Overrides,
    ) -> Recorded:  # fmt: skip
        training, workload, axis = self.training, self.training.workload, self.training.split_axis
        if ways > 1 and axis is None:
            raise ConfigError(f"samples of {self.name} cannot be split in a plan; use one way")
        cfg = self.settings(f"data.batch={replicas * per_replica}", *overrides, *variant)
        optimizer = _SAME_MOMENTS.get(cfg.step.optimizer, cfg.step.optimizer)
        axes, processes = self.fixed_axes(overrides), ways * self.fixed_processes(overrides)
        world, rank = replicas * processes, stage_rank * processes // axes.get("pipeline", 1)
        without_broadcast = mock.patch.object(data_parallel, "broadcast_parameters", lambda *_: None)  # not of a step, and slow
        with traced_job(world, rank=rank) as paper, without_broadcast:
            sizes = {"replicate": replicas, "expert": getattr(cfg.mesh, "expert", 1), **axes, **({axis: ways} if axis else {})}
            mesh = Mesh(sizes, world, rank)
            with deferred(0):
                model = training.build(cfg, mesh)
                pipeline = training.pipeline(cfg, model, mesh)
            example = training.random_batch(cfg, mesh, per_replica)
            with paper.fake_tensors():
                settings = cfg.step.model_copy(update={"optimizer": optimizer, "accumulate": min(micro_batches, 2)})
                recorder: Any = SequentialStages(paper, pipeline, self._stage_output if stage_rank else None) if pipeline else None
                step = Step(paper.materialize(model), workload.loss, settings, mesh, counts=workload.counts, pipeline=recorder)
                step.cfg = step.cfg.model_copy(update={"accumulate": 1})  # with gradient buckets as for several
                directions = cfg.step.optimizer == "lamb" and [torch.zeros_like(state.weights) for state in step.optimizer.states]
                batch = paper.empty_like(example)
                sums: Any = step.reducer  # the reduction of gradients, and the work before and after it, is once per step
                for owner, name in (
                    (sums, "all_gather_parameters"), (sums, "zero_grad"), (sums, "reduce"),
                    *((bucket, "launch") for bucket in sums.buckets),
                ):  # fmt: skip
                    setattr(owner, name, paper.once_per_step(getattr(owner, name)))
                with paper.record() as record:
                    step.reducer.all_gather_parameters()
                    if recorder is not None:
                        step.reducer.wait()
                    step._gradients(batch)
                    paper.once_per_step(lambda: _record_update(paper, step))()
            del directions  # LAMB's additional buffer
            if recorder is None:
                return Recorded(record, [], [])
            self._stage_output = recorder.hidden
            try:
                return Recorded(record, recorder.stages, recorder.pipeline.order(micro_batches))
            except ConfigError as error:
                raise InfeasibleError(str(error)) from None

    def mean_step(self, ways: int, replicas: int, per_replica: int, machine: Machine, overrides: Overrides = ()) -> Fit:
        """Return the mean step of ``replicas``, whatever its memory."""
        if "pipeline" in self.fixed_axes(overrides):
            # The step of the rank that finishes last, and the peak memory of any rank.
            micro_batch = next(n for n in range(min(per_replica, self.training.max_samples), 0, -1) if per_replica % n == 0)
            args = ways, replicas, micro_batch, per_replica // micro_batch, machine
            variants = self.training.step_variants.items()
            return _mean([(weight, _PipelineStep(self, *args, (*overrides, *variant)).fit()) for variant, weight in variants])
        models, weights = self.shallow_models(overrides)
        fits = [self._mean_step(ways, replicas, per_replica, machine, (*overrides, *model)) for model in models]
        step = sum((weight * fit.step for weight, fit in zip(weights[0], fits)), Cost())
        peak, held = (sum(w * getattr(fit, name) for w, fit in zip(weights[0], fits)) for name in ("peak", "held"))
        return Fit(step, peak, held)

    def shallow_models(self, overrides: Overrides, stages: int = 1) -> tuple[list[Overrides], list[list[float]]]:
        """Return the overrides of the models to record in place of a deep one of ``stages``, and their weights in each stage: few
        and more layers of the first kind, and as few of each other kind."""
        cfg, depth, (few, more) = self.settings(*overrides), self.training.depth, self.training.recorded_layers
        layers = 0 if depth is None else attrgetter(depth)(cfg)
        if layers <= more * stages:
            return [()], [[1.0]] * stages
        (first, _), *others = self.training.layer_kinds(cfg)
        weights = []
        for begin, end in pairwise(accumulate(balanced_split(layers, stages), initial=0)):
            deeper, rest = (end - begin - few) / (more - few), [sum(begin <= n < end for n in own) / few for _, own in others]
            weights.append([1 - deeper - sum(rest), deeper, *rest])
        depths = [(first, few), (first, more), *((kind, few) for kind, _ in others)]
        return [(*kind, f"{depth}={n * stages}") for kind, n in depths], weights

    def _mean_step(self, ways: int, replicas: int, per_replica: int, machine: Machine, overrides: Overrides) -> Fit:
        micro_batch = next(n for n in range(min(per_replica, self.training.max_samples), 0, -1) if per_replica % n == 0)
        cfg, processes = self.settings(*overrides), ways * self.fixed_processes(overrides)
        all_alike = getattr(cfg.step, "shard", "none") == "none" and getattr(cfg.mesh, "expert", 1) == 1
        # Two micro-batches widen the gradient buckets, and change nothing else. All numbers of replicas share that recording.
        micro_batches = 2 if per_replica > micro_batch or replicas > data_parallel.MAX_BF16_RANKS else 1
        most = _MAX_REPLICAS if all_alike else replicas
        recorded = most if micro_batches == 2 and replicas > 1 else min(replicas, most)
        fits = []
        for weight, (record, *_) in self.record_steps(ways, recorded, micro_batch, overrides, micro_batches=micro_batches):
            pair = record.events, record.repeated
            full, repeated = (estimate_cost(_scale_events(events, processes, recorded, replicas), machine) for events in pair)
            fits.append((weight, Fit(full + (per_replica / micro_batch - 1) * repeated, record.peak, record.before)))
        return _mean(fits)

    def fit_memory(
        self, ways: int, replicas: int, per_replica: int, machine: Machine, overrides: Overrides = (),
        choices: Sequence[Overrides] = (),
    ) -> Fit:  # fmt: skip
        """Return ``mean_step`` with the first of ``choices``, by default ``memory_savings``, that fits ``machine``. Raises
        InfeasibleError if none does."""
        for memory_savings in choices or self.training.memory_savings:
            fit = self.mean_step(ways, replicas, per_replica, machine, (*overrides, *memory_savings))
            if fit.peak <= _USABLE_MEMORY * machine.capacity:
                return fit._replace(memory_savings=memory_savings)
            if fit.held > _USABLE_MEMORY * machine.capacity:
                break
        fault = f"{fit.peak / 1e9:.3g} GB of tensors exceed the {machine.capacity / 1e9:.3g} GB of {machine.name}"
        raise InfeasibleError(f"{fault}; split samples further")

    def plan_step(
        self, gpus: int, ways: int, batch: int, machine: Machine, overrides: Overrides = (), choices: Sequence[Overrides] = (),
    ) -> tuple[Fit, float]:  # fmt: skip
        """Return the step of a job on ``gpus`` with any ``batch``, and the seconds in which it waits for samples."""
        processes, expert = ways * self.fixed_processes(overrides), self._experts(overrides)
        replicas = gpus // processes
        if gpus % processes or batch % replicas:
            raise InfeasibleError(f"{gpus} GPUs, {processes} a replica: {gpus / processes:g} replicas do not divide batch {batch}")
        if replicas % expert:
            raise InfeasibleError(f"{replicas} replicas do not divide into groups of {expert} that share experts (mesh.expert)")
        fit = self.fit_memory(ways, replicas, batch // replicas, machine, overrides, choices)
        prepare, workers, per_replica = self.training.preparation_seconds, self.training.workers, batch // replicas
        if prepare is None:
            return fit, 0.0
        seconds = prepare(np.random.default_rng(0), (replicas, (_LOADER_WARMUP + _LOADER_STEPS) * per_replica))
        queue = 2 * per_replica + workers  # at least: two batches, and a sample of each worker
        stalls = simulate_waits(seconds, fit.step.seconds, workers, queue, batch=per_replica, ranks=processes)
        return fit, float(stalls[_LOADER_WARMUP:].mean())

    def _experts(self, overrides: Overrides) -> int:
        return getattr(self.settings(*overrides).mesh, "expert", 1)

    def plan_job(
        self, gpus: int, ways: int, batch: int, machine: Machine, evaluating: int = 0, overrides: Overrides = (),
        choices: Sequence[Overrides] = (),
    ) -> Job:  # fmt: skip
        """Plan a training on ``gpus``, with ``evaluating`` more GPUs that only evaluate (0: all GPUs evaluate, and training
        waits)."""
        fit, loader = self.plan_step(gpus, ways, batch, machine, overrides, choices)
        replicas = gpus // (ways * self.fixed_processes(overrides))
        samples, evaluation = self.training.samples_needed(batch), self.training.evaluation
        steps = samples / batch
        sample_seconds = self._single_gpu_seconds(gpus, batch, fit, machine, overrides)
        score = evaluation.samples * evaluation.cost * sample_seconds / (evaluating or gpus)
        train, all_scores = steps * (fit.step.seconds + loader), evaluation.count(samples, batch) * score
        # With separate GPUs training waits only for the last evaluation, and for earlier ones if they are slower than training.
        pause = max(all_scores - train, 0.0) + score if evaluating else all_scores
        axes = {"replicate": replicas, "expert": self._experts(overrides), **self.fixed_axes(overrides)}
        axes[self.training.split_axis or ""] = ways
        mesh = {name: axes[name] for name in ("expert", *AXES) if axes.get(name, 1) > 1}
        return Job(gpus, ways, batch, fit, loader, steps, (train + pause) / 60, pause / 60, mesh, overrides)

    def _single_gpu_seconds(self, gpus: int, batch: int, fit: Fit, machine: Machine, overrides: Overrides) -> float:
        """Return the seconds of a sample on one GPU, or if the model does not fit, those on all GPUs divided by their number."""
        if not self.fixed_axes(overrides) and self._experts(overrides) == 1:
            with suppress(InfeasibleError):
                alone = self.fit_memory(1, gpus, 1, machine, overrides).step  # which is recorded already, if samples are not split
                return alone.seconds - alone.exposed_communication
        return fit.step.seconds * gpus / batch

    def plan_jobs(self, gpus: int, ways: Sequence[int], machine: Machine, evaluating: int = 0) -> list[Job]:
        """Return the feasible jobs on ``gpus``, fastest first: each of ``ways``, at batch sizes with known samples to the
        target."""
        low, high = min(self.training.samples), max(self.training.samples)
        jobs = []
        for way in ways:
            replicas = gpus // (way * self.fixed_processes())
            sizes = {-(-low // replicas), high // replicas, *(2**n for n in range(high.bit_length()))} if replicas else set()
            for n in sorted(n for n in sizes if low <= n * replicas <= high):
                with suppress(InfeasibleError):
                    jobs.append(self.plan_job(replicas * way * self.fixed_processes(), way, n * replicas, machine, evaluating))
        return sorted(jobs, key=lambda job: job.minutes)

    def search_meshes(self, gpus: int, machine: Machine, evaluating: int = 0, count: int = 3) -> list[Job]:
        """Return the ``count`` fastest jobs on ``gpus`` with the batch of the settings, each with another mesh. Steps are recorded
        in the order of their estimates, until these exceed the steps of the jobs, even if they are too low by the least factor so
        far, or by a fifth less, or ``_PATIENCE`` in a row are not among the fastest. Raises InfeasibleError if there is no job."""
        training, batch, jobs, candidates, ratio = self.training, self.settings().data.batch, dict[Any, Job](), [], math.inf
        slower = 0
        for number, sizes in enumerate(training.meshes(self.settings(), gpus, machine)):
            for index, choice in reversed([*enumerate(training.memory_savings)]):
                cfg = self.settings(*choice)
                cfg = cfg.model_copy(update={"mesh": cfg.mesh.model_copy(update=sizes)})
                seconds, bytes = training.estimate(cfg, gpus, machine)
                if bytes > _USABLE_MEMORY * machine.capacity / _MIN_ESTIMATE:
                    break
                mesh = tuple(f"mesh.{axis}={size}" for axis, size in sizes.items())
                candidates.append((seconds, number, index, sizes.get(training.split_axis or "", 1), mesh))
        for seconds, _, index, ways, mesh in sorted(candidates):
            best = sorted(jobs.values(), key=attrgetter("seconds"))[:count]
            if len(best) == count and (_MARGIN * ratio * seconds > best[-1].seconds or slower == _PATIENCE):
                break
            if mesh in jobs:  # with less memory it would be slower
                continue
            slower += 1
            with suppress(InfeasibleError):
                jobs[mesh] = self.plan_job(gpus, ways, batch, machine, evaluating, mesh, [training.memory_savings[index]])
                ratio = min(ratio, jobs[mesh].seconds / max(seconds, 1e-9))
                slower = slower if len(best) == count and jobs[mesh].seconds >= best[-1].seconds else 0
        if not jobs:
            raise InfeasibleError(f"no mesh of {gpus} GPUs fits the memory of {machine.name} with a batch of {batch}")
        return sorted(jobs.values(), key=attrgetter("minutes"))[:count]

    def sent_gb(self, job: Job, machine: Machine) -> dict[str, float]:
        """Return the GB that a rank sends in a step of ``job`` over each axis of its mesh."""
        replicas, overrides = job.mesh.get("replicate", 1), (*job.overrides, *job.fit.memory_savings)
        machines = {axis: _OneAxis(**vars(machine), mesh=job.mesh, axis=axis) for axis in job.mesh}
        args = job.ways, replicas, job.batch // replicas
        return {axis: self.mean_step(*args, each, overrides).step.sent / 1e9 for axis, each in machines.items()}

    @cached_property
    def slowdown(self) -> float:
        """Slowdown of the kernels in the first published step, relative to the machine's rates."""
        first = self.training.published[0]
        if self.fixed_axes() or self.yaml != self._default_yaml:
            return Planner(self.name).slowdown
        replicas = first.gpus // (first.ways * self.fixed_processes(first.overrides))
        machine = machines.find_machine(first.machine)
        return self.slowdown_of_step(first.value, machine, first.ways, replicas, first.batch // replicas, first.overrides)

    def slowdown_of_step(
        self, seconds: float, machine: Machine, ways: int = 1, replicas: int = 1, per_replica: int = 1, overrides: Overrides = (),
    ) -> float:  # fmt: skip
        """Return the slowdown in a step that took ``seconds``; the default is one of one sample on one GPU."""
        low, high = 1.0, 64.0
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            predicted = self.fit_memory(ways, replicas, per_replica, replace(machine, slowdown=middle), overrides).step.seconds
            low, high = (middle, high) if predicted < seconds else (low, middle)
        return low

    def predict(self, point: Published, slowdown: float) -> float:
        """Return the prediction of ``Published.value``."""
        machine = machines.find_machine(point.machine, slowdown=slowdown)
        job = self.plan_job(point.gpus, point.ways, point.batch, machine, point.evaluating, point.overrides)
        return job.seconds if point.kind == "step" else job.minutes


class _PipelineStep:
    """The ranks along the axis pipeline in a step of ``count`` micro-batches, each of ``micro_batch`` samples.

    The first, second and last rank are recorded; all between equal the second. Deep models are recorded with few layers a stage.
    """

    def __init__(
        self, planner: Planner, ways: int, replicas: int, micro_batch: int, count: int, machine: Machine, overrides: Overrides,
    ) -> None:  # fmt: skip
        self.machine, self.micro_batches, self.planner = machine, count, planner
        self.within, self.ranks = ways * planner.fixed_processes(overrides), planner.fixed_axes(overrides)["pipeline"]
        self.stage_count = planner.training.stage_count(planner.settings(*overrides))
        self.models, self.weights = planner.shallow_models(overrides, self.stage_count)
        self._record = lambda rank, model: planner.record_steps(  # once
            ways, replicas, micro_batch, (*overrides, *model), rank if rank in (0, self.ranks - 1) else 1, count
        )[0][1]
        self.orders = self._record(0, self.models[0]).orders
        self.stages_of = [sorted({stage for _, stage, _ in order}) for order in self.orders]
        self.rank_of = [next(rank for rank, own in enumerate(self.stages_of) if stage in own) for stage in range(self.stage_count)]
        self.costs = {stage: self._stage_cost(rank, self.stages_of[rank].index(stage)) for stage, rank in enumerate(self.rank_of)}

    def _interpolate(self, function: Callable[[Recorded], Sequence[Any]], rank: int, stages: Sequence[int]) -> Any:
        """Return ``function`` of a rank, the mean over ``stages``, from that of the recorded models."""
        weights = np.mean([self.weights[stage] for stage in stages], axis=0)
        recorded = ((w, function(self._record(rank, model))) for w, model in zip(weights, self.models) if w)
        return reduce(operator.add, (w * np.array(parts, object) for w, parts in recorded))

    def _stage_cost(self, rank: int, index: int) -> "_StageCost":
        def parts(recorded: Recorded) -> list[Any]:
            stage = recorded.stages[index]
            costs = [estimate_cost(record.events, self.machine) for record in (stage.forward, stage.backward)]
            memory = [record.peak - record.before for record in (stage.forward, stage.backward)]
            return [*costs, *memory, stage.saved_bytes, stage.gradient_bytes, stage.input_bytes, stage.output_bytes]

        forward, backward, *memory, given, sent = self._interpolate(parts, rank, [self.stages_of[rank][index]])
        return _StageCost(forward, backward, tuple(memory), given, sent)

    def _step_cost(self, rank: int) -> tuple[Cost, float, float]:
        """Return the cost incurred once per step, its bytes between steps, and its additional bytes."""

        def parts(recorded: Recorded) -> list[Any]:
            record = recorded.record
            return [estimate_cost(record.events, self.machine), record.before, record.peak - record.before]

        cost, held, additional = self._interpolate(parts, rank, self.stages_of[rank])
        return cost, held, additional

    def _pass_cost(self, kind: str, stage: int) -> Cost:
        """Return the cost of a pass. Both parts of a split backward pass take equal time."""
        cost = self.costs[stage]
        return cost.forward if kind == "F" else (0.5 if kind in "IW" else 1.0) * cost.backward

    def _transfer(self, begin: int, end: int) -> tuple[float, float]:
        """Return seconds and bytes of a transfer between two stages."""
        ranks = [self.rank_of[stage] * self.within // self.ranks for stage in (begin, end)]
        return (0.0, 0.0) if ranks[0] == ranks[1] else self.machine.communication_time("send", int(self.costs[0].sent), ranks)

    def fit(self) -> Fit:
        last, cost, of_axis = self.stage_count - 1, cache(self._pass_cost), isinstance(self.machine, _OneAxis)
        ready = [0.0] * self.ranks if of_axis else simulate_schedule(
            self.orders, last, lambda kind, stage: cost(kind, stage).seconds, lambda *stages: self._transfer(*stages)[0]
        )
        steps, peaks, held_bytes = [], [], []
        for rank, (order, finished) in enumerate(zip(self.orders, ready)):
            step_cost, held, extra = self._step_cost(rank)
            step = step_cost
            for (kind, stage), count in Counter((kind, stage) for kind, stage, _ in order).items():
                step += count * cost(kind, stage)
                neighbour = stage + 1 if kind == "F" else stage - 1
                if 0 <= neighbour <= last and kind != "W" and (bytes := self._transfer(stage, neighbour)[1]):
                    step = replace(step, sent=step.sent + count * bytes, messages=step.messages + count)
            seconds = finished + step_cost.seconds
            steps.append(replace(step, seconds=seconds, idle=step.idle + seconds - step.seconds))
            costs = {stage: self.costs[stage] for stage in self.stages_of[rank]}
            buffers = self.micro_batches * sum(cost.given + cost.sent for cost in costs.values())  # torch's
            peaks.append(held + buffers + max(extra, peak_memory(order, {stage: cost.bytes for stage, cost in costs.items()})))
            held_bytes.append(held + buffers)
        return Fit(max(steps, key=attrgetter("sent" if of_axis else "seconds")), max(peaks), max(held_bytes))


class _StageCost(NamedTuple):
    """The cost of one micro-batch in a stage."""

    forward: Cost
    backward: Cost
    bytes: tuple[float, ...]
    """the arguments of ``hpcai.plan.pipeline_schedule.peak_memory``"""
    given: float
    sent: float


@dataclass(frozen=True)
class _OneAxis(Machine):
    """A machine that counts the bytes sent over one axis of a mesh. Experts are sent by all-to-all over replicas."""

    mesh: Any = None
    axis: str = ""

    def communication_time(self, name: str, size: int, ranks: Sequence[int]) -> tuple[float, float]:
        seconds, sent = super().communication_time(name, size, ranks)
        sizes = accumulate((self.mesh.get(axis, 1) for axis in AXES[-2:0:-1]), operator.mul)
        spans = (axis for axis, size in zip(AXES[-2:0:-1], sizes) if max(ranks) - min(ranks) < size)
        axis = next(spans, "expert" if name == "all-to-all" else "replicate")
        return seconds, sent if axis == self.axis else 0.0


def _mean(fits: Sequence[tuple[float, Fit]]) -> Fit:
    """Return the mean of step variants, each with its weight, and the memory of that which needs most."""
    step = sum((weight * fit.step for weight, fit in fits), Cost())
    return Fit(step, max(fit.peak for _, fit in fits), max(fit.held for _, fit in fits))


def _has_setting(schema: Any, key: str) -> bool:
    section, _, name = key.partition(".")
    return section in schema.model_fields and name in schema.model_fields[section].annotation.model_fields


def _record_update(paper: StepTracer, step: Step) -> None:
    """Record clipping and update: gradients are read twice, all other tensors are read and written."""
    for state in step.optimizer.states:
        gradient = state.flat_param.gradient()
        tensors = [state.weights, state.low, state.average, *state.moments.values()]
        size = sum(x.nbytes for x in tensors if x is not None) + (0 if gradient is None else gradient.nbytes)
        paper.add_kernel("update", 2 * size)
    for states, group in step.optimizer.matrix_groups:
        group.orthogonalize_([torch.zeros_like(state.weights) for state in states])


def _scale_events(events: Sequence[Event], ways: int, recorded: int, replicas: int) -> list[Event]:
    """Return the events of ``recorded`` replicas as those of ``replicas``: a group of all replicas is scaled to all."""

    @cache
    def scale(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if recorded == replicas or ranks[-1] < ways * (recorded - 1):
            return ranks
        return tuple(replica * ways + rank for replica in range(replicas) for rank in ranks if rank < ways)

    return [event._replace(ranks=scale(event.ranks)) if isinstance(event, Communication) else event for event in events]
