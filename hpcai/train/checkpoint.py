"""Checkpoints to resume from: whole or not there.

A checkpoint is a folder ``step-00000120`` of a few files of tensors (``train/tensorfile``: anything that reads safetensors opens
them), an index that says who wrote what of them and what SHA-256 each block has, the state of the run, and a manifest that seals
both. It is written as ``.step-00000120.partial``, flushed, and renamed once the manifest is there; only then are old ones removed.
Which rank writes what follows from how the weights are cut, so that no plan is gathered. Nothing is a pickle.
"""

import functools
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai import __version__
from hpcai.dist.collectives import broadcast_object, broadcast_from_first, gather_distinct, all_reduce_, gather_to_first
from hpcai.dist.host import gc_disabled
from hpcai.dist.mesh import Axis, Mesh
from hpcai.durable import fsync
from hpcai.errors import CheckpointError
from hpcai.nn.weights import Portable
from hpcai.parallel.rows import Share, alike, place_of
from hpcai.settings import CheckpointConfig
from hpcai.train import tensorfile
from hpcai.train.aside import later
from hpcai.train.saved import FORMAT, INDEX, MANIFEST, RUN, DamagedError, Held, Progress, RunFile, found, opened, sealed, step_of
from hpcai.train.step import Step
from hpcai.train.tensorfile import Box

VERSIONS = {"hpcai": __version__, "torch": torch.__version__}

_PATIENCE = 600.0  # seconds that the end of a failed run waits for a save


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
        self._made, self.boxes = made, tensorfile.own(_boxes(step, step.mesh, frozen), writers)
        self.host, self._room = tensorfile.room(self.boxes, step.mesh.device.type == "cuda")
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
        run = {"format": FORMAT, "world": self.mesh.world, "progress": asdict(progress), "settings": self.settings}
        run |= {"frozen": frozen, "origins": origins}
        run |= {"data": self.data, "versions": dict(VERSIONS)}
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
        text = broadcast_object(str(own) if isinstance(own, CheckpointError) else "", self.mesh.peers)
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
            every = {name: origin for part in gather_distinct(own or None, self.mesh.peers).values()
                     for name, origin in part.items()}  # fmt: skip

            def sealed_once() -> dict[str, str]:
                try:
                    return {path: sealed(Path(path))["sha256"] for path in sorted(set(every.values()))}
                except OSError as error:
                    text = f"{error.filename}: {error.strerror}, but weights that are not trained were read from it; put it back"
                    raise CheckpointError(text) from error

            seals = broadcast_from_first(sealed_once, self.mesh.peers)
            self._frozen = step, {n: seals[path] for n, path in every.items()}, {seal: path for path, seal in seals.items()}
        return self._frozen[1:]

    def _meet(self) -> None:
        """Find out once who writes. Those that do get a channel for threads, and so does the first process."""
        own, everyone = self._own, self.mesh.peers
        told = torch.zeros(everyone.size + 1, dtype=torch.int64)
        told[everyone.rank], told[-1] = bool(own.boxes), len(own.host)
        *writes, own.bytes = all_reduce_(told, everyone).tolist()
        own.ranks = [rank for rank, has in enumerate(writes) if has or rank == 0]
        own.writers = self.mesh.subgroup("checkpoint", own.ranks) if everyone.rank in own.ranks else None

    def _write(self, final: Path, run: dict[str, Any], number: int) -> str:
        """What the thread of each process does -> why it failed, or nothing. The first one hears of all others' failures."""
        own, partial, seal = self._own, self.directory / f".{final.name}.partial", dict[str, Any]()
        if own.writers is None:
            return ""
        first = own.writers.rank == 0
        problem = broadcast_object(_tried(lambda: self._clear(partial)) if first else "", own.writers)
        if problem:
            return problem

        def write() -> None:
            nonlocal seal
            if own.boxes:
                own.wait()
                seal = {name: tensorfile.write(partial / name, own.boxes, own.host, self.mesh.peers.rank)}

        name = f"tensors-{own.writers.rank:03d}.safetensors"
        problem = _tried(write)
        told = gather_to_first((problem, seal), own.writers)
        if first:
            problem = next((text for text, _ in told if text), "")
            files = {name: each for _, seals in told for name, each in seals.items()}
            problem = problem or _tried(lambda: self._commit(partial, final, files, run, number))
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
        return problem

    def _commit(self, partial: Path, final: Path, files: dict[str, Any], run: dict[str, Any], number: int) -> None:
        _write(partial / RUN, json.dumps(run, indent=1))
        _write(partial / INDEX, json.dumps({"format": FORMAT, "block": tensorfile.BLOCK, "files": files}))
        seals = {name: sealed(partial / name) for name in (INDEX, RUN)}
        _write(partial / MANIFEST, json.dumps({"format": FORMAT, "files": seals}, indent=1))
        fsync(partial)
        for path in {*self._refused, final}:
            _set_aside(path)
        self._refused = []
        partial.rename(final)
        fsync(self.directory)
        older = [path for path in self.found() if step_of(path) < number]
        for path in older[: len(older) + 1 - self.cfg.keep]:
            shutil.rmtree(path, ignore_errors=True)

    def found(self) -> list[Path]:
        return found(self.directory)

    @gc_disabled()
    def resume(self, step: Step) -> Progress | None:
        """Load the newest whole checkpoint into ``step``; None when there is none. Damaged ones are named in ``notes``; the next
        ``save`` sets them aside as ``damaged-...``.
        """
        if self.cfg.resume == "never":
            if broadcast_object(bool(self.found()), self.mesh.peers):
                raise CheckpointError(
                    f"{self.directory} holds checkpoints of an earlier run, and checkpoint.resume is never; "
                    "choose another report.directory, remove them, or set checkpoint.resume=auto"
                )
            return None
        if self.mesh.is_first and self.directory.is_dir():
            self.notes += [f"{p.name} was not finished and is ignored" for p in self.directory.glob(".step-*.partial")]
        for path in reversed(broadcast_object(self.found(), self.mesh.peers)):
            try:
                held = broadcast_from_first(functools.partial(opened, path), self.mesh.peers)
                self._load(held, step)
                return held.run.progress
            except DamagedError as damage:
                self.notes.append(f"{path.name} is passed over: {damage}")
                self._refused.append(path)
        if self._refused:
            raise CheckpointError(
                f"{self.directory}: no checkpoint is whole ({'; '.join(self.notes)}); training would begin anew: if that is meant, "
                "remove them or choose another report.directory"
            )
        return None

    def _load(self, held: Held, step: Step) -> None:
        """Put a checkpoint into ``step``. Raises DamagedError."""
        everyone = self.mesh.peers
        self._compare(held.path, held.run)
        wanted = _boxes(step, self.mesh, self._still_frozen(held, step))
        self._check_names(held, wanted)
        for act in (lambda: held.damage(everyone.rank, everyone.size), lambda: held.fill(wanted, self.cfg.writers)):
            try:
                problem = act()
            except Exception as error:
                problem = _reason(error)
            if problem := self._first_of(problem):
                raise DamagedError(problem)
        progress = held.run.progress
        step.optimizer.refresh()
        step.sums.spread()
        step.count = progress.step

    def _still_frozen(self, held: Held, step: Step) -> set[str]:
        """Weights that the checkpoint has not, since they are those of a file. One that it has is read, and saved from then on."""
        frozen, origins = self._not_saved(step)
        run, path = held.run, held.path
        for name, parameter in step.model.named_parameters():
            if name in frozen and f"model/{name}" in held.tensors:
                del parameter.origin  # type: ignore[attr-defined]
        if kept := {name for name in frozen if f"model/{name}" in held.tensors}:
            self._frozen = step, {name: seal for name, seal in frozen.items() if name not in kept}, origins
        for name, seal in frozen.items():
            made = name not in run.frozen and seal in run.origins  # of that file, such as scales where weights now have 8 bits
            if name not in kept and not made and run.frozen.get(name) != seal:
                was = run.frozen.get(name, "none")
                raise CheckpointError(
                    f"{path}: {name} is not trained and was that of {run.origins.get(was, 'no file')} (SHA-256 {was}); now it is "
                    f"that of {origins[seal]} (SHA-256 {seal}); begin with the same weights, or choose another report.directory"
                )
        return set(frozen) - kept

    def _check_names(self, held: Held, state: Sequence[Box]) -> None:
        """Refuse a checkpoint that lacks a tensor of the run, or has it in another size."""
        wrong = [(box.name, f"no {box.name!r}") for box in state if box.name not in held.tensors]
        if not wrong:
            pairs = ((box, held.sizes[box.name]) for box in state)
            wrong = [(box.name, f"{box.name!r} as {list(n)}, not {list(box.size)}") for box, n in pairs if n != box.size]
        names = list(dict.fromkeys(text for _, text in wrong))
        text = ", ".join(names[:10]) + (f" (and {len(names) - 10} more)" if len(names) > 10 else "")
        if text := self._first_of(f"{text}; it belongs to another {wrong[0][0].partition('/')[0]}" if wrong else ""):
            raise CheckpointError(f"{held.path}: holds {text}")

    def _first_of(self, problem: str) -> str:
        """The problem of the first process that has one, or nothing."""
        return next(iter(gather_distinct(problem or None, self.mesh.peers).values()), "")

    def _compare(self, path: Path, run: RunFile) -> None:
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
        others = {name: was for name, was in run.versions.items() if VERSIONS.get(name, was) != was}
        self.notes += [f"{name}: {was} then, {VERSIONS[name]} now" for name, was in others.items()]
        told = {name for name in run.settings.keys() & self.settings.keys() if name not in (*self.frozen, "report")}
        self.notes += [text for name in sorted(told) for text in _changes(run.settings[name], self.settings[name], name)]

    def _clear(self, partial: Path) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        for left in partial.parent.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir()


def _tried(action: Callable[[], None]) -> str:
    """Why ``action`` failed, or nothing."""
    try:
        action()
    except Exception as error:
        return _reason(error)
    return ""


def _boxes(step: Step, mesh: Mesh, frozen: Collection[str] = ()) -> list[Box]:
    """All that resuming needs but weights that are ``frozen``, by name and without a copy: weights in full precision, and this
    rank's boxes of those that are divided."""
    step.sums.settle()
    weights, state = step.sums.idle() | step.optimizer.weights(), step.model.state_dict(keep_vars=True)
    # A tied weight has further names. Weights that were gathered for an evaluation are other tensors before ``state_dict``.
    first = {parameter: name for name, parameter in step.model.named_parameters()}
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


def _set_aside(path: Path) -> None:
    """Rename what stands where a checkpoint is written, or was refused, so that nobody takes it for one and nothing is lost."""
    if path.exists() or path.is_symlink():
        names = (path.with_name(f"damaged-{path.name}{f'.{again}' if again else ''}") for again in range(1000))
        path.rename(next(name for name in names if not name.exists() and not name.is_symlink()))


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    fsync(path)


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
