"""``hpcai bench APP [PART ...] [key=value ...]``: a training step of an app against its plain form, on the same random samples.

    steps      a step of each form, in turns: ours, and the same network as one would write it first, trained by torch alone
    memory     the peak of some steps of each form, in a process of its own

Without a PART: both. Times are CPU seconds of one thread, wall seconds on a GPU (whose captured steps are
measured by ``hpcai bench gpu``); medians. key=value words are settings of the app, measured in place of its usual cases.
``--precision auto`` is what an app takes; the plain form is then measured in float32, as somebody who writes it first would run it.
``--peers`` also measures the same network in public packages, where these are installed (pip install 'hpcai-suite[peers]').
"""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from hpcai import config, dist
from hpcai.cli.bench.timing import (
    Row,
    machine_info,
    make_parser,
    peak_memory_mb,
    print_results,
    run_in_subprocess,
    synchronize,
    time_alternately,
)
from hpcai.cli.benchmarks import Implementation, Workload, find_workload, torch_optimizer
from hpcai.errors import ConfigError
from hpcai.train import Step, rng
from hpcai.train.optim import decayed

PARTS = ("steps", "memory")


def main(name: str, argv: Sequence[str]) -> int:
    bench = AppBenchmark(name, find_workload(name), argv)
    if bench.args.peak:  # the process that another one started to measure one form
        print(json.dumps(bench.peak(bench.args.peak, bench.override_sets[0])))
        return 0
    found = {"bench": name, **machine_info(), **{part: bench.run_part(part) for part in bench.parts}}
    return print_results(found | bench.missing_peers(), (*bench.parts, "left_out"), bench.args.json)


class AppBenchmark:
    """What is measured of one app, as the words of the command have it."""

    def __init__(self, name: str, subject: Workload, argv: Sequence[str]) -> None:
        self.name, self.workload, self.on_gpu = name, subject, torch.cuda.is_available()
        made = make_parser(name, __doc__)
        made.add_argument("given", nargs="*", metavar="PART|key=value", help=f"parts are {', '.join(PARTS)}")
        made.add_argument("--repeats", type=int, default=3, help="measured steps of each form")
        made.add_argument("--precision", nargs="+", choices=("auto", "fp32", "bf16", "bf16-params"),
                          default=["bf16" if self.on_gpu else "fp32"])  # fmt: skip
        made.add_argument("--peers", action="store_true", help="also public packages")
        made.add_argument("--peak", metavar="FORM", help="the peak of memory of one form, in this process")
        self.args = made.parse_intermixed_args(argv)
        parts = [word for word in self.args.given if "=" not in word]
        if unknown := [part for part in parts if part not in PARTS]:
            made.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        self.parts = parts or list(PARTS)
        settings = [word for word in self.args.given if "=" in word]
        self.override_sets = [settings] if settings else [list(case) for case in subject.default_overrides(self.on_gpu)]
        torch.set_num_threads(1)
        self.mesh = dist.alone()

    def run_part(self, part: str) -> list[Row]:
        return [{**case_column(case), **row} for case in self.override_sets for row in getattr(self, f"_{part}")(case)]

    def missing_peers(self) -> Row:
        missing = [peer.package for peer in self.workload.peers.values() if not find_spec(peer.package)]
        text = f"not installed: {', '.join(missing)} (pip install 'hpcai-suite[peers]')"
        return {"left_out": {"left out": text}} if self.args.peers and missing else {}

    def settings(self, case: Sequence[str], *more: str) -> Any:
        return self.workload.complete_settings(config.load(self.workload.settings, None, [*case, *more]))

    def implementations(self, case: Sequence[str]) -> list[str]:
        """Names of all forms, ours the last of them."""
        plain = self.workload.implementations(self.settings(case), None, self.mesh)
        peers = [name for name, peer in self.workload.peers.items() if self.args.peers and find_spec(peer.package)]
        return [*plain, *peers, *self.workload.variants, "ours"]

    def training_step(self, name: str, case: Sequence[str], precision: str = "fp32") -> Callable[[], Tensor]:
        """A training step of a form, which returns the loss."""
        changes = self.workload.variants.get(name, ())
        cfg = self.settings(case, f"step.precision={precision}", *changes)
        batch = self.workload.random_batch(cfg, range(cfg.data.batch), self.mesh.device)
        torch.manual_seed(cfg.train.seed)
        if name == "ours" or changes:
            step = self.build_step(cfg)
            return lambda: step(batch)["loss"]
        peer = self.workload.peers.get(name)
        form = peer.build(cfg, batch) if peer else self.workload.implementations(cfg, batch, self.mesh)[name]()
        run = torch_training_step(form, cfg, batch, self.mesh.device)

        def seeded() -> Tensor:
            rng.seed_step(cfg.train.seed, 0, 0)  # the dropout of our first step
            return run()

        return seeded

    def build_step(self, cfg: Any) -> Step:
        model = self.workload.build(cfg, self.mesh, self.workload.available_switches(cfg, self.mesh))
        return Step(model, self.workload.loss, cfg.step, self.mesh, counts=self.workload.counts)

    # ---- parts

    def _steps(self, case: Sequence[str]) -> list[Row]:
        rows = []
        for precision in self.args.precision:
            names = [name for name in self.implementations(case) if name not in self.workload.variants]
            spent = time_alternately({name: self.training_step(name, case, precision) for name in names}, self.args.repeats)
            rows.append({"precision": precision, **timing_row(spent)})
            gc.collect()
        return rows

    def _memory(self, case: Sequence[str]) -> list[Row]:
        words, peers = ["memory", *case], ["--peers"] if self.args.peers else []
        peak = {}
        for name in self.implementations(case):
            found = run_in_subprocess([self.name, *words, *peers, "--peak", name], environ={"OMP_NUM_THREADS": "1"})
            peak[name] = found.get("mb")
        ratios = {f"ours_over_{name}": round(peak["ours"] / mb, 3) for name, mb in peak.items() if mb and name != "ours"}
        return [{**{f"{name}_mb": mb if mb is None else round(mb) for name, mb in peak.items()}, **ratios}]

    def peak(self, name: str, case: Sequence[str]) -> Row:
        """The most memory that this process has held after three steps."""
        run = self.training_step(name, case, self.args.precision[0])
        for _ in range(3):
            run()
        synchronize()
        return {"mb": peak_memory_mb()}


def case_column(case: Sequence[str]) -> Row:
    """The settings of a case as the first column of its row, of which mappings of many keys are cut off."""
    pairs = (word.partition("=") for word in case)
    return {"case": ", ".join(f"{name.rpartition('.')[2]} {shorten(value, 32)}" for name, _, value in pairs) or "usual"}


def timing_row(spent: Mapping[str, float]) -> Row:
    """Seconds of all forms, and how many times slower than ours the others are."""
    ratios = {f"{name}_over_ours": round(s / spent["ours"], 3) for name, s in spent.items() if name != "ours"}
    return {f"{name}_s": round(s, 6) for name, s in spent.items()} | ratios


def torch_training_step(form: Implementation, cfg: Any, batch: Any, device: torch.device) -> Callable[[], Tensor]:
    """A training step as one would write it first, with torch's optimizer; returns the loss."""
    model, narrow = form.model.to(device), cfg.step.precision == "bf16"
    try:
        decays = decayed(model, cfg.step)
    except ConfigError:  # the names of a peer's parameters are others
        decays = set()
    optimizer = torch_optimizer(model, cfg.step, decays)
    means = [p.detach().clone() for p in model.parameters()] if cfg.step.average is not None else []

    def run() -> Tensor:
        optimizer.zero_grad()
        with form.context():
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                value: Tensor = form.loss(model, batch)["loss"]
            value.backward()
        if cfg.step.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), cfg.step.clip)
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(means, model.parameters()):
                mean.lerp_(parameter, 1 - (cfg.step.average or 0.999))
        return value.detach()

    return run
