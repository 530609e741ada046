"""The check itself: each file once, in blocks, past the page cache; then what all files say together, and the rate of the disk."""

import math
import os
import random
import stat
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hpcai import log
from hpcai.cli.check import disk
from hpcai.cli.check.findings import SEVERITIES, Bounds, Division, Options, Outcome, Summary, finding
from hpcai.cli.check.manifest import SPLITS, Field, SetFile, Split, splits_in
from hpcai.cli.check.tally import Tally
from hpcai.cli.check.work import Work
from hpcai.cli.progress import Progress
from hpcai.data.index import INDEX
from hpcai.data.table import HEAD, PLAIN, head_of
from hpcai.errors import DataError

EXTRA = 0.05  # of the bytes of a row, read only for its place in the file, is worth a rewrite
MEASURED = 1 << 16  # bytes of a dataset, from which on it matters where its rows lie


_LAYOUTS = {
    "damaged": "unreadable", "filtered": "compressed", "compact": "layout", "userblock": "layout", "elsewhere": "layout/elsewhere",
    "objects": "layout/objects", "chunked": "chunked",
}  # fmt: skip
_REWRITTEN = ("compressed", "layout", "chunked")


def examine(directory: Path, options: Options | None = None, *, progress: Callable[[Progress], None] | None = None) -> Outcome:
    """Looks a data set over. Nothing is written.

    ``progress`` is called several times a second, by this thread. Raises DataError when there is no such folder; whatever is wrong
    with what it holds is a finding.
    """
    began, options = time.monotonic(), options or Options()
    with Work(options.threads, progress) as work:
        return _Examination(Path(directory), options, work).run(began)


class _Examination:
    def __init__(self, directory: Path, options: Options, work: Work) -> None:
        self.directory, self.options, self.work = directory, options, work
        self.splits, self.findings = splits_in(directory)

    def found(self, *about: Any, **words: Any) -> None:
        self.findings.append(finding(*about, **words))

    def run(self, began: float) -> Outcome:
        files = [file for split in self.splits for file in split.files]
        for file in files:
            with suppress(OSError):
                file.size = file.path.stat().st_size
        size = sum(file.size for file in files)
        how = ("reading", size, "bytes") if self.options.whole else ("headers", len(files), "files")
        self.work.each(self._look, files, *how)
        if self.options.sample is not None:
            self._sample(self.options.sample)
        for split in self.splits:
            self._schema(split)
        self._across()
        self._duplicates([file for file in files if file.whole])
        summaries = tuple(self._summary(split) for split in self.splits)
        figures = self._figures(files, size)
        figures["seconds"], figures["bytes_read"] = round(time.monotonic() - began, 3), self.work.reader.transferred
        place = {split.path: i for i, split in enumerate(self.splits)}
        self.findings.sort(key=lambda f: (place.get(f.path.parent, 0), str(f.path), f.dataset or "", f.row or 0))
        self.findings.sort(key=lambda f: (SEVERITIES.index(f.severity), f.code))
        return Outcome(self.directory, self.options, tuple(self.findings), summaries, figures)

    # ---- one file

    def _look(self, file: SetFile) -> None:
        try:
            self._look_closely(file)
        except (DataError, OSError) as problem:
            self._unreadable(file, problem)
        if not self.options.whole:
            self.work.advance(1)

    def _unreadable(self, file: SetFile, problem: Exception) -> None:
        file.whole = False
        found = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        self.found("unreadable", file.path, why=f"cannot be read: {found.removeprefix(f'{file.path}: ')[:500]}")

    def _look_closely(self, file: SetFile) -> None:
        before, said, problem = file.path.stat(), file.entry.bytes, None
        file.size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            raise DataError("is a folder, a pipe or a device, expected a file")
        if said is not None and said != file.size:
            self.found("truncated" if file.size < said else "overlong", file.path, found=file.size, want=said)
            return
        try:
            file.fields = self.work.describe(file.path, file.entry.rows)
            file.whole = True
        except DataError as error:
            problem = error
        if self.options.whole:
            self._content(file)
        self._rows(file)
        self._tabled(file)
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
        flat, said = file.flat, file.entry.rows
        for data in (data for data in file.fields if data.name in flat):
            parts = flat[data.name]
            if (many := file.entry.lengths.get(parts)) is not None and data.shape[:1] != (many,):
                self.found("rows/flat", file.path, data.name, found=_dims(data.shape[:1]), parts=parts, want=many)
        arrays = [data for data in file.fields if data.kind != "scalar" and data.name not in flat]
        if not arrays:
            file.rows = said or 0
            if file.whole:
                self.found("empty/file", file.path, why="holds no dataset with rows")
                file.whole = False
            return
        counts = Counter(data.shape[0] for data in arrays)
        file.rows = max(counts, key=lambda rows: (counts[rows], rows == said))
        for data in arrays:
            if data.shape[0] != file.rows:
                self.found("rows", file.path, data.name, found=data.shape[0], want=file.rows)
            if 0 in data.shape[1:]:
                self.found("empty/file", file.path, data.name, why=f"has rows of {_dims(data.shape[1:])}, which hold no value")
        if not file.rows:
            self.found("empty/file", file.path, why="has 0 rows")
        if said is not None and said not in counts:
            sure = file.verified and len(counts) == 1  # these bytes are meant, so the index miscounts them
            advice = ", or --repair the index" if sure else ""
            self.found("rows/index", file.path, repairable=sure, found=file.rows, want=said, advice=advice)

    def _tabled(self, file: SetFile) -> None:
        """The file against the table of the index."""
        table, name = file.split.table, file.path.name
        if table is None or name not in file.split.numbers:
            return
        number = file.split.numbers[name]
        with file.path.open("rb") as there:
            same = int(table.head[number]) in (-1, head_of(there.read(HEAD)))
            for data in file.fields:
                places = table.fields.get(data.name)
                if not same or places is None or places.ways[number] != PLAIN:
                    continue
                told, part = places.layout(number, file.path), table.part(data.name, number)
                same = (told.shape, told.dtype.itemsize, told.offset) == (data.shape, data.item, data.offset)
                if same and part is not None:
                    there.seek(data.offset)
                    same = there.read(data.nbytes) == part.astype(told.dtype).tobytes()
        if not same:
            advice = "" if file.verified else " if it is right"  # otherwise these bytes are meant
            self.found("table", file.path, repairable=file.verified, advice=f", or --index{advice}")

    def _layouts(self, file: SetFile) -> None:
        movable = not any(data.kind in ("elsewhere", "userblock") for data in file.fields) and not file.path.is_symlink()
        for data in file.fields:
            kind = _LAYOUTS.get(data.kind)
            if kind is not None and (kind != "chunked" or (data.written and data.chunk[1:] != data.shape[1:])):
                pieces = math.prod(-(-n // c) for n, c in zip(data.shape[1:], data.chunk[1:]))
                words = {"why": data.why, "chunk": data.chunk, "pieces": pieces, "packed": data.stored / max(data.nbytes, 1)}
                advice = "--repair writes it in one piece" if movable else "write it again in one piece"
                can = movable and kind in _REWRITTEN
                self.found(kind, file.path, data.name, repairable=can, advice=advice, **words)
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

    def _tallied(self, file: SetFile) -> list[tuple[Field, Tally]]:
        """Each dataset whose rows can be read with a new tally, that by which samples are told apart with keys of its rows."""
        key = file.key
        found = [data for data in file.fields if data.readable and data.width and data.shape[0]]
        for data in found:
            blank = file.split.wanted.get(data.name, {}).get("blank")
            file.tallies[data.name] = Tally(data.type, data.shape[1:], self._bounds(file, data.name), data is key, blank)
        return [(data, file.tallies[data.name]) for data in found]

    def _content(self, file: SetFile) -> None:
        tallied = self._tallied(file)
        spans = sorted((data.offset, data.offset + data.nbytes, data.name) for data, _ in tallied if data.kind == "contiguous")
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                self.found("unreadable/overlap", file.path, name, other=other, end=end, start=start)
                spans = []

        def look(start: int, block: np.ndarray) -> None:
            for begin, end, name in spans:
                if begin < start + block.size and start < end:
                    file.tallies[name].add(block[max(begin - start, 0) : end - start])

        digest, said = self.work.hashed(file.path, look), file.entry.sha256
        file.verified = said == digest
        if said is not None and not file.verified:
            self.found("bit-flip", file.path, found=digest, want=said)
        for data, tally in tallied:
            if data.kind != "contiguous":
                self._unpack(file, data, tally, None)

    def _unpack(self, file: SetFile, data: Field, tally: Tally, rows: list[int] | None) -> None:
        """The rows of a dataset that only the HDF5 library can read."""
        words = {"bounds": (tally.low, tally.high), "blank": tally.blank, "keys": tally.keyed}
        try:
            with self.work.inspectors.one() as inspector:
                for told in inspector.ask("values", path=str(file.path), name=data.name, rows=rows, **words):
                    self.work.advance(0)
                    if told is not None:
                        tally.hear(told)
        except DataError as problem:
            file.whole = False
            self.found("unreadable", file.path, data.name, why=f"its values cannot be read: {problem}")

    def _judge(self, file: SetFile, data: Field) -> None:
        tally = file.tallies.get(data.name)
        for code, fault in tally.faults.items() if tally is not None else ():
            if not fault.count or (code == "constant" and (data.unwritten or data.name in file.flat)):
                continue
            low, high = ("any" if bound is None else f"{bound:g}" for bound in self._bounds(file, data.name))
            words = {"all": file.rows, "value": fault.values[0], "low": low, "high": high}
            self.found(code, file.path, data.name, row=fault.rows[0], rows=str(fault), **words)

    def _sample(self, most: int) -> None:
        chosen, jobs = random.Random(self.options.seed), list[SetFile]()
        for split in self.splits:
            files = [file for file in split.files if file.whole and file.rows]
            ends = list(accumulate((file.rows for file in files), initial=0))
            for pick in sorted(chosen.sample(range(ends[-1]), min(most, ends[-1]))):
                number = bisect(ends, pick) - 1
                files[number].picked.append(pick - ends[number])
            jobs += [file for file in files if file.picked]
        self.work.each(self._rows_of, jobs, "sampled rows", sum(len(file.picked) for file in jobs), "rows")

    def _rows_of(self, file: SetFile) -> None:
        try:
            for data, tally in self._tallied(file):
                rows = [row for row in file.picked if row < data.shape[0]]
                if data.kind != "contiguous":
                    self._unpack(file, data, tally, rows)
                for row in rows if data.kind == "contiguous" else ():
                    tally.row, begin = row, data.offset + row * data.width
                    for _, block in self.work.blocks(file.path, begin, begin + data.width):
                        self.work.advance(0)
                        tally.add(block)
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
            each = [next((data for data in file.fields if data.name == name), None) for file in files]
            want = split.wanted.get(name, {})
            index = (want["dtype"].str if "dtype" in want else None, want.get("shape"), None)
            kinds = [(data.dtype, split.open_shape(data), data.kind == "scalar") if data else None for data in each]
            seen = Counter(kinds)
            most = max(seen.values())
            likely = [kind for kind, count in seen.items() if count == most]
            usual = next((kind for kind in likely if kind and want and _fits(kind, index)), likely[0])
            have = f"as {most:,} of {len(files):,} files have it"
            for file, data, kind in zip(files, each, kinds):
                if usual is None:
                    if data is not None:
                        self.found("schema/extra", file.path, name, most=most, all=len(files))
                elif data is None or kind is None:
                    self.found("schema/absent", file.path, name, want=f"{usual[0]} (rows, {_dims(usual[1])[1:]}", have=have)
                else:
                    case, other = ("", usual) if kind != usual else ("/index", index)
                    words = {"have": have, "path": file.path, "dataset": name}
                    if not _fits(kind[:1], other[:1]) and (data.plain or not case):
                        self.found(f"dtype{case}", found=kind[0], want=other[0], **words)
                    if not _fits(kind[1:], other[1:]):
                        self.found(f"shape{case}", found=_dims(data.shape[1:]), want=_dims(other[1] or ()), **words)
        for name in split.wanted.keys() - names.keys() if files else ():
            self.found("schema/index", split.path / INDEX, name, name=name)

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
        """Samples that are there twice, of each pair of files the first of them."""
        keyed = [(number, tally.keys) for number, file in enumerate(files) for tally in file.tallies.values() if tally.keys]
        if not keyed:
            return
        keys = np.concatenate([np.frombuffer(k, np.uint64) for _, k in keyed])
        owner = np.concatenate([np.full(len(k), number, np.int64) for number, k in keyed])
        row = np.concatenate([np.asarray((files[n].picked or range(len(k)))[: len(k)]) for n, k in keyed])
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
            name, place = two.key.name if two.key else None, f"{one.split.name}/{one.path.name} row {there}"
            self.found("duplicate" if one.split is two.split else "leak", two.path, name, row=here, place=place, more=more)

    # ---- splits and the whole

    def _summary(self, split: Split) -> Summary:
        samples = sum(file.rows if file.whole or file.entry.rows is None else file.entry.rows for file in split.files)
        division = None
        if self.options.batch is not None or self.options.world is not None:
            world = self.options.world or 1
            division = Division.of(samples, self.options.batch or world, world)
            self.findings += division.problems(split.path)
        largest = [data for file in split.files if file.whole and (data := file.largest) is not None]
        rows = sum(data.shape[0] for data in largest)
        aligned = sum(data.aligned * data.shape[0] for data in largest) / rows if rows else None
        fields = {name: f"{dtype} {_dims(shape)}" for name, (dtype, shape) in _usual(split).items()}
        size, verified = sum(file.size for file in split.files), sum(file.verified for file in split.files)
        return Summary(split.name, len(split.files), samples, size, verified, fields, aligned, division)

    def _figures(self, files: list[SetFile], size: int) -> dict[str, Any]:
        inodes = 1 + sum(len(folders) + len(names) for _, folders, names in os.walk(self.directory))
        kind = disk.file_system(self.directory)
        figures: dict[str, Any] = {
            "files": len(files), "bytes": size, "inodes": inodes, "file_system": kind,
            "bytes_per_file": size // len(files) if files else 0,
        }  # fmt: skip
        self.findings += disk.metadata_bound(self.directory, len(files), size)
        for split in (split for split in self.splits if split.files):
            largest = max(split.files, key=lambda file: file.size)
            present = disk.present_stripes(largest.path) if kind == "lustre" else None
            self.findings += disk.stripe_hint(kind, split.path, [file.size for file in split.files], present)
        if self.options.seconds > 0:
            figures["rate"] = found = disk.rate(self.splits, self.options)
            self.findings += disk.too_slow(self.directory, found, self.options) if found else ()
        return figures


def _fits(kind: Sequence[Any], want: Sequence[Any]) -> bool:
    """Whether type and shape are those that are wanted; None allows any."""
    return all(one in (None, got) for got, one in zip(kind, want))


def _usual(split: Split) -> dict[str, tuple[str, tuple[int | None, ...]]]:
    """Type and shape of a row of each dataset, as most files of a split have them."""
    files = [sorted(file.fields, key=lambda f: f.name) for file in split.files if file.whole]
    seen = Counter(tuple((f.name, f.dtype, split.open_shape(f)) for f in fields) for fields in files)
    return {name: (dtype, shape) for name, dtype, shape in seen.most_common(1)[0][0]} if seen else {}


def _dims(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"
