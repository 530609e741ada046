"""The index of a folder of samples, which readers, copies and checks go by, and the one place that writes it.

index.json    {"format": 1, "files": [{"name", "rows", "bytes", "sha256", ...}], "fields": {NAME: {"dtype", "shape", "low",
              "high", "blank", "key"}}, ...}; all keys but "files" and "name" may be absent; null in a shape allows any length;
              "key": true says by which field samples are told apart, where others, such as vectors of captions, may be alike
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from hpcai.durable import flush
from hpcai.errors import DataError

INDEX = "index.json"
FORMAT = 1


class Entry(BaseModel):
    """A file of the folder itself."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]*[^/\x00.][^/\x00]*$", max_length=255)]
    rows: Annotated[int, Field(ge=1, lt=1 << 48)]
    bytes: NonNegativeInt


class _Content(BaseModel):
    files: list[Entry]


def read_index(path: Path, remedy: str = "") -> tuple[dict[str, Any], list[Entry]]:
    """All that an index says, and its files. Raises DataError for what is no index, or names files outside of its folder."""
    try:
        text = path.read_bytes()
        entries = _Content.model_validate_json(text).files
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}){remedy}") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: cannot be read as an index of files ({where or 'JSON'}: {first['msg']}){remedy}") from problem
    return json.loads(text), entries


def write_index(folder: Path, content: Mapping[str, Any]) -> None:
    """Replaces the index of ``folder`` in one act; ``content`` is all but the format."""
    write_json(folder / INDEX, {"format": FORMAT, **content})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file in one act, with the permissions that it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # ranks may write the same recipe at once
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if path.exists():
            shutil.copymode(path, partial)
        settle(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def settle(partial: Path, path: Path) -> None:
    """Gives a finished file its name, once what it holds is on the disk."""
    flush(partial)
    partial.replace(path)
    flush(path.parent)
