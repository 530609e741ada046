"""Stack named fields with units in the order and the units of the network's training."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.arrays import describe_fill_values, to_array
from hpcai.errors import DataError
from hpcai.models.deepcam.config import STRIDE, DeepCamConfig

# (unit of the data, unit of the model): offset and factor of (value + offset) * factor
_CONVERSIONS: dict[tuple[str, str], tuple[float, float]] = {
    ("hPa", "Pa"): (0.0, 100.0),
    ("mbar", "Pa"): (0.0, 100.0),
    ("degC", "K"): (273.15, 1.0),
    ("g/kg", "kg/kg"): (0.0, 1e-3),
    ("mm/day", "m/s"): (0.0, 1e-3 / 86400),
    ("mm/h", "m/s"): (0.0, 1e-3 / 3600),
    ("mm/s", "m/s"): (0.0, 1e-3),
    ("knot", "m/s"): (0.0, 1852 / 3600),
    ("km", "m"): (0.0, 1000.0),
    ("mm", "kg/m2"): (0.0, 1.0),  # depth of water
}
_SPELLINGS = {
    "C": "degC", "°C": "degC", "celsius": "degC", "mb": "mbar", "knots": "knot", "kt": "knot", "gpm": "m", "1": "kg/kg",
    "kelvin": "K", "m s-1": "m/s", "m s**-1": "m/s", "kg m-2": "kg/m2", "kg m**-2": "kg/m2", "kg/m^2": "kg/m2", "kg kg-1": "kg/kg",
    "kg kg**-1": "kg/kg", "g kg-1": "g/kg", "mm d-1": "mm/day", "mm/d": "mm/day", "mm h-1": "mm/h", "mm/hr": "mm/h",
}  # fmt: skip


def stack_fields(fields: Mapping[str, Any], cfg: DeepCamConfig, units: Mapping[str, str] | None = None) -> NDArray[np.float32]:
    """Stack the variables of ``cfg`` along a last dim: {name: [H, W] or [N, H, W]} -> [N, H, W, V].

    The unit of a field is that of ``units``, otherwise ``attrs["units"]`` (xarray), otherwise that of ``cfg``. Raises DataError for
    missing variables, unknown units, shapes that differ or are empty, dtypes that are not real, and values that are not finite or
    far outside the range of training.
    """
    missing = [name for name in cfg.variables if name not in fields]
    if missing:
        others = sorted(set(fields) - set(cfg.variables))
        hints = [f"{name} (is it {hit[0]!r}?)" if (hit := get_close_matches(name, others, 1, 0.5)) else name for name in missing]
        raise DataError(f"fields lack {', '.join(hints)}; expected {', '.join(cfg.variables)}, found {', '.join(fields) or 'none'}")
    unknown = sorted(set(units or {}) - set(cfg.variables))
    if unknown:
        raise DataError(f"units contains {', '.join(unknown)}; expected names of {', '.join(cfg.variables)}")
    arrays = [to_array(fields[name], name) for name in cfg.variables]
    columns = []
    for array, name, model_unit in zip(arrays, cfg.variables, cfg.units):
        unit = (units or {}).get(name) or getattr(fields[name], "attrs", {}).get("units", model_unit)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{name} is of dtype {array.dtype}; expected real numbers")
        known_unit = _SPELLINGS.get(unit, unit)
        if known_unit != model_unit and model_unit:
            if (known_unit, model_unit) not in _CONVERSIONS:
                known = [a for a, b in _CONVERSIONS if b == model_unit]
                text = f"{name} is in {unit!r}; expected {model_unit}"
                raise DataError(text + (f", or one of {', '.join(known)}" if known else ""))
            offset, factor = _CONVERSIONS[known_unit, model_unit]
            array = (array.astype(np.float64) + offset) * factor
        columns.append(array.astype(np.float32))
    for name, column in zip(cfg.variables, columns):
        if column.ndim not in (2, 3) or 0 in column.shape or column.shape != columns[0].shape:
            raise DataError(
                f"{name} has shape {list(column.shape)}, {cfg.variables[0]} {list(columns[0].shape)}; "
                "expected [H, W] or [N, H, W], the same for all and not empty"
            )
    for i, (name, column) in enumerate(zip(cfg.variables, columns)):
        _check_range(name, column, cfg, i, arrays[i])
    stack = np.stack(columns, -1)
    return stack[None] if stack.ndim == 3 else stack


def _check_range(name: str, values: NDArray[np.float32], cfg: DeepCamConfig, i: int, raw: NDArray[Any]) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        rows = np.unique(np.nonzero(bad)[-2])
        where = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
        raise DataError(
            f"{name}: {bad.sum()} values are not finite, in {where} of {values.shape[-2]}{describe_fill_values(raw)}; "
            "fill them, or leave these rows out"
        )
    if cfg.low is None or cfg.high is None:
        return
    low, high = cfg.low[i], cfg.high[i]
    slack = high - low
    minimum, maximum = float(values.min()), float(values.max())
    if minimum < low - slack or maximum > high + slack:
        raise DataError(
            f"{name} goes from {minimum:g} to {maximum:g} {cfg.units[i]}, but from {low:g} to {high:g} in training"
            f"{describe_fill_values(raw)}; is it in another unit? pass units={{{name!r}: ...}}"
        )


def pad_fields(fields: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replicate the last rows and columns up to multiples of the output stride.   [N, H, W, V] -> [N, H', W', V]"""
    padding = [(0, -n % STRIDE) for n in fields.shape[1:3]]
    return np.pad(fields, ((0, 0), *padding, (0, 0)), mode="edge")
