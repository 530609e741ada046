"""Moments of values that come in parts, in float64 and without large sums that are subtracted.   C columns, each by itself."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("cells", "minimum", "maximum", "mean", "square")   # square: the sum of squared deviations from the mean
Moments = tuple[Any, ...]


def measure(values: NDArray[Any]) -> Moments:
    """values [cells, C]"""
    wide = values.astype(np.float64)
    mean = wide.mean(0)
    return len(wide), wide.min(0), wide.max(0), mean, ((wide - mean) ** 2).sum(0)


def join(parts: Iterable[Moments]) -> Moments:
    """Moments of all parts (Chan, Golub and LeVeque 1983): no large sums are subtracted, so pressures lose no digits."""
    cells, least, most, mean, square = (np.array(values) for values in zip(*parts))
    weight = cells[:, None] / cells.sum()
    whole = (weight * mean).sum(0)
    return int(cells.sum()), least.min(0), most.max(0), whole, (square + cells[:, None] * (mean - whole) ** 2).sum(0)


def of(record: dict[str, Any]) -> Moments:
    """Moments that a record states by NAMES."""
    return tuple(record[name] for name in NAMES)
