"""Readers of documents in text files of any size: each range of a file can be read alone, in bounded memory.

    any text                  the file is a document
    .jsonl .ndjson .json      each line is a document, a JSON object
    .json that begins with [  each object of the array is a document
    .parquet .csv .tsv        each row is a document
    .fasta .fa .faa .a3m      each sequence is a document, without gaps, and in A3M without insertions (lower-case letters)

All but .parquet may be compressed, which their first bytes show: gzip, Zstandard, xz or bzip2. An unusable document is yielded as
``UnusableError`` if the rest of the file can be read; a truncated file raises DataError.
"""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import string
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from data_prep import store
from hpcai.data.layout import parse_errors
from hpcai.errors import DataError
from hpcai.json_file import parse_object
from hpcai.lazy import import_optional

BLOCK = 1 << 20                                 # bytes
MAX_LINE = 1 << 28                              # bytes
TEXT_CHUNK = 1 << 20                            # characters of a text that are read together, at least
TABLE_ROWS = 256                                # rows of .parquet in memory
_ZSTD_BLOCK = 1 << 12                           # compressed bytes, which may decompress to 32,000 times as many
REMEDY = "copy or write it again"
PACKED = (".gz", ".zst", ".xz", ".bz2")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "table", ".csv": "csv", ".tsv": "csv",
         ".fasta": "sequences", ".fa": "sequences", ".faa": "sequences", ".a3m": "aligned"}  # fmt: skip
_VALUE = re.compile(r"[^\s,]")                  # the begin of a value of an array, or its end
WHOLE = ("text", "csv", "array")                # kinds of files that are read by one process
_COMPRESSION = {
    rb"\x1f\x8b": ".gz", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2aM\x18": ".zst", rb"\xfd7zXZ\0": ".xz", rb"BZh\d1AY&SY": ".bz2",
    rb"7z\xbc\xaf": ".7z", rb"Rar!\x1a": ".rar", rb"PK\x03\x04": ".zip", rb"\x04\x22M\x18": ".lz4",
}  # fmt: skip


class UnusableError(DataError):
    """The reason why a document cannot be used."""


@dataclass(frozen=True)
class Piece:
    """A range of a file: the documents that begin in these bytes of its text, or the row groups of a table."""

    path: Path
    name: str                                   # relative to its SOURCE
    begin: int = 0
    end: int = sys.maxsize
    split: str | None = None                    # the split of all its documents, if given
    root: int = 0                               # index of its SOURCE


def file_kind(path: Path) -> str:
    """Return ``text``, ``lines``, ``array``, ``table``, ``csv``, ``sequences`` or ``aligned``."""
    suffix = (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()
    if suffix == ".json" and next(read_blocks(path), b"").removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return "array"
    return KINDS.get(suffix, "text")


def compression(path: Path) -> str:
    """Return the ending of compressed files of the format of a file, by its first bytes or otherwise its name, or "" for none."""
    with path.open("rb") as file:
        head = file.read(16)
    known = next((ending for magic, ending in _COMPRESSION.items() if re.match(magic, head)), "")
    return known or (path.suffix.lower() if path.suffix.lower() in PACKED else "")


def file_size(path: Path) -> tuple[int, int, str]:
    """Return the number of units by which a file can be split (bytes of its text, row groups of a table), the bytes of its text,
    and the SHA-256 of the file. Raises DataError for a truncated or damaged file, if its format shows that."""
    if file_kind(path) == "table":
        with _open_table(path) as table:
            groups = [table.metadata.row_group(n) for n in range(table.metadata.num_row_groups)]
        return len(groups), sum(group.total_byte_size for group in groups), store.digest(path)
    length = path.stat().st_size if not compression(path) else sum(len(block) for block in read_blocks(path))
    return length, length, store.digest(path)


def count_before(piece: Piece) -> int:
    """Return the number of lines of a file (rows of a table) before a piece of it."""
    if not piece.begin:
        return 0
    if file_kind(piece.path) == "table":
        with _open_table(piece.path) as table:
            return sum(table.metadata.row_group(n).num_rows for n in range(piece.begin))
    return sum(at < piece.begin for at, _ in read_lines(piece.path))


def read_documents(piece: Piece, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the documents that begin in a piece, each after its line (row) counted from 1 in the piece: an iterator of chunks of a
    text, the object of a line or row, a sequence, or ``UnusableError``. Only ``columns`` of a table are read."""
    kind = file_kind(piece.path)
    if kind == "text":
        yield 1, read_text(piece.path, piece.begin, piece.end)
    elif kind == "table":
        yield from enumerate(_read_rows(piece, columns), 1)
    elif kind == "lines":
        for number, (at, line) in enumerate(read_lines(piece.path, piece.begin), 1):
            if at >= piece.end:
                return
            if line.strip():
                yield number, _parse_object(line)
    elif kind == "array":
        yield from enumerate(_read_array(piece.path), 1)
    elif kind == "csv":
        yield from _read_csv(piece.path)
    else:
        yield from _read_sequences(piece, kind == "aligned")


# ---- text


def find_cut(path: Path, length: int, tail: int) -> int:
    """Return an offset in a file of ``length`` bytes, from ``tail`` to twice as many before its end: the begin of a paragraph, or
    else of a line, a word or a character. Sequences are not cut: it is the begin of one, or ``length``."""
    size = min(tail, 1 << 16, length - tail)
    begin = length - tail - size
    data = b"".join(islice(read_blocks(path, begin), 2))                # the first may be short
    for pattern in (rb".*\n\n", rb".*\n", rb".*(?= )", rb".*(?=[^\x80-\xbf])") if file_kind(path) == "text" else (rb".*\n(?=>)",):
        if match := re.compile(pattern, re.DOTALL).match(data, 0, size + 1):
            return begin + match.end()
    return length


def read_text(path: Path, begin: int = 0, end: int | None = None) -> Iterator[str]:
    """Yield the bytes ``begin`` to ``end`` of a text in chunks of a million characters or more. A chunk begins with a line without
    leading space, so that no word of a tokenizer is split. Raises UnusableError, with the line, if the text is not UTF-8."""
    buffered, length = list[str](), 0
    for at, line in read_lines(path, begin, inside=True):
        if end is not None and at >= end:
            break
        try:
            text = (line if end is None else line[: end - at]).decode("utf-8" if at else "utf-8-sig")
            reason = "a NUL byte, expected text; leave the file out" if "\0" in text else ""
        except UnicodeDecodeError as problem:
            reason = f"byte 0x{line[problem.start]:02x} is not UTF-8; convert it (iconv -t UTF-8), or leave it out"
        if reason:
            number = sum(first + len(other) <= at for first, other in read_lines(path)) + 1
            raise UnusableError(f"{path}: line {number}: {reason}")
        if length >= TEXT_CHUNK and not text[:1].isspace():
            yield "".join(buffered)
            buffered, length = [], 0
        buffered.append(text)
        length += len(text)
    if buffered:
        yield "".join(buffered)


# ---- lines and rows


def read_lines(path: Path, begin: int = 0, inside: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes, with the newline, of the lines that begin at byte ``begin`` or later; ``inside``: also the rest of a
    line there. Raises DataError if a line is longer than 256 MiB."""
    skip, buffered, length = begin > 0 and not inside, list[bytes](), 0
    offset = begin - skip                       # a line begins at ``begin`` if the byte before is a newline
    for block in read_blocks(path, offset):
        first, *others = block.split(b"\n")
        buffered.append(first)
        length += len(first)
        if length > MAX_LINE:
            raise DataError(f"{path}: the line from byte {offset:,} on is longer than {MAX_LINE >> 20} MiB; is it text?")
        for other in others:
            if not skip:
                yield offset, b"".join(buffered) + b"\n"
            offset, skip, buffered, length = offset + length + 1, False, [other], len(other)
    if length and not skip:
        yield offset, b"".join(buffered)


def _parse_object(line: bytes) -> Mapping[str, Any] | UnusableError:
    try:
        return parse_object(line.decode("utf-8-sig"), "the line", "an object in one line, as {'text': '.'}", DataError)
    except UnicodeDecodeError as problem:
        return UnusableError(f"byte 0x{line[problem.start]:02x} is not UTF-8")
    except DataError as problem:
        return UnusableError(str(problem).removeprefix("the line: "))


def _read_array(path: Path) -> Iterator[Mapping[str, Any] | UnusableError]:
    """Yield the objects of a JSON array. Raises DataError if it is not complete."""
    blocks, decoder, scan = read_blocks(path), codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    number = 0
    try:
        text = decoder.decode(next(blocks))
        at = text.index("[") + 1
        while True:
            value_begin = _VALUE.search(text, at)
            at = value_begin.start() if value_begin else len(text)
            if text.startswith("]", at):
                return
            try:
                value, at = scan(text, at)
            except ValueError:  # incomplete: at least twice as much is read, so that each byte is parsed a few times
                size = len(text) - at
                text, at = text[at:], 0
                while len(text) < min(2 * size + 1, MAX_LINE) and (block := next(blocks, b"")):
                    text += decoder.decode(block)
                if len(text) == size:
                    raise
                continue
            number += 1
            yield value if isinstance(value, dict) else UnusableError(f"a JSON {type(value).__name__}, expected an object")
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path}: document {number + 1}: not JSON ({problem}), expected an array of objects; {REMEDY}") from None


def _read_csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | UnusableError]]:
    """Yield the rows of a table, whose first line names the columns, each after the number of its last line."""
    csv.field_size_limit(MAX_LINE)
    lines = (line.decode("utf-8-sig" if at == 0 else "utf-8") for at, line in read_lines(path))
    suffixes = [suffix.lower() for suffix in path.suffixes]
    rows = csv.DictReader(lines, delimiter="\t" if ".tsv" in suffixes else ",", strict=True)
    try:
        for row in rows:
            usable = None not in row and None not in row.values()
            yield rows.line_num, row if usable else UnusableError(f"another number of values than the columns {rows.fieldnames}")
    except (csv.Error, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: after line {rows.line_num}: not a table of text ({problem}); {REMEDY}") from None


def _open_table(path: Path) -> Any:
    parquet = import_optional("pyarrow.parquet", "Parquet needs", "llm")
    with parse_errors(path, REMEDY, "not a complete Parquet file"):
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False)


def _read_rows(piece: Piece, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    with _open_table(piece.path) as table, parse_errors(piece.path, REMEDY, "cannot be read"):
        names = table.schema_arrow.names
        for name in columns:
            if name not in names:
                raise DataError(f"{piece.path}: no column '{name}'; it has {', '.join(names)}: name one with --field")
        batches = table.iter_batches(TABLE_ROWS, row_groups=[*range(piece.begin, piece.end)], columns=list(columns))
        for batch in batches:
            yield from batch.to_pylist()


# ---- sequences


def _read_sequences(piece: Piece, aligned: bool) -> Iterator[tuple[int, str | UnusableError]]:
    parts: list[bytes] | None = None
    begin = 0
    for number, (at, line) in enumerate(read_lines(piece.path, piece.begin), 1):
        text = line.strip()
        if at >= piece.end and (parts is None or text.startswith(b">")):
            break
        if text.startswith(b">"):
            if parts is not None:
                yield begin, _clean_sequence(b"".join(parts), aligned)
            parts, begin = [], number
        elif text and parts is not None:
            parts.append(text)
        elif text and not piece.begin and not text.startswith((b"#", b";")):
            yield number, UnusableError(f"{text[:40].decode('utf-8', 'replace')!r} before any line with '>', expected sequences")
    if parts is not None:
        yield begin, _clean_sequence(b"".join(parts), aligned)


_LOWER_CASE = string.ascii_lowercase.encode()


def _clean_sequence(row: bytes, aligned: bool) -> str | UnusableError:
    letters = row.translate(None, b"-. \t" + (_LOWER_CASE if aligned else b"")).upper().removesuffix(b"*")
    if not letters.isalpha():
        odd = letters.translate(None, _LOWER_CASE.upper())
        return UnusableError(f"{chr(odd[0])!r} in a sequence, expected letters" if odd else "no letters")
    return letters.decode("ascii")


# ---- bytes


def read_blocks(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file from offset ``begin``. Raises DataError if the file is truncated or damaged."""
    try:
        with path.open("rb") as file:
            if (kind := compression(path)) == ".zst":
                blocks = _read_zstd(file, path)
            elif kind and kind not in PACKED:
                raise DataError(f"{path}: compressed as {kind}, expected {', '.join(PACKED)} or plain text; unpack it")
            else:
                openers: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
                plain = openers[kind](file) if kind else file
                plain.seek(begin)
                blocks, begin = iter(lambda: plain.read(BLOCK), b""), 0
            for block in blocks:
                if begin < len(block):
                    yield block[begin:]
                begin = max(begin - len(block), 0)
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as problem:
        raise DataError(f"{path}: damaged or truncated ({problem}); {REMEDY}") from problem
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); repair that, or leave it out") from problem


def _read_zstd(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the decompressed frames. The readers of zstandard would accept a truncated last frame."""
    zstandard = import_optional("zstandard", "Zstandard needs", "llm")
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, buffered = None, bytearray()
    while packed := file.read(_ZSTD_BLOCK):
        while packed:
            frame = frame or decompressor.decompressobj()
            try:
                buffered += frame.decompress(packed)
            except zstandard.ZstdError as problem:
                raise DataError(f"{path}: damaged ({problem}); {REMEDY}") from problem
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if len(buffered) >= BLOCK:
            yield bytes(buffered)
            buffered.clear()
    if frame is not None:
        raise DataError(f"{path}: truncated within a frame; {REMEDY}")
    if buffered:
        yield bytes(buffered)
