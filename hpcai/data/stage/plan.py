"""What is staged: the files of a source, which node is to hold which, and what a target holds already.   F files   N nodes"""

import hashlib
import heapq
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from hpcai.data.index import TABLE
from hpcai.errors import DataError

logger = logging.getLogger(__name__)

RECORD = ".stage.json"
DATA = (".h5", ".npy", ".tfrecord")
LARGE = 1 << 20
"""Bytes. A file that an index lists, of one of these names or of this size (and no long index or its table) is data and goes to one
shard; any other goes to all nodes."""

_CIRCLES = 16  # circles of a lane: an MPI library has some thousand communicators

Entries = dict[str, dict[str, Any]]


class SourceFile(NamedTuple):
    """A file of the source. ``mtime`` in ns; ``shard`` None: it goes to every node."""

    name: str
    bytes: int
    sha256: str | None
    mtime: int
    shard: int | None


# ---- what is where


def assign(sizes: Sequence[int], shards: int) -> np.ndarray:
    """The shard of each file of ``sizes`` bytes: a pure function, the same everywhere.   [F] int64

    Shards differ by at most one file; the largest files come first, each to the shard with the fewest bytes of those with the
    fewest files.
    """
    if shards < 1:
        raise DataError(f"{shards} shards were asked for; give 1 (every node holds all) or a divisor of the number of nodes")
    return _deal(sizes, shards, by_bytes=False)


def _deal(sizes: Sequence[int], parts: int, by_bytes: bool) -> np.ndarray:
    """The part of each file. The largest goes first, to the part with the fewest bytes, or with the fewest files, then bytes."""
    found = np.zeros(len(sizes), np.int64)
    load = [(0, 0, part) for part in range(parts)]  # a heap already
    for index in sorted(range(len(sizes)), key=lambda i: (-int(sizes[i]), i)):
        first, second, part = load[0]
        size = int(sizes[index])
        heapq.heapreplace(load, (first + size, second + 1, part) if by_bytes else (first + 1, second + size, part))
        found[index] = part
    return found


def holds(target: str | Path, source: str | Path, look: bool = True) -> dict[Path, Path]:
    """Files of ``source`` that are whole at ``target``, each with its local copy: ``holds(...).get(path, path)`` is what to read.

    The paths begin with ``source`` as it is given. The record is read once; while a run is under way, a later call finds more. A
    copy that was deleted or touched since is left out, unless the record is believed without a ``look``. Raises DataError where
    nothing was staged, and for a record of another source.
    """
    target, source = Path(target), Path(source)
    whole, entries = recorded(target)
    if whole is None:
        raise DataError(f"{target / RECORD}: not there; run hpcai data stage {source} {target} on this node, or read {source}")
    check_source(target, whole["source"], str(source.resolve()))
    found = {source / name: target / name for name, entry in entries.items() if not look or untouched(target / name, entry)}
    if len(found) < len(entries):
        logger.warning("%s: %d of %d staged files are gone or were changed", target, len(entries) - len(found), len(entries))
    return found


def on_this_node(text: str) -> tuple[str, list[str]]:
    """``text`` with ~ and the variables of this node in place, and what of it stands for nothing here, each with the reason."""

    def here(part: str) -> str:
        return os.path.expanduser(os.path.expandvars(part))

    parts = re.findall(r"^~[^/]*|\$\{[^}/]*\}?|\$\w*", text)
    nothing = [f"{part} is {'no user' if part[0] == '~' else 'not set'}" for part in parts if here(part) in ("", part)]
    return here(text), nothing if text.strip() else [f"{text!r} is no name"]


def shard_of(source: str | Path, shards: int) -> dict[Path, int]:
    """Shard of each data file of ``source``: what ``stage_in`` deals to the nodes."""
    source = Path(source)
    return {source / file.name: file.shard for file in scan(source.resolve(), shards) if file.shard is not None}


def check_source(target: Path, found: object, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{target}: holds files staged from {found}, not from {expected}; name another folder, or delete it with its {RECORD}"
        )


def recorded(target: Path) -> tuple[dict[str, Any] | None, Entries]:
    """The record, and the files that are whole by it or by later lines of a run that is under way or was killed."""
    path = target / RECORD
    try:
        whole = json.loads(path.read_bytes())
        entries: Entries = {name: {**entry} for name, entry in whole["files"].items()}
        whole["source"]
    except FileNotFoundError:
        return None, {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; repair this node's disk, or name another folder") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a record of staged files ({error!r}); delete it and stage again") from error
    for lines in sorted(target.glob(".stage.*.jsonl")):
        for line in lines.read_bytes().splitlines():
            with suppress(ValueError, LookupError, TypeError, AttributeError):  # the last line of a killed run may be cut off
                entry = json.loads(line)
                entries[entry.pop("name")] = entry
    return whole, entries


def untouched(path: Path, entry: dict[str, Any]) -> bool:
    try:
        about = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and (about.st_size, about.st_mtime_ns) == (entry.get("bytes"), entry.get("mtime_ns"))


def unchanged(file: SourceFile, entry: dict[str, Any]) -> bool:
    """Whether the copy was made of the file that now lies at the source."""
    if entry.get("bytes") != file.bytes:
        return False
    return entry.get("sha256") == file.sha256 if file.sha256 is not None else entry.get("source_mtime_ns") == file.mtime


def is_whole(file: SourceFile, target: Path, entry: dict[str, Any], verify: bool, until: float) -> dict[str, Any] | None:
    """The entry of a file that is whole at the target: by its record, or by its SHA-256 where time allows. Otherwise None."""
    path = target / file.name
    same = unchanged(file, entry)
    want = file.sha256 or (entry.get("sha256") if same else None)
    if same and untouched(path, entry) and (not verify or want is None or entry.get("verified")):
        return entry
    if not verify or want is None or time.monotonic() > until:
        return None
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) or about.st_size != file.bytes:
            return None
        with path.open("rb") as there:
            digest = hashlib.file_digest(there, "sha256").hexdigest()
    except OSError:
        return None
    return entry_of(file, about, digest, True) if digest == want else None


def entry_of(file: SourceFile, about: os.stat_result, digest: str | None, verified: bool) -> dict[str, Any]:
    return {
        "bytes": file.bytes, "sha256": digest, "verified": verified,
        "mtime_ns": about.st_mtime_ns, "source_mtime_ns": file.mtime,
    }  # fmt: skip


# ---- the source


def scan(source: Path, shards: int) -> list[SourceFile]:
    """All files to be copied, by name. Raises DataError for a file that is not as an index lists it."""
    found = dict(_walk(source, "", ()))
    listed: dict[str, tuple[int, str | None]] = {}
    for name in [name for name in found if PurePosixPath(name).name == "index.json"]:
        listed.update(_listed(source, name))
    bad = []
    for name, (size, _) in listed.items():
        if name not in found:
            with suppress(OSError):
                found[name] = os.stat(source / name)  # a hidden one, for example
        about = found.get(name) if name in found and stat.S_ISREG(found[name].st_mode) else None
        if about is None or about.st_size != size:
            what = "is missing" if about is None else f"has {about.st_size:,} bytes (truncated or rewritten?)"
            bad.append(f"{source / name}: {what}, index.json says {size:,} bytes")
    if bad:
        more = f" (and {len(bad) - 1} more files)" if len(bad) > 1 else ""
        raise DataError(f"{bad[0]}{more}; restore the file or prepare the data set anew; nothing was copied")
    if not found:
        raise DataError(f"{source}: holds no file to copy; name the folder of a data set")
    files = [
        SourceFile(n, about.st_size, listed.get(n, (0, None))[1], about.st_mtime_ns, None) for n, about in sorted(found.items())
    ]
    data = [f for f in files if f.name in listed or f.name.endswith(DATA) or (f.bytes >= LARGE and not _about(f.name))]
    shard = _shards({file.name: file.bytes for file in data}, shards)
    return [file._replace(shard=shard.get(file.name)) for file in files]


def _about(name: str) -> bool:
    """Whether a file says something of others: JSON, or the table of an index."""
    return name.endswith(".json") or PurePosixPath(name).match(TABLE.format("*"))


def _walk(source: Path, inside: str, parents: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below ``source`` that is not hidden. Links are followed, also out of the tree, which is said."""
    folder = source / inside
    try:
        about = os.stat(folder)
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}; give this user the right to, or mend the link") from error
    if (about.st_dev, about.st_ino) in parents:
        raise DataError(f"{folder}: this link leads back to a folder that it lies in, so the tree has no end; delete the link")
    parents = (*parents, (about.st_dev, about.st_ino))
    for entry in entries:
        if entry.name.startswith(".") or entry.name.endswith(".partial"):
            continue
        name = str(PurePosixPath(inside, entry.name))
        try:
            about = entry.stat()
        except OSError as error:
            what = "leads nowhere" if entry.is_symlink() else error.strerror
            raise DataError(f"{entry.path}: {what}; mend or delete it") from error
        if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(source):
            logger.info("%s leads out of %s; what it points at is copied", entry.path, source)
        if stat.S_ISDIR(about.st_mode):
            yield from _walk(source, name, parents)
        elif stat.S_ISREG(about.st_mode):
            yield name, about
        else:
            logger.warning("%s is neither a file nor a folder and is not copied", entry.path)


def _listed(source: Path, name: str) -> dict[str, tuple[int, str | None]]:
    """Sizes and SHA-256 that an index of files states; nothing where ``name`` is something else."""
    path = source / name
    remedy = "repair it or prepare the data set anew"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {remedy}") from error
    entries = content.get("files") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        return {}
    found: dict[str, tuple[int, str | None]] = {}
    for entry in entries:
        inside, size, digest = entry["name"], entry.get("bytes"), entry.get("sha256")
        if not isinstance(inside, str) or not inside or inside.startswith("/") or ".." in PurePosixPath(inside).parts:
            raise DataError(f"{path}: lists {inside!r}, expected the name of a file in its folder; {remedy}")
        if not isinstance(size, int) or size < 0:
            raise DataError(f"{path}: lists {inside!r} with {size!r} bytes, expected a whole number; {remedy}")
        if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-fA-F]{64}", digest)):
            raise DataError(f"{path}: lists {inside!r} with SHA-256 {digest!r}, expected 64 hexadecimal digits; {remedy}")
        found[str(PurePosixPath(name).parent / inside)] = size, digest and digest.lower()
    return found


def _shards(sizes: dict[str, int], shards: int) -> dict[str, int]:
    """Shard of each file, even within every folder (training, validation) and over all of them."""
    folders: dict[str, list[str]] = {}
    for name in sizes:
        folders.setdefault(str(PurePosixPath(name).parent), []).append(name)
    load = np.zeros((shards, 2), np.int64)  # files, bytes
    found: dict[str, int] = {}
    for names in folders.values():
        part = assign([sizes[name] for name in names], shards)
        here = np.zeros_like(load)
        np.add.at(here, part, [[1, sizes[name]] for name in names])
        # The fullest part to the emptiest shard: of parts and shards that differ by one file come shards that do.
        to = np.empty(shards, np.int64)
        to[np.lexsort((-here[:, 1], -here[:, 0]))] = np.lexsort((load[:, 1], load[:, 0]))
        load[to] += here
        found |= {name: int(to[p]) for name, p in zip(names, part)}
    return found


# ---- which rank does what


@dataclass(frozen=True)
class Nodes:
    """Nodes in the order of their lowest ranks. ``ranks`` holds those of each node, ascending; the first one acts for it."""

    names: list[str]
    ranks: list[list[int]]
    shards: int

    def shard(self, node: int) -> int:
        return node * self.shards // len(self.names)

    def group(self, shard: int) -> list[int]:
        return [node for node in range(len(self.names)) if self.shard(node) == shard]


def nodes_of(names: Sequence[str], shards: int) -> Nodes:
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    count = len(ranks)
    if shards > count or count % shards:
        fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        have = f"the job has {count} node{'s' if count > 1 else ''}"
        raise DataError(f"{shards} shards need a multiple of {shards} nodes, but {have}; give --shards {fit}, or start other nodes")
    return Nodes(list(ranks), list(ranks.values()), shards)


class Circle(NamedTuple):
    """The ranks that pass these files around, one of each node that misses them; ``layer`` is its number within the lane."""

    layer: int
    ranks: tuple[int, ...]
    files: list[int]


def lanes_of(files: Sequence[SourceFile], nodes: Nodes, missing: np.ndarray) -> list[list[Circle]]:
    """The circles of every lane of every group, the same on all processes. ``missing``: which node has yet to get what. [N, F]"""
    lanes = []
    for shard in range(nodes.shards):
        group = nodes.group(shard)
        misses = np.ascontiguousarray(missing[group].T)  # [F, N/S]
        todo = np.flatnonzero(misses.any(1)).tolist()
        count = min(len(nodes.ranks[node]) for node in group)
        part = _deal([files[i].bytes for i in todo], count, by_bytes=True)
        wanted: list[dict[bytes, list[int]]] = [{} for _ in range(count)]
        for i, lane in zip(todo, part.tolist()):
            wanted[lane].setdefault(misses[i].tobytes(), []).append(i)
        for lane in range(count):
            sets = sorted(wanted[lane].items(), key=lambda item: (-sum(item[0]), item[0]))
            if len(sets) > _CIRCLES:  # the rest in one circle; nodes that hold a file of it let it pass
                rest = sets[_CIRCLES - 1 :]
                union = misses[[i for _, some in rest for i in some]].any(0).tobytes()
                sets = [*sets[: _CIRCLES - 1], (union, sorted(i for _, some in rest for i in some))]
            members = [[node for node, miss in zip(group, key) if miss] for key, _ in sets]
            lanes.append(
                [
                    Circle(layer, tuple(nodes.ranks[node][lane] for node in circle), some)
                    for layer, (circle, (_, some)) in enumerate(zip(members, sets))
                ]
            )
    return lanes


class Block(NamedTuple):
    """A part of a file; ``root``, a rank, reads it for the circle."""

    circle: Circle
    root: int
    file: int
    offset: int
    length: int
    last: bool


def blocks_of(lane: Sequence[Circle], files: Sequence[SourceFile], block: int) -> Iterator[Block]:
    for circle in lane:
        turn = 0
        for index in circle.files:
            size = files[index].bytes
            for offset in range(0, max(size, 1), block):  # an empty file has one empty block
                root = circle.ranks[turn % len(circle.ranks)]
                yield Block(circle, root, index, offset, min(block, size - offset), offset + block >= size)
                turn += 1


def count_blocks(lane: Sequence[Circle], files: Sequence[SourceFile], block: int) -> int:
    return sum(max(-(-files[i].bytes // block), 1) for circle in lane for i in circle.files)
