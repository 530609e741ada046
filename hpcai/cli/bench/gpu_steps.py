"""The real training step of each app at its published configurations: forward, backward, clipping, guard and update.

A row is one variant of one case. Batches lie on the device, several different ones in turns.

    ms, samples_s      median over windows of steps in which the host waits for nothing; ``spread_percent`` from the fastest to the
                       slowest window, ``each_ms`` of batches that differ
    ready_s            before that: compilation, capture, choices of cuDNN
    host_ms            what Python takes to launch a step, begun with an empty queue. A step of more launches than the queue has
                       room for (about a thousand) waits for the GPU in it
    gaps_percent       of the step in which the GPU does nothing for more than 20 us; ``idle_percent``: for however short
    tflops, of_rate    by ``gpu_clocks.operations``, and as a share of what this GPU multiplies in bfloat16, just now
    peak_gb            memory of tensors, graphs included; ``graphs_gb``: what these hold for themselves
    joules_per_sample  by the meter of the GPU
    loss, finite       of the first step, which all variants share but for rounding; whether all were, for NaN draws less power
    loader_samples_s   fed from files by the app's own loader; ``loader_lost_percent``: against batches on the device
    published, over    somebody's figure for one GPU of a job, and ours over it. ``published_by`` says of which job: it had ranks
                       to wait for, and a loader
    asked              what we ask of one H200

Weights hardly change: the learning rate is a thousandth of the published one.
"""

import inspect
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from hpcai import config, dist
from hpcai.cli import apps
from hpcai.cli.bench import gpu_clocks as clocks
from hpcai.cli.bench.timing import Row, wait
from hpcai.cli.trial import Case, Subject, find
from hpcai.data import Endless
from hpcai.dist.host import GpuCounters
from hpcai.train import Step
from hpcai.train.replica_check import NEVER
from hpcai.train.capture import close_all

_CAPTURED, _COMPILED = "step.capture=whole", "step.compile=blocks"
VARIANTS: Mapping[str, Sequence[str]] = {
    "eager": (), "captured": (_CAPTURED,), "compiled": (_COMPILED,), "compiled-captured": (_COMPILED, _CAPTURED),
    "captured-tuned": (_CAPTURED, "step.cudnn_benchmark=true"), "tf32": ("step.precision=fp32", "step.tf32=true"),
    "fp32": ("step.precision=fp32", "step.tf32=false"),
}  # fmt: skip
"""ways to run the same step, as key=value words"""
_FED = ("captured", "compiled-captured")  # variants that are also fed by the loader
# What the variants are about: whatever a published configuration says of it, each begins with the same.
_PLAIN = (
    "step.precision=bf16", "step.capture=none", "step.capture_shapes=8", "step.compile=none", "step.compile_cache=null",
    "step.shard_within=null", "step.shard=none", "step.tf32=auto", "step.cudnn_benchmark=false",
)  # fmt: skip
_TINY = ("data.workers=1", "data.processes=false", "data.prefetch=0.01")
BATCHES, STEPS = 4, 20
WARM = 4  # runs of a shape that do not count: two as they are, one that is recorded, one more
WINDOW_S = 10.0  # of steps so long that there would be more in a window, there are fewer
ENERGY_S = 2.0  # at least of windows, which a meter needs
LOADER_S = 3.0  # at least of steps from files: what the loader had ready is then used up
_SAMPLES, _DISK = 64, 4 << 30  # different samples in files, and the most that they may take


def cases() -> list[str]:
    return list(_cases())


def _cases() -> dict[str, tuple[str, Case]]:
    """App and case by the name of both."""
    found = ((app, case) for app in apps.names("trial") for case in find(app).gpu)
    return {f"{app}-{case.name}": (app, case) for app, case in found}


def measure(name: str, words: Any) -> Iterator[Row]:
    """Rows of the case ``name``, one by one."""
    app, case = _cases()[name]
    bench = Bench(name, find(app), case, words)
    for variant in VARIANTS:
        if variant in (words.variants or VARIANTS):
            yield bench.row(variant)


class Bench:
    """What is measured of one case; ``words``: ``tiny``, ``repeats`` and ``rates`` of the command."""

    def __init__(self, name: str, app: Subject, case: Case, words: Any) -> None:
        self.name, self.app, self.case, self.words, self.mesh = name, app, case, words, dist.single_process()
        self.device, self.on_gpu = self.mesh.device, self.mesh.device.type == "cuda"

    def row(self, variant: str) -> Row:
        """What was found of a variant, or why nothing was."""
        head: Row = {"case": self.name, "variant": variant}
        if not self.on_gpu and variant != "eager":
            return {**head, "left_out": f"there is no GPU: this process computes on {self.device.type}"}
        try:
            with _own_settings():
                return head | self._measured(variant)
        except Exception as problem:  # any: the others go on
            return {**head, "failed": clocks.told(problem)}
        finally:
            if self.on_gpu:
                close_all()
                torch._dynamo.reset()  # which keeps the code of a model, and so the model
            clocks.let_go()

    def settings(self, variant: str, turn: Sequence[str] = ()) -> Any:
        tiny = (*_TINY, *self.app.tiny) if self.words.tiny else ()
        path = Path(inspect.getfile(type(self.app))).parent / "configs" / self.case.yaml
        words = (*self.case.words, *tiny, *_PLAIN, *self.case.always, *VARIANTS[variant], *turn)
        return self.app.known(config.load(self.app.published, path, words))

    @cached_property
    def batches(self) -> list[Any]:
        """Batches on the device, all different, in turns."""
        every = [self.settings("eager", turn) for turn in self.case.turns]
        count = math.lcm(len(every), BATCHES) if len(every) <= BATCHES else len(every)
        size = every[0].data.batch
        return [self.app.random_batch(every[i % len(every)], range(i * size, (i + 1) * size), self.device) for i in range(count)]

    @cached_property
    def work(self) -> float | str:
        """Operations of a step, the mean over turns, or why they were not counted: of forward and backward, uncompiled and
        uncaptured."""
        try:
            with _own_settings():
                return self._counted()
        except Exception as problem:  # any: times count more than this
            return f"not counted: {clocks.told(problem)}"
        finally:
            clocks.let_go()

    def _counted(self) -> float:
        step = self._step(self.settings("eager"))
        turns = len(self.case.turns)
        return sum(clocks.operations(partial(step._gradients, batch)) for batch in self.batches[:turns]) / turns

    def _step(self, cfg: Any) -> Step:
        torch.manual_seed(cfg.train.seed)
        model = self.app.build(cfg, self.mesh, self.app.whole(cfg, self.mesh))
        model.train()
        return Step(model, self.app.loss, cfg.step, self.mesh, counts=self.app.counted)

    def _measured(self, variant: str) -> Row:
        cfg, batches, turns, work = self.settings(variant), self.batches, len(self.case.turns), self.work
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        graphs_before = clocks.graph_bytes()
        began = time.perf_counter()
        step, lr = self._step(cfg), 1e-3 * cfg.step.lr
        with self.app.around(self.app.whole(cfg, self.mesh)):

            def run(i: int) -> Any:
                return step(batches[i % len(batches)], lr)

            loss = float(_plain(run(0)["loss"]))
            for i in range(1, WARM * turns if self.on_gpu else turns):
                run(i)
            wait()
            found: Row = {"ready_s": round(time.perf_counter() - began, 2), "loss": loss}
            count = self._count(run)
            each, joules = self._windows(run, count, cfg.data.batch)
            host = []
            for i in range(max(5, turns) if self.on_gpu else 1):
                wait()
                at = time.perf_counter()
                run(i)
                host.append(time.perf_counter() - at)
            wait()
            traced = clocks.traced(run, max(3, turns))
            found |= self._speeds(each, cfg.data.batch, work) | {"host_ms": round(1e3 * statistics.mean(host), 3)}
            found |= {"joules_per_sample": joules, **traced}
            if self.on_gpu:
                peak, own = torch.cuda.max_memory_allocated(), clocks.graph_bytes() - graphs_before
                found |= {"peak_gb": round(peak / 1e9, 3), "graphs_gb": round(own / 1e9, 3)}
            if variant in _FED or not self.on_gpu:
                last = [s for window in each for s in window[turns - 1 :: turns]]
                found |= self._fed(step, variant, lr, statistics.median(last))
        found |= {"finite": int(step.first_failures()[0]) == NEVER}
        return found | ({"notes": news} if (news := [*step.messages, *step.news()]) else {})

    def _count(self, run: Any) -> int:
        """Steps of a window, so many turns: fewer where a step is long."""
        turns = len(self.case.turns)
        if not self.on_gpu:
            return turns
        s = statistics.mean(clocks.window(run, turns))
        return max(min(STEPS, int(WINDOW_S / s)) // turns, 1) * turns

    def _windows(self, run: Any, count: int, samples: int) -> tuple[list[list[float]], float | None]:
        """Seconds of each step of each window, and joules of a sample, where the GPU has a meter."""
        gpu = GpuCounters(self.device)
        before, began = gpu.read().get("energy_j"), time.perf_counter()
        each: list[list[float]] = []
        while len(each) < self.words.repeats or (self.on_gpu and time.perf_counter() - began < ENERGY_S):
            each.append(clocks.window(run, count))
            if len(each) > 1 and time.perf_counter() - began > self.words.seconds:
                break
        after = gpu.read().get("energy_j")
        if before is None or after is None:
            return each, None
        return each, round((after - before) / (len(each) * count * samples), 4)

    def _speeds(self, each: list[list[float]], samples: int, work: float | str) -> Row:
        means = [statistics.mean(window) for window in each]
        s, turns = statistics.median(means), len(self.case.turns)
        speed = samples / s
        row: Row = {
            "samples": self.app.unit, "batch": samples, "samples_s": round(speed, 3), "ms": round(1e3 * s, 3),
            "spread_percent": round(100 * (max(means) - min(means)) / s, 2), "windows": len(each),
        }  # fmt: skip
        if turns > 1:
            turned = ([1e3 * one for window in each for one in window[turn::turns]] for turn in range(turns))
            row["each_ms"] = [round(statistics.median(some), 4) for some in turned]
        if isinstance(work, str):
            row["tflop"] = work
        else:
            tflops = work / s / 1e12
            row |= {"tflop": float(f"{work / 1e12:.5g}"), "tflops": float(f"{tflops:.4g}")}
            row |= {"of_rate": round(tflops / self.words.rates["matrix_tflops"], 4)}
        if self.words.tiny:  # nothing to compare
            return row
        if figure := self.case.figure:
            row |= {"published": figure.per_s, "over": round(speed / figure.per_s, 3)}
            row |= {"published_by": f"{figure.gpu}: {figure.conditions}; {figure.source}"}
        return row | ({"asked": round(self.case.asked, 3)} if self.case.asked else {})

    def _fed(self, step: Step, variant: str, lr: float, resident_s: float) -> Row:
        """The same step, its batches read from files and copied to the device while it computes."""
        cfg = self.settings(variant, self.case.turns[-1])
        batch = cfg.data.batch
        try:
            rows = max(2 * batch, min(_SAMPLES, _DISK // self.app.sample_bytes(cfg)) if self.on_gpu else 0)
            steps = max(math.ceil(LOADER_S / resident_s), min(STEPS, int(WINDOW_S / resident_s)), 4) if self.on_gpu else 2
            warm = WARM if self.on_gpu else 1
            cfg = self.app.in_files(cfg, rows, ("train",))
            words = {"sampler": Endless(rows, (warm + steps) * batch), "accumulate": cfg.step.accumulate}
            with (
                self.app.loader(cfg, self.mesh, "train", name="train", **words) as loader,
                closing(loader.epoch(0)) as batches,
            ):
                for part in itertools.islice(batches, warm):
                    step(part, lr)
                wait()
                began, count = time.perf_counter(), 0
                for part in batches:
                    step(part, lr)
                    count += 1
                wait()
                s = (time.perf_counter() - began) / count
        except Exception as problem:  # any: what was measured without files counts all the same
            return {"loader": f"failed: {clocks.told(problem)}"}
        return {"loader_samples_s": round(batch / s, 3), "loader_lost_percent": round(100 * (1 - resident_s / s), 2)}


def _plain(value: Any) -> Any:
    """A loss that is a pair (sum, count) as a mean."""
    return value[0] / value[1] if isinstance(value, tuple) else value


@contextmanager
def _own_settings() -> Iterator[None]:
    """What a step sets for the whole process is afterwards what it was."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


def forms() -> list[str]:
    return list(VARIANTS)
