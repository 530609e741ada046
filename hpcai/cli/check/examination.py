"""The check itself: each file once, in blocks, past the page cache; then what all files say together, and the rate of the disk."""

import math
import os
import random
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hpcai import log
from hpcai.cli.check import disk
from hpcai.cli.check.findings import Bounds, Finding, Options, Outcome, Progress, Summary, divide, finding
from hpcai.cli.check.inspector import Inspectors
from hpcai.cli.check.manifest import SPLITS, Field, SetFile, Split, splits_in
from hpcai.cli.check.tally import Tally
from hpcai.cli.check.work import BLOCK, Work
from hpcai.data.direct import ALIGN
from hpcai.data.index import INDEX
from hpcai.errors import DataError

EXTRA = 0.05  # of the bytes of a row, read only for its place in the file, is worth a rewrite
MEASURED = 1 << 16  # bytes of a dataset, from which on it matters where its rows lie


def examine(
    directory: Path, options: Options | None = None, *, progress: Callable[[Progress], None] | None = None,
    inspectors: Inspectors | None = None,
) -> Outcome:  # fmt: skip
    """Looks a data set over. Nothing is written.

    ``progress`` is called several times a second, by this thread. ``inspectors``, where given, are used and left open. Raises
    DataError when there is no such folder; whatever is wrong with what it holds is a finding.
    """
    began, options = time.monotonic(), options or Options()
    with Work(options, inspectors, progress) as work:
        return _Examination(Path(directory), options, work).run(began)


class _Examination:
    def __init__(self, directory: Path, options: Options, work: Work) -> None:
        self.directory, self.options, self.work = directory, options, work
        self._lock = threading.Lock()
        self.splits, self._findings = splits_in(directory)

    def found(self, kind: str, path: Path, dataset: str | None = None, **words: Any) -> None:
        self.keep([finding(kind, path, dataset, **words)])

    def keep(self, findings: Iterator[Finding] | Sequence[Finding]) -> None:
        with self._lock:
            self._findings += findings

    def run(self, began: float) -> Outcome:
        files = [file for split in self.splits for file in split.files]
        for file in files:
            with suppress(OSError):
                file.size = file.path.stat().st_size
        size = sum(file.size for file in files)
        how = ("reading", size, "bytes") if self.options.whole else ("headers", len(files), "files")
        self.work.each(self._look, files, *how)
        if self.options.sample is not None:
            self._sample()
        for split in self.splits:
            self._schema(split)
        self._across()
        if not self.options.quick:
            self._duplicates([file for file in files if file.whole])
        summaries = [self._summary(split) for split in self.splits]
        figures = self._figures(files, size)
        figures["seconds"], figures["bytes_read"] = round(time.monotonic() - began, 3), self.work.reader.transferred
        place = {split.path: i for i, split in enumerate(self.splits)}
        rank = {"error": 0, "warning": 1, "note": 2}
        self._findings.sort(
            key=lambda f: (rank[f.severity], f.code, place.get(f.path.parent, 0), str(f.path), f.dataset or "", f.row or 0)
        )
        return Outcome(self.directory, self.options, tuple(self._findings), tuple(summaries), figures)

    # ---- one file

    def _look(self, file: SetFile) -> None:
        try:
            self._look_closely(file)
        except (DataError, OSError) as problem:
            self._unreadable(file, problem)
        finally:
            if not self.options.whole:
                self.work.advance(1)

    def _unreadable(self, file: SetFile, problem: Exception) -> None:
        file.whole = False
        found = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        self.found("unreadable", file.path, why=f"cannot be read: {found.removeprefix(f'{file.path}: ')[:500]}")

    def _look_closely(self, file: SetFile) -> None:
        before = file.path.stat()
        file.size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            raise DataError("is a folder, a pipe or a device, expected a file")
        said, problem = file.entry.bytes if file.entry is not None else None, None
        if said is not None and said != file.size:
            self.found("truncated" if file.size < said else "overlong", file.path, found=file.size, want=said)
            return
        try:
            file.fields = self.work.describe(file.path)
            file.whole = True
        except DataError as error:
            problem = error
        self._rows(file)
        if self.options.whole:
            self._content(file)
        self._recount(file)
        self._layouts(file)
        for data in file.fields:
            self._judge(file, data)
        if problem:
            raise problem
        after = file.path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            self.found("changing", file.path)

    def _rows(self, file: SetFile) -> None:
        """Rows per dataset against one another and against the index."""
        flat, entry = file.flat, file.entry
        arrays = [f for f in file.fields if f.kind != "scalar" and f.name not in flat]
        said = entry.rows if entry is not None else None
        for data in file.fields:
            many = entry.lengths.get(flat[data.name]) if entry is not None and data.name in flat else None
            if many is not None and data.shape[:1] != (many,):
                words = {"found": _dims(data.shape[:1]), "parts": flat[data.name], "want": many}
                self.found("rows/flat", file.path, data.name, **words)
        if file.path.suffix == ".npy" and said not in (None, 1) and arrays and arrays[0].shape[1:2] == (said,):
            arrays[0].shape = arrays[0].shape[1:]  # the index counts dim 0 as rows
        counts = Counter(f.shape[0] for f in arrays)
        if not counts:
            if file.whole:
                self.found("empty/file", file.path, why="holds no dataset with rows")
                file.whole = False
            file.rows = said or 0
            return
        likely = [rows for rows, count in counts.items() if count == max(counts.values())]
        file.rows = said if said in likely else likely[0]
        for data in arrays:
            if data.shape[0] != file.rows:
                self.found("rows", file.path, data.name, found=data.shape[0], want=file.rows)
            if 0 in data.shape[1:]:
                self.found("empty/file", file.path, data.name, why=f"has rows of {_dims(data.shape[1:])}, which hold no value")
        if not file.rows:
            self.found("empty/file", file.path, why="has 0 rows")

    def _recount(self, file: SetFile) -> None:
        """The rows that the index says against those of the file."""
        counts = {f.shape[0] for f in file.fields if f.kind != "scalar" and f.name not in file.flat}
        said = file.entry.rows if file.entry is not None else None
        if counts and said is not None and said not in counts:
            sure = file.verified and len(counts) == 1  # these bytes are meant, so the index miscounts them
            advice = ", or --repair the index" if sure else ""
            self.found("rows/index", file.path, repairable=sure, found=file.rows, want=said, advice=advice)

    def _layouts(self, file: SetFile) -> None:
        movable = not any(f.kind in ("elsewhere", "userblock") for f in file.fields) and not file.path.is_symlink()
        advice = "--repair writes it in one piece" if movable else "write it again in one piece"
        for data in file.fields:
            words: dict[str, Any] = {"why": data.why, "advice": advice}
            if data.kind == "damaged":
                self.found("unreadable", file.path, data.name, why=data.why)
            elif data.kind == "filtered":
                words |= {"packed": data.stored / max(data.nbytes, 1), "chunk": data.chunk}
                self.found("compressed", file.path, data.name, repairable=movable, **words)
            elif data.kind in ("compact", "userblock"):
                self.found("layout", file.path, data.name, repairable=movable, **words)
            elif data.kind in ("elsewhere", "objects"):
                self.found(f"layout/{data.kind}", file.path, data.name, **words)
            elif data.kind == "chunked" and data.written and data.chunk[1:] != data.shape[1:]:
                pieces = math.prod(-(-n // c) for n, c in zip(data.shape[1:], data.chunk[1:]))
                words = {"chunk": data.chunk, "pieces": pieces, "advice": advice}
                self.found("chunked", file.path, data.name, repairable=movable, **words)
            if data.unwritten:
                words = {"missing": data.grid - data.written, "grid": data.grid, "shape": data.shape}
                self.found("unwritten", file.path, data.name, **words)
        large = file.largest
        if large is None or large.kind != "contiguous" or not large.offset or large.nbytes < MEASURED:
            return
        movable = movable and file.path.suffix == ".h5"
        if (extra := large.extra(large.offset)) > large.extra(0) + EXTRA:
            words = {"offset": large.offset, "width": log.size(large.width), "extra": extra}
            advice = "--repair aligns it" if movable else "align it"
            self.found("unaligned", file.path, large.name, repairable=movable, advice=advice, **words)

    # ---- content

    def _bounds(self, file: SetFile, name: str) -> Bounds:
        want = file.split.wanted.get(name, {})
        return self.options.ranges.get(name, (want.get("low"), want.get("high")))

    def _tally(self, file: SetFile) -> list[Field]:
        """Begins a tally of each dataset whose rows can be read, with keys of rows of the largest; returns these datasets."""
        largest = file.largest
        found = [data for data in file.fields if data.readable and data.width and data.shape[0]]
        for data in found:
            blank = file.split.wanted.get(data.name, {}).get("blank")
            bounds = self._bounds(file, data.name)
            file.tallies[data.name] = Tally(data.type, data.shape[1:], bounds, data is largest, blank)
        return found

    def _content(self, file: SetFile) -> None:
        tallied = self._tally(file)
        arrays = [data for data in tallied if data.kind == "contiguous"]
        spans = sorted(((data.offset or 0), (data.offset or 0) + data.nbytes, data.name) for data in arrays)
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                self.found("unreadable/overlap", file.path, name, other=other, end=end, start=start)
                spans = []

        def look(start: int, block: np.ndarray) -> None:
            for begin, end, name in spans:
                if begin < start + block.size and start < end:
                    file.tallies[name].add(block[max(begin - start, 0) : end - start])

        digest = self.work.hashed(file.path, file.size, look)
        said = file.entry.sha256 if file.entry is not None else None
        file.verified = said == digest
        if said is not None and not file.verified:
            self.found("bit-flip", file.path, found=digest, want=said)
        for data in tallied:
            if data.kind != "contiguous":
                self._unpack(file, data, None)

    def _unpack(self, file: SetFile, data: Field, rows: list[int] | None) -> None:
        """The rows of a dataset that only the HDF5 library can read."""
        tally = file.tallies[data.name]
        words: dict[str, Any] = {"path": str(file.path), "name": data.name, "rows": rows, "keys": tally.keys is not None}
        try:
            with self.work.inspectors.one() as inspector:
                for told in inspector.ask("values", bounds=[tally.low, tally.high], blank=tally.blank, **words):
                    self.work.advance(0)
                    if tally.keys is not None:
                        tally.keys.frombytes(bytes.fromhex(told["keys"]))
                    if "tally" in told:
                        tally.hear(told["tally"])
        except DataError as problem:
            file.whole = False
            if tally.keys is not None:
                del tally.keys[:]
            self.found("unreadable", file.path, data.name, why=f"its values cannot be read: {problem}")

    def _judge(self, file: SetFile, data: Field) -> None:
        tally = file.tallies.get(data.name)
        for code, fault in tally.faults.items() if tally is not None else ():
            if not fault.count or (code == "constant" and (data.unwritten or data.name in file.flat)):
                continue
            low, high = ("any" if bound is None else f"{bound:g}" for bound in self._bounds(file, data.name))
            words = {"all": file.rows, "value": fault.values[0], "low": low, "high": high}
            self.found(code, file.path, data.name, row=fault.rows[0], rows=str(fault), **words)

    def _sample(self) -> None:
        chosen, jobs = random.Random(self.options.seed), list[SetFile]()
        for split in self.splits:
            files = [file for file in split.files if file.whole and file.rows]
            ends = np.cumsum([file.rows for file in files]).tolist() or [0]
            for pick in sorted(chosen.sample(range(ends[-1]), min(self.options.sample or 0, ends[-1]))):
                number = int(np.searchsorted(ends, pick, side="right"))
                file = files[number]
                file.picked = file.picked or []
                file.picked.append(pick - (ends[number] - file.rows))
            jobs += [file for file in files if file.picked]
        self.work.each(self._rows_of, jobs, "sampled rows", sum(len(file.picked or ()) for file in jobs), "rows")

    def _rows_of(self, file: SetFile) -> None:
        assert file.picked is not None
        try:
            for data in self._tally(file):
                rows = [row for row in file.picked if row < data.shape[0]]
                if data.kind != "contiguous":
                    self._unpack(file, data, rows)
                for row in rows if data.kind == "contiguous" else ():
                    file.tallies[data.name].row = row
                    begin = (data.offset or 0) + row * data.width
                    end = begin + data.width
                    for block in self.work.blocks(file.path, ((at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK))):
                        self.work.advance(0)
                        file.tallies[data.name].add(block)
                self._judge(file, data)
        except DataError as problem:
            self._unreadable(file, problem)
        self.work.advance(len(file.picked))

    # ---- files against one another

    def _schema(self, split: Split) -> None:
        """The odd file out is named, not the first one."""
        files = [file for file in split.files if file.whole]
        names = {data.name: None for file in files for data in file.fields}
        for name in names:
            each = [next((f for f in file.fields if f.name == name), None) for file in files]
            want = split.wanted.get(name, {})
            kinds = [(f.dtype, split.open_shape(f), f.kind == "scalar") if f else None for f in each]
            seen = Counter(kinds)
            most = max(seen.values())
            likely = [kind for kind, count in seen.items() if count == most]
            usual = next((kind for kind in likely if kind and want and _fits(kind, want)), likely[0])
            have = f"as {most:,} of {len(files):,} files have it"
            for file, data, kind in zip(files, each, kinds):
                if data is None or kind is None:
                    if usual is not None:
                        text = f"{usual[0]} (rows, {_dims(usual[1])[1:]}"
                        self.found("schema/absent", file.path, name, want=text, have=have)
                elif usual is None:
                    self.found("schema/extra", file.path, name, most=most, all=len(files))
                else:
                    if kind[0] != usual[0]:
                        self.found("dtype", file.path, name, found=kind[0], want=usual[0], have=have)
                    if kind[1:] != usual[1:]:
                        self.found("shape", file.path, name, found=_dims(data.shape[1:]), want=_dims(usual[1]), have=have)
                    if kind == usual:
                        self._against_index(file, data, want)
        for name in split.wanted.keys() - names.keys() if files else ():
            self.found("schema/index", split.path / INDEX, name, name=name)

    def _against_index(self, file: SetFile, data: Field, want: Mapping[str, Any]) -> None:
        if "dtype" in want and data.plain and want["dtype"] != np.dtype(data.dtype):
            self.found("dtype/index", file.path, data.name, found=data.dtype, want=want["dtype"].str)
        if "shape" in want and want["shape"] != file.split.open_shape(data):
            self.found("shape/index", file.path, data.name, found=_dims(data.shape[1:]), want=_dims(want["shape"]))

    def _across(self) -> None:
        """A split whose datasets are others than those of the first. What lies beside train/ may hold something else."""
        named = [split for split in self.splits if split.name in SPLITS]
        kinds = [(split, kind) for split in named or self.splits if (kind := _usual(split))]
        for split, kind in kinds[1:]:
            first, usual = kinds[0]
            for name in sorted(kind.keys() ^ usual.keys()):
                one, other = (split, first) if name in kind else (first, split)
                self.found("schema/splits", split.path, name, name=name, one=one.name, other=other.name)
            for name in sorted(kind.keys() & usual.keys()):
                for code, here, there in zip(("dtype", "shape"), kind[name], usual[name]):
                    if here != there:
                        mine, theirs = (_dims(each) if isinstance(each, tuple) else each for each in (here, there))
                        self.found(f"{code}/splits", split.path, name, name=name, first=first.name, found=mine, want=theirs)

    def _duplicates(self, files: list[SetFile]) -> None:
        """Rows of the largest field that are there twice, of each pair of files the first of them."""
        keyed = [(number, tally.keys) for number, file in enumerate(files) for tally in file.tallies.values() if tally.keys]
        if not keyed:
            return
        keys = np.concatenate([np.frombuffer(k, np.uint64) for _, k in keyed])
        owner = np.concatenate([np.full(len(k), number, np.int64) for number, k in keyed])
        row = np.concatenate([np.asarray((files[n].picked or range(len(k)))[: len(k)]) for n, k in keyed])
        order = np.argsort(keys, kind="stable")
        twin = np.zeros(len(keys) + 1, bool)
        twin[1:-1] = (keys[order][1:] == keys[order][:-1]) & (keys[order][1:] != 0)  # 0: a constant row, reported as such
        suspects = order[twin[1:] | twin[:-1]]
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
            name, place = two.largest.name if two.largest else None, f"{one.split.name}/{one.path.name} row {there}"
            self.found("duplicate" if one.split is two.split else "leak", two.path, name, row=here, place=place, more=more)

    # ---- splits and the whole

    def _summary(self, split: Split) -> Summary:
        samples = sum(file.rows if file.whole or not file.entry else file.entry.rows or 0 for file in split.files)
        division = None
        if self.options.batch is not None or self.options.world is not None:
            world = self.options.world or 1
            division = divide(samples, self.options.batch or world, world)
            self.keep(division.problems(split.path))
        begins = even = 0.0
        for data in (file.largest for file in split.files if file.whole):
            if data is None:
                continue
            if data.kind == "contiguous" and data.offset is not None:
                place = (data.offset % ALIGN + np.arange(data.shape[0], dtype=np.int64) % ALIGN * (data.width % ALIGN)) % ALIGN
                even += int(np.count_nonzero(place == 0))
            even += (data.aligned or 0.0) * data.shape[0]
            begins += data.shape[0]
        fields = {name: f"{dtype} {_dims(shape)}" for name, (dtype, shape) in _usual(split).items()}
        size, verified = sum(file.size for file in split.files), sum(file.verified for file in split.files)
        aligned = even / begins if begins else None
        return Summary(split.name, len(split.files), samples, size, verified, fields, aligned, division)

    def _figures(self, files: list[SetFile], size: int) -> dict[str, Any]:
        inodes = 1 + sum(len(folders) + len(names) for _, folders, names in os.walk(self.directory))
        kind = disk.file_system(self.directory, self.options.mounts)
        figures: dict[str, Any] = {
            "files": len(files), "bytes": size, "inodes": inodes, "file_system": kind,
            "bytes_per_file": size // len(files) if files else 0,
        }  # fmt: skip
        self.keep(disk.metadata_bound(self.directory, len(files), size))
        for split in (split for split in self.splits if split.files):
            largest = max(split.files, key=lambda file: file.size)
            present = disk.present_stripes(largest.path) if kind == "lustre" else None
            self.keep(disk.stripe_hint(kind, split.path, [file.size for file in split.files], present))
        if self.options.seconds > 0:
            figures["rate"] = found = disk.rate(self.splits, self.options)
            self.keep(disk.too_slow(self.directory, found, self.options) if found else ())
        return figures


def _fits(kind: tuple[str, tuple[int | None, ...], bool], want: Mapping[str, Any]) -> bool:
    return ("dtype" not in want or want["dtype"].str == kind[0]) and ("shape" not in want or want["shape"] == kind[1])


def _usual(split: Split) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Type and shape of a row of each dataset, as most files of a split have them."""
    files = [sorted(file.fields, key=lambda f: f.name) for file in split.files if file.whole]
    seen = Counter(tuple((f.name, f.dtype, split.open_shape(f)) for f in fields) for fields in files)
    return {name: (dtype, shape) for name, dtype, shape in seen.most_common(1)[0][0]} if seen else {}


def _dims(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"
