"""Ranges of files past the page cache: O_DIRECT, many reads in flight, into page-aligned memory that is used again.

A set that is larger than the memory turns the page cache over in every epoch: each byte is copied once more, and pages are
thrown out just before they are wanted. O_DIRECT leaves the cache alone, but asks for addresses, offsets and lengths that are
multiples of a block; here any offset and length will do.

Threads that call preadv release the interpreter's lock and keep a disk as busy as io_uring does.
"""

import errno
import logging
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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcai.data.file_cache import FileCache
from hpcai.errors import DataError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ALIGN = max(4096, mmap.PAGESIZE)
"""Bytes. A multiple of every disk's block; Lustre asks for whole pages, which have 64 KiB on some processors."""
HUGE_PAGE = 2 << 20
Mode = Literal["auto", "direct", "buffered"]
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)


def align_down(offset: int) -> int:
    """The last multiple of ALIGN that is not above ``offset``."""
    return offset // ALIGN * ALIGN


def align_up(offset: int) -> int:
    """The first multiple of ALIGN that is not below ``offset``."""
    return -(-offset // ALIGN) * ALIGN


class _Lease:
    """The base of all arrays and tensors that view a block; its end gives the block back."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class MemoryPool:
    """Page-aligned blocks of memory, each used again once the last array that views it is gone.

    At most ``keep`` bytes wait unused, or three of the largest blocks. ``pin``: a GPU with which each block is registered, so that
    copies to it neither pass through another buffer nor stop the processor.
    """

    def __init__(self, max_unused: int = 1 << 30, pin: "torch.device | None" = None) -> None:
        self.max_unused, self.pin = max_unused, pin
        self._lock, self._free = threading.Lock(), OrderedDict[int, list[np.ndarray]]()
        self._unused = self._largest = 0
        # Blocks come back from finalizers, which run at any moment, also while this thread holds the lock.
        self._returned: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def allocate(self, size: int) -> np.ndarray:
        """``size`` bytes at an aligned address, uninitialised; there is room up to the next multiple of ALIGN.   [size] uint8"""
        rounded = _size_class(size)
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
        """A contiguous copy of ``array`` in this memory."""
        out = self.allocate(max(array.nbytes, 1))[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(out, array)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process has memory of its own, and no device."""
        return MemoryPool, (self.max_unused,)

    @property
    def unused(self) -> int:
        """Bytes that wait to be used again."""
        with self._lock:
            self._reclaim()
            return self._unused

    def _reclaim(self) -> None:
        while True:
            try:
                block = self._returned.get_nowait()
            except queue.Empty:
                break
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


def _size_class(size: int) -> int:
    """Sizes are rounded up by a quarter at most, so that samples of many sizes share blocks."""
    step = max(ALIGN, 1 << max(max(size, 1).bit_length() - 3, 0))
    return -(-max(size, 1) // step) * step


class _Mapping(mmap.mmap):
    """Anonymous memory that is unregistered from a GPU before it is unmapped, in the thread that drops its last array: the kernel
    reuses the address. A finalizer of the array would be too late: numpy 2.5 calls it after the unmapping."""

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def _map_block(size: int, gpu: "torch.device | None" = None) -> np.ndarray:
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # a direct read looks up every page that it fills
    block = np.frombuffer(mapping, np.uint8)
    if gpu is not None:
        pin(block.ctypes.data, size, gpu)
        mapping.unpin = partial(unpin, block.ctypes.data, size, gpu)
    return block


def pin(address: int, size: int, device: "torch.device") -> None:
    """Register memory with a GPU, so that copies to it come straight from there. Raises DataError where that is not granted."""
    import torch

    with torch.cuda.device(device):  # a thread begins with the first GPU of the node, where this would open a context
        failed = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if failed:
            with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel of anyone would raise it
                torch.zeros(1, device=device)
    if failed:
        raise DataError(f"{size:,} bytes of memory cannot be pinned (CUDA error {failed}); lower data.prefetch, or raise ulimit -l")


def unpin(address: int, size: int, device: "torch.device") -> None:
    import torch

    with torch.cuda.device(device):
        failed = int(torch.cuda.cudart().cudaHostUnregister(address))
    if failed:  # the address stays registered to pages that are no longer there
        logger.error("%s bytes of pinned memory at %#x cannot be unregistered (CUDA error %d)", f"{size:,}", address, failed)


@dataclass(eq=False, slots=True)
class _File:
    path: Path
    descriptor: int
    direct: bool
    device: int


class Reader:
    """Reads ranges of files with ``threads`` reads of up to ``block`` bytes in flight. May be used from many threads.

    ``mode``: ``direct`` insists on O_DIRECT; ``auto`` uses it where the file system has it and says once where not;
    ``buffered`` reads through the page cache, which wins when the whole set fits into memory.
    ``requested`` and ``transferred`` count bytes asked for, and bytes read with what alignment adds.
    Raises DataError, naming file and range, for what cannot be opened or read, and for a range beyond the end of a file.
    """

    def __init__(
        self, mode: Mode = "auto", *, threads: int = 8, block: int = 4 << 20, memory: MemoryPool | None = None, files: int = 64,
        preadv: Callable[[int, Sequence[Any], int], int] = os.preadv,
    ) -> None:  # fmt: skip
        self.mode, self.block, self.memory = mode, align_up(block), memory if memory is not None else MemoryPool()
        self.requested = self.transferred = 0
        self._preadv, self._limit, self._threads = preadv, files, threads
        self._lock = threading.Lock()
        self._files = FileCache(self._open, lambda file: os.close(file.descriptor), files)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pread")
        self._local = threading.local()

    # ---- what callers want

    def fetch(self, path: Path, offset: int, length: int) -> np.ndarray:
        """Bytes ``offset`` to ``offset + length`` of a file in memory of their own, read in place.   [length] uint8"""
        return self.fetch_all([(path, offset, length)])[0]

    def fetch_all(self, ranges: Sequence[tuple[Path, int, int]]) -> list[np.ndarray]:
        """Several ranges at once, each in memory of its own."""
        jobs: list[Callable[[], None]] = []
        arrays: list[np.ndarray] = []
        for path, offset, length in ranges:
            first = align_down(offset)  # also for a buffered read: then both have the same alignment in memory
            memory = self.memory.allocate(align_up(offset + length) - first)
            arrays.append(memory[offset - first : offset - first + length])
            if self.mode == "buffered":
                jobs += self._split(path, offset, arrays[-1], length)
            else:
                jobs += self._split(path, first, memory, offset - first + length)
        self._run_jobs(jobs, sum(length for _, _, length in ranges))
        return arrays

    def read(self, parts: Sequence[tuple[Path, int, np.ndarray]]) -> None:
        """Fill each array [n] uint8 from ``offset`` of its file. What does not lie on block boundaries is copied once."""
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
        self._run_jobs(jobs, sum(into.size for _, _, into in parts))

    def size(self, path: Path) -> int:
        """Bytes of a file, which stays open for the reads that follow."""
        with self._files.use(path) as file:
            return os.fstat(file.descriptor).st_size

    def close(self) -> None:
        """Give back threads and files. Arrays that were fetched stay."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._files.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process opens its own files."""
        return partial(Reader, self.mode, threads=self._threads, block=self.block, memory=self.memory, files=self._limit), ()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- pieces of at most one block

    def _split(self, path: Path, offset: int, into: np.ndarray, need: int) -> Iterator[Callable[[], None]]:
        """Reads straight into ``into``. Its first ``need`` bytes are wanted; the file may end after them."""
        for start in range(0, need, self.block):
            view = into[start : start + self.block].data
            yield partial(self._read_block, path, offset + start, view, min(need - start, self.block))

    def _split_unaligned(self, path: Path, offset: int, into: np.ndarray) -> Iterator[Callable[[], None]]:
        """Reads by way of aligned memory of the thread."""
        end = offset + into.size
        start = offset
        while start < end:
            stop = min(align_down(start) + self.block, end)
            yield partial(self._read_unaligned, path, start, into[start - offset : stop - offset])
            start = stop

    def _read_unaligned(self, path: Path, offset: int, into: np.ndarray) -> None:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = _map_block(self.block + ALIGN)
        first, end = align_down(offset), offset + into.size
        bounce = self._local.bounce[: align_up(end) - first]
        self._read_block(path, first, bounce.data, end - first)
        np.copyto(into, bounce[offset - first : end - first])

    def _run_jobs(self, jobs: Sequence[Callable[[], None]], size: int) -> None:
        """Do all jobs; this thread, which would only wait, does the last one."""
        with self._lock:
            self.requested += size
        if not jobs:
            return
        others = [self._pool.submit(job) for job in jobs[:-1]]
        problem: BaseException | None = None
        try:
            jobs[-1]()
        except BaseException as error:
            problem = error
            for other in others:
                other.cancel()
        wait_for(others)  # before any memory goes, also when one has failed
        for other in others:
            if not other.cancelled() and (failure := other.exception()) is not None:
                raise failure
        if problem is not None:
            raise problem

    # ---- one read

    def _read_block(self, path: Path, offset: int, view: memoryview, need: int) -> None:
        """Read on until ``need`` bytes are there; up to ``len(view)`` are asked for."""
        with self._files.use(path) as file:
            done = stuck = 0
            while done < need:
                try:
                    count = self._preadv(file.descriptor, [view[done:]], offset + done)
                except InterruptedError:
                    continue
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
                    done = align_down(done)  # a short read: go on from the last whole block
                stuck = stuck + 1 if done <= before else 0
                if count == 0 or stuck > 3:
                    size = os.fstat(file.descriptor).st_size
                    raise DataError(
                        f"{path}: ends at byte {size:,}, but bytes {offset:,} to {offset + need:,} are asked for; "
                        "it is truncated or was rewritten: compare it with its source"
                    )
            with self._lock:
                self.transferred += done
        return None

    def _advice(self, error: OSError) -> str:
        if error.errno == errno.EINVAL and self.mode == "direct":
            return "; this file system may not have O_DIRECT: set the reader to auto or buffered"
        return (
            "; the disk or the file system fails: try cat FILE > /dev/null, and tell the centre" if error.errno == errno.EIO else ""
        )

    def _open(self, path: Path) -> _File:
        try:
            if self.mode == "buffered":
                return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), False, 0)
            device = os.stat(path).st_dev
            if device not in _without_direct or self.mode == "direct":
                try:
                    return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True, device)
                except OSError as error:
                    if error.errno not in _UNSUPPORTED or self.mode == "direct":
                        raise
                    _log_without_direct(path, device, error)
            return _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), False, device)
        except OSError as error:
            reason = "no such file (moved or deleted since the start?)" if error.errno == errno.ENOENT else error.strerror
            raise DataError(f"{path}: cannot be opened: {reason}{self._advice(error)}") from error


_without_direct: set[int] = set()


def _log_without_direct(path: Path, device: int, error: OSError) -> None:
    if device not in _without_direct:
        _without_direct.add(device)
        logger.info("%s: its file system has no O_DIRECT (%s); its files are read through the page cache", path, error.strerror)
