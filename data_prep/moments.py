"""Parallel computation of moments of C columns, in float64 and without cancellation.

Moments are a JSON object: the number of ``cells``, and for each column ``minimum``, ``maximum``, ``mean`` and ``square``, the sum
of squared deviations from the mean.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Moments = Mapping[str, Any]


def compute(values: NDArray[Any]) -> dict[str, Any]:
    """Return the moments of the columns.   Shape: values [cells, C]"""
    wide = values.astype(np.float64)
    mean = wide.mean(0)
    return _as_dict(len(wide), wide.min(0), wide.max(0), mean, ((wide - mean) ** 2).sum(0))


def merge(parts: Iterable[Moments]) -> dict[str, Any]:
    """Merge moments (Chan, Golub and LeVeque 1983). No large sums are subtracted, so that pressures lose no digits."""
    names = ("cells", "minimum", "maximum", "mean", "square")
    rows = ([np.atleast_1d(part[name]) for name in names] for part in parts)
    cells, low, high, mean, square = (np.array(values) for values in zip(*rows))       # [parts, C], cells [parts, 1]
    total = (cells / cells.sum() * mean).sum(0)
    return _as_dict(int(cells.sum()), low.min(0), high.max(0), total, (square + cells * (mean - total) ** 2).sum(0))


def _as_dict(cells: int, *columns: NDArray[np.float64]) -> dict[str, Any]:
    return {"cells": cells, **dict(zip(("minimum", "maximum", "mean", "square"), (values.tolist() for values in columns)))}


def summarize(parts: Iterable[Moments]) -> dict[str, Any]:
    """Merge moments, and return the standard deviation ``deviation`` in place of ``square``."""
    total = merge(parts)
    square = np.array(total.pop("square"))
    return {**total, "deviation": np.sqrt(square / total["cells"]).tolist()}
