"""The check of a data set: each file in a child process; then comparisons between files, and the rate of the disk."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hpcai.cli.check.disk as disk
import hpcai.cli.check.inspection as inspection
from hpcai import log
from hpcai.cli.check.findings import EVALUATED, KINDS, Options, Outcome, Summary, divide_into_batches, finding
from hpcai.cli.check.inspection import Bounds, Inspection
from hpcai.cli.check.manifest import SPLITS, DataFile, Split, find_splits
from hpcai.cli.check.pool import Pool
from hpcai.cli.findings import SEVERITIES
from hpcai.cli.progress import Progress
from hpcai.data.direct import ALIGN
from hpcai.data.index import INDEX
from hpcai.data.table import CONTIGUOUS, HEAD_BYTES, head_checksum
from hpcai.errors import DataError

MAX_EXTRA = 0.05  # a larger share of surplus bytes in the reads of a row, due to its offset, is worth a rewrite
MIN_ALIGNED_BYTES = 1 << 16  # minimum size of a dataset for which alignment matters
CODES = list(dict.fromkeys(kind.partition("/")[0] for kind in KINDS))

_LAYOUT_KINDS = {"compressed": "compressed", "header": "layout", "chunked": "chunked"}  # kind of dataset -> kind of finding
_REPACK = "h5repack -l CONTI -f NONE -t 65536 -a 4096 FILE NEW writes it contiguous and aligned; then make the index again"


def check_dataset(
    directory: Path, options: Options | None = None, *, progress: Callable[[Progress], None] | None = None,
) -> Outcome:  # fmt: skip
    """Check a data set. Nothing is written.

    ``progress`` is called several times a second by this thread. Raises DataError without such a folder; other faults are findings.
    """
    options = options or Options()
    with Pool(options.threads, progress) as pool:
        return _Examination(Path(directory), options).run(pool)


class _Examination:
    def __init__(self, directory: Path, options: Options) -> None:
        self.directory, self.options = directory, options
        self.splits, self.findings = find_splits(directory)

    def add(self, *args: Any, **fields: Any) -> None:
        self.findings.append(finding(*args, **fields))

    def run(self, pool: Pool) -> Outcome:
        start, options = time.monotonic(), self.options
        all_files = [file for split in self.splits for file in split.files]
        files = [file for file in all_files if self._check_size(file)]
        if options.quick:
            inspections = pool.map(inspection.read_headers, [(file.path, file.entry.rows) for file in files], "headers")
        else:
            jobs = [(file.path, file.entry.rows, file.split.bounds(options.ranges), file.split.keys) for file in files]
            inspections = pool.map(inspection.read_content, jobs, "reading", sum(file.size for file in files))
        for file, inspected in zip(files, inspections):
            self._check_file(file, inspected)
        for split in self.splits:
            self._check_schema(split)
        self._compare_splits()
        self._find_duplicates([file for file in all_files if file.complete])
        summaries = tuple(map(self._summary, self.splits))
        figures = self._figures(all_files)
        figures["seconds"] = round(time.monotonic() - start, 3)
        order = {split.path: i for i, split in enumerate(self.splits)}
        self.findings.sort(key=lambda f: (order.get(f.path.parent, 0), str(f.path), f.dataset or "", f.row or 0))
        self.findings.sort(key=lambda f: (SEVERITIES.index(f.severity), CODES.index(f.code)))
        return Outcome(self.directory, options, tuple(self.findings), summaries, figures)

    # ---- one file

    def _check_size(self, file: DataFile) -> bool:
        expected, problem = file.entry.bytes, ""
        try:
            if not file.path.is_file():
                problem = "No such file" if not file.path.exists() else "is a folder, a pipe or a device, expected a file"
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            self.add("unreadable", file.path, why=f"cannot be read: {problem}")
        elif expected is not None and expected != file.size:
            self.add("truncated" if file.size < expected else "overlong", file.path, found=file.size, want=expected)
        else:
            return True
        return False

    def _check_file(self, file: DataFile, result: Inspection | DataError) -> None:
        problem = str(result) if isinstance(result, DataError) else result.problem
        if isinstance(result, Inspection):
            file.inspection, expected = result, file.entry.sha256
            file.verified = expected is not None and expected.lower() == result.sha256
            if expected and result.sha256 and not file.verified:
                self.add("bit-flip", file.path, found=result.sha256, want=expected)
        if problem:
            self.add("unreadable", file.path, why=f"cannot be read: {problem.removeprefix(f'{file.path}: ')[:500]}")
        file.complete = not problem
        self._check_rows(file)
        self._check_table(file)
        self._check_layouts(file)
        self._check_values(file)

    def _check_rows(self, file: DataFile) -> None:
        """Compare the rows of the datasets with each other and with the index."""
        ragged, expected = file.split.ragged, file.entry.rows
        arrays = [data for data in file.fields if data.kind != "scalar" and data.name not in ragged]
        counts = Counter(data.shape[0] for data in arrays)
        file.rows = max(counts, key=lambda rows: (counts[rows], rows == expected), default=expected or 0)
        for data in arrays:
            if data.shape[0] != file.rows:
                self.add("rows", file.path, data.name, found=data.shape[0], want=file.rows, have="other datasets have it")
            if 0 in data.shape[1:]:
                self.add("empty", file.path, data.name, why=f"has rows of {_format_shape(data.shape[1:])}, which hold no value")
        if file.complete and not (counts and file.rows):
            self.add("empty", file.path, why="has 0 rows" if counts else "holds no dataset with rows")
            file.complete = bool(counts)
        if counts and expected is not None and expected not in counts:
            self.add("rows", file.path, found=file.rows, want=expected, have=f"{INDEX} has it")

    def _check_table(self, file: DataFile) -> None:
        table, number = file.split.table, file.split.file_numbers.get(file.path.name)
        if table is None or number is None or not file.complete:
            return
        with file.path.open("rb") as opened:
            same = int(table.head[number]) in (-1, head_checksum(opened.read(HEAD_BYTES)))
        for data in file.fields:
            entry = table.fields.get(data.name)
            if entry is not None and entry.storage[number] == CONTIGUOUS:
                stored = entry.layout(number, file.path)
                same &= (stored.shape, stored.dtype.itemsize, stored.offset) == (data.shape, data.itemsize, data.offset)
        if not same:
            self.add("table", file.path)

    def _check_layouts(self, file: DataFile) -> None:
        advice = _REPACK if file.path.suffix == ".h5" else "write it again as one contiguous array"
        for data in file.fields:
            if data.kind == "damaged":
                self.add("unreadable", file.path, data.name, why=data.why)
            elif data.kind in ("elsewhere", "objects"):
                self.add(f"layout/{data.kind}", file.path, data.name, why=data.why)
            elif data.missing:
                fields = {"missing": data.missing, "chunks": data.chunks, "shape": data.shape}
                self.add("unwritten", file.path, data.name, **fields)
            if data.kind in _LAYOUT_KINDS and (data.kind != "chunked" or (data.chunk[1:] != data.shape[1:] and not data.missing)):
                pieces = math.prod(-(-n // c) for n, c in zip(data.shape[1:], data.chunk[1:]))
                fields = {"why": data.why, "chunk": data.chunk, "pieces": pieces, "packed": data.stored / max(data.nbytes, 1)}
                self.add(_LAYOUT_KINDS[data.kind], file.path, data.name, advice=advice, **fields)
        widest = file.widest
        if widest is None or widest.kind != "contiguous" or not widest.offset % ALIGN or widest.row_bytes % ALIGN:
            return
        if widest.nbytes >= MIN_ALIGNED_BYTES and MAX_EXTRA * widest.row_bytes < ALIGN:
            width = log.format_bytes(widest.row_bytes)
            self.add("unaligned", file.path, widest.name, offset=widest.offset, width=width, advice=advice)

    def _check_values(self, file: DataFile) -> None:
        bounds = file.split.bounds(self.options.ranges)
        for name, statistics in file.inspection.statistics.items():
            for code, faults in statistics.faults.items():
                if not faults or (code == "constant" and name in file.split.ragged):
                    continue
                bounds_of_field = bounds.get(name, Bounds())
                low, high = ("any" if bound is None else f"{bound:g}" for bound in (bounds_of_field.low, bounds_of_field.high))
                fields = {"all": file.rows, "value": faults[0][1], "low": low, "high": high}
                count, names = statistics.counts[code], ", ".join(str(row) for row, _ in faults)
                rows = f"row {names}" if count == 1 else f"rows {names}{' ...' * (count > len(faults))} ({count:,})"
                self.add(code, file.path, name, row=faults[0][0], rows=rows, **fields)

    # ---- comparisons between files

    def _check_schema(self, split: Split) -> None:
        """Compare each dataset with the index, or if that has no entry, with the majority of the files."""
        files = [file for file in split.files if file.complete]
        names = dict.fromkeys(data.name for file in files for data in file.fields)
        for name in names:
            datasets = [next((data for data in file.fields if data.name == name), None) for file in files]
            shapes = [split.row_shape(data) if data else None for data in datasets]
            kinds = Counter((data.dtype, shape) if data else None for data, shape in zip(datasets, shapes))
            common, most_files = kinds.most_common(1)[0]
            if common is None:
                for file in (file for file, data in zip(files, datasets) if data):
                    self.add("schema/extra", file.path, name, most=most_files, all=len(files))
                continue
            expected, majority = split.expected.get(name), f"{most_files:,} of {len(files):,} files have it"
            dtype = (expected.dtype, f"{INDEX} has it") if expected and expected.dtype else (common[0], majority)
            row: tuple[Any, str] = (common[1], majority)
            if expected and expected.shape is not None:
                row = tuple(expected.shape[1:] if expected.ragged_by else expected.shape), f"{INDEX} has it"
            for file, data, shape in zip(files, datasets, shapes):
                if data is None:
                    self.add("schema", file.path, name, want=f"{dtype[0]} rows of {_format_shape(row[0])}", have=majority)
                    continue
                if data.dtype != dtype[0]:
                    self.add("dtype", file.path, name, found=data.dtype, want=dtype[0], have=dtype[1])
                if shape != row[0]:
                    self.add("shape", file.path, name, found=_format_shape(data.shape[1:]), want=_format_shape(row[0]), have=row[1])
        for name in split.expected.keys() - names.keys() if files else ():
            self.add("schema/index", split.path / INDEX, name, name=name)

    def _compare_splits(self) -> None:
        """Compare the datasets of each split with those of the first. Folders beside train/ may hold something else."""
        standard = [split for split in self.splits if split.name in SPLITS]
        fields_of_split = [(split, fields) for split in standard or self.splits if (fields := _common_fields(split))]
        for split, fields in fields_of_split[1:]:
            first, first_fields = fields_of_split[0]
            for name in sorted(name for name in fields.keys() | first_fields.keys() if fields.get(name) != first_fields.get(name)):
                actual, expected = (table.get(name, "missing") for table in (fields, first_fields))
                self.add("schema/splits", split.path, name, name=name, found=actual, want=expected, first=first.name)

    def _find_duplicates(self, files: list[DataFile]) -> None:
        """Find duplicate samples; report the first for each pair of files."""
        keys_of_file = [(i, s.keys) for i, file in enumerate(files) for s in file.inspection.statistics.values() if s.keys]
        if not keys_of_file:
            return
        keys = np.concatenate([np.frombuffer(k, np.uint64) for _, k in keys_of_file])
        owner = np.concatenate([np.full(len(k), index, np.int64) for index, k in keys_of_file])
        row = np.concatenate([np.arange(len(k)) for _, k in keys_of_file])
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        repeated = np.flatnonzero((counts[inverse] > 1) & (keys != 0))  # 0: a constant row, reported as such
        first = dict[tuple[int, str], tuple[int, int]]()  # of each key and split, in order
        pairs = dict[tuple[int, int], list[tuple[int, int]]]()
        for key, index, r in zip(keys[repeated].tolist(), owner[repeated].tolist(), row[repeated].tolist()):
            split = files[index].split.name
            earlier = [first[key, s.name] for s in self.splits if s.name != split and (key, s.name) in first]
            if earlier or (key, split) in first:
                earlier_row = earlier[0] if earlier else first[key, split]
                pairs.setdefault((earlier_row[0], index), []).append((earlier_row[1], r))
            first.setdefault((key, split), (index, r))
        for (a, b), rows in pairs.items():
            first_file, second_file, (first_row, second_row) = files[a], files[b], min(rows, key=lambda pair: pair[1])
            more = f", and {len(rows) - 1:,} more rows of these two" if len(rows) > 1 else ""
            name = next(name for name, stats in second_file.inspection.statistics.items() if stats.keys)
            place = f"{first_file.split.name}/{first_file.path.name} row {first_row}"
            code = "duplicate" if first_file.split is second_file.split else "leak"
            self.add(code, second_file.path, name, row=second_row, place=place, more=more)

    # ---- splits and totals

    def _summary(self, split: Split) -> Summary:
        samples = sum(file.rows if file.complete or file.entry.rows is None else file.entry.rows for file in split.files)
        division = None
        if self.options.batch is not None or self.options.world is not None:
            world = self.options.world or 1
            division, more_findings = divide_into_batches(split.path, samples, self.options.batch or world, world)
            self.findings += more_findings if split.name not in EVALUATED else ()  # each of their samples is used once
        size, verified = sum(file.size for file in split.files), sum(file.verified for file in split.files)
        return Summary(split.name, len(split.files), samples, size, verified, _common_fields(split), division)

    def _figures(self, files: list[DataFile]) -> dict[str, Any]:
        kind, size = disk.file_system(self.directory), sum(file.size for file in files)
        bytes_per_file = size // len(files) if files else 0
        figures: dict[str, Any] = {"files": len(files), "bytes": size, "bytes_per_file": bytes_per_file, "file_system": kind}
        self.findings += disk.layout_findings(kind, self.splits, self.directory)
        if self.options.seconds > 0:
            figures["rate"] = rate = disk.measure_rate(self.splits, self.options)
            self.findings += disk.rate_findings(self.directory, rate, self.options) if rate else ()
        return figures


def _common_fields(split: Split) -> dict[str, str]:
    """Return dtype and row shape of each dataset in the majority of the files of a split."""
    files = [sorted(file.fields, key=lambda data: data.name) for file in split.files if file.complete]
    counts = Counter(tuple((x.name, f"{x.dtype} {_format_shape(split.row_shape(x))}") for x in fields) for fields in files)
    return dict(counts.most_common(1)[0][0]) if counts else {}


def _format_shape(shape: Sequence[Any] | str) -> str:
    return shape if isinstance(shape, str) else f"({', '.join('any' if length is None else str(length) for length in shape)})"
