"""Tensors in safetensors files, of which parts are read, and folders of such files with an index."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcai.errors import CheckpointError


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file; ``stored[box]`` reads the box, a slice for each dim. Raises CheckpointError."""

    path: Path
    key: str
    size: tuple[int, ...]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        with _open(self.path) as file:
            return file.get_slice(self.key)[box] if self.size else file.get_tensor(self.key)


def open_tensors(source: Path) -> dict[str, LazyTensor]:
    """All tensors of a file, of the files that an index (.json) names, or of a folder with ``model.safetensors.index.json``. Raises
    CheckpointError, also where a tensor is not where the index says."""
    index = source / "model.safetensors.index.json" if source.is_dir() else source
    if index.suffix != ".json":
        return _list_tensors(source)
    try:
        where = {str(name): index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as problem:
        raise CheckpointError(f"{index}: no index of safetensors files: {problem!r}; expected a weight_map") from problem
    found: dict[str, LazyTensor] = {}
    for path in sorted(set(where.values())):
        found |= _list_tensors(path)
    for name, path in where.items():
        if name not in found or found[name].path != path:
            raise CheckpointError(f"{index}: {name} is not in {path.name}, as the index says; fetch or save the folder again")
    return found


def save_sharded(tensors: Mapping[str, Tensor], folder: Path, name: str, max_bytes: int) -> None:
    """Tensors as safetensors files of at most ``most`` bytes in ``folder``, as Hugging Face's libraries read them: ``name``, such
    as model.safetensors, or several that bear their numbers, with an index. Each file is there when it is whole."""
    from safetensors.torch import save_file

    files: list[dict[str, Tensor]] = [{}]
    for key, tensor in tensors.items():
        if files[-1] and sum(x.nbytes for x in files[-1].values()) + tensor.nbytes > max_bytes:
            files.append({})
        files[-1][key] = tensor.detach().cpu().contiguous()
    stem, many = name.removesuffix(".safetensors"), len(files)
    names = [name] if many == 1 else [f"{stem}-{n:05}-of-{many:05}.safetensors" for n in range(1, many + 1)]
    for file, inside in zip(names, files):
        partial = folder / f".{file}.partial"
        save_file(inside, partial, metadata={"format": "pt"})
        partial.chmod(0o644)  # safetensors makes a file for its owner only
        partial.replace(folder / file)
    index = folder / f"{name}.index.json"
    if many == 1:
        index.unlink(missing_ok=True)  # of what was here before
    else:
        total = sum(tensor.nbytes for inside in files for tensor in inside.values())
        where = {key: file for file, inside in zip(names, files) for key in inside}
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")


def _list_tensors(path: Path) -> dict[str, LazyTensor]:
    with _open(path) as file:
        return {key: LazyTensor(path, key, tuple(file.get_slice(key).get_shape())) for key in file.keys()}  # noqa: SIM118 not a dict


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as problem:
        raise CheckpointError(f"{path}: is not there; fetch or save the folder again") from problem
    except (OSError, SafetensorError) as problem:
        why = "a pointer of Git LFS in place of the file; fetch it by git lfs pull" if _is_lfs_pointer(path) else problem
        raise CheckpointError(f"{path}: no safetensors file, or damaged: {why}") from problem


def _is_lfs_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(24).startswith(b"version https://git-lfs")
