"""The child process, in which the HDF5 library opens files that may be damaged, and writes whole ones anew."""

import hashlib
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

from hpcai.data import layout
from hpcai.data.direct import ALIGN
from hpcai.data.doctor.tally import _BOX, Tally, boxes_of
from hpcai.errors import DataError

_OBJECTS = 100_000
_CHUNKS = 1 << 22
_DEFLATE = 1100  # deflate packs 1032 bytes into one at best
_PLAIN_FILTERS = {1, 2, 3, 4, 5, 6, 32000}  # deflate, shuffle, Fletcher's sum, szip, n-bit, scale-offset, LZF
_ADDRESSES = 8 << 30
_SPARE = 1 << 20


# ---- the child process, in which the HDF5 library opens files


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

    acts: dict[str, Callable[..., Iterator[Any]]] = {f.__name__[1:]: f for f in (_describe, _values, _digests, _rewrite)}
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


def _opened(path: str) -> h5py.File:
    return h5py.File(path, "r", locking=False, rdcc_nbytes=_BOX)


def _describe(path: str) -> Iterator[Any]:
    """Each dataset: its shape, dtype, and where its values lie."""
    with _opened(path) as file:
        size = os.stat(path).st_size
        for name, data in _datasets(file):
            yield _described(file, name, data, size)


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


def _described(file: h5py.File, name: str, data: h5py.Dataset, size: int) -> dict[str, Any]:
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
            return told | {"kind": "filtered"} | _chunks(data, plist, size)
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
    if whole > packing * size + _SPARE or not 0 <= written <= min(_CHUNKS, grid, size):
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
    """The tally of a dataset, or of some of its rows: keys as they come, the rest at the end."""
    with _opened(path) as file:
        data = file[name]
        tally = Tally(data.dtype, data.shape[1:], (bounds[0], bounds[1]), keys, blank)
        for first, count, part, last in _row_parts(data, rows):
            if count:
                tally.rows(first, part)
            else:
                tally.piece(first, part, last)
            yield {"bytes": part.nbytes, "keys": tally.keys.tobytes().hex() if tally.keys else ""}
            if tally.keys is not None:
                del tally.keys[:]
        yield {"bytes": 0, "keys": "", "tally": tally.told()}


def _row_parts(data: h5py.Dataset, rows: list[int] | None) -> Iterator[tuple[int, int, np.ndarray, bool]]:
    """(row, 0, piece of it, whether it ends) or (first, number of whole rows, them, True).   bytes [n] uint8"""
    width, seen = data.dtype.itemsize * math.prod(data.shape[1:]), 0
    each = [(0, data.shape)] if rows is None else [(row, (1, *data.shape[1:])) for row in rows]
    for begin, shape in each:
        for box in boxes_of(shape, data.dtype.itemsize, data.chunks):
            first = begin + box[0].start
            part = data[(slice(first, begin + box[0].stop), *box[1:])]
            part = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            if len(box) == 1:
                yield first, box[0].stop - box[0].start, part, True
            else:
                seen += part.nbytes
                yield first, 0, part, seen == width
                seen %= width


def _digests(path: str, name: str, rows: list[int]) -> Iterator[Any]:
    with _opened(path) as file:
        digest = hashlib.blake2b(digest_size=16)
        for _, _, part, last in _row_parts(file[name], rows):
            digest.update(part.data)
            yield digest.hexdigest() if last else None
            if last:
                digest = hashlib.blake2b(digest_size=16)


# ---- a copy of an HDF5 file, contiguous and aligned, made in a child process


def _rewrite(source: str, target: str) -> Iterator[Any]:
    """Writes ``target`` with all that ``source`` holds, each dataset in one piece, then reads both and compares them."""
    with _opened(source) as old:
        tracked = bool(old["/"].id.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED)
        place = {"alignment_threshold": 1 << 16, "alignment_interval": 4096}
        with h5py.File(target, "w", locking=False, track_order=tracked, **place) as new:
            yield from _copy_group(old["/"], new["/"], {h5py.h5o.get_info(old["/"].id).addr: "/"})
        with h5py.File(target, "r", locking=False) as new:
            yield from _compare(old["/"], new["/"], set())


def _copy_group(old: h5py.Group, new: h5py.Group, places: dict[int, str]) -> Iterator[int]:
    _copy_attributes(old, new)
    for name in old:
        link = old.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            new[name] = link
            continue
        item = old[name]
        address = h5py.h5o.get_info(item.id).addr
        if address in places:
            new[name] = new.file[places[address]]
            continue
        places[address] = item.name
        if isinstance(item, h5py.Group):
            made = h5py.Group(h5py.h5g.create(new.id, None, gcpl=item.id.get_create_plist()))
            new[name] = made
            yield from _copy_group(item, made, places)
        elif isinstance(item, h5py.Dataset):
            yield from _copy_dataset(item, new, name)
        else:
            made = item.id.copy()
            made.commit(new.id, name.encode(errors="surrogateescape"))
            _copy_attributes(item, new[name])
        yield 0


def _copy_dataset(old: h5py.Dataset, group: h5py.Group, name: str) -> Iterator[int]:
    kind, plist = _movable(old.id.get_type(), old.name), old.id.get_create_plist().copy()
    kind_of = plist.get_layout()
    if kind_of == h5py.h5d.VIRTUAL or (kind_of == h5py.h5d.CONTIGUOUS and plist.get_external_count()):
        raise DataError(f"dataset '{old.name}' lies in other files, which are left alone")
    for i in reversed(range(plist.get_nfilters())):
        plist.remove_filter(plist.get_filter(i)[0])
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    space = old.id.get_space()
    if old.shape is not None and old.shape:
        space = h5py.h5s.create_simple(old.shape)  # a dataset in one piece does not grow
    new = h5py.Dataset(h5py.h5d.create(group.id, None, kind, space, plist))
    group[name] = new
    _copy_attributes(old, new)
    for box in boxes_of(old.shape or (), kind.get_size(), old.chunks) if old.shape is not None else ():
        part = _bits(old, box)
        _write_bits(new, box, part)
        yield part.nbytes


def _movable(kind: Any, where: str) -> Any:
    """A type for the new file. Raises DataError for those whose values are addresses in the old one."""
    if kind.detect_class(h5py.h5t.REFERENCE):
        raise DataError(f"'{where}' holds references, which would point to nothing in a new file")
    if not _flat(kind) and kind.get_class() not in (h5py.h5t.STRING, h5py.h5t.VLEN):
        raise DataError(f"'{where}' holds text or lists of varying length within other values, which are not rewritten")
    return kind.copy() if kind.committed() else kind


def _flat(kind: Any) -> bool:
    """Whether values lie in memory as they lie in the file, so that bits are copied and nothing is converted."""
    if kind.get_class() == h5py.h5t.STRING:
        return not kind.is_variable_str()
    if kind.get_class() == h5py.h5t.COMPOUND:
        return all(_flat(kind.get_member_type(i)) for i in range(kind.get_nmembers()))
    if kind.get_class() == h5py.h5t.ARRAY:
        return _flat(kind.get_super())
    return kind.get_class() != h5py.h5t.VLEN


def _spaces(data: h5py.Dataset, box: tuple[slice, ...]) -> tuple[Any, Any, tuple[int, ...]]:
    if not data.shape:
        return h5py.h5s.ALL, h5py.h5s.ALL, ()
    box = (*box, *(slice(0, n) for n in data.shape[len(box) :]))
    counts = tuple(s.stop - s.start for s in box)
    there = data.id.get_space()
    there.select_hyperslab(tuple(s.start for s in box), counts)
    return h5py.h5s.create_simple(counts), there, counts


def _bits(data: h5py.Dataset, box: tuple[slice, ...]) -> np.ndarray:
    kind = data.id.get_type()
    here, there, counts = _spaces(data, box)
    if not _flat(kind):
        return np.asarray(data[box] if data.shape else data[()], dtype=object)
    part = np.empty(counts, f"V{kind.get_size()}")
    data.id.read(here, there, part, kind)
    return part


def _write_bits(data: h5py.Dataset, box: tuple[slice, ...], part: np.ndarray) -> None:
    if not _flat(data.id.get_type()):
        data[box if data.shape else ()] = part if data.shape else part.item()
        return
    here, there, _ = _spaces(data, box)
    data.id.write(here, there, part, data.id.get_type())


def _attributes(item: Any) -> Iterator[Any]:
    order = h5py.h5.INDEX_NAME
    if not isinstance(item, h5py.Datatype):
        plist = item.id.get_create_plist()
        if plist.get_attr_creation_order() & h5py.h5p.CRT_ORDER_TRACKED:
            order = h5py.h5.INDEX_CRT_ORDER
    for i in range(h5py.h5a.get_num_attrs(item.id)):
        yield h5py.h5a.open(item.id, index=i, index_type=order)


def _attribute_bits(attribute: Any) -> np.ndarray | None:
    kind, space = attribute.get_type(), attribute.get_space()
    if space.get_simple_extent_type() == h5py.h5s.NULL:
        return None
    if _flat(kind):
        part = np.empty(space.shape, f"V{kind.get_size()}")
        attribute.read(part, mtype=kind)
        return part
    part = np.empty(space.shape, attribute.dtype)
    attribute.read(part)
    return part


def _copy_attributes(old: Any, new: Any) -> None:
    for attribute in _attributes(old):
        kind = _movable(attribute.get_type(), f"{old.name}@{attribute.name.decode(errors='replace')}")
        made = h5py.h5a.create(new.id, attribute.name, kind, attribute.get_space())
        part = _attribute_bits(attribute)
        if part is not None and _flat(kind):
            made.write(part, mtype=kind)
        elif part is not None:
            made.write(part)


def _compare(old: Any, new: Any, seen: set[int]) -> Iterator[int]:
    """Raises DataError where two objects differ in anything but the place of their values."""
    where = f"'{old.name}' of the copy"
    address = h5py.h5o.get_info(old.id).addr
    if address in seen:
        return
    seen.add(address)
    before, after = ({a.name: a for a in _attributes(item)} for item in (old, new))
    if before.keys() != after.keys() or type(old) is not type(new):
        raise DataError(f"{where}: other attributes than those of the source; tell the developers")
    for key, attribute in before.items():
        other = after[key]
        if attribute.get_type() != other.get_type() or not _equal(_attribute_bits(attribute), _attribute_bits(other)):
            raise DataError(f"{where}: attribute {key!r} differs from that of the source; tell the developers")
    if isinstance(old, h5py.Dataset):
        if old.shape != new.shape or old.id.get_type() != new.id.get_type():
            raise DataError(f"{where}: another shape or type than that of the source; tell the developers")
        for box in boxes_of(old.shape or (), old.id.get_type().get_size(), old.chunks) if old.shape is not None else ():
            part = _bits(old, box)
            if not _equal(part, _bits(new, box)):
                raise DataError(f"{where}: other values than those of the source; the disk or the memory fails")
            yield part.nbytes
    elif isinstance(old, h5py.Group):
        if list(old) != list(new):
            raise DataError(f"{where}: other members than those of the source; tell the developers")
        for name in old:
            link, other = old.get(name, getlink=True), new.get(name, getlink=True)
            if type(link) is not type(other) or _target(link) != _target(other):
                raise DataError(f"{where}: link '{name}' differs from that of the source; tell the developers")
            if isinstance(link, h5py.HardLink):
                yield from _compare(old[name], new[name], seen)


def _target(link: Any) -> tuple[str | None, str | None]:
    return getattr(link, "filename", None), getattr(link, "path", None)


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    if one.dtype.hasobject:
        return all(np.array_equal(a, b) for a, b in zip(one.reshape(-1), other.reshape(-1)))
    return one.tobytes() == other.tobytes()
