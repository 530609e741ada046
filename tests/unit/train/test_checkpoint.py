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
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train import checkpoint, checkpoint_reader, rng
from hpcai.train.checkpoint import VERSIONS, Checkpoints
from hpcai.train.checkpoint_reader import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": model(batch).square().mean()}


def new_step(mesh: Mesh | None = None, seed: int = 0, **overrides: Any) -> Step:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3)).to(
        memory_format=torch.channels_last_3d
    )
    mesh = mesh or dist.single_process()
    torch.manual_seed(77 + mesh["replicate"].rank)
    sum_gradients_over(model, mesh["depth"])  # every rank has the full model
    return Step(model, loss, StepConfig(ema_decay=0.9, **overrides), mesh)


def train(step: Step, count: int) -> None:
    for _ in range(count):
        generator = torch.Generator().manual_seed(1000 * step.count + step.mesh["replicate"].rank)
        step(torch.randn(4, 2, 3, 3, 3, generator=generator))


def clone_state(step: Step) -> dict[str, torch.Tensor]:
    parts = (step.model.state_dict(), step.optimizer.state(), step.average.state())
    return {f"{i}/{name}": tensor.clone() for i, part in enumerate(parts) for name, tensor in part.items()}


def sum_state(step: Step) -> list[float]:
    return [tensor.double().sum().item() for _, tensor in sorted(clone_state(step).items())]


def new_checkpoints(path: Path, mesh: Mesh | None = None, settings: dict | None = None, **overrides: Any) -> Checkpoints:
    return Checkpoints(path, CheckpointConfig(**overrides), mesh or dist.single_process(), settings)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(tmp_path: Path, optimizer: str) -> None:
    step = new_step(optimizer=optimizer)
    train(step, 3)
    progress = Progress(step=3, epoch=1, sample=12, seen=44, seconds=1.5)
    saved = new_checkpoints(tmp_path).save(step, progress)
    assert saved.path.name == "step-00000003" and saved.bytes > 1000
    train(step, 3)
    expected = clone_state(step), torch.rand(3), np.random.rand(3), random.random()

    other = new_step(seed=5, optimizer=optimizer)
    rng.seed_all(99)
    assert new_checkpoints(tmp_path).resume(other) == progress
    assert other.count == 3
    train(other, 3)
    resumed = clone_state(other), torch.rand(3), np.random.rand(3), random.random()
    assert all(torch.equal(resumed[0][name], tensor) for name, tensor in expected[0].items())
    assert torch.equal(resumed[1], expected[1]) and np.array_equal(resumed[2], expected[2]) and resumed[3] == expected[3]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    step, checkpoints = new_step(), new_checkpoints(tmp_path)
    for count in (1, 2):
        checkpoints.save(step, Progress(step=count))
        damage(tmp_path / f"step-{count:08d}", "bit")
    text = r"no checkpoint is complete \(step-00000002 is skipped: .*step-00000001 is skipped: .* remove them or choose"
    with pytest.raises(CheckpointError, match=text):
        new_checkpoints(tmp_path).resume(step)


def test_a_partial_checkpoint_is_ignored_reported_and_removed_by_the_next_save(tmp_path: Path) -> None:
    step, checkpoints = new_step(), new_checkpoints(tmp_path)
    train(step, 1)
    checkpoints.save(step, Progress(step=1))
    unfinished = tmp_path / ".step-00000002.partial"
    unfinished.mkdir()
    (unfinished / "tensors-000.safetensors").write_bytes(b"half")
    reopened = new_checkpoints(tmp_path)
    assert reopened.resume(new_step()).step == 1
    assert reopened.messages == [".step-00000002.partial was not finished and is ignored"]
    reopened.save(step, Progress(step=2))
    assert not unfinished.exists() and [p.name for p in reopened.paths()] == ["step-00000001", "step-00000002"]


def raise_disk_full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, checkpoints = new_step(), new_checkpoints(tmp_path)
    train(step, 1)
    checkpoints.save(step, Progress(step=1))
    for module, name in ((checkpoint.shard_file, "write"), (checkpoint, "_write")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, raise_disk_full)
            with pytest.raises(
                CheckpointError, match=r"step-00000002 cannot be written: No space left on device; step-00000001 is the newest"
            ):
                checkpoints.save(step, Progress(step=2))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001"]
    assert new_checkpoints(tmp_path).resume(new_step()).step == 1
    checkpoints.save(step, Progress(step=2))


def test_other_settings_or_another_model_are_refused(tmp_path: Path) -> None:
    step = new_step()
    train(step, 1)
    saved = {"model": {"size": 32, "filters": 8}, "step": {"optimizer": "adamw"}}
    new_checkpoints(tmp_path, settings=saved).save(step, Progress(step=1))
    with pytest.raises(CheckpointError, match=r"other settings \(model.filters: 8 then, 16 now\); keep them"):
        new_checkpoints(tmp_path, settings={"model": {"size": 32, "filters": 16}}).resume(new_step())
    torch.manual_seed(0)
    other = Step(nn.Linear(2, 2), loss, StepConfig(), dist.single_process())
    changed = saved | {"step": {"optimizer": "sgd"}}
    message = "step.optimizer: adamw then, sgd now: holds no 'model/weight', no 'model/bias', .*another model"
    with pytest.raises(CheckpointError, match=message):
        new_checkpoints(tmp_path, settings=changed).resume(other)
    with pytest.raises(CheckpointError, match="checkpoint.resume is never; choose another report.directory"):
        new_checkpoints(tmp_path, resume="never").resume(new_step())


def test_safetensors_opens_a_checkpoint_and_it_holds_no_pickle(tmp_path: Path) -> None:
    step = new_step()
    train(step, 1)
    saved = new_checkpoints(tmp_path).save(step, Progress(step=1))
    path, size = saved.path, saved.bytes
    assert sorted(p.name for p in path.iterdir()) == ["index.json", "manifest.json", "run.json", "tensors-000.safetensors"]
    tensors = load_file(path / "tensors-000.safetensors")
    for name, tensor in step.model.state_dict().items():
        assert torch.equal(tensors[f"model/{name}"], tensor)
    assert sum(tensor.nbytes for tensor in tensors.values()) == size
    assert tensors.keys() == read_tensors(path).keys()


def write_or_read(mesh: Mesh, path: str, write: bool) -> tuple[list[float], list[float], list[str]]:
    """Return sums of a checkpoint, sums after one more step, and the messages."""
    step, checkpoints = new_step(mesh, optimizer="adamw"), new_checkpoints(Path(path), mesh)
    if write:
        train(step, 2)
        checkpoints.save(step, Progress(step=2, sample=8))
    else:
        assert checkpoints.resume(step) == Progress(step=2, sample=8)
    before = sum_state(step)
    train(step, 1)
    return before, sum_state(step), checkpoints.messages


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}], ids=str)
def test_a_resumed_step_has_the_random_numbers_of_its_replica(tmp_path: Path, axes: dict[str, int]) -> None:
    before = on_ranks(axes, write_or_read, str(tmp_path), True)
    assert on_ranks(axes, write_or_read, str(tmp_path), False) == before


def save_with_full_disk_on_rank_1(mesh: Mesh, path: str) -> str:
    step = new_step(mesh)
    train(step, 1)
    if mesh.rank == 1:
        checkpoint.shard_file.write = raise_disk_full
    with pytest.raises(CheckpointError) as problem:
        new_checkpoints(Path(path), mesh).save(step, Progress(step=1))
    return str(problem.value)


def test_a_disk_that_is_full_on_one_rank_stops_the_save_on_all(tmp_path: Path) -> None:
    for text in on_ranks({"replicate": 2}, save_with_full_disk_on_rank_1, str(tmp_path), fresh=True):
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
    step, checkpoints = new_step(), new_checkpoints(tmp_path, keep=2)
    for count in (12, 16):
        checkpoints.save(step, Progress(step=count))
    damage(tmp_path / "step-00000016", "bit")
    (tmp_path / "step-00000020").write_text("a file")
    (tmp_path / "step-00000021").symlink_to(tmp_path / "step-00000012")
    reopened = new_checkpoints(tmp_path, keep=1)
    assert reopened.resume(step).step == 12
    for count in (13, 14):
        reopened.save(step, Progress(step=count))
        assert (tmp_path / f"step-{count:08d}/manifest.json").exists()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["damaged-step-00000016", "step-00000014", "step-00000020", "step-00000021"]
    assert new_checkpoints(tmp_path).resume(new_step()).step == 14


def write_and_rehash(path: Path, name: str, text: str) -> None:
    """Write ``text`` to ``name`` of the checkpoint, and its SHA-256 to the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / name).write_text(text)
    if name != "manifest.json":
        manifest["files"][name] = checkpoint_reader.file_digest(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))


INVALID = [(f"{name}.json", "[" * 100_000, f"{name}.json cannot be read") for name in ("manifest", "run")]
INVALID += load_json("refused/checkpoints")


def forge_header(path: Path, change: Any) -> None:
    """Apply ``change`` to the header of the checkpoint's file and to its index, and write valid SHA-256."""
    index = json.loads((path / "index.json").read_text())
    (name, entry), content = next(iter(index["files"].items())), next(path.glob("*.safetensors")).read_bytes()
    length = entry["header"] - 8
    header = json.loads(content[8 : 8 + length])
    change(header, index)
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length
    (path / name).write_bytes(content[:8] + text + content[8 + len(text) :])
    entry["sha256"] = hashlib.sha256(content[:8] + text).hexdigest()
    write_and_rehash(path, "index.json", json.dumps(index))


HEADER_CHANGES = {
    "header": lambda header, index, n: index["files"]["tensors-000.safetensors"].update(header=n),
    "at": lambda header, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(at=n),
    "bytes": lambda header, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(bytes=n),
    "sha256": lambda header, index, n: index["files"]["tensors-000.safetensors"]["stretches"][0].update(sha256=[]),
    "shape": lambda header, index, n: header["model/0.weight"].update(shape=[n]),
    "offsets": lambda header, index, n: header["model/0.weight"].update(data_offsets=[n, n + 864]),
    "slice": lambda header, index, n: header.update({f"model/0.bias[{n}:{n + 4}]": header.pop("model/0.bias")}),
    "dtype": lambda header, index, n: header["model/0.weight"].update(dtype=n),
    "negative": lambda header, index, n: header["model/0.weight"].update(shape=[-4, -2, 3, 3, n % 4 + 3]),
}


def damage(path: Path, kind: str) -> None:
    data = next(path.glob("*.safetensors"))
    if kind == "bit":
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    elif kind == "truncated":
        data.write_bytes(data.read_bytes()[:-10])
    elif kind == "missing":
        data.unlink()
    else:
        (path / kind).write_text("{")


DAMAGE: list[tuple[Any, tuple[Any, ...], str]] = [
    (damage, ("bit",), "tensors-000.safetensors has changed since it was written"),
    (damage, ("truncated",), "tensors-000.safetensors has changed since it was written"),
    (damage, ("missing",), "tensors-000.safetensors is missing"), (damage, ("manifest.json",), "manifest.json cannot be read"),
    (damage, ("index.json",), "index.json has changed"), (damage, ("run.json",), "run.json has changed"),
    *((write_and_rehash, (name, text), message) for name, text, message in INVALID),
    (forge_header, (partial(HEADER_CHANGES["shape"], n=3),), "'model/0.weight' lies outside its file"),
    (forge_header, (partial(HEADER_CHANGES["offsets"], n=1 << 30),), "'model/0.weight' lies outside its file"),
    *((forge_header, (partial(change, n=huge),), "") for change in HEADER_CHANGES.values() for huge in (2**80, 2**52)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "args", "message"), DAMAGE, ids=[f"{act.__name__}{n}" for n, (act, *_) in enumerate(DAMAGE)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, function: Any, args: Any, message: str) -> None:
    step, checkpoints = new_step(), new_checkpoints(tmp_path, keep=3)
    for count in (1, 2):
        path = checkpoints.save(step, Progress(step=count)).path
    function(path, *args)
    reopened = new_checkpoints(tmp_path, keep=3)
    assert reopened.resume(step) == Progress(step=1)
    (note,) = reopened.messages
    assert note.startswith("step-00000002 is skipped: ") and message in note
    reopened.save(step, Progress(step=2))  # the damaged one is replaced
    assert new_checkpoints(tmp_path).resume(new_step()) == Progress(step=2)


def test_a_forged_checkpoint_without_a_change_is_read(tmp_path: Path) -> None:
    path = new_checkpoints(tmp_path).save(step := new_step(), Progress(step=1)).path
    before = (path / "index.json").read_text()
    forge_header(path, lambda header, index: None)
    assert new_checkpoints(tmp_path).resume(step) == Progress(step=1) and (path / "index.json").read_text() != before


def test_a_resume_reports_every_other_difference_and_refuses_another_data_set(tmp_path: Path) -> None:
    step, settings = new_step(), {"model": {"size": 8}, "step": {"lr": 0.1}, "data": {"batch": 4}, "report": {"directory": "a"}}
    checkpoints = new_checkpoints(tmp_path, settings=settings)
    checkpoints.data = "six files, 1f2e"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERSIONS, "hpcai", "0.0.1")
        checkpoints.save(step, Progress(step=1))
    changed = settings | {"step": {"lr": 0.2}, "data": {"batch": 8}, "report": {"directory": "b"}}
    reopened = new_checkpoints(tmp_path, settings=changed)
    reopened.data = "six files, 1f2e"
    assert reopened.resume(step).step == 1
    assert reopened.messages == [f"hpcai: 0.0.1 then, {__version__} now", "data.batch: 4 then, 8 now", "step.lr: 0.1 then, 0.2 now"]
    reopened.data = "seven files, 77aa"
    with pytest.raises(CheckpointError, match=r"another data set \(six files, 1f2e then, seven files, 77aa now\); set checkpoint"):
        reopened.resume(step)
    permitted = new_checkpoints(tmp_path, settings=settings, other_data=True)
    permitted.data = reopened.data
    assert permitted.resume(step).step == 1 and len(permitted.messages) == 2


def save_and_count_reads(mesh: Mesh, path: str) -> tuple[dict[str, list[tuple[int, int]]], int, int]:
    """Save and resume in blocks of 96 bytes. Return writer and blocks of each file, the number of blocks verified by this rank, and
    the number of bytes read by it."""
    original_read, original_fill, reads = checkpoint.shard_file._OpenFiles.read, checkpoint_reader.CheckpointReader.fill, [[]]

    def read(files: Any, file: str, offset: int, into: torch.Tensor) -> None:
        reads[-1].append(len(into))
        original_read(files, file, offset, into)

    def fill(*args: Any) -> str:
        reads.append([])
        return original_fill(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shard_file, "BLOCK", 96)
        patch.setattr(checkpoint.shard_file._OpenFiles, "read", read)
        patch.setattr(checkpoint_reader.CheckpointReader, "fill", fill)
        step, checkpoints = new_step(mesh), new_checkpoints(Path(path), mesh, writers=2)
        folder = checkpoints.save(step, Progress(step=1)).path
        assert new_checkpoints(Path(path), mesh, writers=2).resume(step) == Progress(step=1)
    index = json.loads((folder / "index.json").read_text())["files"]
    covered = [f["header"] + sum(s["bytes"] for s in f["stretches"]) for f in index.values()]
    assert covered == [(folder / name).stat().st_size for name in index], "each byte has a SHA-256"
    files = {name: [(s["writer"], len(s["sha256"])) for s in f["stretches"]] for name, f in index.items()}
    return files, len(reads[0]), sum(reads[1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_boxes_are_written_by_two_and_each_byte_is_read_by_one(tmp_path: Path, ranks: int) -> None:
    results = on_ranks({"replicate": ranks}, save_and_count_reads, str(tmp_path))
    files = results[0][0]
    assert [writer for pieces in files.values() for writer, _ in pieces] == [0, 1]
    counts = [blocks for _, blocks, _ in results]
    assert sum(counts) == sum(count for pieces in files.values() for _, count in pieces) and max(counts) - min(counts) <= 1
    size = sum(tensor.nbytes for tensor in read_tensors(next(tmp_path.glob("step-*"))).values())
    assert sum(n for *_, n in results) == size and all(n for *_, n in results[:2]) and not any(n for *_, n in results[2:])
