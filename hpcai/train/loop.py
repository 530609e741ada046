"""The only loop: steps and epochs, reports, evaluation, checkpoints, and an orderly stop."""

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
from hpcai.dist.collect import digest, distinct, gather_numbers, sum_in_place
from hpcai.dist.energy import Processors
from hpcai.dist.host import Collector, Gpu, check_power_cap, warm_collectives
from hpcai.dist.mesh import Mesh
from hpcai.errors import CheckpointError, ConfigError, DataError, DivergedError
from hpcai.parallel.rows import place_of
from hpcai.settings import TrainConfig
from hpcai.stop import interrupts_put_off
from hpcai.train.checkpoint import VERSIONS, Saved
from hpcai.train.evaluation import Kept, Metric, Position, Scored, scoring, serve
from hpcai.train.failure import PULSE
from hpcai.train.measure import Measured, Value, means
from hpcai.train.profile import Profile
from hpcai.train.run import Report, Result, Run
from hpcai.train.saved import Progress
from hpcai.train.schedule import rate
from hpcai.train.signals import StopSignals
from hpcai.train.step import Step, samples_in

ENERGY = ("gpu", "cpu", "memory")
"""What energy is counted of: GPUs by their processes, processors and their memory by the first process of each node."""


class Batches:
    """A list of ready batches as the loop wants them: the same ones in every epoch. For notebooks."""

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
    """Train ``step`` on ``data`` (a ``Loader``, or a list of batches) until the steps or epochs of ``cfg`` are done, the target
    is reached or a signal asks for the end.

    ``evaluate(model, batch)`` is summed over ``validation`` at the end of every ``cfg.evaluate_every`` epochs and at the end.
    ``run`` is where reports and checkpoints go; with it, training goes on from the newest whole checkpoint.
    On the processes of ``mesh.evaluate`` this evaluates the weights that the others train, and returns when they do; ``data`` is
    not looked at there.
    """
    if (evaluate is None) != (validation is None):
        raise ConfigError("fit needs both evaluate and validation, or neither")
    if cfg.target is not None and evaluate is None:
        raise ConfigError(f"train.target is {cfg.target:g}, but nothing is evaluated; give evaluate and validation, or no target")
    if cfg.keep_validation and validation is not None:
        validation = Kept(validation if hasattr(validation, "epoch") else Batches(validation))
    run = run or Run("", None, step.mesh)
    check_power_cap(step.mesh.device, cfg.power_cap)
    if not step.mesh.trains and evaluate is not None:
        run.failures.arm()
        with StopSignals(step.mesh), run.failures.watching(cfg.hang_after):  # the others stop when they have agreed to
            return Result(serve(step, evaluate, validation), Progress())
    loader = data if hasattr(data, "epoch") else Batches(data)
    return _Training(step, loader, cfg, validation, evaluate, run).go()


def _parameters(model: nn.Module, mesh: Mesh) -> int:
    """Of the whole model, of which this process may have a part."""
    own = sum(max(parameter.numel(), math.prod(place_of(parameter).size)) for parameter in model.parameters())
    return int(sum_in_place(torch.tensor(own), mesh["pipeline"]).item())


@dataclass
class _Reading:
    """Sums of the steps up to ``position``, on their way to the host; the last values are what ``Step.first_bad`` gave."""

    is_report: bool
    names: list[str]
    values: Tensor
    ready: Any
    position: dict[str, Any]


class _Training:
    def __init__(self, step: Step, data: Any, cfg: TrainConfig, validation: Any, metric: Metric | None, run: Run) -> None:
        self.step, self.data, self.cfg, self.mesh = step, data, cfg, step.mesh
        self.validation, self.metric = validation, metric
        self.scores = scoring(step, metric, validation, cfg.evaluate)
        self.gpu, self._energy = Gpu(self.mesh.device), 0.0
        self.processors: Processors | None = None  # of the node, on the first process there
        self._nodes = self._seen_before = 0
        self._scored: Position | None = None  # where the target was reached
        self.run, self.reports, self.checkpoints = run, run.reports, run.checkpoints
        self.steps = cfg.steps if cfg.steps is not None else (cfg.epochs or 1) * len(data)
        self.rate: Callable[[int], float] = rate(step.cfg.schedule, step.cfg.lr, len(data), self.steps)
        self.measured = Measured()
        self.progress, self.result = Progress(), Result("finished", Progress())
        self._reported = self._saved = self._compared = 0
        self._reading: _Reading | None = None
        self._told: Saved | CheckpointError | None = None
        self._since: tuple[float, int] = (0.0, 0)

    def go(self) -> Result:
        startup.now("other")
        if self.checkpoints:
            self.checkpoints.data = getattr(self.data, "identity", "")
        with startup.during("checkpoint"):
            resumed = self.checkpoints.resume(self.step) if self.checkpoints else None
        self.progress = self.result.progress = resumed or self.progress
        self._reported = self._saved = self._compared = self.progress.step
        self._seen_before = self.progress.seen
        self._start(self.progress.step if resumed else None)
        self.step.model.train()
        ended = self.progress.ended
        done = ended == "target" or (ended == "finished" and self.progress.step >= self.steps)
        with startup.during("connections"):
            warm_collectives(self.mesh)
        folder = self.run.directory
        with (
            self.run.failures.watching(self.cfg.hang_after, self._whereabouts),
            self._divergence_told(),
            StopSignals(self.mesh) as signals,
            Collector(self.cfg.collect_every) as self.collector,
            Profile(folder, self.cfg.profile, self.mesh, done=self.progress.step) as self.profile,
        ):
            self._since = (time.perf_counter(), self.progress.seen)
            reason = ended if done else self._epochs(signals)
            self.progress.ended = self.result.reason = reason
            if done:
                self.reports.emit("note", step=self.progress.step, text=f"this run had ended: {reason}; nothing is left to do")
            else:
                self._report()
                self._save(final=True)
        if reason == "signal":
            self.reports.emit("note", step=self.progress.step, text=f"stopped by {signals.cause}")
        if not done:
            self._tell_energy()
        at = self._scored or self._position()
        self.reports.emit("stop", **at, reason=reason, seconds=self.progress.seconds, target_reached=reason == "target")
        if self.scores is not None:
            self.scores.close(reason)
        return self.result

    @contextmanager
    def _divergence_told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as problem:
            if self.checkpoints is not None:
                self.checkpoints.settle()
            if not isinstance(problem, DivergedError):
                raise
            where = self._position()
            self.reports.emit("stop", **where, reason="diverged", seconds=self.progress.seconds, target_reached=False)
            raise

    def _epochs(self, signals: StopSignals) -> str:
        startup.now("first batch")
        while self.progress.step < self.steps:
            self.reports.emit("epoch", epoch=self.progress.epoch, step=self.progress.step)
            left = (self.data.samples - self.progress.sample) / self.data.batch_size
            more = self.steps - self.progress.step > left  # another epoch follows
            for batch in self.data.epoch(self.progress.epoch, self.progress.sample, self.progress.late, more):
                values = self.step(batch, self.rate(self.progress.step))
                self._made(values)
                if self.progress.step >= self.steps:  # a signal now changes nothing: the end is evaluated and saved
                    break
                if self._target_is_reached():
                    return "target"
                if signals.agreed():
                    return "target" if self._target_is_reached(wait=True) else "signal"
            else:
                self.progress.epoch, self.progress.sample, self.progress.late = self.progress.epoch + 1, 0, []
            last = self.progress.step >= self.steps
            since = self.progress.epoch - (self.cfg.evaluate_from or self.cfg.evaluate_every)
            if last or (since >= 0 and since % self.cfg.evaluate_every == 0):
                self._evaluate()
            if self._target_is_reached(wait=last):
                return "target"
            if not last and self._save_is_due(end_of_epoch=True):
                self._save()
        return "finished"

    def _made(self, values: dict[str, Value]) -> None:
        """Do what follows each step: sums, counters, and the reports and checkpoints that are due."""
        self._tell()
        PULSE.beats += 1
        if self.processors is not None:
            self.processors.keep()
        self.measured.add(values, 1)  # every copy's part of a step counts alike, however many samples balancing gave it
        self.progress.step += 1
        self.progress.sample += self.data.batch_size
        self.progress.seen += self.data.batch_size
        if startup.running():
            self._tell_startup()
        self.collector.at(self.progress.step)
        self.profile.at(self.progress.step)
        report = self.progress.step % self.cfg.report_every == 0
        next_look = self.progress.step + (self.cfg.report_every if report else 1)
        compare = self.cfg.agree_every is not None and next_look - self._compared > self.cfg.agree_every
        self._read(report, compare)
        if not self.lags:
            self._tell()
        if self.checkpoints is not None:
            self._tell_save(self.checkpoints.outcome)
        # The last step of an epoch is saved after its evaluation, which a run that resumes would otherwise do again.
        if self.progress.sample < self.data.samples and self.progress.step < self.steps and self._save_is_due():
            self._save()

    def _tell_startup(self) -> None:
        """Tell once how long each part took up to the end of the first step."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        own = startup.end(self.step.compiled)
        every = gather_numbers([own.get(part, 0.0) for part in startup.PARTS], self.mesh.everyone).tolist()
        parts = startup.slowest([dict(zip(startup.PARTS, seconds)) for seconds in every])
        self.reports.emit("startup", step=self.progress.step, seconds=sum(parts.values()), parts=parts)

    def _save_is_due(self, end_of_epoch: bool = False) -> bool:
        if self.checkpoints is None:
            return False
        every = self.checkpoints.cfg.every_steps
        return end_of_epoch if every is None else self.progress.step % every == 0

    def _report(self) -> None:
        """Read and tell everything up to the last step; raises DivergedError before a bad number is shown or saved."""
        self._tell()
        self._read(report=True, compare=self.cfg.agree_every is not None)
        self._tell()

    @property
    def lags(self) -> bool:
        """Whether a report is told one step later."""
        return self.mesh.device.type == "cuda"

    def _read(self, report: bool, compare: bool) -> None:
        """Begin to read what was measured (``report``), once it is summed over all processes, and whether weights are still alike
        where they should be (``compare``): one copy to the host.

        On a GPU the copy is waited for after the next step has been started, so that the GPU never waits for the host.
        """
        report = report and self._reported != self.progress.step
        compare = compare and self._compared != self.progress.step and self.step.agreement.needed
        if not (report or compare):
            return
        names, values, ready = self.measured.names if report else [], self.step.first_bad(compare).double(), None
        if report:
            values = torch.cat((self.measured.pack(names, self.mesh["replicate"], self.mesh.device), values))
            self._reported = self.progress.step
        if compare:
            self._compared = self.progress.step
        if self.mesh.device.type == "cuda":
            values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            ready = torch.cuda.current_stream().record_event()
        self._reading = _Reading(report, names, values, ready, self._position())

    def _tell(self) -> None:
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        if reading.ready is not None:
            reading.ready.synchronize()
        *sums, first_bad, unlike = reading.values.tolist()
        self.step.check(self._samples_of, int(first_bad))
        self.step.agreement.tell(int(unlike), reading.position["step"])
        if not reading.is_report:
            return
        values = means(reading.names, sums)
        now, (then, seen) = time.perf_counter(), self._since
        self.progress.seconds += now - then
        step, samples = reading.position["step"], reading.position["samples"]
        self._since = (now, samples)
        self.result.reports.append(Report(step, values))
        self._tell_news(self.data)
        self._tell_news(self.step)
        self.reports.emit(
            "train", **reading.position, seconds=self.progress.seconds, samples_per_second=(samples - seen) / max(now - then, 1e-9),
            lr=self.rate(step - 1), **values, **self._gpu(samples - seen),
        )  # fmt: skip

    def _gpu(self, samples: int) -> dict[str, float]:
        """Readings of this process's GPU, and how many of its part of ``samples`` a joule bought."""
        readings = self.gpu.readings()
        if "energy_j" in readings:
            spent, self._energy = readings["energy_j"] - self._energy, readings["energy_j"]
            readings |= {"samples_per_joule": samples / self.mesh.world / spent} if spent > 0 else {}
        return {f"gpu_{name}": value for name, value in readings.items()}

    def _tell_energy(self) -> None:
        """Tell once, at the end, what the run has taken since its start: sums over all processes, as far as there are counters."""
        readings = self.gpu.readings()
        limits = list(distinct(readings.get("power_limit_w"), self.mesh.everyone).values())
        own = {"gpu": readings.get("energy_j")}
        own |= self.processors.joules() if self.processors else {}
        each = [own.get(kind) for kind in ENERGY]
        flat = torch.tensor([*(joules or 0.0 for joules in each), *(joules is not None for joules in each)], dtype=torch.float64)
        sums = sum_in_place(flat, self.mesh.everyone).tolist()
        counted = {kind: int(count) for kind, count in zip(ENERGY, sums[len(ENERGY) :]) if count}
        if not counted:
            return
        joules = {f"{kind}_joules": total for kind, total in zip(ENERGY, sums) if kind in counted}
        joules |= {"gpu_limits_w": [min(limits), max(limits)]} if limits else {}
        samples, total = self.progress.seen - self._seen_before, sum(sums[: len(ENERGY)])
        self.reports.emit(
            "energy", step=self.progress.step, joules=total, joules_per_sample=total / max(samples, 1), samples=samples, **joules,
            gpus=counted.get("gpu", 0), world=self.mesh.world, nodes_counted=counted.get("cpu", 0), nodes=self._nodes,
        )  # fmt: skip

    def _tell_news(self, of: Any) -> None:
        for text in of.news() if hasattr(of, "news") else ():  # a list of batches has none
            self.reports.emit("note", step=self.progress.step, text=text)

    def _samples_of(self, step: int) -> str:
        """What this process read for 0-based ``step``."""
        return self.data.describe(*self._begun_at(step))

    def _begun_at(self, step: int) -> tuple[int, int]:
        """Epoch of 0-based ``step``, and the samples that it had delivered before."""
        epoch, first = self.progress.epoch, self.progress.sample - (self.progress.step - step) * self.data.batch_size
        while first < 0 < epoch:
            epoch, first = epoch - 1, first + self.data.samples
        return epoch, first

    def _whereabouts(self, step: int | None) -> dict[str, Any]:
        """For a failure: where the run stands, and what this process read for ``step``, counted from 1 (the one under way)."""
        step = step or self.progress.step + 1
        epoch, first = self._begun_at(step - 1)
        if hasattr(self.data, "batch_samples"):
            samples: Any = [{"index": index, "text": text} for index, text in self.data.batch_samples(epoch, first)]
        else:
            samples = [{"index": first // self.data.batch_size, "text": self.data.describe(epoch, first)}]
        at = {"epoch": epoch, "sample": first, "of": self.data.samples}
        return {"step": step, "position": at, "samples": samples, "progress": asdict(self.progress)}

    def _evaluate(self) -> None:
        if self.scores is not None:
            self._report()
            began = time.perf_counter()
            self.scores.start(self._position())
            self._since = (self._since[0] + time.perf_counter() - began, self._since[1])

    def _target_is_reached(self, wait: bool = False) -> bool:
        """Tell the evaluations that are done (``wait``: all) -> whether one is as good as asked, the same on all processes."""
        if self.scores is None or not self.scores.pending:
            return False
        if not wait and self.progress.sample and self.progress.step % self.cfg.report_every:
            return False  # looked at with the reports, when the host waits anyway
        began = time.perf_counter()
        found = self.scores.results(wait)
        self._since = (self._since[0] + time.perf_counter() - began, self._since[1])
        reached = [self._judge(scored) for scored in found]
        return any(reached)

    def _judge(self, scored: Scored) -> bool:
        self._tell_news(self.validation)
        self._tell_news(self.step)  # what an evaluation compiled is kept, too
        step = scored.position["step"]
        self.result.evaluations.append(Report(step, scored.values))
        self.reports.emit("evaluate", **scored.position, **{**scored.values, "seconds": scored.seconds})
        if bad := [f"{name} is {value}" for name, value in scored.values.items() if not math.isfinite(value)]:
            advice = "though the loss is finite; look at what the metric divides by, and at the validation samples"
            self.reports.emit("note", step=step, text=f"evaluation of step {step}: {', '.join(bad)}, {advice}")
        if self.cfg.metric is None or (self.cfg.target is None and self.cfg.hopeless is None):
            return False
        if self.cfg.metric not in scored.values:
            raise ConfigError(f"train.metric is {self.cfg.metric!r}, but what is evaluated is {', '.join(scored.values)}")
        value = scored.values[self.cfg.metric]
        higher = self.cfg.better == "higher"
        if self.cfg.hopeless is not None and not (value > self.cfg.hopeless if higher else value < self.cfg.hopeless):
            raise DivergedError(
                f"step {step}: {self.cfg.metric} is {value:.6g}; train.hopeless: a run at {self.cfg.hopeless:g} has diverged; "
                f"lower step.lr (now {self.step.cfg.lr:g}), lengthen step.schedule.warmup, or begin anew with another train.seed"
            )
        if self.cfg.target is None:
            return False
        reached = value >= self.cfg.target if higher else value <= self.cfg.target
        if reached and self._scored is None:
            self._scored = scored.position
            text = f"target reached: {self.cfg.metric} {value:.6g}, asked {self.cfg.target:g}"
            later = f", by the weights of step {step}" if step < self.progress.step else ""
            self.reports.emit("note", step=step, text=text + later)
        return reached

    def _save(self, final: bool = False) -> None:
        """Begin to save a checkpoint. One that cannot be written is told, and the next is tried; the last one must succeed."""
        self._report()
        if self.checkpoints is None:
            return
        self._finish_save(final)
        if self._saved != self.progress.step:
            self.progress.late = self.data.deferred() if self.progress.sample else []
            began = time.perf_counter()
            with interrupts_put_off():
                self.checkpoints.begin(self.step, self.progress)
            self._since = (self._since[0] + time.perf_counter() - began, self._since[1])
            self._saved = self.progress.step
        if final and isinstance(outcome := self._finish_save(final), CheckpointError):
            raise outcome

    def _finish_save(self, final: bool) -> Saved | CheckpointError | None:
        """Wait for the checkpoint that is under way, if there is one. Where that holds training up, it is told."""
        if self.checkpoints is None or not self.checkpoints.under_way:
            return None
        waits, began = self.checkpoints.outcome is None, time.perf_counter()
        outcome = self.checkpoints.finish()
        waited = time.perf_counter() - began
        self._since = (self._since[0] + waited, self._since[1])
        self._tell_save(outcome)
        if isinstance(outcome, CheckpointError):
            self._saved = -1
        elif waits and not final:
            text = f"waited {waited:.1f} s until the checkpoint of step {outcome.step} was written; save less often"
            self.reports.emit("note", step=self.progress.step, text=text)
        return outcome

    def _tell_save(self, outcome: Saved | CheckpointError | None) -> None:
        """Tell, once, of a checkpoint that is written, or cannot be."""
        if outcome is None or outcome is self._told:
            return
        self._told = outcome
        if isinstance(outcome, Saved):
            path, seconds, size = str(outcome.path), outcome.seconds, outcome.bytes
            self.reports.emit("checkpoint", step=outcome.step, path=path, seconds=seconds, bytes=size)
        else:
            self.reports.emit("note", step=self.progress.step, text=f"error: {outcome}")

    def _position(self) -> dict[str, Any]:
        epoch = self.progress.epoch + self.progress.sample / (len(self.data) * self.data.batch_size)
        return {"step": self.progress.step, "epoch": round(epoch, 6), "samples": self.progress.seen}

    def _start(self, resumed: int | None) -> None:
        self.run.begin()
        here = digest(socket.gethostname())
        hosts = gather_numbers([here], self.mesh.everyone, torch.int64).flatten().tolist()
        nodes = self._nodes = len(set(hosts))
        if hosts.index(here) == self.mesh.everyone.rank:
            self.processors = Processors()
        self.reports.emit(
            "start", name=self.run.name, directory=str(self.run.directory or ""), settings=self.run.settings,
            world=self.mesh.world, nodes=nodes, device=str(self.mesh.device), versions=dict(VERSIONS),
            parameters=_parameters(self.step.model, self.mesh),
            steps=self.steps, steps_per_epoch=len(self.data), epochs=self.steps / len(self.data), global_batch=self.data.batch_size,
            train_samples=getattr(self.data, "dataset_size", self.data.samples),  # those from which an epoch's are drawn
            validation_samples=getattr(self.validation, "samples", 0), resumed_from=resumed,
        )  # fmt: skip
        for text in (*(self.checkpoints.notes if self.checkpoints else ()), *self.step.notes):
            self.reports.emit("note", step=self.progress.step, text=text)
        if self.processors is not None and self.processors.closed:
            text = f"energy of processors is not counted where this user may not read it: {self.processors.closed}"
            self.reports.emit("note", step=self.progress.step, text=text)
        if resumed is not None:
            self.reports.emit("note", step=self.progress.step, text=f"resumed from step {resumed}")
