"""The index of a folder of samples, for readers, staging and checks, and the functions that write it.

index.json    {"format": 1, "files": [{"name", "rows", "bytes", "sha256", ...}], "fields": {NAME: {"dtype", "shape", "low",
              "high", "blank", "key"}}, "table": {"name", "bytes", "sha256"}, ...}; all keys but "files" and "name" are optional;
              null in a shape allows any length; "key": true marks the field that identifies a sample, where others, such as
              vectors of captions, may be equal; "table" is the file with the layouts of all files (see hpcai.data.table)
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcai.data.entry import Entry, TableEntry
from hpcai.data.table import build_table, describe
from hpcai.durable import replace_file, write_json
from hpcai.errors import DataError
from hpcai.json_file import read_regular

INDEX = "index.json"
FORMAT = 1
TABLE = "index-{}.safetensors"

DescribeFile = Callable[[Path, int], Mapping[str, Any] | None]
"""Returns the table entries of a file with so many rows, or None if they are unknown."""


class _Content(BaseModel):
    files: list[Entry]
    table: TableEntry | None = None


def read_index(path: Path, remedy: str = "") -> tuple[dict[str, Any], list[Entry], TableEntry | None]:
    """Return contents, files and table of an index. Raises DataError if it is invalid, or lists files outside of its folder."""
    try:
        text = read_regular(path, None)
        content = _Content.model_validate_json(text)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}){remedy}") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: cannot be read as an index of files ({key or 'JSON'}: {first['msg']}){remedy}") from problem
    return json.loads(text), content.files, content.table


def write_index(folder: Path, content: Mapping[str, Any], describe_file: DescribeFile | None = None, table: bool = True) -> None:
    """Replace the index of ``folder`` atomically by ``content`` and the format. If all files are HDF5, their table is written
    first, by ``describe_file`` or by opening each, and older tables are deleted last. Without ``table`` the index has none."""
    index = {key: value for key, value in content.items() if key != "table"}
    if table and (entry := _write_table(folder, index, describe_file)) is not None:
        index["table"] = entry.model_dump()
    write_json(folder / INDEX, {"format": FORMAT, **index})
    for other in folder.glob(TABLE.format("[0-9a-f]" * 8)):
        if other.name != index.get("table", {}).get("name"):
            other.unlink(missing_ok=True)


def _write_table(folder: Path, content: Mapping[str, Any], describe_file: DescribeFile | None) -> TableEntry | None:
    try:
        files = _Content.model_validate(content).files
    except ValidationError:  # reported by readers and checks
        return None
    if not files or not all(file.name.endswith(".h5") for file in files):
        return None
    descriptions = ((describe_file or describe)(folder / file.name, file.rows) for file in files)
    raw = build_table(files, [d if d and d["bytes"] == file.bytes else None for d, file in zip(descriptions, files)])
    digest = hashlib.sha256(raw).hexdigest()
    name = TABLE.format(digest[:8])
    replace_file(folder / name, raw)
    return TableEntry(name=name, bytes=len(raw), sha256=digest)
