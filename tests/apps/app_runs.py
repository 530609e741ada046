"""An app run in this process, or in forks of it that have torch already, as its command line would."""

import json
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from safetensors.torch import load_file

from hpcai import config, log
from hpcai.cli.subprocesses import fork_processes
from hpcai.data.index import INDEX, write_index

ROOT = Path(__file__).resolve().parents[2]
FAST = ["train.collect_every=null"]  # a full collection costs more than these runs, and the collector has tests of its own


@dataclass
class App:
    """``python -m apps.NAME apps/NAME/configs/small.yaml``, made quick by more words, on data that ``make`` puts into a folder."""

    name: str
    make: Callable[[Path], object]
    quick: Sequence[str]

    def __str__(self) -> str:
        return self.name

    @property
    def settings(self) -> Any:
        return import_module(f"apps.{self.name}.settings").Config

    @property
    def small(self) -> Path:
        return ROOT / f"apps/{self.name}/configs/small.yaml"

    def overrides(self, data: Path, run: Path, *more: str) -> list[str]:
        return [str(self.small), *FAST, *self.quick, f"data.directory={data}", f"report.directory={run}", *more]

    def run(self, data: Path, run: Path, *more: str) -> int:
        """Exit code of a run in this process."""
        try:
            config.run(self.settings, import_module(f"apps.{self.name}.__main__").main, self.overrides(data, run, *more))
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def command(self, data: Path, run: Path, *more: str) -> Callable[[], object]:
        """What ``python -m apps.NAME`` does once Python has begun, for forks."""

        def enter() -> None:
            sys.argv = [self.name, *self.overrides(data, run, *more)]
            runpy.run_module(f"apps.{self.name}", run_name="__main__")

        return enter

    def on_ranks(self, ranks: int, data: Path, run: Path, *more: str, timeout: float = 120) -> str:
        """What a run on so many processes said, all of which ended well.

        A fork inherits a lock that another thread of this process holds at that moment, and may wait for it for ever. Processes
        that hang are therefore started once more; where they stood is told as a warning.
        """
        for attempt in (1, 2):
            with fork_processes(self.command(data, run, *more), run.with_name(f"{run.name}.{attempt}.out"), ranks) as forks:
                codes, output = forks.wait(timeout)
            if None not in codes:
                break
            warnings.warn(f"{self.name} on {ranks} ranks hung, exit codes {codes}: {output}", stacklevel=2)
            shutil.rmtree(run, ignore_errors=True)
        assert codes == [0] * ranks, output
        return output

    def check_refused(self, data: Path, run: Path, overrides: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The run ends with one message that says ``text``, and leaves no weights."""
        assert self.run(data, run, *overrides) not in (0, 85)
        stderr = capsys.readouterr().err
        assert text in stderr and "Traceback" not in stderr, stderr
        assert not (run / "model.safetensors").exists()

    def cached_run(self, data: Path, *more: str) -> Path:
        """The folder of a run with these words that several tests look at."""
        run = data.with_name(" ".join([f"{data.name}-once", *more]).replace("/", "-"))
        if not run.exists():
            assert self.run(data, run, *more) == 0
        return run


def damage(data: Path, kind: str, changes: Mapping[str, Callable[[h5py.File], object]]) -> None:
    """The first training file of ``data`` is changed, as if its maker had written it so: the index has a table of it."""
    path = next((data / "train").glob("*.h5"))
    if kind in changes:
        with h5py.File(path, "r+") as file:
            changes[kind](file)
        write_index(path.parent, json.loads((path.parent / INDEX).read_text()))


def metric_by_step(run: Path, kind: str = "train", name: str = "loss") -> dict[int, float]:
    """What a run's events say, by step."""
    return {e["step"]: e[name] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind}


def resumed_from(run: Path) -> int | None:
    """The step from which a run last went on; one that begins anew would end with the same weights."""
    return [e["resumed_from"] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == "start"][-1]


def check_equal_weights(first: Path, second: Path, **tolerance: float) -> None:
    """Two runs ended with the same weights: bit for bit, or within ``rtol`` and ``atol``."""
    expected, actual = (load_file(run / "model.safetensors") for run in (first, second))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)
