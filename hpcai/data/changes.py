"""Changes of a data set between a checkpoint and its resume. Its identity has names, rows and sizes of files, no contents."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np

from hpcai.data.hdf5 import Rows
from hpcai.errors import DataError, HpcaiError
from hpcai.json_file import read_object

_MAX_STATS, _MAX_COMPARED = 1024, 16  # files whose times, and whose values, are compared


def changes_since(rows: Rows, seconds: float) -> str:
    """Describe the files that were written after a time, in seconds since the epoch, and values in them outside of the range in
    statistics.json. Return an empty string if there are none. Of a large folder some files, evenly spaced, are compared."""
    some = rows.paths[:: -(-len(rows.paths) // _MAX_STATS)]
    newer = [path for path in some if path.is_file() and path.stat().st_mtime > seconds]
    if not newer:
        return ""
    messages = [f"{len(newer)} of {len(some)} files in {rows.folder} are newer"]
    with suppress(HpcaiError, OSError, LookupError, TypeError, ValueError, AttributeError):  # a statistics.json of another form
        messages += _values_out_of_range(rows, newer[:: -(-len(newer) // _MAX_COMPARED)])
    return "; ".join(messages)


def _values_out_of_range(rows: Rows, paths: Sequence[Path]) -> Iterator[str]:
    """Yield a message for each small field with values outside of the range of the split."""
    splits = read_object(rows.folder.parent / "statistics.json", "statistics of the splits", DataError)["splits"]
    for name, statistics in splits[rows.folder.name].items():
        if name not in rows.fields or not isinstance(statistics, dict):
            continue
        low, high = np.array(statistics["minimum"]), np.array(statistics["maximum"])
        slack = 1e-3 * (high - low)
        for path in paths if rows.shapes[name] in ((), low.shape) else ():
            with h5py.File(path) as file:
                values = file[name][...].reshape(-1, len(low))
            if ((values < low - slack) | (values > high + slack)).any():
                expected = f"statistics.json has {low.min():g} to {high.max():g}"
                yield f"'{name}' of {path.name} has values of {values.min():g} to {values.max():g}, {expected}"
                break
