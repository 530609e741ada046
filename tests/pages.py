"""Runs and pictures for the tests of `hpcai report`: folders with a few events and arrays, and what a reader sees of a page."""

import json
import re
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.image import imread

from hpcai.cli import report
from hpcai.cli.report import curves, document, theme
from hpcai.cli.report.run import RunRecord
from hpcai.cli.report.theme import LIGHT, Plot


def written(run: Path, events: Any, settings: dict[str, Any] | None = None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if settings is not None:
        (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    return run


def evaluated(run: Path, app: str, better: str, *scores: dict[str, float], **settings: Any) -> RunRecord:
    """What the report reads in a run of an app, which has been evaluated; the first score is the run's metric."""
    start = {"kind": "start", "time": 1.79e9, "name": app, "world": 1, "device": "cpu", "steps": 80}
    about = {"kind": "evaluate", "time": 1.79e9, "seconds": 1.0}
    events = [start, *(about | {"step": 40 * n, "epoch": n} | found for n, found in enumerate(scores, 1))]
    train = {"metric": next(iter(scores[0])), "better": better}
    return report.read_run(written(run, events, {"train": train} | settings))


def saved(path: Path, arrays: dict[str, Any] | bytes) -> Path:
    """An .npz file of all arrays but those that are None, or a file of these bytes."""
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    else:
        np.savez(path, **{name: np.asarray(values) for name, values in arrays.items() if values is not None})
    return path


def text(page: str) -> str:
    """What a reader sees, without pictures and marks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("<body>")[1]))


def read_by_people(run: RunRecord) -> str:
    """The text of the page, for which no picture is drawn."""
    return text(document.render_page(run, dict.fromkeys(curves.plots(run), (b"", b""))))


def shows_something(picture: Any, found: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the picture, drawn coarsely as the page draws it, is wide and has more than paper on it."""
    monkeypatch.setattr(theme, "DPI", 30)
    pixels = imread(BytesIO(Plot("", "", "", partial(picture.draw, found)).png(LIGHT)))
    return bool(pixels.shape[1] > 250 and pixels[..., :3].std() > 0.05)


def subtitle(axes: Axes) -> str:
    return next(" ".join(each.get_text().split()) for each in axes.texts if each.get_position() == (0, 1.03))


def survives_damage(picture: Any, path: Path) -> None:
    """A file with flipped bits, or torn, is read or refused with a reason; most are refused."""
    whole, rng, lost = path.read_bytes(), np.random.default_rng(2), 0
    for _ in range(40):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(0, len(whole), 8)] ^= rng.integers(1, 256, 8, np.uint8)
        path.write_bytes(damaged[: rng.integers(1, len(whole)) if rng.random() < 0.3 else None].tobytes())
        try:
            picture.read(path)
        except Exception as error:
            assert str(error) or isinstance(error, EOFError | MemoryError)
            lost += 1
    assert lost > 20
