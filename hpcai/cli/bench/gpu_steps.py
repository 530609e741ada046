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
from hpcai.cli.bench.timing import Row, synchronize
from hpcai.cli.benchmarks import Case, Workload, find_workload
from hpcai.data import Endless
from hpcai.dist.host import Gpu
from hpcai.train import Step
from hpcai.train.agreement import NEVER
from hpcai.train.capture import close_all

_CAPTURED, _COMPILED = "step.capture=whole", "step.compile=blocks"
VARIANTS: Mapping[str, Sequence[str]] = {
    "eager": (), "captured": (_CAPTURED,), "compiled": (_COMPILED,), "compiled-captured": (_COMPILED, _CAPTURED),
    "captured-tuned": (_CAPTURED, "step.cudnn_benchmark=true"), "tf32": ("step.precision=fp32", "step.tf32=true"),
    "fp32": ("step.precision=fp32", "step.tf32=false"),
}  # fmt: skip
"""ways to run the same step, as key=value words"""
_LOADER_VARIANTS = ("captured", "compiled-captured")  # variants that are also fed by the loader
# What the variants are about: whatever a published configuration says of it, each begins with the same.
_BASE_OVERRIDES = (
    "step.precision=bf16", "step.capture=none", "step.capture_shapes=8", "step.compile=none", "step.compile_cache=null",
    "step.shard_within=null", "step.shard=none", "step.tf32=auto", "step.cudnn_benchmark=false",
)  # fmt: skip
_TINY = ("data.workers=1", "data.processes=false", "data.prefetch=0.01")
BATCHES, STEPS = 4, 20
WARMUP = 4  # runs of a shape that do not count: two as they are, one that is recorded, one more
WINDOW_S = 10.0  # of steps so long that there would be more in a window, there are fewer
ENERGY_S = 2.0  # at least of windows, which a meter needs
LOADER_S = 3.0  # at least of steps from files: what the loader had ready is then used up
_SAMPLES, _DISK = 64, 4 << 30  # different samples in files, and the most that they may take


def cases() -> list[str]:
    return list(_cases())


def _cases() -> dict[str, tuple[str, Case]]:
    """App and case by the name of both."""
    found = ((app, case) for app in apps.with_part("benchmarks") for case in find_workload(app).gpu_cases)
    return {f"{app}-{case.name}": (app, case) for app, case in found}


def measure(name: str, words: Any) -> Iterator[Row]:
    """Rows of the case ``name``, one by one."""
    app, case = _cases()[name]
    bench = StepBenchmark(name, find_workload(app), case, words)
    for variant in VARIANTS:
        if variant in (words.variants or VARIANTS):
            yield bench.row(variant)


class StepBenchmark:
    """What is measured of one case; ``words``: ``tiny``, ``repeats`` and ``rates`` of the command."""

    def __init__(self, name: str, app: Workload, case: Case, words: Any) -> None:
        self.name, self.workload, self.case, self.args, self.mesh = name, app, case, words, dist.alone()
        self.device, self.on_gpu = self.mesh.device, self.mesh.device.type == "cuda"

    def row(self, variant: str) -> Row:
        """What was found of a variant, or why nothing was."""
        head: Row = {"case": self.name, "variant": variant}
        if not self.on_gpu and variant != "eager":
            return {**head, "left_out": f"there is no GPU: this process computes on {self.device.type}"}
        try:
            with _restore_backend_flags():
                return head | self._measure(variant)
        except Exception as problem:  # any: the others go on
            return {**head, "failed": clocks.describe_error(problem)}
        finally:
            if self.on_gpu:
                close_all()
                torch._dynamo.reset()  # which keeps the code of a model, and so the model
            clocks.free_memory()

    def settings(self, variant: str, turn: Sequence[str] = ()) -> Any:
        tiny = (*_TINY, *self.workload.tiny) if self.args.tiny else ()
        path = Path(inspect.getfile(type(self.workload))).parent / "configs" / self.case.yaml
        words = (*self.case.overrides, *tiny, *_BASE_OVERRIDES, *self.case.base_overrides, *VARIANTS[variant], *turn)
        return self.workload.complete_settings(config.load(self.workload.published_settings, path, words))

    @cached_property
    def batches(self) -> list[Any]:
        """Batches on the device, all different, in turns."""
        every = [self.settings("eager", turn) for turn in self.case.step_variants]
        count = math.lcm(len(every), BATCHES) if len(every) <= BATCHES else len(every)
        size = every[0].data.batch
        return [self.workload.random_batch(every[i % len(every)], range(i * size, (i + 1) * size), self.device) for i in range(count)]

    @cached_property
    def flops(self) -> float | str:
        """Operations of a step, the mean over turns, or why they were not counted: of forward and backward, uncompiled and
        uncaptured."""
        try:
            with _restore_backend_flags():
                return self._count_flops()
        except Exception as problem:  # any: times count more than this
            return f"not counted: {clocks.describe_error(problem)}"
        finally:
            clocks.free_memory()

    def _count_flops(self) -> float:
        step = self._step(self.settings("eager"))
        turns = len(self.case.step_variants)
        return sum(clocks.count_flops(partial(step._gradients, batch)) for batch in self.batches[:turns]) / turns

    def _step(self, cfg: Any) -> Step:
        torch.manual_seed(cfg.train.seed)
        model = self.workload.build(cfg, self.mesh, self.workload.available_switches(cfg, self.mesh))
        model.train()
        return Step(model, self.workload.loss, cfg.step, self.mesh, counts=self.workload.counts)

    def _measure(self, variant: str) -> Row:
        cfg, batches, turns, work = self.settings(variant), self.batches, len(self.case.step_variants), self.flops
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        graphs_before = clocks.graph_bytes()
        began = time.perf_counter()
        step, lr = self._step(cfg), 1e-3 * cfg.step.lr
        with self.workload.context(self.workload.available_switches(cfg, self.mesh)):

            def run(i: int) -> Any:
                return step(batches[i % len(batches)], lr)

            loss = float(_mean_loss(run(0)["loss"]))
            for i in range(1, WARMUP * turns if self.on_gpu else turns):
                run(i)
            synchronize()
            found: Row = {"ready_s": round(time.perf_counter() - began, 2), "loss": loss}
            count = self._window_steps(run)
            each, joules = self._time_windows(run, count, cfg.data.batch)
            host = []
            for i in range(max(5, turns) if self.on_gpu else 1):
                synchronize()
                at = time.perf_counter()
                run(i)
                host.append(time.perf_counter() - at)
            synchronize()
            traced = clocks.profile(run, max(3, turns))
            found |= self._rate_row(each, cfg.data.batch, work) | {"host_ms": round(1e3 * statistics.mean(host), 3)}
            found |= {"joules_per_sample": joules, **traced}
            if self.on_gpu:
                peak, own = torch.cuda.max_memory_allocated(), clocks.graph_bytes() - graphs_before
                found |= {"peak_gb": round(peak / 1e9, 3), "graphs_gb": round(own / 1e9, 3)}
            if variant in _LOADER_VARIANTS or not self.on_gpu:
                last = [s for window in each for s in window[turns - 1 :: turns]]
                found |= self._loader_row(step, variant, lr, statistics.median(last))
        found |= {"finite": int(step.first_bad()[0]) == NEVER}
        return found | ({"notes": news} if (news := [*step.notes, *step.news()]) else {})

    def _window_steps(self, run: Any) -> int:
        """Steps of a window, so many turns: fewer where a step is long."""
        turns = len(self.case.step_variants)
        if not self.on_gpu:
            return turns
        s = statistics.mean(clocks.time_window(run, turns))
        return max(min(STEPS, int(WINDOW_S / s)) // turns, 1) * turns

    def _time_windows(self, run: Any, count: int, samples: int) -> tuple[list[list[float]], float | None]:
        """Seconds of each step of each window, and joules of a sample, where the GPU has a meter."""
        gpu = Gpu(self.device)
        before, began = gpu.readings().get("energy_j"), time.perf_counter()
        each: list[list[float]] = []
        while len(each) < self.args.repeats or (self.on_gpu and time.perf_counter() - began < ENERGY_S):
            each.append(clocks.time_window(run, count))
            if len(each) > 1 and time.perf_counter() - began > self.args.seconds:
                break
        after = gpu.readings().get("energy_j")
        if before is None or after is None:
            return each, None
        return each, round((after - before) / (len(each) * count * samples), 4)

    def _rate_row(self, each: list[list[float]], samples: int, work: float | str) -> Row:
        means = [statistics.mean(window) for window in each]
        s, turns = statistics.median(means), len(self.case.step_variants)
        speed = samples / s
        row: Row = {
            "samples": self.workload.unit, "batch": samples, "samples_s": round(speed, 3), "ms": round(1e3 * s, 3),
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
            row |= {"of_rate": round(tflops / self.args.rates["matrix_tflops"], 4)}
        if self.args.tiny:  # nothing to compare
            return row
        if figure := self.case.published:
            row |= {"published": figure.samples_per_s, "over": round(speed / figure.samples_per_s, 3)}
            row |= {"published_by": f"{figure.gpu}: {figure.conditions}; {figure.source}"}
        return row | ({"asked": round(self.case.goal, 3)} if self.case.goal else {})

    def _loader_row(self, step: Step, variant: str, lr: float, resident_s: float) -> Row:
        """The same step, its batches read from files and copied to the device while it computes."""
        cfg = self.settings(variant, self.case.step_variants[-1])
        batch = cfg.data.batch
        try:
            rows = max(2 * batch, min(_SAMPLES, _DISK // self.workload.sample_bytes(cfg)) if self.on_gpu else 0)
            steps = max(math.ceil(LOADER_S / resident_s), min(STEPS, int(WINDOW_S / resident_s)), 4) if self.on_gpu else 2
            warm = WARMUP if self.on_gpu else 1
            cfg = self.workload.write_files(cfg, rows, ("train",))
            words = {"sampler": Endless(rows, (warm + steps) * batch), "accumulate": cfg.step.accumulate}
            with (
                self.workload.loader(cfg, self.mesh, "train", name="train", **words) as loader,
                closing(loader.epoch(0)) as batches,
            ):
                for part in itertools.islice(batches, warm):
                    step(part, lr)
                synchronize()
                began, count = time.perf_counter(), 0
                for part in batches:
                    step(part, lr)
                    count += 1
                synchronize()
                s = (time.perf_counter() - began) / count
        except Exception as problem:  # any: what was measured without files counts all the same
            return {"loader": f"failed: {clocks.describe_error(problem)}"}
        return {"loader_samples_s": round(batch / s, 3), "loader_lost_percent": round(100 * (1 - resident_s / s), 2)}


def _mean_loss(value: Any) -> Any:
    """A loss that is a pair (sum, count) as a mean."""
    return value[0] / value[1] if isinstance(value, tuple) else value


@contextmanager
def _restore_backend_flags() -> Iterator[None]:
    """What a step sets for the whole process is afterwards what it was."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


def variants() -> list[str]:
    return list(VARIANTS)
