"""What ``--repair`` and ``--index`` write: faults that have one right answer.

    a file whose values lie packed, in chunks or off the pages   written in one piece, aligned; its values are compared bit for bit
    index.json that is not there, or cannot be read              made from the files; a damaged one is kept as index.json.damaged
    the table of index.json, where it is not of these files      written anew, as it is whenever the index changes

People decide which of two samples is too many, what a value should have been, and whether a file belongs to the set.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcai import log
from hpcai.cli.check import copying, inspection
from hpcai.cli.check.examination import REWRITTEN
from hpcai.cli.check.findings import Outcome
from hpcai.cli.check.inspection import Inspection
from hpcai.cli.check.manifest import SetFile, Split, splits_in
from hpcai.cli.check.pool import Pool
from hpcai.cli.progress import Progress
from hpcai.data.index import INDEX, settle, write_index
from hpcai.data.table import describe
from hpcai.errors import DataError

_UNFIT = ("index", "missing", "truncated", "overlong", "bit-flip", "unreadable", "rows", "empty")
_LAYOUTS = (*REWRITTEN.values(), "unaligned")


def repair(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Repair what ``outcome`` calls repairable, and return a line for each act and each refusal.

    A file is replaced in one act, after its copy was compared with it, and the index follows. One that is not what the index says
    is left alone.
    """
    done = list[str]()
    with Pool(outcome.options.threads, progress) as pool:
        for split in splits_in(Path(directory))[0]:
            wanted = {finding.path for finding in outcome.findings if finding.repairable and finding.code in _LAYOUTS}
            changed = _rewrite(split, [file for file in split.files if file.path in wanted], pool, done)
            if split.index is None and split.files:
                _make_index(split, pool, done)
            elif changed or (_unfitting(split, outcome) == "" and _has_other_table(split, outcome)):
                _write_table(split, pool)
                done += [] if changed else [f"{split.path / INDEX}: its table is written anew"]
    return done


def tabulate(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Write the table of every index that has HDF5 files alone, and return a line for each act and each refusal: a split in which
    a file is not whole keeps what it has."""
    done = list[str]()
    with Pool(outcome.options.threads, progress) as pool:
        for split in splits_in(Path(directory))[0]:
            if split.index is None:
                text = "refused: no table without an index; make it with --repair"
            elif wrong := _unfitting(split, outcome):
                text = f"refused: no table while files are not as the index says ({wrong})"
            elif _write_table(split, pool):
                text = f"has a table of {len(split.files):,} files now"
            else:
                text = "refused: a table is of HDF5 files alone"
            done.append(f"{split.path / INDEX}: {text}")
    return done


def _unfitting(split: Split, outcome: Outcome) -> str:
    """Why a split cannot have a table: its index is wrong, or files are not as it says; "" where it can."""
    found = (f for f in outcome.findings if f.severity == "error" and split.path in (f.path, f.path.parent) and f.code in _UNFIT)
    return next((f"{f.path.name}: {f.text}" for f in found if f.code != "index" or not f.repairable), "")


def _has_other_table(split: Split, outcome: Outcome) -> bool:
    of_table = ("index", "table")
    return any(f.repairable and f.code in of_table and f.path.parent == split.path for f in outcome.findings)


def _write_table(split: Split, pool: Pool) -> bool:
    """Write an index with its table; False where there is none."""
    index = split.index or {"files": []}
    jobs = [(split.path / entry["name"], entry.get("rows") or 0) for entry in index["files"]]
    told = dict(zip((path for path, _ in jobs), pool.each(_tabled, jobs, "tables")))
    write_index(split.path, index, lambda path, rows: None if isinstance(told[path], DataError) else told[path])
    return any(split.path.glob("index-*.safetensors"))


def _tabled(path: Path, rows: int) -> Iterator[Any]:
    yield describe(path, rows)


def _rewrite(split: Split, files: list[SetFile], pool: Pool, done: list[str]) -> bool:
    """Replace files by copies in one piece, each with its entry in the index; whether any entry changed."""
    partials = [file.path.with_name(f".{file.path.name}.partial") for file in files]
    before, changed = [file.path.stat() for file in files], False

    def replace(number: int, found: dict[str, Any] | DataError) -> None:
        nonlocal changed
        file, partial, old = files[number], partials[number], before[number]
        try:
            if isinstance(found, DataError):
                raise found
            if file.entry.bytes not in (None, old.st_size):
                raise DataError("has not the size that the index says; copy it from its source")
            if file.path.stat().st_mtime_ns != old.st_mtime_ns:
                raise DataError("it was written to meanwhile; repeat when nobody writes")
            shutil.copymode(file.path, partial)
            settle(partial, file.path)
            if split.index is not None and file.path.name in split.entries:
                next(entry for entry in split.index["files"] if entry["name"] == file.path.name).update(found)
                write_index(split.path, split.index, table=False)
                changed = True
            done.append(f"{file.path}: rewritten in one piece, aligned: {log.size(old.st_size)} became {log.size(found['bytes'])}")
        except (DataError, OSError) as error:
            done.append(f"{file.path}: refused: not rewritten: {error}")
        finally:
            partial.unlink(missing_ok=True)

    try:
        jobs = [(file.path, partial, file.entry.sha256) for file, partial in zip(files, partials)]
        pool.each(copying.copy, jobs, "rewriting", then=replace)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    return changed


def _make_index(split: Split, pool: Pool, done: list[str]) -> None:
    jobs = [(file.path, None, dict[str, Any](), set[str]()) for file in split.files]
    entries, path = list[dict[str, Any]](), split.path / INDEX
    for file, found in zip(split.files, pool.each(inspection.content, jobs, "hashing", sum(file.size for file in split.files))):
        fields = found.fields if isinstance(found, Inspection) else []
        rows = {data.shape[0] for data in fields if data.kind != "scalar"}
        if len(rows) == 1:
            size = file.path.stat().st_size
            entries.append({"name": file.path.name, "rows": rows.pop(), "bytes": size, "sha256": found.sha256})
        else:
            why = str(found) if isinstance(found, DataError) else found.problem or f"its datasets have rows {sorted(rows)}"
            done.append(f"{file.path}: refused: not entered into {INDEX}: {why}")
    if path.exists():
        path.replace(path.with_name(f"{INDEX}.damaged"))
        done.append(f"{path}: damaged; kept as {INDEX}.damaged")
    split.index = {"files": entries}
    _write_table(split, pool)
    done.append(f"{path}: made from {len(entries)} files")
