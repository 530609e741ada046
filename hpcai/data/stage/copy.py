"""The copy of the files of a ring on one rank: blocks are read, broadcast, hashed and written concurrently."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, EINVAL, EIO, ENOSPC, EOPNOTSUPP, errorcode
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from hpcai.data.direct import Reader, align_up
from hpcai.data.stage.exchange import Exchange
from hpcai.data.stage.plan import SourceFile
from hpcai.errors import DataError

_MAX_READS, _MAX_DRAINING = 2, 4  # blocks of a rank that are prefetched, and that are being broadcast or written
_CHECK_INTERVAL = 8  # blocks between two sums of failures


@dataclass(frozen=True)
class Ring:
    """The position of this rank in a ring of ``size`` ranks. ``missing``: whether its node needs each of ``files``."""

    source: Path
    target: Path
    node: str
    files: Sequence[SourceFile] = ()
    missing: Sequence[bool] = ()
    size: int = 1
    position: int = 0


class _Block(NamedTuple):
    """A block of file number ``file`` of the ring, read by the rank at position ``root``."""

    file: int
    offset: int
    length: int
    root: int
    is_last: bool


def write_error(path: Path, node: str, error: OSError) -> DataError:
    advice = "check the disk of this node"
    if error.errno in (ENOSPC, EDQUOT):
        advice = "free space on this node, or split the dataset with --shards; complete files stay, and a second run resumes there"
    reason = f"{error.strerror} ({errorcode.get(error.errno or 0, error.errno)})"
    return DataError(f"{path}: cannot be written on {node}: {reason}; {advice}")


class RingCopy:
    """Copies the files of a ring. The first exception is kept as ``failure``; other ranks get it with a block or sum."""

    def __init__(self, ring: Ring, block: int, verify: bool, exchange: Exchange, reader: Reader) -> None:
        self._ring, self._block, self._verify, self._exchange, self._reader = ring, block, verify, exchange, reader
        self.failure: Exception | None = None
        self.written = self.received = 0
        self._stopped = False  # some rank has failed: blocks are only broadcast until all stop
        self._free: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(_MAX_READS + _MAX_DRAINING if ring.files else 0):
            self._free.put(reader.memory.allocate(block + 1))
        self._local_blocks = (block for block in self._blocks() if block.root == ring.position)
        self._prefetched: deque[tuple[np.ndarray, Future[None]]] = deque()
        self._reads = ThreadPoolExecutor(_MAX_READS, thread_name_prefix="stage-read")
        # One thread each, which keeps the order of blocks: one file at a time is hashed, and one written.
        self._hashes = ThreadPoolExecutor(1, thread_name_prefix="stage-hash")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="stage-write")
        self._sha = hashlib.sha256()
        self._descriptor, self._partial = -1, ring.target

    def run(self, progress: Callable[[int], None]) -> None:
        """Copy all blocks of the ring, or those until all ranks of the job see a failure. ``progress(bytes)`` is called with the
        bytes that all ranks have written."""
        blocks, left = self._blocks(), sum(1 for _ in self._blocks())
        while True:
            for block in islice(blocks, _CHECK_INTERVAL):
                self._forward(block)
                left -= 1
            values = np.array([self._stopped, left > 0, self.written], np.int64)
            self._exchange.sum(values)
            failed, unfinished, written = values.tolist()
            try:
                progress(written)
            except Exception as error:
                self._fail(error)
            if failed or not unfinished:
                break

    def close(self) -> None:
        """Wait for the threads, and delete a partial file."""
        for pool in (self._reads, self._hashes, self._writes):
            pool.shutdown(wait=True)
        if self._descriptor >= 0:
            self._close()
            with suppress(OSError):
                self._partial.unlink()

    def result(self) -> int:
        """Return the bytes received from other ranks. Raises the first failure of this rank."""
        if self.failure is not None:
            raise self.failure
        return self.received

    # ---- the main thread

    def _blocks(self) -> Iterator[_Block]:
        turn = 0
        for index, file in enumerate(self._ring.files):
            for offset in range(0, max(file.bytes, 1), self._block):  # an empty file has one empty block
                end = offset + self._block
                yield _Block(index, offset, min(end, file.bytes) - offset, turn % self._ring.size, end >= file.bytes)
                turn += 1

    def _forward(self, block: _Block) -> None:
        while len(self._prefetched) < _MAX_READS and (local_block := next(self._local_blocks, None)) is not None:
            buffer = self._free.get()
            self._prefetched.append((buffer, self._reads.submit(self._read, local_block, buffer)))
        size = align_up(block.length)
        if block.root == self._ring.position:
            buffer, read = self._prefetched.popleft()
            try:
                read.result()
            except Exception as error:
                self._fail(error)
            buffer[size] = self._stopped  # the byte after a block marks it as bad
        else:
            buffer = self._free.get()
        self._exchange.broadcast(buffer[: size + 1], block.root)
        if block.root != self._ring.position:
            self.received += block.length
            self._stopped |= bool(buffer[size])
        if not self._ring.missing[block.file]:
            self._free.put(buffer)
            return
        digest = self._hashes.submit(self._hash, block, buffer)
        self._writes.submit(self._write, block, buffer, digest)

    def _fail(self, error: Exception) -> None:
        self.failure, self._stopped = self.failure or error, True

    # ---- threads

    def _read(self, block: _Block, buffer: np.ndarray) -> None:
        file, path = self._ring.files[block.file], self._ring.source / self._ring.files[block.file].name
        if self._stopped:
            return
        if block.length:
            self._reader.read([(path, block.offset, buffer[: block.length])])
        if file.sha256 is None or not self._verify:
            stat = os.stat(path)
            if (stat.st_size, stat.st_mtime_ns) != (file.bytes, file.mtime_ns):
                fault = f"{path}: was rewritten while it was copied: {stat.st_size:,} bytes now, {file.bytes:,} at the start"
                raise DataError(f"{fault}; stage again when it is not being written")

    def _hash(self, block: _Block, buffer: np.ndarray) -> str:
        """Return the SHA-256 of the file up to the end of the block."""
        if not self._verify or self._ring.files[block.file].sha256 is None:
            return ""
        if block.offset == 0:
            self._sha = hashlib.sha256()
        self._sha.update(buffer[: block.length].data)
        return self._sha.hexdigest()

    def _write(self, block: _Block, buffer: np.ndarray, digest: "Future[str]") -> None:
        file = self._ring.files[block.file]
        path = self._ring.target / file.name
        try:
            if self._stopped:
                return
            if block.offset == 0:
                self._open(path, file.bytes)
            data, done = buffer[: align_up(block.length)].data, 0  # O_DIRECT writes full pages; the file is truncated below
            while done < len(data):
                count = os.pwrite(self._descriptor, data[done:], block.offset + done)
                if count <= 0:
                    raise OSError(EIO, os.strerror(EIO))
                done += count
            if block.is_last:
                self._finish(file, path, digest.result())
            self.written += block.length
        except OSError as error:
            problem = write_error(path, self._ring.node, error)
            problem.__cause__ = error
            self._fail(problem)
        except Exception as error:
            self._fail(error)
        finally:
            wait_for([digest])
            self._free.put(buffer)

    def _open(self, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self._ring.target / f".stage.{hashlib.sha256(os.fsencode(path)).hexdigest()}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._partial, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in (EINVAL, EOPNOTSUPP):
                raise
            self._descriptor = os.open(self._partial, flags, 0o666)  # a file system without O_DIRECT
        if size:
            os.posix_fallocate(self._descriptor, 0, size)  # a full disk raises now, not after hours

    def _finish(self, file: SourceFile, path: Path, digest: str) -> None:
        """Verify the file, flush it to the disk, and set its time and name."""
        if digest and digest != file.sha256:
            raise DataError(
                f"{self._ring.source / file.name}: the copy on {self._ring.node} has SHA-256 {digest}, index.json has "
                f"{file.sha256}; compare with sha256sum: the file is damaged or was rewritten, or, if not, it was damaged in "
                "transfer; the copy was deleted"
            )
        os.ftruncate(self._descriptor, file.bytes)
        os.fsync(self._descriptor)
        self._close()
        os.utime(self._partial, ns=(file.mtime_ns, file.mtime_ns))
        self._partial.replace(path)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
