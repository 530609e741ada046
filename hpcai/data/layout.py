"""The layout of arrays in files, to read them without the library that wrote them.

HDF5 and .npy files hold arrays in row-major order, contiguous or in chunks, at known offsets. h5py returns the offsets once per
file; samples are then byte ranges.
"""

import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from hpcai.data.direct import Reader
from hpcai.errors import DataError, HpcaiError
from hpcai.json_file import open_regular

MAX_GAP = 16 << 10
"""Bytes. Across smaller gaps one read is faster than two."""
_MAX_CHUNKS = 1 << 22  # most chunks of one dataset

_parse_lock = threading.Lock()  # the parser of Python 3.11, which reads the header, is not thread-safe

Slices = Sequence[slice]


class UnreadableLayoutError(DataError):
    """An intact file whose values cannot be read as byte ranges: compressed, filtered, virtual or external."""


@dataclass(frozen=True)
class Layout:
    """An array in a file, at byte ``offset``. A chunked array has ``offsets`` of chunks by grid index instead; chunks at the edge
    have full size, and chunks that were not written the value ``fill``."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None
    chunk: tuple[int, ...] = ()
    offsets: Mapping[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    fill: Any = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, reader: Reader, *index: slice | int) -> np.ndarray:
        """Read a box of the array: a slice (step 1) or an integer for each leading dim.

        A single byte range is returned without a copy; several are read into one array. Raises DataError as ``Reader`` does.
        """
        ranges, shape, out_shape = self.byte_ranges(index)
        if not ranges:
            return np.empty(out_shape, self.dtype)
        if len(ranges) == 1 and ranges[0].offset is not None and ranges[0].contiguous:
            raw = reader.fetch(self.path, ranges[0].offset, ranges[0].span)
            if raw.ctypes.data % self.dtype.itemsize == 0 or self.dtype.itemsize == 1:
                return raw.view(self.dtype).reshape(out_shape)
            return reader.memory.copy(np.frombuffer(raw, self.dtype)).reshape(out_shape)
        out = reader.memory.allocate(math.prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)
        parts, strided = [], []
        for byte_range in ranges:
            target = out[byte_range.out_index]
            if byte_range.offset is None:
                target[...] = self.fill
            elif byte_range.contiguous and target.flags.c_contiguous:
                parts.append((self.path, byte_range.offset, target.reshape(-1).view(np.uint8)))
            else:
                strided.append((byte_range, target))
        reader.read(parts)
        raws = reader.fetch_all([(self.path, byte_range.offset or 0, byte_range.span) for byte_range, _ in strided])
        for (byte_range, target), raw in zip(strided, raws):
            np.copyto(target, np.ndarray(target.shape, self.dtype, raw.data, 0, byte_range.strides))
        return out.reshape(out_shape)

    def byte_ranges(self, index: Sequence[slice | int]) -> "tuple[list[StridedRange], tuple[int, ...], list[int]]":
        """Return the byte ranges of a box, its shape, and its shape without the dims indexed by integers."""
        box, indexed = normalize_index(index, self.shape, f"{self.path}: '{self.name}'")
        shape = tuple(s.stop - s.start for s in box)
        ranges = [x for cell in self.touched_chunks(box) for x in to_ranges(*cell, self.dtype.itemsize)] if 0 not in shape else []
        return ranges, shape, [n for dim, n in enumerate(shape) if dim not in indexed]

    def touched_chunks(self, box: Slices) -> Iterator[tuple[int | None, tuple[int, ...], Slices, tuple[int, ...]]]:
        """Iterate over the chunks that intersect ``box``: (offset, shape, box within the chunk, its origin in the result)."""
        if not self.chunk:
            yield self.offset, self.shape, box, (0,) * len(box)
            return
        grid = [range(s.start // n, -(-s.stop // n)) for s, n in zip(box, self.chunk)]
        for cell in itertools.product(*grid):
            first = [c * n for c, n in zip(cell, self.chunk)]
            inner = [slice(max(s.start, f) - f, min(s.stop, f + n) - f) for s, f, n in zip(box, first, self.chunk)]
            begin = tuple(max(s.start, f) - s.start for s, f in zip(box, first))
            yield self.offsets.get(cell), self.chunk, inner, begin


@dataclass(frozen=True)
class StridedRange:
    """``span`` bytes from ``offset`` on that hold the values of ``out_index`` of the result, with ``strides`` in bytes."""

    offset: int | None
    span: int
    strides: tuple[int, ...]
    out_index: tuple[slice, ...]
    contiguous: bool


def to_ranges(offset: int | None, shape: tuple[int, ...], box: Slices, begin: tuple[int, ...], item: int) -> Iterator[StridedRange]:
    """Iterate over the byte ranges of a box of a row-major array. Ranges with small gaps are merged."""
    dims = len(shape)
    count = [s.stop - s.start for s in box]
    strides = tuple(item * math.prod(shape[d + 1 :]) for d in range(dims))
    level = next((d for d in range(dims - 1, -1, -1) if count[d] != shape[d]), 0)  # dims after it are complete
    dense = True
    while level > 0 and offset is not None:
        used = count[level] * strides[level]
        if count[level - 1] > 1 and strides[level - 1] - used > MAX_GAP:
            break
        # Otherwise a single index in the dim above is free, and a small gap is cheaper than another read.
        dense = dense and count[level - 1] == 1
        level -= 1
    if offset is None:
        level = 0
    span = sum((n - 1) * s for n, s in zip(count[level:], strides[level:])) + item
    for outer in itertools.product(*(range(n) for n in count[:level])):
        index = [box[d].start + outer[d] for d in range(level)] + [box[d].start for d in range(level, dims)]
        start = None if offset is None else offset + sum(i * s for i, s in zip(index, strides))
        out_index = tuple(slice(b + o, b + o + 1) for b, o in zip(begin, outer))
        out_index += tuple(slice(begin[d], begin[d] + count[d]) for d in range(level, dims))
        yield StridedRange(start, span, strides, out_index, dense)


def normalize_index(index: Sequence[slice | int], shape: tuple[int, ...], name: str) -> tuple[list[slice], set[int]]:
    if len(index) > len(shape):
        raise DataError(f"{name} has {len(shape)} dims, but {len(index)} indices are given")
    box, indexed = [], set()
    for dim, size in enumerate(shape):
        item = index[dim] if dim < len(index) else slice(None)
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step != 1:
                raise DataError(f"{name}: dim {dim} is read with a step of {step}, expected 1")
            box.append(slice(start, max(start, stop)))
        else:
            if not -size <= item < size:
                raise DataError(f"{name}: index {item} of dim {dim}, which has {size}")
            indexed.add(dim)
            box.append(slice(item % size, item % size + 1))
    return box, indexed


def is_finite(value: Any) -> bool:
    """Whether all elements are finite. The sum decides at memory bandwidth; only if it is not finite, each element is tested."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if value.dtype.kind not in "fc":
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(value.sum()) or np.isfinite(value).all())


@contextmanager
def parse_errors(where: object, advice: str, text: str = "cannot be read as HDF5") -> Iterator[None]:
    """Context manager: replace any exception of a parser, such as h5py, which has a dozen for damaged files, by a DataError."""
    try:
        yield
    except HpcaiError:
        raise
    except Exception as problem:
        raise DataError(f"{where}: {text} ({type(problem).__name__}: {str(problem)[:300]}); {advice}") from problem


def read_npy_header(file: IO[bytes], where: object) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, Fortran order and dtype of a ``.npy`` file, and the offset of its values. Raises DataError for damage."""
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read_header is None:
            raise ValueError(f"format {version}, expected 1.0 or 2.0")
        with _parse_lock:
            shape, fortran, dtype = read_header(file, max_header_size=10_000)
    except OSError:
        raise
    except Exception as problem:  # a damaged header raises errors of the tokenizer, overflows, and others
        raise DataError(f"{where}: not a .npy file ({type(problem).__name__}: {str(problem)[:200]})") from problem
    if any(n < 0 for n in shape):
        raise DataError(f"{where}: not a .npy file: its shape is {shape}")
    return shape, fortran, dtype, file.tell()


def npy_layout(path: str | Path) -> Layout:
    """Return the layout of a ``.npy`` file. Raises DataError for a damaged header, Python objects, and a truncated file."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, fortran, dtype, offset = read_npy_header(file, path)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}") from problem
    if dtype.hasobject or dtype.itemsize == 0:
        raise UnreadableLayoutError(f"{path}: '{path.name}' is {dtype}, expected numbers")
    if fortran and len(shape) > 1:
        raise UnreadableLayoutError(f"{path}: its values are in Fortran order; write it again with numpy.save(ascontiguousarray)")
    array_layout = Layout(path, path.name, shape, dtype, offset)
    _check_end(array_layout, offset + array_layout.nbytes, size)
    return array_layout


def hdf5_layout(file: h5py.File, name: str) -> Layout:
    """Return the layout of a dataset of an open HDF5 file.

    Raises UnreadableLayoutError for compressed or otherwise filtered chunks, virtual, external and compact datasets, and files with
    a user block, and DataError for a damaged file and for values beyond its end.
    """
    with parse_errors(file.filename, "copy or make it again", f"dataset '{name}' cannot be read"):
        return _hdf5_layout(file, name)


def _hdf5_layout(file: h5py.File, name: str) -> Layout:
    path, data = Path(file.filename), file[name]
    label = f"{path}: dataset '{name}'"
    if not isinstance(data, h5py.Dataset):
        raise DataError(f"{label} is a {type(data).__name__.lower()}, expected values")
    if data.dtype.hasobject or data.dtype.itemsize == 0 or data.shape is None:
        raise UnreadableLayoutError(f"{label} is {data.dtype}, expected numbers")
    plist = data.id.get_create_plist()
    if plist.get_nfilters():
        names = [plist.get_filter(i)[3].decode(errors="replace") or "a filter" for i in range(plist.get_nfilters())]
        raise UnreadableLayoutError(f"{label} is written through {', '.join(names)}, and direct reads need plain values")
    kind = plist.get_layout()
    if data.file.filename != file.filename:
        raise DataError(f"{label} is a link into another file; copy its values (h5repack)")
    if kind == h5py.h5d.VIRTUAL or (kind == h5py.h5d.CONTIGUOUS and plist.get_external_count()):
        raise UnreadableLayoutError(f"{label} is in other files")
    if kind == h5py.h5d.COMPACT:
        raise UnreadableLayoutError(f"{label} is within the header")
    if file.userblock_size:  # some versions of HDF5 include it in offsets, others do not
        raise UnreadableLayoutError(f"{path}: begins with a user block of {file.userblock_size} bytes")
    dtype, size = data.dtype, path.stat().st_size
    if kind == h5py.h5d.CONTIGUOUS:
        offset = data.id.get_offset()
        if offset is None:  # never written
            return Layout(path, name, data.shape, dtype, None, data.shape or (1,), {}, data.fillvalue)
        array_layout = Layout(path, name, data.shape, dtype, offset)
        _check_end(array_layout, offset + array_layout.nbytes, size)
        return array_layout
    chunk_bytes = math.prod(data.chunks) * dtype.itemsize
    count = data.id.get_num_chunks()
    if count > _MAX_CHUNKS or count * chunk_bytes > size:
        raise DataError(f"{label} has {count:,} chunks of {chunk_bytes:,} bytes by its header, in a file of {size:,}; damaged")
    offsets: dict[tuple[int, ...], int] = {}

    def add_chunk(chunk: Any) -> None:
        if chunk.size != chunk_bytes or chunk.filter_mask:
            raise DataError(f"{label}: chunk at {chunk.chunk_offset} has {chunk.size:,} bytes, expected {chunk_bytes:,}; damaged")
        offsets[tuple(o // n for o, n in zip(chunk.chunk_offset, data.chunks))] = chunk.byte_offset

    data.id.chunk_iter(add_chunk)
    array_layout = Layout(path, name, data.shape, dtype, None, data.chunks, offsets, data.fillvalue)
    if offsets:
        _check_end(array_layout, max(offsets.values()) + chunk_bytes, size)
    return array_layout


def _check_end(layout: Layout, end: int, size: int) -> None:
    if end > size:
        advice = "it is truncated: copy or make it again"
        raise DataError(f"{layout.path}: '{layout.name}' {layout.shape} ends at byte {end:,}, but the file has {size:,}; {advice}")
