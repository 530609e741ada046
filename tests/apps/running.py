"""An app run in this process, as its command line would."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpcai import config, log
from hpcai.config import Settings

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class App:
    """``python -m apps.NAME apps/NAME/configs/small.yaml``, made quick by more words."""

    name: str
    settings: type[Settings]
    main: Callable[[Any], None]
    quick: Sequence[str]

    @property
    def small(self) -> Path:
        return ROOT / f"apps/{self.name}/configs/small.yaml"

    def words(self, data: Path, run: Path, *more: str) -> list[str]:
        return [str(self.small), *self.quick, f"data.directory={data}", f"report.directory={run}", *more]

    def here(self, data: Path, run: Path, *more: str) -> int:
        """Exit code of a run in this process."""
        try:
            config.run(self.settings, self.main, self.words(data, run, *more))
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def refuses(self, data: Path, run: Path, more: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The run ends with one message that says ``text``, and leaves no weights."""
        assert self.here(data, run, *more) not in (0, 85)
        shown = capsys.readouterr().err
        assert text in shown and "Traceback" not in shown, shown
        assert not (run / "model.safetensors").exists()

    def once(self, data: Path, *more: str) -> Path:
        """The folder of a run that several tests look at."""
        run = data.with_name(f"{data.name}-once")
        if not run.exists():
            assert self.here(data, run, *more) == 0
        return run

    def names_in_help(self, names: Iterable[str]) -> None:
        done = subprocess.run([sys.executable, "-m", f"apps.{self.name}", "--help"], cwd=ROOT, capture_output=True, text=True)
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
    from hpcai.cli.check import Options, examine

    return {finding.code for finding in examine(folder, Options()).findings if finding.severity in severities}


def told(run: Path, kind: str = "train", name: str = "loss") -> dict[int, float]:
    """What a run's events say, by step."""
    return {e["step"]: e[name] for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == kind}
