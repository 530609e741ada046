"""The files written by ``--index``: index.json if it is missing or unreadable, and its table.

Users decide which duplicate to drop, which value is correct, and whether a file belongs to the set; h5repack rewrites a file with
compressed or chunked datasets.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hpcai.cli.check.inspection as inspection
from hpcai.cli.check.findings import Outcome
from hpcai.cli.check.inspection import Inspection
from hpcai.cli.check.manifest import Split, find_splits
from hpcai.cli.check.pool import Pool
from hpcai.cli.progress import Progress
from hpcai.data.index import INDEX, write_index
from hpcai.data.table import describe
from hpcai.errors import DataError

_UNFIT = ("index", "missing", "truncated", "overlong", "bit-flip", "unreadable", "rows", "empty")


def write_indexes(directory: Path, outcome: Outcome, *, progress: Callable[[Progress], None] | None = None) -> list[str]:
    """Write the index of every split without one, and the table of every index of HDF5 files. Return a line for each action and
    each refusal: a split with a damaged file is unchanged."""
    lines = list[str]()
    with Pool(outcome.options.threads, progress) as pool:
        for split in find_splits(Path(directory))[0]:
            path = split.path / INDEX
            is_repairable = any(f.repairable and f.path == path for f in outcome.findings)
            if split.index is None and split.files and is_repairable:
                lines += _make_index(split, pool)
            elif errors := [f for f in outcome.findings if f.severity == "error" and split.path in (f.path, f.path.parent)
                            and f.code in _UNFIT and not f.repairable]:  # fmt: skip
                problem = f"{errors[0].path.name}: {errors[0].text}"
                lines.append(f"{path}: refused: no table while files differ from the index ({problem})")
            elif _write_table(split, pool):
                lines.append(f"{path}: has a table of {len(split.files):,} files now")
            else:
                lines.append(f"{path}: refused: a table is of HDF5 files alone")
    return lines


def _write_table(split: Split, pool: Pool) -> bool:
    """Write an index with its table. Return False if there is no table."""
    index = split.index or {"files": []}
    jobs = [(split.path / entry["name"], entry.get("rows") or 0) for entry in index["files"]]
    tables = dict(zip((path for path, _ in jobs), pool.map(_describe_table, jobs, "tables")))
    write_index(split.path, index, lambda path, rows: None if isinstance(tables[path], DataError) else tables[path])
    return any(split.path.glob("index-*.safetensors"))


def _describe_table(path: Path, rows: int) -> Iterator[Any]:
    yield describe(path, rows)


def _make_index(split: Split, pool: Pool) -> Iterator[str]:
    """Make an index of the existing files; an unreadable one is kept as index.json.damaged. Yield a line for each action."""
    jobs = [(file.path, None, dict[str, Any](), set[str]()) for file in split.files]
    entries, path = list[dict[str, Any]](), split.path / INDEX
    inspections = pool.map(inspection.read_content, jobs, "hashing", sum(file.size for file in split.files))
    for file, result in zip(split.files, inspections):
        fields = result.fields if isinstance(result, Inspection) else []
        rows = {data.shape[0] for data in fields if data.kind != "scalar"}
        if len(rows) == 1:
            size = file.path.stat().st_size
            entries.append({"name": file.path.name, "rows": rows.pop(), "bytes": size, "sha256": result.sha256})
        else:
            reason = str(result) if isinstance(result, DataError) else result.problem or f"its datasets have rows {sorted(rows)}"
            yield f"{file.path}: refused: not entered into {INDEX}: {reason}"
    if path.exists():
        path.replace(path.with_name(f"{INDEX}.damaged"))
        yield f"{path}: damaged; kept as {INDEX}.damaged"
    split.index = {"files": entries}
    _write_table(split, pool)
    yield f"{path}: made from {len(entries)} files"
