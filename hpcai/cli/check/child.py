"""The child process, in which the HDF5 library opens files that may be damaged, and writes whole ones anew."""

import json
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.cli.check.copying import boxes_of, copied, is_elsewhere, opened
from hpcai.cli.check.tally import Tally
from hpcai.data import layout
from hpcai.data.direct import ALIGN
from hpcai.data.table import describe
from hpcai.errors import DataError

_OBJECTS = 100_000
_CHUNKS = 1 << 22
_DEFLATE = 1100  # deflate packs 1032 bytes into one at best
_PLAIN_FILTERS = {1, 2, 3, 4, 5, 6, 32000}  # deflate, shuffle, Fletcher's sum, szip, n-bit, scale-offset, LZF
_ADDRESSES = 8 << 30
SPARE = 1 << 20  # bytes that a small file may unpack to, whatever its filters promise


def serve(descriptor: int) -> None:
    """Answers requests, which are JSON, until the line is closed. The main program of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _ADDRESSES if hard == resource.RLIM_INFINITY else min(hard, _ADDRESSES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    line = Connection(descriptor)

    def say(**answer: Any) -> None:
        signal.alarm(int(patience) + 60)  # an orphan in an endless loop ends itself
        line.send_bytes(json.dumps(answer).encode())

    acts: dict[str, Callable[..., Iterator[Any]]] = {"describe": _described, "values": _values, "copy": copied, "table": _tabled}
    with suppress(EOFError):
        while True:
            request = json.loads(line.recv_bytes())
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
    """Each dataset once, whatever links lead to it: shape, dtype, and where its values lie. Links to elsewhere are left alone."""
    names, objects = list[str](), count(1)

    def note(name: str, item: Any) -> None:
        if next(objects) > _OBJECTS:
            raise DataError(f"holds more than {_OBJECTS:,} objects")
        if isinstance(item, h5py.Dataset):
            names.append(name)

    with opened(path) as file:
        file.visititems(note)
        for name in names:
            yield _description(file, name, file[name], os.stat(path).st_size)


def _tabled(path: str, rows: int) -> Iterator[Any]:
    yield describe(Path(path), rows)


def _description(file: h5py.File, name: str, data: h5py.Dataset, size: int) -> dict[str, Any]:
    dtype, plist = data.dtype, data.id.get_create_plist()
    plain, kind = dtype.kind in "biufc", plist.get_layout()
    told: dict[str, Any] = {"name": name, "shape": data.shape or (), "dtype": dtype.str if plain else str(dtype), "plain": plain}
    told |= {"item": dtype.itemsize, "kind": "scalar"}
    if not data.shape:
        return told
    try:
        found = layout.hdf5(file, name)
    except layout.UnreadableLayoutError as problem:
        told["why"] = str(problem).removeprefix(f"{file.filename}: ")
        if dtype.hasobject:
            return told | {"kind": "objects"}
        if is_elsewhere(plist):
            return told | {"kind": "elsewhere"}
        if kind == h5py.h5d.CHUNKED and plist.get_nfilters():
            return told | {"kind": "filtered", "chunk": data.chunks, **_chunks(data, plist, size)}
        return told | {"kind": "userblock" if file.userblock_size else "compact"}
    except DataError as problem:
        return told | {"kind": "damaged", "why": str(problem).removeprefix(f"{file.filename}: ")}
    if found.offset is not None or not found.nbytes:
        return told | {"kind": "contiguous", "offset": found.offset or 0}
    if kind != h5py.h5d.CHUNKED:  # contiguous, with no value written
        return told | {"kind": "chunked", "chunk": data.shape, "grid": 1}
    told |= {"kind": "chunked", "chunk": data.chunks, **_chunks(data, plist, size)}
    if data.chunks[1:] == data.shape[1:]:
        width = dtype.itemsize * math.prod(data.shape[1:])
        begins = [offset + i * width for offset in found.offsets.values() for i in range(data.chunks[0])]
        told["on_pages"] = sum(begin % ALIGN == 0 for begin in begins) / max(len(begins), 1)
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
    sizes = list[int]()

    def note(chunk: Any) -> None:
        sizes.append(chunk.size)
        if (end := chunk.byte_offset + chunk.size) > size:
            raise DataError(f"{where}: chunk {chunk.chunk_offset} ends at byte {end:,}, but the file has {size:,}; it is truncated")

    data.id.chunk_iter(note)
    return {"grid": grid, "written": written, "stored": sum(sizes)}


def _values(path: str, name: str, rows: list[int] | None, bounds: list[Any], keys: bool, blank: float | None) -> Iterator[Any]:
    """The tally of a dataset, or of some of its rows; before it, a null for each part that is done."""
    with opened(path) as file:
        data = file[name]
        tally = Tally(data.dtype, data.shape[1:], (bounds[0], bounds[1]), keys, blank)
        for begin, shape in [(0, data.shape)] if rows is None else [(row, (1, *data.shape[1:])) for row in rows]:
            tally.row = begin
            for box in boxes_of(shape, data.dtype.itemsize, data.chunks):
                part = data[(slice(begin + box[0].start, begin + box[0].stop), *box[1:])]
                tally.add(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
                yield None
        yield tally.told()
