"""Read sequence alignments and template hits from the files of search tools, as arrays.

    *.a3m, *.a3m.gz     one row after each ">" line; a lower-case letter is an insertion: it has no column and counts as a deletion
                        of the next column; rows such as ss_pred are skipped; NUL bytes separate alignments (MMseqs2, ColabFold)
    *.sto, *.sto.gz     Stockholm: rows in blocks, ended by "//"; columns with a gap in the query are insertions
    *.hhr, *.hhr.gz     HHsearch: pairwise alignments of the query and templates

The first row is the query, without gaps and insertions. Time and memory are linear in the size of the file: 6 to 20 bytes for each
letter, up to 50 if rows have only a few. Files are decompressed if they begin with gzip's bytes, whatever their names.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.arrays import warn
from hpcai.errors import DataError
from hpcai.gzip_file import read_decompressed
from hpcai.models.openfold.residues import GAP, RESTYPES, UNKNOWN

_ADVICE = "make it again, or leave it out"
_ANNOTATIONS = (b"ss_dssp", b"sa_dssp", b"ss_pred", b"ss_conf", b"Consensus")       # rows of HH-suite that are no sequences
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMATS = (
    (rb"\s*<(?:!doctype )?html", "an HTML page"), (rb"\s*[\[{]", "JSON"), (rb"\s*>", "FASTA or A3M"), (rb"Query", "HHsearch"),
    (rb"# STOCKHOLM", "Stockholm"), (rb"(?:\s|#[^\n]*\n)*data_", "mmCIF"), (rb".{257}ustar", "a tar archive"),
    (rb"\x1f\x8b|PK\x03\x04|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ", "a compressed file"), (rb"\xff\xfe|\xfe\xff", "UTF-16 text"),
)  # fmt: skip
_COMPLEX_FILES = ("uniprot_hits", "pairing", "hmm_output", "pdb_hits")      # rows that pair chains, and templates
_DATABASE_ORDER = ("uniref90", "mgnify", "bfd", "small_bfd")

_INSERTIONS = b"abcdefghijklmnopqrstuvwxyz"
_ALLOWED = _INSERTIONS + _INSERTIONS.upper() + b"-."
_INVALID = -1
_CODES = np.full(256, _INVALID, np.int8)
for _letter, _code in [*zip(RESTYPES, range(20)), ("X", UNKNOWN), ("-", GAP)]:
    _CODES[ord(_letter)] = _code
for _letter, _equivalent in zip("BZUJO", "DECXX"):                                  # as in AlphaFold
    _CODES[ord(_letter)] = _CODES[ord(_equivalent)]
_AS_COLUMNS = bytes(b"-"[0] if code == b"."[0] else code for code in range(256)).upper()


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Rows aligned to the first, the query.

    msa        [S, N]  residue types in the order of RESTYPES, UNKNOWN, GAP
    deletions  [S, N]  letters of the row between the previous column and this one, which the query lacks
    names      full header lines of the rows
    """

    msa: NDArray[np.int8]
    deletions: NDArray[np.int32]
    names: list[str]

    def __len__(self) -> int:
        return len(self.msa)


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """One template of an HHsearch result. ``query`` and ``hit`` are aligned texts of C columns; the indices [C] count the letters
    of the two full sequences from 0, -1 at a gap. ``sum_probs`` is the sum of the posteriors of the aligned pairs."""

    index: int
    name: str
    aligned_columns: int
    sum_probs: float
    query: str
    hit: str
    query_indices: NDArray[np.int64]
    hit_indices: NDArray[np.int64]


def encode(sequence: str) -> NDArray[np.int8]:
    """Convert one-letter codes, upper or lower case, to residue types.   [N]

    Raises DataError for characters other than letters: white space, a gap ("-"), the stop ("*") at the end of translated sequences.
    """
    if not isinstance(sequence, str):
        raise DataError(f"sequence: found {type(sequence).__name__}, expected a string with one letter per residue, such as 'MKVL'")
    if bad := re.search("[^A-Za-z]", sequence):
        fault = f"sequence: character {bad.start() + 1} of {len(sequence):,} is {bad[0]!r}, expected a letter for each residue"
        advice = "leave out white space, gaps and a stop ('*'), write X for an unknown residue, and fold chains separately"
        raise DataError(f"{fault}; {advice}")
    return _CODES[np.frombuffer(sequence.upper().encode("ascii"), np.uint8)]


def read_alignments(source: str | Path | Sequence[str | Path], sequence: str | None = None) -> Alignment:
    """Read all rows of a folder's .a3m and .sto files, or of the given files, without duplicates.

    The order of a folder is uniref90, mgnify, bfd and then the others by name; uniprot_hits and pairing, for complexes, are
    skipped, and so are empty files beside others: a search without hits. Raises DataError if the query of a file differs from
    ``sequence``, or, without one, from that of the first file; an unknown residue matches all.
    """
    if isinstance(source, str | Path):
        files = [Path(source)] if Path(source).is_file() else _files(Path(source))
    else:
        files = [Path(each) for each in source]
    if not files:
        raise DataError(f"{source}: contains no alignments, expected files such as uniref90_hits.a3m or mgnify_hits.sto")
    alignments = []
    query = None if sequence is None else encode(sequence)
    for path in files:
        data = _read_bytes(path)
        if len(files) > 1 and not data.strip(b"\0 \t\r\n"):
            _log_empty(path.name)
            continue
        alignments.append(_parse(data, path, query))
        query = alignments[0].msa[0] if query is None else query
        check_same_sequence(alignments[-1].msa[0], query, f"{path}: the query")
    if not alignments:
        raise DataError(f"{files[0]}: empty, as are all {len(files)} files; expected the query at least; {_ADVICE}")
    msa, deletions = (np.concatenate([getattr(part, field) for part in alignments]) for field in ("msa", "deletions"))
    first: dict[bytes, int] = {}
    for index, row in enumerate(msa):
        first.setdefault(row.tobytes(), index)
    unique = list(first.values())
    names = [name for part in alignments for name in part.names]
    if len(unique) == len(msa):
        return Alignment(msa, deletions, names)
    return Alignment(msa[unique], deletions[unique], [names[index] for index in unique])


def _parse(data: bytes, path: Path, query: NDArray[Any] | None = None) -> Alignment:
    if ".sto" in path.suffixes or data.startswith(b"# STOCKHOLM"):
        return parse_stockholm(data, str(path))
    return parse_a3m(data, str(path), query)


@cache
def _log_empty(name: str) -> None:
    """Log, once in a process, that files of a name may be empty."""
    warn("%s: an empty file is a search without hits", name)


def _files(folder: Path) -> list[Path]:
    def rank(path: Path) -> tuple[int, str]:
        matches = [position for position, start in enumerate(_DATABASE_ORDER) if path.name.startswith(start)]
        return (matches[0] if matches else len(_DATABASE_ORDER)), path.name

    try:
        files = [path for path in folder.iterdir() if re.fullmatch(r"[^.].*\.(a3m|sto)(\.gz)?", path.name)]
    except OSError as problem:
        raise DataError(f"{folder}: {problem.strerror}; expected a folder of alignments") from problem
    return sorted((path for path in files if path.name.split(".")[0] not in _COMPLEX_FILES), key=rank)


def residues_match(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether residue types are equal; an unknown one matches all."""
    return np.asarray((a == b) | (a == UNKNOWN) | (b == UNKNOWN))


def check_same_sequence(query: NDArray[Any], expected: NDArray[Any], label: str) -> None:
    """Raise DataError, with ``label``, if two rows of residue types do not match."""
    if len(query) != len(expected):
        raise DataError(f"{label} has {len(query)} residues, expected {len(expected)}; is it of another chain?")
    mismatches = np.flatnonzero(~residues_match(query, expected))
    if len(mismatches):
        i, letters = mismatches[0], RESTYPES + "X-"
        raise DataError(
            f"{label} has {letters[query[i]]} at residue {i + 1}, expected {letters[expected[i]]} ({len(mismatches)} of "
            f"{len(query)} residues differ); is it of another chain?"
        )


def parse_a3m(data: bytes, where: str, query: NDArray[Any] | None = None) -> Alignment:
    """Parse A3M; ``where`` is the prefix of errors. Lines that begin with "#" are skipped.

    Of several alignments, which NUL bytes end, the one of ``query`` is returned, otherwise the first.
    """
    first, lines = None, 0
    for block in data.split(b"\0"):
        if block.strip():
            alignment = _parse_block(block, where, lines)
            if query is None or (len(query) == len(alignment.msa[0]) and residues_match(query, alignment.msa[0]).all()):
                return alignment
            first = first or alignment
        lines += block.count(b"\n")
    return first or _parse_block(b"", where, 0)


def _parse_block(data: bytes, where: str, lines_before: int) -> Alignment:
    annotation = False
    names: list[str] = []
    starts: list[int] = []
    parts: list[list[bytes]] = []
    for number, text in enumerate(_split_lines(data, where), lines_before + 1):
        line = text.strip()
        if line.startswith(b">"):
            if annotation := line[1:].partition(b" ")[0] in _ANNOTATIONS:
                continue
            names.append(line[1:].decode("utf-8", "replace"))
            starts.append(number)
            parts.append([])
        elif line and not annotation and not line.startswith(b"#"):
            if not parts:
                expected = f"expected A3M{guess_format(data)}"
                raise DataError(f"{where}: line {number}: {_quote(line)} before any line with '>'; {expected}; {_ADVICE}")
            _check_letters(line.removesuffix(b"*"), text, number, where)
            parts[-1].append(line)
    if not parts:
        raise DataError(f"{where}: no line of a sequence begins with '>', expected A3M with the query first; {_ADVICE}")
    rows = [b"".join(part).translate(None, b".").removesuffix(b"*") for part in parts]
    del parts
    aligned = [row.translate(None, _INSERTIONS) for row in rows]
    width = len(aligned[0])
    if not width or len(rows[0]) != width:
        odd = "lower-case letters, which are insertions" if rows[0] else "no letters"
        raise DataError(f"{where}: line {starts[0]}: the query, the first row, has {odd}; expected upper-case letters; {_ADVICE}")
    for name, row, start in zip(names, aligned, starts):
        if len(row) != width or b"*" in row:
            columns = f"{len(row):,} columns (lower-case letters aside), expected {width:,} as in the query"
            columns = "a stop ('*') before its end" if b"*" in row else columns
            raise DataError(f"{where}: line {start}: row {name[:40]!r} has {columns}; {_ADVICE}")
    msa = _CODES[np.frombuffer(b"".join(aligned), np.uint8)].reshape(-1, width)
    gaps = np.flatnonzero(msa[0] == GAP)
    if len(gaps):
        gap = f"the query, the first row, has a gap at its column {gaps[0] + 1}"
        raise DataError(f"{where}: line {starts[0]}: {gap}; expected letters only; {_ADVICE}")
    deletions = np.zeros((len(rows), width), np.int32)  # pages are allocated lazily, and most rows have none
    longer = [index for index, row in enumerate(rows) if len(row) > width]
    step = max(1, 1_000_000 // width)                   # rows of a chunk: positions take 8 bytes each
    for chunk in (longer[begin:begin + step] for begin in range(0, len(longer), step)):
        letters = np.frombuffer(b"".join(rows[index] for index in chunk), np.uint8)
        positions = np.flatnonzero(letters < ord("a")).reshape(-1, width)
        before = np.cumsum([0, *(len(rows[index]) for index in chunk[:-1])]) - 1
        deletions[chunk] = np.diff(positions, axis=1, prepend=before[:, None]) - 1
    return Alignment(msa, deletions, names)


def parse_stockholm(data: bytes, where: str) -> Alignment:
    """Parse Stockholm; ``where`` is the prefix of errors. Case is ignored and "." is a gap."""
    lines = _split_lines(data, where)
    parts: dict[bytes, list[bytes]] = {}
    starts: list[int] = []
    end = None
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if number == 1 and not line.startswith(b"# STOCKHOLM"):
            raise DataError(f"{where}: line 1: {_quote(line)}, expected '# STOCKHOLM 1.0'{guess_format(data)}; {_ADVICE}")
        if line and end is not None:
            raise DataError(f"{where}: line {number}: {_quote(line)} after '//', expected one alignment; {_ADVICE}")
        if line == b"//":
            end = number
        elif line and not line.startswith(b"#"):
            fields = line.split()
            if len(fields) != 2:
                raise DataError(f"{where}: line {number}: {_quote(line)}, expected a name and a row; {_ADVICE}")
            _check_letters(fields[1], text, number, where)
            if fields[0] not in parts:
                parts[fields[0]] = []
                starts.append(number)
            parts[fields[0]].append(fields[1])
    if end is None:
        raise DataError(f"{where}: line {len(lines)}: the file ends without '//', so it is truncated; {_ADVICE}")
    if not parts:
        raise DataError(f"{where}: line {end}: no rows before '//', expected the query at least; {_ADVICE}")
    names = [name.decode("utf-8", "replace") for name in parts]
    rows = [b"".join(part).translate(_AS_COLUMNS) for part in parts.values()]
    width = len(rows[0])
    for name, row, start in zip(names, rows, starts):
        if len(row) != width:
            columns = f"{len(row):,} columns in all, expected {width:,} as in the query"
            raise DataError(f"{where}: line {start}: row {name[:40]!r}, which begins here, has {columns}; {_ADVICE}")
    codes = _CODES[np.frombuffer(b"".join(rows), np.uint8)].reshape(-1, width)
    column = codes[0] != GAP
    if not column.any():
        raise DataError(f"{where}: line {starts[0]}: the query, the first row, has only gaps; {_ADVICE}")
    deletions = np.zeros((len(rows), int(column.sum())), np.int32)
    if not column.all():
        next_column, first = np.unique(np.cumsum(column)[~column], return_index=True)
        counts = np.add.reduceat(codes[:, ~column] != GAP, first, axis=1, dtype=np.int32)
        inside = next_column < deletions.shape[1]       # letters after the last column are not deletions
        deletions[:, next_column[inside]] = counts[:, inside]
    return Alignment(np.ascontiguousarray(codes[:, column]), deletions, names)


def read_hhr(path: Path) -> list[Hit]:
    """Return the hits in the order of the file, possibly none."""
    return parse_hhr(_read_bytes(path), str(path))


def parse_hhr(data: bytes, where: str) -> list[Hit]:
    lines = [line.decode("utf-8", "replace") for line in _split_lines(data, where)]
    if not lines[0].startswith("Query"):
        text = f"{_quote(_split_lines(data, where)[0])}, expected 'Query', as HHsearch begins{guess_format(data)}"
        raise DataError(f"{where}: line 1: {text}; {_ADVICE}")
    starts = [at for at, line in enumerate(lines) if line.startswith("No ")]
    return [_hit(lines[begin:end], begin + 1, where) for begin, end in zip(starts, [*starts[1:], len(lines)])]


def _hit(lines: list[str], begin: int, where: str) -> Hit:
    """Parse one section, which begins at line ``begin`` of the file."""
    try:
        index = int(lines[0].split()[1])
        summary = dict(field.split("=") for field in lines[2].split())
        aligned_columns, sum_probs = int(float(summary["Aligned_cols"])), float(summary["Sum_probs"])
        if not lines[1].startswith(">"):
            raise ValueError
    except (ValueError, IndexError, KeyError, OverflowError):
        text = "not the head of a hit; expected lines 'No 1', '>name' and 'Probab=... Aligned_cols=... Sum_probs=...'"
        raise DataError(f"{where}: line {begin}: {text}; {_ADVICE}") from None
    texts: dict[str, list[str]] = {"Q": [], "T": []}
    indices: dict[str, list[NDArray[np.int64]]] = {"Q": [], "T": []}
    width = {"Q": 0, "T": 0}
    for number, line in enumerate(lines[3:], begin + 3):
        fields = line.split()
        if line[:2] not in ("Q ", "T ") or fields[1:2] in (["Consensus"], ["ss_dssp"], ["ss_pred"]):
            continue
        try:
            first, text, last = int(fields[-4]), fields[-3], int(fields[-2])
            letters = np.frombuffer(text.encode("ascii"), np.uint8) != ord("-")
            if not re.fullmatch("[A-Z-]+", text) or last - first + 1 != letters.sum() or first < 1:
                raise ValueError
            width[line[0]] += len(text)
            if line[0] == "T" and width["T"] != width["Q"]:
                raise ValueError
            index_of_column = np.where(letters, first - 2 + np.cumsum(letters), -1)
        except (ValueError, IndexError, OverflowError):
            text = "expected the name, the first residue, letters, the last residue and (length), as many columns in Q as in T"
            raise DataError(f"{where}: line {number}: {_quote(line.encode())}: {text}; {_ADVICE}") from None
        texts[line[0]].append(text)
        indices[line[0]].append(index_of_column)
    if not width["Q"] or width["Q"] != width["T"]:
        text = f"hit {index} has {width['Q']} columns of the query and {width['T']} of the template, so it is truncated"
        raise DataError(f"{where}: line {begin}: {text}; {_ADVICE}")
    query, hit = ("".join(texts[side]) for side in "QT")
    query_indices, hit_indices = (np.concatenate(indices[side]) for side in "QT")
    return Hit(index, lines[1][1:], aligned_columns, sum_probs, query, hit, query_indices, hit_indices)


def _read_bytes(path: Path) -> bytes:
    try:
        return read_decompressed(path).removeprefix(BYTE_ORDER_MARK)
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}; {_ADVICE}") from problem


def guess_format(data: bytes) -> str:
    """Return " (it seems to be ...)" for content of another kind, otherwise an empty text."""
    return next((f" (it seems to be {kind})" for pattern, kind in _FORMATS if re.match(pattern, data, re.I | re.S)), "")


def _split_lines(data: bytes, where: str) -> list[bytes]:
    if not data.strip():
        raise DataError(f"{where}: line 1: empty, expected an alignment; {_ADVICE}")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise DataError(f"{where}: line {line}: a NUL byte, expected text; is it compressed, or several files in one? {_ADVICE}")
    return data.splitlines()


def _quote(line: bytes) -> str:
    return repr(line[:40].decode("utf-8", "replace")) + ("..." if len(line) > 40 else "")


def _check_letters(row: bytes, line: bytes, number: int, where: str) -> None:
    """Raise DataError at the first character of a row that is no residue; the row ends its line."""
    invalid = row.translate(None, _ALLOWED)
    if invalid:
        column = len(line.rstrip()) - len(row) + row.index(invalid[:1]) + 1
        character = repr(chr(invalid[0])) if invalid[0] < 128 else f"byte 0x{invalid[0]:02x}"
        raise DataError(f"{where}: line {number}, column {column}: {character}, expected letters of residues or '-'; {_ADVICE}")
