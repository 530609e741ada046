"""Files of packed rows of tokens: their datasets, and their content from a stream of documents.   R rows, T targets of a row"""

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
load_tokenizer = lru_cache(1)(Tokenizer.load)


def token_dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.size <= 1 << 16 else "uint32"


def token_bytes(tokenizer: Tokenizer, chat: bool) -> Array:
    """Return the UTF-8 bytes of each token in rows. The end of a text subtracts the space with which a tokenizer begins it. The
    messages of a ``chat`` are no texts of their own."""
    lengths = tokenizer.byte_lengths.copy()
    lengths[tokenizer.end_tokens[-1]] -= 0 if chat else max(lengths[tokenizer.encode("a")].sum() - 1, 0)
    return lengths


def shard_path(work: Path, number: int) -> Path:
    """Return the path of the JSON file with the documents of a shard. Their tokens are in a file beside it."""
    return work / f"share_{number:06d}.json"


def to_spans(mask: Array) -> Array:
    """Return begin and end of each run of True.   Shape: mask [N] -> [*, 2]"""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)


def make_fields(sequence: int, tokenizer: Tokenizer, answers: bool) -> store.Fields:
    fields = {
        "tokens": Field(token_dtype(tokenizer), (sequence + 1,), 0, tokenizer.size - 1), "bytes": Field("int32", (), 0),
        "documents": Field("int32", (), 0), "ends": Field("int32", ("documents",), 1, sequence + 1),
    }  # fmt: skip
    answer_fields = {"answers": Field("int32", (), 0), "spans": Field("int32", ("answers", 2), 1, sequence + 1)}
    return {**fields, **answer_fields} if answers else fields


@dataclass(frozen=True, eq=False)
class FilePlan:
    """The D documents of an output file, in order: for each its shard, begin and number of tokens, first and number of answers."""

    work: Path
    shard: Array
    begin: Array
    tokens: Array
    span: Array
    answers: Array
    offset: int                                 # tokens of the first document that are in the file before
    rows: int
    sequence: int


def pack(plan: FilePlan, tokenizer_path: str, answers: bool, chat: bool, path: Path) -> None:
    """Write a file of rows."""
    tokenizer, rows, sequence = load_tokenizer(tokenizer_path), plan.rows, plan.sequence
    dtype, total = token_dtype(tokenizer), plan.rows * plan.sequence + 1
    ends = np.cumsum(plan.tokens) - plan.offset
    flat, mask = np.empty(total, dtype), np.zeros(total, bool)
    order = np.argsort(plan.shard, kind="stable")
    for documents in np.split(order, np.flatnonzero(np.diff(plan.shard[order])) + 1):
        _copy_tokens(flat, mask if answers else None, plan, ends, documents)
    widths = token_bytes(tokenizer, chat)[flat[1:]]
    widths = widths * mask[1:] if answers else widths
    numbers, columns = ends_in_rows(ends, rows, sequence)
    values: dict[str, Array] = {"bytes": widths.reshape(rows, sequence).sum(1).clip(0), "ends": columns,
                                "documents": np.bincount(numbers, minlength=rows)}  # fmt: skip
    if answers:
        spans = [to_spans(row) + 1 for row in mask[1:].reshape(rows, sequence)]
        values |= {"answers": np.array([len(row) for row in spans]), "spans": np.concatenate(spans)}
    lengths = {"documents": len(columns), **({"answers": len(values["spans"])} if answers else {})}
    with store.create_file(path, rows, make_fields(sequence, tokenizer, answers), {"kind": "converted"}, lengths) as file:
        file["tokens"][:, :sequence] = flat[:-1].reshape(rows, sequence)
        file["tokens"][:, sequence] = flat[sequence::sequence]
        for name, array in values.items():
            file[name][...] = array


def _copy_tokens(flat: Array, mask: Array | None, plan: FilePlan, ends: Array, documents: Array) -> None:
    """Copy the tokens of ``documents``, all of one shard, to their positions in ``flat``, and set the mask of answers."""
    path = shard_path(plan.work, int(plan.shard[documents[0]]))
    raw = path.with_suffix(".tokens")
    try:
        spans = np.array([] if mask is None else store.read_json(path)["spans"], np.int64).reshape(-1, 2)
        with raw.open("rb") as file:
            for document in documents:
                end, tokens = int(ends[document]), int(plan.tokens[document])
                first, last = max(end - tokens, 0), min(end, len(flat))
                file.seek((int(plan.begin[document]) + first - (end - tokens)) * flat.itemsize)
                values = np.fromfile(file, flat.dtype.newbyteorder("<"), last - first)
                if len(values) < last - first:
                    raise OSError("it is truncated")
                flat[first:last] = values
                if mask is not None:
                    span = int(plan.span[document])
                    for begin_answer, end_answer in spans[span : span + int(plan.answers[document])] + (end - tokens):
                        mask[max(begin_answer, 0) : max(end_answer, 0)] = True
    except OSError as problem:
        raise DataError(f"{raw}: cannot be read ({problem}); delete {plan.work} and repeat the command") from problem


def ends_in_rows(ends: Array, rows: int, sequence: int) -> tuple[Array, Array]:
    """Return row and column of each of the exclusive ``ends`` of documents in the stream. An end that is the first token of a row
    is also the last of the row before, and occurs twice.   Shape: [*] each"""
    row, column = (ends - 1) // sequence, (ends - 1) % sequence + 1
    twice = (column == 1) & (row > 0)
    row, column = np.append(row, row[twice] - 1), np.append(column, np.full(int(twice.sum()), sequence + 1))
    inside = (row >= 0) & (row < rows)
    order = np.lexsort((column[inside], row[inside]))
    return row[inside][order], column[inside][order]


def measure(file: h5py.File) -> dict[str, Any]:
    rows, length = file["tokens"].shape
    return {"tokens": rows * (length - 1), "bytes": int(file["bytes"][...].sum(dtype=np.int64)), "ends": file["ends"].shape[0]}


def merge(records: Sequence[store.Record]) -> dict[str, Any]:
    return {name: sum(record["sums"][name] for record in records) for name in ("tokens", "bytes", "ends")}
