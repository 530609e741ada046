"""Staging from beginning to end, as acts that all processes go through together."""

import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC, errorcode
from pathlib import Path
from typing import Any

import numpy as np

from hpcai.data.direct import ALIGN, Reader, above
from hpcai.data.index import write_json
from hpcai.data.stage.carry import Carrier, partial_of
from hpcai.data.stage.exchange import Exchange, open_exchange
from hpcai.data.stage.plan import (
    RECORD,
    Entries,
    SourceFile,
    check_source,
    is_whole,
    lanes_of,
    nodes_of,
    recorded,
    scan,
    unchanged,
    untouched,
)
from hpcai.dist.collect import agree, gather_objects
from hpcai.dist.mesh import Mesh
from hpcai.durable import flush
from hpcai.errors import DataError, HpcaiError, LaunchError

logger = logging.getLogger(__name__)

PATIENCE = 120.0
"""Seconds for hashing what lies at the target already, since other ranks wait in a collective meanwhile. What is not hashed by
then is copied again."""
RESERVE = 0.05
"""Fraction of the bytes to copy that must be free on the node's disk beyond them."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Staged:
    """What was done on one node. ``files`` and ``bytes``: all that it is to hold; ``read``: bytes that its processes read from the
    source; ``received``: bytes that came from other nodes; ``kept``: bytes of files that were there already; ``exchange``: how
    blocks went around (MPI, gloo, none)."""

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
    source: str | Path, target: str | Path, mesh: Mesh, *, shards: int = 1, reader: Reader | None = None, verify: bool = True,
    block: int = 16 << 20, progress: Progress | None = None, node: str | None = None,
    pwrite: Callable[[int, Any, int], int] = os.pwrite,
) -> Staged:  # fmt: skip
    """Copy the files of ``source`` that this node is to hold to ``target``, a folder on its own disk, together with all others.

    Called by all processes of the mesh alike; ``target`` is the same for the processes of a node, and another folder on every
    node. Files that an index.json lists, and other large ones, are dealt to ``shards`` (see ``assign``): node i of N holds shard
    i * shards // N. All others go to every node. Files that are whole at the target already are kept.

    ``verify`` compares the SHA-256 of what came into this node's memory with that of the index, and, where no index states one,
    of each block with that of the process that read it. So the manifest, the shared file system and the network are proved; that
    the local disk gives back what it was given is not, since nothing is read again.

    ``block``: bytes of a read, a broadcast and a write. ``progress`` is called on the first rank with bytes copied and to copy,
    over all nodes. ``node`` overrides the host name. ``pwrite`` and the reader's ``preadv`` are there for tests.

    Raises DataError, the same on all processes, when any of them cannot do its part: before anything is written where that can
    be known, otherwise after all have stopped, with whole files kept and no parts of files left.
    """
    began, mine = time.monotonic(), reader is None
    reader = reader if reader is not None else Reader()
    job = Job(Path(source), Path(target), mesh, node if node is not None else socket.gethostname(), shards, verify, above(block))
    try:
        job.meet()
        job.survey()
        job.claim()
        job.look()
        job.check_room()
        return job.copy(reader, progress, pwrite, began)
    finally:
        job.leave()
        if mine:
            reader.close()


class Job:
    """The acts of staging, which all processes go through together."""

    def __init__(self, source: Path, target: Path, mesh: Mesh, node: str, shards: int, verify: bool, block: int) -> None:
        self.source, self.target, self.mesh, self.node = source, target, mesh, node
        self.shards, self.verify, self.block = shards, verify, block
        self._made: list[Path] = []
        self._locked = -1  # a descriptor of the target

    def _together(self, work: Callable[[], Any], by_first: bool = False) -> list[Any]:
        """Do ``work`` on each process, or on the first one of each node, and give all results by rank. Where it fails on any, all
        raise the same DataError."""
        value, cause = None, None
        try:
            if not by_first or self.first:
                value = work()
        except Exception as error:
            cause = error
        text = None if cause is None else str(cause) if isinstance(cause, HpcaiError) else f"{type(cause).__name__}: {cause}"
        told = gather_objects((value, self.node, text), self.mesh.everyone)
        failed = [(rank, node, text) for rank, (_, node, text) in enumerate(told) if text is not None]
        if failed:
            rank, node, text = failed[0]
            where = f"rank {rank} on {node}: " if len(told) > 1 else ""
            more = f" ({len(failed)} of {len(told)} ranks failed)" if len(failed) > 1 else ""
            raise DataError(f"{where}{text}{more}") from cause
        return [value for value, _, _ in told]

    def meet(self) -> None:
        """Learn which process is on which node, and see that all were told the same."""

        def introduce() -> tuple[str, str, tuple[int, int, bool]]:
            self.source, self.target = self.source.resolve(), self.target.resolve()
            if not self.source.is_dir():
                raise DataError(f"{self.source}: no such folder on {self.node}; name a data set that every node sees")
            if self.target.is_relative_to(self.source) or self.source.is_relative_to(self.target):
                raise DataError(
                    f"{self.target}: is, holds or lies in the source {self.source}; name a folder of its own on the node's disk"
                )
            if not ALIGN <= self.block <= 1 << 30:
                raise DataError(f"blocks of {self.block:,} bytes, expected {ALIGN:,} to {1 << 30:,}; 16 MiB is a good choice")
            return self.node, str(self.target), (self.shards, self.block, self.verify)

        told = self._together(introduce)
        if self.shards < 1:
            raise DataError(f"{self.shards} shards were asked for; give 1, where every node holds all, or more")
        firsts: dict[str, int] = {}
        for rank, (node, target, settings) in enumerate(told):
            first = firsts.setdefault(node, rank)
            if target != told[first][1]:
                raise DataError(
                    f"{node}: rank {first} has the target {told[first][1]}, rank {rank} has {target}; give all of a node the same"
                )
            if settings != told[0][2]:
                raise DataError(
                    f"rank {rank} was told (shards, block, verify) {settings}, rank 0 {told[0][2]}; give all ranks the same"
                )
        self.nodes = nodes_of([node for node, _, _ in told], self.shards)
        self.me = self.nodes.names.index(self.node)
        self.first = self.nodes.ranks[self.me][0] == self.mesh.rank
        self.number = self.nodes.ranks[self.me].index(self.mesh.rank)

    def survey(self) -> None:
        """List the files of the source, by one process: a listing costs a parallel file system more than reading."""
        files: list[SourceFile] = []
        self._together(lambda: files.extend(scan(self.source, self.shards)) if self.mesh.is_first else None)
        self.files = agree(files, self.mesh.everyone)

    def claim(self) -> None:
        """Take the target. Raises DataError where nodes share it, another job stages to it, or it holds another data set."""
        token = self.target / f".stage.{uuid.uuid4().hex}.partial"

        def mark() -> str:
            try:
                self._made = [folder for folder in (self.target, *self.target.parents) if not folder.exists()]
                self.target.mkdir(parents=True, exist_ok=True)
                whole, _ = recorded(self.target)
                if whole is not None:
                    check_source(self.target, whole["source"], str(self.source))
                token.touch(exist_ok=False)
            except OSError as error:
                raise DataError(
                    f"{self.target}: cannot be written on {self.node}: {error.strerror}; name a folder on this node's disk, "
                    "where this user may write"
                ) from error
            return token.name

        def check() -> None:
            if not (self.target / tokens[self.me]).exists():
                raise DataError(f"{self.target}: is not one folder for all processes of {self.node}; name one that they share")
            if not self.first:
                return
            for name, other in zip(self.nodes.names, tokens):
                if name != self.node and (self.target / other).exists():
                    raise DataError(f"{self.target}: is one folder for {self.node} and {name}; name one on each node's own disk")
            self._locked = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"{self.target}: another job stages to it on {self.node}; wait for its end, or name another folder"
                ) from error
            except OSError:
                logger.info("%s: its file system has no locks; see that no other job stages to it", self.target)

        try:
            told = self._together(mark, by_first=True)
            tokens = [told[ranks[0]] for ranks in self.nodes.ranks]
            self._together(check)
        finally:
            with suppress(OSError):
                token.unlink()

    def look(self) -> None:
        """Learn which node misses what; the processes of a node share the work."""
        count, me = len(self.files), self.nodes.shard(self.me)
        ranks, whole = len(self.nodes.ranks[self.me]), np.zeros(count, bool)
        self._kept: list[dict[str, Any]] = []

        def own() -> bytes:
            _, entries = recorded(self.target)
            until = time.monotonic() + PATIENCE
            wanted = [i for i, file in enumerate(self.files) if file.shard in (None, me)]
            for i in wanted[self.number :: ranks]:
                file = self.files[i]
                before = entries.get(file.name, {})
                entry = is_whole(file, self.target, before, self.verify, until)
                whole[i] = entry is not None
                if entry is not None and entry is not before:
                    self._kept.append({"name": file.name, **entry})
            return zlib.compress(np.packbits(whole).tobytes())

        told = self._together(own)
        shard = np.array([-1 if file.shard is None else file.shard for file in self.files])
        self.missing = np.zeros((len(self.nodes.names), count), bool)
        for node, ranks_of in enumerate(self.nodes.ranks):
            there = np.zeros(count, bool)
            for rank in ranks_of:
                there |= np.unpackbits(np.frombuffer(zlib.decompress(told[rank]), np.uint8), count=count).astype(bool)
            self.missing[node] = ((shard < 0) | (shard == self.nodes.shard(node))) & ~there

    def check_room(self) -> None:
        """See that the disk of every node has room for what it misses."""

        def measure() -> None:
            todo = sum(above(self.files[i].bytes) for i in np.flatnonzero(self.missing[self.me]).tolist())
            needed, free = todo + int(todo * RESERVE), shutil.disk_usage(self.target).free
            if needed > free:
                raise DataError(
                    f"{self.target}: {needed:,} bytes are needed on {self.node} ({todo:,} to copy, {RESERVE:.0%} in reserve), but "
                    f"{free:,} are free; make room, name a larger disk, or cut the set with --shards; nothing was copied"
                )

        self._together(measure, by_first=True)

    def copy(self, reader: Reader, progress: Progress | None, pwrite: Callable[[int, Any, int], int], began: float) -> Staged:
        """Bring what is missing, and note what is whole."""
        size = np.array([file.bytes for file in self.files], np.int64)
        total = int((self.missing * size).sum())
        tell = progress if progress is not None and self.mesh.is_first else lambda done, total: None

        def sweep() -> None:
            self._sweep()
            tell(0, total)

        # A record from now on; what a killed run noted beside it comes into it.
        self._together(lambda: self._save(recorded(self.target)[1]), by_first=True)
        self._together(sweep)
        before = reader.transferred
        exchange = open_exchange(self.mesh) if self.missing.any() else Exchange()
        carrier = Carrier(
            self, lanes_of(self.files, self.nodes, self.missing), exchange, reader, pwrite, lambda done: tell(done, total)
        )
        try:
            carrier.carry()
        except RuntimeError as error:  # from MPI or torch
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise LaunchError(f"staging on {self.node} broke off: {reason}; another rank has ended, see its message") from error
        finally:
            carrier.close()
        exchange.close()

        try:
            told = self._together(lambda: (carrier.outcome(), reader.transferred - before))
        except DataError:
            with suppress(DataError):  # the reason why the copying failed matters more
                self._together(lambda: self._write_record(whole=False), by_first=True)
            raise

        def note() -> None:
            self._write_record(whole=True)
            tell(total, total)

        self._together(note, by_first=True)
        here = [told[rank] for rank in self.nodes.ranks[self.me]]
        shard = self.nodes.shard(self.me)
        mine = np.array([file.shard in (None, shard) for file in self.files], bool)
        return Staged(
            self.target, self.node, shard, self.shards, int(mine.sum()), int(size[mine].sum()),
            sum(read for _, read in here), sum(received for received, _ in here),
            int(size[mine & ~self.missing[self.me]].sum()), time.monotonic() - began, exchange.name,
        )  # fmt: skip

    def _sweep(self) -> None:
        """Throw away parts of files that a killed run left; note files that were found whole by their SHA-256."""
        try:
            for file in self.files[self.number :: len(self.nodes.ranks[self.me])]:
                partial_of(self.target / file.name).unlink(missing_ok=True)
            for entry in self._kept:
                self.note(entry)
        except OSError as error:
            raise self.unwritten(self.target, error) from error

    def note(self, entry: dict[str, Any]) -> None:
        """Note that a file is whole, in a line for the run that follows this one if this one is killed."""
        with (self.target / f".stage.{self.number}.jsonl").open("ab") as lines:
            lines.write(json.dumps(entry).encode() + b"\n")  # one system call, so that lines of two threads do not mix

    def unwritten(self, path: Path, error: OSError) -> DataError:
        todo = "look whether the disk of this node is in order"
        if error.errno in (ENOSPC, EDQUOT):
            todo = "make room on this node, or cut the set with --shards; whole files stay, and a second run goes on from there"
        return DataError(
            f"{path}: cannot be written on {self.node}: {error.strerror} ({errorcode.get(error.errno or 0, error.errno)}); {todo}"
        )

    def _write_record(self, whole: bool) -> None:
        """List every file that is whole; with ``whole``, delete copies of files that the source has no more."""
        known = {file.name: file for file in self.files}
        try:
            entries, kept = recorded(self.target)[1], {}
            for name, entry in sorted(entries.items()):
                if untouched(self.target / name, entry):
                    if name in known and unchanged(known[name], entry):
                        kept[name] = entry
                    elif name not in known and whole:
                        (self.target / name).unlink()
            for folder in {(self.target / name).parent for name in kept}:
                flush(folder)
        except OSError as error:
            raise self.unwritten(self.target / RECORD, error) from error
        self._save(kept)

    def _save(self, entries: Entries) -> None:
        content = {
            "format": 1, "source": str(self.source), "shard": self.nodes.shard(self.me), "shards": self.shards, "files": entries,
        }  # fmt: skip
        path = self.target / RECORD
        try:
            write_json(path, content)
            for pattern in (".stage.*.jsonl", ".stage.*.partial", f".{RECORD}.*.partial"):
                for left in self.target.glob(pattern):
                    left.unlink()
        except OSError as error:
            raise self.unwritten(path, error) from error

    def leave(self) -> None:
        """Unlock the target; what was made for nothing goes."""
        if self._locked >= 0:
            os.close(self._locked)
        for folder in self._made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
