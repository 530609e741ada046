"""The values of rows, looked over as they pass by: not finite, out of range, constant, the same as others.   R rows  V values"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcai.data.doctor.findings import Bounds

NAMED = 10
FEW = 16  # values: a row of no more may well be constant
_CACHED = 256 << 10
_WIDE = 64 << 10
_LANES = 512
_BOX = 64 << 20


# ---- rows


def _values_of(dtype: np.dtype) -> np.dtype | None:
    """As what values of ``dtype`` are compared, complex ones as twice as many real ones; None for those that cannot be."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind == "c":
        return np.dtype(dtype.str.replace("c", "f").replace(str(dtype.itemsize), str(dtype.itemsize // 2)))
    return dtype if dtype.kind in "iuf" else None


class _Named:
    """Rows with the same fault: the first few by number, with a value, and how many."""

    def __init__(self, rows: list[int] | None = None, values: list[float] | None = None, count: int = 0) -> None:
        self.rows, self.values, self.count = rows or [], values or [], count

    def add(self, rows: Iterable[Any], values: Iterable[Any], count: int) -> None:
        if len(self.rows) < NAMED:
            for row, value in zip(rows, values):
                self.rows.append(int(row))
                self.values.append(_number(value))
                if len(self.rows) == NAMED:
                    break
        self.count += count

    def __str__(self) -> str:
        names = ", ".join(map(str, self.rows)) + (" ..." if self.count > len(self.rows) else "")
        return f"row {names}" if self.count == 1 else f"rows {names} ({self.count:,})"


def _number(value: Any) -> float:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, int | float) else float(value)


class Tally:
    """What the rows of one dataset hold: not finite, out of range, constant; and a key of each row, equal for equal rows.

    Rows come whole and many at once, or one in pieces. The key of a wide row comes from sums of its 64-bit words in lanes, a page
    apart, at the speed of memory; rows with equal keys are candidates, to be compared by their digests. Rows that
    hold nothing but ``blank`` are as they should be.
    """

    def __init__(self, dtype: np.dtype, shape: Sequence[int], bounds: Bounds, keys: bool, blank: float | None = None) -> None:
        self.width = math.prod(shape) * dtype.itemsize
        self.item = dtype.itemsize
        self.values = _values_of(dtype)
        self.low, self.high = bounds
        self.blank = blank
        self.long = self.values is not None and self.width // self.item > FEW
        self.keys = array("Q") if keys else None
        self.bad, self.outside, self.constant = _Named(), _Named(), _Named()
        self._begin()

    def _begin(self) -> None:
        self._least: Any = None
        self._most: Any = None
        self._sums, self._rest = np.zeros(_LANES if self._lanes else 0, np.uint64), b""
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def _lanes(self) -> bool:
        return self.keys is not None and self.width >= _WIDE

    def rows(self, first: int, data: np.ndarray) -> None:
        """Whole rows from number ``first`` on.   data [R * bytes of a row] uint8"""
        count = data.size // self.width
        if self.width >= _WIDE:
            for i in range(count):
                self.piece(first + i, data[i * self.width : (i + 1) * self.width], last=True)
            return
        same = np.zeros(count, bool)
        if self.values is not None:
            values = data.view(self.values).reshape(count, -1)  # [R, V]
            with np.errstate(all="ignore"):
                same = self._judge(first, values.min(1), values.max(1))
        if self.keys is not None:
            view, width = data.data, self.width
            for i in range(count):
                digest = hashlib.blake2b(view[i * width : (i + 1) * width], digest_size=8)
                self.keys.append(0 if same[i] else int.from_bytes(digest.digest()) or 1)

    def piece(self, row: int, data: np.ndarray, last: bool) -> None:
        """The next whole values of a row; with ``last`` it ends.   data [bytes] uint8"""
        step = max(_CACHED // self.item, 1) * self.item  # three passes over what lies in the cache, not over memory
        for start in range(0, data.size, step):
            part = data[start : start + step]
            if self.values is not None:
                values = part.view(self.values)
                with np.errstate(all="ignore"):
                    least, most = values.min(), values.max()
                    self._least = least if self._least is None else np.minimum(self._least, least)
                    self._most = most if self._most is None else np.maximum(self._most, most)
            if self._lanes:
                self._fold(part)
        if self.keys is not None and not self._lanes:
            self._digest.update(data.data)
        if last:
            same = self.values is not None and bool(self._judge(row, self._least[None], self._most[None])[0])
            if self.keys is not None:
                if self._lanes:
                    self._digest.update(self._sums.tobytes() + self._rest)
                self.keys.append(0 if same else int.from_bytes(self._digest.digest()) or 1)
            self._begin()

    def _fold(self, part: np.ndarray) -> None:
        page = _LANES * 8
        if self._rest:
            more = page - len(self._rest)
            self._rest += part[:more].tobytes()
            part = part[more:]
            if len(self._rest) < page:
                return
            self._sums += np.frombuffer(self._rest, np.uint64)
        whole = part.size // page * page
        if whole:
            self._sums += np.add.reduce(part[:whole].view(np.uint64).reshape(-1, _LANES), axis=0)
        self._rest = part[whole:].tobytes()

    def _judge(self, first: int, least: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Notes rows by their least and most values; returns which hold one value only.   least, most, result [R]"""
        assert self.values is not None
        finite = np.isfinite(least) & np.isfinite(most) if self.values.kind == "f" else np.ones(least.shape, bool)
        same = (least == most) & finite if self.long else np.zeros(least.shape, bool)
        odd = same if self.blank is None else same & (least != self.blank)
        below_it = least < self.low if self.low is not None else np.zeros(least.shape, bool)
        above_it = most > self.high if self.high is not None else np.zeros(least.shape, bool)
        for named, mask, value in (
            (self.bad, ~finite, least),
            (self.outside, (below_it | above_it) & finite, np.where(below_it, least, most)),
            (self.constant, odd, least),
        ):
            if count := int(np.count_nonzero(mask)):
                which = np.flatnonzero(mask)[:NAMED]
                named.add(which + first, value[which], count)
        return same

    # What a child process tells of it

    def told(self) -> dict[str, Any]:
        return {name: [n.rows, n.values, n.count] for name, n in self._faults().items()}

    def hear(self, told: Mapping[str, Any]) -> None:
        for name in self._faults():
            rows, values, count = told[name]
            setattr(self, name, _Named(list(map(int, rows)), list(map(_number, values)), int(count)))

    def _faults(self) -> dict[str, _Named]:
        return {"bad": self.bad, "outside": self.outside, "constant": self.constant}


def boxes_of(shape: Sequence[int], item: int, chunks: Sequence[int] | None, limit: int = _BOX) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most ``limit`` bytes that cover an array in row-major order, whole chunks along their first dim at best."""
    if not shape:
        yield ()
        return
    inner = item * math.prod(shape[1:])
    if inner > limit:
        for i in range(shape[0]):
            for rest in boxes_of(shape[1:], item, chunks[1:] if chunks else None, limit):
                yield (slice(i, i + 1), *rest)
        return
    count = max(limit // max(inner, 1), 1)
    if chunks and count > chunks[0]:
        count -= count % chunks[0]
    for i in range(0, shape[0], count):
        yield (slice(i, min(i + count, shape[0])),)
