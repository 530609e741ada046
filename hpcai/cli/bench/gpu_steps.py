"""The complete training step of each app at its published configurations: forward, backward, clipping, guard and update.

A row is one variant of one case; docs/benchmarks.md ("One GPU") lists its columns. Steps cycle through several different batches on
the device. Weights hardly change: the learning rate is a thousandth of the published one.
"""

import inspect
import itertools
import math
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from hpcai import config, dist
from hpcai.cli import apps
from hpcai.cli.bench import timing
from hpcai.cli.bench.timing import Row, synchronize
from hpcai.cli.benchmarks import Case, Workload, find_workload
from hpcai.data import Endless
from hpcai.dist.host import GpuCounters
from hpcai.train import Step
from hpcai.train.capture import close_all
from hpcai.train.replica_check import NEVER

_SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VARIANTS: Mapping[str, Sequence[str]] = _SETTINGS["variants"]
_LOADER_VARIANTS = ("captured", "compiled-captured")  # variants that are also measured with the loader
_BASE_OVERRIDES, _TINY = _SETTINGS["base"], _SETTINGS["tiny"]
BATCHES, STEPS = 4, 20
WARMUP = 4  # untimed runs of a shape: two eager ones, one that is captured, one more
WINDOW_S = 10.0  # seconds of a window at most, given by its number of steps
ENERGY_S = 2.0  # seconds of windows at least, for the energy counter
LOADER_S = 3.0  # seconds of steps from files at least, which use up the prefetched batches
_SAMPLES, _DISK = 64, 4 << 30  # different samples in files, and their maximum bytes


def cases() -> dict[str, tuple[str, Case]]:
    pairs = ((app, case) for app in apps.with_part("benchmarks") for case in find_workload(app).gpu_cases)
    return {f"{app}-{case.name}": (app, case) for app, case in pairs}


def measure(name: str, args: Any) -> Iterator[Row]:
    app, case = cases()[name]
    benchmark = StepBenchmark(name, find_workload(app), case, args)
    for variant in VARIANTS:
        if variant in (args.variants or VARIANTS):
            yield benchmark.row(variant)


class StepBenchmark:
    """The benchmark of one case. ``args``: ``tiny``, ``repeats`` and ``rates`` of the command."""

    def __init__(self, name: str, workload: Workload, case: Case, args: Any) -> None:
        self.name, self.workload, self.case, self.args, self.mesh = name, workload, case, args, dist.single_process()
        self.device, self.on_gpu = self.mesh.device, self.mesh.device.type == "cuda"

    def row(self, variant: str) -> Row:
        """Return the results of a variant, or the reason why there are none."""
        head: Row = {"case": self.name, "variant": variant}
        if not self.on_gpu and variant != "eager":
            return {**head, "left_out": f"there is no GPU: this process computes on {self.device.type}"}
        try:
            with _restore_backend_flags():
                return head | self._measure(variant)
        except Exception as error:  # any: the other variants continue
            return {**head, "failed": timing.describe_error(error)}
        finally:
            if self.on_gpu:
                close_all()
                torch._dynamo.reset()  # its compiled code keeps the model alive
            timing.free_memory()

    def settings(self, variant: str, step_variant: Sequence[str] = ()) -> Any:
        tiny = (*_TINY, *self.workload.tiny) if self.args.tiny else ()
        path = Path(inspect.getfile(type(self.workload))).parent / "configs" / self.case.yaml
        overrides = (*_BASE_OVERRIDES, *self.case.overrides, *tiny, *VARIANTS[variant], *step_variant)
        return self.workload.complete_settings(config.load(self.workload.settings, path, overrides))

    @cached_property
    def batches(self) -> list[Any]:
        """Batches on the device, all different, cycling through the step variants."""
        cfgs = [self.settings("eager", variant) for variant in self.case.step_variants]
        count = math.lcm(len(cfgs), BATCHES) if len(cfgs) <= BATCHES else len(cfgs)
        size = cfgs[0].data.batch
        return [self.workload.random_batch(cfgs[i % len(cfgs)], range(i * size, (i + 1) * size), self.device) for i in range(count)]

    @cached_property
    def flops(self) -> float | str:
        """FLOPs of a step, the mean over step variants, or the error: of forward and backward, neither compiled nor captured."""
        try:
            with _restore_backend_flags():
                step, variants = self.workload.build_step(self.settings("eager"), self.mesh), len(self.case.step_variants)
                return sum(timing.count_flops(partial(step._gradients, batch)) for batch in self.batches[:variants]) / variants
        except Exception as error:  # any: the times are still valid
            return f"not counted: {timing.describe_error(error)}"
        finally:
            timing.free_memory()

    def _measure(self, variant: str) -> Row:
        cfg, batches, variants, flops = self.settings(variant), self.batches, len(self.case.step_variants), self.flops
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        graphs_before = timing.graph_bytes()
        start = time.perf_counter()
        step, lr = self.workload.build_step(cfg, self.mesh), 1e-3 * cfg.step.lr
        with self.workload.context(self.workload.available_switches(cfg, self.mesh)):

            def run(i: int) -> Any:
                return step(batches[i % len(batches)], lr)

            loss = run(0)["loss"]
            loss = float(loss[0] / loss[1] if isinstance(loss, tuple) else loss)  # a loss may be a pair (sum, count)
            for i in range(1, WARMUP * variants if self.on_gpu else variants):
                run(i)
            synchronize()
            row: Row = {"ready_s": round(time.perf_counter() - start, 2), "loss": loss}
            count = variants  # steps of a window, a multiple of the step variants: fewer if a step is long
            if self.on_gpu:
                step_s = statistics.mean(timing.time_window(run, variants))
                count = max(min(STEPS, int(WINDOW_S / step_s)) // variants, 1) * variants
            windows, joules = self._time_windows(run, count, cfg.data.batch)
            host = []
            for i in range(max(5, variants) if self.on_gpu else 1):
                synchronize()
                launched = time.perf_counter()
                run(i)
                host.append(time.perf_counter() - launched)
            synchronize()
            profile = timing.profile(run, max(3, variants))
            row |= self._rate_row(windows, cfg.data.batch, flops) | {"host_ms": round(1e3 * statistics.mean(host), 3)}
            row |= {"joules_per_sample": joules, **profile}
            if self.on_gpu:
                peak, graph_bytes = torch.cuda.max_memory_allocated(), timing.graph_bytes() - graphs_before
                row |= {"peak_gb": round(peak / 1e9, 3), "graphs_gb": round(graph_bytes / 1e9, 3)}
            if variant in _LOADER_VARIANTS or not self.on_gpu:
                last_variant = [s for window in windows for s in window[variants - 1 :: variants]]
                row |= self._loader_row(step, variant, lr, statistics.median(last_variant))
        row |= {"finite": int(step.first_failures()[0]) == NEVER}
        return row | ({"notes": messages} if (messages := [*step.messages, *step.news()]) else {})

    def _time_windows(self, run: Any, count: int, samples: int) -> tuple[list[list[float]], float | None]:
        """Return the seconds of each step of each window, and joules per sample, if the GPU has an energy counter."""
        gpu = GpuCounters(self.device)
        before, start = gpu.read().get("energy_j"), time.perf_counter()
        windows: list[list[float]] = []
        while len(windows) < self.args.repeats or (self.on_gpu and time.perf_counter() - start < ENERGY_S):
            windows.append(timing.time_window(run, count))
            if len(windows) > 1 and time.perf_counter() - start > self.args.seconds:
                break
        after = gpu.read().get("energy_j")
        if before is None or after is None:
            return windows, None
        return windows, round((after - before) / (len(windows) * count * samples), 4)

    def _rate_row(self, windows: list[list[float]], samples: int, flops: float | str) -> Row:
        means = [statistics.mean(window) for window in windows]
        s, variants = statistics.median(means), len(self.case.step_variants)
        speed = samples / s
        row: Row = {
            "samples": self.workload.unit, "batch": samples, "samples_s": round(speed, 3), "ms": round(1e3 * s, 3),
            "spread_percent": round(100 * (max(means) - min(means)) / s, 2), "windows": len(windows),
        }  # fmt: skip
        if variants > 1:
            by_variant = ([1e3 * seconds for window in windows for seconds in window[index::variants]] for index in range(variants))
            row["each_ms"] = [round(statistics.median(times), 4) for times in by_variant]
        if isinstance(flops, str):
            row["tflop"] = flops
        else:
            tflops = flops / s / 1e12
            row |= {"tflop": float(f"{flops / 1e12:.5g}"), "tflops": float(f"{tflops:.4g}")}
            row |= {"of_rate": round(tflops / self.args.rates["matrix_tflops"], 4)}
        if self.args.tiny:  # not comparable
            return row
        if published := self.case.published:
            row |= {"published": published.samples_per_s, "over": round(speed / published.samples_per_s, 3)}
            row |= {"published_by": f"{published.gpu}: {published.conditions}; {published.source}"}
        return row | ({"asked": round(self.case.goal, 3)} if self.case.goal else {})

    def _loader_row(self, step: Step, variant: str, lr: float, resident_s: float) -> Row:
        """Measure the same step with batches read from files and copied to the device meanwhile."""
        cfg = self.settings(variant, self.case.step_variants[-1])
        batch = cfg.data.batch
        try:
            rows = max(2 * batch, min(_SAMPLES, _DISK // self.workload.sample_bytes(cfg)) if self.on_gpu else 0)
            steps = max(math.ceil(LOADER_S / resident_s), min(STEPS, int(WINDOW_S / resident_s)), 4) if self.on_gpu else 2
            warm = WARMUP if self.on_gpu else 1
            cfg = self.workload.write_files(cfg, rows, ("train",))
            kwargs = {"sampler": Endless(rows, (warm + steps) * batch), "accumulate": cfg.step.accumulate}
            with (
                self.workload.loader(cfg, self.mesh, "train", name="train", **kwargs) as loader,
                closing(loader.epoch(0)) as batches,
            ):
                for loaded in itertools.islice(batches, warm):
                    step(loaded, lr)
                synchronize()
                start, count = time.perf_counter(), 0
                for loaded in batches:
                    step(loaded, lr)
                    count += 1
                synchronize()
                s = (time.perf_counter() - start) / count
        except Exception as error:  # any: the results without files are still valid
            return {"loader": f"failed: {timing.describe_error(error)}"}
        return {"loader_samples_s": round(batch / s, 3), "loader_lost_percent": round(100 * (1 - resident_s / s), 2)}


@contextmanager
def _restore_backend_flags() -> Iterator[None]:
    """Context manager that restores the backend flags of the process, which a step sets."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before
