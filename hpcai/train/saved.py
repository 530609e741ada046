"""A checkpoint on disk: its JSON files, whether it is whole, and what one process reads of it without the model."""

import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, AliasChoices, BaseModel, Field, PositiveInt, ValidationError
from torch import Tensor, nn

from hpcai.errors import CheckpointError
from hpcai.train import tensorfile
from hpcai.train.tensorfile import BLOCK, Block, Box, Stored

INDEX, RUN, MANIFEST = "index.json", "run.json", "manifest.json"
FORMAT: Literal[2] = 2
_NAME = re.compile(r"step-(\d{8,})")
_FILE = r"^\w[\w.-]*$"

Count = Annotated[int, Field(ge=0, lt=1 << 53)]


@dataclass
class Progress:
    """Where a run stands. ``sample`` counts what ``epoch`` has delivered over all copies of the model; ``late`` lists the positions
    of its order that were passed over so far (see hpcai.data.loader)."""

    step: Count = 0
    epoch: Count = 0
    sample: Count = 0
    seen: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    ended: str = ""
    late: list[Count] = field(default_factory=list)


# What the JSON files of a checkpoint hold.


def _is_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"torch has no type {name!r}")
    return name


class _Seal(BaseModel):
    bytes: Count
    sha256: str


class _Manifest(BaseModel):
    format: Literal[1, 2]
    files: dict[Annotated[str, Field(pattern=_FILE)], _Seal]


class RunFile(BaseModel):
    format: Literal[1, 2]
    world: PositiveInt
    progress: Progress
    settings: dict[str, Any]
    data: str = ""
    versions: dict[str, str] = {}
    """what wrote it; empty in older checkpoints"""
    frozen: dict[str, str] = {}
    """by name: SHA-256 of the file with weights that are not trained, and so not in the checkpoint"""
    origins: dict[str, str] = {}
    """by SHA-256: where these files were"""
    about: dict[str, str] = {}
    """which model the weights are of, as the files of weights say it"""


class StoredBox(BaseModel):
    offsets: list[Count]
    sizes: list[Count]
    file: str
    at: Count
    bytes: Count = 0  # of format 1, where each box was packed by itself


class Entry(BaseModel):
    dtype: Annotated[str, AfterValidator(_is_dtype)]
    size: list[Count]
    boxes: list[StoredBox] = Field(validation_alias=AliasChoices("boxes", "chunks"))


class _Stretch(BaseModel):
    writer: Count
    at: Count
    bytes: Count
    sha256: list[str]


class File(BaseModel):
    bytes: Count
    header: Count
    sha256: str
    stretches: list[_Stretch]


class Index(BaseModel):
    """Where each box of each tensor lies. Its files are not in the index of format 1, whose manifest has them."""

    format: Literal[1, 2]
    block: Annotated[int, Field(ge=8, le=1 << 30, multiple_of=8)] = BLOCK
    files: dict[Annotated[str, Field(pattern=_FILE)], File] = {}
    tensors: dict[str, Entry]

    def blocks(self) -> dict[str, list[Block]]:
        """By file, in order."""
        found: dict[str, list[Block]] = {}
        for name, file in self.files.items():
            found[name] = []
            for stretch in sorted(file.stretches, key=lambda each: each.at):
                for number, seal in enumerate(stretch.sha256):
                    at = stretch.at + number * self.block
                    found[name].append(Block(name, at, min(self.block, stretch.at + stretch.bytes - at), seal))
        return found

    def stored(self, name: str) -> list[Stored]:
        entry = self.tensors[name]
        dtype = getattr(torch, entry.dtype)
        return [Stored(dtype, tuple(box.offsets), tuple(box.sizes), box.file, box.at) for box in entry.boxes]

    def misplaced(self, folder: Path) -> str | None:
        """What does not fit together: a file of another size, or a tensor where no file of it is."""
        for name, file in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError:
                return f"{name} is missing"
            if size != file.bytes:
                return f"{name} has changed since it was written (size)"
            with (folder / name).open("rb") as stream:
                if hashlib.sha256(stream.read(min(file.header, size))).hexdigest() != file.sha256:
                    return f"{name} has changed since it was written (SHA-256 of its header)"
            for stretch in file.stretches:
                if stretch.at + stretch.bytes > size or len(stretch.sha256) != -(-stretch.bytes // self.block):
                    return f"{INDEX} gives {name} stretches that it has not"
        for name, entry in self.tensors.items():
            width = getattr(torch, entry.dtype).itemsize
            for box in entry.boxes:
                end = box.at + math.prod(box.sizes) * width
                stretches = self.files[box.file].stretches if box.file in self.files else ()
                inside = any(stretch.at <= box.at and end <= stretch.at + stretch.bytes for stretch in stretches)
                within = len(box.offsets) == len(box.sizes) == len(entry.size) and all(
                    o + n <= whole for o, n, whole in zip(box.offsets, box.sizes, entry.size)
                )
                if not (inside and within and box.at % width == 0):
                    return f"{INDEX} places {name!r} where no file of it is"
            if sum(math.prod(box.sizes) for box in entry.boxes) != math.prod(entry.size):
                return f"{INDEX} has only parts of {name!r}"
        return None


J = TypeVar("J", bound=BaseModel)


def _told(file: Path, kind: type[J]) -> J:
    """The content of a JSON file. Raises CheckpointError where it cannot be read or is not of its kind."""
    try:
        return kind.model_validate_json(file.read_bytes())
    except OSError as problem:
        raise CheckpointError(f"{file.name} cannot be read ({type(problem).__name__})") from problem
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"][:3]))
        raise CheckpointError(f"{file.name} cannot be read ({where + ': ' if where else ''}{first['msg']})") from problem


def found(directory: Path) -> list[Path]:
    """Complete-looking checkpoints in a run's folder ``checkpoints``, oldest first."""
    folders = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((p for p in folders if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), key=step_of)


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, by name: on one process, without the model. Raises CheckpointError for a damaged one."""
    damage, _, index = opened(checkpoint)
    if index is not None:
        state = [_room(name, entry) for name, entry in index.tensors.items()]
        if index.format == 1:
            read_packed(checkpoint, state, index)
        else:
            damage = tensorfile.read(checkpoint, index.blocks(), [(box, index.stored(box.name)) for box in state])
    if damage:
        raise CheckpointError(f"{checkpoint}: {damage}")
    return {box.name: box.tensor for box in state}


def export(
    checkpoint: Path, path: Path, load: Callable[[str], nn.Module] | None = None, names: Callable[[str], str | None] | None = None,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint (their average, where there is one) as a safetensors file that ``load`` of the model reads:
    on one process, some tensors at a time. Weights that were not trained are ``load``ed from their own file; None: by the model of
    ours that the checkpoint names. ``names`` gives the name of a weight in the file, and None for one that was trained and is to be
    left out; with it none that was not trained is written. Raises CheckpointError."""
    damage, run, index = opened(checkpoint)
    if run is None or index is None:
        raise CheckpointError(f"{checkpoint}: {damage}")
    if not run.about:
        raise CheckpointError(f"{checkpoint}: does not say which model its weights are of; go on with the run, which leaves them")
    known = index.tensors
    own = [name.removeprefix("model/") for name in known if name.startswith("model/")]
    called = {name: name if names is None else names(name) for name in own}
    source = {told: f"average/{name}" if f"average/{name}" in known else f"model/{name}" for name, told in called.items() if told}
    others = _of_files(checkpoint, run, load) if names is None else {}
    sizes = {name: (getattr(torch, known[key].dtype), known[key].size) for name, key in source.items()}
    sizes |= {name: (tensor.dtype, list(tensor.shape)) for name, tensor in others.items()}
    ordered = sorted(sizes, key=lambda name: (name in others, -sizes[name][0].itemsize, name))
    ends = list(accumulate(math.prod(size) * dtype.itemsize for dtype, size in map(sizes.__getitem__, ordered)))
    entries: dict[str, Any] = {"__metadata__": run.about}
    for name, begin, end in zip(ordered, [0, *ends], ends):
        entries[name] = {"dtype": tensorfile.KINDS[sizes[name][0]], "shape": sizes[name][1], "data_offsets": [begin, end]}
    with path.open("wb") as file:
        file.write(tensorfile.head(entries))
        for some in _some(ordered[: len(source)], ends):
            state = [_room(source[name], known[source[name]]) for name in some]
            if damage := tensorfile.read(checkpoint, index.blocks(), [(box, index.stored(box.name)) for box in state]):
                raise CheckpointError(f"{checkpoint}: {damage}")
            for box in state:
                file.write(_bytes(box.tensor))
        for name in ordered[len(source) :]:
            file.write(_bytes(others[name]))


def _of_files(checkpoint: Path, run: RunFile, load: Callable[[str], nn.Module] | None) -> dict[str, Tensor]:
    """Weights that are not in the checkpoint, from the files that it names."""
    found: dict[str, Tensor] = {}
    for seal, origin in run.origins.items():
        if not Path(origin).is_file() or sealed(Path(origin))["sha256"] != seal:
            raise CheckpointError(f"{checkpoint}: weights that were not trained are of {origin} (SHA-256 {seal}); put it back")
        kind = re.search(r'"model": "(\w+)"', run.about.get("hpcai", ""))
        if load is None and (kind is None or find_spec(f"hpcai.models.{kind[1]}") is None):
            raise CheckpointError(f"{checkpoint}: holds a model that hpcai does not have; its run leaves the weights at its end")
        state = (load or import_module(f"hpcai.models.{kind and kind[1]}.load").load_weights)(origin).state_dict()
        found |= {name: state[name].contiguous() for name, other in run.frozen.items() if other == seal}
    return found


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _some(names: list[str], ends: list[int], most: int = 1 << 28) -> Iterator[list[str]]:
    """``names`` in groups of about ``most`` bytes, from where the tensor of each ends."""
    parts = groupby(zip(names, ends), lambda pair: pair[1] // most)
    return ([name for name, _ in part] for _, part in parts)


def _room(name: str, entry: Entry) -> Box:
    return Box(name, tuple(entry.size), (0,) * len(entry.size), torch.empty(entry.size, dtype=getattr(torch, entry.dtype)))


def opened(path: Path) -> tuple[str, RunFile | None, Index | None]:
    """What is wrong with a checkpoint as far as its JSON files and the sizes of the others tell, or nothing; its run and index."""
    try:
        manifest = _told(path / MANIFEST, _Manifest)
        for name in sorted({*manifest.files, RUN, INDEX}):
            if name not in manifest.files or not (path / name).is_file():
                return f"{name} is missing", None, None
            if sealed(path / name) != manifest.files[name].model_dump():
                return f"{name} has changed since it was written (size or SHA-256)", None, None
        run, index = _told(path / RUN, RunFile), _told(path / INDEX, Index)
        if index.format == 1:
            ends = {name: seal.bytes for name, seal in manifest.files.items()}
            packed = ((name, box) for name, entry in index.tensors.items() for box in entry.boxes)
            stray = [name for name, box in packed if box.at + box.bytes > ends.get(box.file, -1)]
            wrong = f"{INDEX} places {stray[0]!r} where no file of it is" if stray else None
        else:
            wrong = index.misplaced(path)
    except CheckpointError as problem:
        return str(problem), None, None
    return (wrong, None, None) if wrong else ("", run, index)


def damage(checkpoint: Path) -> str:
    """What is wrong with any byte of a checkpoint, or nothing."""
    problem, _, index = opened(checkpoint)
    blocks = [block for file in index.blocks().values() for block in file] if index else []
    return problem or tensorfile.wrong(checkpoint, blocks)


def read_packed(path: Path, wanted: Sequence[Box], index: Index) -> None:
    """Fill each box from a checkpoint of format 1, in which torch packed each by itself."""
    for box in wanted:
        for part in index.tensors[box.name].boxes:
            low = [max(a, b) for a, b in zip(box.offsets, part.offsets)]
            high = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.tensor.shape, part.offsets, part.sizes)]
            if any(a >= b for a, b in zip(low, high)):
                continue
            with (path / part.file).open("rb") as file:
                file.seek(part.at)
                found = torch.load(io.BytesIO(file.read(part.bytes)), weights_only=True)
            if list(found.shape) != part.sizes:
                raise CheckpointError(f"{part.file} holds {box.name} as {list(found.shape)}, {INDEX} says {part.sizes}")
            into, of = (tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at)) for at in (box.offsets, part.offsets))
            box.tensor[into].copy_(found[of])


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def sealed(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
