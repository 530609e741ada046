"""Reads of file ranges to GPU memory without a copy in host memory: GPUDirect Storage, through KvikIO.

If the driver does not support GPUDirect Storage on a file system, KvikIO reads through pinned memory (its compatibility mode), with
the same result, but no faster than the direct reader. The log names the mode. KvikIO requires a GPU driver; tests use a double.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.data.direct import ALIGN, align_down, align_up
from hpcai.data.file_cache import FileCache, check_file_limit
from hpcai.data.layout import Layout, StridedRange
from hpcai.errors import DataError, MissingExtraError

logger = logging.getLogger(__name__)

_STAGING_BYTES = 256 << 20
"""Bytes of device memory for ranges that are read before they are copied to the result."""
_FILES = 64  # open files: KvikIO registers each with the driver
_THREADS, _TASK = 8, 4 << 20  # reads in flight, and bytes of each: settings of KvikIO for the process


class _File(NamedTuple):
    handle: Any
    size: int


class GdsReader(AbstractContextManager["GdsReader"]):
    """Reads boxes of arrays into memory of ``device``. Thread-safe.

    Each byte range is read with the blocks of its ends to an aligned address, which GPUDirect Storage needs to avoid a bounce
    buffer. A single range is returned without a copy; several are copied to the result on the device. ``kvikio`` replaces the
    module in tests.

    Raises MissingExtraError without KvikIO, and DataError without a GPU driver, if a file cannot be opened or read, for a range
    beyond its end, and for values without a dtype in torch.
    """

    def __init__(self, device: torch.device, *, kvikio: Any = None) -> None:
        self.device = device
        self._kvikio = _import_kvikio(device) if kvikio is None else kvikio
        self._files = FileCache(self._open, lambda file: file.handle.close(), _FILES)
        # KvikIO's reads are not ordered with any stream, but the caching allocator reuses freed memory in stream order. On a
        # private stream only copies of this reader may still use such memory, and `_fetch` waits for them.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            self._kvikio.defaults.set({"num_threads": _THREADS, "task_size": _TASK})
            _log_mode(bool(self._kvikio.defaults.is_compat_mode_preferred()))
        except Exception as problem:
            raise DataError(f"KvikIO cannot be set up: {problem}; {_ADVICE}") from problem

    def read(self, layout: Layout, *index: slice | int) -> Tensor:
        """Read a box of an array to the device, as ``Layout.read``, ordered with the current stream."""
        description = f"{layout.path}: '{layout.name}' is {layout.dtype.str}"
        if not layout.dtype.isnative:
            text = "not in this machine's byte order, as a GPU needs; rewrite it, or use data.reader=direct"
            raise DataError(f"{description}, {text}")
        try:
            dtype = torch.from_numpy(np.empty(0, layout.dtype)).dtype
        except TypeError as problem:
            raise DataError(f"{description}, which torch has no dtype for; use data.reader=direct") from problem
        ranges, shape, out_shape = layout.byte_ranges(index)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if len(ranges) == 1 and ranges[0].contiguous and ranges[0].offset is not None:
                out = _view_as(self._fetch(layout.path, ranges)[0], dtype).view(shape)
            else:
                out = torch.empty(shape, dtype=dtype, device=self.device)
                for portion in _split_portions(ranges):
                    self._scatter(layout, portion, out)
        if self._stream is not None:
            self._stream.synchronize()  # the result is complete, and may be used on any stream
            out.record_stream(torch.cuda.current_stream(self.device))
        return out.view(out_shape)

    def close(self) -> None:
        """Close the files; a file in use is closed after its read. Tensors stay valid."""
        self._files.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scatter(self, layout: Layout, ranges: Sequence[StridedRange], out: Tensor) -> None:
        item = layout.dtype.itemsize
        for run in ranges:
            if run.offset is None:  # never written
                out[run.out_index].fill_(np.asarray(layout.fill).item())
        stored = [run for run in ranges if run.offset is not None]
        for run, raw in zip(stored, self._fetch(layout.path, stored) if stored else ()):
            target = out[run.out_index]
            target.copy_(_view_as(raw, out.dtype).as_strided(target.shape, [stride // item for stride in run.strides]))

    def _fetch(self, path: Path, runs: Sequence[StridedRange]) -> list[Tensor]:
        """Return the bytes of each range on the device.   [span] uint8"""
        with self._files.use(path) as file:
            bounds = [(run.offset or 0, (run.offset or 0) + run.span) for run in runs]
            if (end := max(end for _, end in bounds)) > file.size:
                advice = "it is truncated or was rewritten: compare it with its source"
                raise DataError(f"{path}: ends at byte {file.size:,}, but bytes up to {end:,} are requested; {advice}")
            reads, size = [], 0
            for start, end in bounds:
                first, last = align_down(start), min(align_up(end), file.size)  # KvikIO raises an error at the end of a file
                reads.append((size, first, last))
                size += align_up(last - first)
            memory = torch.empty(size + ALIGN, dtype=torch.uint8, device=self.device)
            memory = memory[-memory.data_ptr() % ALIGN :]
            if self._stream is not None:
                self._stream.synchronize()  # copies from this memory by an earlier read
            self._read(path, [(memory[base : base + last - first], first) for base, first, last in reads], file, bounds)
        return [memory[base + start - first : base + end - first] for (base, first, _), (start, end) in zip(reads, bounds)]

    def _read(self, path: Path, parts: Sequence[tuple[Tensor, int]], file: _File, bounds: Sequence[tuple[int, int]]) -> None:
        futures, failure = [], None
        counts: list[int] = []
        try:
            for into, first in parts:
                futures.append(file.handle.pread(into, len(into), first, _TASK))
        except Exception as problem:
            failure = problem
        for future in futures:  # all, before memory is freed
            try:
                counts.append(future.get())
            except Exception as problem:
                counts.append(0)
                failure = failure or problem
        for (_, first), (start, end), count in zip(parts, bounds, counts):
            if first + count < end and failure is None:
                raise DataError(
                    f"{path}: bytes {start:,} to {end:,} are requested, but reads stop at byte {first + count:,} of {file.size:,}; "
                    "it is being rewritten, or its file system fails: compare it with its source"
                )
        if failure is not None:
            low, high = min(start for start, _ in bounds), max(end for _, end in bounds)
            raise DataError(f"{path}: bytes {low:,} to {high:,} cannot be read to the GPU: {failure}; {_ADVICE}") from failure

    def _open(self, path: Path) -> _File:
        try:
            size = os.stat(path).st_size
        except OSError as problem:
            raise DataError(f"{path}: cannot be opened: {problem.strerror}") from problem
        try:
            return _File(self._kvikio.CuFile(path, "r"), size)
        except Exception as problem:
            check_file_limit(path, problem)
            raise DataError(f"{path}: cannot be opened for the GPU: {problem}; {_ADVICE}") from problem


_ADVICE = "data.reader=direct needs neither KvikIO nor a driver"


def _import_kvikio(device: torch.device) -> Any:
    try:
        kvikio = import_module("kvikio")
        import_module("kvikio.defaults")
    except ModuleNotFoundError as problem:
        raise MissingExtraError(f"data.reader=gds needs {problem.name}: pip install 'hpcai-suite[gds]'; {_ADVICE}") from problem
    except (ImportError, OSError) as problem:
        raise DataError(f"data.reader=gds: KvikIO is installed but does not load ({problem}); {_ADVICE}") from problem
    if device.type != "cuda" or not torch.cuda.is_available():
        raise DataError(
            f"data.reader=gds reads to a GPU, but the device is {device} and CUDA is {'' if torch.cuda.is_available() else 'not '}"
            f"available (KvikIO needs libcuda.so.1, the driver's library); {_ADVICE}"
        )
    return kvikio


@cache
def _log_mode(compatible: bool) -> None:
    mode = "GPUDirect Storage is available; file systems without it are read through pinned memory"
    if compatible:
        mode = "no GPUDirect Storage on this machine: KvikIO reads through pinned memory (compatibility mode)"
    logger.info("data.reader=gds: %s", mode)


def _view_as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements, in a copy if they are not aligned to the size of an element.   [span] uint8 -> [span / item]"""
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def _split_portions(ranges: Sequence[StridedRange]) -> Iterator[list[StridedRange]]:
    portion: list[StridedRange] = []
    size = 0
    for run in ranges:
        if portion and size + run.span > _STAGING_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(run)
        size += align_up(run.span) + ALIGN if run.offset is not None else 0
    if portion:
        yield portion
