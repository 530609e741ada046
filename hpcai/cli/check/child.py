"""The child process, in which the HDF5 library opens files that may be damaged, and writes whole ones anew."""

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np

from hpcai.cli.check.copying import boxes_of, copied, opened
from hpcai.cli.check.tally import Tally
from hpcai.data import layout
from hpcai.data.direct import ALIGN
from hpcai.errors import DataError

_OBJECTS = 100_000
_CHUNKS = 1 << 22
_DEFLATE = 1100  # deflate packs 1032 bytes into one at best
_PLAIN_FILTERS = {1, 2, 3, 4, 5, 6, 32000}  # deflate, shuffle, Fletcher's sum, szip, n-bit, scale-offset, LZF
_ADDRESSES = 8 << 30
SPARE = 1 << 20  # bytes that a small file may unpack to, whatever its filters promise


def serve() -> None:
    """Answers requests, a line of JSON each, until the input ends. The main program of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _ADDRESSES if hard == resource.RLIM_INFINITY else min(hard, _ADDRESSES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not be taken for an answer

    def say(**answer: Any) -> None:
        signal.alarm(int(patience) + 60)  # an orphan in an endless loop ends itself
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()

    acts: dict[str, Callable[..., Iterator[Any]]] = {"describe": _described, "values": _values, "copy": copied}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        patience = request.pop("patience")
        signal.alarm(int(patience) + 60)
        try:
            for answer in acts[request.pop("do")](**request):
                say(more=answer)
            say(end=True)
        except Exception as problem:  # whatever h5py makes of a damaged file
            say(error=str(problem) if isinstance(problem, DataError) else f"{type(problem).__name__}: {problem}")
        signal.alarm(0)


def _described(path: str) -> Iterator[Any]:
    """Each dataset: its shape, dtype, and where its values lie."""
    with opened(path) as file:
        size = os.stat(path).st_size
        for name, data in _datasets(file):
            yield _description(file, name, data, size)


def _datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset once, whatever links lead to it; links to elsewhere are left alone."""
    seen, open_groups = {h5py.h5o.get_info(file.id).addr}, [("", file["/"])]
    while open_groups:
        prefix, group = open_groups.pop(0)
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            item = group[name]
            address = h5py.h5o.get_info(item.id).addr
            if address in seen:
                continue
            seen.add(address)
            if len(seen) > _OBJECTS:
                raise DataError(f"holds more than {_OBJECTS:,} objects")
            if isinstance(item, h5py.Group):
                open_groups.append((f"{prefix}{name}/", item))
            elif isinstance(item, h5py.Dataset):
                yield prefix + name, item


def _description(file: h5py.File, name: str, data: h5py.Dataset, size: int) -> dict[str, Any]:
    dtype = data.dtype
    told: dict[str, Any] = {
        "name": name,
        "shape": None if data.shape is None else list(data.shape),
        "dtype": dtype.str if dtype.kind in "biufc" else str(dtype),
        "plain": dtype.kind in "biufc",
        "item": dtype.itemsize,
    }
    if data.shape is None or not data.shape:
        return told | {"kind": "scalar"}
    plist = data.id.get_create_plist()
    try:
        found = layout.hdf5(file, name)
    except layout.UnreadableLayoutError as problem:
        told["why"] = str(problem).removeprefix(f"{file.filename}: ")
        if dtype.hasobject:
            return told | {"kind": "objects"}
        kind = plist.get_layout()
        if kind == h5py.h5d.VIRTUAL or (kind == h5py.h5d.CONTIGUOUS and plist.get_external_count()):
            return told | {"kind": "elsewhere"}
        if kind == h5py.h5d.CHUNKED and plist.get_nfilters():
            return told | {"kind": "filtered", "chunk": list(data.chunks)} | _chunks(data, plist, size)
        return told | {"kind": "userblock" if file.userblock_size else "compact"}
    except DataError as problem:
        return told | {"kind": "damaged", "why": str(problem).removeprefix(f"{file.filename}: ")}
    if found.offset is not None:
        return told | {"kind": "contiguous", "offset": found.offset}
    if not found.nbytes:
        return told | {"kind": "contiguous", "offset": 0}
    chunk = plist.get_layout() == h5py.h5d.CHUNKED
    if not chunk:
        return told | {"kind": "chunked", "chunk": list(data.shape), "grid": 1, "written": 0, "stored": 0}
    told |= {"kind": "chunked", "chunk": list(data.chunks)} | _chunks(data, plist, size)
    width = dtype.itemsize * math.prod(data.shape[1:])
    if tuple(data.chunks[1:]) == tuple(data.shape[1:]):
        begins = [offset + i * width for offset in found.offsets.values() for i in range(data.chunks[0])]
        told["aligned"] = sum(begin % ALIGN == 0 for begin in begins) / max(len(begins), 1)
    return told


def _chunks(data: h5py.Dataset, plist: Any, size: int) -> dict[str, Any]:
    """How many chunks there are and should be. Raises DataError for those that cannot be in a file of ``size`` bytes."""
    where, whole = f"dataset '{data.name.lstrip('/')}'", data.dtype.itemsize * math.prod(data.chunks)
    filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    for code, _, _, text in filters:
        if not h5py.h5z.filter_avail(code):
            text = text.decode(errors="replace") or "without a name"
            raise DataError(f"{where} is written through filter {code} ({text}), which is not here; pip install hdf5plugin")
    grid = math.prod(-(-n // c) for n, c in zip(data.shape, data.chunks))
    written = data.id.get_num_chunks()
    packing = _DEFLATE if {code for code, *_ in filters} <= _PLAIN_FILTERS else 100 * _DEFLATE
    if whole > packing * size + SPARE or not 0 <= written <= min(_CHUNKS, grid, size):
        raise DataError(
            f"{where} says that {written:,} of {grid:,} chunks of {whole:,} bytes are in a file of {size:,}; it is damaged"
        )
    stored = 0

    def note(chunk: Any) -> None:
        nonlocal stored
        stored += chunk.size
        if chunk.byte_offset + chunk.size > size:
            end = chunk.byte_offset + chunk.size
            raise DataError(f"{where}: chunk {chunk.chunk_offset} ends at byte {end:,}, but the file has {size:,}; it is truncated")

    data.id.chunk_iter(note)
    return {"grid": grid, "written": written, "stored": stored}


def _values(path: str, name: str, rows: list[int] | None, bounds: list[Any], keys: bool, blank: float | None) -> Iterator[Any]:
    """The tally of a dataset, or of some of its rows: keys as they come, the faults at the end."""
    with opened(path) as file:
        data = file[name]
        tally = Tally(data.dtype, data.shape[1:], (bounds[0], bounds[1]), keys, blank)
        for begin, shape in [(0, data.shape)] if rows is None else [(row, (1, *data.shape[1:])) for row in rows]:
            tally.row = begin
            for box in boxes_of(shape, data.dtype.itemsize, data.chunks):
                part = data[(slice(begin + box[0].start, begin + box[0].stop), *box[1:])]
                tally.add(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
                yield {"keys": tally.keys.tobytes().hex() if tally.keys else ""}
                if tally.keys is not None:
                    del tally.keys[:]
        yield {"keys": "", "tally": tally.told()}
