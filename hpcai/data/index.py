"""The index of a folder of samples, which readers, copies and checks go by, and the one place that writes it.

index.json    {"format": 1, "files": [{"name", "rows", "bytes", "sha256", ...}], "fields": {NAME: {"dtype", "shape", "low",
              "high", "blank"}}, ...}; all keys but "files" and "name" may be absent; null in a shape allows any length
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcai.durable import flush

INDEX = "index.json"
FORMAT = 1


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
