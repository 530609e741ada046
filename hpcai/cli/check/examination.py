"""The check itself: each file in a child process; then what all files say together, and the rate of the disk."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcai import log
from hpcai.cli.check import disk, inspection
from hpcai.cli.check.findings import KINDS, Options, Outcome, Summary, divide_into_batches, finding
from hpcai.cli.check.inspection import MAX_NAMED_ROWS, Bounds, Inspection
from hpcai.cli.check.manifest import SPLITS, DataFile, Split, find_splits
from hpcai.cli.check.pool import Pool
from hpcai.cli.findings import SEVERITIES
from hpcai.cli.progress import Progress
from hpcai.data.direct import ALIGN
from hpcai.data.index import INDEX
from hpcai.data.table import HEAD, PLAIN, head_of
from hpcai.errors import DataError

MAX_EXTRA = 0.05  # of the bytes of a row, read only for its place in the file, is worth a rewrite
MIN_ALIGNED_BYTES = 1 << 16  # bytes of a dataset, from which on it matters where its rows lie
CODES = list(dict.fromkeys(kind.partition("/")[0] for kind in KINDS))

_LAYOUT_KINDS = {"compressed": "compressed", "header": "layout", "chunked": "chunked"}  # by the kind of dataset, the kind of finding
_REPACK = "h5repack -l CONTI -f NONE -t 65536 -a 4096 FILE NEW writes it in one piece, aligned; then make the index again"


def check_dataset(directory: Path, options: Options | None = None, *, progress: Callable[[Progress], None] | None = None) -> Outcome:
    """Check a data set. Nothing is written.

    ``progress`` is called several times a second, by this thread. Raises DataError where there is no such folder; whatever is
    wrong with what it holds is a finding.
    """
    options = options or Options()
    with Pool(options.threads, progress) as pool:
        return _Examination(Path(directory), options).run(pool)


class _Examination:
    def __init__(self, directory: Path, options: Options) -> None:
        self.directory, self.options = directory, options
        self.splits, self.findings = find_splits(directory)

    def add(self, *about: Any, **words: Any) -> None:
        self.findings.append(finding(*about, **words))

    def run(self, pool: Pool) -> Outcome:
        began, options = time.monotonic(), self.options
        every = [file for split in self.splits for file in split.files]
        files = [file for file in every if self._check_size(file)]
        if options.quick:
            found = pool.map(inspection.read_headers, [(file.path, file.entry.rows) for file in files], "headers")
        else:
            jobs = [(file.path, file.entry.rows, file.split.bounds(options.ranges), file.split.keys) for file in files]
            found = pool.map(inspection.read_content, jobs, "reading", sum(file.size for file in files))
        for file, one in zip(files, found):
            self._check_file(file, one)
        for split in self.splits:
            self._check_schema(split)
        self._compare_splits()
        self._find_duplicates([file for file in every if file.complete])
        summaries = tuple(map(self._summary, self.splits))
        figures = self._figures(every)
        figures["seconds"] = round(time.monotonic() - began, 3)
        place = {split.path: i for i, split in enumerate(self.splits)}
        self.findings.sort(key=lambda f: (place.get(f.path.parent, 0), str(f.path), f.dataset or "", f.row or 0))
        self.findings.sort(key=lambda f: (SEVERITIES.index(f.severity), CODES.index(f.code)))
        return Outcome(self.directory, options, tuple(self.findings), summaries, figures)

    # ---- one file

    def _check_size(self, file: DataFile) -> bool:
        want, problem = file.entry.bytes, ""
        try:
            if not file.path.is_file():
                problem = "No such file" if not file.path.exists() else "is a folder, a pipe or a device, expected a file"
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            self.add("unreadable", file.path, why=f"cannot be read: {problem}")
        elif want is not None and want != file.size:
            self.add("truncated" if file.size < want else "overlong", file.path, found=file.size, want=want)
        else:
            return True
        return False

    def _check_file(self, file: DataFile, found: Inspection | DataError) -> None:
        problem = str(found) if isinstance(found, DataError) else found.problem
        if isinstance(found, Inspection):
            file.inspection, want = found, file.entry.sha256
            file.verified = want is not None and want.lower() == found.sha256
            if want and found.sha256 and not file.verified:
                self.add("bit-flip", file.path, found=found.sha256, want=want)
        if problem:
            self.add("unreadable", file.path, why=f"cannot be read: {problem.removeprefix(f'{file.path}: ')[:500]}")
        file.complete = not problem
        self._check_rows(file)
        self._check_table(file)
        self._check_layouts(file)
        self._check_values(file)

    def _check_rows(self, file: DataFile) -> None:
        """Rows of the datasets against one another and against the index."""
        flat, want = file.split.ragged, file.entry.rows
        arrays = [data for data in file.fields if data.kind != "scalar" and data.name not in flat]
        counts = Counter(data.shape[0] for data in arrays)
        file.rows = max(counts, key=lambda rows: (counts[rows], rows == want), default=want or 0)
        for data in arrays:
            if data.shape[0] != file.rows:
                self.add("rows", file.path, data.name, found=data.shape[0], want=file.rows, have="other datasets have it")
            if 0 in data.shape[1:]:
                self.add("empty", file.path, data.name, why=f"has rows of {_format_shape(data.shape[1:])}, which hold no value")
        if file.complete and not (counts and file.rows):
            self.add("empty", file.path, why="has 0 rows" if counts else "holds no dataset with rows")
            file.complete = bool(counts)
        if counts and want is not None and want not in counts:
            self.add("rows", file.path, found=file.rows, want=want, have=f"{INDEX} has it")

    def _check_table(self, file: DataFile) -> None:
        """The file against the table of the index."""
        table, number = file.split.table, file.split.file_numbers.get(file.path.name)
        if table is None or number is None or not file.complete:
            return
        with file.path.open("rb") as start:
            same = int(table.head[number]) in (-1, head_of(start.read(HEAD)))
        for data in file.fields:
            places = table.fields.get(data.name)
            if places is not None and places.ways[number] == PLAIN:
                told = places.layout(number, file.path)
                same &= (told.shape, told.dtype.itemsize, told.offset) == (data.shape, data.itemsize, data.offset)
        if not same:
            self.add("table", file.path)

    def _check_layouts(self, file: DataFile) -> None:
        advice = _REPACK if file.path.suffix == ".h5" else "write it again in one piece"
        for data in file.fields:
            if data.kind == "damaged":
                self.add("unreadable", file.path, data.name, why=data.why)
            elif data.kind in ("elsewhere", "objects"):
                self.add(f"layout/{data.kind}", file.path, data.name, why=data.why)
            elif data.missing:
                words = {"missing": data.missing, "chunks": data.chunks, "shape": data.shape}
                self.add("unwritten", file.path, data.name, **words)
            if data.kind in _LAYOUT_KINDS and (data.kind != "chunked" or (data.chunk[1:] != data.shape[1:] and not data.missing)):
                pieces = math.prod(-(-n // c) for n, c in zip(data.shape[1:], data.chunk[1:]))
                words = {"why": data.why, "chunk": data.chunk, "pieces": pieces, "packed": data.stored / max(data.nbytes, 1)}
                self.add(_LAYOUT_KINDS[data.kind], file.path, data.name, advice=advice, **words)
        big = file.widest
        if big is None or big.kind != "contiguous" or not big.offset % ALIGN or big.row_bytes % ALIGN:
            return
        if big.nbytes >= MIN_ALIGNED_BYTES and MAX_EXTRA * big.row_bytes < ALIGN:
            self.add("unaligned", file.path, big.name, offset=big.offset, width=log.size(big.row_bytes), advice=advice)

    # ---- content

    def _check_values(self, file: DataFile) -> None:
        bounds = file.split.bounds(self.options.ranges)
        for name, tally in file.inspection.statistics.items():
            for code, faults in tally.faults.items():
                if not faults or (code == "constant" and name in file.split.ragged):
                    continue
                span = bounds.get(name, Bounds())
                low, high = ("any" if bound is None else f"{bound:g}" for bound in (span.low, span.high))
                words = {"all": file.rows, "value": faults[0][1], "low": low, "high": high}
                rows = _format_rows([row for row, _ in faults], tally.counts[code])
                self.add(code, file.path, name, row=faults[0][0], rows=rows, **words)

    # ---- files against one another

    def _check_schema(self, split: Split) -> None:
        """Expected is what the index says; where it says nothing, what most files have."""
        files = [file for file in split.files if file.complete]
        names = dict.fromkeys(data.name for file in files for data in file.fields)
        for name in names:
            each = [next((data for data in file.fields if data.name == name), None) for file in files]
            shapes = [split.row_shape(data) if data else None for data in each]
            kinds = Counter((data.dtype, shape) if data else None for data, shape in zip(each, shapes))
            usual, most = kinds.most_common(1)[0]
            if usual is None:
                for file in (file for file, data in zip(files, each) if data):
                    self.add("schema/extra", file.path, name, most=most, all=len(files))
                continue
            want, most_have = split.expected.get(name), f"{most:,} of {len(files):,} files have it"
            dtype = (want.dtype, f"{INDEX} has it") if want and want.dtype else (usual[0], most_have)
            row: tuple[Any, str] = (usual[1], most_have)
            if want and want.shape is not None:
                row = tuple(want.shape[1:] if want.ragged_by else want.shape), f"{INDEX} has it"
            for file, data, shape in zip(files, each, shapes):
                if data is None:
                    self.add("schema", file.path, name, want=f"{dtype[0]} rows of {_format_shape(row[0])}", have=most_have)
                    continue
                if data.dtype != dtype[0]:
                    self.add("dtype", file.path, name, found=data.dtype, want=dtype[0], have=dtype[1])
                if shape != row[0]:
                    self.add("shape", file.path, name, found=_format_shape(data.shape[1:]), want=_format_shape(row[0]), have=row[1])
        for name in split.expected.keys() - names.keys() if files else ():
            self.add("schema/index", split.path / INDEX, name, name=name)

    def _compare_splits(self) -> None:
        """A split whose datasets are others than those of the first. What lies beside train/ may hold something else."""
        named = [split for split in self.splits if split.name in SPLITS]
        kinds = [(split, kind) for split in named or self.splits if (kind := _common_fields(split))]
        for split, kind in kinds[1:]:
            first, usual = kinds[0]
            for name in sorted(name for name in kind.keys() | usual.keys() if kind.get(name) != usual.get(name)):
                here, there = (each.get(name, "missing") for each in (kind, usual))
                self.add("schema/splits", split.path, name, name=name, found=here, want=there, first=first.name)

    def _find_duplicates(self, files: list[DataFile]) -> None:
        """Samples that are there twice, of each pair of files the first of them."""
        keyed = [(number, tally.keys) for number, file in enumerate(files) for tally in file.inspection.statistics.values() if tally.keys]
        if not keyed:
            return
        keys = np.concatenate([np.frombuffer(k, np.uint64) for _, k in keyed])
        owner = np.concatenate([np.full(len(k), number, np.int64) for number, k in keyed])
        row = np.concatenate([np.arange(len(k)) for _, k in keyed])
        _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
        suspects = np.flatnonzero((counts[which] > 1) & (keys != 0))  # 0: a constant row, reported as such
        first = dict[tuple[int, str], tuple[int, int]]()  # of each key and split, in their order
        pairs = dict[tuple[int, int], list[tuple[int, int]]]()
        for key, number, r in zip(keys[suspects].tolist(), owner[suspects].tolist(), row[suspects].tolist()):
            split = files[number].split.name
            others = [first[key, s.name] for s in self.splits if s.name != split and (key, s.name) in first]
            if others or (key, split) in first:
                other = others[0] if others else first[key, split]
                pairs.setdefault((other[0], number), []).append((other[1], r))
            first.setdefault((key, split), (number, r))
        for (a, b), rows in pairs.items():
            one, two, (there, here) = files[a], files[b], min(rows, key=lambda pair: pair[1])
            more = f", and {len(rows) - 1:,} more rows of these two" if len(rows) > 1 else ""
            name = next(name for name, tally in two.inspection.statistics.items() if tally.keys)
            place = f"{one.split.name}/{one.path.name} row {there}"
            self.add("duplicate" if one.split is two.split else "leak", two.path, name, row=here, place=place, more=more)

    # ---- splits and the whole

    def _summary(self, split: Split) -> Summary:
        samples = sum(file.rows if file.complete or file.entry.rows is None else file.entry.rows for file in split.files)
        division = None
        if self.options.batch is not None or self.options.world is not None:
            world = self.options.world or 1
            division, found = divide_into_batches(split.path, samples, self.options.batch or world, world)
            self.findings += found
        size, verified = sum(file.size for file in split.files), sum(file.verified for file in split.files)
        return Summary(split.name, len(split.files), samples, size, verified, _common_fields(split), division)

    def _figures(self, files: list[DataFile]) -> dict[str, Any]:
        kind, size = disk.file_system(self.directory), sum(file.size for file in files)
        each = size // len(files) if files else 0
        figures: dict[str, Any] = {"files": len(files), "bytes": size, "bytes_per_file": each, "file_system": kind}
        self.findings += disk.layout_findings(kind, self.splits, self.directory)
        if self.options.seconds > 0:
            figures["rate"] = found = disk.measure_rate(self.splits, self.options)
            self.findings += disk.rate_findings(self.directory, found, self.options) if found else ()
        return figures


def _common_fields(split: Split) -> dict[str, str]:
    """Return type and row shape of each dataset, as most files of a split have them."""
    files = [sorted(file.fields, key=lambda data: data.name) for file in split.files if file.complete]
    seen = Counter(tuple((data.name, f"{data.dtype} {_format_shape(split.row_shape(data))}") for data in fields) for fields in files)
    return dict(seen.most_common(1)[0][0]) if seen else {}


def _format_rows(rows: Sequence[int], count: int) -> str:
    """Return ``row 3`` or ``rows 3, 4, 9 ... (120)``."""
    names = ", ".join(map(str, rows[:MAX_NAMED_ROWS])) + (" ..." if count > len(rows) else "")
    return f"row {names}" if count == 1 else f"rows {names} ({count:,})"


def _format_shape(shape: Sequence[Any] | str) -> str:
    return shape if isinstance(shape, str) else f"({', '.join('any' if length is None else str(length) for length in shape)})"
