"""Moments of values that come in parts, in float64 and without large sums that are subtracted.   C columns, each by itself.

Moments are the number of ``cells``, and of each column ``minimum``, ``maximum``, ``mean`` and ``square``, the sum of squared
deviations from the mean; as JSON has them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Moments = Mapping[str, Any]


def compute(values: NDArray[Any]) -> dict[str, Any]:
    """values [cells, C]"""
    wide = values.astype(np.float64)
    mean = wide.mean(0)
    return _as_dict(len(wide), wide.min(0), wide.max(0), mean, ((wide - mean) ** 2).sum(0))


def merge(parts: Iterable[Moments]) -> dict[str, Any]:
    """Moments of all parts (Chan, Golub and LeVeque 1983): no large sums are subtracted, so pressures lose no digits."""
    names = ("cells", "minimum", "maximum", "mean", "square")
    rows = ([np.atleast_1d(part[name]) for name in names] for part in parts)
    cells, low, high, mean, square = (np.array(values) for values in zip(*rows))       # [parts, C], cells [parts, 1]
    total = (cells / cells.sum() * mean).sum(0)
    return _as_dict(int(cells.sum()), low.min(0), high.max(0), total, (square + cells * (mean - total) ** 2).sum(0))


def _as_dict(cells: int, *columns: NDArray[np.float64]) -> dict[str, Any]:
    return {"cells": cells, **dict(zip(("minimum", "maximum", "mean", "square"), (values.tolist() for values in columns)))}


def summarize(parts: Iterable[Moments]) -> dict[str, Any]:
    """Moments of all parts, with the standard deviation in the place of ``square``."""
    total = merge(parts)
    square = np.array(total.pop("square"))
    return {**total, "deviation": np.sqrt(square / total["cells"]).tolist()}
