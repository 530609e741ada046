"""Tensors in safetensors files, of which parts are read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.errors import CheckpointError


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``stored[box]`` reads the box, a slice for each dim. Raises CheckpointError."""

    path: Path
    key: str
    size: tuple[int, ...]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        with _opened(self.path) as file:
            return file.get_slice(self.key)[box] if self.size else file.get_tensor(self.key)


def stored(source: Path) -> dict[str, Stored]:
    """All tensors of a file, or of a folder with ``model.safetensors.index.json``. Raises CheckpointError."""
    files = [source]
    if source.is_dir():
        index = source / "model.safetensors.index.json"
        try:
            files = sorted({source / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as problem:
            raise CheckpointError(f"{index}: no index of safetensors files: {problem!r}; expected a weight_map") from problem
    found: dict[str, Stored] = {}
    for path in files:
        with _opened(path) as file:
            found |= {key: Stored(path, key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118 not a dict
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path}: no safetensors file, or damaged: {problem}") from problem
