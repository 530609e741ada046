"""A reader of checkpoints on disk: JSON files, verification, and tensors of one process, without the model."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, Field, PositiveInt, ValidationError
from torch import Tensor, nn

from hpcai.errors import CheckpointError
from hpcai.json_file import open_regular, read_regular
from hpcai.nn.safetensors_files import encode_header
from hpcai.schema import format_first_error
from hpcai.train import shard_file
from hpcai.train.shard_file import BLOCK, Block, Box, StoredBox

INDEX, RUN, MANIFEST = "index.json", "run.json", "manifest.json"
FORMAT: Literal[3] = 3
_NAME = re.compile(r"step-(\d{8,})")
_EXPORT_BYTES = 1 << 28  # of tensors that ``export`` reads at a time, about

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


@dataclass
class Progress:
    """The progress of a run. ``sample``: the samples that ``epoch`` has delivered over all replicas. ``late``: the positions of its
    order that were skipped so far (see hpcai.data.loader)."""

    step: Count = 0
    epoch: Count = 0
    sample: Count = 0
    seen: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    ended: str = ""
    late: list[Count] = field(default_factory=list)


# The JSON files of a checkpoint. Field names are keys of the format.


class _FileDigest(BaseModel):
    bytes: Count
    sha256: str


class _Manifest(BaseModel):
    format: PositiveInt
    files: dict[FileName, _FileDigest]


class RunFile(BaseModel):
    format: PositiveInt
    world: PositiveInt
    progress: Progress
    settings: dict[str, Any]
    data: str = ""
    versions: dict[str, str] = {}
    """versions of the software that wrote it"""
    frozen: dict[str, str] = {}
    """by name: SHA-256 of the file with frozen weights, which are not in the checkpoint"""
    origins: dict[str, str] = {}
    """by SHA-256: the paths of these files"""
    about: dict[str, str] = {}
    """metadata of the model, as in files of weights"""


class _ByteRange(BaseModel):
    writer: Count
    at: Count
    bytes: Count
    sha256: list[str]


class File(BaseModel):
    bytes: Count
    header: Count
    sha256: str
    stretches: list[_ByteRange]


class Index(BaseModel):
    """The shard files, and the SHA-256 of their blocks."""

    format: Literal[3]
    block: Annotated[int, Field(ge=8, le=1 << 30, multiple_of=8)] = BLOCK
    files: dict[FileName, File] = {}

    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        for name, file in self.files.items():
            for byte_range in file.stretches:
                for number, digest in enumerate(byte_range.sha256):
                    at = byte_range.at + number * self.block
                    blocks.append(Block(name, at, min(self.block, byte_range.at + byte_range.bytes - at), digest))
        return blocks


class DamagedError(CheckpointError):
    """A checkpoint differs from the one that was written. The message says how."""


@dataclass
class CheckpointReader:
    """A reader of a checkpoint: its run, its files, the stored boxes of each tensor, and the size of each tensor."""

    path: Path
    run: RunFile
    index: Index
    tensors: dict[str, list[StoredBox]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def find_damage(self, index: int = 0, count: int = 1) -> str:
        """Verify slice ``index`` of ``count`` of all blocks. Return an error message for the first damaged one, or an empty
        string."""
        blocks = self.index.blocks()
        return shard_file.verify_blocks(self.path, blocks[len(blocks) * index // count : len(blocks) * (index + 1) // count])

    def fill(self, boxes: Sequence[Box], readers: int = 1) -> str:
        """Fill boxes. Return an error message, or an empty string. Ranks that hold the same boxes call this together."""
        return shard_file.read(self.path, [(box, self.tensors[box.name]) for box in boxes], readers)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return some full tensors, on one process. Raises CheckpointError if they cannot be read."""
        pairs = [(name, torch.empty(self.sizes[name], dtype=self.tensors[name][0].dtype)) for name in names]
        if damage := self.fill([Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in pairs]):
            raise CheckpointError(f"{self.path}: {damage}")
        return dict(pairs)


J = TypeVar("J", bound=BaseModel)


def _read_json(file: Path, schema: type[J]) -> J:
    """Return the contents of a JSON file. Raises DamagedError if it cannot be read or does not fit the schema."""
    try:
        return schema.model_validate_json(read_regular(file, None))
    except OSError as problem:
        raise DamagedError(f"{file.name} cannot be read ({type(problem).__name__})") from problem
    except ValidationError as problem:
        raise DamagedError(f"{file.name} cannot be read ({format_first_error(problem)})") from problem


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a run's folder ``checkpoints``, oldest first, unverified."""
    folders = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((p for p in folders if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), key=step_number)


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, in full, by name: on one process, without the model. Raises CheckpointError if
    damaged."""
    reader = _open_verified(checkpoint)
    return reader.read(reader.tensors)


def export(
    checkpoint: Path, path: Path, load: Callable[[str], nn.Module] | None = None, names: Callable[[str], str | None] | None = None,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint (their average, if there is one) as a safetensors file that ``load`` of the model reads. It
    runs on one process, some tensors at a time. Raises CheckpointError if the checkpoint is damaged or lacks the weights.

    Args:
        load: Loads frozen weights from their own file. None: that of the model in hpcai that the checkpoint names.
        names: Maps the name of a weight to its name in the file, or to None to leave it out. If given, frozen weights are left out
            too.
    """
    reader = _open_verified(checkpoint)
    stored, run = reader.tensors, reader.run
    if not run.about:
        raise CheckpointError(f"{checkpoint}: does not name the model of its weights; resume the run, which exports them")
    parameters = [name.removeprefix("model/") for name in stored if name.startswith("model/")]
    exported = {name: name if names is None else names(name) for name in parameters}
    source = {out: f"average/{name}" if f"average/{name}" in stored else f"model/{name}" for name, out in exported.items() if out}
    frozen: dict[str, Tensor] = {}  # which are not in the checkpoint, from the files that it names
    for digest, origin in run.origins.items() if names is None else ():
        if not Path(origin).is_file() or file_digest(Path(origin))["sha256"] != digest:
            raise CheckpointError(f"{checkpoint}: frozen weights are those of {origin} (SHA-256 {digest}); put it back")
        package = re.search(r'"model": "(\w+)"', run.about.get("hpcai", ""))
        if load is None and (package is None or find_spec(f"hpcai.models.{package[1]}") is None):
            raise CheckpointError(f"{checkpoint}: holds a model that hpcai does not have; its run exports the weights at its end")
        state = (load or import_module(f"hpcai.models.{package and package[1]}.load").load_weights)(origin).state_dict()
        frozen |= {name: state[name].contiguous() for name, other in run.frozen.items() if other == digest}
    sizes = {name: (stored[key][0].dtype, list(reader.sizes[key])) for name, key in source.items()}
    sizes |= {name: (tensor.dtype, list(tensor.shape)) for name, tensor in frozen.items()}
    ordered = sorted(sizes, key=lambda name: (name in frozen, -sizes[name][0].itemsize, name))
    ends = list(accumulate(math.prod(size) * dtype.itemsize for dtype, size in map(sizes.__getitem__, ordered)))
    with path.open("wb") as file:
        file.write(encode_header({name: sizes[name] for name in ordered}, __metadata__=run.about))
        portions = groupby(zip(ordered[: len(source)], ends), lambda pair: pair[1] // _EXPORT_BYTES)
        tensors = (tensor for _, some in portions for tensor in reader.read(source[name] for name, _ in some).values())
        for tensor in chain(tensors, (frozen[name] for name in ordered[len(source) :])):
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _open_verified(checkpoint: Path) -> CheckpointReader:
    """Return a reader of a checkpoint after comparing every byte with its SHA-256."""
    try:
        reader = open_checkpoint(checkpoint)
        if problem := reader.find_damage():
            raise DamagedError(problem)
        return reader
    except DamagedError as damage:
        raise CheckpointError(f"{checkpoint}: {damage}") from damage


def open_checkpoint(path: Path) -> CheckpointReader:
    """Return a reader of a checkpoint, after verifying its JSON files, the sizes of the others and their headers. Raises
    DamagedError, and CheckpointError for a complete checkpoint of another format."""
    manifest = _read_json(path / MANIFEST, _Manifest)
    for name in sorted({*manifest.files, RUN, INDEX}):
        if name not in manifest.files or not (path / name).is_file():
            raise DamagedError(f"{name} is missing")
        if file_digest(path / name) != manifest.files[name].model_dump():
            raise DamagedError(f"{name} has changed since it was written (size or SHA-256)")
    run = _read_json(path / RUN, RunFile)
    if run.format != FORMAT:
        advice = "resume the run with the hpcai that wrote it"
        raise CheckpointError(f"{path}: is a checkpoint of format {run.format}, expected {FORMAT}; {advice}")
    reader = CheckpointReader(path, run, _read_json(path / INDEX, Index))
    try:
        headers = ((name, _read_header(path / name, file, reader.index.block)) for name, file in reader.index.files.items())
        stored = [box for name, header in headers for box in shard_file.list_tensors(name, header)]
    except ValueError as problem:
        raise DamagedError(f"a header cannot be read ({problem})") from problem
    for name, part in stored:
        width = part.dtype.itemsize
        fits = math.prod(part.sizes) * width == part.end - part.at and part.at % width == 0
        inside = any(s.at <= part.at and part.end <= s.at + s.bytes for s in reader.index.files[part.file].stretches)
        if not (fits and inside and len(part.offsets) == len(part.sizes)):
            raise DamagedError(f"{name!r} lies outside its file")
        reader.tensors.setdefault(name, []).append(part)
    for name, parts in reader.tensors.items():
        reader.sizes[name] = parts[0].sizes
        if len(parts) > 1 or any(parts[0].offsets):
            ends = ([o + n for o, n in zip(part.offsets, part.sizes)] for part in parts)
            reader.sizes[name] = tuple(map(max, zip(*ends)))
        if sum(math.prod(part.sizes) for part in parts) != math.prod(reader.sizes[name]):
            raise DamagedError(f"shards of {name!r} are missing")
    if not reader.tensors:
        raise DamagedError(f"{INDEX} names no file of tensors")
    return reader


def _read_header(path: Path, file: File, block: int) -> bytes:
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            header = stream.read(min(file.header, size))
    except OSError as problem:
        raise DamagedError(f"{path.name} is missing") from problem
    if size != file.bytes or hashlib.sha256(header).hexdigest() != file.sha256:
        raise DamagedError(f"{path.name} has changed since it was written (size, or SHA-256 of its header)")
    for byte_range in file.stretches:
        if byte_range.at + byte_range.bytes > size or len(byte_range.sha256) != -(-byte_range.bytes // block):
            raise DamagedError(f"{INDEX} lists byte ranges that {path.name} lacks")
    return header


def step_number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def file_digest(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
