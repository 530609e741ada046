"""Direct reads (O_DIRECT) of file ranges, many in flight, into a pool of page-aligned memory.

A dataset larger than the memory replaces the whole page cache in every epoch: each byte is copied once more, and pages are evicted
just before they are needed. O_DIRECT bypasses the cache, but requires addresses, offsets and lengths that are multiples of a block.
The reader accepts any offset and length.

preadv in threads releases the GIL, and keeps a disk as busy as io_uring does.
"""

import errno
import logging
import math
import mmap
import os
import queue
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hpcai.data.file_cache import FileCache, check_file_limit
from hpcai.errors import DataError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ALIGN = max(4096, mmap.PAGESIZE)
"""Bytes. A multiple of the block size of every disk; Lustre requires full pages, which are 64 KiB on some processors."""
HUGE_PAGE = 2 << 20
Mode = Literal["auto", "direct", "buffered"]
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: not on this system, such as macOS
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def align_down(offset: int) -> int:
    return offset // ALIGN * ALIGN


def align_up(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


class _Lease:
    """The base of all arrays and tensors that view a block. Its finalizer returns the block to the pool."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class MemoryPool:
    """A pool of page-aligned memory blocks. A block is reused after the last array that views it is freed.

    ``max_unused`` bytes are kept for reuse, or three of the largest blocks if these are more. ``pin``: a GPU, for which blocks are
    pinned, so that copies to it are asynchronous and need no staging buffer.
    """

    def __init__(self, max_unused: int = 1 << 30, pin: "torch.device | None" = None) -> None:
        self.max_unused, self.pin = max_unused, pin
        self._lock, self._free = threading.Lock(), OrderedDict[int, list[np.ndarray]]()
        self._unused = self._largest = 0
        # Finalizers return blocks at any time, also while this thread holds the lock.
        self._returned: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def allocate(self, size: int) -> np.ndarray:
        """Return ``size`` uninitialised bytes at an aligned address. The memory extends to a multiple of ALIGN.   [size] uint8"""
        step = max(ALIGN, 1 << max(max(size, 1).bit_length() - 3, 0))  # at most a quarter: samples of similar sizes share blocks
        rounded = -(-max(size, 1) // step) * step
        with self._lock:
            self._largest = max(self._largest, rounded)
            self._reclaim()
            blocks = self._free.get(rounded)
            block = blocks.pop() if blocks else None
            if block is not None:
                self._unused -= rounded
        if block is None:
            block = _map_block(rounded, self.pin)
        lease = _Lease(block.ctypes.data, rounded)
        weakref.finalize(lease, self._returned.put, block).atexit = False
        return np.asarray(lease)[:size]

    def copy(self, array: np.ndarray) -> np.ndarray:
        """Return a contiguous copy of ``array`` in this pool."""
        out = self.allocate(max(array.nbytes, 1))[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(out, array)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an empty pool without a device, for worker processes."""
        return MemoryPool, (self.max_unused,)

    @property
    def unused(self) -> int:
        with self._lock:
            self._reclaim()
            return self._unused

    def _reclaim(self) -> None:
        while not self._returned.empty():
            block = self._returned.get_nowait()
            self._free.setdefault(block.size, []).append(block)
            self._free.move_to_end(block.size)
            self._unused += block.size
        while self._unused > max(self.max_unused, 3 * self._largest):
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self._unused -= size
            if not blocks:
                del self._free[size]


class _Mapping(mmap.mmap):
    """Anonymous memory that is unpinned before it is unmapped, in the thread that drops the last array, since the kernel reuses the
    address. A finalizer of the array would be too late: NumPy 2.5 calls it after the unmapping."""

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def _map_block(size: int, gpu: "torch.device | None" = None) -> np.ndarray:
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # no huge pages in this kernel
            mapping.madvise(mmap.MADV_HUGEPAGE)  # a direct read looks up each page
    block = np.frombuffer(mapping, np.uint8)
    if gpu is not None:
        pin(block.ctypes.data, size, gpu)
        mapping.unpin = partial(unpin, block.ctypes.data, size, gpu)
    return block


def pin(address: int, size: int, device: "torch.device") -> None:
    """Pin memory for a GPU, so that copies to it need no staging buffer. Raises DataError if CUDA refuses."""
    import torch

    with torch.cuda.device(device):  # a thread starts with GPU 0, where this would create a context
        failed = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failed:
            with suppress(RuntimeError):  # clears the sticky error, which the next kernel would raise
                torch.zeros(1, device=device)
    if failed:
        raise DataError(f"{size:,} bytes of memory cannot be pinned (CUDA error {failed}); lower data.prefetch, or raise ulimit -l")


def unpin(address: int, size: int, device: "torch.device") -> None:
    import torch

    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostUnregister(address))
    if failed:  # the address stays registered to unmapped pages
        logger.error("%s bytes of pinned memory at %#x cannot be unregistered (CUDA error %d)", f"{size:,}", address, failed)


class _File(NamedTuple):
    path: Path
    descriptor: int
    direct: bool
    device: int


class Reader(AbstractContextManager["Reader"]):
    """Reads ranges of files, with ``threads`` reads of up to ``block`` bytes in flight. Thread-safe.

    ``mode``: ``direct`` requires O_DIRECT; ``auto`` uses it if the file system supports it, and logs once if not; ``buffered``
    reads through the page cache, which is faster if the dataset fits into memory. ``transferred`` counts the bytes read, with those
    added by alignment.
    Raises DataError, with file and range, if a file cannot be opened or read, and for a range beyond its end.
    """

    def __init__(
        self, mode: Mode = "auto", *, threads: int = 8, block: int = 4 << 20, memory: MemoryPool | None = None, files: int = 64,
        preadv: Callable[[int, Sequence[Any], int], int] = os.preadv,
    ) -> None:  # fmt: skip
        self.mode, self.block, self.memory = mode, align_up(block), memory if memory is not None else MemoryPool()
        self.transferred = 0
        self._preadv, self._limit, self._threads = preadv, files, threads
        self._lock = threading.Lock()
        self._files = FileCache(self._open, lambda file: os.close(file.descriptor), files)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pread")
        self._local = threading.local()

    def fetch(self, path: Path, offset: int, length: int) -> np.ndarray:
        """Read bytes ``offset`` to ``offset + length`` of a file to new memory, without a copy.   [length] uint8"""
        return self.fetch_all([(path, offset, length)])[0]

    def fetch_all(self, ranges: Sequence[tuple[Path, int, int]]) -> list[np.ndarray]:
        """Read several ranges concurrently, each to new memory."""
        jobs: list[Callable[[], None]] = []
        arrays: list[np.ndarray] = []
        for path, offset, length in ranges:
            first = align_down(offset)  # also for a buffered read, for the same alignment in memory
            memory = self.memory.allocate(align_up(offset + length) - first)
            arrays.append(memory[offset - first : offset - first + length])
            if self.mode == "buffered":
                jobs += self._split(path, offset, arrays[-1], length)
            else:
                jobs += self._split(path, first, memory, offset - first + length)
        self._run_jobs(jobs)
        return arrays

    def read(self, parts: Sequence[tuple[Path, int, np.ndarray]]) -> None:
        """Fill each array [n] uint8 from ``offset`` of its file. Parts that are not aligned to blocks are copied once."""
        jobs: list[Callable[[], None]] = []
        for path, offset, into in parts:
            if not into.size:
                continue
            end = offset + into.size
            first, last = align_up(offset), align_down(end)
            if self.mode == "buffered":
                jobs += self._split(path, offset, into, into.size)
            elif (into.ctypes.data - offset) % ALIGN or first >= last:
                jobs += self._split_unaligned(path, offset, into)
            else:
                jobs += self._split(path, first, into[first - offset : last - offset], last - first)
                edges = ((offset, into[: first - offset]), (last, into[last - offset :]))
                jobs += [job for o, edge in edges if edge.size for job in self._split_unaligned(path, o, edge)]
        self._run_jobs(jobs)

    def read_rows(self, path: Path, starts: np.ndarray, into: np.ndarray, gap: int = 0) -> None:
        """Fill row k of ``into`` from byte ``starts[k]``, ascending. Rows that share blocks, or have up to ``gap`` bytes between
        them, are read at once.   [N] int64 -> [N, bytes] uint8, contiguous"""
        size, unit = into.shape[1], 1 if self.mode == "buffered" else ALIGN
        if not into.size:
            return
        step = max(self.block // unit, 1)
        first, last = starts // unit, -(-(starts + size) // unit)
        # Of exact rows each range is one of ``into``, too; others go through a buffer of the job.
        exact = not gap and not (size % unit or (starts % unit).any() or into.ctypes.data % unit)
        apart = np.append(True, first[1:] != last[:-1] if exact else first[1:] > last[:-1] + gap // unit)
        opened = first[np.maximum.accumulate(np.where(apart, np.arange(len(starts)), 0))]
        apart[1:] |= np.diff((first - opened) // step) != 0  # no read is much longer than a block
        begin = np.flatnonzero(apart)
        lengths = (last[np.append(begin[1:], len(starts)) - 1] - first[begin]) * unit
        share = min(max(lengths.sum() // (4 * self._threads), 1 << 16), self.block)
        cuts = np.flatnonzero(np.diff((np.cumsum(lengths) - lengths) // share, prepend=-1))
        jobs = [
            partial(self._read_ranges, path, starts[begin[a] : end], into[begin[a] : end], first[begin[a:b]] * unit,
                    begin[a:b] - begin[a], lengths[a:b], exact)
            for a, b, end in zip(cuts, [*cuts[1:], len(begin)], [*begin[cuts[1:]], len(starts)])
        ]  # fmt: skip
        self._run_jobs(jobs)

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes. It stays open for later reads."""
        with self._files.use(path) as file:
            return os.fstat(file.descriptor).st_size

    def close(self) -> None:
        """Stop the threads and close the files. Arrays stay valid."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings; worker processes open their own files."""
        return partial(Reader, self.mode, threads=self._threads, block=self.block, memory=self.memory, files=self._limit), ()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- reads of at most one block

    def _split(self, path: Path, offset: int, into: np.ndarray, need: int) -> Iterator[Callable[[], None]]:
        """Split a read to ``into``, of which the first ``need`` bytes are required: the file may end after them."""
        for start in range(0, need, self.block):
            view = into[start : start + self.block].data
            yield partial(self._read_block, path, offset + start, view, min(need - start, self.block))

    def _split_unaligned(self, path: Path, offset: int, into: np.ndarray) -> Iterator[Callable[[], None]]:
        """Split an unaligned read, which goes through an aligned bounce buffer of the thread."""
        end = offset + into.size
        for start, stop in pairwise((offset, *range(align_down(offset) + self.block, end, self.block), end)):
            yield partial(self._read_unaligned, path, start, into[start - offset : stop - offset])

    def _read_unaligned(self, path: Path, offset: int, into: np.ndarray) -> None:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = _map_block(self.block + ALIGN)
        first, end = align_down(offset), offset + into.size
        bounce = self._local.bounce[: align_up(end) - first]
        self._read_block(path, first, bounce.data, end - first)
        np.copyto(into, bounce[offset - first : end - first])

    def _read_ranges(
        self, path: Path, starts: np.ndarray, into: np.ndarray, offsets: np.ndarray, begin: np.ndarray, lengths: np.ndarray,
        exact: bool,
    ) -> None:  # fmt: skip
        """Read aligned ranges one after another, each with the rows from ``begin`` on: an interpreter's loop of one system call."""
        size, ends = into.shape[1], np.append(begin[1:], len(starts))
        needs = starts[ends - 1] + size - offsets
        memory = into.reshape(-1) if exact else self.memory.allocate(int(lengths.sum()))
        places, view, done = np.cumsum(lengths) - lengths, memory.data, 0
        with self._files.use(path) as file:
            for offset, place, length, need in zip(offsets.tolist(), places.tolist(), lengths.tolist(), needs.tolist()):
                part = view[place : place + length]
                try:
                    count = self._preadv(file.descriptor, [part], offset)
                except OSError:
                    count = 0
                if count < need:  # also the reads that fail: with its messages
                    self._read_block(path, offset, part, need)
                else:
                    done += count
        with self._lock:
            self.transferred += done
        if not exact:
            shift = np.repeat(places - offsets, ends - begin) + starts
            grain = math.gcd(size, *np.unique(shift % ALIGN).tolist(), ALIGN)
            units, parts = memory[: memory.size // grain * grain].reshape(-1, grain), np.arange(size // grain)
            np.take(units, shift[:, None] // grain + parts, 0, into.reshape(len(into), -1, grain), "clip")

    def _run_jobs(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all jobs, the last one in this thread, which would otherwise only wait."""
        if not jobs:
            return
        others = [self._pool.submit(job) for job in jobs[:-1]]
        try:
            jobs[-1]()
        except BaseException:
            for other in others:
                other.cancel()
            raise
        finally:
            wait_for(others)  # before memory is freed, also after a failure
            for other in others:
                if not other.cancelled():
                    other.result()

    def _read_block(self, path: Path, offset: int, view: memoryview, need: int) -> None:
        """Read until ``need`` bytes are complete; each read requests up to ``len(view)`` bytes."""
        with self._files.use(path) as file:
            done = stuck = 0
            while done < need:
                try:
                    count = self._preadv(file.descriptor, [view[done:]], offset + done)
                except OSError as error:
                    if error.errno == errno.EINVAL and file.direct and self.mode == "auto":
                        _log_without_direct(file.path, file.device, error)
                        self._files.invalidate(file.path, file)
                        return self._read_block(path, offset, view, need)
                    raise DataError(
                        f"{path}: bytes {offset + done:,} to {offset + need:,} cannot be read: {error.strerror} "
                        f"({errno.errorcode.get(error.errno or 0, error.errno)})" + self._advice(error)
                    ) from error
                before, done = done, done + count
                if done < need and file.direct and done % ALIGN:
                    done = align_down(done)  # a short read: continue after the last full block
                stuck = stuck + 1 if done <= before else 0
                if count == 0 or stuck > 3:
                    size = os.fstat(file.descriptor).st_size
                    fault = f"{path}: ends at byte {size:,}, but bytes {offset:,} to {offset + need:,} are requested"
                    raise DataError(f"{fault}; it is truncated or was rewritten: compare it with its source")
            with self._lock:
                self.transferred += done
        return None

    def _advice(self, error: OSError) -> str:
        if error.errno == errno.EINVAL and self.mode == "direct":
            return "; this file system may not support O_DIRECT: set the reader to auto or buffered"
        failing = "; the disk or the file system fails: try cat FILE > /dev/null, and tell the centre"
        return failing if error.errno == errno.EIO else ""

    def _open(self, path: Path) -> _File:
        try:
            if self.mode == "buffered":
                return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), False, 0)
            device = os.stat(path).st_dev
            if device not in _without_direct or self.mode == "direct":
                try:
                    if not O_DIRECT:
                        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                    return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT), True, device)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or self.mode == "direct":
                        raise
                    _log_without_direct(path, device, error)
            return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), False, device)
        except OSError as error:
            check_file_limit(path, error)
            reason = "no such file (moved or deleted since the start?)" if error.errno == errno.ENOENT else error.strerror
            raise DataError(f"{path}: cannot be opened: {reason}{self._advice(error)}") from error


_without_direct: set[int] = set()


def _log_without_direct(path: Path, device: int, error: OSError) -> None:
    if device not in _without_direct:
        _without_direct.add(device)
        logger.info("%s: its file system does not support O_DIRECT (%s); reads go through the page cache", path, error.strerror)
