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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as torch_dist
from pydantic import AfterValidator, AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor, nn

from hpcai.dist.collect import agree, gather_objects, sum_in_place
from hpcai.dist.mesh import Axis, Mesh
from hpcai.durable import flush
from hpcai.errors import CheckpointError
from hpcai.nn.weights import Portable
from hpcai.parallel.rows import Share, alike, place_of
from hpcai.settings import CheckpointConfig
from hpcai.train import tensorfile
from hpcai.train.aside import later
from hpcai.train.step import Step
from hpcai.train.tensorfile import BLOCK, Block, Box, Contents, Stored

_INDEX, _RUN, _MANIFEST = "index.json", "run.json", "manifest.json"
_FORMAT: Literal[2] = 2
_COUNT = "optimizer/step"
_NAME = re.compile(r"step-(\d{8,})")
_FILE = r"^\w[\w.-]*$"
_PATIENCE = 600.0  # seconds that the end of a failed run waits for a save


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
    frozen: dict[str, str] = {}
    """by name: SHA-256 of the file with weights that are not trained, and so not in the checkpoint"""
    origins: dict[str, str] = {}
    """by SHA-256: where these files were"""
    about: dict[str, str] = {}
    """which model the weights are of, as the files of weights say it"""


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


@dataclass
class Saved:
    """A checkpoint that was written: seconds since ``begin``, bytes of all its tensors."""

    step: int
    path: Path
    seconds: float
    bytes: int


class _Own:
    """What this process writes: ``boxes`` of its memory, and room for them on the ``host``, one behind another."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.host = torch.empty(0, dtype=torch.uint8)
        self.place: tuple[str, int] | None = None  # file and offset; None: it writes nothing
        self.ranks: list[int] = []  # of all that write, and the first process
        self.writers: Axis | None = None  # a channel for them
        self.bytes = 0  # of all processes
        self._made: tuple[Any, ...] = ()
        self._room: list[Tensor] = []
        self._ready: Any = None

    def renew(self, step: Step, writers: int, frozen: Collection[str]) -> bool:
        """Find the boxes of ``step``, but for weights that are ``frozen`` -> whether these are in other memory than at the last
        call."""
        step.sums.settle()
        tensors = (*step.model.parameters(), *step.model.buffers())
        made = (step, *(getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors))
        if made == self._made:
            return False
        self._made, self.boxes = made, tensorfile.dealt(_boxes(step, step.mesh, frozen), writers)
        size = sum(box.tensor.nbytes for box in self.boxes)
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=step.mesh.device.type == "cuda")
        ends = list(accumulate((box.tensor.nbytes for box in self.boxes), initial=0))
        raw = (self.host[a:b].view(box.tensor.dtype) for a, b, box in zip(ends, ends[1:], self.boxes))
        self._room = [part.view(box.tensor.shape) for part, box in zip(raw, self.boxes)]
        return True

    @torch.no_grad()
    def copy(self) -> None:
        for into, box in zip(self._room, self.boxes):
            into.copy_(box.tensor, non_blocking=True)
        self._ready = torch.cuda.current_stream().record_event() if self.host.is_pinned() else None

    def wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()


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
        self._own = _Own()
        self._frozen: tuple[Step, dict[str, str], dict[str, str]] | None = None
        self._under_way: Future[Saved | CheckpointError] | None = None
        self._contents: Contents | None = None  # of all files of a checkpoint, on the first process

    def save(self, step: Step, progress: Progress) -> Saved:
        """Write a checkpoint. After a CheckpointError nothing has changed and older ones are whole."""
        self.begin(step, progress)
        outcome = self.finish()
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def begin(self, step: Step, progress: Progress) -> None:
        """Begin to write a checkpoint. It returns once this process's part is copied to the host (on a GPU, once that is ordered),
        and a thread writes it while training goes on. ``finish`` comes before the next one."""
        began = time.perf_counter()
        step.average.level()
        frozen, origins = self._not_saved(step)
        if self._own.renew(step, self.cfg.writers, frozen):
            self._meet()
        self._own.copy()
        final = self.directory / f"step-{progress.step:08d}"
        run = {"format": _FORMAT, "world": self.mesh.world, "progress": asdict(progress), "settings": self.settings}
        run |= {"frozen": frozen, "origins": origins}
        run["data"] = self.data
        if isinstance(step.model, Portable):
            run["about"] = step.model.about
        saved = Saved(progress.step, final, 0.0, self._own.bytes)

        def write() -> Saved | CheckpointError:
            problem = self._write(final, run, progress.step)
            saved.seconds = time.perf_counter() - began
            if not problem:
                return saved
            whole = self.found()
            left = f"{whole[-1].name} is the newest whole checkpoint" if whole else "there is no checkpoint yet"
            return CheckpointError(f"{final} cannot be written: {problem}; {left}")

        self._under_way = later(write, "checkpoint")

    @property
    def under_way(self) -> bool:
        """Whether a save was begun that ``finish`` has not ended."""
        return self._under_way is not None

    @property
    def outcome(self) -> Saved | CheckpointError | None:
        """Of the save that is under way: what this process has heard of it, which on the first one is all there is, or None."""
        return self._under_way.result() if self._under_way is not None and self._under_way.done() else None

    def finish(self) -> Saved | CheckpointError:
        """Wait for the save that is under way -> what became of it, the same on all processes."""
        assert self._under_way is not None
        own, self._under_way = self._under_way.result(), None
        text = agree(str(own) if isinstance(own, CheckpointError) else "", self.mesh.everyone)
        return own if str(own) == text or not text else CheckpointError(text)

    def settle(self) -> None:
        """Wait until this process has written what it has begun to write, at the end of a run that failed."""
        if self._under_way is not None:
            with suppress(TimeoutError):
                self._under_way.exception(_PATIENCE)

    def _not_saved(self, step: Step) -> tuple[dict[str, str], dict[str, str]]:
        """Weights that are not trained and are those of a file (``parameter.origin``): SHA-256 of the file by name, and the file by
        SHA-256. The first process reads each once. Raises CheckpointError on all processes where it cannot."""
        if self._frozen is None or self._frozen[0] is not step:
            named = ((name, getattr(p, "origin", None)) for name, p in step.model.named_parameters() if not p.requires_grad)
            own = {name: origin for name, origin in named if origin}
            every = {name: origin for part in gather_objects(own, self.mesh.everyone) for name, origin in part.items()}
            seals, problem = dict[str, str](), ""
            try:
                seals = {path: _seal(Path(path))["sha256"] for path in sorted(set(every.values())) if self.mesh.rank == 0}
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}, but weights that are not trained were read from it; put it back"
            seals, problem = agree((seals, problem), self.mesh.everyone)
            if problem:
                raise CheckpointError(problem)
            self._frozen = step, {n: seals[path] for n, path in every.items()}, {seal: path for path, seal in seals.items()}
        return self._frozen[1:]

    def _meet(self) -> None:
        """Agree once on who writes where: the first process hears what each has. Those that write get a channel for threads."""
        own, everyone = self._own, self.mesh.everyone
        entries = _to_first(json.dumps([box.entry() for box in own.boxes]).encode() if own.boxes else b"", everyone)
        places: dict[int, tuple[str, int]] = {}
        if everyone.rank == 0:
            told = {rank: json.loads(text) for rank, text in entries.items() if text}
            self._contents = Contents(told, self.cfg.writers)
            places = {each.writer: (each.file, each.at) for each in self._contents.stretches}
        places = agree(places, everyone)
        own.place = places.get(everyone.rank)
        own.bytes = int(sum_in_place(torch.tensor(len(own.host)), everyone).item())
        if own.place is not None or everyone.rank == 0:
            own.ranks = sorted({0, *places})
            own.writers = self.mesh.among("checkpoint", own.ranks)

    def _write(self, final: Path, run: dict[str, Any], number: int) -> str:
        """What the thread of each process does -> why it failed, or nothing. The first one hears of all others' failures."""
        own, partial, hashes = self._own, self.directory / f".{final.name}.partial", b""
        if own.writers is None:
            return ""
        first = own.writers.rank == 0
        problem = agree(_tried(lambda: self._clear(partial)) if first else "", own.writers)
        if problem:
            return problem

        def write() -> None:
            nonlocal hashes
            if own.place is not None:
                own.wait()
                hashes = tensorfile.write(partial / own.place[0], own.place[1], own.host)

        problem = _tried(write)
        told = _to_first(problem.encode() or b"\0" + hashes, own.writers)
        if first:
            failed = [text.decode() for text in told.values() if text[0]]
            found = {own.ranks[place]: text[1:] for place, text in told.items()}
            problem = failed[0] if failed else _tried(lambda: self._commit(partial, final, found, run, number))
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
        return problem

    def _commit(self, partial: Path, final: Path, hashes: dict[int, bytes], run: dict[str, Any], number: int) -> None:
        assert self._contents is not None
        for name, header in self._contents.headers.items():
            with open(os.open(partial / name, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                file.write(header)
            flush(partial / name)
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
        older = [path for path in self.found() if _number(path) < number]
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
            damage, run, index = agree(opened(path) if self.mesh.rank == 0 else ("", None, None), self.mesh.everyone)
            if not damage:
                assert run is not None and index is not None
                damage = self._load(path, run, index, step)
                if not damage:
                    return run.progress
            self.notes.append(f"{path.name} is passed over: {damage}")
            self._refused.append(path)
        if self._refused:
            raise CheckpointError(
                f"{self.directory}: no checkpoint is whole ({'; '.join(self.notes)}); training would begin anew: if that is meant, "
                "remove them or choose another report.directory"
            )
        return None

    def _load(self, path: Path, run: _RunFile, index: Index, step: Step) -> str:
        """Put a checkpoint into ``step`` -> what is damaged, or nothing."""
        self._compare(path, run)
        wanted = _boxes(step, self.mesh, self._still_frozen(path, run, index, step))
        counted = _COUNT in index.tensors  # not when each parameter had a count of its own, and sgd none
        state = [box for box in wanted if counted or box.name != _COUNT]
        self._check_names(path, state, index)
        problem = ""
        try:
            if index.format == 1:
                _read_packed(path, state, index)
            else:
                problem = tensorfile.read(path, index.blocks(), [(box, index.stored(box.name)) for box in state])
        except Exception as error:
            problem = _reason(error)
        if problem := self._first_of(problem):
            return problem
        step.optimizer.refresh()
        step.sums.spread()
        step.count = run.progress.step
        if not counted:
            step.optimizer.count.fill_(run.progress.step)
        return ""

    def _still_frozen(self, path: Path, run: _RunFile, index: Index, step: Step) -> set[str]:
        """Weights that the checkpoint has not, since they are those of a file. One that it has is read, and saved from then on."""
        frozen, origins = self._not_saved(step)
        for name, parameter in step.model.named_parameters():
            if name in frozen and f"model/{name}" in index.tensors:
                del parameter.origin  # type: ignore[attr-defined]
        if kept := {name for name in frozen if f"model/{name}" in index.tensors}:
            self._frozen = step, {name: seal for name, seal in frozen.items() if name not in kept}, origins
        for name, seal in frozen.items():
            if name not in kept and run.frozen.get(name) != seal:
                was = run.frozen.get(name, "none")
                raise CheckpointError(
                    f"{path}: {name} is not trained and was that of {run.origins.get(was, 'no file')} (SHA-256 {was}); now it is "
                    f"that of {origins[seal]} (SHA-256 {seal}); begin with the same weights, or choose another report.directory"
                )
        return set(frozen) - kept

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


def _to_first(own: bytes, axis: Axis) -> dict[int, bytes]:
    """What each process of ``axis`` has, by rank, on the first. Those that have nothing send nothing but that."""
    if axis.size == 1:
        return {0: own}
    lengths = torch.zeros(axis.size, dtype=torch.int64)
    lengths[axis.rank] = len(own)
    sum_in_place(lengths, axis)
    found = {0: own}
    if axis.rank:
        if own:
            torch_dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), group=axis.group, group_dst=0)
        return {}
    for rank, length in enumerate(lengths.tolist()):
        if rank and length:
            into = torch.empty(length, dtype=torch.uint8)
            torch_dist.recv(into, group=axis.group, group_src=rank)
            found[rank] = into.numpy().tobytes()
    return found


def _tried(action: Callable[[], None]) -> str:
    """Why ``action`` failed, or nothing."""
    try:
        action()
    except Exception as error:
        return _reason(error)
    return ""


def found(directory: Path) -> list[Path]:
    """Complete-looking checkpoints in a run's folder ``checkpoints``, oldest first."""
    folders = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((p for p in folders if _NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()), key=_number)


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, by name: on one process, without the model. Raises CheckpointError for a damaged one."""
    damage, _, index = opened(checkpoint)
    if index is not None:
        state = [_room(name, entry) for name, entry in index.tensors.items()]
        if index.format == 1:
            _read_packed(checkpoint, state, index)
        else:
            damage = tensorfile.read(checkpoint, index.blocks(), [(box, index.stored(box.name)) for box in state])
    if damage:
        raise CheckpointError(f"{checkpoint}: {damage}")
    return {box.name: box.tensor for box in state}


def export(checkpoint: Path, path: Path, load: Callable[[str], nn.Module] | None = None) -> None:
    """Write the weights of a checkpoint (their average, where there is one) as a safetensors file that ``load`` of the model reads:
    on one process, some tensors at a time. Weights that were not trained are ``load``ed from their own file; None: by the model of
    ours that the checkpoint names. Raises CheckpointError."""
    damage, run, index = opened(checkpoint)
    if run is None or index is None:
        raise CheckpointError(f"{checkpoint}: {damage}")
    if not run.about:
        raise CheckpointError(f"{checkpoint}: does not say which model its weights are of; go on with the run, which leaves them")
    known = index.tensors
    names = [name.removeprefix("model/") for name in known if name.startswith("model/")]
    source = {name: f"average/{name}" if f"average/{name}" in known else f"model/{name}" for name in names}
    others = _of_files(checkpoint, run, load)
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


def _of_files(checkpoint: Path, run: _RunFile, load: Callable[[str], nn.Module] | None) -> dict[str, Tensor]:
    """Weights that are not in the checkpoint, from the files that it names."""
    found: dict[str, Tensor] = {}
    for seal, origin in run.origins.items():
        if not Path(origin).is_file() or _seal(Path(origin))["sha256"] != seal:
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


def _room(name: str, entry: _Entry) -> Box:
    return Box(name, tuple(entry.size), (0,) * len(entry.size), torch.empty(entry.size, dtype=getattr(torch, entry.dtype)))


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


def _boxes(step: Step, mesh: Mesh, frozen: Collection[str] = ()) -> list[Box]:
    """All that resuming needs but weights that are ``frozen``, by name and without a copy: weights in full precision, and this
    rank's boxes of those that are divided."""
    step.sums.settle()
    first = {parameter: name for name, parameter in step.model.named_parameters()}  # a tied weight has further names
    weights, state = step.sums.idle() | step.optimizer.weights(), step.model.state_dict(keep_vars=True)
    parts: dict[str, dict[str, Tensor | Share]] = {
        "model": {name: weights.get(first.get(value, name), value) for name, value in state.items()
                  if first.get(value, name) not in frozen},
        "optimizer": step.optimizer.state(),
        "average": step.average.state(),
    }
    everyone = alike(torch.empty(0), mesh)
    return [box for kind, part in parts.items() for name, value in part.items()
            for box in _boxes_of(f"{kind}/{name}", value, mesh, everyone)]  # fmt: skip


def _boxes_of(name: str, value: Tensor | Share, mesh: Mesh, everyone: tuple[Axis, ...]) -> Iterator[Box]:
    if isinstance(value, Share):
        for offsets, tensor in value.part.boxes(value.row):
            yield Box(name, value.part.place.size, offsets, tensor, value.copies)
    elif not hasattr(value, "place"):
        yield Box(name, tuple(value.shape), (0,) * value.ndim, value, everyone)
    else:
        place, copies = place_of(value), alike(value, mesh)
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
