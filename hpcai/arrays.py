"""Arrays from other programs, which may have masked elements, fill values, or another unit. Does not import torch."""

import logging
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcai.errors import DataError

# Values in place of missing ones: the defaults of netCDF for float, int and short, and those of CMIP and of older files.
FILL_VALUES = (9.969209968386869e36, -2147483647.0, -32767.0, 1e20, -9999.0, -999.0)

warn = logging.getLogger(__name__).warning  # inputs of trained models that are valid and look wrong


def to_array(values: Any, name: str) -> NDArray[Any]:
    """Return ``values``, an array or nested lists, without its mask. Raises DataError if an element is masked, or lists differ."""
    try:
        array = np.ma.array(values) if isinstance(values, list | tuple) else np.asanyarray(values)
    except ValueError as problem:
        raise DataError(f"{name}: {problem}; expected an array") from problem
    if isinstance(array, np.ma.MaskedArray) and (first := np.argwhere(np.ma.getmaskarray(array))[:1]).size:
        fault = f"{np.ma.count_masked(array):,} of {array.size:,} values are masked, the first at {first[0].tolist()}"
        raise DataError(f"{name}: {fault}; fill them (values.filled(...)), or leave them out")
    return np.asarray(array)


def describe_fill_values(values: ArrayLike) -> str:
    """Return how many elements have fill values, in brackets, for the message on invalid ones; empty if none has."""
    counts = {fill: np.count_nonzero(np.isclose(values, fill, rtol=1e-6, atol=0)) for fill in FILL_VALUES}
    return "".join(f" ({count:,} hold the fill value {fill:g})" for fill, count in counts.items() if count)
