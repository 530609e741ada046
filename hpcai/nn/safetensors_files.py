"""Lazy reading of tensors in safetensors files, and folders of such files with an index."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hpcai.errors import CheckpointError
from hpcai.json_file import check_fields, check_relative, read_object

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN = 4096  # a header is padded to whole pages

Box = tuple[slice, ...]  # one slice for each dim


class Lazy(Protocol):
    """A tensor of which ``tensor[box]`` reads a box."""

    @property
    def size(self) -> tuple[int, ...]: ...

    @property
    def path(self) -> Path: ...

    def __getitem__(self, box: Box) -> Tensor: ...


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file. Raises CheckpointError when a box is read that has elements which are not finite."""

    path: Path
    key: str
    size: tuple[int, ...]
    dtype: str

    def __getitem__(self, box: Box) -> Tensor:
        with _open(self.path) as file:
            tensor: Tensor = file.get_slice(self.key)[box] if self.size else file.get_tensor(self.key)
        if not tensor.isfinite().all():
            raise CheckpointError(f"{self.path}: {self.key} has elements that are not finite; fetch or save it again")
        return tensor


@dataclass(frozen=True)
class _View:
    base: Lazy

    @property
    def size(self) -> tuple[int, ...]:
        return self.base.size

    @property
    def path(self) -> Path:
        return self.base.path


class TransposedView(_View):
    """A tensor with its last two dims exchanged."""

    @property
    def size(self) -> tuple[int, ...]:
        return (*self.base.size[:-2], self.base.size[-1], self.base.size[-2])

    def __getitem__(self, box: Box) -> Tensor:
        return self.base[*box[:-2], box[-1], box[-2]].transpose(-1, -2)


@dataclass(frozen=True)
class RangeView(_View):
    """Elements ``begin``, ``begin + step``, ... of a tensor along ``dim``."""

    dim: int
    begin: int
    count: int
    step: int = 1

    @property
    def size(self) -> tuple[int, ...]:
        return (*self.base.size[: self.dim], self.count, *self.base.size[self.dim + 1 :])

    def __getitem__(self, box: Box) -> Tensor:
        first, last, _ = box[self.dim].indices(self.count)
        begin = self.begin + first * self.step
        part = slice(begin, begin + max((last - first - 1) * self.step + 1, 0))
        tensor = self.base[*box[: self.dim], part, *box[self.dim + 1 :]]
        return tensor[(slice(None),) * self.dim + (slice(None, None, self.step),)]


@dataclass(frozen=True)
class ReorderedView(_View):
    """A tensor whose element n in dim 0 is element ``order[n]`` of another."""

    order: tuple[int, ...]

    def __getitem__(self, box: Box) -> Tensor:
        return self.base[slice(0, len(self.order)), *box[1:]][torch.tensor(self.order[box[0]])]


@dataclass(frozen=True)
class StackedView:
    """Tensors of equal size, stacked in a new dim 0."""

    parts: tuple[Lazy, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].size)

    @property
    def path(self) -> Path:
        return self.parts[0].path

    def __getitem__(self, box: Box) -> Tensor:
        return torch.stack([part[box[1:]] for part in self.parts[box[0]]])


def open_tensors(source: Path) -> dict[str, LazyTensor]:
    """Open the tensors of a file, of the files of an index (.json), or of a folder with ``model.safetensors.index.json``. Raises
    CheckpointError, also if the index names another file for a tensor."""
    index = source / "model.safetensors.index.json" if source.is_dir() else source
    if index.suffix != ".json":
        return _list_tensors(source)
    weight_map = {name: index.parent / file for name, file in read_weight_map(index).items()}
    tensors: dict[str, LazyTensor] = {}
    for path in sorted(set(weight_map.values())):
        tensors |= _list_tensors(path)
    for name, path in weight_map.items():
        if name not in tensors or tensors[name].path != path:
            raise CheckpointError(f"{index}: {name} is not in {path.name}, as the index says; fetch or save the folder again")
    return tensors


def find_weights(folder: Path, stem: str, ending: str = "safetensors") -> Path | None:
    """Return the index of the weights in a folder, or their file, or those of half precision, or None."""
    names = ((f"{stem}.{ending}.index{part}.json", f"{stem}{part}.{ending}") for part in ("", ".fp16", ".bf16"))
    return next((folder / name for pair in names for name in pair if (folder / name).exists()), None)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor in an index. Raises CheckpointError for files outside the folder of the index."""
    expected = "an index of safetensors files with a weight_map"
    with check_fields(index, expected):
        return {str(name): check_relative(file, index) for name, file in read_object(index, expected)["weight_map"].items()}


def read_full(tensor: Lazy) -> Tensor:
    """Read all elements."""
    return tensor[(slice(None),) * len(tensor.size)].contiguous()


def encode_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], **entries: Any) -> bytes:
    """Return the beginning of a file that holds ``tensors`` (dtype and shape by name) one after another: a length, and JSON of
    ``entries`` and tensors, padded to whole pages."""
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
    """Write a safetensors file, with one tensor at a time in memory; ``tensors`` is called twice, first for their sizes."""
    header = encode_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors()}, __metadata__={"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        for _, tensor in tensors():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def save_sharded(tensors: Mapping[str, Tensor], folder: Path, name: str, max_bytes: int, metadata: Mapping[str, str] = {}) -> None:
    """Save tensors as safetensors files of at most ``max_bytes`` in ``folder``, as Hugging Face's libraries do: one called ``name``
    (model.safetensors), or several numbered ones with an index. Each is renamed to its name when it is complete."""
    from safetensors.torch import save_file

    files: list[dict[str, Tensor]] = [{}]
    for key, tensor in tensors.items():
        if files[-1] and sum(x.nbytes for x in files[-1].values()) + tensor.nbytes > max_bytes:
            files.append({})
        files[-1][key] = tensor.detach().cpu().contiguous()
    stem, count = name.removesuffix(".safetensors"), len(files)
    names = [name] if count == 1 else [f"{stem}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file, content in zip(names, files):
        partial = folder / f".{file}.partial"
        save_file(content, partial, metadata={"format": "pt", **metadata})
        partial.chmod(0o644)  # safetensors makes files that only their owner can read
        partial.replace(folder / file)
    index = folder / f"{name}.index.json"
    if count == 1:
        index.unlink(missing_ok=True)  # from an earlier save
    else:
        total = sum(tensor.nbytes for content in files for tensor in content.values())
        weight_map = {key: file for file, content in zip(names, files) for key in content}
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _list_tensors(path: Path) -> dict[str, LazyTensor]:
    with _open(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    return {key: LazyTensor(path, key, tuple(each.get_shape()), each.get_dtype()) for key, each in slices.items()}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path}: {'no regular file' if path.exists() else 'does not exist'}; fetch or save the folder again")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        with path.open("rb") as raw:
            is_pointer = raw.read(24).startswith(b"version https://git-lfs")
        reason = "a pointer of Git LFS in place of the file; fetch it by git lfs pull" if is_pointer else error
        raise CheckpointError(f"{path}: no safetensors file, or damaged: {reason}") from error
