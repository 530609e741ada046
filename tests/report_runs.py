"""Run directories and plots for the tests of `hpcai report`, and the visible text of its pages."""

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


def write_run(run: Path, events: Any, settings: dict[str, Any] | None = None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if settings is not None:
        (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    return run


def write_evaluated_run(run: Path, app: str, better: str, *scores: dict[str, float], **settings: Any) -> RunRecord:
    """Return the record of an app's run with one evaluation per item of ``scores``; the first key is the run's metric."""
    start = {"kind": "start", "time": 1.79e9, "name": app, "world": 1, "device": "cpu", "steps": 80}
    event = {"kind": "evaluate", "time": 1.79e9, "seconds": 1.0}
    events = [start, *(event | {"step": 40 * n, "epoch": n} | values for n, values in enumerate(scores, 1))]
    train = {"metric": next(iter(scores[0])), "better": better}
    return report.read_run(write_run(run, events, {"train": train} | settings))


def write_arrays(path: Path, arrays: dict[str, Any] | bytes) -> Path:
    """Write the arrays that are not None to an .npz file, or write the bytes."""
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    else:
        np.savez(path, **{name: np.asarray(values) for name, values in arrays.items() if values is not None})
    return path


def visible_text(page: str) -> str:
    """Return the text of a page without images and markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("<body>")[1]))


def page_text(run: RunRecord) -> str:
    """Return the text of a run's page, rendered without plots."""
    return visible_text(document.render_page(run, {plot: [(b"", b"")] for plot in curves.plots(run)}))


def is_drawn(picture: Any, data: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the figures of a picture, rendered at low resolution, are as wide as a phone and not blank."""
    monkeypatch.setattr(theme, "DPI", 30)
    figures = [imread(BytesIO(png)) for png in Plot("", "", "", partial(picture.draw, data)).png(LIGHT)]
    return bool(figures) and all(pixels.shape[1] == 144 and pixels[..., :3].std() > 0.05 for pixels in figures)


def subtitle(axes: Axes) -> str:
    return next(" ".join(each.get_text().split()) for each in axes.texts if each.get_position() == (0, 6))
