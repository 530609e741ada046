"""A very small environment, for tests of what carries it: its Python is a shell script that says where it is and what it gets."""

import random
from pathlib import Path

from hpcai.cli.pack import _Archive, _write

PYTHON = b"""#!/bin/sh
here=$(dirname -- "$(dirname -- "$0")")
if [ "$1" = -I ]; then echo "$here"; else echo "started $0 $*"; fi
"""


def tiny(file: Path, size: int = 100_000) -> Path:
    """An archive with a Python, a link, and ``size`` bytes in eight files."""
    (file.parent / "python").write_bytes(PYTHON)
    (file.parent / "python").chmod(0o755)
    entries: dict[str, Path | bytes] = {f"lib/part_{i}": random.Random(i).randbytes(size // 8) for i in range(8)}
    with file.open("w+b") as target:
        _write(_Archive({"bin/python3": file.parent / "python", **entries}, {"bin/python": "python3"}), target)
    return file
