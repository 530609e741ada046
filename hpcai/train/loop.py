"""The training loop: steps and epochs, reports, evaluation, checkpoints, and an orderly stop."""

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcai import startup
from hpcai.dist.collectives import all_gather_numbers, all_reduce_, gather_distinct, hash_text
from hpcai.dist.energy import RaplCounters
from hpcai.dist.host import GpuCounters, ManualGC, check_power_cap, warm_up_collectives
from hpcai.dist.mesh import Mesh
from hpcai.dist.step_boundary import StepBoundary
from hpcai.dist.watchdog import HEARTBEAT, next_step_boundary, waiting_at
from hpcai.errors import CheckpointError, ConfigError, DataError, DivergedError
from hpcai.log import BETWEEN
from hpcai.parallel.sharding import shard_spec
from hpcai.settings import TrainConfig
from hpcai.stop import defer_interrupts
from hpcai.train.checkpoint import VERSIONS, SavedCheckpoint
from hpcai.train.checkpoint_reader import Progress, step_number
from hpcai.train.evaluation import Evaluation, Metric, Position, SampleCache, choose_evaluation, serve_evaluations
from hpcai.train.metrics import MetricSums, Value, means
from hpcai.train.profile import Profile
from hpcai.train.run import Report, Result, Run
from hpcai.train.schedule import make_lr_schedule
from hpcai.train.step import Step, samples_in
from hpcai.train.step_clock import Marks
from hpcai.train.throughput import peak_flops

ENERGY = ("gpu", "cpu", "memory")
"""Kinds of energy: of GPUs, by each rank, and of CPUs and their memory, by the first rank of each node."""


class Batches:
    """A list of batches with the interface of a loader, the same in every epoch. For notebooks."""

    def __init__(self, batches: Sequence[Any]) -> None:
        if not batches:
            raise DataError("there is no batch to train on; give at least one")
        self._batches = batches
        self.batch_size = samples_in(batches[0])
        self.samples = sum(samples_in(batch) for batch in batches)

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first: int = 0, deferred: Sequence[int] = (), more: bool = False) -> Iterator[Any]:
        return iter(self._batches[first // self.batch_size :])

    def describe(self, epoch: int, first: int) -> str:
        return f"batch {first // self.batch_size}"

    def deferred(self) -> list[int]:
        return []

    def news(self) -> list[str]:
        return []


def fit(
    step: Step, data: Any, cfg: TrainConfig, *, validation: Any = None, evaluate: Metric | None = None,
    run: Run | None = None,
) -> Result:  # fmt: skip
    """Train ``step`` on ``data`` (a ``Loader``, or a list of batches) until the steps or epochs of ``cfg`` are done, the target is
    reached or a signal stops the run.

    ``evaluate(model, batch)`` is summed over ``validation`` every ``cfg.evaluate_every`` epochs and at the end. ``run`` receives
    reports and checkpoints; training resumes from its newest complete checkpoint. On the ranks of ``mesh.evaluate`` this evaluates
    the weights of the training ranks until training ends; ``data`` is not read there.
    """
    if (evaluate is None) != (validation is None):
        raise ConfigError("fit needs both evaluate and validation, or neither")
    if cfg.target is not None and evaluate is None:
        raise ConfigError(f"train.target is {cfg.target:g}, but nothing is evaluated; give evaluate and validation, or no target")
    if cfg.keep_validation and validation is not None:
        validation = SampleCache(validation if hasattr(validation, "epoch") else Batches(validation))
    run = run or Run("", None, step.mesh)
    check_power_cap(step.mesh.device, cfg.power_cap)
    if not step.mesh.trains and evaluate is not None:
        run.flight_recorder.arm()
        boundary = next_step_boundary(step.mesh.job.size)  # training ranks agree on the stop
        with boundary.on_signals(), run.flight_recorder.watch_hang(cfg.hang_after):
            return Result(serve_evaluations(step, evaluate, validation), Progress())
    loader = data if hasattr(data, "epoch") else Batches(data)
    return _Training(step, loader, cfg, validation, evaluate, run).train()


def _count_parameters(model: nn.Module, mesh: Mesh) -> int:
    """Return the number of parameters of the full model, which may be sharded."""
    local = sum(max(parameter.numel(), math.prod(shard_spec(parameter).global_shape)) for parameter in model.parameters())
    return int(all_reduce_(torch.tensor(local), mesh["pipeline"]).item())


@dataclass
class _Reading:
    """Sums of the steps up to ``position``, while they are copied to the host. The last values are the result of
    ``Step.first_failures``; ``marks`` are of a step up to there whose parts were measured on a GPU."""

    is_report: bool
    names: list[str]
    values: Tensor
    ready: Any
    position: dict[str, Any]
    marks: Marks


class _Training:
    def __init__(self, step: Step, data: Any, cfg: TrainConfig, validation: Any, metric: Metric | None, run: Run) -> None:
        self.step, self.data, self.cfg, self.mesh, self.clock = step, data, cfg, step.mesh, step.clock
        self.validation, self.metric = validation, metric
        self.evaluation = choose_evaluation(step, metric, validation, cfg.evaluate)
        self.gpu, self._energy = GpuCounters(self.mesh.device), 0.0
        self.processors: RaplCounters | None = None  # of the node, on its first rank
        self._nodes = self._first_sample = 0
        self._target_position: Position | None = None  # at which the target was reached
        self.run, self.reports, self.checkpoints, self.cost = run, run.reports, run.checkpoints, run.cost
        self.peak = None if self.cost.flops is None else peak_flops(step.cfg, self.mesh)
        self.steps = cfg.steps if cfg.steps is not None else (cfg.epochs or 1) * len(data)
        self.lr_at: Callable[[int], float] = make_lr_schedule(step.cfg.schedule, step.cfg.lr, len(data), self.steps)
        self.metric_sums = MetricSums()
        self.progress, self.result = Progress(), Result("finished", Progress())
        self._reported = self._saved = self._replicas_checked = 0
        self._reading: _Reading | None = None
        self._logged_save: SavedCheckpoint | CheckpointError | None = None
        self._last_logged = (0, 0)  # step and samples of the last report

    def train(self) -> Result:
        startup.begin("other")
        if self.checkpoints:
            self.checkpoints.data = getattr(self.data, "identity", "")
            self.checkpoints.data_changes = getattr(self.data, "changes_since", lambda seconds: "")
        with startup.during("checkpoint"), waiting_at("the checkpoint to resume from"):
            resumed = self.checkpoints.resume(self.step) if self.checkpoints else None
        self.progress = self.result.progress = resumed or self.progress
        self._reported = self._saved = self._replicas_checked = self.progress.step
        self._first_sample = self.progress.seen
        self._log_start(self.progress.step if resumed else None)
        self.step.model.train()
        ended = self.progress.ended
        done = ended == "target" or (ended == "finished" and self.progress.step >= self.steps)
        with startup.during("connections"), waiting_at("the first collective"):
            warm_up_collectives(self.mesh)
        folder = self.run.directory
        with (
            self.run.flight_recorder.watch_hang(self.cfg.hang_after, self._describe_state),
            self._explain_end(),
            next_step_boundary(self.mesh.job.size).on_signals() as boundary,
            ManualGC(self.cfg.collect_every) as self.collector,
            Profile(folder, self.cfg.profile, self.mesh, done=self.progress.step) as self.profile,
        ):
            self._last_logged = (self.progress.step, self.progress.seen)
            self.clock.end_interval(1, [])
            reason = ended if done else self._epochs(boundary)
            self.progress.ended = self.result.reason = reason
            if done:
                self.reports.emit("note", step=self.progress.step, text=f"this run had ended: {reason}; nothing is left to do")
            else:
                self._flush_reports()
                self._save(final=True)
        if reason == "signal":
            self.reports.emit("note", step=self.progress.step, text=f"stopped by {boundary.reason}")
        if not done:
            self._log_energy()
        parts = {part: seconds for part, seconds in self.clock.end_interval(1, [])[1].items() if part in BETWEEN}
        at = (self._target_position or self._position()) | {"parts": parts}
        self.reports.emit("stop", **at, reason=reason, seconds=self.progress.seconds, target_reached=reason == "target")
        if self.evaluation is not None:
            self.evaluation.close(reason)
        return self.result

    @contextmanager
    def _explain_end(self) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            if self.checkpoints is not None:
                self.checkpoints.wait_local()
            if isinstance(problem, KeyboardInterrupt):
                saved = self.checkpoints.paths()[-1:] if self.checkpoints is not None else []
                start = f"resumes from step {step_number(saved[0])}" if saved else "starts from the beginning, without a checkpoint"
                problem.add_note(f"it had made {self.progress.step} steps, and the same command {start}")
            if isinstance(problem, DivergedError):
                where, seconds = self._position(), self.progress.seconds
                self.reports.emit("stop", **where, reason="diverged", seconds=seconds, target_reached=False)
            raise

    def _epochs(self, boundary: StepBoundary) -> str:
        startup.begin("first batch")
        while self.progress.step < self.steps:
            self.reports.emit("epoch", epoch=self.progress.epoch, step=self.progress.step)
            left = (self.data.samples - self.progress.sample) / self.data.batch_size
            more = self.steps - self.progress.step > left  # whether another epoch follows
            at = self.progress.epoch, self.progress.sample, self.progress.late
            for batch in self.clock.wait_for(self.data.epoch(*at, more)):  # no other reference: a break closes the epoch
                if self._report_is_near() or not self.clock.device_seconds:
                    self.clock.measure_next_step()
                values = self.step(batch, self.lr_at(self.progress.step))
                self._after_step(values)
                if self.progress.step >= self.steps:  # a signal now changes nothing: evaluate and save the end
                    break
                if self._target_reached():
                    return "target"
                if boundary.should_stop():
                    return "target" if self._target_reached(wait=True) else "signal"
            else:
                self.progress.epoch, self.progress.sample, self.progress.late = self.progress.epoch + 1, 0, []
            last = self.progress.step >= self.steps
            since = self.progress.epoch - (self.cfg.evaluate_from or self.cfg.evaluate_every)
            if last or (since >= 0 and since % self.cfg.evaluate_every == 0):
                self._evaluate()
            if self._target_reached(wait=last):
                return "target"
            if not last and self._save_is_due(end_of_epoch=True):
                self._save()
        return "finished"

    def _report_is_near(self) -> bool:
        """Whether a report may follow the next step: at the regular interval, and before an evaluation at the end of an epoch."""
        step, epoch_ends = self.progress.step + 1, self.progress.sample + self.data.batch_size >= self.data.samples
        return step % self.cfg.report_every == 0 or step == self.steps or epoch_ends

    def _after_step(self, values: dict[str, Value]) -> None:
        """Update sums and counters after a step, and write the reports and checkpoints that are due."""
        self._log_reading()
        HEARTBEAT.beats += 1
        if self.processors is not None:
            self.processors.poll()
        self.metric_sums.add(values, 1)  # replicas have equal weights, even if balancing gives them unequal numbers of samples
        self.progress.step += 1
        self.progress.sample += self.data.batch_size
        self.progress.seen += self.data.batch_size
        if startup.is_running():
            self._log_startup()
        self.collector.collect_at(self.progress.step)
        self.profile.after_step(self.progress.step)
        report = self.progress.step % self.cfg.report_every == 0
        next_reading = self.progress.step + (self.cfg.report_every if report else 1)
        interval = self.cfg.replica_check_every
        check_replicas = interval is not None and next_reading - self._replicas_checked > interval
        self._start_reading(report, check_replicas)
        if self.mesh.device.type != "cuda":  # on a GPU reports lag one step behind
            self._log_reading()
        if self.checkpoints is not None:
            self._log_save(self.checkpoints.outcome)
        # The last step of an epoch is saved after its evaluation, which a resumed run would otherwise repeat.
        if self.progress.sample < self.data.samples and self.progress.step < self.steps and self._save_is_due():
            self._save()

    def _log_startup(self) -> None:
        """Report the seconds of each part of the start, once, after the first step."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        local = startup.end(self.step.compiled)
        by_rank = all_gather_numbers([local.get(part, 0.0) for part in startup.PARTS], self.mesh.peers).tolist()
        parts = startup.combine_ranks([dict(zip(startup.PARTS, seconds)) for seconds in by_rank])
        self.reports.emit("startup", step=self.progress.step, seconds=sum(parts.values()), parts=parts)

    def _save_is_due(self, end_of_epoch: bool = False) -> bool:
        if self.checkpoints is None:
            return False
        every = self.checkpoints.cfg.every_steps
        return end_of_epoch if every is None else self.progress.step % every == 0

    def _flush_reports(self) -> None:
        """Report everything up to the last step. Raises DivergedError before a non-finite value is reported or saved."""
        self._log_reading()
        self._start_reading(report=True, check_replicas=self.cfg.replica_check_every is not None)
        self._log_reading()

    def _start_reading(self, report: bool, check_replicas: bool) -> None:
        """Begin to read metrics (``report``), summed over all ranks, and the comparison of replicas (``check_replicas``): one copy
        to the host. On a GPU the copy is awaited after the next step has started, so that the GPU never waits for the host."""
        report = report and self._reported != self.progress.step
        check_replicas = check_replicas and self._replicas_checked != self.progress.step and self.step.replica_check.has_replicas
        if not (report or check_replicas):
            return
        names, values, ready = self.metric_sums.names if report else [], self.step.first_failures(check_replicas).double(), None
        if report:
            values = torch.cat((self.metric_sums.all_reduce(names, self.mesh["replicate"], self.mesh.device), values))
            self._reported = self.progress.step
        if check_replicas:
            self._replicas_checked = self.progress.step
        if self.mesh.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.current_stream().record_event()
        self._reading = _Reading(report, names, values, ready, self._position(), self.clock.take_marks() if report else [])

    def _log_reading(self) -> None:
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        if reading.ready is not None:
            reading.ready.synchronize()
        *sums, first_nonfinite, divergent = reading.values.tolist()
        self.step.check(lambda step: self.data.describe(*self._position_before(step)), int(first_nonfinite))
        self.step.replica_check.raise_if_divergent(int(divergent), reading.position["step"])
        if not reading.is_report:
            return
        values = means(reading.names, sums)
        step, samples, (last_step, seen) = reading.position["step"], reading.position["samples"], self._last_logged
        self._last_logged = (step, samples)
        seconds, parts = self.clock.end_interval(step - last_step, reading.marks)
        self.progress.seconds += seconds
        self.result.reports.append(Report(step, values))
        self._log_news(self.data)
        self._log_news(self.step)
        rate = (samples - seen) / max(seconds, 1e-9)
        self.reports.emit(
            "train", **reading.position, seconds=self.progress.seconds, samples_per_second=rate, lr=self.lr_at(step - 1),
            **({"parts": parts} | self.cost.rates(rate, self.peak) | values), **self._gpu_readings(samples - seen),
        )  # fmt: skip

    def _gpu_readings(self, samples: int) -> dict[str, float]:
        """Return the readings of this rank's GPU, and its samples per joule of its share of ``samples``."""
        readings = self.gpu.read()
        if "energy_j" in readings:
            spent, self._energy = readings["energy_j"] - self._energy, readings["energy_j"]
            readings |= {"samples_per_joule": samples / self.mesh.world / spent} if spent > 0 else {}
        return {f"gpu_{name}": value for name, value in readings.items()}

    def _log_energy(self) -> None:
        """Report the energy of the run since its start, once: sums over all ranks that have counters."""
        readings = self.gpu.read()
        limits = list(gather_distinct(readings.get("power_limit_w"), self.mesh.peers).values())
        local = {"gpu": readings.get("energy_j")}
        local |= self.processors.joules() if self.processors else {}
        each = [local.get(kind) for kind in ENERGY]
        flat = torch.tensor([*(x or 0.0 for x in each), *(x is not None for x in each)], dtype=torch.float64)
        sums = all_reduce_(flat, self.mesh.peers).tolist()
        counted = {kind: int(count) for kind, count in zip(ENERGY, sums[len(ENERGY) :]) if count}
        if not counted:
            return
        joules = {f"{kind}_joules": total for kind, total in zip(ENERGY, sums) if kind in counted}
        joules |= {"gpu_limits_w": [min(limits), max(limits)]} if limits else {}
        samples, total = self.progress.seen - self._first_sample, sum(sums[: len(ENERGY)])
        self.reports.emit(
            "energy", step=self.progress.step, joules=total, joules_per_sample=total / max(samples, 1), samples=samples, **joules,
            gpus=counted.get("gpu", 0), world=self.mesh.world, nodes_counted=counted.get("cpu", 0), nodes=self._nodes,
        )  # fmt: skip

    def _log_news(self, source: Any) -> None:
        for text in source.news() if hasattr(source, "news") else ():  # a list of batches has no messages
            self.reports.emit("note", step=self.progress.step, text=text)

    def _position_before(self, step: int) -> tuple[int, int]:
        """Return the epoch of 0-based ``step``, and the samples that it had delivered before."""
        epoch, first = self.progress.epoch, self.progress.sample - (self.progress.step - step) * self.data.batch_size
        while first < 0 < epoch:
            epoch, first = epoch - 1, first + self.data.samples
        return epoch, first

    def _describe_state(self, step: int | None) -> dict[str, Any]:
        """Return the progress of the run, and the samples of this rank in ``step``, counted from 1 (None: the current one)."""
        step = step or self.progress.step + 1
        epoch, first = self._position_before(step - 1)
        if hasattr(self.data, "batch_samples"):
            samples: Any = [{"index": index, "text": text} for index, text in self.data.batch_samples(epoch, first)]
        else:
            samples = [{"index": first // self.data.batch_size, "text": self.data.describe(epoch, first)}]
        at = {"epoch": epoch, "sample": first, "of": self.data.samples}
        return {"step": step, "position": at, "samples": samples, "progress": asdict(self.progress)}

    def _evaluate(self) -> None:
        if self.evaluation is not None:
            self._flush_reports()
            with self.clock.during("evaluate"):
                self.evaluation.start(self._position())

    def _target_reached(self, wait: bool = False) -> bool:
        """Report finished evaluations (``wait``: all). Return whether one of them reached the target, the same on all ranks."""
        if self.evaluation is None or not self.evaluation.pending:
            return False
        if not wait and self.progress.sample and self.progress.step % self.cfg.report_every:
            return False  # checked with the reports, when the host waits anyway
        with self.clock.during("evaluate"):
            evaluations = self.evaluation.results(wait)
        reached = [self._log_evaluation(scored) for scored in evaluations]
        return any(reached)

    def _log_evaluation(self, evaluation: Evaluation) -> bool:
        self._log_news(self.validation)
        self._log_news(self.step)  # an evaluation may have compiled graphs
        step = evaluation.position["step"]
        self.result.evaluations.append(Report(step, evaluation.values))
        self.reports.emit("evaluate", **evaluation.position, **{**evaluation.values, "seconds": evaluation.seconds})
        if bad := [f"{name} is {value}" for name, value in evaluation.values.items() if not math.isfinite(value)]:
            advice = "though the loss is finite; look at what the metric divides by, and at the validation samples"
            self.reports.emit("note", step=step, text=f"evaluation of step {step}: {', '.join(bad)}, {advice}")
        if self.cfg.metric is None or (self.cfg.target is None and self.cfg.hopeless is None):
            return False
        if self.cfg.metric not in evaluation.values:
            raise ConfigError(f"train.metric is {self.cfg.metric!r}, but the evaluated metrics are {', '.join(evaluation.values)}")
        value = evaluation.values[self.cfg.metric]
        higher = self.cfg.better == "higher"
        if self.cfg.hopeless is not None and not (value > self.cfg.hopeless if higher else value < self.cfg.hopeless):
            raise DivergedError(
                f"step {step}: {self.cfg.metric} is {value:.6g}; train.hopeless: a run at {self.cfg.hopeless:g} has diverged; "
                f"lower step.lr (now {self.step.cfg.lr:g}), lengthen step.schedule.warmup, or restart with another train.seed"
            )
        if self.cfg.target is None:
            return False
        reached = value >= self.cfg.target if higher else value <= self.cfg.target
        if reached and self._target_position is None:
            self._target_position = evaluation.position
            text = f"target reached: {self.cfg.metric} {value:.6g}, asked {self.cfg.target:g}"
            suffix = f", by the weights of step {step}" if step < self.progress.step else ""
            self.reports.emit("note", step=step, text=text + suffix)
        return reached

    def _save(self, final: bool = False) -> None:
        """Begin to save a checkpoint. An error is reported and the next one is tried; the final one must succeed."""
        self._flush_reports()
        if self.checkpoints is None:
            return
        self._wait_for_save(final)
        if self._saved != self.progress.step:
            late = self.data.deferred()
            self.progress.late = late if self.progress.sample else []
            with self.clock.during("save"), defer_interrupts():
                self.checkpoints.async_save(self.step, self.progress)
            self._saved = self.progress.step
        if final and isinstance(outcome := self._wait_for_save(final), CheckpointError):
            raise outcome

    def _wait_for_save(self, final: bool) -> SavedCheckpoint | CheckpointError | None:
        """Wait for the pending checkpoint, if there is one, and report the wait if it delays training."""
        if self.checkpoints is None or not self.checkpoints.pending:
            return None
        waits, began = self.checkpoints.outcome is None, time.perf_counter()
        with self.clock.during("save"):
            outcome = self.checkpoints.wait()
        waited = time.perf_counter() - began
        self._log_save(outcome)
        if isinstance(outcome, CheckpointError):
            self._saved = -1
        elif waits and not final:
            text = f"waited {waited:.1f} s until the checkpoint of step {outcome.step} was written; save less often"
            self.reports.emit("note", step=self.progress.step, text=text)
        return outcome

    def _log_save(self, outcome: SavedCheckpoint | CheckpointError | None) -> None:
        """Report, once, that a checkpoint was written or that it failed."""
        if outcome is None or outcome is self._logged_save:
            return
        self._logged_save = outcome
        if isinstance(outcome, SavedCheckpoint):
            path, seconds, size = str(outcome.path), outcome.seconds, outcome.bytes
            self.reports.emit("checkpoint", step=outcome.step, path=path, seconds=seconds, bytes=size)
        else:
            self.reports.emit("note", step=self.progress.step, text=f"error: {outcome}")

    def _position(self) -> dict[str, Any]:
        epoch = self.progress.epoch + self.progress.sample / (len(self.data) * self.data.batch_size)
        return {"step": self.progress.step, "epoch": round(epoch, 6), "samples": self.progress.seen}

    def _log_start(self, resumed: int | None) -> None:
        self.run.begin()
        host = hash_text(socket.gethostname())
        hosts = all_gather_numbers([host], self.mesh.peers, torch.int64).flatten().tolist()
        nodes = self._nodes = len(set(hosts))
        if hosts.index(host) == self.mesh.peers.rank:
            self.processors = RaplCounters()
        self.reports.emit(
            "start", name=self.run.name, directory=str(self.run.directory or ""), settings=self.run.settings,
            world=self.mesh.world, nodes=nodes, device=str(self.mesh.device), versions=dict(VERSIONS),
            parameters=_count_parameters(self.step.model, self.mesh),
            steps=self.steps, steps_per_epoch=len(self.data), epochs=self.steps / len(self.data), global_batch=self.data.batch_size,
            train_samples=getattr(self.data, "dataset_size", self.data.samples),  # from which an epoch's samples are drawn
            validation_samples=getattr(self.validation, "dataset_size", getattr(self.validation, "samples", 0)),
            resumed_from=resumed, **self.cost.facts(self.peak),
        )  # fmt: skip
        for text in (*(self.checkpoints.messages if self.checkpoints else ()), *self.step.messages):
            self.reports.emit("note", step=self.progress.step, text=text)
        if self.processors is not None and self.processors.unreadable:
            text = f"energy of processors is not counted, since this user cannot read it: {self.processors.unreadable}"
            self.reports.emit("note", step=self.progress.step, text=text)
        if resumed is not None:
            self.reports.emit("note", step=self.progress.step, text=f"resumed from step {resumed}")
