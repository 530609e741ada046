"""The public DeepCAM files: one time step of the climate model CAM5 each, with the labels of an expert rule.

    data-<date>.h5      climate/data float32 [H, W, 16], climate/labels_0 (2019: climate/labels) of any whole-number type [H, W]
"""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep.atmosphere import VARIABLES
from hpcai.data.hdf5_source import fill_values, open_dataset
from hpcai.data.layout import parse_errors
from hpcai.errors import DataError


def read(path: Path, shape: tuple[int, int] | None = None) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Read the fields [H, W, 16] and labels [H, W] of a public file. Raises DataError for any difference from the published
    format."""
    advice = "fetch it again, or move it away"
    with parse_errors(path, advice), h5py.File(path, "r") as source:
        group = source.get("climate")
        if not isinstance(group, h5py.Group) or "data" not in group:
            members = sorted(group) if isinstance(group, h5py.Group) else sorted(source)
            raise DataError(f"{path}: no dataset climate/data, found {members}; expected a time step of the public set")
        key = next((key for key in ("labels_0", "labels") if key in group), None)
        if key is None:
            raise DataError(f"{path}: no climate/labels_0 nor climate/labels, found {sorted(group)}; rename the labels to labels_0")
        data, labels = (open_dataset(source, f"climate/{name}") for name in ("data", key))
        fills = fill_values(data)
        count = len(VARIABLES)
        if data.ndim != 3 or data.shape[-1] != count or data.dtype.kind != "f":
            expected = f"float32 (H, W, {count}): {', '.join(VARIABLES)}, in this order"
            raise DataError(f"{path}: climate/data is {data.dtype} {data.shape}, expected {expected}")
        if shape and data.shape[:2] != shape:
            raise DataError(f"{path}: climate/data has {data.shape[:2]} cells, the first file {shape}; convert sizes separately")
        if labels.shape != data.shape[:2] or labels.dtype.kind not in "iubf":
            description = f"climate/{key} is {labels.dtype} {labels.shape}"
            raise DataError(f"{path}: {description}, expected whole numbers {data.shape[:2]}; {advice}")
        fields, mask = data[...].astype(np.float32, copy=False), labels[...]
    if invalid := np.setdiff1d(mask, range(3))[:5].tolist():
        raise DataError(f"{path}: climate/{key} holds {invalid}, expected 0 background, 1 tropical cyclone, 2 river; {advice}")
    _check_values(path, fields, fills)
    return fields, mask.astype(np.uint8)


def _check_values(path: Path, fields: NDArray[np.float32], fills: NDArray[Any]) -> None:
    missing = ~np.isfinite(fields) | np.isin(fields, fills.astype(np.float32))
    reason = f"NaN, infinite or a fill value ({', '.join(f'{value:g}' for value in fills)})"
    for channel, (name, variable) in enumerate(VARIABLES.items()):
        values = fields[..., channel]
        if (bad := missing[..., channel]).any():
            rows = np.flatnonzero(bad.any(1))
            pole = ", at a pole" if rows[0] == 0 or rows[-1] == len(bad) - 1 else ""
            where = f"{bad.sum()} cells in rows {rows[0]} to {rows[-1]} of 0 to {len(bad) - 1}{pole}"
            raise DataError(f"{path}: {name} (variable {channel}) is {reason} in {where}; repair or move the file away")
        minimum, maximum = float(values.min()), float(values.max())
        if minimum < variable.minimum or maximum > variable.maximum or maximum < variable.least_maximum:
            expected = f"expected {variable.units}, {variable.minimum:g} to {variable.maximum:g}, max >= {variable.least_maximum:g}"
            advice = f"convert {name} to {variable.units}, or put the variables in the public order"
            raise DataError(f"{path}: {name} (variable {channel}) is {minimum:g} to {maximum:g}, {expected}; {advice}")
