"""Blocks on their way through one process: read, exchanged, hashed and written, all at the same time."""

import fcntl
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from errno import EINVAL, EIO, EOPNOTSUPP
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcai.data.direct import ALIGN, Reader, above
from hpcai.data.stage.exchange import Exchange, Pending
from hpcai.data.stage.plan import Block, Circle, SourceFile, blocks_of, count_blocks, entry_of
from hpcai.errors import DataError

if TYPE_CHECKING:
    from hpcai.data.stage.job import Job

_AHEAD, _FLYING, _DRAINING = 2, 2, 3  # blocks of a process that are read ahead, on the network, and on their way to the disk
_BEAT = 8
_TRAILER = 64  # bytes behind a block on the network: whether it was read, and its SHA-256
_SETTLING = 16  # files that wait for their flush


# ---- one file at the target


class _Copy:
    """A file on its way to the target: space for it is taken at once, and nothing bears its name until all of it is there.

    ``write`` may be called by several threads, ``hash`` by one, in the order of the file.
    """

    def __init__(self, file: SourceFile, target: Path, verify: bool, pwrite: Callable[[int, Any, int], int]) -> None:
        self.file, self.path, self.partial = file, target / file.name, partial_of(target / file.name)
        self.jobs: deque[Future[None]] = deque()
        self.spoiled = False
        self._sha = hashlib.sha256() if verify else None
        self._pwrite, self._lock, self._descriptor, self._direct = pwrite, threading.Lock(), -1, False

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write [n] uint8, n a multiple of ALIGN; what is beyond the end of the file is cut off when it is finished."""
        with self._lock:
            if self._descriptor < 0:
                self._open()
        view = data.data
        done = 0
        while done < len(view):
            direct = self._direct  # as this write sees it: another thread may leave it meanwhile
            try:
                count = self._pwrite(self._descriptor, view[done:], offset + done)
            except OSError as error:
                if error.errno != EINVAL or not direct:
                    raise
                self._leave_direct()
                continue
            if count <= 0:
                raise OSError(EIO, os.strerror(EIO))
            done += count
            if done % ALIGN:
                self._leave_direct()  # a short write: the rest is not aligned any more

    def _open(self) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self.partial, flags | os.O_DIRECT, 0o666)
            self._direct = True
        except OSError as error:
            if error.errno not in (EINVAL, EOPNOTSUPP):
                raise
            self._descriptor = os.open(self.partial, flags, 0o666)
        if self.file.bytes:
            try:
                os.posix_fallocate(self._descriptor, 0, self.file.bytes)
            except OSError as error:
                if error.errno not in (EINVAL, EOPNOTSUPP):  # a file system without it
                    raise

    def _leave_direct(self) -> None:
        """Go on through the page cache."""
        with self._lock:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False

    def hash(self, data: np.ndarray) -> None:
        if self._sha is not None:
            self._sha.update(data.data)

    def finish(self, source: Path, node: str, record: Callable[[dict[str, Any]], None]) -> None:
        """Compare, flush to the disk, record and rename. Raises DataError when the SHA-256 is not that of the index."""
        digest = self._sha.hexdigest() if self._sha is not None else self.file.sha256
        if self.file.sha256 not in (None, digest):
            raise DataError(
                f"{source / self.file.name}: what came to {node} has SHA-256 {digest}, index.json says {self.file.sha256}; compare "
                "with sha256sum: the file is damaged or was rewritten, or, if not, it was damaged on the way; it was not kept"
            )
        os.ftruncate(self._descriptor, self.file.bytes)
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # where it was written through the page cache
        about = os.fstat(self._descriptor)
        # First: a file without a line would be copied again after a kill; a line without its file does no harm
        record({"name": self.file.name, **entry_of(self.file, about, digest, self._sha is not None)})
        self.partial.replace(self.path)

    def close(self) -> None:
        """Close the file, and remove it where it was not finished."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with suppress(OSError):
                self.partial.unlink()


def partial_of(path: Path) -> Path:
    name = f".{path.name}.partial"
    if len(os.fsencode(name)) > 255:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}.partial"
    return path.with_name(name)


# ---- one process


class Carrier:
    """Reads, exchanges and writes the blocks of one process. What fails is kept in ``failure``, and the other processes learn of
    it with the next block and at the next beat."""

    def __init__(
        self, job: "Job", lanes: Sequence[Sequence[Circle]], exchange: Exchange, reader: Reader,
        pwrite: Callable[[int, Any, int], int], progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._job, self._files, self._rank, self._verify = job, job.files, job.mesh.rank, job.verify
        self._lanes, self._exchange, self._reader, self._pwrite, self._progress = lanes, exchange, reader, pwrite, progress
        self._missing = job.missing[job.me]
        self._lane = next((lane for lane in lanes if any(self._rank in circle.ranks for circle in lane)), [])
        self._beats = -(-max((count_blocks(lane, job.files, job.block) for lane in lanes), default=0) // _BEAT)
        self.failure: Exception | None = None
        self.written = self.received = 0
        self._spoiled = self._stopped = False  # a block came marked as bad; nothing more is to be done
        self._lock = threading.Lock()
        self._own = (b for b in blocks_of(self._lane, job.files, job.block) if b.root == self._rank)
        self._reading: deque[tuple[np.ndarray, Future[None]]] = deque()
        self._flying: deque[tuple[Block, np.ndarray, Pending]] = deque()
        self._draining: deque[tuple[np.ndarray, list[Future[None]]]] = deque()
        self._settling: deque[Future[None]] = deque()
        self._copies: dict[int, _Copy] = {}
        count = _AHEAD + _FLYING + 1 + _DRAINING if self._lane else 0
        self._spare = [reader.memory.take(job.block + ALIGN) for _ in range(count)]
        self._told: Pending | None = None
        self._values = np.zeros(2, np.int64)
        self._reads = ThreadPoolExecutor(_AHEAD, thread_name_prefix="stage-read")
        self._writes = ThreadPoolExecutor(2, thread_name_prefix="stage-write")
        self._hashes = ThreadPoolExecutor(1, thread_name_prefix="stage-hash")  # one, which keeps the order
        self._settles = ThreadPoolExecutor(2, thread_name_prefix="stage-settle")

    def carry(self) -> None:
        """Carry all blocks of this process' lane, or those up to the beat at which all know that one has failed."""
        self._exchange.open(self._lanes, self._rank)
        blocks = blocks_of(self._lane, self._files, self._job.block)
        for _ in range(self._beats):
            for block in islice(blocks, _BEAT):
                if self._rank in block.circle.ranks:
                    self._step(block)
            if self._is_over():
                break
        while self._flying:
            self._land()
        if self._told is not None:
            self._told.wait()
        while self._settling:
            self._exchange.wait(self._settling.popleft())

    def close(self) -> None:
        """End all threads; nothing stays of files that are not whole."""
        self._stopped = True
        for pool in (self._reads, self._writes, self._hashes, self._settles):  # a file settles after its writes
            pool.shutdown(wait=True)
        for copy in self._copies.values():
            copy.close()
        for buffers in (self._spare, self._reading, self._draining):  # otherwise they stay until garbage is collected
            buffers.clear()

    def outcome(self) -> int:
        """Bytes that other nodes sent. Raises what failed here first."""
        if self.failure is not None:
            raise self.failure
        return self.received

    # ---- steps of the main thread

    def _is_over(self) -> bool:
        """Tell the others how this process fares; whether any had failed one beat ago, so that all stop at the same one."""
        if self._told is not None:
            self._told.wait()
            failed, written = self._values.tolist()
            try:
                self._progress(written)
            except Exception as error:
                self._fail(error)
            if failed:
                self._told = None
                return True
        self._values = np.array([self.failure is not None or self._spoiled, self.written], np.int64)
        self._told = self._exchange.add(self._values)
        return False

    def _step(self, block: Block) -> None:
        while len(self._reading) < _AHEAD and (own := next(self._own, None)) is not None:
            buffer = self._acquire()
            self._reading.append((buffer, self._reads.submit(self._attempt, None, self._read, own, buffer)))
        if block.root == self._rank:
            buffer, future = self._reading.popleft()
            self._exchange.wait(future)
        else:
            buffer = self._acquire()
        if len(block.circle.ranks) == 1:
            return self._deliver(block, buffer)
        size = above(block.length) + _TRAILER
        self._flying.append((block, buffer, self._exchange.spread(block.circle, buffer[:size], block.root)))
        while len(self._flying) > _FLYING:
            self._land()
        return None

    def _acquire(self) -> np.ndarray:
        if not self._spare:
            buffer, jobs = self._draining.popleft()
            for job in jobs:
                self._exchange.wait(job)
            return buffer
        return self._spare.pop()

    def _land(self) -> None:
        block, buffer, pending = self._flying.popleft()
        pending.wait()
        if block.root != self._rank:
            self.received += block.length
        self._deliver(block, buffer)

    def _deliver(self, block: Block, buffer: np.ndarray) -> None:
        """Hand a block to the threads that write and hash."""
        if not self._missing[block.file]:
            self._spare.append(buffer)
            return
        copy = self._copies.get(block.file)
        if copy is None:
            copy = self._copies[block.file] = _Copy(self._files[block.file], self._job.target, self._verify, self._pwrite)
        if _trailer(buffer, block)[0]:
            self._spoiled = copy.spoiled = True
        jobs = [self._writes.submit(self._attempt, copy, self._write, copy, block, buffer)]
        if self._verify:
            jobs.append(self._hashes.submit(self._attempt, copy, self._hash, copy, block, buffer))
        self._draining.append((buffer, jobs))
        while copy.jobs and copy.jobs[0].done():
            copy.jobs.popleft()
        copy.jobs.extend(jobs)
        if block.last:
            self._settling.append(self._settles.submit(self._attempt, copy, self._settle, copy, block.file))
            while len(self._settling) > _SETTLING:
                self._exchange.wait(self._settling.popleft())

    # ---- what threads do

    def _attempt(self, copy: _Copy | None, work: Callable[..., None], *words: Any) -> None:
        """Do a piece of work. What it raises is kept, and spoils ``copy``."""
        try:
            work(*words)
        except Exception as error:
            problem = error
            if copy is not None:
                copy.spoiled = True
                if isinstance(error, OSError):
                    problem = self._job.unwritten(copy.path, error)
                    problem.__cause__ = error
            self._fail(problem)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.failure = self.failure or error

    def _read(self, block: Block, buffer: np.ndarray) -> None:
        file, trailer = self._files[block.file], _trailer(buffer, block)
        trailer[:] = 0
        trailer[0] = 1
        if self._stopped or self.failure is not None:
            return
        data, path = buffer[: block.length], self._job.source / file.name
        if block.length:
            self._reader.read([(path, block.offset, data)])
        if file.sha256 is None or not self._verify:
            about = os.stat(path)
            if (about.st_size, about.st_mtime_ns) != (file.bytes, file.mtime):
                raise DataError(
                    f"{path}: was rewritten while it was copied: {about.st_size:,} bytes now, {file.bytes:,} at the start; "
                    "stage again when nobody writes to it"
                )
        if self._sealed(block):
            trailer[1:33] = np.frombuffer(hashlib.sha256(data.data).digest(), np.uint8)
        trailer[0] = 0

    def _sealed(self, block: Block) -> bool:
        """Whether the SHA-256 of each block goes with it, because no index states that of the whole file."""
        return self._verify and self._files[block.file].sha256 is None and len(block.circle.ranks) > 1

    def _write(self, copy: _Copy, block: Block, buffer: np.ndarray) -> None:
        if copy.spoiled or self._stopped or self.failure is not None:
            copy.spoiled = True
            return
        copy.write(block.offset, buffer[: above(block.length)])
        with self._lock:
            self.written += block.length

    def _hash(self, copy: _Copy, block: Block, buffer: np.ndarray) -> None:
        if copy.spoiled or self._stopped:
            return
        data = buffer[: block.length]
        if self._sealed(block) and block.root != self._rank:
            sent, came = _trailer(buffer, block)[1:33].tobytes().hex(), hashlib.sha256(data.data).hexdigest()
            if sent != came:
                raise DataError(
                    f"{self._job.source / copy.file.name}: {block.length:,} bytes from {block.offset:,} on came to "
                    f"{self._job.node} with SHA-256 {came}, but rank {block.root} sent {sent}; the network or a node's memory "
                    "damages data: leave these nodes out, and tell the centre"
                )
        copy.hash(data)

    def _settle(self, copy: _Copy, index: int) -> None:
        wait_for(copy.jobs)
        try:
            if not copy.spoiled:
                copy.finish(self._job.source, self._job.node, self._job.note)
        finally:
            copy.close()
            del self._copies[index]


def _trailer(buffer: np.ndarray, block: Block) -> np.ndarray:
    """What goes with a block: [0] is 0 where it could be read, and [1:33] is its SHA-256 where it is sealed.   [64] uint8"""
    return buffer[above(block.length) : above(block.length) + _TRAILER]
