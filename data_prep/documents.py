"""Documents of text files of any size, each range of a file on its own, in bounded memory.

    any text                  the file is a document
    .jsonl .ndjson .json      each line is one, an object
    .parquet                  each row is one
    .fasta .fa .faa .a3m      each sequence is one, without gaps, and in A3M without insertions (lower-case letters)

All but .parquet also end with .gz or .zst. What cannot be used is told with its file and line, not raised, where the rest of a
file can still be read; a file that is cut off is an error.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data_prep import store
from data_prep.extras import import_extra
from hpcai.errors import DataError

BLOCK = 1 << 20                                 # bytes
LINE = 1 << 28                                  # bytes of the longest line
PIECE = 1 << 20                                 # characters of a text that are looked at together, at least
BATCH = 256                                     # rows of .parquet in memory
_FEED = 1 << 12                                 # bytes of .zst, which may be 32,000 times as many
AGAIN = "copy or make it again"
PACKED = (".gz", ".zst")
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".parquet": "table", ".fasta": "sequences", ".fa": "sequences",
         ".faa": "sequences", ".a3m": "aligned"}  # fmt: skip


class NotTextError(DataError):
    """A file that is no text; the message names it."""


@dataclass(frozen=True)
class Bad:
    """A document that cannot be used, and why."""

    reason: str


@dataclass(frozen=True)
class Piece:
    """A part of a file: what begins in these bytes of its text, or the row groups of a table."""

    path: Path
    name: str                                   # from its SOURCE
    begin: int
    end: int
    split: str | None = None                    # where all of it goes


def kind(path: Path) -> str:
    """text, lines, table, sequences or aligned."""
    plain = path.with_suffix("") if path.suffix in PACKED else path
    return KINDS.get(plain.suffix.lower(), "text")


def size(path: Path) -> tuple[int, int, str]:
    """What a file can be cut by (bytes of its text, row groups of a table), bytes of its text, SHA-256 of the file. Raises
    DataError for a file that is cut off or damaged, where its format tells."""
    if kind(path) == "table":
        with _table(path) as table:
            groups = [table.metadata.row_group(n) for n in range(table.metadata.num_row_groups)]
        return len(groups), sum(group.total_byte_size for group in groups), store.digest(path)
    many = path.stat().st_size if path.suffix not in PACKED else sum(len(block) for block in stream(path))
    return many, many, store.digest(path)


def before(piece: Piece) -> int:
    """Lines of a file (rows of a table) that begin before a piece of it."""
    if not piece.begin:
        return 0
    if kind(piece.path) == "table":
        with _table(piece.path) as table:
            return sum(table.metadata.row_group(n).num_rows for n in range(piece.begin))
    return sum(at < piece.begin for at, _ in lines(piece.path))


def read(piece: Piece, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The documents that begin in a piece, each with its line (row), of which the first of the piece is 1: an iterator of parts of
    a text; the object of a line or row; a sequence; or what is Bad. ``columns`` are those of a table that are needed."""
    what = kind(piece.path)
    if what == "text":
        yield 1, texts(piece.path)
    elif what == "table":
        yield from enumerate(_rows(piece, columns), 1)
    elif what == "lines":
        for number, (at, line) in enumerate(lines(piece.path, piece.begin), 1):
            if at >= piece.end:
                return
            if line.strip():
                yield number, _object(line)
    else:
        yield from _sequences(piece, what == "aligned")


# ---- text


def texts(path: Path) -> Iterator[str]:
    """A text in parts of a million characters or more, cut where a line begins with no space, so that the words of a tokenizer stay
    whole. Raises NotTextError, with the line, for what is not UTF-8."""
    held, many = list[str](), 0
    for number, (_, line) in enumerate(lines(path), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as problem:
            found = f"byte 0x{line[problem.start]:02x} is not UTF-8; convert it (iconv -t UTF-8), or leave it out"
            raise NotTextError(f"{path}: line {number}: {found}") from None
        if "\0" in text:
            raise NotTextError(f"{path}: line {number}: a NUL byte, expected text; leave the file out")
        if many >= PIECE and not text[:1].isspace():
            yield "".join(held)
            held, many = [], 0
        held.append(text)
        many += len(text)
    if held:
        yield "".join(held)


# ---- lines and rows


def lines(path: Path, begin: int = 0) -> Iterator[tuple[int, bytes]]:
    """Place and bytes, with their ends, of the lines that begin at byte ``begin`` or later. Raises DataError for a line above
    256 MiB."""
    at = max(begin - 1, 0)                      # a line may begin just at ``begin``: the byte before tells
    skip, held, many = begin > 0, list[bytes](), 0
    for block in stream(path, at):
        first, *others = block.split(b"\n")
        held.append(first)
        many += len(first)
        if many > LINE:
            raise DataError(f"{path}: the line from byte {at:,} on is longer than {LINE >> 20} MiB; is it text?")
        for other in others:
            if not skip:
                yield at, b"".join(held) + b"\n"
            at, skip, held, many = at + many + 1, False, [other], len(other)
    if many and not skip:
        yield at, b"".join(held)


def _object(line: bytes) -> Mapping[str, Any] | Bad:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        return Bad(f"byte 0x{line[problem.start]:02x} is not UTF-8")
    except (ValueError, RecursionError) as problem:
        return Bad(f"not JSON ({problem}), expected an object in one line")
    return found if isinstance(found, dict) else Bad(f"a JSON {type(found).__name__}, expected an object such as {{'text': '.'}}")


def _table(path: Path) -> Any:
    parquet = import_extra("pyarrow.parquet", "Parquet", "llm")
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
    except Exception as problem:                # Arrow's errors, OSError, and for some damage others
        raise DataError(f"{path}: not a whole Parquet file ({str(problem)[:200]}); {AGAIN}") from problem


def _rows(piece: Piece, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    with _table(piece.path) as table:
        has = table.schema_arrow.names
        for name in columns:
            if name not in has:
                raise DataError(f"{piece.path}: no column '{name}'; it has {', '.join(has)}: name one with --field")
        batches = table.iter_batches(BATCH, row_groups=[*range(piece.begin, piece.end)], columns=list(columns))
        try:
            for batch in batches:
                yield from batch.to_pylist()
        except Exception as problem:            # Arrow's errors, OSError, and for some damage others
            raise DataError(f"{piece.path}: cannot be read ({str(problem)[:200]}); {AGAIN}") from problem


# ---- sequences


def _sequences(piece: Piece, aligned: bool) -> Iterator[tuple[int, str | Bad]]:
    parts: list[bytes] | None = None
    begin = 0
    for number, (at, line) in enumerate(lines(piece.path, piece.begin), 1):
        text = line.strip()
        if at >= piece.end and (parts is None or text.startswith(b">")):
            break
        if text.startswith(b">"):
            if parts is not None:
                yield begin, _letters(b"".join(parts), aligned)
            parts, begin = [], number
        elif text and parts is not None:
            parts.append(text)
        elif text and not piece.begin and not text.startswith((b"#", b";")):
            yield number, Bad(f"{text[:40].decode('utf-8', 'replace')!r} before any line with '>', expected sequences")
    if parts is not None:
        yield begin, _letters(b"".join(parts), aligned)


_GAPS = b"-."
_SMALL = bytes(range(ord("a"), ord("z") + 1))


def _letters(row: bytes, aligned: bool) -> str | Bad:
    kept = row.translate(None, _GAPS + b" \t" + (_SMALL if aligned else b"")).upper().removesuffix(b"*")
    if not kept.isalpha():
        odd = kept.translate(None, _SMALL.upper())
        return Bad(f"{chr(odd[0])!r} in a sequence, expected letters" if odd else "no letters")
    return kept.decode("ascii")


# ---- bytes


def stream(path: Path, begin: int = 0) -> Iterator[bytes]:
    """The bytes of a file, unpacked, from one of them on. Raises DataError where it is cut off or damaged."""
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                found = _gunzipped(file)
            elif path.suffix == ".zst":
                found = _unzst(file, path)
            else:
                file.seek(begin)
                found, begin = iter(lambda: file.read(BLOCK), b""), 0
            for block in found:
                if begin < len(block):
                    yield block[begin:]
                begin = max(begin - len(block), 0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(f"{path}: damaged or cut off ({problem}); {AGAIN}") from problem
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}); mend that, or leave it out") from problem


def _gunzipped(file: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as unpacked:
        while block := unpacked.read(BLOCK):
            yield block


def _unzst(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Its frames, one after the other. zstandard's own readers take the end of the file for the end of a frame."""
    zstandard = import_extra("zstandard", "Zstandard", "llm")
    made = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, held = None, bytearray()
    while packed := file.read(_FEED):
        while packed:
            frame = frame or made.decompressobj()
            try:
                held += frame.decompress(packed)
            except zstandard.ZstdError as problem:
                raise DataError(f"{path}: damaged ({problem}); {AGAIN}") from problem
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
        if len(held) >= BLOCK:
            yield bytes(held)
            held.clear()
    if frame is not None:
        raise DataError(f"{path}: cut off within a frame; {AGAIN}")
    if held:
        yield bytes(held)
