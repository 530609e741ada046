"""`hpcai verify-resume APP CONFIG.yaml`: runs that are killed again and again, against one that nobody killed.

The run, which should last seconds (``train.steps=40``), is made once on each number of processes. Then it is made again and killed:
half of the kills come at a random instant, the others while a checkpoint is written; half end all processes, as when a node
dies, the others one of them, which must end the rest. After some kills a run may finish. Where it always had the same number of
processes every tensor of its last checkpoint (weights, moments, averages, counters, random numbers) must be the reference's, bit
for bit. Where the number changed, sums were added in another order: its weights must be as close to the reference as the
references are to each other. An app that draws random numbers as it trains (dropout) draws others on another number of
processes, and can be verified on one number only.
"""

import argparse
import runpy
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from hpcai import log
from hpcai.cli import apps
from hpcai.cli.subprocesses import fork_processes
from hpcai.errors import ConfigError
from hpcai.train.saved import found, read_tensors

MAX_KILLS = 5                      # of one run
TOLERANCE = 10.0                     # times what the references differ by
TIMEOUT = 120.0                    # seconds for the processes of a killed one to end


@dataclass(frozen=True)
class Kill:
    ranks: int
    in_save: bool                    # aimed at the writing of a checkpoint
    all: bool                       # every process was killed, not one
    left_partial: bool                      # a checkpoint was left half written
    hung: bool                      # the others had to be killed too

    def __str__(self) -> str:
        who = "all" if self.all else "one"
        return f"{who} of {self.ranks} processes, {'in a save' if self.in_save else 'at a random instant'}"


@dataclass
class Verdict:
    """What became of one run."""

    ranks: list[int]
    problem: str = ""
    difference: float = 0.0         # largest of the weights, relative to the largest weight of that tensor


@dataclass
class Result:
    kills: list[Kill] = field(default_factory=list)
    runs: list[Verdict] = field(default_factory=list)
    reference_difference: float = 0.0              # how far the references are from each other

    def lines(self) -> list[str]:
        """How many kills there were of each kind, and how the runs ended."""
        torn, kinds = Counter(str(kill) for kill in self.kills if kill.left_partial), Counter(map(str, self.kills))
        lines = [f"{count} kills of {kind}: {torn[kind]} saves left half written" for kind, count in sorted(kinds.items())]
        lines += [f"a run on {run.ranks} processes: {run.problem}" for run in self.runs if run.problem]
        changed, same = ([run for run in self.runs if (len(set(run.ranks)) > 1) is wanted] for wanted in (True, False))
        lines.append(f"{len(same)} runs on one number of processes: {sum(not run.problem for run in same)} equal bit for bit")
        if changed:
            most = max(run.difference for run in changed)
            lines.append(f"{len(changed)} on changing numbers: weights at most {most:.1g} off, the references {self.reference_difference:.1g}")
        return lines


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hpcai verify-resume", description=__doc__, formatter_class=form)
    parser.add_argument("app", metavar="APP", help="a folder of apps/")
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of a run of seconds")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], metavar="N", help="numbers of processes, one for each start")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    words = parser.parse_intermixed_args(argv)
    if words.kills < 1 or min(words.ranks) < 1:
        parser.error("--kills and --ranks are at least 1")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as folder:
        result = verify(words.app, words.words, Path(folder), words.kills, words.ranks, words.seed, print)
    broken, hung = sum(bool(run.problem) for run in result.runs), sum(kill.hung for kill in result.kills)
    equal = "equal to the run that nobody killed" if not broken else f"{broken} of them NOT"
    print(*result.lines(), sep="\n")
    print(f"{len(result.kills)} kills in {len(result.runs)} runs, {equal}; after {hung} kills of one process others hung")
    return 1 if broken or hung else 0


def verify(
    app: str, words: Sequence[str], folder: Path, kills: int, ranks: Sequence[int], seed: int = 0,
    told: Callable[[str], object] = lambda text: None,
) -> Result:  # fmt: skip
    """``kills`` kills of runs of ``app`` below ``folder``, each start on one of ``ranks`` processes.

    Raises ConfigError where the run cannot be made at all.
    """
    if app not in apps.list_apps():
        raise ConfigError(f"there is no app {app!r}; expected one of {', '.join(apps.list_apps())}")
    killer = _Killer(app, words, folder, np.random.default_rng(seed))
    counts = sorted(set(ranks))
    for count in counts:
        killer.reference(count)
        told(f"a whole run on {count} processes: {killer.seconds[count]:.1f} s")
    result = Result(reference_difference=max([_max_difference(killer.references[a], killer.references[b]) for a, b in pairwise(counts)], default=0.0))
    while len(result.kills) < kills:
        run = killer.folder / f"run-{len(result.runs) + 1}"
        made, verdict = killer.run_with_kills(run, counts, kills - len(result.kills), result.reference_difference)
        result.kills += made
        result.runs.append(verdict)
        told(f"{len(result.kills)} kills, {len(result.runs)} runs" + (f": {verdict.problem}" if verdict.problem else ""))
    return result


class _Killer:
    def __init__(self, app: str, words: Sequence[str], folder: Path, random: np.random.Generator) -> None:
        self.app, self.folder, self.random = app, folder, random
        every = [] if any(word.startswith("checkpoint.every_steps") for word in words) else ["checkpoint.every_steps=2"]
        self.overrides = [*words, *every, "report.sinks=[]"]
        self.references: dict[int, dict[str, Tensor]] = {}
        self.seconds: dict[int, float] = {}
        self.saves: dict[int, float] = {}

    def command(self, run: Path) -> Callable[[], object]:
        def enter() -> None:
            sys.argv = [self.app, *self.overrides, f"report.directory={run}"]
            runpy.run_module(f"apps.{self.app}", run_name="__main__")

        return enter

    def reference(self, ranks: int) -> None:
        run, began = self.folder / f"whole-{ranks}", time.monotonic()
        self.finish(run, ranks)
        self.seconds[ranks] = time.monotonic() - began
        saves = [event["seconds"] for event in log.read_metrics(run / "metrics.jsonl") if event["kind"] == "checkpoint"]
        self.saves[ranks] = float(np.median(saves))
        self.references[ranks] = _last_checkpoint(run)

    def finish(self, run: Path, ranks: int) -> None:
        with fork_processes(self.command(run), run.with_name(f"{run.name}.out"), ranks) as forks:
            codes, text = forks.wait(TIMEOUT + 20 * self.seconds.get(ranks, TIMEOUT))
        if codes != [0] * ranks:
            raise ConfigError(f"a run of {self.app} on {ranks} processes ended with exit codes {codes}: {text[-2000:]}")

    def run_with_kills(self, run: Path, counts: Sequence[int], most: int, apart: float) -> tuple[list[Kill], Verdict]:
        """A run that is killed some times and then finishes, and how it compares. Its folder is removed. Half of the runs keep the
        number of processes that they began with."""
        counts = [int(self.random.choice(counts))] if self.random.integers(2) else counts
        used = self.random.choice(counts, min(most, int(self.random.integers(1, MAX_KILLS + 1))) + 1).tolist()
        kills: list[Kill] = []
        for ranks in used[:-1]:
            if (kill := self.kill_once(run, ranks)) is None:
                used = [*used[: len(kills) + 1], used[-1]]
                break
            kills.append(kill)
        try:
            self.finish(run, used[-1])
            verdict = self.compare(run, used, apart)
        except ConfigError as problem:
            verdict = Verdict(used, str(problem))
        shutil.rmtree(run, ignore_errors=True)
        return kills, verdict

    def kill_once(self, run: Path, ranks: int) -> Kill | None:
        """One start that is killed; None where it ended before."""
        saving, everyone = bool(self.random.integers(2)), ranks == 1 or bool(self.random.integers(2))
        wait = float(self.random.uniform(0, self.saves[ranks] if saving else self.seconds[ranks]))
        victim, before = int(self.random.integers(ranks)), _count_starts(run)

        def torn() -> bool:
            return any((run / "checkpoints").glob(".step-*.partial"))

        with fork_processes(self.command(run), run.with_name(f"{run.name}.out"), ranks) as forks:
            first = forks.processes[0]
            while not everyone and first.is_alive() and _count_starts(run) == before:  # the others can notice nothing earlier
                time.sleep(0.01)
            while saving and first.is_alive() and not torn():
                time.sleep(0.0005)
            time.sleep(wait)
            alive = [process for process in forks.processes if process.is_alive()]
            if len(alive) < ranks:
                forks.wait(TIMEOUT)
                return None
            for process in alive if everyone else [forks.processes[victim]]:
                process.kill()
            codes, _ = forks.wait(TIMEOUT)
        return Kill(ranks, saving, everyone, torn(), None in codes)

    def compare(self, run: Path, used: list[int], apart: float) -> Verdict:
        """Bit for bit on one number of processes, where a NaN is equal to itself; otherwise as close as the references are."""
        last, expected = _last_checkpoint(run), self.references[used[-1]]
        if len(set(used)) == 1:
            different = sorted(name for name in expected.keys() | last.keys() if _bits(expected.get(name)) != _bits(last.get(name)))
            return Verdict(used, f"{len(different)} tensors differ, first {different[0]}" if different else "")
        difference, allowed = _max_difference(expected, last), TOLERANCE * apart
        return Verdict(used, f"weights differ by {difference:.2g}, allowed {allowed:.2g}" * (difference > allowed), difference)


def _count_starts(run: Path) -> int:
    """How often the run was started."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b'"kind": "start"') if metrics.exists() else 0


def _last_checkpoint(run: Path) -> dict[str, Tensor]:
    made = found(run / "checkpoints")
    if not made:
        raise ConfigError(f"{run}: a finished run left no checkpoint")
    return read_tensors(made[-1])


def _bits(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes())


def _max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two models' weights, relative to the largest weight of the same tensor."""
    far = [0.0]
    for name, tensor in one.items():
        if name.startswith("model/") and tensor.is_floating_point():
            wide = tensor.double()
            far.append(float((wide - other[name].double()).abs().max() / wide.abs().max().clamp(min=1e-30)))
    return max(far)
