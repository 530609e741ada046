"""``hpcai bench APP [PART ...] [key=value ...]``: compare a training step of an app with its plain implementation, on equal
samples.

    steps      time of a step of each implementation, alternating: ours, and a straightforward one trained by torch alone
    memory     peak memory of a few steps of each implementation, in its own process

Without a PART: both. Times are CPU seconds of one thread, or wall seconds on a GPU (whose captured steps ``hpcai bench gpu``
measures); medians. key=value arguments are settings of the app, measured instead of its default cases. ``--precision auto`` is the
default of an app; the plain implementation is then measured in float32, its natural choice. ``--peers`` also measures the same
network in public packages, if they are installed (pip install 'hpcai-suite[peers]').
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from hpcai import dist
from hpcai.cli import make_parser
from hpcai.cli.bench.timing import Row, alternate, machine_info, peak_mb, print_results, run_in_subprocess, synchronize
from hpcai.cli.benchmarks import Implementation, Workload, find_workload, torch_optimizer
from hpcai.errors import ConfigError
from hpcai.train import rng
from hpcai.train.optim import match_names

PARTS = ("steps", "memory")


def main(name: str, argv: Sequence[str]) -> int:
    benchmark = AppBenchmark(name, find_workload(name), argv)
    if benchmark.args.peak:  # a child process that measures one implementation
        print(json.dumps(benchmark.peak(benchmark.args.peak, benchmark.override_sets[0])))
        return 0
    result = {"bench": name, **machine_info(), **{part: benchmark.run_part(part) for part in benchmark.parts}}
    missing = [peer.package for peer in benchmark.workload.peers.values() if not find_spec(peer.package)]
    if benchmark.args.peers and missing:
        result["left_out"] = {"left out": f"not installed: {', '.join(missing)} (pip install 'hpcai-suite[peers]')"}
    return print_results(result, (*benchmark.parts, "left_out"), benchmark.args.json)


class AppBenchmark:
    """The benchmark of one app, configured by command line arguments."""

    def __init__(self, name: str, workload: Workload, argv: Sequence[str]) -> None:
        self.name, self.workload, self.on_gpu = name, workload, torch.cuda.is_available()
        parser = make_parser(f"bench {name}", __doc__, "bench APP", parts=", ".join(PARTS))
        parser.set_defaults(precision=["bf16" if self.on_gpu else "fp32"])
        self.args = parser.parse_intermixed_args(argv)
        parts = [arg for arg in self.args.items if "=" not in arg]
        if unknown := [part for part in parts if part not in PARTS]:
            parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        self.parts = parts or list(PARTS)
        settings = [arg for arg in self.args.items if "=" in arg]
        self.override_sets = [settings] if settings else [list(case) for case in workload.default_overrides(self.on_gpu)]
        torch.set_num_threads(1)
        self.mesh = dist.single_process()

    def run_part(self, part: str) -> list[Row]:
        """Return the rows of a part. The first column has the settings of a case; long mappings are truncated."""
        rows = []
        for case in self.override_sets:
            pairs = (word.partition("=") for word in case)
            settings = ", ".join(f"{name.rpartition('.')[2]} {shorten(value, 32)}" for name, _, value in pairs)
            rows += [{"case": settings or "usual", **row} for row in getattr(self, f"_{part}")(case)]
        return rows

    def settings(self, case: Sequence[str], *more: str) -> Any:
        return self.workload.complete_settings(self.workload.load([*case, *more]))

    def implementations(self, case: Sequence[str]) -> list[str]:
        """Return the names of all implementations, ours last."""
        plain = self.workload.implementations(self.settings(case), None, self.mesh)
        peers = [name for name, peer in self.workload.peers.items() if self.args.peers and find_spec(peer.package)]
        return [*plain, *peers, *self.workload.variants, "ours"]

    def training_step(self, name: str, case: Sequence[str], precision: str = "fp32") -> Callable[[], Tensor]:
        """Return a training step of an implementation, a function that returns the loss."""
        overrides = self.workload.variants.get(name, ())
        cfg = self.settings(case, f"step.precision={precision}", *overrides)
        batch = self.workload.random_batch(cfg, range(cfg.data.batch), self.mesh.device)
        torch.manual_seed(cfg.train.seed)
        if name == "ours" or overrides:
            step: Any = self.workload.build_step(cfg, self.mesh)
            return lambda: step(batch)["loss"]
        peer = self.workload.peers.get(name)
        implementation = peer.build(cfg, batch) if peer else self.workload.implementations(cfg, batch, self.mesh)[name]()
        run = torch_training_step(implementation, cfg, batch, self.mesh.device)

        def seeded() -> Tensor:
            rng.seed_step(cfg.train.seed, 0, 0)  # the dropout masks of our first step
            return run()

        return seeded

    def _steps(self, case: Sequence[str]) -> list[Row]:
        rows = []
        for precision in self.args.precision:
            names = [name for name in self.implementations(case) if name not in self.workload.variants]
            seconds = alternate({name: self.training_step(name, case, precision) for name in names}, self.args.repeats)
            rows.append({"precision": precision, **timing_row(seconds)})
            gc.collect()
        return rows

    def _memory(self, case: Sequence[str]) -> list[Row]:
        args, peers = ["memory", *case], ["--peers"] if self.args.peers else []
        peak = {}
        for name in self.implementations(case):
            result = run_in_subprocess([self.name, *args, *peers, "--peak", name], environ={"OMP_NUM_THREADS": "1"})
            peak[name] = result.get("mb")
        ratios = {f"ours_over_{name}": round(peak["ours"] / mb, 3) for name, mb in peak.items() if mb and name != "ours"}
        return [{**{f"{name}_mb": mb if mb is None else round(mb) for name, mb in peak.items()}, **ratios}]

    def peak(self, name: str, case: Sequence[str]) -> Row:
        """Return the peak memory of this process after three steps."""
        run = self.training_step(name, case, self.args.precision[0])
        for _ in range(3):
            run()
        synchronize()
        return {"mb": peak_mb()}


def timing_row(seconds: Mapping[str, float]) -> Row:
    """Return the seconds of all implementations, and their ratios to ours."""
    ratios = {f"{name}_over_ours": round(s / seconds["ours"], 3) for name, s in seconds.items() if name != "ours"}
    return {f"{name}_s": round(s, 6) for name, s in seconds.items()} | ratios


def torch_training_step(implementation: Implementation, cfg: Any, batch: Any, device: torch.device) -> Callable[[], Tensor]:
    """Return a straightforward training step with torch's optimizer, a function that returns the loss."""
    model, autocast = implementation.model.to(device), cfg.step.precision == "bf16"
    try:
        decays = match_names(model, cfg.step)
    except ConfigError:  # a peer has other parameter names
        decays = set()
    optimizer = torch_optimizer(model, cfg.step, decays)
    averages = [p.detach().clone() for p in model.parameters()] if cfg.step.ema_decay is not None else []

    def run() -> Tensor:
        optimizer.zero_grad()
        with implementation.context():
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                value: Tensor = implementation.loss(model, batch)["loss"]
            value.backward()
        if cfg.step.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.step.clip)
        optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters()):
                average.lerp_(parameter, 1 - (cfg.step.ema_decay or 0.999))
        return value.detach()

    return run
