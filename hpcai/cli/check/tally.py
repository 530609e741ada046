"""The values of rows, looked over as they pass by: not finite, out of range, constant, the same as others.   R rows  V values"""

import hashlib
import math
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hpcai.cli.check.findings import Bounds

NAMED = 10
FEW = 16  # values: a row of no more may well be constant
_WIDE = 64 << 10
_CACHED = 256 << 10  # bytes, over which three passes cost no more memory traffic than one
_NOTHING = np.empty(0, np.uint8)


def _values_of(dtype: np.dtype) -> np.dtype | None:
    """The type as which values of ``dtype`` are compared, complex ones as twice as many real ones; None where they cannot be."""
    if dtype.kind not in "biufc":
        return None
    return np.dtype(np.uint8) if dtype.kind == "b" else np.empty(0, dtype).real.dtype


@dataclass
class Named:
    """Rows with the same fault: the first few by number, with a value, and how many."""

    rows: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, first: int, mask: np.ndarray, values: np.ndarray) -> None:
        """Rows from number ``first`` on.   mask, values [R]"""
        which = np.flatnonzero(mask)
        self.count += len(which)
        for at in which[: NAMED - len(self.rows)].tolist():
            self.rows.append(first + at)
            value = values[at].item()
            self.values.append(value if isinstance(value, int | float) else float(value))

    def __str__(self) -> str:
        names = ", ".join(map(str, self.rows)) + (" ..." if self.count > len(self.rows) else "")
        return f"row {names}" if self.count == 1 else f"rows {names} ({self.count:,})"


class Tally:
    """What the rows of one dataset hold: not finite, out of range, constant; and a key of each row, equal for equal rows.

    Bytes come in any pieces. Narrow rows are judged many at a time, wide ones in parts that a cache holds. The key of a narrow
    row is a digest; that of a wide one, two checksums of 64 and 32 bits at the speed of memory. A constant row has the key 0. Rows
    that hold nothing but ``blank`` are as they should be. ``row`` is the number of the row that comes next.
    """

    def __init__(self, dtype: np.dtype, shape: Sequence[int], bounds: Bounds, keys: bool, blank: float | None = None) -> None:
        self.width = math.prod(shape) * dtype.itemsize
        self.values = _values_of(dtype)
        self.low, self.high = bounds
        self.blank = blank
        self.long = self.values is not None and self.width // dtype.itemsize > FEW
        self.keyed, self.keys = keys, array("Q")
        self.faults = {"nan": Named(), "range": Named(), "constant": Named()}
        self.row = 0
        self._part = _CACHED // dtype.itemsize * dtype.itemsize or dtype.itemsize
        self._rest = _NOTHING
        self._begin()

    def _begin(self) -> None:
        self._seen = self._sum = self._check = 0
        self._ends: list[np.ndarray] = []

    def add(self, data: np.ndarray) -> None:
        """The next bytes, cut anywhere.   data [bytes] uint8"""
        while data.size:
            wide = self.width >= _WIDE
            unit = min(self._part, self.width - self._seen) if wide else self.width
            if self._rest.size or data.size < unit:
                more = data[: unit - self._rest.size]
                part, data = np.concatenate([self._rest, more]), data[more.size :]
                self._rest = part if part.size < unit else _NOTHING
                if part.size < unit:
                    return
            else:
                size = unit if wide else data.size // unit * unit
                part, data = data[:size], data[size:]
            (self._wide if wide else self._narrow)(part)

    def _narrow(self, data: np.ndarray) -> None:
        """Whole rows.   data [R * bytes of a row] uint8"""
        count, width = data.size // self.width, self.width
        same = np.zeros(count, bool)
        if self.values is not None:
            values = data.view(self.values).reshape(count, -1)  # [R, V]
            with np.errstate(all="ignore"):
                same = self._judge(values.min(1), values.max(1))
        if self.keyed:
            view = data.data
            for i in range(count):
                digest = hashlib.blake2b(view[i * width : (i + 1) * width], digest_size=8)
                self.keys.append(0 if same[i] else int.from_bytes(digest.digest()) or 1)
        self.row += count

    def _wide(self, part: np.ndarray) -> None:
        """The next part of one row."""
        self._seen += part.size
        if self.values is not None:
            values = part.view(self.values)
            with np.errstate(all="ignore"):
                self._ends += [values.min(), values.max()]
        if self.keyed:
            words = part[: part.size // 8 * 8].view(np.uint64)
            self._sum, self._check = self._sum + int(np.add.reduce(words)), zlib.crc32(part.data, self._check)
        if self._seen == self.width:
            with np.errstate(all="ignore"):
                ends = np.array(self._ends)
                same = self.values is not None and self._judge(ends.min()[None], ends.max()[None])[0]
            if self.keyed:
                self.keys.append(0 if same else (self._sum + self._check * 0x9E3779B97F4A7C15) % (1 << 64) or 1)
            self.row += 1
            self._begin()

    def _judge(self, least: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Notes rows by their least and most values; returns which hold one value only.   least, most, result [R]"""
        assert self.values is not None
        no = np.zeros(least.shape, bool)
        finite = np.isfinite(least) & np.isfinite(most) if self.values.kind == "f" else ~no
        same = (least == most) & finite if self.long else no
        odd = same if self.blank is None else same & (least != self.blank)
        below = least < self.low if self.low is not None else no
        above = most > self.high if self.high is not None else no
        self.faults["nan"].add(self.row, ~finite, least)
        self.faults["range"].add(self.row, (below | above) & finite, np.where(below, least, most))
        self.faults["constant"].add(self.row, odd, least)
        return same

    # ---- what a child process tells of it

    def told(self) -> dict[str, Any]:
        return {"keys": self.keys.tobytes().hex(), "faults": {name: asdict(fault) for name, fault in self.faults.items()}}

    def hear(self, told: Mapping[str, Any]) -> None:
        self.keys.frombytes(bytes.fromhex(told["keys"]))
        self.faults = {name: Named(**fault) for name, fault in told["faults"].items()}
