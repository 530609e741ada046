"""A copy of an HDF5 file with its datasets in one piece and aligned, compared with its source before it counts."""

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import h5py
import numpy as np

from hpcai.errors import DataError

BOX = 64 << 20


def opened(path: str) -> h5py.File:
    return h5py.File(path, "r", locking=False, rdcc_nbytes=BOX)


def is_elsewhere(plist: Any) -> bool:
    """Whether a dataset that was created with these properties has its values in other files."""
    kind = plist.get_layout()
    return bool(kind == h5py.h5d.VIRTUAL or (kind == h5py.h5d.CONTIGUOUS and plist.get_external_count()))


def boxes_of(shape: Sequence[int], item: int, chunks: Sequence[int] | None, limit: int = BOX) -> Iterator[tuple[slice, ...]]:
    """Boxes of at most ``limit`` bytes that cover an array in row-major order, whole chunks along their first dim at best."""
    if not shape:
        yield ()
        return
    inner = item * math.prod(shape[1:])
    if inner > limit:
        for i in range(shape[0]):
            for rest in boxes_of(shape[1:], item, chunks[1:] if chunks else None, limit):
                yield (slice(i, i + 1), *rest)
        return
    count = max(limit // max(inner, 1), 1)
    if chunks and count > chunks[0]:
        count -= count % chunks[0]
    for i in range(0, shape[0], count):
        yield (slice(i, min(i + count, shape[0])),)


def copied(source: str, target: str) -> Iterator[int]:
    """Writes ``target`` with all that ``source`` holds, then reads both and compares them; yields how many bytes are done.

    Raises DataError for what would not be the same in another file (references, values in other files, objects and types with
    more than one name, text within other values), and for a copy that differs.
    """
    with opened(source) as old:
        tracked = bool(old["/"].id.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED)
        place = {"alignment_threshold": 1 << 16, "alignment_interval": 4096}
        with h5py.File(target, "w", locking=False, track_order=tracked, **place) as new:
            yield from _copy_group(old["/"], new["/"])
        with opened(target) as new:
            yield from _compared(old["/"], new["/"])


def _compared(old: h5py.Group, new: h5py.Group) -> Iterator[int]:
    for before, after in zip_longest(_content(old, old), _content(new, old)):
        if before != after:
            raise DataError(f"{(before or after)[0]} in the copy differs from that of the source; the disk or the memory fails")
        yield len(before[1]) if isinstance(before[1], bytes) else 0


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
            made = h5py.Group(h5py.h5g.create(new.id, None, gcpl=item.id.get_create_plist()))
            new[name] = made
            yield from _copy_group(item, made)
        else:
            yield from _copy_dataset(item, new, name)
        yield 0


def _copy_dataset(old: h5py.Dataset, group: h5py.Group, name: str) -> Iterator[int]:
    kind, plist = _movable(old.id.get_type(), old.name), old.id.get_create_plist().copy()
    if is_elsewhere(plist):
        raise DataError(f"dataset '{old.name}' lies in other files, which are left alone")
    if not _flat(kind):  # texts and lists are nowhere that they could be read directly
        h5py.h5o.copy(old.id, b".", group.id, name.encode(errors="surrogateescape"))
        return
    for i in reversed(range(plist.get_nfilters())):
        plist.remove_filter(plist.get_filter(i)[0])
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    space = h5py.h5s.create_simple(old.shape) if old.shape else old.id.get_space()  # a dataset in one piece does not grow
    new = h5py.Dataset(h5py.h5d.create(group.id, None, kind, space, plist))
    group[name] = new
    _copy_attributes(old, new)
    for box in boxes_of(old.shape, kind.get_size(), old.chunks) if old.shape is not None else ():
        here, there, part = _place(old, box, kind)
        old.id.read(here, there, part, kind)
        new.id.write(here, there, part, kind)
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
    return not (kind.detect_class(h5py.h5t.VLEN) or _texts(kind))


def _texts(kind: Any) -> bool:
    if kind.get_class() == h5py.h5t.STRING:
        return bool(kind.is_variable_str())
    if kind.get_class() == h5py.h5t.COMPOUND:
        return any(_texts(kind.get_member_type(i)) for i in range(kind.get_nmembers()))
    return kind.get_class() == h5py.h5t.ARRAY and _texts(kind.get_super())


def _place(data: h5py.Dataset, box: tuple[slice, ...], kind: Any) -> tuple[Any, Any, np.ndarray]:
    """Where a box lies in memory and in the dataset, and room for its bits."""
    if not data.shape:
        return h5py.h5s.ALL, h5py.h5s.ALL, np.empty((), f"V{kind.get_size()}")
    box = (*box, *(slice(0, n) for n in data.shape[len(box) :]))
    counts = tuple(s.stop - s.start for s in box)
    there = data.id.get_space()
    there.select_hyperslab(tuple(s.start for s in box), counts)
    return h5py.h5s.create_simple(counts), there, np.empty(counts, f"V{kind.get_size()}")


def _attributes(item: Any) -> Iterator[tuple[Any, np.ndarray | None]]:
    """Each attribute with its value, as bits where it is flat."""
    tracked = item.id.get_create_plist().get_attr_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
    order = h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME
    for i in range(h5py.h5a.get_num_attrs(item.id)):
        attribute = h5py.h5a.open(item.id, index=i, index_type=order)
        kind, space = attribute.get_type(), attribute.get_space()
        part = None
        if space.get_simple_extent_type() != h5py.h5s.NULL:
            part = np.empty(space.shape, f"V{kind.get_size()}" if _flat(kind) else attribute.dtype)
            attribute.read(part, mtype=kind if _flat(kind) else None)
        yield attribute, part


def _copy_attributes(old: Any, new: Any) -> None:
    for attribute, part in _attributes(old):
        kind = _movable(attribute.get_type(), f"{old.name}@{attribute.name.decode(errors='replace')}")
        made = h5py.h5a.create(new.id, attribute.name, kind, attribute.get_space())
        if part is not None:
            made.write(part, mtype=kind if _flat(kind) else None)


def _content(item: Any, like: Any) -> Iterator[tuple[str, Any]]:
    """All that an object holds, but for the place of its values: a name and something to compare. Datasets are read in the boxes
    of those of ``like``."""
    for attribute, part in _attributes(item):
        key = attribute.name.decode(errors="replace")
        yield f"attribute '{key}' of '{item.name}'", (key, attribute.get_type(), _bits(part))
    if isinstance(item, h5py.Dataset):
        kind = item.id.get_type()
        yield f"type or shape of '{item.name}'", (kind, item.shape)
        for box in boxes_of(like.shape, kind.get_size(), like.chunks) if item.shape is not None else ():
            here, there, part = _place(item, box, kind)
            if _flat(kind):
                item.id.read(here, there, part, kind)
            else:
                part = np.asarray(item[box], object)
            yield f"values of '{item.name}'", _bits(part)
        return
    for name in item:
        link = item.get(name, getlink=True)
        where = type(link), getattr(link, "filename", None), getattr(link, "path", None)
        yield f"'{name}' in '{item.name}'", (name, *where)
        if isinstance(link, h5py.HardLink):
            yield from _content(item[name], like[name])
    yield f"members of '{item.name}'", len(item)


def _bits(part: np.ndarray | None) -> Any:
    if part is None or not part.dtype.hasobject:
        return part if part is None else part.tobytes()
    return [np.asarray(value).tolist() for value in part.reshape(-1)]
