"""The files that ``--index`` writes: index.json where there is none or it cannot be read, and the table beside it.

People decide which of two samples is too many, what a value should have been, and whether a file belongs to the set; h5repack
writes a file whose values lie packed or in chunks.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcai.cli.check import inspection
from hpcai.cli.check.findings import Outcome
from hpcai.cli.check.inspection import Inspection
from hpcai.cli.check.manifest import Split, find_splits
from hpcai.cli.check.pool import Pool
from hpcai.cli.progress import Progress
from hpcai.data.index import INDEX, write_index
from hpcai.data.table import describe
from hpcai.errors import DataError

_BLOCKING = ("index", "missing", "truncated", "overlong", "bit-flip", "unreadable", "rows", "empty")


def write_indexes(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Write the index of every split that has none, and the table of every index that has HDF5 files alone. Return a line for each
    act and each refusal: a split in which a file is not whole keeps what it has."""
    done = list[str]()
    with Pool(outcome.options.threads, progress) as pool:
        for split in find_splits(Path(directory))[0]:
            if split.index is None and split.files and _is_repairable(split, outcome):
                done += _make_index(split, pool)
            elif wrong := _table_problem(split, outcome):
                done.append(f"{split.path / INDEX}: refused: no table while files are not as the index says ({wrong})")
            elif _write_table(split, pool):
                done.append(f"{split.path / INDEX}: has a table of {len(split.files):,} files now")
            else:
                done.append(f"{split.path / INDEX}: refused: a table is of HDF5 files alone")
    return done


def _is_repairable(split: Split, outcome: Outcome) -> bool:
    return any(f.repairable and f.path == split.path / INDEX for f in outcome.findings)


def _table_problem(split: Split, outcome: Outcome) -> str:
    """Why a split cannot have a table: its index is wrong, or files are not as it says; "" where it can."""
    found = (f for f in outcome.findings if f.severity == "error" and split.path in (f.path, f.path.parent) and f.code in _BLOCKING)
    return next((f"{f.path.name}: {f.text}" for f in found if not f.repairable), "")


def _write_table(split: Split, pool: Pool) -> bool:
    """Write an index with its table; False where there is none."""
    index = split.index or {"files": []}
    jobs = [(split.path / entry["name"], entry.get("rows") or 0) for entry in index["files"]]
    told = dict(zip((path for path, _ in jobs), pool.map(_describe_table, jobs, "tables")))
    write_index(split.path, index, lambda path, rows: None if isinstance(told[path], DataError) else told[path])
    return any(split.path.glob("index-*.safetensors"))


def _describe_table(path: Path, rows: int) -> Iterator[Any]:
    yield describe(path, rows)


def _make_index(split: Split, pool: Pool) -> Iterator[str]:
    """Make an index of the files as they are; one that cannot be read is kept as index.json.damaged. Yield a line for each act."""
    jobs = [(file.path, None, dict[str, Any](), set[str]()) for file in split.files]
    entries, path = list[dict[str, Any]](), split.path / INDEX
    for file, found in zip(split.files, pool.map(inspection.read_content, jobs, "hashing", sum(file.size for file in split.files))):
        fields = found.fields if isinstance(found, Inspection) else []
        rows = {data.shape[0] for data in fields if data.kind != "scalar"}
        if len(rows) == 1:
            size = file.path.stat().st_size
            entries.append({"name": file.path.name, "rows": rows.pop(), "bytes": size, "sha256": found.sha256})
        else:
            why = str(found) if isinstance(found, DataError) else found.problem or f"its datasets have rows {sorted(rows)}"
            yield f"{file.path}: refused: not entered into {INDEX}: {why}"
    if path.exists():
        path.replace(path.with_name(f"{INDEX}.damaged"))
        yield f"{path}: damaged; kept as {INDEX}.damaged"
    split.index = {"files": entries}
    _write_table(split, pool)
    yield f"{path}: made from {len(entries)} files"
