"""Checkpoints are complete or absent, and resuming restores everything."""

import errno
import hashlib
import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpcai import __version__, dist
from hpcai.dist.mesh import Mesh
from hpcai.errors import CheckpointError, DivergedError
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.settings import CheckpointConfig, RunConfig, StepConfig
from hpcai.train import checkpoint, checkpoint_reader, rng
from hpcai.train.checkpoint import VERSIONS, Checkpoints
from hpcai.train.checkpoint_reader import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": model(batch).square().mean()}


def new_step(mesh: Mesh | None = None, seed: int = 0, **words: Any) -> Step:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3)).to(
        memory_format=torch.channels_last_3d
    )
    mesh = mesh or dist.single_process()
    torch.manual_seed(77 + mesh["replicate"].rank)
    sum_gradients_over(model, mesh["depth"])  # every rank holds the whole model
    return Step(model, loss, StepConfig(ema_decay=0.9, **words), mesh)


def train(step: Step, count: int) -> None:
    for _ in range(count):
        generator = torch.Generator().manual_seed(1000 * step.count + step.mesh["replicate"].rank)
        step(torch.randn(4, 2, 3, 3, 3, generator=generator))


def contents(step: Step) -> dict[str, torch.Tensor]:
    parts = (step.model.state_dict(), step.optimizer.state(), step.average.state())
    return {f"{i}/{name}": tensor.clone() for i, part in enumerate(parts) for name, tensor in part.items()}


def sums(step: Step) -> list[float]:
    return [tensor.double().sum().item() for _, tensor in sorted(contents(step).items())]


def new_checkpoints(path: Path, mesh: Mesh | None = None, settings: dict | None = None, **words: Any) -> Checkpoints:
    return Checkpoints(path, CheckpointConfig(**words), mesh or dist.single_process(), settings)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    step = new_step(optimizer=optimizer)
    train(step, 3)
    progress = Progress(step=3, epoch=1, sample=12, seen=44, seconds=1.5)
    saved = new_checkpoints(tmp_path).save(step, progress)
    assert saved.path.name == "step-00000003" and saved.bytes > 1000
    train(step, 3)
    after = contents(step), torch.rand(3), np.random.rand(3), random.random()

    other = new_step(seed=5, optimizer=optimizer)
    rng.seed_all(99)
    assert new_checkpoints(tmp_path).resume(other) == progress
    assert other.count == 3
    train(other, 3)
    again = contents(other), torch.rand(3), np.random.rand(3), random.random()
    assert all(torch.equal(again[0][name], tensor) for name, tensor in after[0].items())
    assert torch.equal(again[1], after[1]) and np.array_equal(again[2], after[2]) and again[3] == after[3]


def test_bf16_weights_are_cast_from_their_masters_after_a_resume(tmp_path: Path) -> None:
    step = new_step(precision="bf16-params")
    train(step, 3)
    new_checkpoints(tmp_path).save(step, Progress(step=3))
    other = new_step(seed=5, precision="bf16-params")
    new_checkpoints(tmp_path).resume(other)
    for one, again in zip(step.model.parameters(), other.model.parameters()):
        assert one.dtype == torch.bfloat16 and torch.equal(one, again)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    step, kept = new_step(), new_checkpoints(tmp_path)
    for count in (1, 2):
        kept.save(step, Progress(step=count))
        spoil(tmp_path / f"step-{count:08d}", "bit")
    text = r"no checkpoint is complete \(step-00000002 is skipped: .*step-00000001 is skipped: .* remove them or choose"
    with pytest.raises(CheckpointError, match=text):
        new_checkpoints(tmp_path).resume(step)


def test_a_partial_checkpoint_is_ignored_reported_and_removed_by_the_next_save(tmp_path: Path) -> None:
    step, kept = new_step(), new_checkpoints(tmp_path)
    train(step, 1)
    kept.save(step, Progress(step=1))
    left = tmp_path / ".step-00000002.partial"
    left.mkdir()
    (left / "tensors-000.safetensors").write_bytes(b"half")
    again = new_checkpoints(tmp_path)
    assert again.resume(new_step()).step == 1
    assert again.messages == [".step-00000002.partial was not finished and is ignored"]
    again.save(step, Progress(step=2))
    assert not left.exists() and [p.name for p in again.paths()] == ["step-00000001", "step-00000002"]


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(tmp_path: Path) -> None:
    step, kept = new_step(), new_checkpoints(tmp_path, keep=2)
    for count in range(1, 5):
        train(step, 1)
        kept.save(step, Progress(step=count))
    assert [p.name for p in kept.paths()] == ["step-00000003", "step-00000004"]


def full(*args: Any, **words: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, kept = new_step(), new_checkpoints(tmp_path)
    train(step, 1)
    kept.save(step, Progress(step=1))
    for place, name in ((checkpoint.shard_file, "write"), (checkpoint, "_write")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            with pytest.raises(
                CheckpointError, match=r"step-00000002 cannot be written: No space left on device; step-00000001 is the newest"
            ):
                kept.save(step, Progress(step=2))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001"]
    assert new_checkpoints(tmp_path).resume(new_step()).step == 1
    kept.save(step, Progress(step=2))


def test_other_settings_or_another_model_are_refused(tmp_path: Path) -> None:
    step = new_step()
    train(step, 1)
    new_checkpoints(tmp_path, settings={"model": {"size": 32, "filters": 8}, "train": 1}).save(step, Progress(step=1))
    with pytest.raises(CheckpointError, match=r"other settings \(model.filters: 8 then, 16 now\); keep them"):
        new_checkpoints(tmp_path, settings={"model": {"size": 32, "filters": 16}}).resume(new_step())
    torch.manual_seed(0)
    stranger = Step(nn.Linear(2, 2), loss, StepConfig(), dist.single_process())
    with pytest.raises(CheckpointError, match="holds no 'model/weight', no 'model/bias', .*another model"):
        new_checkpoints(tmp_path, settings={"model": {"size": 32, "filters": 8}}).resume(stranger)
    with pytest.raises(CheckpointError, match="checkpoint.resume is never; choose another report.directory"):
        new_checkpoints(tmp_path, resume="never").resume(new_step())


def test_safetensors_opens_a_checkpoint_and_it_holds_no_pickle(tmp_path: Path) -> None:
    step = new_step()
    train(step, 1)
    saved = new_checkpoints(tmp_path).save(step, Progress(step=1))
    path, size = saved.path, saved.bytes
    assert sorted(p.name for p in path.iterdir()) == ["index.json", "manifest.json", "run.json", "tensors-000.safetensors"]
    found = load_file(path / "tensors-000.safetensors")
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(found[f"model/{name}"], tensor)
    assert sum(tensor.nbytes for tensor in found.values()) == size
    assert found.keys() == read_tensors(path).keys()


def write_or_read(mesh: Mesh, path: str, write: bool) -> tuple[list[float], list[float], list[str]]:
    """Return sums of a checkpoint, sums after one more step, and the messages."""
    step, kept = new_step(mesh, optimizer="adamw"), new_checkpoints(Path(path), mesh)
    if write:
        train(step, 2)
        kept.save(step, Progress(step=2, sample=8))
    else:
        assert kept.resume(step) == Progress(step=2, sample=8)
    before = sums(step)
    train(step, 1)
    return before, sums(step), kept.messages


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}], ids=str)
def test_a_resumed_step_has_the_random_numbers_of_its_replica(tmp_path: Path, axes: dict[str, int]) -> None:
    before = on_ranks(axes, write_or_read, str(tmp_path), True)
    assert on_ranks(axes, write_or_read, str(tmp_path), False) == before


@pytest.mark.parametrize("writers, readers", [(2, 4), (4, 1), (1, 2)])
def test_another_number_of_ranks_reads_the_same_weights_and_moments(tmp_path: Path, writers: int, readers: int) -> None:
    expected = on_ranks({"replicate": writers}, write_or_read, str(tmp_path), True)[0][0]
    for found, _, notes in on_ranks({"replicate": readers}, write_or_read, str(tmp_path), False):
        assert found == expected and not notes


def fails_on_one(mesh: Mesh, path: str) -> str:
    step = new_step(mesh)
    train(step, 1)
    if mesh.rank == 1:
        checkpoint.shard_file.write = full
    with pytest.raises(CheckpointError) as problem:
        new_checkpoints(Path(path), mesh).save(step, Progress(step=1))
    return str(problem.value)


def test_a_disk_that_is_full_on_one_rank_stops_the_save_on_all(tmp_path: Path) -> None:
    for text in on_ranks({"replicate": 2}, fails_on_one, str(tmp_path), fresh=True):
        assert "cannot be written: No space left on device; there is no checkpoint yet" in text
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_counts_its_steps_from_the_first_start(tmp_path: Path) -> None:
    step = new_step()
    train(step, 3)
    new_checkpoints(tmp_path).save(step, Progress(step=3))
    other = new_step(seed=5)
    new_checkpoints(tmp_path).resume(other)
    train(other, 1)
    other(torch.full((4, 2, 3, 3, 3), torch.nan))
    with pytest.raises(DivergedError, match="step 5: .*weights stay those of step 4"):
        other.check()


def test_refused_checkpoints_are_set_aside_and_new_ones_stay(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the run resumes from the one before, and its new checkpoints have lower numbers."""
    step, kept = new_step(), new_checkpoints(tmp_path, keep=2)
    for count in (12, 16):
        kept.save(step, Progress(step=count))
    spoil(tmp_path / "step-00000016", "bit")
    (tmp_path / "step-00000020").write_text("a file")
    (tmp_path / "step-00000021").symlink_to(tmp_path / "step-00000012")
    again = new_checkpoints(tmp_path, keep=1)
    assert again.resume(step).step == 12
    for count in (13, 14):
        again.save(step, Progress(step=count))
        assert (tmp_path / f"step-{count:08d}/manifest.json").exists()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["damaged-step-00000016", "step-00000014", "step-00000020", "step-00000021"]
    assert new_checkpoints(tmp_path).resume(new_step()).step == 14


def resealed(path: Path, name: str, text: str) -> None:
    """Write ``text`` to ``name`` of the checkpoint, and its SHA-256 to the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / name).write_text(text)
    if name != "manifest.json":
        manifest["files"][name] = checkpoint_reader.file_digest(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))


DEEP = "[" * 100_000
WRONG = [
    ("manifest.json", '{"format": 3, "files": {}}', "index.json is missing"),
    ("manifest.json", "[]", "manifest.json cannot be read"),
    ("manifest.json", '{"format": 2, "files": {}}', "format: Input should be 3"),
    ("manifest.json", DEEP, "manifest.json cannot be read"),
    ("manifest.json", '{"format": 3, "files": {"../../x": {"bytes": 1, "sha256": ""}}}', "manifest.json cannot be read"),
    ("run.json", "123", "run.json cannot be read"),
    ("run.json", DEEP, "run.json cannot be read"),
    ("run.json", '{"format": 3, "world": 0, "progress": {}, "settings": {}}', "world: Input should be greater than 0"),
    ("run.json", f'{{"format": 3, "world": 1, "progress": {{"step": {10**30}}}, "settings": {{}}}}', "progress.step"),
    ("index.json", '{"format": 3}', "names no file of tensors"),
    ("index.json", '{"format": 2}', "format: Input should be 3"),
]  # fmt: skip


def forged(path: Path, change: Any) -> None:
    """Apply ``change`` to the header of the checkpoint's file and to its index, with valid SHA-256."""
    index = json.loads((path / "index.json").read_text())
    (name, file), whole = next(iter(index["files"].items())), next(path.glob("*.safetensors")).read_bytes()
    length = file["header"] - 8
    told = json.loads(whole[8 : 8 + length])
    change(told, index)
    text = json.dumps(told).encode().ljust(length)
    assert len(text) == length
    (path / name).write_bytes(whole[:8] + text + whole[8 + len(text) :])
    file["sha256"] = hashlib.sha256(whole[:8] + text).hexdigest()
    resealed(path, "index.json", json.dumps(index))


FORGED = {
    "header": lambda told, index, n: index["files"]["tensors-000.safetensors"].update(header=n),
    "at": lambda told, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(at=n),
    "bytes": lambda told, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(bytes=n),
    "seals": lambda told, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(sha256=[]),
    "shape": lambda told, index, n: told["model/0.weight"].update(shape=[n]),
    "offsets": lambda told, index, n: told["model/0.weight"].update(data_offsets=[n, n + 864]),
    "part": lambda told, index, n: told.update({f"model/0.bias[{n}:{n + 4}]": told.pop("model/0.bias")}),
    "kind": lambda told, index, n: told["model/0.weight"].update(dtype=n),
    "negative": lambda told, index, n: told["model/0.weight"].update(shape=[-4, -2, 3, 3, n % 4 + 3]),
}


def spoil(path: Path, how: str) -> None:
    data = next(path.glob("*.safetensors"))
    if how == "bit":
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    elif how == "truncated":
        data.write_bytes(data.read_bytes()[:-10])
    elif how == "missing":
        data.unlink()
    else:
        (path / how).write_text("{")


DAMAGE: list[tuple[Any, tuple[Any, ...], str]] = [
    (spoil, ("bit",), "tensors-000.safetensors has changed since it was written"),
    (spoil, ("truncated",), "tensors-000.safetensors has changed since it was written"),
    (spoil, ("missing",), "tensors-000.safetensors is missing"), (spoil, ("manifest.json",), "manifest.json cannot be read"),
    (spoil, ("index.json",), "index.json has changed"), (spoil, ("run.json",), "run.json has changed"),
    *((resealed, (name, text), message) for name, text, message in WRONG),
    (forged, (partial(FORGED["shape"], n=3),), "'model/0.weight' lies outside its file"),
    (forged, (partial(FORGED["offsets"], n=1 << 30),), "'model/0.weight' lies outside its file"),
    *((forged, (partial(change, n=huge),), "") for change in FORGED.values() for huge in (2**80, 2**52)),
]  # fmt: skip


@pytest.mark.parametrize(("act", "words", "message"), DAMAGE, ids=[f"{act.__name__}{n}" for n, (act, *_) in enumerate(DAMAGE)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, act: Any, words: Any, message: str) -> None:
    step, kept = new_step(), new_checkpoints(tmp_path, keep=3)
    for count in (1, 2):
        path = kept.save(step, Progress(step=count)).path
    act(path, *words)
    again = new_checkpoints(tmp_path, keep=3)
    assert again.resume(step) == Progress(step=1)
    (note,) = again.messages
    assert note.startswith("step-00000002 is skipped: ") and message in note
    again.save(step, Progress(step=2))  # the damaged one is replaced
    assert new_checkpoints(tmp_path).resume(new_step()) == Progress(step=2)


def test_a_forged_checkpoint_without_a_change_is_read(tmp_path: Path) -> None:
    path = new_checkpoints(tmp_path).save(step := new_step(), Progress(step=1)).path
    before = (path / "index.json").read_text()
    forged(path, lambda told, index: None)
    assert new_checkpoints(tmp_path).resume(step) == Progress(step=1) and (path / "index.json").read_text() != before


def test_a_resume_reports_every_other_difference_and_refuses_another_data_set(tmp_path: Path) -> None:
    step, settings = new_step(), {"model": {"size": 8}, "step": {"lr": 0.1}, "data": {"batch": 4}, "report": {"directory": "a"}}
    kept = new_checkpoints(tmp_path, settings=settings)
    kept.data = "six files, 1f2e"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERSIONS, "hpcai", "0.0.1")
        kept.save(step, Progress(step=1))
    changed = settings | {"step": {"lr": 0.2}, "data": {"batch": 8}, "report": {"directory": "b"}}
    again = new_checkpoints(tmp_path, settings=changed)
    again.data = "six files, 1f2e"
    assert again.resume(step).step == 1
    assert again.messages == [f"hpcai: 0.0.1 then, {__version__} now", "data.batch: 4 then, 8 now", "step.lr: 0.1 then, 0.2 now"]
    again.data = "seven files, 77aa"
    with pytest.raises(CheckpointError, match=r"another data set \(six files, 1f2e then, seven files, 77aa now\); set checkpoint"):
        again.resume(step)
    meant = new_checkpoints(tmp_path, settings=settings, other_data=True)
    meant.data = again.data
    assert meant.resume(step).step == 1 and len(meant.messages) == 2


def test_a_resume_knows_earlier_names_of_settings(tmp_path: Path) -> None:
    step, mesh = new_step(), dist.single_process()
    new_checkpoints(tmp_path, settings={"step": {"average": 0.9, "lr": 0.1}}).save(step, Progress(step=1))
    for schema, messages in ((RunConfig, []), (None, ["step.average: 0.9 then, None now", "step.ema_decay: None then, 0.9 now"])):
        changed = {"step": {"ema_decay": 0.9, "lr": 0.1}}
        resumed = Checkpoints(tmp_path, CheckpointConfig(), mesh, changed, schema=schema)
        assert resumed.resume(step).step == 1 and sorted(resumed.messages) == messages


def writes_and_reads(mesh: Mesh, path: str) -> tuple[dict[str, list[tuple[int, int]]], int, int]:
    """Save and resume in blocks of 96 bytes. Return writer and blocks of each file, blocks that this rank verified, and bytes that
    it read."""
    usual, fill, reads = checkpoint.shard_file._OpenFiles.read, checkpoint_reader.CheckpointReader.fill, [[]]

    def read(files: Any, file: str, at: int, into: torch.Tensor) -> None:
        reads[-1].append(len(into))
        usual(files, file, at, into)

    def filled(*words: Any) -> str:
        reads.append([])
        return fill(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shard_file, "BLOCK", 96)
        patch.setattr(checkpoint.shard_file._OpenFiles, "read", read)
        patch.setattr(checkpoint_reader.CheckpointReader, "fill", filled)
        step, kept = new_step(mesh), new_checkpoints(Path(path), mesh, writers=2)
        folder = kept.save(step, Progress(step=1)).path
        assert new_checkpoints(Path(path), mesh, writers=2).resume(step) == Progress(step=1)
    index = json.loads((folder / "index.json").read_text())["files"]
    files = {name: [(s["writer"], len(s["sha256"])) for s in f["stretches"]] for name, f in index.items()}
    return files, len(reads[0]), sum(reads[1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_boxes_are_written_by_two_and_each_byte_is_read_by_one(tmp_path: Path, ranks: int) -> None:
    found = on_ranks({"replicate": ranks}, writes_and_reads, str(tmp_path))
    files = found[0][0]
    assert [writer for each in files.values() for writer, _ in each] == [0, 1]
    counts = [blocks for _, blocks, _ in found]
    assert sum(counts) == sum(count for each in files.values() for _, count in each) and max(counts) - min(counts) <= 1
    size = sum(tensor.nbytes for tensor in read_tensors(next(tmp_path.glob("step-*"))).values())
    assert sum(read for *_, read in found) == size and all(read for *_, read in found[:2]) and not any(r for *_, r in found[2:])
