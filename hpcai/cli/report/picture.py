"""What an app declares so that `hpcai report` shows what its network predicts: a file ``apps/<name>/picture.py``.

The file is a module with the names of ``Picture``. The page finds it by the name of the app, which the ``start`` event of a run
tells. A module may also have:

``classes(found) -> list[str]``
    Names of classes, the first being what is none of the others. The curves of a metric that is evaluated for each class
    (``accuracy_cat``, ``accuracy_dog``) then have the colours of the picture. Before the first picture exists, the setting
    ``model.classes`` takes the place of this function.
``PALETTE``
    Colours of the classes without the first; ``hpcai.cli.report.theme.PALETTE`` otherwise.
``HIGHER``
    Words in names of metrics which are better when they are higher, beside those that ``hpcai.cli.report.run`` knows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcai.cli.report.theme import Theme
from hpcai.errors import DataError


class Table(NamedTuple):
    """A table under the pictures. Numbers fill all columns but the first, or ``text`` all of them, whose lines stay as they are;
    ``note`` stands under the title."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: bool = False


class Picture(Protocol):
    """One kind of picture: how a run's file of predictions is read, described, drawn and counted."""

    FILE: str
    """Name of the .npz file in the run's folder."""
    TITLE: str
    """What the page calls the picture."""

    def read(self, path: Path, /) -> Any:
        """What the file holds; the other functions get it as ``found``. Raises DataError or ValueError, which say what is wrong."""

    def caption(self, found: Any, /) -> str:
        """One to five sentences under the title."""

    def draw(self, found: Any, theme: Theme, /) -> Figure:
        """The picture on the paper of ``theme``; it is called once for each theme."""

    def table(self, found: Any, /) -> Table | None:
        """What is counted in all predictions, or None where the curves say enough."""


KINDS = {"real": "fiu", "whole": "iu", "text": "US"}


def arrays(path: Path, legend: Mapping[str, str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that ``legend`` names, and those of the ``optional`` ones that are there; none is ever unpickled.

    The legend tells the kind of each array and its dims, ``{"names": "text P", "true": "real N P"}``: a dim has the same size, at
    least 1, wherever its letter stands. Raises DataError where an array is missing or of another kind or shape.
    """
    with np.load(path, allow_pickle=False) as file:
        missing = [name for name in legend if name not in file]
        if missing:
            raise DataError(f"has no array {', '.join(missing)}")
        found = {name: np.asarray(file[name]) for name in (*legend, *optional) if name in file}
    sizes: dict[str, int] = {}
    for name, words in legend.items():
        kind, *dims = words.split()
        array = found[name]
        told = ", ".join(f"{dim} = {sizes[dim]}" for dim in dict.fromkeys(dims) if dim in sizes)
        expected = [int(dim) if dim.isdigit() else sizes.setdefault(dim, size) for dim, size in zip(dims, array.shape)]
        if array.dtype.kind not in KINDS[kind] or array.ndim != len(dims) or [*array.shape] != expected or not array.size:
            shape = f"[{', '.join(dims)}]" + (f" with {told}" if told else "")
            raise DataError(f"{name} is {array.dtype} {array.shape}, expected {kind} {shape}")
        if kind == "text":
            found[name] = array.astype(str)
    return found


def panels(figure: Figure, count: int, columns: int) -> list[Axes]:
    """``count`` panels in rows of so many columns."""
    every = np.atleast_1d(figure.subplots(-(-count // columns), columns)).ravel()
    for axes in every[count:]:
        axes.remove()
    return every[:count].tolist()
