"""Files of tensors in the safetensors layout, which processes write together, and read together, in blocks.

A file has a header (JSON: dtype, shape and place of each tensor) and then their numbers, row by row. Of a tensor that is divided it
has parts, whose names say which: ``name[0:4,8:16]``. Each process writes one stretch of it through a buffer of one block, and keeps
the SHA-256 of each block. Where several ranks need the same numbers, each block is read by one of them, checked, and passed on: it
leaves the disk once.
"""

import hashlib
import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.dist.mesh import Axis
from hpcai.parallel.rows import boxes

BLOCK = 16 << 20
"""Bytes of which each has a SHA-256 of its own"""
_ALIGN = 4096  # a stretch begins on a page, so that no two hosts write into one
KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TYPES = {kind: dtype for dtype, kind in KINDS.items()}
_PART = re.compile(r"(.+)\[(\d+:\d+(?:,\d+:\d+)*)\]", re.DOTALL)  # of a tensor: its name, and from where to where in each dim


@dataclass(frozen=True, eq=False)
class Box:
    """A rectangular part of a tensor of ``size`` that begins at ``offsets``: the numbers are in ``tensor``, of any strides. The
    ranks along ``copies`` hold the same."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    copies: tuple[Axis, ...] = ()

    @property
    def key(self) -> str:
        """Its name in a file."""
        parts = [f"{first}:{first + count}" for first, count in zip(self.offsets, self.tensor.shape)]
        return self.name if tuple(self.tensor.shape) == self.size else f"{self.name}[{','.join(parts)}]"

    def entry(self) -> tuple[str, str, tuple[int, ...], int]:
        """What a header says of it, and its bytes."""
        return self.key, KINDS[self.tensor.dtype], tuple(self.tensor.shape), self.tensor.nbytes


def dealt(found: Sequence[Box], most: int) -> list[Box]:
    """Those of ``found`` that this process writes. What several ranks hold alike is dealt by bytes, along the list, among the first
    ``most`` of them. Numbers of wide types come first, so that each lies at a multiple of its own size."""
    own: list[Box] = []
    for copies in dict.fromkeys(box.copies for box in found):
        alike = [box for box in found if box.copies == copies]
        writers, place, done = min(most, math.prod(axis.size for axis in copies)), _place(copies), 0
        total = sum(box.tensor.nbytes for box in alike)
        for box in alike:
            if min((done + box.tensor.nbytes // 2) * writers // max(total, 1), writers - 1) == place:
                own.append(box)
            done += box.tensor.nbytes
    return sorted(own, key=lambda box: -box.tensor.itemsize)


def _place(axes: Sequence[Axis]) -> int:
    """This rank's number among those along ``axes``."""
    place = 0
    for axis in axes:
        place = place * axis.size + axis.rank
    return place


# ---- writing


@dataclass
class Stretch:
    """What one process writes: ``length`` bytes of ``file`` from ``at`` on."""

    writer: int
    file: str
    at: int
    length: int


class Contents:
    """What is in which file, from the entries of all boxes by writer: at most ``most`` files."""

    def __init__(self, entries: Mapping[int, Sequence[tuple[str, str, Sequence[int], int]]], most: int) -> None:
        self.stretches: list[Stretch] = []
        self.headers: dict[str, bytes] = {}
        writers, files = sorted(entries), min(most, len(entries))
        for number in range(files):
            name, at, told, own = f"tensors-{number:03d}.safetensors", 0, dict[str, Any](), list[Stretch]()
            for writer in (w for i, w in enumerate(writers) if i * files // len(writers) == number):
                if gap := -at % _ALIGN:
                    told[f"gap {at}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
                first = at = at + gap
                for key, kind, sizes, length in entries[writer]:
                    told[key] = {"dtype": kind, "shape": sizes, "data_offsets": [at, at + length]}
                    at += length
                own.append(Stretch(writer, name, first, at - first))
            self.headers[name] = head(told)
            for stretch in own:
                stretch.at += len(self.headers[name])
            self.stretches += own

    def files(self, hashes: Mapping[int, bytes]) -> dict[str, dict[str, Any]]:
        """Size, header and stretches of each file, with the SHA-256 of each block that each writer wrote."""
        files: dict[str, dict[str, Any]] = {
            name: {"bytes": len(text), "header": len(text), "sha256": hashlib.sha256(text).hexdigest(), "stretches": []}
            for name, text in self.headers.items()
        }
        for stretch in self.stretches:
            found = hashes[stretch.writer]
            seals = [found[i : i + 32].hex() for i in range(0, len(found), 32)]
            entry = {"writer": stretch.writer, "at": stretch.at, "bytes": stretch.length, "sha256": seals}
            files[stretch.file]["stretches"].append(entry)
            files[stretch.file]["bytes"] = stretch.at + stretch.length
        return files


def head(entries: Mapping[str, Any]) -> bytes:
    """What a file begins with: a length, and JSON of ``entries`` that fills whole pages."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, at: int, numbers: Tensor) -> bytes:
    """Write bytes from ``at`` on, and wait for the disk -> the SHA-256 of each block.   numbers [n] uint8"""
    hashes, memory = bytearray(), numbers.numpy().data
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for first in range(0, len(memory), BLOCK):
            block: Any = memory[first : first + BLOCK]
            hashes.extend(hashlib.sha256(block).digest())
            while block:
                count = os.pwrite(descriptor, block, at)
                at, block = at + count, block[count:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return bytes(hashes)


# ---- reading


class Stored(NamedTuple):
    """A box of a tensor in a file, from ``at`` to ``end``."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    end: int


class Block(NamedTuple):
    """Bytes of a file that have a SHA-256 together."""

    file: str
    at: int
    length: int
    sha256: str


def listed(file: str, header: bytes) -> Iterator[tuple[str, Stored]]:
    """The names of tensors, and the boxes of them that ``file`` has. Raises ValueError where the header is none of ours."""
    try:
        for key, told in json.loads(header[8:]).items():
            if not key.startswith("gap "):
                begin, end = told["data_offsets"]
                sizes, part = tuple(told["shape"]), _PART.fullmatch(key)
                offsets = tuple(int(dim.partition(":")[0]) for dim in part[2].split(",")) if part else (0,) * len(sizes)
                if {*map(type, (begin, *sizes))} != {int} or min((begin, *sizes)) < 0:
                    raise TypeError(f"{key!r} is no box")
                at = len(header)
                yield part[1] if part else key, Stored(_TYPES[told["dtype"]], offsets, sizes, file, at + begin, at + end)
    except (LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{type(problem).__name__}: {problem}") from problem


def read(folder: Path, blocks: Mapping[str, Sequence[Block]], wanted: Sequence[tuple[Box, Sequence[Stored]]]) -> str:
    """Fill each box from those stored of its tensor -> what is wrong with the files, or nothing. Ranks that hold the same boxes
    call this together and share the reading; ``blocks`` are by file and in order."""
    problem, starts = "", {file: [block.at for block in some] for file, some in blocks.items()}
    for copies in dict.fromkeys(box.copies for box, _ in wanted):
        jobs: dict[Block, list[tuple[Box, Stored]]] = {}
        for box, stored in ((box, each) for box, all_stored in wanted if box.copies == copies for each in all_stored):
            if stored.at < stored.end and (span := _span(box, stored)):
                at = starts[stored.file]
                for block in blocks[stored.file][bisect_right(at, span[0]) - 1 : bisect_left(at, span[1])]:
                    jobs.setdefault(block, []).append((box, stored))
        ordered = sorted(jobs, key=lambda block: (block.file, block.at))
        for block, content in _passed_on(folder, ordered, copies):
            if isinstance(content, str):
                problem = problem or content
            elif not problem:
                for box, stored in jobs[block]:
                    _fill(box, stored, content, block)
    return problem


def wrong(folder: Path, blocks: Sequence[Block]) -> str:
    """What is wrong with the first block that is not what was written, or nothing."""
    return next((content for _, content in _passed_on(folder, blocks, ()) if isinstance(content, str)), "")


def _span(box: Box, stored: Stored) -> tuple[int, int] | None:
    """Bytes of the file among which is what ``box`` needs of ``stored``."""
    if tuple(box.tensor.shape) == stored.sizes and box.offsets == stored.offsets:
        return stored.at, stored.end
    low, high = _common(box.offsets, box.tensor.shape, stored.offsets, stored.sizes)
    if any(a >= b for a, b in zip(low, high)):
        return None
    stride = _strides(stored.sizes)
    first = sum((a - o) * s for a, o, s in zip(low, stored.offsets, stride))
    last = sum((b - 1 - o) * s for b, o, s in zip(high, stored.offsets, stride))
    return stored.at + first * stored.dtype.itemsize, stored.at + (last + 1) * stored.dtype.itemsize


def _common(a: Sequence[int], sizes: Sequence[int], b: Sequence[int], others: Sequence[int]) -> tuple[list[int], list[int]]:
    return [max(x, y) for x, y in zip(a, b)], [min(x + n, y + m) for x, n, y, m in zip(a, sizes, b, others)]


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


def _fill(box: Box, stored: Stored, content: Tensor, block: Block) -> None:
    """Copy what ``content``, the bytes of ``block``, has of ``stored`` into ``box``."""
    width = stored.dtype.itemsize
    begin, end = max(stored.at, block.at), min(stored.end, block.at + block.length)
    numbers = content[begin - block.at : end - block.at].view(stored.dtype)
    if end - begin == stored.end - stored.at and tuple(box.tensor.shape) == stored.sizes and box.offsets == stored.offsets:
        box.tensor.copy_(numbers.view(stored.sizes))
        return
    stride, first = _strides(stored.sizes), (begin - stored.at) // width
    for at, sizes in boxes(stored.sizes, stride, first, (end - stored.at) // width):
        start = sum(o * s for o, s in zip(at, stride)) - first
        piece = numbers[start : start + math.prod(sizes)].view(sizes)
        where = [o + a for o, a in zip(stored.offsets, at)]
        put(box, where, piece)


def put(box: Box, offsets: Sequence[int], numbers: Tensor) -> None:
    """Copy what ``box`` has of ``numbers``, which begin at ``offsets`` of the same tensor."""
    low, high = _common(box.offsets, box.tensor.shape, offsets, numbers.shape)
    if all(a < b for a, b in zip(low, high)):
        into, of = (tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at)) for at in (box.offsets, offsets))
        box.tensor[into].copy_(numbers[of])


def _passed_on(folder: Path, ordered: Sequence[Block], copies: tuple[Axis, ...]) -> Iterator[tuple[Block, Tensor | str]]:
    """Each block with its bytes, or with what is wrong. The ranks along ``copies`` read in turn, each ahead of its turns."""
    count, place = math.prod(axis.size for axis in copies), _place(copies)
    mine = [block for number, block in enumerate(ordered) if number % count == place]
    room = [torch.empty(max((block.length for block in ordered), default=0) + 1, dtype=torch.uint8) for _ in range(3)]
    with ThreadPoolExecutor(1, "checkpoint") as thread:
        ahead = [thread.submit(_checked, folder, block, room[0]) for block in mine[:1]]
        for number, block in enumerate(ordered):
            turn, whose = divmod(number, count)
            content = room[2][: block.length + 1]
            if whose == place:
                content = ahead.pop().result()
                ahead += [thread.submit(_checked, folder, each, room[(turn + 1) % 2]) for each in mine[turn + 1 :][:1]]
            _broadcast(content, copies, whose)
            wrong = f"{block.file} has changed since it was written, or cannot be read: bytes {block.at:,} on lack their SHA-256"
            yield block, content[:-1] if content[-1] else wrong


def _checked(folder: Path, block: Block, room: Tensor) -> Tensor:
    """The bytes of a block in ``room``, and one more: 1 where they are those that were written."""
    content = room[: block.length + 1]
    view: Any = content.numpy().data[:-1]
    content[-1] = done = 0
    try:
        descriptor = os.open(folder / block.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < block.length and (count := os.preadv(descriptor, [view[done:]], block.at + done)):
                done += count
        finally:
            os.close(descriptor)
    except OSError:
        return content
    content[-1] = done == block.length and hashlib.sha256(view).hexdigest() == block.sha256
    return content


def _broadcast(content: Tensor, copies: tuple[Axis, ...], source: int) -> None:
    """Give ``content`` of the rank with number ``source`` among those along ``copies`` to all of them."""
    places: list[int] = []
    for axis in reversed(copies):
        source, place = divmod(source, axis.size)
        places.insert(0, place)
    for number, axis in enumerate(copies):  # along the first axis, then from all that have it along the next
        if axis.size > 1 and all(other.rank == p for other, p in zip(copies[number + 1 :], places[number + 1 :])):
            torch_dist.broadcast(content, group=axis.group, group_src=places[number])
