"""Checkpoints to resume from: whole or not there.

A checkpoint is a folder ``step-00000120`` of a few files of tensors (``train/tensorfile``: anything that reads safetensors opens
them), an index that says where each box of each tensor lies and what SHA-256 each block has, the state of the run, and a manifest
that seals both. It is written as ``.step-00000120.partial``, flushed, and renamed once the manifest is there; only then are old
ones removed. Which rank writes what follows from how the weights are cut, so that no plan is gathered. Nothing is a pickle.
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as torch_dist
from pydantic import AfterValidator, AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from hpcai.dist.collect import agree, gather_objects, sum_in_place
from hpcai.dist.mesh import Mesh
from hpcai.durable import flush
from hpcai.errors import CheckpointError
from hpcai.parallel.rows import Share, alike, place_of
from hpcai.settings import CheckpointConfig
from hpcai.train import rng, tensorfile
from hpcai.train.step import Step
from hpcai.train.tensorfile import BLOCK, Block, Box, Contents, Stored

_INDEX, _RUN, _MANIFEST = "index.json", "run.json", "manifest.json"
_FORMAT: Literal[2] = 2
_COUNT = "optimizer/step"
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
    bytes: NonNegativeInt
    sha256: str


class _Manifest(BaseModel):
    format: Literal[1, 2]
    files: dict[Annotated[str, Field(pattern=_FILE)], _Seal]


class _RunFile(BaseModel):
    format: Literal[1, 2]
    world: PositiveInt
    progress: Progress
    settings: dict[str, Any]
    data: str = ""


class _Box(BaseModel):
    offsets: list[NonNegativeInt]
    sizes: list[NonNegativeInt]
    file: str
    at: NonNegativeInt
    bytes: NonNegativeInt = 0  # of format 1, where each box was packed by itself


class _Entry(BaseModel):
    dtype: Annotated[str, AfterValidator(_is_dtype)]
    size: list[NonNegativeInt]
    boxes: list[_Box] = Field(validation_alias=AliasChoices("boxes", "chunks"))


class _Stretch(BaseModel):
    writer: NonNegativeInt
    at: NonNegativeInt
    bytes: NonNegativeInt
    sha256: list[str]


class File(BaseModel):
    bytes: NonNegativeInt
    header: NonNegativeInt
    sha256: str
    stretches: list[_Stretch]


class Index(BaseModel):
    """Where each box of each tensor lies. Its files are not in the index of format 1, whose manifest has them."""

    format: Literal[1, 2]
    block: Annotated[int, Field(ge=8, le=1 << 30, multiple_of=8)] = BLOCK
    files: dict[Annotated[str, Field(pattern=_FILE)], File] = {}
    tensors: dict[str, _Entry]

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
                if hashlib.sha256(stream.read(file.header)).hexdigest() != file.sha256:
                    return f"{name} has changed since it was written (SHA-256 of its header)"
            for stretch in file.stretches:
                if stretch.at + stretch.bytes > size or len(stretch.sha256) != -(-stretch.bytes // self.block):
                    return f"{_INDEX} gives {name} stretches that it has not"
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
                    return f"{_INDEX} places {name!r} where no file of it is"
            if sum(math.prod(box.sizes) for box in entry.boxes) != math.prod(entry.size):
                return f"{_INDEX} has only parts of {name!r}"
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
        self._placed: Step | None = None  # whose boxes have their places
        self._own_place: tuple[str, int] | None = None
        self._contents: Contents | None = None  # of all files of a checkpoint, on the first process

    def save(self, step: Step, progress: Progress) -> tuple[Path, float, int]:
        """Write a checkpoint -> its path, seconds, bytes. After a CheckpointError nothing has changed and older ones are whole."""
        began = time.perf_counter()
        final = self.directory / f"step-{progress.step:08d}"
        partial, what = self.directory / f".{final.name}.partial", f"{final} cannot be written"
        self._together(what, lambda: self._clear(partial), first_only=True)
        step.average.level()
        own = tensorfile.dealt(_boxes(step, self.mesh), self.cfg.writers)
        place, hashes = self._place(step, own), b""

        def write() -> None:
            nonlocal hashes
            if place is not None:
                hashes = tensorfile.write(partial / place[0], place[1], own)

        self._together(what, write, clean=partial)
        found = self._to_first(hashes)
        self._together(what, lambda: self._commit(partial, final, found, progress), clean=partial, first_only=True)
        size = sum(box.tensor.nbytes for box in own)
        return final, time.perf_counter() - began, int(sum_in_place(torch.tensor(size), self.mesh.everyone).item())

    def _place(self, step: Step, own: Sequence[Box]) -> tuple[str, int] | None:
        """File and offset where this process writes, None where it writes nothing. The first process hears once what each has."""
        if self._placed is not step:
            entries = self._to_first(json.dumps([box.entry() for box in own]).encode() if own else b"")
            places: dict[int, tuple[str, int]] = {}
            if self.mesh.rank == 0:
                told = {rank: json.loads(text) for rank, text in entries.items() if text}
                self._contents = Contents(told, self.cfg.writers)
                places = {each.writer: (each.file, each.at) for each in self._contents.stretches}
            self._own_place, self._placed = agree(places, self.mesh.everyone).get(self.mesh.rank), step
        return self._own_place

    def _to_first(self, own: bytes) -> dict[int, bytes]:
        """What each process has, by rank, on the first. Those that have nothing send nothing but that."""
        everyone = self.mesh.everyone
        if everyone.size == 1:
            return {0: own}
        lengths = torch.zeros(everyone.size, dtype=torch.int64)
        lengths[everyone.rank] = len(own)
        sum_in_place(lengths, everyone)
        found = {0: own}
        if everyone.rank:
            if own:
                torch_dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), group=everyone.group, group_dst=0)
            return {}
        for rank, length in enumerate(lengths.tolist()):
            if rank and length:
                into = torch.empty(length, dtype=torch.uint8)
                torch_dist.recv(into, group=everyone.group, group_src=rank)
                found[rank] = into.numpy().tobytes()
        return found

    def _commit(self, partial: Path, final: Path, hashes: dict[int, bytes], progress: Progress) -> None:
        assert self._contents is not None
        for name, header in self._contents.headers.items():
            with open(os.open(partial / name, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                file.write(header)
            flush(partial / name)
        run = {"format": _FORMAT, "world": self.mesh.world, "progress": asdict(progress), "settings": self.settings}
        run["data"] = self.data
        _write(partial / _RUN, json.dumps(run, indent=1))
        _write(partial / _INDEX, json.dumps({"format": _FORMAT, **self._contents.index(hashes)}))
        files = {name: _seal(partial / name) for name in (_INDEX, _RUN)}
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
        touched = False
        for path in reversed(agree(self.found(), self.mesh.everyone)):
            damage, run, index = agree(opened(path) if self.mesh.rank == 0 else ("", None, None), self.mesh.everyone)
            if not damage:
                assert run is not None and index is not None
                touched, damage = True, self._load(path, run, index, step)
                if not damage:
                    return run.progress
            self.notes.append(f"{path.name} is passed over: {damage}")
            self._refused.append(path)
        if touched:
            raise CheckpointError(
                f"{self.directory}: no checkpoint is whole ({'; '.join(self.notes)}); training would begin anew: if that is meant, "
                "remove them or choose another report.directory"
            )
        return None

    def _load(self, path: Path, run: _RunFile, index: Index, step: Step) -> str:
        """Put a checkpoint into ``step`` -> what is damaged, or nothing."""
        self._compare(path, run)
        wanted = _boxes(step, self.mesh)
        anew = run.world != self.mesh.world
        counted = _COUNT in index.tensors  # not when each parameter had a count of its own, and sgd none
        state = [b for b in wanted if not (anew and b.name.startswith("rng/")) and (counted or b.name != _COUNT)]
        self._check_names(path, state, index)
        random = {box.name.rsplit("/", 1)[1]: box.tensor for box in state if box.name.startswith("rng/")}
        problem = ""
        try:
            if index.format == 1:
                _read_packed(path, state, index)
            else:
                problem = tensorfile.read(path, index.blocks(), [(box, index.stored(box.name)) for box in state])
            if not (problem or anew):
                rng.restore(random)
        except Exception as error:
            problem = _reason(error)
        if problem := self._first_of(problem):
            return problem
        step.optimizer.refresh()
        step.sums.spread()
        if anew:
            self.notes.append(f"{run.world} processes wrote {path.name} and {self.mesh.world} read it: random numbers start anew")
            rng.seed_all(hash((run.progress.step, self.mesh.rank)) % 2**63)
        step.count = run.progress.step
        if not counted:
            step.optimizer.count.fill_(run.progress.step)
        return ""

    def _check_names(self, path: Path, state: Sequence[Box], index: Index) -> None:
        """Refuse a checkpoint that lacks a tensor of the run, or has it in another size."""
        wrong = [(box.name, f"no {box.name!r}") for box in state if box.name not in index.tensors]
        if not wrong:
            pairs = ((box, tuple(index.tensors[box.name].size)) for box in state)
            wrong = [(box.name, f"{box.name!r} as {list(n)}, not {list(box.size)}") for box, n in pairs if n != box.size]
        names = list(dict.fromkeys(text for _, text in wrong))
        text = ", ".join(names[:10]) + (f" (and {len(names) - 10} more)" if len(names) > 10 else "")
        if text := self._first_of(f"{text}; it belongs to another {wrong[0][0].partition('/')[0]}" if wrong else ""):
            raise CheckpointError(f"{path}: holds {text}")

    def _first_of(self, problem: str) -> str:
        """The problem of the first process that has one, or nothing."""
        if not sum_in_place(torch.tensor(int(bool(problem))), self.mesh.everyone).item():
            return ""
        return next(text for text in gather_objects(problem, self.mesh.everyone) if text)

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
            except Exception as error:
                problem = _reason(error)
        if problem := self._first_of(problem):
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
    """All tensors of a checkpoint, whole, by name: on one process, without the model. Raises CheckpointError for a damaged one."""
    damage, _, index = opened(checkpoint)
    if index is not None:
        state = [
            Box(name, tuple(entry.size), (0,) * len(entry.size), torch.empty(entry.size, dtype=getattr(torch, entry.dtype)))
            for name, entry in index.tensors.items()
        ]
        if index.format == 1:
            _read_packed(checkpoint, state, index)
        else:
            damage = tensorfile.read(checkpoint, index.blocks(), [(box, index.stored(box.name)) for box in state])
    if damage:
        raise CheckpointError(f"{checkpoint}: {damage}")
    return {box.name: box.tensor for box in state}


def opened(path: Path) -> tuple[str, _RunFile | None, Index | None]:
    """What is wrong with a checkpoint as far as its JSON files and the sizes of the others tell, or nothing; its run and index."""
    try:
        manifest = _told(path / _MANIFEST, _Manifest)
        for name in sorted({*manifest.files, _RUN, _INDEX}):
            if name not in manifest.files or not (path / name).is_file():
                return f"{name} is missing", None, None
            if _seal(path / name) != manifest.files[name].model_dump():
                return f"{name} has changed since it was written (size or SHA-256)", None, None
        run, index = _told(path / _RUN, _RunFile), _told(path / _INDEX, Index)
        if index.format == 1:
            ends = {name: seal.bytes for name, seal in manifest.files.items()}
            packed = ((name, box) for name, entry in index.tensors.items() for box in entry.boxes)
            stray = [name for name, box in packed if box.at + box.bytes > ends.get(box.file, -1)]
            wrong = f"{_INDEX} places {stray[0]!r} where no file of it is" if stray else None
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


def _read_packed(path: Path, wanted: Sequence[Box], index: Index) -> None:
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
                raise CheckpointError(f"{part.file} holds {box.name} as {list(found.shape)}, {_INDEX} says {part.sizes}")
            into, of = (tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at)) for at in (box.offsets, part.offsets))
            box.tensor[into].copy_(found[of])


def _boxes(step: Step, mesh: Mesh) -> list[Box]:
    """All that resuming needs, by name and without a copy: weights in full precision, and this rank's boxes of those that are
    divided."""
    step.sums.settle()
    first = {parameter: name for name, parameter in step.model.named_parameters()}  # a tied weight has further names
    weights, state = step.optimizer.weights(), step.model.state_dict(keep_vars=True)
    parts: dict[str, dict[str, Tensor | Share]] = {
        "model": {name: weights.get(first.get(value, name), value) for name, value in state.items()},
        "optimizer": step.optimizer.state(),
        "average": step.average.state(),
        f"rng/{mesh.rank}": dict(rng.state()),
    }
    alone = f"rng/{mesh.rank}"
    return [box for kind, part in parts.items() for name, value in part.items()
            for box in _boxes_of(f"{kind}/{name}", value, None if kind == alone else mesh)]  # fmt: skip


def _boxes_of(name: str, value: Tensor | Share, mesh: Mesh | None) -> Iterator[Box]:
    if isinstance(value, Share):
        for offsets, tensor in value.part.boxes(value.row):
            yield Box(name, value.part.place.size, offsets, tensor, value.copies)
    else:
        place, copies = place_of(value), alike(value, mesh) if mesh else ()
        for offsets, part in place.boxes((0,) * value.ndim, value.shape):
            yield Box(name, place.size, offsets, value[part], copies)


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


def _reason(error: BaseException) -> str:
    """Why ``error`` came: the system's own words when a disk is full or a path cannot be written, however deep they lie."""
    link: BaseException | None = error
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
