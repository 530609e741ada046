"""`hpcai ablate APP`: what each optimisation brings an app on this machine.

Its switches are put on one after another, and then each is left out alone. Every repeat goes over all arrangements, each time from
another one on, so that a busy machine slows all alike; one run of each is not counted. Factors are medians of the ratios within a
repeat, against plain and against all, with 95 % intervals (bootstrap). Differences of loss and gradient (L2) are relative to plain,
at the same weights and batch. Arrangements stay in memory where they leave half of it free; otherwise each is built anew in each
repeat.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console

from hpcai import config, dist
from hpcai.cli import tables
from hpcai.cli.bench.timing import bootstrap_interval, machine_info, rotated_orders, synchronize
from hpcai.cli.benchmarks import Enabled, Switch, find_workload
from hpcai.data.readers import available_memory
from hpcai.dist.collect import gather_objects
from hpcai.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcai ablate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", metavar="APP", help="a folder of apps/ with a file trial.py")
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of the app")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of a run, with an evaluation among them (4; on a GPU 8)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these switches; the others stay off")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    words = parser.parse_intermixed_args(argv)
    if words.repeats < 1 or words.steps == 0:
        parser.error("--repeats and --steps are at least 1")
    app = find_workload(words.app)
    files = [word for word in words.words if word.endswith((".yaml", ".yml"))][:1]
    cfg = config.load(app.settings, files[0] if files else None, [word for word in words.words if word not in files])
    with dist.start(cfg.mesh) as mesh:
        if mesh.sizes["evaluate"]:
            raise ConfigError(f"mesh.evaluate is {mesh.sizes['evaluate']}, but here all processes train; set it to 0")
        names = select_switches(switches := app.all_switches(cfg, mesh), words.only)
        steps = words.steps or (8 if mesh.device.type == "cuda" else 4)
        found: dict[str, Any] = {"ablate": words.app, **machine_info(), "steps": steps, "repeats": words.repeats}
        found |= {"threads": torch.get_num_threads(), "processes": mesh.world}
        found["switches"] = [{**vars(switch), "on": switch.name in names} for switch in switches]
        with Console(stderr=True, quiet=not mesh.is_first).status("") as status:
            bench = Ablation(lambda on: app.training(cfg, mesh, on), names, mesh, steps)
            bench.run(words.repeats, status.update)
            found |= {**bench.rows(), "kept": bench.keep_in_memory}
        found |= {"load_after": machine_info()["load"], "settings": cfg.model_dump(mode="json")}
    if mesh.is_first:
        print(json.dumps(found, allow_nan=False)) if words.json else print_tables(found)
    return 0


def select_switches(switches: Sequence[Switch], only: Sequence[str]) -> list[str]:
    """Names of the switches that are measured, in their order. Raises ConfigError for one that is not there or cannot be had."""
    known = {_key(switch.name): switch for switch in switches}
    for word in only:
        if _key(word) not in known:
            raise ConfigError(f"--only: there is no switch {word!r}; expected some of {', '.join(known)}")
        if reason := known[_key(word)].why_not:
            raise ConfigError(f"--only: {word!r} cannot be switched on here: {reason}")
    asked = {_key(word) for word in only} or set(known)
    return [switch.name for key, switch in known.items() if key in asked and switch.why_not is None]


def _key(name: str) -> str:
    return name.lower().replace(" ", "-").replace("_", "-")


@dataclass
class Arrangement:
    """One arrangement of switches: seconds of a step in each repeat, and how far its numbers are from plain."""

    enabled: Enabled
    times: list[float] = field(default_factory=list)
    samples: int = 0
    differences: dict[str, float | None] = field(default_factory=dict)
    peak: int | None = None  # bytes on the GPU
    error: str | None = None
    training: Any = None
    exit_stack: ExitStack = field(default_factory=ExitStack)


class Ablation:
    """Measures ``trial(on)`` for plain, for the first one, two, ... of ``names``, and for all but one of them."""

    def __init__(self, trial: Callable[[Enabled], AbstractContextManager[Any]], names: list[str], mesh: dist.Mesh, steps: int) -> None:
        self.training, self.names, self.mesh, self.steps = trial, names, mesh, steps
        self.added = [frozenset(names[:count]) for count in range(len(names) + 1)]
        self.left_out = [frozenset(names) - {name} for name in names]
        self.arrangements = {on: Arrangement(on) for on in (*self.added, *self.left_out)}
        self.keep_in_memory, self._gpu = True, mesh.device.type == "cuda"
        self._free_at_start, self._reference = self._free_bytes(), (math.nan, torch.tensor(math.nan))  # not plain's, should that fail

    def run(self, repeats: int, tell: Callable[[str], None]) -> None:
        every = list(self.arrangements.values())
        try:
            for one in every:
                tell(f"building, of {len(every)} arrangements: {', '.join(n for n in self.names if n in one.enabled) or 'plain'}")
                self._attempt(one, self._measure_first)
            for repeat, order in enumerate(rotated_orders(len(every), repeats)):
                tell(f"repeat {repeat + 1} of {repeats}")
                gc.collect()
                for number in order:
                    self._attempt(every[number], self._measure_again)
        finally:
            self._close(*every)

    def _attempt(self, one: Arrangement, act: Callable[[Arrangement], None]) -> None:
        try:
            if one.error is None:
                act(one)
        except Exception as error:  # whatever an app's trial may raise: the others are measured all the same,
            if self.mesh.world > 1:  # unless other processes are in the middle of it
                raise
            one.error = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        if one.error is not None or not self.keep_in_memory:
            self._close(one)

    def _close(self, *those: Arrangement) -> None:
        for one in those:
            one.training = None
            with suppress(Exception):
                one.exit_stack.close()
        if self._gpu:
            gc.collect()

    def _measure_first(self, one: Arrangement) -> None:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        one.training = one.exit_stack.enter_context(self.training(one.enabled))
        one.samples = one.training.samples
        loss, gradient = one.training.loss_and_gradient()
        if not one.enabled:
            self._reference = loss, gradient
        plain, flat = self._reference
        far = {"loss": abs(loss - plain) / (abs(plain) or 1.0), "gradient": float((gradient - flat).norm() / flat.norm())}
        one.differences = {of: value if math.isfinite(value) else None for of, value in far.items()}
        self._step_seconds(one)
        if self._gpu:  # now, because a captured step allocates nothing later
            one.peak = torch.cuda.max_memory_allocated() - before
        if any(gather_objects(self._free_bytes() < self._free_at_start / 2, self.mesh.everyone)):
            self.keep_in_memory = False
            self._close(*self.arrangements.values())

    def _measure_again(self, one: Arrangement) -> None:
        if one.training is None:
            one.training = one.exit_stack.enter_context(self.training(one.enabled))
            self._step_seconds(one)
        one.times.append(self._step_seconds(one))

    def _step_seconds(self, one: Arrangement) -> float:
        """Seconds of a step of the rank that needs most."""
        with one.training.context():
            self._barrier()
            began = time.perf_counter()
            one.training.run(self.steps)
            self._barrier()
            spent = (time.perf_counter() - began) / self.steps
        return float(max(gather_objects(spent, self.mesh.everyone)))

    def _barrier(self) -> None:
        synchronize()
        gather_objects(None, self.mesh.everyone)

    def _free_bytes(self) -> int:
        """Bytes that nobody uses where the models are."""
        if not self._gpu:
            return available_memory()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """``cumulative``, from plain to all, and ``left_out``."""
        added = [self._row(name, on, self.added[0]) for name, on in zip(["plain", *self.names], self.added)]
        return {"cumulative": added, "left_out": [self._row(n, on, self.added[-1]) for n, on in zip(self.names, self.left_out)]}

    def _row(self, name: str, on: Enabled, against: Enabled) -> dict[str, Any]:
        """The factor is how many times faster than plain, or how many times slower than all."""
        one, base = self.arrangements[on], self.arrangements[against]
        row: dict[str, Any] = {"name": name, "on": [n for n in self.names if n in on], "error": one.error}
        if one.error is not None:
            return row
        pairs = list(zip(one.times, base.times))
        ratios = [b / a if against == self.added[0] else a / b for a, b in pairs] if base.error is None else []
        seconds = float(np.median(one.times))
        row |= {"seconds": seconds, "each": [round(value, 6) for value in one.times]}
        row |= {"factor": bootstrap_interval(ratios) if ratios else None, "samples_per_second": one.samples / seconds, "peak_bytes": one.peak}
        return row | {f"{of}_difference": one.differences.get(of) for of in ("loss", "gradient")}


def print_tables(found: dict[str, Any]) -> None:
    where = "{ablate} on {device}, torch {torch}, {threads} threads, {processes} processes, load {load} to {load_after}; "
    print(where.format(**found) + "{repeats} repeats of {steps} steps".format(**found))
    for switch in found["switches"]:
        reason = f"; NOT HERE: {switch['why_not']}" if switch["why_not"] else "" if switch["on"] else "; not asked for"
        print(f"  {switch['name']}: {switch['what']}{reason}")
    on_gpu = any(row.get("peak_bytes") is not None for row in found["cumulative"])
    rows: list[list[str]] = []
    for sign, kind in (("+", "cumulative"), ("-", "left_out")):
        for row in found[kind]:
            name = row["name"] if row["name"] == "plain" else f"{sign} {row['name']}"
            if row["error"]:
                rows.append([name, "failed"])
                print(f"{name} failed: {row['error']}")
                continue
            cells = [f"{row['peak_bytes'] / 1e6:,.0f}"] if on_gpu else []
            far = ["" if (value := row[f"{of}_difference"]) is None else f"{value:.0e}" for of in ("loss", "gradient")]
            took = f"{row['seconds']:.4g}", _format_factor(row["factor"]), *cells, f"{row['samples_per_second']:.4g}"
            rows.append([name, *took, *far])
    heads = "", "s a step", "times", *(["peak MB"] if on_gpu else []), "samples/s", "loss", "gradient"
    print(*tables.lines(rows, heads), sep="\n")
    print("+ added to those above, times faster than plain; - left out alone, times slower than all")


def _format_factor(factor: dict[str, float] | None) -> str:
    return "" if factor is None else "{median:.2f} ({low:.2f} to {high:.2f})".format(**factor)
