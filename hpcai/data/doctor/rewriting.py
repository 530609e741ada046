"""Rewrites what can be rewritten; what may be corrupt is left alone."""

import json
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcai import log
from hpcai.data.doctor.child import _SPARE
from hpcai.data.doctor.examination import Work
from hpcai.data.doctor.findings import ARRAY, INDEX, JOURNAL, Outcome, Progress
from hpcai.data.doctor.inspector import Inspectors
from hpcai.data.doctor.manifest import Field, SetFile, Split, entry_in, json_of, splits_in
from hpcai.durable import flush
from hpcai.errors import DataError

_YOUNG = 60.0  # seconds: a partial file that was written to since may belong to a process at work


# ---- repair


def repair(
    directory: Path, outcome: Outcome, accept: Collection[str] = (), *, progress: Callable[[Progress], None] | None = None,
    inspectors: Inspectors | None = None,
) -> list[str]:  # fmt: skip
    """Rewrites what ``outcome`` calls repairable, and says what was done and what was refused, a line each.

    HDF5 files become contiguous and aligned, with all else bit for bit as it was; the index and the records follow; leftovers go.
    A file is replaced in one act, after its copy was compared with it. One whose SHA-256 is not that of its manifest is left
    alone, unless ``accept`` holds its name, SPLIT/NAME or "all": then the manifest follows the file. Raises DataError when the
    disk has no room, or ``accept`` names a file that is not there.
    """
    own = inspectors or Inspectors(outcome.options.threads, outcome.options.patience)
    try:
        with Work(outcome.options.threads, outcome.options.reader, own, progress) as work:
            return _Repair(Path(directory), outcome, frozenset(accept), work).run()
    finally:
        if inspectors is None:
            own.close()


class _Repair:
    def __init__(self, directory: Path, outcome: Outcome, accept: frozenset[str], work: Work) -> None:
        self.directory, self.outcome, self.work, self.accept = directory, outcome, work, accept
        self.splits = [each for each in splits_in(directory) if isinstance(each, Split)]
        self.said: list[str] = []
        self._lock = threading.Lock()
        self._renewed: dict[Path, dict[str, Any]] = {}
        known = {name for split in self.splits for name in split.entries} | {f.path.name for s in self.splits for f in s.files}
        for name in accept - {"all"}:
            if name.rpartition("/")[2] not in known:
                raise DataError(f"--accept {name}: {directory} has no such file; name it as the findings do, or 'all'")

    def accepted(self, path: Path) -> bool:
        return bool({"all", path.name, f"{path.parent.name}/{path.name}"} & self.accept)

    def say(self, path: Path, text: str) -> None:
        with self._lock:
            self.said.append(f"{path}: {text}")

    def run(self) -> list[str]:
        codes = ("compressed", "chunked", "layout", "unaligned")
        wanted = {finding.path for finding in self.outcome.findings if finding.repairable and finding.code in codes}
        files = [file for split in self.splits for file in split.files]
        rewrites = [file for file in files if file.path in wanted]
        try:
            if rewrites:
                self._room(rewrites)
                self.work.each(self._rewrite, rewrites, "rewriting", 3 * sum(file.size for file in rewrites), "bytes")
        finally:
            for split in self.splits:  # also after Ctrl-C, for what was done until then
                if split.index is not None and (split.journal or any(path.parent == split.path for path in self._renewed)):
                    self._write_index(split, {})
        for split in self.splits:
            self._index(split)
        self._remove_leftovers()
        return self.said

    def _room(self, files: list[SetFile]) -> None:
        more = largest = 0
        for file in files:
            file.size = file.path.stat().st_size
            with suppress(DataError):  # the rewrite will say it
                file.fields = self.work.describe(file.path)
            new = max(sum(math.prod(f.shape) * f.item for f in file.fields) + _SPARE, file.size)
            more, largest = more + new - file.size, max(largest, new)
        need, free = more + largest * min(self.work.threads, len(files)), shutil.disk_usage(self.directory).free
        if need > free:
            raise DataError(
                f"{self.directory}: to rewrite {len(files)} files needs {log.size(need)}, but {log.size(free)} are free; make "
                "room, or copy it to a larger disk and repair it there"
            )

    # ---- one file

    def _rewrite(self, file: SetFile) -> None:
        path = file.path
        if path.is_symlink():
            self.say(path, "refused: it is a link; repair the folder that it leads to")
            return
        try:
            problem = self._distrust(file)
        except (DataError, OSError) as error:
            problem = f"cannot be read: {error}"
        if problem:
            self.say(path, f"refused: {problem}")
            return
        partial = path.with_name(f".{path.name}.partial")
        try:
            before = path.stat()
            with self.work.inspectors.one() as inspector:
                for count in inspector.ask("rewrite", source=str(path), target=str(partial)):
                    self.work.advance(count)
            flush(partial)
            rows = self._counted(self.work.describe(partial), None)
            size = partial.stat().st_size
            entry = {"name": path.name, "rows": rows, "bytes": size, "sha256": self.work.sha256(partial, size)}
            shutil.copymode(path, partial)
            with suppress(OSError):
                os.chown(partial, -1, before.st_gid)
            if (now := path.stat()).st_mtime_ns != before.st_mtime_ns or now.st_size != before.st_size:
                raise DataError("it was written to meanwhile; repeat when nobody writes")
            with self._lock:
                if file.split.index is not None:
                    with (path.parent / JOURNAL).open("ab") as journal:
                        journal.write(json.dumps(entry).encode() + b"\n")
                        journal.flush()
                        os.fsync(journal.fileno())
                partial.replace(path)
                self._renewed[path] = entry
            flush(path.parent)
            self._renew_record(path, entry)
            self.say(path, f"rewritten in one piece, aligned: {log.size(before.st_size)} became {log.size(size)}")
        except (DataError, OSError) as error:
            self.say(path, f"refused: not rewritten: {error}")
        finally:
            partial.unlink(missing_ok=True)

    def _distrust(self, file: SetFile) -> str:
        """Why a file is not what its manifest says, or nothing. Where that is accepted, the index will follow the file."""
        file.size = file.path.stat().st_size
        entries = [entry for entry in (file.entry, file.later) if entry is not None]
        if not entries or self.accepted(file.path):
            return ""
        if not any(entry.bytes in (None, file.size) for entry in entries):
            said_bytes = f"{file.size:,} bytes, the manifest says {entries[0].bytes:,}"
            return f"has {said_bytes}; copy it from its source, or --accept {file.path.name}"
        said = {entry.sha256 for entry in entries if entry.sha256}
        if said and self.work.sha256(file.path, file.size) not in said:
            return f"its SHA-256 is not that of the manifest; copy it from its source, or --accept {file.path.name}"
        return ""

    @staticmethod
    def _counted(fields: list[Field], said: int | None) -> int:
        counts = Counter(f.shape[0] for f in fields if f.kind != "scalar")
        if not counts:
            raise DataError("holds no dataset with rows")
        if len(counts) > 1:
            raise DataError(f"its datasets have different numbers of rows: {sorted(counts)}")
        rows = next(iter(counts))
        if fields[0].name == ARRAY and rows == 1 and said is not None and fields[0].shape[1:2] == (said,):
            return said
        return rows

    def _renew_record(self, path: Path, entry: Mapping[str, Any]) -> None:
        record = path.parent / ".records" / f"{path.name}.json"
        try:
            content = json_of(record)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as problem:
            self.say(record, f"refused: cannot be read ({problem}); correct it by hand")
            return
        renewed = {key: entry[key] for key in ("bytes", "sha256", "rows") if key in content or key != "rows"}
        if isinstance(content, dict) and content != content | renewed:
            _write_json(record, content | renewed)
            self.say(record, "renewed")

    # ---- the index

    def _index(self, split: Split) -> None:
        """Entries for files that have none, and for those that are accepted as they are."""
        broken = any(f.path == split.path / INDEX and f.code == "index" and f.repairable for f in self.outcome.findings)
        rows = {finding.path for finding in self.outcome.findings if finding.code == "rows" and finding.repairable}
        wrong = {f.path for f in self.outcome.findings if f.code in ("bit-flip", "truncated", "overlong")}
        todo = [file for file in split.files if file.path not in self._renewed and (
            split.index is None or file.path.name not in split.entries or file.path in rows
            or (file.path in wrong and self.accepted(file.path)))]  # fmt: skip
        gone = [name for name in split.entries if not (split.path / name).exists() and self.accepted(split.path / name)]
        if not split.files or not (todo or gone or broken):
            return
        fresh: dict[str, dict[str, Any] | None] = dict.fromkeys(gone)

        def enter(file: SetFile) -> None:
            name = file.path.name
            try:
                if problem := self._distrust(file):
                    raise DataError(problem)
                rows = self._counted(self.work.describe(file.path), file.entry.rows if file.entry else None)
                entry = {"name": name, "rows": rows, "bytes": file.size, "sha256": self.work.sha256(file.path, file.size)}
            except (DataError, OSError) as problem:
                self.say(file.path, f"refused: not entered into {INDEX}: {problem}")
                if split.index is None and file.entry is not None:  # what its record says, so that it stays wrong
                    fresh[name] = {"name": name} | {k: v for k, v in asdict(file.entry).items() if v is not None}
                return
            fresh[name] = entry
            self._renew_record(file.path, entry)

        self.work.each(enter, todo, "hashing", sum(file.size for file in todo), "bytes")
        for name in gone:
            self.say(split.path / name, f"is missing, and dropped from {INDEX}")
        self._write_index(split, fresh)

    def _write_index(self, split: Split, fresh: Mapping[str, dict[str, Any] | None]) -> None:
        """The index with entries renewed, added or (None) dropped; all else as it was, the journal done with."""
        path, before = split.path / INDEX, split.index
        entries: dict[str, dict[str, Any]] = {}
        for told in before["files"] if before else ():
            with suppress(ValueError):
                entries.setdefault(entry_in(told)[0], told)
        was, known = list(entries.values()), list(entries)
        renewed: dict[str, dict[str, Any] | None] = {p.name: entry for p, entry in self._renewed.items() if p.parent == split.path}
        for file in split.files:
            if file.later is not None and file.path.name not in renewed:
                size = file.path.stat().st_size
                if size == file.later.bytes and self.work.sha256(file.path, size) == file.later.sha256:
                    renewed[file.path.name] = {"name": file.path.name, **asdict(file.later)}
                    self._renew_record(file.path, asdict(file.later))
        for name, entry in {**renewed, **fresh}.items():
            if entry is None:
                entries.pop(name, None)
            else:
                entries[name] = {**entries.get(name, {}), **entry}
        order = [name for name in known if name in entries] + sorted(entries.keys() - set(known))  # an index numbers the samples
        after = {**(before or {"format": 1}), "files": [entries[name] for name in order]}
        if before is None or after["files"] != before["files"] or was != before["files"]:
            if before is None and path.exists():
                path.replace(path.with_name(f"{INDEX}.damaged"))
                self.say(path, f"damaged; kept as {INDEX}.damaged")
            _write_json(path, after)
            self.say(path, "renewed" if before is not None else f"made from {len(entries)} files")
        split.index, split.entries = after, dict(map(entry_in, after["files"]))
        (split.path / JOURNAL).unlink(missing_ok=True)
        split.journal = {}

    def _remove_leftovers(self) -> None:
        for finding in self.outcome.findings:
            if finding.code != "leftover" or not finding.path.name.endswith(".partial"):
                continue
            with suppress(FileNotFoundError):
                age = time.time() - finding.path.stat().st_mtime
                if age < _YOUNG:
                    text = f"left: it was written to {max(age, 0):.0f} s ago, perhaps by a process at work; repeat in a minute"
                    self.say(finding.path, text)
                    continue
                finding.path.unlink()
                self.say(finding.path, "removed")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file in one act."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if path.exists():
            shutil.copymode(path, partial)
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush(path.parent)
