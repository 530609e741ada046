"""`hpcai verify-resume APP CONFIG.yaml`: compare runs that are killed repeatedly with an uninterrupted run.

The run should take seconds (``train.steps=40``). It is first completed once on each number of processes, as the reference. It is
then repeated and killed: half of the kills come at a random instant, the others while a checkpoint is written; half kill all
processes, as when a node dies, the others one process, after which the rest must exit. After some kills a run may finish. If it
always had the same number of processes, every tensor of its last checkpoint (weights, moments, averages, counters, random state)
must equal the reference bit for bit. If the number changed, sums were added in another order: its weights must be as close to the
reference as the references are to each other. An app that draws random numbers in training (dropout) draws others on another number
of processes, and can be verified on one number only.
"""

import runpy
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from hpcai import log
from hpcai.cli import apps, make_parser
from hpcai.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hpcai.cli.subprocesses import ForkedProcesses

_subprocesses = partial(import_module, "hpcai.cli.subprocesses")  # it and the next one import torch
_checkpoint_reader = partial(import_module, "hpcai.train.checkpoint_reader")

MAX_KILLS = 5                      # of a run
TOLERANCE = 10.0                     # times the difference of the references
TIMEOUT = 120.0                    # seconds for the other processes to exit


class Kill(NamedTuple):
    ranks: int
    in_save: bool                    # while a checkpoint is written
    all: bool                       # all processes were killed, not one
    left_partial: bool                      # a partial checkpoint was left
    hung: bool                      # the other processes had to be killed too

    def __str__(self) -> str:
        victims = "all" if self.all else "one"
        return f"{victims} of {self.ranks} processes, {'in a save' if self.in_save else 'at a random instant'}"


class Verdict(NamedTuple):
    ranks: list[int]
    problem: str = ""
    difference: float = 0.0         # largest of the weights, relative to the largest weight of that tensor


def main(argv: Sequence[str]) -> int:
    parser = make_parser("verify-resume", __doc__)
    args = parser.parse_intermixed_args(argv)
    if args.kills < 1 or min(args.ranks) < 1:
        parser.error("--kills and --ranks are at least 1")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        killer = Killer(args.app, args.overrides, Path(folder), args.ranks, args.seed)
        killer.verify(args.kills)
    broken, hung = sum(bool(run.problem) for run in killer.runs), sum(kill.hung for kill in killer.kills)
    equal = "equal to the uninterrupted run" if not broken else f"{broken} of them NOT"
    print(*killer.lines(), sep="\n")
    print(f"{len(killer.kills)} kills in {len(killer.runs)} runs, {equal}; after {hung} kills of one process others hung")
    return 1 if broken or hung else 0


class Killer:
    """Kills runs of ``app`` in ``folder``, each start on one of ``ranks`` as its number of processes, and compares them with
    uninterrupted ones. Raises ConfigError if one of these fails."""

    def __init__(self, app: str, overrides: Sequence[str], folder: Path, ranks: Sequence[int], seed: int = 0) -> None:
        if app not in apps.list_apps():
            raise ConfigError(f"there is no app {app!r}; expected one of {', '.join(apps.list_apps())}")
        self.app, self.folder, self.counts, self.random = app, folder, sorted(set(ranks)), Random(seed)
        saving = [] if any(arg.startswith("checkpoint.every_steps") for arg in overrides) else ["checkpoint.every_steps=2"]
        self.overrides = [*overrides, *saving, "report.sinks=[]"]
        self.kills, self.runs = list[Kill](), list[Verdict]()
        self.references: dict[int, dict[str, Tensor]] = {}
        self.reference_difference = 0.0  # largest difference between them
        self.seconds, self.saves = dict[int, float](), dict[int, float]()  # of an uninterrupted run, and of a save

    def verify(self, kills: int) -> None:
        for count in self.counts:
            self.reference(count)
            print(f"an uninterrupted run on {count} processes: {self.seconds[count]:.1f} s")
        differences = [_max_difference(self.references[a], self.references[b]) for a, b in pairwise(self.counts)]
        self.reference_difference = max(differences, default=0.0)
        while len(self.kills) < kills:
            self.run_with_kills(self.folder / f"run-{len(self.runs) + 1}", kills - len(self.kills))
            problem = self.runs[-1].problem
            print(f"{len(self.kills)} kills, {len(self.runs)} runs" + (f": {problem}" if problem else ""))

    def lines(self) -> list[str]:
        """Return the number of kills of each kind, and the results of the runs."""
        partial, kills = Counter(str(kill) for kill in self.kills if kill.left_partial), Counter(map(str, self.kills))
        lines = [f"{count} kills of {kind}: {partial[kind]} partial checkpoints left" for kind, count in sorted(kills.items())]
        lines += [f"a run on {run.ranks} processes: {run.problem}" for run in self.runs if run.problem]
        changed, same = ([run for run in self.runs if (len(set(run.ranks)) > 1) is is_changed] for is_changed in (True, False))
        lines.append(f"{len(same)} runs on one number of processes: {sum(not run.problem for run in same)} equal bit for bit")
        if changed:
            most, references = max(run.difference for run in changed), self.reference_difference
            lines.append(f"{len(changed)} on changing numbers: weights at most {most:.1g} off, the references {references:.1g}")
        return lines

    def start(self, run: Path, ranks: int) -> "ForkedProcesses":
        def run_app() -> None:
            sys.argv = [self.app, *self.overrides, f"report.directory={run}"]
            runpy.run_module(f"apps.{self.app}", run_name="__main__")

        return _subprocesses().ForkedProcesses(run_app, run.with_name(f"{run.name}.out"), ranks)

    def reference(self, ranks: int) -> None:
        run, start = self.folder / f"whole-{ranks}", time.monotonic()
        self.finish(run, ranks)
        self.seconds[ranks] = time.monotonic() - start
        events = log.read_metrics(run / "metrics.jsonl")
        self.saves[ranks] = median(event["seconds"] for event in events if event["kind"] == "checkpoint")
        self.references[ranks] = _last_checkpoint(run)

    def finish(self, run: Path, ranks: int) -> None:
        with self.start(run, ranks) as forks:
            codes, text = forks.wait(TIMEOUT + 20 * self.seconds.get(ranks, TIMEOUT))
        if codes != [0] * ranks:
            raise ConfigError(f"a run of {self.app} on {ranks} processes ended with exit codes {codes}: {text[-2000:]}")

    def run_with_kills(self, run: Path, max_kills: int) -> None:
        """Start and kill a run several times, let it finish, compare and remove it. Half of the runs keep their number of
        processes."""
        counts = [self.random.choice(self.counts)] if self.random.randrange(2) else self.counts
        *starts, last = self.random.choices(counts, k=min(max_kills, self.random.randint(1, MAX_KILLS)) + 1)
        used = list[int]()
        for ranks in starts:
            used.append(ranks)
            if (kill := self.kill_once(run, ranks)) is None:
                break
            self.kills.append(kill)
        used.append(last)
        try:
            self.finish(run, last)
            self.runs.append(self.compare(run, used))
        except ConfigError as problem:
            self.runs.append(Verdict(used, str(problem)))
        shutil.rmtree(run, ignore_errors=True)

    def kill_once(self, run: Path, ranks: int) -> Kill | None:
        """Start the run once and kill it. Return None if it ended before."""
        in_save, kill_all = bool(self.random.randrange(2)), ranks == 1 or bool(self.random.randrange(2))
        delay = self.random.uniform(0, self.saves[ranks] if in_save else self.seconds[ranks])
        victim, before = self.random.randrange(ranks), _count_starts(run)

        def left_partial() -> bool:
            return any((run / "checkpoints").glob(".step-*.partial"))

        with self.start(run, ranks) as forks:
            first = forks.processes[0]
            while not kill_all and first.is_alive() and _count_starts(run) == before:  # before that the others detect no death
                time.sleep(0.01)
            while in_save and first.is_alive() and not left_partial():
                time.sleep(0.0005)
            time.sleep(delay)
            alive = [process for process in forks.processes if process.is_alive()]
            if len(alive) < ranks:
                forks.wait(TIMEOUT)
                return None
            for process in alive if kill_all else [forks.processes[victim]]:
                process.kill()
            codes, _ = forks.wait(TIMEOUT)
        return Kill(ranks, in_save, kill_all, left_partial(), None in codes)

    def compare(self, run: Path, ranks: list[int]) -> Verdict:
        """Compare bit for bit on one number of processes (NaN equals itself), otherwise within the differences of the
        references."""
        last, reference = _last_checkpoint(run), self.references[ranks[-1]]
        if len(set(ranks)) == 1:
            names = reference.keys() | last.keys()
            different = sorted(name for name in names if _bits(reference.get(name)) != _bits(last.get(name)))
            return Verdict(ranks, f"{len(different)} tensors differ, first {different[0]}" if different else "")
        difference, allowed = _max_difference(reference, last), TOLERANCE * self.reference_difference
        return Verdict(ranks, f"weights differ by {difference:.2g}, allowed {allowed:.2g}" * (difference > allowed), difference)


def _count_starts(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "start"') if metrics.exists() else 0


def _last_checkpoint(run: Path) -> "dict[str, Tensor]":
    checkpoints = _checkpoint_reader().list_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise ConfigError(f"{run}: a finished run has no checkpoint")
    return dict(_checkpoint_reader().read_tensors(checkpoints[-1]))


def _bits(tensor: "Tensor | None") -> object:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())


def _max_difference(a: "dict[str, Tensor]", b: "dict[str, Tensor]") -> float:
    """Return the largest difference of the weights of two models, relative to the largest weight of the same tensor."""
    pairs = ((x.double(), b[name].double()) for name, x in a.items() if name.startswith("model/") and x.is_floating_point())
    return max((float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)) for x, y in pairs), default=0.0)
