"""A copy of an HDF5 file with its datasets in one piece and aligned, compared with its source before it counts."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.durable import flush
from hpcai.errors import DataError

_ALIGNED = {"alignment_threshold": 1 << 16, "alignment_interval": 4096}
_BOX = 64 << 20  # bytes that are copied at once, or one row


def copy(source: Path, target: Path, sha256: str | None) -> Iterator[Any]:
    """Write ``target`` with all that ``source`` holds, compare the values of both, and yield bytes and SHA-256 of the target.

    Raises DataError for a source with another SHA-256, for what would not be the same in another file (references, values in other
    files, objects with more than one name), and for a copy that differs.
    """
    if sha256 is not None:
        digest = hashlib.file_digest(source.open("rb"), "sha256").hexdigest()
        if digest != sha256.lower():
            raise DataError("its SHA-256 is not that of the index; copy it from its source")
    with h5py.File(source, "r", locking=False, rdcc_nbytes=_BOX) as old:
        if old.userblock_size:
            raise DataError("it begins with a user block, which a copy would not have")
        with h5py.File(target, "w", locking=False, track_order=_tracks(old["/"]), **_ALIGNED) as new:
            yield from _copy_group(old["/"], new["/"])
        with h5py.File(target, "r", locking=False) as new:
            yield from _compare(old, new)
    flush(target)
    yield {"bytes": target.stat().st_size, "sha256": hashlib.file_digest(target.open("rb"), "sha256").hexdigest()}


def _copy_group(old: h5py.Group, new: h5py.Group) -> Iterator[int]:
    _copy_attributes(old, new)
    for name in old:
        link = old.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            new[name] = link
            continue
        item = old[name]
        if isinstance(item, h5py.Datatype) or h5py.h5o.get_info(item.id).rc > 1:
            raise DataError(f"'{item.name}' is a type with a name or has a second name, which is not rewritten")
        if isinstance(item, h5py.Group):
            yield from _copy_group(item, new.create_group(name, track_order=_tracks(item)))
        elif item.dtype.hasobject or item.shape is None:
            if item.id.get_type().detect_class(h5py.h5t.REFERENCE):
                raise DataError(f"'{item.name}' holds references, which would point to nothing in a new file")
            old.copy(item, new, name)  # texts and lists are nowhere that they could be read directly
        else:
            yield from _copy_dataset(item, new, name)


def _tracks(group: h5py.Group) -> bool:
    return bool(group.id.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED)


def _copy_dataset(old: h5py.Dataset, group: h5py.Group, name: str) -> Iterator[int]:
    kind, plist = old.id.get_type(), old.id.get_create_plist().copy()
    if old.is_virtual or old.external:
        raise DataError(f"dataset '{old.name}' lies in other files, which are left alone")
    for i in reversed(range(plist.get_nfilters())):
        plist.remove_filter(plist.get_filter(i)[0])
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    space = h5py.h5s.create_simple(old.shape) if old.shape else old.id.get_space()  # a dataset in one piece does not grow
    new = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space, plist))
    _copy_attributes(old, new)
    for box in _boxes(old):
        values = old[box]
        new[box] = values
        yield 0


def _copy_attributes(old: Any, new: Any) -> None:
    for name in old.attrs:
        attribute = old.attrs.get_id(name)
        kind = attribute.get_type()
        if kind.detect_class(h5py.h5t.REFERENCE):
            raise DataError(f"'{old.name}@{name}' holds references, which would point to nothing in a new file")
        made = h5py.h5a.create(new.id, name.encode(), kind, attribute.get_space())
        if attribute.get_space().get_simple_extent_type() != h5py.h5s.NULL:
            value = np.empty(attribute.shape, attribute.dtype)
            attribute.read(value)
            made.write(value)


def _boxes(data: h5py.Dataset) -> Iterator[Any]:
    if not data.shape:
        yield ()
        return
    width = data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))
    step = max(_BOX // max(width, 1), 1)
    yield from (slice(begin, begin + step) for begin in range(0, data.shape[0], step))


def _compare(old: h5py.File, new: h5py.File) -> Iterator[int]:
    """Attributes are as many, and values of datasets the same bits."""
    names: list[str] = []
    old.visit(names.append)
    for name in names:
        one, other = old[name], new.get(name)
        if other is None or list(one.attrs) != list(other.attrs) or getattr(one, "shape", 0) != getattr(other, "shape", 0):
            raise DataError(f"'{name}' in the copy differs from that of the source; the disk or the memory fails")
        for box in _boxes(one) if isinstance(one, h5py.Dataset) and not one.dtype.hasobject and one.shape is not None else ():
            if np.asarray(one[box]).tobytes() != np.asarray(other[box]).tobytes():
                raise DataError(f"values of '{name}' in the copy differ from those of the source; the disk or the memory fails")
            yield 0
