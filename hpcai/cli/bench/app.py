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
from hpcai.cli.bench.timing import Row, alternate, apart, finish, high_water, machine, parser, wait
from hpcai.cli.trial import Form, Subject, find, torch_optimizer
from hpcai.errors import ConfigError
from hpcai.train import Step, rng
from hpcai.train.optim import match_decay_names

PARTS = ("steps", "memory")


def main(name: str, argv: Sequence[str]) -> int:
    bench = Bench(name, find(name), argv)
    if bench.words.peak:  # the process that another one started to measure one form
        print(json.dumps(bench.peak(bench.words.peak, bench.cases[0])))
        return 0
    found = {"bench": name, **machine(), **{part: bench.part(part) for part in bench.parts}}
    return finish(found | bench.left_out(), (*bench.parts, "left_out"), bench.words.json)


class Bench:
    """What is measured of one app, as the words of the command have it."""

    def __init__(self, name: str, subject: Subject, argv: Sequence[str]) -> None:
        self.name, self.subject, self.on_gpu = name, subject, torch.cuda.is_available()
        made = parser(name, __doc__)
        made.add_argument("given", nargs="*", metavar="PART|key=value", help=f"parts are {', '.join(PARTS)}")
        made.add_argument("--repeats", type=int, default=3, help="measured steps of each form")
        made.add_argument("--precision", nargs="+", choices=("auto", "fp32", "bf16", "bf16-params"),
                          default=["bf16" if self.on_gpu else "fp32"])  # fmt: skip
        made.add_argument("--peers", action="store_true", help="also public packages")
        made.add_argument("--peak", metavar="FORM", help="the peak of memory of one form, in this process")
        self.words = made.parse_intermixed_args(argv)
        parts = [word for word in self.words.given if "=" not in word]
        if unknown := [part for part in parts if part not in PARTS]:
            made.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        self.parts = parts or list(PARTS)
        settings = [word for word in self.words.given if "=" in word]
        self.cases = [settings] if settings else [list(case) for case in subject.cases(self.on_gpu)]
        torch.set_num_threads(1)
        self.mesh = dist.single_process()

    def part(self, part: str) -> list[Row]:
        return [{**columns(case), **row} for case in self.cases for row in getattr(self, f"_{part}")(case)]

    def left_out(self) -> Row:
        missing = [peer.package for peer in self.subject.peers.values() if not find_spec(peer.package)]
        text = f"not installed: {', '.join(missing)} (pip install 'hpcai-suite[peers]')"
        return {"left_out": {"left out": text}} if self.words.peers and missing else {}

    def settings(self, case: Sequence[str], *more: str) -> Any:
        return self.subject.known(config.load(self.subject.settings, None, [*case, *more]))

    def forms(self, case: Sequence[str]) -> list[str]:
        """Names of all forms, ours the last of them."""
        plain = self.subject.forms(self.settings(case), None, self.mesh)
        peers = [name for name, peer in self.subject.peers.items() if self.words.peers and find_spec(peer.package)]
        return [*plain, *peers, *self.subject.variants, "ours"]

    def form(self, name: str, case: Sequence[str], precision: str = "fp32") -> Callable[[], Tensor]:
        """A training step of a form, which returns the loss."""
        changes = self.subject.variants.get(name, ())
        cfg = self.settings(case, f"step.precision={precision}", *changes)
        batch = self.subject.random_batch(cfg, range(cfg.data.batch), self.mesh.device)
        torch.manual_seed(cfg.train.seed)
        if name == "ours" or changes:
            step = self.step(cfg)
            return lambda: step(batch)["loss"]
        peer = self.subject.peers.get(name)
        form = peer.form(cfg, batch) if peer else self.subject.forms(cfg, batch, self.mesh)[name]()
        run = plainly(form, cfg, batch, self.mesh.device)

        def seeded() -> Tensor:
            rng.seed_step(cfg.train.seed, 0, 0)  # the dropout of our first step
            return run()

        return seeded

    def step(self, cfg: Any) -> Step:
        model = self.subject.build(cfg, self.mesh, self.subject.whole(cfg, self.mesh))
        return Step(model, self.subject.loss, cfg.step, self.mesh, counts=self.subject.counted)

    # ---- parts

    def _steps(self, case: Sequence[str]) -> list[Row]:
        rows = []
        for precision in self.words.precision:
            names = [name for name in self.forms(case) if name not in self.subject.variants]
            spent = alternate({name: self.form(name, case, precision) for name in names}, self.words.repeats)
            rows.append({"precision": precision, **timed(spent)})
            gc.collect()
        return rows

    def _memory(self, case: Sequence[str]) -> list[Row]:
        words, peers = ["memory", *case], ["--peers"] if self.words.peers else []
        peak = {}
        for name in self.forms(case):
            found = apart([self.name, *words, *peers, "--peak", name], environ={"OMP_NUM_THREADS": "1"})
            peak[name] = found.get("mb")
        ratios = {f"ours_over_{name}": round(peak["ours"] / mb, 3) for name, mb in peak.items() if mb and name != "ours"}
        return [{**{f"{name}_mb": mb if mb is None else round(mb) for name, mb in peak.items()}, **ratios}]

    def peak(self, name: str, case: Sequence[str]) -> Row:
        """The most memory that this process has held after three steps."""
        run = self.form(name, case, self.words.precision[0])
        for _ in range(3):
            run()
        wait()
        return {"mb": high_water()}


def columns(case: Sequence[str]) -> Row:
    """The settings of a case as the first column of its row, of which mappings of many keys are cut off."""
    pairs = (word.partition("=") for word in case)
    return {"case": ", ".join(f"{name.rpartition('.')[2]} {shorten(value, 32)}" for name, _, value in pairs) or "usual"}


def timed(spent: Mapping[str, float]) -> Row:
    """Seconds of all forms, and how many times slower than ours the others are."""
    ratios = {f"{name}_over_ours": round(s / spent["ours"], 3) for name, s in spent.items() if name != "ours"}
    return {f"{name}_s": round(s, 6) for name, s in spent.items()} | ratios


def plainly(form: Form, cfg: Any, batch: Any, device: torch.device) -> Callable[[], Tensor]:
    """A training step as one would write it first, with torch's optimizer; returns the loss."""
    model, narrow = form.model.to(device), cfg.step.precision == "bf16"
    try:
        decays = match_decay_names(model, cfg.step)
    except ConfigError:  # the names of a peer's parameters are others
        decays = set()
    optimizer = torch_optimizer(model, cfg.step, decays)
    means = [p.detach().clone() for p in model.parameters()] if cfg.step.average is not None else []

    def run() -> Tensor:
        optimizer.zero_grad()
        with form.around():
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
