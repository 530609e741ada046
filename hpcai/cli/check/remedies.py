"""What ``--repair`` puts right: faults that have one right answer.

    a file whose values lie packed, in chunks or off the pages   written in one piece, aligned; its values are compared bit for bit
    index.json that is not there, or is no JSON                  made from the files; one that its record contradicts stays wrong
    rows that index.json miscounts of a file with its SHA-256    counted
    the table of index.json, where it is not of these files      written anew, as it is whenever the index changes
    a repair that was stopped                                    its copy takes its place, where it has the SHA-256 of index.json

People decide which of two samples is too many, what a value should have been, and whether a file belongs to the set.
"""

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcai import log
from hpcai.cli.check.child import SPARE
from hpcai.cli.check.findings import Finding, Outcome
from hpcai.cli.check.manifest import Field, SetFile, Split, json_of, record_of, splits_in
from hpcai.cli.check.work import Work
from hpcai.cli.progress import Progress
from hpcai.data.index import INDEX, settle, write_index, write_json
from hpcai.durable import flush
from hpcai.errors import DataError

_UNFIT = ("index", "missing", "truncated", "overlong", "bit-flip", "unreadable", "rows", "empty")
_LAYOUTS = ("compressed", "chunked", "layout", "unaligned")


def repair(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Puts right what ``outcome`` calls repairable, and says what was done and what was refused, a line each.

    A file is replaced in one act, after its copy was compared with it; index and record follow. One whose SHA-256 is not that of
    its manifest is left alone. Raises DataError when the disk has no room.
    """
    with Work(outcome.options.threads, progress) as work:
        return _Repair(Path(directory), outcome, work).run()


def tabulate(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Writes the table of every index that has HDF5 files alone, and says what was done and what was refused, a line each: a split
    in which a file is not whole keeps what it has."""
    with Work(outcome.options.threads, progress) as work:
        one = _Repair(Path(directory), outcome, work)
        for split in splits_in(one.directory)[0]:
            path, wrong = split.path / INDEX, one.unfit(split)
            if split.index is None:
                one.say(path, "refused: no table without an index; make it with --repair")
            elif wrong:
                one.say(path, f"refused: no table while files are not as the index says ({wrong[0].path.name}: {wrong[0].text})")
            elif one.table(split):
                one.say(path, f"has a table of {len(split.files):,} files now")
            else:
                one.say(path, "refused: a table is of HDF5 files alone")
        return one.said


class _Repair:
    def __init__(self, directory: Path, outcome: Outcome, work: Work) -> None:
        self.directory, self.work = directory, work
        self.said: list[str] = []
        self._lock, self._changed = threading.Lock(), set[Path]()
        self._findings = outcome.findings
        self._wanted = {(f.code, f.path) for f in outcome.findings if f.repairable}

    def say(self, path: Path, text: str) -> None:
        self.said.append(f"{path}: {text}")

    def run(self) -> list[str]:
        files = [file for split in splits_in(self.directory)[0] for file in split.files]
        for file in files:
            partial = _partial(file.path)
            if ("leftover", partial) in self._wanted:
                self._resume(file, partial)
        rewrites = [file for file in files if any((code, file.path) in self._wanted for code in _LAYOUTS)]
        if rewrites:
            self._room(rewrites)
            self.work.each(self._rewrite, rewrites, "rewriting", 3 * sum(file.size for file in rewrites), "bytes")
        for split in splits_in(self.directory)[0]:
            if split.index is None and split.files:
                self._index(split)
            for file in split.files:
                if ("rows", file.path) in self._wanted:
                    self._note(file, {"rows": _rows(self.work.describe(file.path))})
                    self.say(file.path, f"its rows are counted in {INDEX}")
            places = [("index", split.path / INDEX), *(("table", file.path) for file in split.files)]
            if split.index is not None and self._wanted & {*places} and not self.unfit(split) and self.table(split):
                self.say(split.path / INDEX, "its table is written anew")
        for split in splits_in(self.directory)[0]:
            if split.path in self._changed:
                self.table(split)
        return self.said

    def unfit(self, split: Split) -> list[Finding]:
        """What keeps a split from having a table: its index is wrong, or files are not as it says."""
        found = (f for f in self._findings if f.severity == "error" and split.path in (f.path, f.path.parent))
        return [f for f in found if f.code in _UNFIT and (f.code != "index" or not f.repairable)]

    def table(self, split: Split) -> bool:
        """Writes the table of an index; False where it has none."""
        told: dict[Path, dict[str, Any] | None] = {}

        def describe(file: SetFile) -> None:
            told[file.path] = self.work.tabled(file.path, file.entry.rows or 0)
            self.work.advance(1)

        files = [file for file in split.files if file.path.name in split.entries]
        self.work.each(describe, files, "tables", len(files), "files")
        write_index(split.path, split.index or {}, lambda path, rows: told.get(path))
        self._changed.discard(split.path)
        return "table" in json_of(split.path / INDEX)

    def _resume(self, file: SetFile, partial: Path) -> None:
        """A copy that the index already tells of takes the place of its source."""
        if self.work.hashed(partial) == file.entry.sha256:
            settle(partial, file.path)
            self._renew_record(file.path, {"bytes": file.entry.bytes, "sha256": file.entry.sha256})
            self.say(file.path, f"replaced by its copy, which has the SHA-256 of {INDEX}")

    def _entry(self, path: Path) -> dict[str, Any]:
        return {"rows": _rows(self.work.describe(path)), "bytes": path.stat().st_size, "sha256": self.work.hashed(path)}

    def _trust(self, file: SetFile) -> None:
        """Raises DataError for a file that is not what its manifest says."""
        entry, size = file.entry, file.path.stat().st_size
        if entry.bytes is not None and entry.bytes != size:
            raise DataError(f"has {size:,} bytes, the manifest says {entry.bytes:,}; copy it from its source")
        if entry.sha256 and self.work.hashed(file.path) != entry.sha256:
            raise DataError("its SHA-256 is not that of the manifest; copy it from its source")

    # ---- one file

    def _room(self, files: list[SetFile]) -> None:
        sizes = []
        for file in files:
            file.size = file.path.stat().st_size
            with suppress(DataError):  # the rewrite will say it
                file.fields = self.work.describe(file.path)
            sizes.append(max(sum(field.nbytes for field in file.fields) + SPARE, file.size))
        need = sum(sizes) - sum(file.size for file in files) + max(sizes) * min(self.work.threads, len(files))
        if need > (free := shutil.disk_usage(self.directory).free):
            raise DataError(
                f"{self.directory}: to rewrite {len(files)} files needs {log.size(need)}, but {log.size(free)} are free; make "
                "room, or copy it to a larger disk and repair it there"
            )

    def _rewrite(self, file: SetFile) -> None:
        path, partial = file.path, _partial(file.path)
        try:
            self._trust(file)
            before = path.stat()
            with self.work.inspectors.one() as inspector:
                for count in inspector.ask("copy", source=str(path), target=str(partial)):
                    self.work.advance(count)
            flush(partial)
            told = self._entry(partial)
            shutil.copymode(path, partial)
            with suppress(OSError):
                os.chown(partial, -1, before.st_gid)
            if (now := path.stat()).st_mtime_ns != before.st_mtime_ns or now.st_size != before.st_size:
                raise DataError("it was written to meanwhile; repeat when nobody writes")
            was = self._note(file, told)  # first, so that a stop between the two leaves a copy that is known to be right
            try:
                settle(partial, path)
            except OSError:
                self._note(file, was)
                raise
            self._renew_record(path, told)
            self.say(path, f"rewritten in one piece, aligned: {log.size(before.st_size)} became {log.size(path.stat().st_size)}")
        except (DataError, OSError) as error:
            self.say(path, f"refused: not rewritten: {error}")
        finally:
            partial.unlink(missing_ok=True)

    # ---- index and records

    def _note(self, file: SetFile, told: Mapping[str, Any]) -> dict[str, Any]:
        """The index says ``told`` of a file, if it names it; returns what it said before."""
        index = file.split.index or {"files": []}
        with self._lock:
            for entry in index["files"]:
                if isinstance(entry, dict) and entry.get("name") == file.path.name:
                    was = dict(entry)
                    entry.update(told)
                    write_index(file.split.path, index, table=False)
                    self._changed.add(file.split.path)
                    return was
        return {}

    def _renew_record(self, path: Path, told: Mapping[str, Any]) -> None:
        record = record_of(path)
        try:
            write_json(record, json_of(record) | told)
            self.say(record, "renewed")
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as problem:
            self.say(record, f"refused: cannot be read ({problem}); correct it by hand")

    def _index(self, split: Split) -> None:
        """Makes the index from the files. Those that their record contradicts are entered as it says, so that they stay wrong."""
        entries: dict[str, dict[str, Any]] = {}

        def enter(file: SetFile) -> None:
            entry: dict[str, Any] = {"name": file.path.name}
            try:
                self._trust(file)
                entries[file.path.name] = entry | self._entry(file.path)
            except (DataError, OSError) as problem:
                self.say(file.path, f"refused: not entered into {INDEX}: {problem}")
                if told := {key: value for key, value in asdict(file.entry).items() if value}:
                    entries[file.path.name] = entry | told

        self.work.each(enter, split.files, "hashing", 2 * sum(file.path.stat().st_size for file in split.files), "bytes")
        path = split.path / INDEX
        if path.exists():
            path.replace(path.with_name(f"{INDEX}.damaged"))
            self.say(path, f"damaged; kept as {INDEX}.damaged")
        write_index(split.path, {"files": [entries[name] for name in sorted(entries)]}, table=False)
        self._changed.add(split.path)
        self.say(path, f"made from {len(entries)} files")


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _rows(fields: list[Field]) -> int:
    counts = sorted({field.shape[0] for field in fields if field.kind != "scalar"})
    if len(counts) != 1:
        raise DataError(f"its datasets have different numbers of rows: {counts}" if counts else "holds no dataset with rows")
    return counts[0]
