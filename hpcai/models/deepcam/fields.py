"""Stack named fields with units in the order and the units of the network's training."""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.arrays import describe_fill_values, to_array, warn
from hpcai.errors import DataError
from hpcai.models.deepcam.config import STRIDE, DeepCamConfig

_UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))


def stack_fields(fields: Mapping[str, Any], cfg: DeepCamConfig, units: Mapping[str, str] | None = None) -> NDArray[np.float32]:
    """Stack the variables of ``cfg`` along a last dim: {name: [H, W] or [N, H, W]} -> [N, H, W, V].

    The unit of a field is that of ``units``, otherwise ``attrs["units"]`` (xarray), otherwise that of ``cfg``. Raises DataError for
    missing variables, unknown units, shapes that differ or are empty, dtypes that are not real, and values that are not finite or
    far outside the range of training. Logs a warning for rows or columns in another order, seen in winds and pressure.
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
        columns.append(_convert_units(name, array, unit, model_unit))
    for i, (name, column) in enumerate(zip(cfg.variables, columns)):
        if column.ndim not in (2, 3) or 0 in column.shape or column.shape != columns[0].shape:
            fault = f"{name} has shape {list(column.shape)}, {cfg.variables[0]} {list(columns[0].shape)}"
            raise DataError(f"{fault}; expected [H, W] or [N, H, W], the same for all and not empty")
        _check_range(name, column, cfg, i, arrays[i])
    named, shape = dict(zip(cfg.variables, columns)), columns[0].shape[-2:]
    if named.keys() >= {"U850", "V850", "PSL"} and min(shape) >= 64:  # small regions may have another balance
        _check_layout(*(named[name].reshape(-1, *shape)[0] for name in ("U850", "V850", "PSL")))
    stack = np.stack(columns, -1)
    return stack[None] if stack.ndim == 3 else stack


def _convert_units(name: str, values: NDArray[Any], unit: str, model_unit: str) -> NDArray[np.float32]:
    if values.dtype.kind not in "biuf":
        raise DataError(f"{name} is of dtype {values.dtype}; expected real numbers")
    known_unit, conversions = _UNITS["spellings"].get(unit, unit), _UNITS["conversions"].get(model_unit, {})
    if known_unit == model_unit or not model_unit:
        return values.astype(np.float32)
    if known_unit not in conversions:
        others = f", or one of {', '.join(conversions)}" if conversions else ""
        raise DataError(f"{name} is in {unit!r}; expected {model_unit}{others}")
    offset, factor = conversions[known_unit]
    return ((values.astype(np.float64) + offset) * factor).astype(np.float32)


def _check_range(name: str, values: NDArray[np.float32], cfg: DeepCamConfig, i: int, raw: NDArray[Any]) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        rows = np.unique(np.nonzero(bad)[-2])
        where = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
        fault = f"{name}: {bad.sum()} values are not finite, in {where} of {values.shape[-2]}{describe_fill_values(raw)}"
        raise DataError(f"{fault}; fill them, or leave these rows out")
    if cfg.low is None or cfg.high is None:
        return
    low, high = cfg.low[i], cfg.high[i]
    slack = high - low
    minimum, maximum = float(values.min()), float(values.max())
    is_outside = maximum < low - slack / 10 or minimum > high + slack / 10  # such as PS in hPa
    is_flat = low < 0 and 0 < maximum - minimum < 2e-3 * slack  # such as Z1000 in km
    if minimum < low - slack or maximum > high + slack or is_flat or is_outside:
        raise DataError(
            f"{name} goes from {minimum:g} to {maximum:g} {cfg.units[i]}, but from {low:g} to {high:g} in training"
            f"{describe_fill_values(raw)}; is it in another unit? pass units={{{name!r}: ...}}"
        )


def _check_layout(u: NDArray[Any], v: NDArray[Any], pressure: NDArray[Any]) -> None:
    """Log a warning if a map is mirrored or transposed. Winds blow along isobars, f u = -dp/dy and f v = dp/dx with the Coriolis
    parameter f of a row: mirrored, the two differ in its sign; transposed, both are weak.   [H, W] each"""
    balance, transposed = _balance(u, v, pressure), _balance(u.T, v.T, pressure.T)
    if balance < -0.2 or (abs(transposed) > 0.6 and balance < abs(transposed) / 2):
        text = "U850, V850 and PSL are balanced as in a %s map (%.2f); expected rows [H, W] from south to north, columns eastward"
        warn(text, "mirrored" if balance < -0.2 else "transposed", balance)


def _balance(u: NDArray[Any], v: NDArray[Any], pressure: NDArray[Any]) -> float:
    """Return the mean over rows of corr(u, -dp/dy) * corr(v, dp/dx), positive for balanced winds.   [H, W] each"""
    (north, east), product = np.gradient(pressure.astype(np.float64)), np.ones(len(u))
    for pair in ((u, -north), (v, east)):
        a, b = (values - values.mean(1, keepdims=True) for values in pair)
        product *= (a * b).sum(1) / np.maximum(np.sqrt((a * a).sum(1) * (b * b).sum(1)), 1e-300)
    return float(product.mean())


def pad_fields(fields: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replicate the last rows and columns up to multiples of the output stride.   [N, H, W, V] -> [N, H', W', V]"""
    padding = [(0, -n % STRIDE) for n in fields.shape[1:3]]
    return np.pad(fields, ((0, 0), *padding, (0, 0)), mode="edge")
