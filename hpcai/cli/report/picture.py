"""The interface of ``apps/<name>/picture.py``, with which `hpcai report` shows the predictions of an app's network.

The file is a module with the names of ``Picture``, found by the name of the app in the ``start`` event of a run. It may also have:

``finding(found) -> Finding``
    What the network learnt, the first words of the page, which must hold for a network that learnt nothing, too. Without it, they
    are those of the metric in ``train.metric``.
``classes(found) -> list[str]``
    Names of classes, the first of which is the background. The curves of a metric that is evaluated for each class
    (``accuracy_cat``, ``accuracy_dog``) then have the colours of the picture. Before the first picture exists, the setting
    ``model.classes`` is used instead.
``PALETTE``
    Colours of the classes without the first; the default is ``hpcai.cli.report.theme.PALETTE``.
``HIGHER``
    Substrings of names of metrics for which higher is better, in addition to those in ``hpcai.cli.report.run``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.figure import Figure

from hpcai.cli.report.theme import Theme
from hpcai.errors import DataError


class Table(NamedTuple):
    """A table below the pictures with a ``note``. All columns but the first hold numbers, or with ``text`` all hold text with line
    breaks."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: bool = False


class Finding(NamedTuple):
    """A sentence on what a network learnt from its data, and its number with the unit and the meaning."""

    sentence: str
    number: str
    meaning: str


def format_measured(value: float) -> str:
    """Format a number of which a validation split gives two digits."""
    return f"{float(f'{value:.2g}'):.10g}"


def compare_errors(error: float, baseline: float, name: str) -> str:
    """Return how much smaller an error is than that of the baseline ``name``, or that it is not."""
    if not error < 0.95 * baseline:
        return f"{'hardly' if error < baseline else 'no'} closer than {name} ({format_measured(baseline)})"
    return f"{format_measured(baseline / error) if error > 0 else 'infinitely many'} times closer than {name}"


class Picture(Protocol):
    """A kind of picture: functions that read, describe, draw and tabulate a run's file of predictions."""

    FILE: str
    """Name of the .npz file in the run's folder."""
    TITLE: str
    """Title of the picture on the page."""

    def read(self, path: Path, /) -> Any:
        """Return the content of the file, the ``found`` of other functions. Raises DataError or ValueError with the reason."""

    def caption(self, contents: Any, /) -> str:
        """Return one to five sentences below the title."""

    def draw(self, contents: Any, theme: Theme, /) -> Figure | Sequence[Figure]:
        """Return the picture in the colours of ``theme``, as one figure or several; called once for each theme."""

    def table(self, contents: Any, /) -> Table | None:
        """Return statistics of all predictions, or None."""


KINDS = {"real": "fiu", "whole": "iu", "text": "US"}


def arrays(path: Path, legend: Mapping[str, str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file named in ``legend``, and the existing ``optional`` ones, without unpickling.

    The legend gives the kind and the dims of each array, ``{"names": "text P", "true": "real N P"}``: a letter stands for the same
    size, at least 1, in all arrays. Raises DataError if an array is missing or has another kind or shape.
    """
    with np.load(path, allow_pickle=False) as file:
        missing = [name for name in legend if name not in file]
        if missing:
            raise DataError(f"has no array {', '.join(missing)}")
        loaded = {name: np.asarray(file[name]) for name in (*legend, *optional) if name in file}
    sizes: dict[str, int] = {}
    for name, description in legend.items():
        kind, *dims = description.split()
        array = loaded[name]
        known_sizes = ", ".join(f"{dim} = {sizes[dim]}" for dim in dict.fromkeys(dims) if dim in sizes)
        expected = [int(dim) if dim.isdigit() else sizes.setdefault(dim, size) for dim, size in zip(dims, array.shape)]
        if array.dtype.kind not in KINDS[kind] or array.ndim != len(dims) or [*array.shape] != expected or not array.size:
            shape = f"[{', '.join(dims)}]" + (f" with {known_sizes}" if known_sizes else "")
            raise DataError(f"{name} is {array.dtype} {array.shape}, expected {kind} {shape}")
        if kind == "text":
            loaded[name] = array.astype(str)
    return loaded
