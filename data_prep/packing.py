"""Rows of tokens: what a file of them holds, and how it is cut from a stream of documents.   R rows, T targets of a row"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import store
from data_prep.store import Field
from hpcai.errors import DataError
from hpcai.models.llm.tokenizer import Tokenizer

Array = NDArray[Any]
loaded = lru_cache(1)(Tokenizer.load)


def type_of(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.size <= 1 << 16 else "uint32"


def share_path(work: Path, number: int) -> Path:
    """The JSON file about the documents of a share; their tokens are beside it."""
    return work / f"share_{number:06d}.json"


def spans_of(mask: Array) -> Array:
    """Begin and end of each run of True.   [N] to [*, 2]"""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)


def fields(sequence: int, tokenizer: Tokenizer, answers: bool) -> store.Fields:
    found = {
        "tokens": Field(type_of(tokenizer), (sequence + 1,), 0, tokenizer.size - 1), "bytes": Field("int32", (), 0),
        "documents": Field("int32", (), 0), "ends": Field("int32", ("documents",), 1, sequence + 1),
    }  # fmt: skip
    told = {"answers": Field("int32", (), 0), "spans": Field("int32", ("answers", 2), 1, sequence + 1)}
    return {**found, **told} if answers else found


@dataclass(frozen=True, eq=False)
class Stretch:
    """The documents of a file of ours, in their order: share, place and number of tokens, place and number of answers.   [D]"""

    work: Path
    share: Array
    begin: Array
    tokens: Array
    span: Array
    answers: Array
    before: int                                 # tokens of the first that belong to the file before
    rows: int
    sequence: int


def pack(stretch: Stretch, tokenizer: str, answers: bool, path: Path) -> None:
    """A file of rows."""
    made, rows, sequence = loaded(tokenizer), stretch.rows, stretch.sequence
    kind, total = type_of(made), stretch.rows * stretch.sequence + 1
    ends = np.cumsum(stretch.tokens) - stretch.before
    flat, mask = np.empty(total, kind), np.zeros(total, bool)
    order = np.argsort(stretch.share, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(stretch.share[order])) + 1):
        _fill(flat, mask if answers else None, stretch, ends, some)
    widths = made.byte_lengths[flat[1:]]
    widths = widths * mask[1:] if answers else widths
    numbers, where = ends_in_rows(ends, rows, sequence)
    values: dict[str, Array] = {"bytes": widths.reshape(rows, sequence).sum(1), "ends": where,
                                "documents": np.bincount(numbers, minlength=rows)}  # fmt: skip
    if answers:
        found = [spans_of(row) + 1 for row in mask[1:].reshape(rows, sequence)]
        values |= {"answers": np.array([len(one) for one in found]), "spans": np.concatenate(found)}
    lengths = {"documents": len(where), **({"answers": len(values["spans"])} if answers else {})}
    with store.rows_file(path, rows, fields(sequence, made, answers), {"kind": "converted"}, lengths) as file:
        file["tokens"][:, :sequence] = flat[:-1].reshape(rows, sequence)
        file["tokens"][:, sequence] = flat[sequence::sequence]
        for name, array in values.items():
            file[name][...] = array


def _fill(flat: Array, mask: Array | None, stretch: Stretch, ends: Array, some: Array) -> None:
    """The documents ``some``, all of one share, at their places."""
    path = share_path(stretch.work, int(stretch.share[some[0]]))
    raw = path.with_suffix(".tokens")
    try:
        spans = np.array([] if mask is None else store.read_json(path)["spans"], np.int64).reshape(-1, 2)
        with raw.open("rb") as file:
            for document in some:
                end, tokens = int(ends[document]), int(stretch.tokens[document])
                first, last = max(end - tokens, 0), min(end, len(flat))
                file.seek((int(stretch.begin[document]) + first - (end - tokens)) * flat.itemsize)
                found = np.fromfile(file, flat.dtype.newbyteorder("<"), last - first)
                if len(found) < last - first:
                    raise OSError("it is cut off")
                flat[first:last] = found
                if mask is not None:
                    span = int(stretch.span[document])
                    for one, other in spans[span : span + int(stretch.answers[document])] + (end - tokens):
                        mask[max(one, 0) : max(other, 0)] = True
    except OSError as problem:
        raise DataError(f"{raw}: cannot be read ({problem}); delete {stretch.work} and repeat the command") from problem


def ends_in_rows(ends: Array, rows: int, sequence: int) -> tuple[Array, Array]:
    """Row of each end within it, and where: ``ends`` are exclusive, of the stream. An end that is the first token of a row is also
    the last of the row before.   [*] each"""
    row, where = (ends - 1) // sequence, (ends - 1) % sequence + 1
    twice = (where == 1) & (row > 0)
    row, where = np.append(row, row[twice] - 1), np.append(where, np.full(int(twice.sum()), sequence + 1))
    kept = (row >= 0) & (row < rows)
    order = np.lexsort((where[kept], row[kept]))
    return row[kept][order], where[kept][order]


def measure(file: h5py.File) -> dict[str, Any]:
    rows, length = file["tokens"].shape
    return {"tokens": rows * (length - 1), "bytes": int(file["bytes"][...].sum(dtype=np.int64)), "ends": file["ends"].shape[0]}


def merge(records: Sequence[store.Record]) -> dict[str, Any]:
    return {name: sum(record["sums"][name] for record in records) for name in ("tokens", "bytes", "ends")}
