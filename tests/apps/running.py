"""An app run in this process, or in forks of it that have torch already, as its command line would."""

import multiprocessing
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from subprocess import run as start
from typing import Any

import h5py
import pytest
import torch
import torch.distributed as torch_dist
from safetensors.torch import load_file

from hpcai import config, log

ROOT = Path(__file__).resolve().parents[2]
NOTHING = ["train.collect_every=null"]  # a full collection costs more than these runs, and the collector has tests of its own


class Forks:
    """Processes that were forked, and the file into which all of them speak."""

    def __init__(self, call: Callable[[], object], output: Path, ranks: int) -> None:
        meeting: dict[str, str] = {}
        if ranks > 1:  # a store of this process, as torchrun's agent has one
            self.store = torch_dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                       "TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(ranks)}  # fmt: skip
        self.output = output
        self.processes = []
        for rank in range(ranks):
            place = meeting and {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(multiprocessing.get_context("fork").Process(target=_enter, args=(call, output, place)))
            self.processes[-1].start()

    def ended(self, timeout: float = 120) -> tuple[list[int | None], str]:
        """Exit codes, and what was said."""
        for process in self.processes:
            process.join(timeout)
        return [process.exitcode for process in self.processes], self.output.read_text()


@contextmanager
def forked(call: Callable[[], object], output: Path, ranks: int = 1) -> Iterator[Forks]:
    """``call`` in as many forks of this process, which meet as torchrun's processes do; none of them outlives the block."""
    forks = Forks(call, output, ranks)
    try:
        yield forks
    finally:
        for process in forks.processes:
            process.kill()
            process.join()


def _enter(call: Callable[[], object], output: Path, place: Mapping[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(place)
    torch.set_num_threads(1)
    call()


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

    def words(self, data: Path, run: Path, *more: str) -> list[str]:
        return [str(self.small), *NOTHING, *self.quick, f"data.directory={data}", f"report.directory={run}", *more]

    def here(self, data: Path, run: Path, *more: str) -> int:
        """Exit code of a run in this process."""
        try:
            config.run(self.settings, import_module(f"apps.{self.name}.__main__").main, self.words(data, run, *more))
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def command(self, data: Path, run: Path, *more: str) -> Callable[[], object]:
        """What ``python -m apps.NAME`` does once Python has begun, for forks."""

        def enter() -> None:
            sys.argv = [self.name, *self.words(data, run, *more)]
            runpy.run_module(f"apps.{self.name}", run_name="__main__")

        return enter

    def on_ranks(self, ranks: int, data: Path, run: Path, *more: str, timeout: float = 240) -> str:
        """What a run on so many processes said, all of which ended well."""
        with forked(self.command(data, run, *more), run.with_name(f"{run.name}.out"), ranks) as forks:
            codes, output = forks.ended(timeout)
        assert codes == [0] * ranks, output
        return output

    def refuses(self, data: Path, run: Path, more: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The run ends with one message that says ``text``, and leaves no weights."""
        assert self.here(data, run, *more) not in (0, 85)
        shown = capsys.readouterr().err
        assert text in shown and "Traceback" not in shown, shown
        assert not (run / "model.safetensors").exists()

    def once(self, data: Path, *more: str) -> Path:
        """The folder of a run with these words that several tests look at."""
        run = data.with_name(" ".join([f"{data.name}-once", *more]).replace("/", "-"))
        if not run.exists():
            assert self.here(data, run, *more) == 0
        return run

    def names_in_help(self, names: Iterable[str]) -> None:
        done = start([sys.executable, "-m", f"apps.{self.name}", "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and [name for name in names if name not in done.stdout] == [], done.stderr


def damaged(data: Path, folder: Path, kind: str, changes: Mapping[str, Callable[[h5py.File], object]]) -> Path:
    """A copy of ``data`` in ``folder`` whose first training file is gone, cut or changed."""
    shutil.copytree(data, folder)
    path = next((folder / "train").glob("*.h5"))
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif kind in changes:
        with h5py.File(path, "r+") as file:
            changes[kind](file)
    return folder


def complaints(folder: Path, *severities: str) -> set[str]:
    """What `hpcai data check` finds."""
    from hpcai.data.doctor import Options, check

    return {finding.code for finding in check(folder, Options()).findings if finding.severity in severities}


def told(run: Path, kind: str = "train", name: str = "loss") -> dict[int, float]:
    """What a run's events say, by step."""
    return {e["step"]: e[name] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind}


def same_weights(one: Path, other: Path, **tolerance: float) -> None:
    """Two runs ended with the same weights: bit for bit, or within ``rtol`` and ``atol``."""
    expected, found = (load_file(run / "model.safetensors") for run in (one, other))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)
