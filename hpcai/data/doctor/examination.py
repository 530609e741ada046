"""The check itself: each file once, in blocks, past the page cache; then what all files say together, and the rate of the disk."""

import hashlib
import math
import os
import random
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hpcai import log
from hpcai.data import layout
from hpcai.data.direct import ALIGN, Memory, Reader
from hpcai.data.doctor.findings import (
    ARRAY,
    INDEX,
    Bounds,
    Finding,
    Options,
    Outcome,
    Progress,
    Severity,
    StoppedError,
    Summary,
    divide,
    file_system,
    metadata_bound,
    present_stripes,
    stripe_hint,
)
from hpcai.data.doctor.inspector import Inspectors
from hpcai.data.doctor.manifest import SPLITS, Field, SetFile, Split, splits_in
from hpcai.data.doctor.tally import Tally
from hpcai.errors import DataError

BLOCK = 4 << 20
EXTRA = 0.05  # of the bytes of a row, read only for its place in the file, is worth a rewrite
_MOST_READ = 2 << 30


# ---- the check


def check(
    directory: Path, options: Options | None = None, *, progress: Callable[[Progress], None] | None = None,
    inspectors: Inspectors | None = None,
) -> Outcome:  # fmt: skip
    """Looks a data set over. Nothing is written.

    ``progress`` is called several times a second, by this thread. ``inspectors``, where given, are used and left open. Raises
    DataError when there is no such folder; whatever is wrong with what it holds is a finding.
    """
    began, options = time.monotonic(), options or Options()
    own = inspectors or Inspectors(options.threads, options.patience)
    try:
        with Work(options.threads, options.reader, own, progress) as work:
            return _Check(Path(directory), options, work).run(began)
    finally:
        if inspectors is None:
            own.close()


class Work:
    """Threads, a reader and child processes; all of it ends with the block, also by Ctrl-C."""

    def __init__(
        self, threads: int, reader: Callable[..., Reader], inspectors: Inspectors, progress: Callable[[Progress], None] | None
    ) -> None:
        self.inspectors, self.threads, self._progress = inspectors, threads, progress
        self.reader = reader("auto", threads=threads, block=BLOCK, memory=Memory(keep=4 * threads * BLOCK))
        self._pool, self._ahead = ThreadPoolExecutor(threads), ThreadPoolExecutor(threads)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._done = 0

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ahead.shutdown(cancel_futures=True)
        self.reader.close()

    def advance(self, count: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        with self._lock:
            self._done += count

    def each(self, act: Callable[[Any], Any], jobs: Sequence[Any], label: str, total: int, unit: str) -> None:
        """``act`` on every job by the threads; the first error is raised."""
        self._done, waiting, rest = 0, set[Future[Any]](), iter(jobs)
        try:
            while True:
                waiting |= {self._pool.submit(act, job) for job in islice(rest, 4 * self.threads - len(waiting))}
                done, waiting = wait_for(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                if self._progress is not None:
                    self._progress(Progress(label, self._done, total, unit))
                if not waiting and not done:
                    return
        except BaseException as problem:
            self._stop.set()
            if isinstance(problem, KeyboardInterrupt):
                self.inspectors.close()  # whoever waits for an answer shall not wait for long
            for future in waiting:
                future.cancel()
            wait_for(waiting)
            self._stop.clear()  # what ends the work may still hash
            raise

    def blocks(self, path: Path, ranges: Iterable[tuple[int, int]]) -> Iterator[np.ndarray]:
        """The bytes of each range; the next is read while one is looked at."""
        ahead: Future[np.ndarray] | None = None
        try:
            for start, stop in ranges:
                before, ahead = ahead, self._ahead.submit(self.reader.fetch, path, start, stop - start)
                if before is not None:
                    yield before.result()
            if ahead is not None:
                yield ahead.result()
        finally:
            if ahead is not None and not ahead.cancel():
                wait_for([ahead])

    def sha256(self, path: Path, size: int) -> str:
        digest = hashlib.sha256()
        for block in self.blocks(path, ((start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))):
            self.advance(block.size)
            digest.update(block.data)
        return digest.hexdigest()

    def describe(self, path: Path) -> list[Field]:
        """The datasets of a file. Raises DataError."""
        if path.name.endswith(".npy"):
            return [_npy(path)]
        with self.inspectors.one() as inspector:
            told = list(inspector.ask("describe", path=str(path)))
        return [Field(**{**words, "shape": tuple(words["shape"] or ()), "chunk": tuple(words.get("chunk", ()))}) for words in told]


def _npy(path: Path) -> Field:
    with path.open("rb") as file:
        head = file.read(12)
    if head[:6] != b"\x93NUMPY" or (head[6:7] > b"\x01" and int.from_bytes(head[8:12], "little") > 1 << 16):
        # The length would be believed before anything else is.
        raise DataError("not a .npy file: its first bytes are not those of one")
    try:
        found = layout.npy(path)
    except layout.UnreadableLayoutError as problem:
        return Field(ARRAY, (1,), "?", False, 1, "elsewhere", why=str(problem).removeprefix(f"{path}: "))
    except DataError as problem:
        raise DataError(str(problem).removeprefix(f"{path}: ")) from problem
    plain = found.dtype.kind in "biufc"
    dtype = found.dtype.str if plain else str(found.dtype)
    return Field(ARRAY, (1, *found.shape), dtype, plain, found.dtype.itemsize, "contiguous", found.offset)


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file: whole rows, a piece of one (``last``: its end), or bytes between datasets (no tally)."""

    start: int
    stop: int
    tally: Tally | None = None
    row: int = 0
    whole: bool = False
    last: bool = False


def _pieces(size: int, arrays: Sequence[tuple[Field, Tally]]) -> Iterator[_Piece]:
    """A file from its first to its last byte. The arrays do not overlap."""
    place = 0
    for data, tally in sorted(arrays, key=lambda a: a[0].offset or 0):
        assert data.offset is not None
        yield from (_Piece(at, min(at + BLOCK, data.offset)) for at in range(place, data.offset, BLOCK))
        if data.width > BLOCK:
            step = BLOCK // data.item * data.item or data.item
            for row in range(data.shape[0]):
                begin = data.offset + row * data.width
                end = begin + data.width
                yield from (_Piece(at, min(at + step, end), tally, row, False, at + step >= end) for at in range(begin, end, step))
        else:
            count = BLOCK // data.width
            for row in range(0, data.shape[0], count):
                stop = min(row + count, data.shape[0])
                yield _Piece(data.offset + row * data.width, data.offset + stop * data.width, tally, row, True)
        place = data.offset + data.shape[0] * data.width
    yield from (_Piece(at, min(at + BLOCK, size)) for at in range(place, size, BLOCK))


def _grouped(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Neighbours that are read at once, a block at most unless one piece is larger."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and piece.stop - group[0].start > BLOCK:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


class _Check:
    def __init__(self, directory: Path, options: Options, work: Work) -> None:
        self.directory, self.options, self.work = directory, options, work
        self._lock, self._findings = threading.Lock(), list[Finding]()
        self.splits: list[Split] = []

    def found(
        self, severity: Severity, code: str, path: Path, text: str, dataset: str | None = None, row: int | None = None,
        repairable: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            self._findings.append(Finding(severity, code, path, text, dataset, row, repairable))

    def run(self, began: float) -> Outcome:
        for each in splits_in(self.directory):
            if isinstance(each, Finding):
                self._findings.append(each)
            else:
                self.splits.append(each)
        files = [file for split in self.splits for file in split.files]
        full = not self.options.quick and self.options.sample is None
        for file in files:
            with suppress(OSError):
                file.size = file.path.stat().st_size
        total = sum(file.size for file in files) if full else len(files)
        self.work.each(self._look, files, "reading" if full else "headers", total, "bytes" if full else "files")
        if self.options.sample is not None:
            self._sample()
        for split in self.splits:
            self._schema(split)
        self._across()
        if not self.options.quick:
            self._duplicates([file for file in files if file.whole])
        summaries = [self._summary(split) for split in self.splits]
        figures = self._figures(files)
        figures["seconds"], figures["bytes_read"] = round(time.monotonic() - began, 3), self.work.reader.transferred
        order = {split.path: i for i, split in enumerate(self.splits)}
        rank = {"error": 0, "warning": 1, "note": 2}
        self._findings.sort(
            key=lambda f: (rank[f.severity], f.code, order.get(f.path.parent, 0), str(f.path), f.dataset or "", f.row or 0)
        )
        return Outcome(self.directory, self.options, tuple(self._findings), tuple(summaries), figures)

    # ---- one file

    def _look(self, file: SetFile) -> None:
        try:
            self._look_closely(file)
        except DataError as problem:
            self._unreadable(file, str(problem))
        except OSError as problem:
            self._unreadable(file, problem.strerror or str(problem))
        finally:
            if self.options.quick or self.options.sample is not None:
                self.work.advance(1)

    def _unreadable(self, file: SetFile, found: str) -> None:
        file.whole = False
        found = found.removeprefix(f"{file.path}: ")[:500]
        self.found("error", "unreadable", file.path, f"cannot be read: {found}; copy or make it again")

    def _look_closely(self, file: SetFile) -> None:
        before = file.path.stat()
        file.size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            raise DataError("is a folder, a pipe or a device, expected a file")
        if not self._right_size(file):
            return
        problem = ""
        try:
            file.fields = self.work.describe(file.path)
            file.whole = True
        except DataError as error:
            problem = str(error)
        self._rows(file)
        self._layouts(file)
        if not self.options.quick and self.options.sample is None:
            self._content(file)
        if problem:
            raise DataError(problem)
        after = file.path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            text = "was written to during the check, which may have seen half of it; repeat the check when nobody writes"
            self.found("warning", "changing", file.path, text)

    def _right_size(self, file: SetFile) -> bool:
        said = {entry.bytes for entry in (file.entry, file.later) if entry is not None and entry.bytes is not None}
        if not said or file.size in said:
            return True
        want = max(said)
        code, what = ("truncated", "is cut off") if file.size < want else ("overlong", "is too long")
        text = f"{what}: has {file.size:,} bytes, the manifest says {want:,}; copy it again from its source"
        self.found("error", code, file.path, text)
        return False

    def _rows(self, file: SetFile) -> None:
        """Rows per dataset against one another and against the index."""
        flat = file.flat
        arrays = [f for f in file.fields if f.kind != "scalar" and f.name not in flat]
        said = file.entry.rows if file.entry is not None else None
        for data in file.fields:
            many = file.entry.lengths.get(flat[data.name]) if file.entry is not None and data.name in flat else None
            if many is not None and data.shape[:1] != (many,):
                text = f"holds {_dims(data.shape[:1])} {flat[data.name]}, {INDEX} says {many:,}; make the file again"
                self.found("error", "rows", file.path, text, data.name)
        if file.path.name.endswith(".npy"):
            for data in arrays:
                if said is not None and said != 1 and data.shape[1:2] == (said,):
                    data.shape = data.shape[1:]  # the index counts dim 0 as rows
        counts = Counter(f.shape[0] for f in arrays)
        if not counts:
            if file.whole:
                self.found("error", "empty", file.path, "holds no dataset with rows; delete it, or make it again")
                file.whole = False
            file.rows = said or 0
            return
        most = max(counts.values())
        likely = [rows for rows, count in counts.items() if count == most]
        file.rows = said if said in likely else likely[0]
        for data in arrays:
            if data.shape[0] != file.rows:
                text = f"has {data.shape[0]:,} rows, expected {file.rows:,} as other datasets or the index have it; make it again"
                self.found("error", "rows", file.path, text, data.name)
        if said is not None and said not in counts:
            text = f"has {file.rows:,} rows, {INDEX} says {said:,}; compare the file with its source, or --repair the index"
            self.found("error", "rows", file.path, text, repairable=True)
        if not file.rows:
            self.found("error", "empty", file.path, "has 0 rows; delete it, or make it again")
        for data in arrays:
            if 0 in data.shape[1:]:
                text = f"has rows of ({_dims(data.shape[1:])}), which hold no value; make it again"
                self.found("error", "empty", file.path, text, data.name)

    def _layouts(self, file: SetFile) -> None:
        movable = not any(f.kind in ("elsewhere", "userblock") for f in file.fields) and not file.path.is_symlink()
        advice = "--repair writes it in one piece" if movable else "write it again in one piece"
        for data in file.fields:
            name, why = data.name, data.why
            if data.kind == "damaged":
                self.found("error", "unreadable", file.path, f"{why}; copy or make it again", name)
            elif data.kind == "filtered":
                packed = data.stored / max(math.prod(data.shape) * data.item, 1)
                text = f"{why} (they take {packed:.0%} of the room); each read unpacks a whole chunk of {data.chunk}; {advice}"
                self.found("warning", "compressed", file.path, text, name, repairable=movable)
            elif data.kind in ("compact", "userblock", "elsewhere"):
                unseen = ", which are not checked" if data.kind == "elsewhere" else ""
                text = f"{why}{unseen}; direct reads need values at one place of the file; {advice}"
                self.found("warning", "layout", file.path, text, name, repairable=movable and data.kind == "compact")
            elif data.kind == "objects":
                self.found("note", "layout", file.path, f"{why}; its values are not checked", name)
            elif data.kind == "chunked" and data.written and data.chunk[1:] != data.shape[1:]:
                pieces = math.prod(-(-n // c) for n, c in zip(data.shape[1:], data.chunk[1:]))
                text = f"lies in chunks of {data.chunk}, so that a row is {pieces} reads instead of one; {advice}"
                self.found("note", "chunked", file.path, text, name, repairable=movable)
            if data.unwritten:
                missing = data.grid - data.written
                text = (
                    f"{missing:,} of {data.grid:,} parts of {data.shape} were never written and read as the fill value; its maker "
                    "ended early: make it again"
                )
                self.found("error", "unwritten", file.path, text, name)
        largest = file.largest
        if largest is not None and largest.kind == "contiguous" and math.prod(largest.shape) * largest.item >= 1 << 16:
            now, best = largest.extra()
            if now > best + EXTRA:
                movable = movable and file.path.suffix == ".h5"
                text = (
                    f"begins at byte {largest.offset:,} and not on a page of {ALIGN}: direct reads of rows of "
                    f"{log.size(largest.width)} fetch {now:.0%} more than they need; {'--repair aligns' if movable else 'align'} it"
                )
                self.found("note", "unaligned", file.path, text, largest.name, repairable=movable)

    # ---- content

    def _bounds(self, file: SetFile, name: str) -> Bounds:
        want = file.split.wanted.get(name, {})
        return self.options.ranges.get(name, (want.get("low"), want.get("high")))

    def _tallied(self, file: SetFile) -> list[tuple[Field, Tally]]:
        """A tally for each dataset whose rows can be read; keys of rows of the largest."""
        largest, found = file.largest, []
        for data in file.fields:
            if data.readable and data.width and data.shape[0]:
                blank = file.split.wanted.get(data.name, {}).get("blank")
                tally = Tally(data.type, data.shape[1:], self._bounds(file, data.name), data is largest, blank)
                file.tallies[data.name] = tally
                found.append((data, tally))
        return found

    def _content(self, file: SetFile) -> None:
        tallied = self._tallied(file)
        arrays = [(data, tally) for data, tally in tallied if data.kind == "contiguous"]
        spans = sorted(((data.offset or 0), (data.offset or 0) + data.shape[0] * data.width, data.name) for data, _ in arrays)
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                text = f"lies over '{other}': one ends at byte {end:,}, the other begins at {start:,}; copy or make it again"
                self.found("error", "unreadable", file.path, text, name)
                arrays = []
        groups, ranges = iter(_grouped(_pieces(file.size, arrays))), _grouped(_pieces(file.size, arrays))
        digest = hashlib.sha256()
        for block in self.work.blocks(file.path, ((g[0].start, g[-1].stop) for g in ranges)):
            group = next(groups)
            self.work.advance(block.size)
            digest.update(block.data)
            for piece in group:
                part = block[piece.start - group[0].start : piece.stop - group[0].start]
                if piece.tally is None:
                    continue
                if piece.whole:
                    piece.tally.rows(piece.row, part)
                else:
                    piece.tally.piece(piece.row, part, piece.last)
        self._compare(file, digest.hexdigest())
        for data, tally in tallied:
            if data.kind != "contiguous":
                self._unpack(file, data, tally, None)
            self._judge(file, data, tally)

    def _compare(self, file: SetFile, found: str) -> None:
        said = file.entry.sha256 if file.entry is not None else None
        if file.later is not None and file.later.sha256 == found:
            file.verified = True
            return
        if said is None:
            return
        file.verified = said == found
        if not file.verified:
            text = (
                f"its SHA-256 is {found[:16]}..., the manifest says {said[:16]}...: bits were flipped, or it was written again; "
                f"copy it from its source, or if it is right as it is: --repair --accept {file.path.name}"
            )
            self.found("error", "bit-flip", file.path, text)

    def _unpack(self, file: SetFile, data: Field, tally: Tally, rows: list[int] | None) -> None:
        """The rows of a dataset that only the HDF5 library can read."""
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
            self.found("error", "unreadable", file.path, f"its values cannot be read: {problem}; copy or make it again", data.name)

    def _judge(self, file: SetFile, data: Field, tally: Tally) -> None:
        name = data.name
        if tally.bad.count:
            text = f"{tally.bad} of {file.rows:,} holds NaN or infinity, expected finite values; find why, or leave them out"
            self.found("error", "nan", file.path, text, name, tally.bad.rows[0])
        if tally.outside.count:
            text = (
                f"{tally.outside} of {file.rows:,} holds values such as {tally.outside.values[0]:g}, expected "
                f"{'any' if tally.low is None else f'{tally.low:g}'} to {'any' if tally.high is None else f'{tally.high:g}'}; "
                "correct the file, or the range"
            )
            self.found("error", "range", file.path, text, name, tally.outside.rows[0])
        if tally.constant.count and not data.unwritten and name not in file.flat:
            text = (
                f"{tally.constant} of {file.rows:,} holds nothing but {tally.constant.values[0]:g}, expected values that differ; "
                f"find why it is blank, or leave it out; where it may be, 'fields' of {INDEX} says so: \"blank\" and this value"
            )
            self.found("warning", "constant", file.path, text, name, tally.constant.rows[0])

    def _sample(self) -> None:
        chosen = random.Random(self.options.seed)
        jobs = []
        for split in self.splits:
            files = [file for file in split.files if file.whole and file.rows]
            ends = np.cumsum([file.rows for file in files]).tolist()
            if not ends:
                continue
            picks = sorted(chosen.sample(range(ends[-1]), min(self.options.sample or 0, ends[-1])))
            number = 0
            for pick in picks:
                while pick >= ends[number]:
                    number += 1
                file = files[number]
                file.picked = file.picked or []
                file.picked.append(pick - (ends[number - 1] if number else 0))
            jobs += [file for file in files if file.picked]
        self.work.each(self._rows_of, jobs, "sampled rows", sum(len(file.picked or ()) for file in jobs), "rows")

    def _rows_of(self, file: SetFile) -> None:
        assert file.picked is not None
        try:
            for data, tally in self._tallied(file):
                rows = [row for row in file.picked if row < data.shape[0]]
                if data.kind != "contiguous":
                    self._unpack(file, data, tally, rows)
                else:
                    pieces = [piece for row in rows for piece in self._row_pieces(data, row)]
                    blocks = self.work.blocks(file.path, ((piece.start, piece.stop) for piece in pieces))
                    for piece, block in zip(pieces, blocks):
                        self.work.advance(0)
                        tally.piece(piece.row, block, piece.last)
                self._judge(file, data, tally)
        except DataError as problem:
            self._unreadable(file, str(problem))
        self.work.advance(len(file.picked))

    @staticmethod
    def _row_pieces(data: Field, row: int) -> Iterator[_Piece]:
        begin = (data.offset or 0) + row * data.width
        step = BLOCK // data.item * data.item or data.item
        for at in range(begin, begin + data.width, step):
            stop = min(at + step, begin + data.width)
            yield _Piece(at, stop, None, row, False, stop == begin + data.width)

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
            usual = next((kind for kind in likely if kind and want and self._fits(kind, want)), likely[0])
            have = f"as {most:,} of {len(files):,} files have it"
            for file, data, kind in zip(files, each, kinds):
                if data is None and usual is not None:
                    text = f"is not in this file; expected {usual[0]} (rows, {_dims(usual[1])}), {have}; make it again"
                    self.found("error", "schema", file.path, text, name)
                elif data is not None and usual is None:
                    text = f"is in this file and not in {most:,} of {len(files):,} files; delete it there, or make the others again"
                    self.found("error", "schema", file.path, text, name)
                elif data is not None and kind is not None and usual is not None:
                    if data.dtype != usual[0]:
                        text = f"is {data.dtype}, expected {usual[0]}, {have}; make it again"
                        self.found("error", "dtype", file.path, text, name)
                    if kind[1] != usual[1] or (data.kind == "scalar") != usual[2]:
                        text = f"has rows of ({_dims(data.shape[1:])}), expected ({_dims(usual[1])}), {have}; make it again"
                        self.found("error", "shape", file.path, text, name)
                    if kind == usual:
                        self._against_index(file, data, want)
        for name in split.wanted.keys() - names.keys() if files else ():
            text = f"'fields' names dataset '{name}', which no file has; correct it by hand, or make the files again"
            self.found("error", "schema", split.path / INDEX, text, name)

    @staticmethod
    def _fits(kind: tuple[str, tuple[int | None, ...], bool], want: Mapping[str, Any]) -> bool:
        return ("dtype" not in want or want["dtype"].str == kind[0]) and ("shape" not in want or want["shape"] == kind[1])

    def _against_index(self, file: SetFile, data: Field, want: Mapping[str, Any]) -> None:
        if "dtype" in want and data.plain and want["dtype"] != np.dtype(data.dtype):
            text = f"is {data.dtype}, 'fields' of {INDEX} says {want['dtype'].str}; correct one of them"
            self.found("error", "dtype", file.path, text, data.name)
        if "shape" in want and want["shape"] != file.split.open_shape(data):
            text = f"has rows of ({_dims(data.shape[1:])}), 'fields' of {INDEX} says ({_dims(want['shape'])}); correct one of them"
            self.found("error", "shape", file.path, text, data.name)

    def _across(self) -> None:
        """A split whose datasets are others than those of the first. What lies beside train/ may hold something else."""
        named = [split for split in self.splits if split.name in SPLITS]
        kinds = [(split, self._usual(split)) for split in named or self.splits]
        kinds = [(split, kind) for split, kind in kinds if kind]
        for split, kind in kinds[1:]:
            first, usual = kinds[0]
            for name in sorted(kind.keys() ^ usual.keys()):
                one, other = (split, first) if name in kind else (first, split)
                text = f"'{name}' is in {one.name} and not in {other.name}; make both splits alike, or leave it out of both"
                self.found("warning", "schema", split.path, text, name)
            for name in sorted(kind.keys() & usual.keys()):
                for code, here, there in zip(("dtype", "shape"), kind[name], usual[name]):
                    if here != there:
                        mine, theirs = (f"({_dims(each)})" if isinstance(each, tuple) else each for each in (here, there))
                        text = f"'{name}' has a {code} of {mine}, that of {first.name} is {theirs}; make both alike"
                        self.found("warning", code, split.path, text, name)

    @staticmethod
    def _usual(split: Split) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        seen = Counter(tuple((f.name, f.dtype, split.open_shape(f)) for f in sorted(file.fields, key=lambda f: f.name))
                       for file in split.files if file.whole)  # fmt: skip
        return {name: (dtype, shape) for name, dtype, shape in seen.most_common(1)[0][0]} if seen else {}

    def _duplicates(self, files: list[SetFile]) -> None:
        """Rows of the largest field that are there twice: candidates by their keys, then by digests of all their bytes."""
        keyed = [(number, tally.keys) for number, file in enumerate(files) for tally in file.tallies.values() if tally.keys]
        if not keyed:
            return
        keys = np.concatenate([np.frombuffer(k, np.uint64) for _, k in keyed])
        owner = np.concatenate([np.full(len(k), number, np.int64) for number, k in keyed])
        row = np.concatenate([np.asarray((files[n].picked or range(len(k)))[: len(k)]) for n, k in keyed])
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        twin = np.zeros(len(keys) + 1, bool)
        twin[1:-1] = (keys[1:] == keys[:-1]) & (keys[1:] != 0)  # 0: a constant row, which is reported as such
        suspects = order[twin[1:] | twin[:-1]]
        if not suspects.size:
            return
        rows_of: dict[int, list[int]] = {}
        for number, r in zip(owner[suspects].tolist(), row[suspects].tolist()):
            rows_of.setdefault(number, []).append(r)
        places: dict[str, list[tuple[int, int]]] = {}

        def digest(number: int) -> None:
            rows = sorted(rows_of[number])
            try:
                found = self._row_digests(files[number], rows)
            except DataError as problem:
                self._unreadable(files[number], str(problem))
                return
            with self._lock:
                for r, key in zip(rows, found):
                    places.setdefault(key, []).append((number, r))

        total = sum(map(len, rows_of.values()))
        self.work.each(digest, sorted(rows_of), "rows that look alike", total, "rows")
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for same in places.values():
            same.sort()
            firsts: dict[str, tuple[int, int]] = {}  # of each split, in their order
            for number, r in same:
                split = files[number].split.name
                other = next((place for name, place in firsts.items() if name != split), firsts.get(split))
                if other is not None:
                    pairs.setdefault((other[0], number), []).append((other[1], r))
                firsts.setdefault(split, (number, r))
        for (a, b), rows in pairs.items():
            self._twins(files[a], files[b], sorted(rows, key=lambda pair: pair[1]))

    def _twins(self, one: SetFile, other: SetFile, rows: list[tuple[int, int]]) -> None:
        there, here = rows[0]
        more = f", and {len(rows) - 1:,} more rows of these two" if len(rows) > 1 else ""
        place = f"{one.split.name}/{one.path.name} row {there}"
        name = other.largest.name if other.largest else None
        if one.split is other.split:
            text = f"row {here} is the same sample as {place}{more}; it counts twice in every epoch: drop one of them"
            self.found("warning", "duplicate", other.path, text, name, here)
        else:
            text = f"row {here} is the same sample as {place}{more}; what was learnt by heart passes for skill: drop one"
            self.found("error", "leak", other.path, text, name, here)

    def _row_digests(self, file: SetFile, rows: list[int]) -> list[str]:
        data = file.largest
        assert data is not None
        if data.kind != "contiguous":
            with self.work.inspectors.one() as inspector:
                found = [key for key in inspector.ask("digests", path=str(file.path), name=data.name, rows=rows) if key]
            self.work.advance(len(rows))
            return found
        found, digest = [], hashlib.blake2b(digest_size=16)
        pieces = [piece for row in rows for piece in self._row_pieces(data, row)]
        for piece, block in zip(pieces, self.work.blocks(file.path, ((p.start, p.stop) for p in pieces))):
            digest.update(block.data)
            if piece.last:
                found.append(digest.hexdigest())
                digest = hashlib.blake2b(digest_size=16)
                self.work.advance(1)
        return found

    # ---- splits and the whole

    def _summary(self, split: Split) -> Summary:
        samples = sum(file.rows if file.whole or not file.entry else file.entry.rows or 0 for file in split.files)
        division = None
        if self.options.batch is not None or self.options.world is not None:
            world = self.options.world or 1
            division = divide(samples, self.options.batch or world, world)
            for severity, code, text in division.problems:
                self.found(severity, code, split.path, text)
        begins = even = 0.0
        for file in split.files:
            data = file.largest
            if data is None or not file.whole:
                continue
            if data.kind == "contiguous" and data.offset is not None:
                place = (data.offset % ALIGN + np.arange(data.shape[0], dtype=np.int64) % ALIGN * (data.width % ALIGN)) % ALIGN
                even += int(np.count_nonzero(place == 0))
            elif data.aligned is not None:
                even += data.aligned * data.shape[0]
            begins += data.shape[0]
        fields = {name: f"{dtype} ({_dims(shape)})" for name, (dtype, shape) in self._usual(split).items()}
        size = sum(file.size for file in split.files)
        verified = sum(file.verified for file in split.files)
        aligned = even / begins if begins else None
        return Summary(split.name, len(split.files), samples, size, verified, fields, aligned, division)

    def _figures(self, files: list[SetFile]) -> dict[str, Any]:
        size, inodes = sum(file.size for file in files), 1
        for _, folders, names in os.walk(self.directory):
            inodes += len(folders) + len(names)
        kind = file_system(self.directory, self.options.mounts)
        figures: dict[str, Any] = {
            "files": len(files), "bytes": size, "inodes": inodes, "file_system": kind,
            "bytes_per_file": size // len(files) if files else 0,
        }  # fmt: skip
        if files and (finding := metadata_bound(self.directory, len(files), size)) is not None:
            self._findings.append(finding)
        for split in self.splits:
            if split.files:
                largest = max(split.files, key=lambda file: file.size)
                present = present_stripes(largest.path) if kind == "lustre" else None
                hint = stripe_hint(kind, split.path, [file.size for file in split.files], present)
                if hint is not None:
                    self._findings.append(hint)
        if self.options.seconds > 0:
            figures["rate"] = self._rate()
        return figures

    def _rate(self) -> dict[str, Any] | None:
        """How fast random rows of the largest split come from the disk, beside what the training needs."""
        rows = max((_sources(split) for split in self.splits), key=lambda s: s.bytes, default=None)
        if rows is None or not rows.count:
            return None
        found: dict[str, Any] = {"bytes_per_sample": round(rows.bytes / rows.count), "threads": max(8, self.options.threads)}
        best = 0.0
        for mode in ("direct", "buffered"):
            try:
                with self.options.reader(mode, threads=found["threads"]) as reader:
                    found[mode] = _measured(rows, reader, self.options.seconds, self.options.seed)
                best = max(best, found[mode]["samples_per_s"])
            except DataError as problem:
                found[mode] = {"problem": str(problem)}
        if self.options.step_time is None or self.options.batch is None:
            return found
        need = self.options.batch / self.options.step_time / self.options.nodes
        gigabytes = found["bytes_per_sample"] / 1e9
        found["needed_per_node"] = {"samples_per_s": need, "gb_per_s": need * gigabytes}
        if best < need:
            text = (
                f"random rows come at {best:,.1f} samples/s ({best * gigabytes:.3g} GB/s), but {self.options.batch} samples per "
                f"{self.options.step_time:g} s need {need:,.1f} samples/s ({need * gigabytes:.3g} GB/s) on each "
                f"node ({self.options.nodes}); the GPUs will wait: copy to local disks (hpcai data stage), read with more threads, "
                "or make samples smaller"
            )
            self.found("error", "rate", self.directory, text)
        return found


def _dims(shape: Sequence[int | None]) -> str:
    return ", ".join("any" if length is None else str(length) for length in shape)


# ---- the rate


@dataclass
class _Sources:
    """All rows of a split: for each file the number of the rows before its end, and where rows lie."""

    files: list[SetFile]
    ends: list[int]
    bytes: int

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0

    def ranges(self, number: int, chance: random.Random) -> list[tuple[Path, int, int]]:
        index = int(np.searchsorted(self.ends, number, side="right"))
        file, row = self.files[index], number - (self.ends[index - 1] if index else 0)
        plain = [f for f in file.fields if f.kind == "contiguous" and f.width and f.name not in file.flat]
        found = [(file.path, (f.offset or 0) + row * f.width, f.width) for f in plain]
        if len(found) == sum(f.kind != "scalar" for f in file.fields):
            return found
        length = max(file.size // max(file.rows, 1), 1)  # of packed rows as much as they take, wherever
        return [(file.path, chance.randrange(max(file.size - length, 0) + 1), length)]


def _sources(split: Split) -> _Sources:
    files = [file for file in split.files if file.whole and file.rows and all(
        f.kind == "scalar" or f.name in file.flat or f.shape[0] == file.rows for f in file.fields)]  # fmt: skip
    size = 0
    for file in files:
        plain = all(f.kind in ("contiguous", "scalar") for f in file.fields) and not file.flat
        size += sum(f.width * file.rows for f in file.fields if f.kind == "contiguous") if plain else file.size
    return _Sources(files, np.cumsum([file.rows for file in files]).tolist(), size)


def _measured(rows: _Sources, reader: Reader, seconds: float, seed: int) -> dict[str, Any]:
    """Random rows, many at once, for a time or 2 GiB; a file leaves the page cache before its first row is read."""
    chance, spent, size, count = random.Random(seed), 0.0, 0, 0
    group = max(1, min(16, BLOCK * 8 // max(rows.bytes // rows.count, 1)))
    while spent < seconds and size < _MOST_READ:
        order = iter(chance.sample(range(rows.count), min(rows.count, 100_000)))
        evicted: set[Path] = set()
        while spent < seconds and size < _MOST_READ:
            part = [ranges for _, ranges in zip(range(group), (rows.ranges(n, chance) for n in order))]
            if not part:
                break
            for path in {path for ranges in part for path, _, _ in ranges} - evicted:
                _evict(path)
                evicted.add(path)
            began = time.perf_counter()
            reader.fetch_all([each for ranges in part for each in ranges])
            took = time.perf_counter() - began
            spent += took
            count += len(part)
            size += sum(length for ranges in part for _, _, length in ranges)
            mean = max(size // count, 1)
            group = max(1, min(int(group * min(0.2 / max(took, 1e-6), 2)), 256, (64 << 20) // mean))
    spent = max(spent, 1e-9)
    return {"gb_per_s": size / spent / 1e9, "samples_per_s": count / spent, "bytes": size, "seconds": spent}


def _evict(path: Path) -> None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(handle)  # a page that is not on the disk yet stays
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
