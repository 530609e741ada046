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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from hpcai import log
from hpcai.cli import apps, make_parser
from hpcai.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_subprocesses = partial(import_module, "hpcai.cli.subprocesses")  # it and the next one import torch
_checkpoint_reader = partial(import_module, "hpcai.train.checkpoint_reader")

MAX_KILLS = 5                      # of a run
TOLERANCE = 10.0                     # times the difference of the references
TIMEOUT = 120.0                    # seconds for the other processes to exit


@dataclass(frozen=True)
class Kill:
    ranks: int
    in_save: bool                    # while a checkpoint is written
    all: bool                       # all processes were killed, not one
    left_partial: bool                      # a partial checkpoint was left
    hung: bool                      # the other processes had to be killed too

    def __str__(self) -> str:
        victims = "all" if self.all else "one"
        return f"{victims} of {self.ranks} processes, {'in a save' if self.in_save else 'at a random instant'}"


@dataclass
class Verdict:
    ranks: list[int]
    problem: str = ""
    difference: float = 0.0         # largest of the weights, relative to the largest weight of that tensor


@dataclass
class Result:
    kills: list[Kill] = field(default_factory=list)
    runs: list[Verdict] = field(default_factory=list)
    reference_difference: float = 0.0              # largest difference between the references

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


def main(argv: Sequence[str]) -> int:
    parser = make_parser("verify-resume", __doc__)
    parser.add_argument("app", metavar="APP", help="a folder of apps/")
    parser.add_argument("overrides", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of a run that takes seconds")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], metavar="N", help="numbers of processes, one per start")
    parser.add_argument("--seed", type=int, default=0, help="of the random instants")
    args = parser.parse_intermixed_args(argv)
    if args.kills < 1 or min(args.ranks) < 1:
        parser.error("--kills and --ranks are at least 1")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        result = verify(args.app, args.overrides, Path(folder), args.kills, args.ranks, args.seed, print)
    broken, hung = sum(bool(run.problem) for run in result.runs), sum(kill.hung for kill in result.kills)
    equal = "equal to the uninterrupted run" if not broken else f"{broken} of them NOT"
    print(*result.lines(), sep="\n")
    print(f"{len(result.kills)} kills in {len(result.runs)} runs, {equal}; after {hung} kills of one process others hung")
    return 1 if broken or hung else 0


def verify(
    app: str, overrides: Sequence[str], folder: Path, kills: int, ranks: Sequence[int], seed: int = 0,
    report_progress: Callable[[str], object] = lambda text: None,
) -> Result:  # fmt: skip
    """Kill runs of ``app`` in ``folder`` ``kills`` times; each start has one of ``ranks`` as its number of processes.

    Raises ConfigError if the uninterrupted run fails.
    """
    if app not in apps.list_apps():
        raise ConfigError(f"there is no app {app!r}; expected one of {', '.join(apps.list_apps())}")
    killer = _Killer(app, overrides, folder, Random(seed))
    counts = sorted(set(ranks))
    for count in counts:
        killer.reference(count)
        report_progress(f"an uninterrupted run on {count} processes: {killer.seconds[count]:.1f} s")
    differences = [_max_difference(killer.references[a], killer.references[b]) for a, b in pairwise(counts)]
    result = Result(reference_difference=max(differences, default=0.0))
    while len(result.kills) < kills:
        run = killer.folder / f"run-{len(result.runs) + 1}"
        kills_made, verdict = killer.run_with_kills(run, counts, kills - len(result.kills), result.reference_difference)
        result.kills += kills_made
        result.runs.append(verdict)
        report_progress(f"{len(result.kills)} kills, {len(result.runs)} runs" + (f": {verdict.problem}" if verdict.problem else ""))
    return result


class _Killer:
    def __init__(self, app: str, overrides: Sequence[str], folder: Path, random: Random) -> None:
        self.app, self.folder, self.random = app, folder, random
        saving = [] if any(arg.startswith("checkpoint.every_steps") for arg in overrides) else ["checkpoint.every_steps=2"]
        self.overrides = [*overrides, *saving, "report.sinks=[]"]
        self.references: dict[int, dict[str, Tensor]] = {}
        self.seconds: dict[int, float] = {}
        self.saves: dict[int, float] = {}

    def command(self, run: Path) -> Callable[[], object]:
        def run_app() -> None:
            sys.argv = [self.app, *self.overrides, f"report.directory={run}"]
            runpy.run_module(f"apps.{self.app}", run_name="__main__")

        return run_app

    def reference(self, ranks: int) -> None:
        run, start = self.folder / f"whole-{ranks}", time.monotonic()
        self.finish(run, ranks)
        self.seconds[ranks] = time.monotonic() - start
        saves = [event["seconds"] for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "checkpoint"]
        self.saves[ranks] = median(saves)
        self.references[ranks] = _last_checkpoint(run)

    def finish(self, run: Path, ranks: int) -> None:
        with _subprocesses().ForkedProcesses(self.command(run), run.with_name(f"{run.name}.out"), ranks) as forks:
            codes, text = forks.wait(TIMEOUT + 20 * self.seconds.get(ranks, TIMEOUT))
        if codes != [0] * ranks:
            raise ConfigError(f"a run of {self.app} on {ranks} processes ended with exit codes {codes}: {text[-2000:]}")

    def run_with_kills(self, run: Path, counts: Sequence[int], max_kills: int, difference: float) -> tuple[list[Kill], Verdict]:
        """Start and kill a run several times, let it finish, compare and remove it. Half of the runs keep their number of
        processes."""
        counts = [self.random.choice(counts)] if self.random.randrange(2) else counts
        rank_counts = self.random.choices(counts, k=min(max_kills, self.random.randint(1, MAX_KILLS)) + 1)
        kills: list[Kill] = []
        for ranks in rank_counts[:-1]:
            if (kill := self.kill_once(run, ranks)) is None:
                rank_counts = [*rank_counts[: len(kills) + 1], rank_counts[-1]]
                break
            kills.append(kill)
        try:
            self.finish(run, rank_counts[-1])
            verdict = self.compare(run, rank_counts, difference)
        except ConfigError as problem:
            verdict = Verdict(rank_counts, str(problem))
        shutil.rmtree(run, ignore_errors=True)
        return kills, verdict

    def kill_once(self, run: Path, ranks: int) -> Kill | None:
        """Start the run once and kill it. Return None if it ended before."""
        in_save, kill_all = bool(self.random.randrange(2)), ranks == 1 or bool(self.random.randrange(2))
        delay = self.random.uniform(0, self.saves[ranks] if in_save else self.seconds[ranks])
        victim, before = self.random.randrange(ranks), _count_starts(run)

        def left_partial() -> bool:
            return any((run / "checkpoints").glob(".step-*.partial"))

        with _subprocesses().ForkedProcesses(self.command(run), run.with_name(f"{run.name}.out"), ranks) as forks:
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

    def compare(self, run: Path, ranks: list[int], reference_difference: float) -> Verdict:
        """Compare bit for bit on one number of processes (NaN equals itself), otherwise within the differences of the
        references."""
        last, reference = _last_checkpoint(run), self.references[ranks[-1]]
        if len(set(ranks)) == 1:
            names = reference.keys() | last.keys()
            different = sorted(name for name in names if _bits(reference.get(name)) != _bits(last.get(name)))
            return Verdict(ranks, f"{len(different)} tensors differ, first {different[0]}" if different else "")
        difference, allowed = _max_difference(reference, last), TOLERANCE * reference_difference
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
    differences = [0.0]
    for name, tensor in a.items():
        if name.startswith("model/") and tensor.is_floating_point():
            reference = tensor.double()
            differences.append(float((reference - b[name].double()).abs().max() / reference.abs().max().clamp(min=1e-30)))
    return max(differences)
