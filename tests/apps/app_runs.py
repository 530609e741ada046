"""Runs of an app in this process, or in forks that inherit its imports, as from its command line."""

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
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.data.index import INDEX, write_index

ROOT = Path(__file__).resolve().parents[2]
FAST = ["train.collect_every=null"]  # a full collection costs more than these runs, and the collector has tests of its own


@dataclass
class App:
    """``python -m apps.NAME apps/NAME/configs/small.yaml`` with overrides that make it quick, on data of ``make_data(folder)``."""

    name: str
    make_data: Callable[[Path], object]
    quick_settings: Sequence[str]

    def __str__(self) -> str:
        return self.name

    @property
    def settings(self) -> Any:
        return import_module(f"apps.{self.name}.settings").Config

    @property
    def small_config(self) -> Path:
        return ROOT / f"apps/{self.name}/configs/small.yaml"

    def overrides(self, data: Path, run: Path, *extra: str) -> list[str]:
        return [str(self.small_config), *FAST, *self.quick_settings, f"data.directory={data}", f"report.directory={run}", *extra]

    def run(self, data: Path, run: Path, *extra: str) -> int:
        """Run in this process and return the exit code."""
        try:
            config.run(self.settings, import_module(f"apps.{self.name}.__main__").main, self.overrides(data, run, *extra))
        except SystemExit as error:
            return int(error.code or 0)
        return 0

    def command(self, data: Path, run: Path, *extra: str) -> Callable[[], object]:
        """Return the entry point of ``python -m apps.NAME``, for forked processes."""

        def main() -> None:
            sys.argv = [self.name, *self.overrides(data, run, *extra)]
            runpy.run_module(f"apps.{self.name}", run_name="__main__")

        return main

    def on_ranks(self, ranks: int, data: Path, run: Path, *extra: str, timeout: float = 120) -> str:
        """Run on ``ranks`` processes, assert that all succeed, and return their output.

        A fork may wait forever for a lock that another thread of this process held at the fork. Processes that hang are therefore
        started a second time; a warning has their exit codes and output.
        """
        for attempt in (1, 2):
            with ForkedProcesses(self.command(data, run, *extra), run.with_name(f"{run.name}.{attempt}.out"), ranks) as forks:
                codes, output = forks.wait(timeout)
            if None not in codes:
                break
            warnings.warn(f"{self.name} on {ranks} ranks hung, exit codes {codes}: {output}", stacklevel=2)
            shutil.rmtree(run, ignore_errors=True)
        assert codes == [0] * ranks, output
        return output

    def check_refused(self, data: Path, run: Path, overrides: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Assert that the run fails with a message that contains ``text``, without a traceback, and writes no weights."""
        assert self.run(data, run, *overrides) not in (0, 85)
        stderr = capsys.readouterr().err
        assert text in stderr and "Traceback" not in stderr, stderr
        assert not (run / "model.safetensors").exists()

    def cached_run(self, data: Path, *extra: str) -> Path:
        """Return the folder of a run with these overrides, which several tests share."""
        run = data.with_name(" ".join([f"{data.name}-once", *extra]).replace("/", "-"))
        if not run.exists():
            assert self.run(data, run, *extra) == 0
        return run


def run_on_ranks(call: Callable[[], object], output: Path, ranks: int) -> tuple[list[int | None], str]:
    """Return the exit codes and the output of ``ranks`` processes, which may fail."""
    with ForkedProcesses(call, output, ranks) as forks:
        return forks.wait(60)


def damage(data: Path, kind: str, changes: Mapping[str, Callable[[h5py.File], object]]) -> None:
    """Apply the change named ``kind`` to the first training file of ``data``, and index it as if it had been written so."""
    path = next((data / "train").glob("*.h5"))
    if kind in changes:
        with h5py.File(path, "r+") as file:
            changes[kind](file)
        write_index(path.parent, json.loads((path.parent / INDEX).read_text()))


def metric_by_step(run: Path, kind: str = "train", name: str = "loss") -> dict[int, float]:
    """Return a metric of the events of one kind, by step."""
    return {e["step"]: e[name] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind}


def resumed_from(run: Path) -> int | None:
    """Return the step from which a run last resumed: a run from scratch would end with the same weights."""
    return [e["resumed_from"] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == "start"][-1]


def check_equal_weights(first: Path, second: Path, **tolerance: float) -> None:
    """Assert that two runs ended with equal weights: bitwise, or within ``rtol`` and ``atol``."""
    expected, actual = (load_file(run / "model.safetensors") for run in (first, second))
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def blank_first_image(data: Path) -> None:
    """Overwrite half of an encoded image of the training split."""
    with h5py.File(min((data / "train").glob("*.h5")), "r+") as file:
        file["image"][: file["bytes"][0] // 2] = 0
