"""Checkpoints to resume from: whole or not there.

A checkpoint is a folder ``step-00000120`` of tensors (torch.distributed.checkpoint), an index of them and the state of the
run as JSON, and a manifest with the size and SHA-256 of each file. It is written as ``.step-00000120.partial``, flushed, and
renamed once the manifest is there; only then are old ones removed. Nothing in it is a pickle.
"""

import hashlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from pydantic import AfterValidator, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hpcai.dist.collect import agree, gather_objects
from hpcai.dist.mesh import Mesh
from hpcai.durable import flush
from hpcai.errors import CheckpointError
from hpcai.parallel.rows import Share
from hpcai.settings import CheckpointConfig
from hpcai.train import rng
from hpcai.train.step import Step

T = TypeVar("T")
_INDEX, _RUN, _MANIFEST = "index.json", "run.json", "manifest.json"
_FORMAT: Literal[1] = 1
_COUNT = "optimizer/step"
_NAME = re.compile(r"step-(\d{8,})")


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
    bytes: NonNegativeInt
    sha256: str


class _Manifest(BaseModel):
    format: Literal[1]
    files: dict[Annotated[str, Field(pattern=r"^\w[\w.-]*$")], _Seal]


class _RunFile(BaseModel):
    format: Literal[1]
    world: PositiveInt
    progress: Progress
    settings: dict[str, Any]
    data: str = ""


class _Chunk(BaseModel):
    offsets: list[NonNegativeInt]
    sizes: list[NonNegativeInt]
    file: str
    at: NonNegativeInt
    bytes: NonNegativeInt


class _Entry(BaseModel):
    dtype: Annotated[str, AfterValidator(_is_dtype)]
    size: list[NonNegativeInt]
    chunks: list[_Chunk]


class _Index(BaseModel):
    format: Literal[1]
    tensors: dict[str, _Entry]


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


class Checkpoints:
    """The checkpoints of one run, below ``directory``. All processes call each method together.

    Each checkpoint keeps the run's ``settings``; a run whose ``frozen`` sections (the model) differ from them is refused, other
    differences are noted. ``data`` identifies the data set: a run on another one is refused, unless ``checkpoint.other_data``.
    """

    def __init__(
        self, directory: str | Path, cfg: CheckpointConfig, mesh: Mesh, settings: dict[str, Any] | None = None,
        frozen: tuple[str, ...] = ("model",),
    ) -> None:  # fmt: skip
        self.directory, self.cfg, self.mesh = Path(directory), cfg, mesh
        self.settings, self.frozen = settings or {}, frozen
        self.data = ""
        self.notes: list[str] = []
        self._refused: list[Path] = []
        self._among: dict[str, Any] = {"process_group": mesh.everyone.group, "no_dist": mesh.world == 1}

    def save(self, step: Step, progress: Progress) -> tuple[Path, float, int]:
        """Write a checkpoint -> its path, seconds, bytes. After a CheckpointError nothing has changed and older ones are whole."""
        began = time.perf_counter()
        final = self.directory / f"step-{progress.step:08d}"
        partial = self.directory / f".{final.name}.partial"
        self._together(f"{final} cannot be written", lambda: self._clear(partial), first_only=True)
        step.average.level()
        state = _tensors(step, self.mesh.rank)
        own: dict[str, dict[str, Any]] = {}

        def write() -> None:
            _quietly(lambda: dcp.save(state, storage_writer=_Writer(partial), planner=_SavePlan(), **self._among))
            for file in partial.glob(f"__{self.mesh.rank}_*.distcp"):
                own[file.name] = _seal(file)

        self._together(f"{final} cannot be written", write, clean=partial)
        files = {name: entry for part in gather_objects(own, self.mesh.everyone) for name, entry in part.items()}
        self._together(
            f"{final} cannot be written", lambda: self._commit(partial, final, files, progress), clean=partial, first_only=True
        )
        return final, time.perf_counter() - began, sum(entry["bytes"] for entry in files.values())

    def _commit(self, partial: Path, final: Path, files: dict[str, dict[str, Any]], progress: Progress) -> None:
        run = {"format": _FORMAT, "world": self.mesh.world, "progress": asdict(progress), "settings": self.settings}
        run["data"] = self.data
        _write(partial / _RUN, json.dumps(run, indent=1))
        files = files | {name: _seal(partial / name) for name in (_INDEX, _RUN)}
        _write(partial / _MANIFEST, json.dumps({"format": _FORMAT, "files": files}, indent=1))
        flush(partial)
        for path in {*self._refused, final}:
            _set_aside(path)
        self._refused = []
        partial.rename(final)
        flush(self.directory)
        older = [path for path in self.found() if _number(path) < progress.step]
        for path in older[: len(older) + 1 - self.cfg.keep]:
            shutil.rmtree(path, ignore_errors=True)

    def found(self) -> list[Path]:
        return found(self.directory)

    def resume(self, step: Step) -> Progress | None:
        """Load the newest whole checkpoint into ``step``; None when there is none. Damaged ones are named in ``notes``; the next
        ``save`` sets them aside as ``damaged-...``.
        """
        if self.cfg.resume == "never":
            if agree(bool(self.found()), self.mesh.everyone):
                raise CheckpointError(
                    f"{self.directory} holds checkpoints of an earlier run, and checkpoint.resume is never; "
                    "choose another report.directory, remove them, or set checkpoint.resume=auto"
                )
            return None
        if self.mesh.is_first and self.directory.is_dir():
            self.notes += [f"{p.name} was not finished and is ignored" for p in self.directory.glob(".step-*.partial")]
        for path in reversed(agree(self.found(), self.mesh.everyone)):
            damage = next((text for text in gather_objects(self._damage(path), self.mesh.everyone) if text), None)
            if damage:
                self.notes.append(f"{path.name} is passed over: {damage}")
                self._refused.append(path)
                continue
            return self._load(path, step)
        return None

    def _damage(self, path: Path) -> str | None:
        """What is wrong with the files of ``path``; each process looks at its share of them."""
        try:
            files = _told(path / _MANIFEST, _Manifest).files
            for name in sorted({*files, _RUN, _INDEX})[self.mesh.rank :: self.mesh.world]:
                if name not in files or not (path / name).is_file():
                    return f"{name} is missing"
                if _seal(path / name) != files[name].model_dump():
                    return f"{name} has changed since it was written (size or SHA-256)"
            _told(path / _RUN, _RunFile)
            for tensor, entry in _told(path / _INDEX, _Index).tensors.items():
                for chunk in entry.chunks:
                    if chunk.file not in files or chunk.at + chunk.bytes > files[chunk.file].bytes:
                        return f"{_INDEX} places {tensor!r} where no file of it is"
        except CheckpointError as problem:
            return str(problem)
        return None

    def _load(self, path: Path, step: Step) -> Progress:
        run, index = _told(path / _RUN, _RunFile), _told(path / _INDEX, _Index).tensors
        self._compare(path, run)
        state = _tensors(step, self.mesh.rank)
        anew = {key: state.pop(key) for key in list(state) if key.startswith("rng/") and run.world != self.mesh.world}
        if _COUNT not in index:  # written when each parameter had a count of its own, and sgd none
            state.pop(_COUNT)
        missing = sorted(set(state) - set(index))
        if missing:
            whose = missing[0].partition("/")[0]
            raise CheckpointError(f"{path}: holds no {missing[0]!r} (and {len(missing) - 1} more); it belongs to another {whose}")
        progress = run.progress

        def read() -> None:
            _quietly(lambda: dcp.load(state, storage_reader=_Reader(path), planner=_LoadPlan(), **self._among))
            if not anew:
                rng.restore({key.rsplit("/", 1)[1]: t for key, t in state.items() if key.startswith(f"rng/{self.mesh.rank}/")})

        self._together(f"{path} cannot be read", read)
        step.optimizer.refresh()
        step.sums.spread()
        if anew:
            self.notes.append(f"{run.world} processes wrote {path.name} and {self.mesh.world} read it: random numbers start anew")
            rng.seed_all(hash((progress.step, self.mesh.rank)) % 2**63)
        step.count = progress.step
        if _COUNT not in index:
            step.optimizer.count.fill_(progress.step)
        return progress

    def _compare(self, path: Path, run: _RunFile) -> None:
        """Refuse what may not differ between a run and the checkpoint that it goes on from, and note what else does."""
        for section in self.frozen:
            if changes := _changes(run.settings.get(section), self.settings.get(section), section):
                raise CheckpointError(
                    f"{path}: the run was started with other settings ({', '.join(changes)}); keep them or choose another "
                    "report.directory"
                )
        if self.data and run.data and self.data != run.data:
            text = f"{path.name} was trained on another data set ({run.data} then, {self.data} now)"
            if not self.cfg.other_data:
                raise CheckpointError(f"{path.parent}: {text}; set checkpoint.other_data=true if that is meant")
            self.notes.append(text)
        told = {name for name in run.settings.keys() & self.settings.keys() if name not in (*self.frozen, "report")}
        self.notes += [text for name in sorted(told) for text in _changes(run.settings[name], self.settings[name], name)]

    def _clear(self, partial: Path) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        for left in partial.parent.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir()

    def _together(self, what: str, action: Callable[[], None], clean: Path | None = None, first_only: bool = False) -> None:
        """Run ``action`` and raise CheckpointError on all processes when it failed on one."""
        problem = ""
        if self.mesh.is_first or not first_only:
            try:
                action()
            except (Exception, CheckpointException) as error:
                problem = _reason(error)
        problem = next((text for text in gather_objects(problem, self.mesh.everyone) if text), "")
        if problem:
            if clean is not None and self.mesh.is_first:
                shutil.rmtree(clean, ignore_errors=True)
            whole = self.found()
            left = f"{whole[-1].name} is the newest whole checkpoint" if whole else "there is no checkpoint yet"
            raise CheckpointError(f"{what}: {problem}; {left}")


def found(directory: Path) -> list[Path]:
    """Complete-looking checkpoints in a run's folder ``checkpoints``, oldest first."""
    folders = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((p for p in folders if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), key=_number)


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, by name: on one process, without the model."""
    index = _told(checkpoint / _INDEX, _Index).tensors
    state = {name: torch.empty(entry.size, dtype=getattr(torch, entry.dtype)) for name, entry in index.items()}
    _quietly(lambda: dcp.load(state, storage_reader=_Reader(checkpoint), no_dist=True))
    return state


class _Writer(FileSystemWriter):
    """torch's writer with an index of tensors as JSON where torch would pickle its own."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        for result in (r for part in results for r in part):
            about, info = metadata.state_dict_metadata[result.index.fqn], result.storage_data
            if not isinstance(about, TensorStorageMetadata):
                raise CheckpointError(f"{result.index.fqn}: only tensors are kept in a checkpoint, found a {type(about).__name__}")
            entry = tensors.setdefault(
                result.index.fqn,
                {"dtype": str(about.properties.dtype).removeprefix("torch."), "size": list(about.size), "chunks": []},
            )
            offsets = list(result.index.offset or [0] * len(about.size))
            sizes = next(list(c.sizes) for c in about.chunks if list(c.offsets) == offsets)
            entry["chunks"].append(
                {"offsets": offsets, "sizes": sizes, "file": info.relative_path, "at": info.offset, "bytes": info.length}
            )
        _write(Path(self.path) / _INDEX, json.dumps({"format": _FORMAT, "tensors": tensors}))


class _Reader(FileSystemReader):
    """torch's reader on ``_Writer``'s index; it reads tensors with ``weights_only``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        about: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in _told(Path(self.path) / _INDEX, _Index).tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            about[name] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
            for number, chunk in enumerate(entry.chunks):
                storage[MetadataIndex(name, chunk.offsets, number)] = _StorageInfo(chunk.file, chunk.at, chunk.bytes)
        return Metadata(state_dict_metadata=about, storage_data=storage)


def _tensors(step: Step, rank: int) -> dict[str, Any]:
    """All tensors that resuming needs, by name and without a copy: weights in full precision, and this rank's share of those that
    are divided."""
    step.sums.settle()
    parts: dict[str, dict[str, Any]] = {
        "model": {**step.model.state_dict(), **step.optimizer.weights()},
        "optimizer": step.optimizer.state(),
        "average": step.average.state(),
    }
    state = {f"{kind}/{name}": _Cut(t) if isinstance(t, Share) else t for kind, part in parts.items() for name, t in part.items()}
    return state | {f"rng/{rank}/{name}": tensor for name, tensor in rng.state().items()}


class _Cut:
    """A share of a parameter's numbers as torch.distributed.checkpoint writes and reads it: a few boxes of the whole."""

    def __init__(self, share: Share) -> None:
        self._size, self._dtype = torch.Size(share.part.parameter.shape), share.row.dtype
        self._boxes = {torch.Size(offsets): box for offsets, box in share.part.boxes(share.row)}

    def size(self) -> torch.Size:
        return self._size

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        about = TensorProperties(dtype=self._dtype)
        chunks = {chunk.offsets: TensorWriteData(chunk, about, self._size) for chunk in self.__create_chunk_list__()}
        return [WriteItem(MetadataIndex(name, at), WriteItemType.SHARD, tensor_data=data) for at, data in chunks.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, box.size()) for offsets, box in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes[index.offset]


class _SavePlan(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, _Cut) else super().lookup_object(index)


class _LoadPlan(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # torch's own goes through the values and forgets those of a kind that it does not know.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, _Cut) else super().lookup_tensor(index)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _set_aside(path: Path) -> None:
    """Rename what stands where a checkpoint is written, or was refused, so that nobody takes it for one and nothing is lost."""
    if path.exists() or path.is_symlink():
        names = (path.with_name(f"damaged-{path.name}{f'.{again}' if again else ''}") for again in range(1000))
        path.rename(next(name for name in names if not name.exists() and not name.is_symlink()))


def _seal(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    flush(path)


def _quietly(action: Callable[[], T]) -> T:
    with warnings.catch_warnings():  # torch warns of its own deprecated calls, and that one process needs no process group
        warnings.simplefilter("ignore")
        return action()


def _reason(error: BaseException) -> str:
    """Why ``error`` came: the system's own words when a disk is full or a path cannot be written, however deep they lie."""
    # torch gathers the errors of all ranks in an exception of its own, which is no Exception.
    for cause in (found[0] for found in error.failures.values()) if isinstance(error, CheckpointException) else (error,):
        link: BaseException | None = cause
        while link is not None:
            if isinstance(link, OSError) and link.strerror:
                return link.strerror
            link = link.__cause__ or link.__context__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1] if text else ''}"


def _changes(before: Any, now: Any, path: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        return [text for key in sorted({*before, *now}) for text in _changes(before.get(key), now.get(key), f"{path}.{key}")]
    return [] if before == now else [f"{path}: {before} then, {now} now"]
