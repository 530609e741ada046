"""Shard files: tensors in the safetensors layout, each file written by one rank, and read by several together.

A file has a header (JSON: dtype, shape and byte range of each tensor), and then the elements, in row-major order. Shards of a
tensor have names with their index ranges, ``name[0:4,8:16]``. Each block of a file has a SHA-256. Boxes that several ranks hold are
written by a few of these ranks, and read by a few and broadcast: every byte is read from disk once.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from hpcai.dist.mesh import Axis
from hpcai.nn.safetensors_files import DTYPES, encode_header

BLOCK = 16 << 20
"""Bytes that have a SHA-256 together."""
_SHARD_KEY = re.compile(r"(.+)\[(\d+:\d+(?:,\d+:\d+)*)\]", re.DOTALL)  # name of a tensor, and the index range in each dim


@dataclass(frozen=True, eq=False)
class Box:
    """A shard of a tensor of ``size``: a box that begins at ``offsets``, with its elements in ``tensor``, of any strides. Ranks
    along ``replica_axes`` hold the same box."""

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    replica_axes: tuple[Axis, ...] = ()

    @property
    def key(self) -> str:
        """The name of the box in a file."""
        parts = [f"{first}:{first + count}" for first, count in zip(self.offsets, self.tensor.shape)]
        return self.name if tuple(self.tensor.shape) == self.size else f"{self.name}[{','.join(parts)}]"


def assign_writers(boxes: Sequence[Box], limit: int) -> Iterator[tuple[tuple[Axis, ...], list[list[Box]]]]:
    """Distribute boxes, by bytes, over the first ``limit`` ranks that hold them: yield, for each set of replica axes, the boxes of
    each rank. Wider dtypes come first, so that each box is aligned to its itemsize. Readers are assigned likewise."""
    for axes in dict.fromkeys(box.replica_axes for box in boxes):
        replicated = sorted((box for box in boxes if box.replica_axes == axes), key=lambda box: -box.tensor.itemsize)
        parts: list[list[Box]] = [[] for _ in range(min(limit, math.prod(axis.size for axis in axes)))]
        total, done = sum(box.tensor.nbytes for box in replicated), 0
        for box in replicated:
            parts[min((done + box.tensor.nbytes // 2) * len(parts) // max(total, 1), len(parts) - 1)].append(box)
            done += box.tensor.nbytes
        yield axes, parts


def boxes_to_write(boxes: Sequence[Box], limit: int) -> list[Box]:
    local = [box for axes, parts in assign_writers(boxes, limit) if _rank_in(axes) < len(parts) for box in parts[_rank_in(axes)]]
    return sorted(local, key=lambda box: -box.tensor.itemsize)


def allocate(boxes: Sequence[Box], pinned: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Allocate contiguous memory for ``boxes``; return it, and a view of it for each box."""
    ends = list(accumulate((box.tensor.nbytes for box in boxes), initial=0))
    memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
    views = [memory[a:b].view(box.tensor.dtype).view(box.tensor.shape) for a, b, box in zip(ends, ends[1:], boxes)]
    return memory, views


def _rank_in(axes: Sequence[Axis]) -> int:
    """Return the row-major rank of this process along ``axes``."""
    return int(np.ravel_multi_index([axis.rank for axis in axes], [axis.size for axis in axes]))


# ---- writing


def write(path: Path, boxes: Sequence[Box], memory: Tensor, writer: int) -> dict[str, Any]:
    """Write ``boxes``, whose elements are in ``memory``, to a file, and wait for the disk. Return the index entry of the file."""
    header = encode_header({box.key: (box.tensor.dtype, box.tensor.shape) for box in boxes})
    digests, content = [], memory.numpy().data
    with path.open("wb") as file:
        file.write(header)
        for first in range(0, len(content), BLOCK):
            block: Any = content[first : first + BLOCK]
            digests.append(hashlib.sha256(block).hexdigest())
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    byte_range = {"writer": writer, "at": len(header), "bytes": len(content), "sha256": digests}
    digest = hashlib.sha256(header).hexdigest()
    return {"bytes": len(header) + len(content), "header": len(header), "sha256": digest, "stretches": [byte_range]}


# ---- reading


class StoredBox(NamedTuple):
    """A box of a tensor in a file, from byte ``at`` to byte ``end``."""

    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    end: int


class Block(NamedTuple):
    """A range of bytes of a file with its SHA-256."""

    file: str
    at: int
    length: int
    sha256: str


def list_tensors(file: str, header: bytes) -> Iterator[tuple[str, StoredBox]]:
    """Yield the names of tensors, and their boxes in ``file``. Raises ValueError if the header is invalid."""
    try:
        for key, entry in json.loads(header[8:]).items():
            begin, end = entry["data_offsets"]
            sizes, shard = tuple(entry["shape"]), _SHARD_KEY.fullmatch(key)
            offsets = tuple(int(dim.partition(":")[0]) for dim in shard[2].split(",")) if shard else (0,) * len(sizes)
            if {*map(type, (begin, *sizes))} != {int} or min((begin, *sizes)) < 0:
                raise TypeError(f"{key!r} is no box")
            at = len(header)
            yield shard[1] if shard else key, StoredBox(DTYPES[entry["dtype"]], offsets, sizes, file, at + begin, at + end)
    except (LookupError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{type(problem).__name__}: {problem}") from problem


class _OpenFiles(ExitStack):
    """Files of a folder that are opened once and closed together."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._open = folder, dict[str, Any]()

    def read(self, file: str, at: int, into: Tensor) -> None:
        """Fill ``into`` [n] uint8 with the bytes of ``file`` from ``at``."""
        if file not in self._open:
            self._open[file] = self.enter_context((self._folder / file).open("rb", buffering=0))
        view: Any = into.numpy().data
        self._open[file].seek(at)
        while view:
            if not (count := self._open[file].readinto(view)):
                raise OSError(None, "ends too early", file)
            view = view[count:]


def verify_blocks(folder: Path, blocks: Sequence[Block]) -> str:
    """Compare blocks with their SHA-256. Return an error message for the first damaged one, or an empty string."""
    memory = torch.empty(max((block.length for block in blocks), default=0), dtype=torch.uint8)
    with _OpenFiles(folder) as files:
        for block in blocks:
            content = memory[: block.length]
            with suppress(OSError):
                files.read(block.file, block.at, content)
                if hashlib.sha256(content.numpy().data).hexdigest() == block.sha256:
                    continue
            return f"{block.file} has changed since it was written, or cannot be read: bytes {block.at:,} on lack their SHA-256"
    return ""


def read(folder: Path, requests: Sequence[tuple[Box, Sequence[StoredBox]]], readers: int) -> str:
    """Fill each box from stored boxes of its tensor. Return an error message, or an empty string. Ranks that hold the same boxes
    call this together: at most ``readers`` of them read some of the boxes each, and broadcast them."""
    stored, problem = {id(box): parts for box, parts in requests}, ""
    for axes, assigned in assign_writers([box for box, _ in requests], readers):
        index, alone = _rank_in(axes), math.prod(axis.size for axis in axes) == 1
        local = assigned[index] if index < len(assigned) else []
        memory, parts = allocate([] if alone else local)
        parts = [box.tensor for box in local] if alone else parts
        try:
            with _OpenFiles(folder) as files:
                for box, part in zip(local, parts):
                    for each in stored[id(box)]:
                        _read_overlap(replace(box, tensor=part), each, files)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
        for number, boxes in enumerate(() if alone else assigned):
            content, views = (memory, parts) if number == index else allocate(boxes)
            _broadcast(content, axes, number)
            for box, part in zip(boxes, views):
                box.tensor.copy_(part)
    return problem


def _read_overlap(box: Box, stored: StoredBox, files: _OpenFiles) -> None:
    """Read the overlap of ``box`` and ``stored``, as full rows along the first dim."""
    low, high = _overlap(box, stored.offsets, stored.sizes)
    if stored.at == stored.end or any(a >= b for a, b in zip(low, high)):
        return
    first = (low[0] - stored.offsets[0]) * math.prod(stored.sizes[1:]) * stored.dtype.itemsize if low else 0
    rows = torch.empty((high[0] - low[0], *stored.sizes[1:]) if low else (), dtype=stored.dtype)
    files.read(stored.file, stored.at + first, rows.view(-1).view(torch.uint8))
    copy_into(box, [*low[:1], *stored.offsets[1:]], rows)


def _overlap(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the begin and the end, in each dim, of the overlap of ``box`` with a box at ``offsets``."""
    ends = zip(box.offsets, box.tensor.shape, offsets, sizes)
    return [max(pair) for pair in zip(box.offsets, offsets)], [min(x + n, y + m) for x, n, y, m in ends]


def copy_into(box: Box, offsets: Sequence[int], source: Tensor) -> None:
    """Copy the overlap of ``box`` and ``source``, which begins at ``offsets`` of the same tensor, into the box."""
    low, high = _overlap(box, offsets, source.shape)
    if all(a < b for a, b in zip(low, high)):
        into, of = (tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at)) for at in (box.offsets, offsets))
        box.tensor[into].copy_(source[of])


def _broadcast(content: Tensor, axes: tuple[Axis, ...], source: int) -> None:
    """Broadcast ``content`` from the rank with number ``source`` along ``axes``."""
    indices = [int(index) for index in np.unravel_index(source, [axis.size for axis in axes])]
    for number, axis in enumerate(axes):  # along the first axis, then from its ranks along the next
        if axis.size > 1 and all(other.rank == p for other, p in zip(axes[number + 1 :], indices[number + 1 :])):
            torch_dist.broadcast(content, group=axis.group, group_src=indices[number])
