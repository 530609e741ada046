"""Checkpoints of training: each is complete, or absent.

A checkpoint is a folder ``step-00000120`` of a few shard files (``train/shard_file``: readers of safetensors open them), an index
with writers and SHA-256 of each block, the state of the run, and a manifest with SHA-256 of both. It is written as
``.step-00000120.partial``, flushed, and renamed once the manifest is there. Only then are old ones removed. Ranks derive the boxes
that they write from the sharding, without communication. Nothing is pickled.
"""

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai import __version__
from hpcai.config import Settings
from hpcai.dist.background import submit
from hpcai.dist.collectives import all_reduce_, broadcast_from_first, broadcast_object, gather_distinct, gather_to_first
from hpcai.dist.host import gc_disabled
from hpcai.dist.mesh import Axis, Mesh
from hpcai.dist.watchdog import waiting_at
from hpcai.durable import fsync
from hpcai.errors import CheckpointError
from hpcai.nn.weights import PretrainedMixin
from hpcai.parallel.sharding import FlatShard, replica_axes, shard_spec
from hpcai.schema import Schema
from hpcai.settings import CheckpointConfig
from hpcai.train import checkpoint_reader, shard_file
from hpcai.train.checkpoint_reader import FORMAT, INDEX, MANIFEST, RUN, CheckpointReader, DamagedError, Progress, RunFile
from hpcai.train.shard_file import Box
from hpcai.train.step import Step

VERSIONS = {"hpcai": __version__, "torch": torch.__version__}

_WAIT_TIMEOUT = 600.0  # seconds that a failed run waits for a pending save


@dataclass
class SavedCheckpoint:
    """A checkpoint that was written: seconds since ``async_save``, bytes of all its tensors."""

    step: int
    path: Path
    seconds: float
    bytes: int


class _StagingBuffer:
    """The ``boxes`` that this rank writes, and a contiguous staging buffer for them on the ``host``."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.host = torch.empty(0, dtype=torch.uint8)
        self.ranks: list[int] = []  # the ranks that write, and the first rank
        self.writers: Axis | None = None  # a process group of them
        self.bytes = 0  # of all ranks
        self._key: tuple[Any, ...] = ()
        self._views: list[Tensor] = []
        self._ready: Any = None

    def allocate(self, step: Step, writers: int, frozen: Collection[str]) -> bool:
        """Allocate the buffer for the boxes of ``step``, without ``frozen`` weights. Return False if the boxes are those of the
        last call, in the same memory."""
        step.reducer.wait()
        tensors = (*step.model.parameters(), *step.model.buffers())
        key = (step, *(getattr(tensor, "_local_tensor", tensor).data_ptr() for tensor in tensors))
        if key == self._key:
            return False
        self._key, self.boxes = key, shard_file.boxes_to_write(_boxes(step, step.mesh, frozen), writers)
        self.host, self._views = shard_file.allocate(self.boxes, step.mesh.device.type == "cuda")
        return True

    @torch.no_grad()
    def copy(self) -> None:
        for into, box in zip(self._views, self.boxes):
            into.copy_(box.tensor, non_blocking=True)
        self._ready = torch.cuda.current_stream().record_event() if self.host.is_pinned() else None

    def wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()


class Checkpoints:
    """The checkpoints of one run, below ``directory``. All ranks call each method together. Each checkpoint stores the run's
    ``settings``. A run is refused if its section ``model`` differs from them; other differences are reported in ``messages``.
    ``data`` identifies the data set: a run on another one is refused, unless ``checkpoint.other_data``. ``schema`` is the class of
    the settings, for checkpoints with earlier names of them."""

    def __init__(
        self, directory: str | Path, cfg: CheckpointConfig, mesh: Mesh, settings: dict[str, Any] | None = None,
        schema: type[Settings] | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.cfg, self.mesh = Path(directory), cfg, mesh
        self.settings, self.schema = settings or {}, schema
        self.data, self.data_changes = "", lambda seconds: ""
        self.messages: list[str] = []
        self._damaged: list[Path] = []
        self._opened: os.stat_result | None = None
        self._staging = _StagingBuffer()
        self._frozen: tuple[Step, dict[str, str], dict[str, str]] | None = None
        self._future: Future[SavedCheckpoint | CheckpointError] | None = None

    def save(self, step: Step, progress: Progress) -> SavedCheckpoint:
        """Write a checkpoint. After a CheckpointError nothing has changed, and older ones are complete."""
        self.async_save(step, progress)
        outcome = self.wait()
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def async_save(self, step: Step, progress: Progress) -> None:
        """Begin to write a checkpoint. It returns once the boxes of this rank are copied to the host (on a GPU, once the copy is
        queued), and a thread writes them while training continues. Call ``wait`` before the next one."""
        began = time.perf_counter()
        step.average.sync_buffers()
        frozen, origins = self._frozen_files(step)
        if self._staging.allocate(step, self.cfg.writers, frozen):
            # Gather the ranks that write. They and the first rank get a process group for threads.
            staging, everyone = self._staging, self.mesh.peers
            counts = torch.zeros(everyone.size + 1, dtype=torch.int64)
            counts[everyone.rank], counts[-1] = bool(staging.boxes), len(staging.host)
            *has_boxes, staging.bytes = all_reduce_(counts, everyone).tolist()
            staging.ranks = [rank for rank, has in enumerate(has_boxes) if has or rank == 0]
            staging.writers = self.mesh.subgroup("checkpoint", staging.ranks) if everyone.rank in staging.ranks else None
        self._staging.copy()
        final = self.directory / f"step-{progress.step:08d}"
        run = {"format": FORMAT, "world": self.mesh.world, "progress": asdict(progress), "settings": self.settings}
        run |= {"frozen": frozen, "origins": origins}
        run |= {"data": self.data, "versions": dict(VERSIONS)}
        if isinstance(step.model, PretrainedMixin):
            run["about"] = step.model.metadata
        saved = SavedCheckpoint(progress.step, final, 0.0, self._staging.bytes)

        def write() -> SavedCheckpoint | CheckpointError:
            problem = self._write(final, run, progress.step)
            saved.seconds = time.perf_counter() - began
            if not problem:
                return saved
            complete = self.paths()
            left = f"{complete[-1].name} is the newest complete checkpoint" if complete else "there is no checkpoint yet"
            return CheckpointError(f"{final} cannot be written: {problem}; {left}")

        self._future = submit(write, "checkpoint")

    @property
    def pending(self) -> bool:
        """Whether a save is pending, until ``wait``."""
        return self._future is not None

    @property
    def outcome(self) -> SavedCheckpoint | CheckpointError | None:
        """The outcome of the pending save on this rank, or None. That of the first rank covers all ranks."""
        return self._future.result() if self._future is not None and self._future.done() else None

    def wait(self) -> SavedCheckpoint | CheckpointError:
        """Wait for the pending save. Return its outcome, the same on all ranks."""
        assert self._future is not None
        with waiting_at("the save of a checkpoint", is_work=True):
            local, self._future = self._future.result(), None
            text = broadcast_object(str(local) if isinstance(local, CheckpointError) else "", self.mesh.peers)
        return local if str(local) == text or not text else CheckpointError(text)

    def wait_local(self) -> None:
        """Wait until this rank has written its boxes, at the end of a run that failed."""
        if self._future is not None:
            with suppress(TimeoutError), waiting_at("the save of a checkpoint", is_work=True):
                self._future.exception(_WAIT_TIMEOUT)

    def _frozen_files(self, step: Step) -> tuple[dict[str, str], dict[str, str]]:
        """Return the frozen weights that are those of a file (``parameter.origin``): SHA-256 of the file by name, and the file by
        SHA-256. The first rank reads each file once. Raises CheckpointError on all ranks if it cannot."""
        if self._frozen is None or self._frozen[0] is not step:
            named = ((name, getattr(p, "origin", None)) for name, p in step.model.named_parameters() if not p.requires_grad)
            local = {name: origin for name, origin in named if origin}
            origins = {name: path for part in gather_distinct(local or None, self.mesh.peers).values()
                     for name, path in part.items()}  # fmt: skip

            def compute_digests() -> dict[str, str]:
                try:
                    return {path: checkpoint_reader.file_digest(Path(path))["sha256"] for path in sorted(set(origins.values()))}
                except OSError as error:
                    text = f"{error.filename}: {error.strerror}, but frozen weights were read from it; put it back"
                    raise CheckpointError(text) from error

            digests = broadcast_from_first(compute_digests, self.mesh.peers)
            self._frozen = step, {n: digests[path] for n, path in origins.items()}, {d: path for path, d in digests.items()}
        return self._frozen[1:]

    def _write(self, final: Path, run: dict[str, Any], number: int) -> str:
        """Write the boxes of this rank, in a thread. Return an error message, or an empty string. The first rank returns an error
        of any rank."""
        staging, partial, file = self._staging, self.directory / f".{final.name}.partial", dict[str, Any]()
        if staging.writers is None:
            return ""
        first = staging.writers.rank == 0
        problem = broadcast_object(_error_of(lambda: self._clear(partial)) if first else "", staging.writers)
        if problem:
            return problem

        def write() -> None:
            nonlocal file
            if staging.boxes:
                staging.wait()
                file = {name: shard_file.write(partial / name, staging.boxes, staging.host, self.mesh.peers.rank)}

        name = f"tensors-{staging.writers.rank:03d}.safetensors"
        problem = _error_of(write)
        outcomes = gather_to_first((problem, file), staging.writers)
        if first:
            problem = next((text for text, _ in outcomes if text), "")
            files = {name: each for _, written in outcomes for name, each in written.items()}
            problem = problem or _error_of(lambda: self._commit(partial, final, files, run, number))
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
        return problem

    def _commit(self, partial: Path, final: Path, files: dict[str, Any], run: dict[str, Any], number: int) -> None:
        _write(partial / RUN, json.dumps(run, indent=1))
        _write(partial / INDEX, json.dumps({"format": FORMAT, "block": shard_file.BLOCK, "files": files}))
        digests = {name: checkpoint_reader.file_digest(partial / name) for name in (INDEX, RUN)}
        _write(partial / MANIFEST, json.dumps({"format": FORMAT, "files": digests}, indent=1))
        fsync(partial)
        for path in {*self._damaged, final}:  # renamed, so that nothing is lost and it is not read
            if path.exists() or path.is_symlink():
                names = (path.with_name(f"damaged-{path.name}{f'.{again}' if again else ''}") for again in range(1000))
                path.rename(next(name for name in names if not name.exists() and not name.is_symlink()))
        self._damaged = []
        partial.rename(final)
        fsync(self.directory)
        older = [path for path in self.paths() if checkpoint_reader.step_number(path) < number]
        for path in older[: len(older) + 1 - self.cfg.keep]:
            shutil.rmtree(path, ignore_errors=True)

    def paths(self) -> list[Path]:
        return checkpoint_reader.list_checkpoints(self.directory)

    @gc_disabled()
    def resume(self, step: Step) -> Progress | None:
        """Load the newest complete checkpoint into ``step``, or return None if there is none. Damaged ones are reported in
        ``messages``; the next ``save`` renames them to ``damaged-...``."""
        if self.cfg.resume == "never":
            if broadcast_object(bool(self.paths()), self.mesh.peers):
                fault = f"{self.directory} holds checkpoints of an earlier run, and checkpoint.resume is never"
                raise CheckpointError(f"{fault}; choose another report.directory, remove them, or set checkpoint.resume=auto")
            return None
        if self.mesh.is_first and self.directory.is_dir():
            self.messages += [f"{p.name} was not finished and is ignored" for p in self.directory.glob(".step-*.partial")]
        for path in reversed(broadcast_object(self.paths(), self.mesh.peers)):
            try:
                reader = broadcast_from_first(functools.partial(checkpoint_reader.open_checkpoint, path), self.mesh.peers)
                self._load(reader, step)
                return reader.run.progress
            except DamagedError as damage:
                self.messages.append(f"{path.name} is skipped: {damage}")
                self._damaged.append(path)
        if self._damaged:
            advice = "training would restart; if that is meant, remove them or choose another report.directory"
            raise CheckpointError(f"{self.directory}: no checkpoint is complete ({'; '.join(self.messages)}); {advice}")
        return None

    def _load(self, reader: CheckpointReader, step: Step) -> None:
        """Load a checkpoint into ``step``. Raises DamagedError."""
        everyone = self.mesh.peers
        self._check_run(reader.path, reader.run)
        boxes = _boxes(step, self.mesh, self._absent_frozen(reader, step))
        self._check_names(reader, boxes)
        for check in (lambda: reader.find_damage(everyone.rank, everyone.size), lambda: reader.fill(boxes, self.cfg.writers)):
            try:
                problem = check()
            except Exception as error:
                problem = _reason(error)
            if problem := self._first_problem(problem):
                raise DamagedError(problem)
        progress = reader.run.progress
        step.optimizer.cast_master_weights()
        step.reducer.all_gather_parameters()
        step.count = progress.step

    def _absent_frozen(self, reader: CheckpointReader, step: Step) -> set[str]:
        """Return the frozen weights that the checkpoint lacks, since they are those of a file. A weight that it has is read, and
        saved from now on."""
        frozen, origins = self._frozen_files(step)
        run, path = reader.run, reader.path
        for name, parameter in step.model.named_parameters():
            if name in frozen and f"model/{name}" in reader.tensors:
                del parameter.origin  # type: ignore[attr-defined]
        if saved := {name for name in frozen if f"model/{name}" in reader.tensors}:
            self._frozen = step, {name: digest for name, digest in frozen.items() if name not in saved}, origins
        for name, digest in frozen.items():
            derived = name not in run.frozen and digest in run.origins  # from that file, such as the scales of quantized weights
            if name not in saved and not derived and run.frozen.get(name) != digest:
                was = run.frozen.get(name, "none")
                raise CheckpointError(
                    f"{path}: {name} is not trained and was that of {run.origins.get(was, 'no file')} (SHA-256 {was}); now it is "
                    f"that of {origins[digest]} (SHA-256 {digest}); begin with the same weights, or choose another report.directory"
                )
        return set(frozen) - saved

    def _check_names(self, reader: CheckpointReader, boxes: Sequence[Box]) -> None:
        """Raise CheckpointError if the checkpoint lacks a tensor of the run, or has it in another size."""
        mismatches = [(box.name, f"no {box.name!r}") for box in boxes if box.name not in reader.tensors]
        if not mismatches:
            pairs = ((box, reader.sizes[box.name]) for box in boxes)
            mismatches = [(box.name, f"{box.name!r} as {list(n)}, not {list(box.size)}") for box, n in pairs if n != box.size]
        names = list(dict.fromkeys(text for _, text in mismatches))
        text = ", ".join(names[:10]) + (f" (and {len(names) - 10} more)" if len(names) > 10 else "")
        if text := self._first_problem(f"{text}; it belongs to another {mismatches[0][0].partition('/')[0]}" if mismatches else ""):
            changes = "; ".join(message for message in self.messages if message.startswith("step."))
            raise CheckpointError(f"{reader.path}: {changes and f'{changes}: '}holds {text}")

    def _first_problem(self, problem: str) -> str:
        """Return the problem of the first rank that has one, or an empty string."""
        return next(iter(gather_distinct(problem or None, self.mesh.peers).values()), "")

    def _check_run(self, path: Path, run: RunFile) -> None:
        """Raise CheckpointError for forbidden differences between the run and the checkpoint, and report the others."""
        if self.schema is not None:
            list(Schema(self.schema).apply_renames(run.settings))
        if changes := _changes(run.settings.get("model"), self.settings.get("model"), "model"):
            text = f"the run was started with other settings ({', '.join(changes)})"
            raise CheckpointError(f"{path}: {text}; keep them or choose another report.directory")
        if self.data and run.data and self.data != run.data:
            text = f"{path.name} was trained on another data set ({run.data} then, {self.data} now)"
            if not self.cfg.other_data:
                raise CheckpointError(f"{path.parent}: {text}; set checkpoint.other_data=true if that is meant")
            self.messages.append(text)
        elif self.mesh.is_first and (text := self.data_changes((path / MANIFEST).stat().st_mtime)):
            self.messages.append(f"data may have changed since {path.name}: {text}; hpcai data check examines the folder")
        versions = {name: was for name, was in run.versions.items() if VERSIONS.get(name, was) != was}
        self.messages += [f"{name}: {was} then, {VERSIONS[name]} now" for name, was in versions.items()]
        sections = {name for name in run.settings.keys() & self.settings.keys() if name not in ("model", "report")}
        self.messages += [text for name in sorted(sections) for text in _changes(run.settings[name], self.settings[name], name)]

    def open_directory(self) -> None:
        """Create the directory, on the first rank. Raises CheckpointError if it is another one than in the call before."""
        if self._opened is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._opened = self.directory.stat()
        if not self.directory.is_dir() or not os.path.samestat(self._opened, self.directory.stat()):
            raise CheckpointError("the directory of the run was removed, renamed or replaced since its start")

    def _clear(self, partial: Path) -> None:
        self.open_directory()
        for left in partial.parent.glob(".step-*.partial"):
            shutil.rmtree(left)
        partial.mkdir()


def _error_of(action: Callable[[], None]) -> str:
    """Return the reason why ``action`` failed, or an empty string."""
    try:
        action()
    except Exception as error:
        return _reason(error)
    return ""


def _boxes(step: Step, mesh: Mesh, frozen: Collection[str] = ()) -> list[Box]:
    """Return the boxes of this rank that resuming needs, by name and without a copy, except for ``frozen`` weights. Weights are the
    master weights."""
    step.reducer.wait()
    weights, state = step.reducer.frozen_shards() | step.optimizer.weights(), step.model.state_dict(keep_vars=True)
    # A tied weight has several names. Weights that were gathered for an evaluation are other tensors before ``state_dict``.
    first = {parameter: name for name, parameter in step.model.named_parameters()}
    parts: dict[str, dict[str, Tensor | FlatShard]] = {
        "model": {name: weights.get(first.get(value, name), value) for name, value in state.items()
                  if first.get(value, name) not in frozen},
        "optimizer": step.optimizer.state(),
        "average": step.average.state(),
    }
    everyone = replica_axes(torch.empty(0), mesh)
    boxes: list[Box] = []
    for key, value in ((f"{kind}/{name}", value) for kind, part in parts.items() for name, value in part.items()):
        if isinstance(value, FlatShard):
            shape, copies = value.view.spec.global_shape, value.replica_axes
            boxes += [Box(key, shape, offsets, tensor, copies) for offsets, tensor in value.view.boxes(value.flat)]
        elif not hasattr(value, "shard_spec"):
            boxes.append(Box(key, tuple(value.shape), (0,) * value.ndim, value, everyone))
        else:
            place, copies = shard_spec(value), replica_axes(value, mesh)
            pieces = place.boxes((0,) * value.ndim, value.shape)
            boxes += [Box(key, place.global_shape, offsets, value[piece], copies) for offsets, piece in pieces]
    return boxes


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    fsync(path)


def _reason(error: BaseException) -> str:
    """Return the reason of ``error``: the system's message, for a full disk or an unwritable path, of any exception in the
    chain."""
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
