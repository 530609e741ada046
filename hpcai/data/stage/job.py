"""The steps of staging. Each is a collective call of all ranks of the job."""

import fcntl
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcai.data.direct import ALIGN, Reader, align_up
from hpcai.data.stage.copy import Ring, RingCopy, write_error
from hpcai.data.stage.exchange import Exchange, open_exchange
from hpcai.data.stage.plan import RECORD, expand_on_node, is_copy, read_record, scan
from hpcai.dist.collectives import all_gather_object, all_reduce_, broadcast_from_first
from hpcai.dist.mesh import Mesh
from hpcai.durable import write_json
from hpcai.errors import DataError, HpcaiError, LaunchError

logger = logging.getLogger(__name__)

RESERVE = 0.05
"""Fraction of the bytes to copy that must be free in addition on the disk of the node."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Staged:
    """The result on one node. ``files`` and ``bytes``: all files assigned to it; ``read``: bytes that its ranks read of the source;
    ``received``: bytes from other nodes; ``kept``: bytes of files that were complete before; ``exchange``: the backend of the
    broadcasts (MPI, gloo, none)."""

    directory: Path
    node: str
    shard: int
    shards: int
    files: int
    bytes: int
    read: int
    received: int
    kept: int
    seconds: float
    exchange: str


def stage_in(
    source: str | Path, target: str | Path, mesh: Mesh, *, shards: int = 1, verify: bool = True, block: int = 16 << 20,
    progress: Progress | None = None, node: str | None = None,
) -> Staged:  # fmt: skip
    """Copy the files of ``source`` that are assigned to this node to ``target``, a folder on its disk. A collective call.

    Data files (those listed in an index.json, and other large ones) are assigned to shards: node i of N has shard i * shards // N.
    All other files are copied to every node. Files of an earlier run with the size and time of the source are kept; if they were
    not verified, ``verify`` copies them again.

    Args:
        target: The same folder for all ranks of a node, and another one on every node. Environment variables of the node ($TMPDIR)
            are expanded, also in ``node``, which overrides the host name.
        verify: Compare the SHA-256 of the bytes in the memory of this node with that of the index, if it has one.
        block: Bytes of a read, a broadcast and a write.
        progress: ``progress(copied, total)``, in bytes over all nodes, called on the first rank.

    Raises the same DataError on all ranks if any rank fails: before anything is written if possible, otherwise after all have
    stopped, with complete files kept and partial files deleted.
    """
    start = time.monotonic()
    job = _Job(Path(source), str(target), mesh, node or socket.gethostname(), shards, verify, align_up(block))
    try:
        job.plan()
        job.lock_target()
        job.find_missing()
        with Reader() as reader:
            return job.copy(reader, progress, start)
    finally:
        if job.lock >= 0:
            os.close(job.lock)


class _Job:
    def __init__(self, source: Path, target: str, mesh: Mesh, node: str, shards: int, verify: bool, block: int) -> None:
        self.source, self._target_text, self.mesh, self.node = source, target, mesh, node
        self.shards, self.verify, self.block = shards, verify, block
        self.lock = -1  # file descriptor of the target

    def _gather_results(self, work: Callable[[], Any], leaders_only: bool = False) -> list[Any]:
        """Call ``work`` on each rank, or on the first one of each node, and return all results by rank. If it fails on any rank,
        all raise the same DataError."""
        value, cause = None, None
        try:
            if not leaders_only or self.is_leader:
                value = work()
        except Exception as error:
            cause = error
        text = None if cause is None else str(cause) if isinstance(cause, HpcaiError) else f"{type(cause).__name__}: {cause}"
        results = all_gather_object((value, self.node, text), self.mesh.peers)
        failed = [(rank, node, text) for rank, (_, node, text) in enumerate(results) if text is not None]
        if failed:
            rank, node, text = failed[0]
            prefix = f"rank {rank} on {node}: " if len(results) > 1 else ""
            more = f" ({len(failed)} of {len(results)} ranks failed)" if len(failed) > 1 else ""
            raise DataError(f"{prefix}{text}{more}") from cause
        return [value for value, _, _ in results]

    def plan(self) -> None:
        """Map ranks to nodes, check that settings are equal, and list the source on one rank: on a parallel file system listing is
        slower than reading."""

        def resolve() -> tuple[str, str, tuple[int, int, bool]]:
            self.node, self.target = expand_on_node(self.node), Path(expand_on_node(self._target_text)).resolve()
            self.source = self.source.resolve()
            if not self.source.is_dir():
                raise DataError(f"{self.source}: no such folder on {self.node}; name a dataset that every node can read")
            if self.target.is_relative_to(self.source) or self.source.is_relative_to(self.target):
                fault = f"{self.target}: is, contains or is within the source {self.source}"
                raise DataError(f"{fault}; name another folder, on the node's disk")
            if not ALIGN <= self.block <= 1 << 30:
                raise DataError(f"blocks of {self.block:,} bytes, expected {ALIGN:,} to {1 << 30:,}; 16 MiB is a good choice")
            return self.node, str(self.target), (self.shards, self.block, self.verify)

        results = self._gather_results(resolve)
        ranks: dict[str, list[int]] = {}
        for rank, (node, target, settings) in enumerate(results):
            ranks.setdefault(node, []).append(rank)
            first = ranks[node][0]
            if target != results[first][1]:
                advice = "give all ranks of a node the same"
                raise DataError(f"{node}: rank {first} has the target {results[first][1]}, rank {rank} has {target}; {advice}")
            if settings != results[0][2]:
                fault = f"rank {rank} has (shards, block, verify) {settings}, rank 0 has {results[0][2]}"
                raise DataError(f"{fault}; give all ranks the same")
        self.ranks, nodes = ranks, len(ranks)  # by node, ordered by lowest rank
        if self.shards < 1 or nodes % self.shards:
            fit = ", ".join(str(n) for n in range(1, nodes + 1) if nodes % n == 0)
            raise DataError(
                f"{self.shards} shards need a multiple of {self.shards} nodes, but the job has {nodes} "
                f"node{'s' if nodes > 1 else ''}; give --shards {fit}, or start other nodes"
            )
        self.is_leader = ranks[self.node][0] == self.mesh.rank
        self.shard = list(ranks).index(self.node) * self.shards // nodes
        self.files = broadcast_from_first(lambda: scan(self.source, self.shards), self.mesh.peers)

    def lock_target(self) -> None:
        """Lock the target. Raises DataError if nodes share it, another job stages to it, or it has another dataset."""
        token = self.target / f".stage.{uuid.uuid4().hex}.partial"

        def mark() -> str:
            try:
                self.target.mkdir(parents=True, exist_ok=True)
                read_record(self.target, self.source)
                token.touch(exist_ok=False)
            except OSError as error:
                advice = "name a folder on this node's disk, where this user may write"
                raise DataError(f"{self.target}: cannot be written on {self.node}: {error.strerror}; {advice}") from error
            return token.name

        def check() -> None:
            if not (self.target / tokens[self.node]).exists():
                raise DataError(f"{self.target}: is not the same folder for all ranks of {self.node}; name one that they share")
            if not self.is_leader:
                return
            for name, other in tokens.items():
                if name != self.node and (self.target / other).exists():
                    raise DataError(f"{self.target}: is one folder for {self.node} and {name}; name one on each node's own disk")
            self.lock = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                fault = f"{self.target}: another job stages to it on {self.node}"
                raise DataError(f"{fault}; wait for its end, or name another folder") from error
            except OSError:
                logger.info("%s: its file system has no locks; see that no other job stages to it", self.target)

        try:
            token_names = self._gather_results(mark, leaders_only=True)
            tokens = {node: token_names[ranks[0]] for node, ranks in self.ranks.items()}
            self._gather_results(check)
        finally:
            with suppress(OSError):
                token.unlink()

    def find_missing(self) -> None:
        """Find the files missing on each node, and check that its disk has space for them."""
        self.size = np.array([file.bytes for file in self.files], np.int64)
        self.assigned = np.array([file.shard in (None, self.shard) for file in self.files])

        def look() -> None:
            record = read_record(self.target, self.source)
            reusable = record is not None and (record.verified or not self.verify)
            copies = [is_copy(self.target / file.name, file.bytes, file.mtime_ns) for file in self.files]
            self.missing = self.assigned & ~(np.array(copies) & reusable)
            self.recorded = record.files if record is not None else {}
            self.verified = self.verify or bool(record is not None and record.verified and not self.missing.any())
            to_copy = sum(align_up(size) for size in self.size[self.missing].tolist())
            needed, free = to_copy + int(to_copy * RESERVE), shutil.disk_usage(self.target).free
            if self.is_leader and needed > free:
                raise DataError(
                    f"{self.target}: {needed:,} bytes are needed on {self.node} ({to_copy:,} to copy, {RESERVE:.0%} reserve), but "
                    f"{free:,} are free; free space, name a larger disk, or split the dataset with --shards; nothing was copied"
                )

        self._gather_results(look)
        nodes = torch.from_numpy(self.missing * np.int64(self.is_leader))
        self.missing_nodes = all_reduce_(nodes, self.mesh.peers).numpy()  # number of nodes that need each file   [F]

    def copy(self, reader: Reader, progress: Progress | None, start: float) -> Staged:
        total = int((self.missing_nodes * self.size).sum())

        def report(done: int) -> None:
            if progress is not None and self.mesh.is_first:
                progress(done, total)

        def prepare() -> None:
            for left in self.target.glob(".stage.*.partial"):  # of a run that was killed
                left.unlink()
            for i in np.flatnonzero(self.missing):  # from now on files of the size and time of the source are of this run
                (self.target / self.files[i].name).unlink(missing_ok=True)
            self._write_record()
            report(0)

        def finish() -> None:
            for name in self.recorded.keys() - {file.name for file in self.files}:
                (self.target / name).unlink(missing_ok=True)
            self._write_record()
            report(total)

        self._gather_results(prepare, leaders_only=True)
        ring, rings = self._ring()
        exchange = open_exchange(self.mesh, rings) if total else Exchange(self.mesh, [])
        ring_copy = RingCopy(ring, self.block, self.verify, exchange, reader)
        try:
            ring_copy.run(report)
        except RuntimeError as error:  # from MPI or torch
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise LaunchError(f"staging on {self.node} broke off: {reason}; another rank has ended, see its message") from error
        finally:
            ring_copy.close()
        exchange.close()
        results = self._gather_results(lambda: (ring_copy.result(), reader.transferred))
        self._gather_results(finish, leaders_only=True)
        node_results = [results[rank] for rank in self.ranks[self.node]]
        return Staged(
            self.target, self.node, self.shard, self.shards, int(self.assigned.sum()), int(self.size[self.assigned].sum()),
            sum(read for _, read in node_results), sum(received for received, _ in node_results),
            int(self.size[self.assigned & ~self.missing].sum()), time.monotonic() - start, exchange.name,
        )  # fmt: skip

    def _ring(self) -> tuple[Ring, list[list[int]]]:
        """Return the ring of this rank, and the ranks of all rings. If nodes of a group have different numbers of ranks, those
        beyond the smallest number are in no ring."""
        nodes = list(self.ranks.values())
        groups = [nodes[s * len(nodes) // self.shards : (s + 1) * len(nodes) // self.shards] for s in range(self.shards)]
        rings = [[ranks[j] for ranks in group] for group in groups for j in range(min(map(len, group)))]
        local_ring = next((ranks for ranks in rings if self.mesh.rank in ranks), None)
        if local_ring is None:
            return Ring(self.source, self.target, self.node), rings
        number, count = self.ranks[self.node].index(self.mesh.rank), min(map(len, groups[self.shard]))
        to_copy = np.flatnonzero(self.assigned & (self.missing_nodes > 0))
        to_copy = to_copy[np.argsort(-self.size[to_copy], kind="stable")][number::count]
        files, missing = [self.files[i] for i in to_copy], self.missing[to_copy].tolist()
        return Ring(self.source, self.target, self.node, files, missing, len(local_ring), local_ring.index(self.mesh.rank)), rings

    def _write_record(self) -> None:
        """Write the list of complete files. Raises DataError if that fails."""
        path = self.target / RECORD
        stats = {file.name: (file.bytes, file.mtime_ns) for file in self.files}
        complete = {name: stat for name, stat in stats.items() if is_copy(self.target / name, *stat)}
        try:
            write_json(path, {"format": 2, "source": str(self.source), "verified": self.verified, "files": complete})
        except OSError as error:
            raise write_error(path, self.node, error) from error
