"""Staging by one process: complete copies, reuse of earlier ones, errors, and no damaged, partial or open files."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai import dist, log
from hpcai.cli import main as hpcai
from hpcai.cli import progress
from hpcai.data.direct import Reader
from hpcai.data.stage import Staged, assign_shards, job, plan, stage_in, staged_paths
from hpcai.errors import DataError
from tests.reference_data import load_json

pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCK = 16384
ODD = "a name with spaces/Größe α β.npy"
FILES = {
    "train/a.h5": 3 * BLOCK + 5, "train/b.h5": 2 * BLOCK, "train/c.h5": 4095, "train/d.h5": 4096, "train/e.h5": 4097,
    "validation/a.h5": BLOCK + 4096, "validation/empty.h5": 0, "recipe.json": 40, "deep/er/README": 13, "nothing": 0,
    ODD: 9 * BLOCK + 1, "tab\tand\nnewline.txt": 7,
}  # fmt: skip


def random_bytes(name: str, size: int) -> bytes:
    return np.random.default_rng(len(name) + size).bytes(size)


def write_files(folder: Path, files: dict[str, int], indexed: Sequence[str] = ("train", "validation")) -> Path:
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(random_bytes(name, size))
    for subfolder in indexed:
        write_index(folder / subfolder)
    return folder


def write_index(folder: Path) -> None:
    entries = [
        {"name": p.name, "rows": 1, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted(folder.glob("*.h5"))
    ]
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": entries}))


def read_tree(folder: Path, hidden: bool = False) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and (hidden or not p.name.startswith("."))]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def has_only_record(target: Path) -> bool:
    """Return whether the record is the only hidden file."""
    return [p.name for p in target.rglob(".*")] == [plan.RECORD]


def stage(source: Path, target: Path, **kwargs: Any) -> Staged:
    return stage_in(source, target, dist.single_process(), **{"block": BLOCK, **kwargs})


def check_staged(source: Path, target: Path) -> Staged:
    """Stage, and assert that the target has the files of the source, and no hidden file besides the record."""
    staged = stage(source, target)
    assert read_tree(target) == read_tree(source) and has_only_record(target)
    return staged


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", FILES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "target"


# ---- shards of nodes


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 5))
def test_shards_are_even_in_every_folder_and_in_total(
    tmp_path_factory: pytest.TempPathFactory, folders: list[list[int]], shards: int
) -> None:
    sizes = {f"{f}/{i}.npy": size for f, lengths in enumerate(folders) for i, size in enumerate(lengths)}
    source = write_files(tmp_path_factory.mktemp("shards"), sizes, ())
    shard_of = {str(path.relative_to(source)): shard for path, shard in assign_shards(source, shards).items()}
    assert set(shard_of) == set(sizes)
    for prefix in ["", *(f"{f}/" for f in range(len(folders)))]:
        names = [name for name in shard_of if name.startswith(prefix)]
        files = np.bincount([shard_of[name] for name in names], minlength=shards)
        assert files.max() - files.min() <= 1
        if prefix:
            weights = np.bincount([shard_of[name] for name in names], [sizes[name] for name in names], shards)
            assert weights.max() - weights.min() <= max(sizes[name] for name in names)


# ---- copies


@pytest.mark.parametrize("verify", [True, False])
def test_all_files_are_copied_and_a_second_run_reads_nothing(source: Path, target: Path, verify: bool) -> None:
    (source / ".hidden").write_text("x")
    (source / "train/half.h5.partial").write_text("x")
    first = stage(source, target, verify=verify)
    expected = {name: data for name, data in read_tree(source).items() if not name.endswith(".partial")}
    assert read_tree(target) == expected and has_only_record(target)
    size = sum(map(len, expected.values()))
    assert (first.files, first.bytes, first.kept, first.received, first.exchange) == (len(expected), size, 0, 0, "none")
    assert size <= first.read <= size + 4096 * len(expected)
    record = json.loads((target / plan.RECORD).read_text())
    assert (record["source"], record["verified"], set(record["files"])) == (str(source), verify, set(expected))
    assert set(staged_paths(target, source)) == {source / name for name in expected}
    inodes = {p: p.stat().st_ino for p in target.rglob("*") if p.name != plan.RECORD}
    second = stage(source, target, verify=verify)
    assert (second.read, second.kept) == (0, size)
    assert {p: p.stat().st_ino for p in inodes} == inodes


def test_links_are_followed(source: Path, target: Path, tmp_path: Path) -> None:
    outside = write_files(tmp_path / "outside", {"x.h5": 5000, "folder/y.h5": 6000}, ())
    (source / "inside.h5").symlink_to("train/a.h5")
    (source / "out.h5").symlink_to(outside / "x.h5")
    (source / "folder").symlink_to(outside / "folder")
    stage(source, target)
    assert read_tree(target) == read_tree(source) | {"folder/y.h5": random_bytes("folder/y.h5", 6000)}
    assert not any(path.is_symlink() for path in target.rglob("*"))


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff\xfe.h5"), "n" * 255], ids=["not UTF-8", "255 bytes"])
def test_a_file_may_have_any_name(source: Path, target: Path, name: str) -> None:
    (source / name).write_bytes(b"12345")
    check_staged(source, target)
    assert staged_paths(target, source)[source / name] == target / name
    assert stage(source, target).read == 0


def test_small_files_are_copied_to_all_nodes_and_data_to_shards(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_DATA_BYTES", 30)  # indexes and tables are longer
    (source / "train/index-0123abcd.safetensors").write_bytes(bytes(99))
    shard_of = {file.name: file.shard for file in plan.scan(source, 2)}
    assert {name for name, shard in shard_of.items() if shard is None} == {
        "train/index.json", "train/index-0123abcd.safetensors", "validation/index.json", "recipe.json", "deep/er/README", "nothing",
        "tab\tand\nnewline.txt",
    }  # fmt: skip
    (source / "deep/er/README").write_bytes(bytes(30))
    assert {file.name: file.shard for file in plan.scan(source, 2)}["deep/er/README"] is not None


# ---- reuse of earlier copies


def test_changed_files_are_copied_again(source: Path, target: Path) -> None:
    stage(source, target)
    (source / "train/a.h5").write_bytes(random_bytes("other", FILES["train/a.h5"]))
    write_index(source / "train")
    (source / ODD).write_bytes(b"shorter")
    os.utime(source / "recipe.json")
    second = check_staged(source, target)
    changed = FILES["train/a.h5"] + 7 + 40 + len((source / "train/index.json").read_bytes())
    assert second.bytes - second.kept == changed


@pytest.mark.parametrize(
    "damage", [lambda p: p.unlink(), lambda p: p.write_bytes(bytes(p.stat().st_size)), lambda p: p.write_bytes(b"")]
)
def test_damaged_copies_are_replaced(source: Path, target: Path, damage: Callable[[Path], Any]) -> None:
    stage(source, target)
    damage(target / "train/a.h5")
    assert source / "train/a.h5" not in staged_paths(target, source)
    second = check_staged(source, target)
    assert second.bytes - second.kept == FILES["train/a.h5"]


def test_without_a_record_everything_is_copied(source: Path, target: Path) -> None:
    stage(source, target)
    (target / plan.RECORD).unlink()
    assert check_staged(source, target).kept == 0


def test_unverified_files_are_copied_again_for_verification(source: Path, target: Path) -> None:
    def verified() -> bool:
        return bool(json.loads((target / plan.RECORD).read_text())["verified"])

    size = stage(source, target, verify=False).bytes
    assert not verified() and stage(source, target, verify=False).kept == size
    assert stage(source, target).kept == 0 and verified()
    assert stage(source, target, verify=False).kept == size and verified()
    (target / "train/a.h5").unlink()
    stage(source, target, verify=False)
    assert not verified()


def test_partial_files_of_a_killed_run_are_replaced(source: Path, target: Path) -> None:
    (target / "train").mkdir(parents=True)
    (target / ".stage.0123.partial").write_bytes(b"half")
    (target / "train/a.h5").write_bytes(b"short")
    check_staged(source, target)


def interrupt(done: int, total: int) -> None:
    if done > total / 2:
        raise KeyboardInterrupt


def test_an_interrupted_run_resumes(source: Path, target: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stage(source, target, progress=interrupt, block=4096)
    copied = read_tree(target)
    assert has_only_record(target) and copied and all((source / name).read_bytes() == data for name, data in copied.items())
    assert check_staged(source, target).kept == sum(map(len, copied.values())) > 0


def test_an_interrupted_verification_keeps_only_verified_files(source: Path, target: Path) -> None:
    stage(source, target, verify=False)
    damaged = target / "train/c.h5"
    damaged.write_bytes(bytes(FILES["train/c.h5"]))
    shutil.copystat(source / "train/c.h5", damaged)
    with pytest.raises(KeyboardInterrupt):
        stage(source, target, progress=interrupt, block=4096)
    check_staged(source, target)


def test_files_deleted_from_the_source_are_deleted_from_the_target(source: Path, target: Path) -> None:
    stage(source, target)
    (target / "mine.txt").write_text("not staged")
    (source / "train/a.h5").unlink()
    write_index(source / "train")
    stage(source, target)
    assert read_tree(target) == read_tree(source) | {"mine.txt": b"not staged"}


# ---- errors before the first write


def check_refused(source: Path, target: Path, message: str, **kwargs: Any) -> None:
    before = read_tree(target, hidden=True)
    with pytest.raises(DataError, match=message):
        stage(source, target, **kwargs)
    assert read_tree(target, hidden=True) == before


def test_index_and_files_must_agree(source: Path, target: Path) -> None:
    os.truncate(source / "train/a.h5", 100)
    check_refused(source, target, r"train/a.h5: has 100 bytes \(truncated or rewritten\?\), index.json has 49,157 bytes; restore")
    (source / "train/a.h5").unlink()
    (source / "train/b.h5").unlink()
    check_refused(source, target, r"train/a.h5: is missing, index.json has 49,157 bytes \(and 1 more files\)")


@pytest.mark.parametrize(("content", "message"), load_json("refused/staged_indexes"))
def test_an_invalid_index_is_refused(source: Path, target: Path, content: str, message: str) -> None:
    (source / "train/index.json").write_text(content)
    check_refused(source, target, f"train/index.json: {message}")


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', '{"files": ["a.h5"]}', "{}"])
def test_an_index_json_of_another_kind_is_copied_as_a_file(source: Path, target: Path, content: str) -> None:
    (source / "train/index.json").write_text(content)
    check_staged(source, target)


def test_broken_and_circular_links_are_refused(source: Path, target: Path) -> None:
    (source / "broken").symlink_to("gone")
    check_refused(source, target, "broken: leads nowhere; mend or delete it")
    (source / "broken").unlink()
    (source / "deep/round").symlink_to("..")
    check_refused(source, target, "deep/round: this link leads back to a folder that contains it")


def test_free_space_is_checked_first(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)
    free = sum(-(-len(data) // 4096) * 4096 for data in read_tree(source).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    check_refused(
        source,
        target,
        rf"target: {int(free * 1.05):,} bytes are needed on here \({free:,} to copy, 5% reserve.* {free:,} are free; free space",
        node="here",
    )
    monkeypatch.setattr(job, "RESERVE", 0.0)
    stage(source, target)
    free = 0
    assert stage(source, target).read == 0  # without files to copy no space is needed


@pytest.mark.parametrize("inside", ["", "train", "..", "new/folder"])
def test_target_and_source_must_not_overlap(source: Path, inside: str) -> None:
    before = read_tree(source, hidden=True)
    with pytest.raises(DataError, match="is, contains or is within the source"):
        stage(source, source / inside)
    assert read_tree(source, hidden=True) == before


def test_invalid_arguments_are_refused(source: Path, target: Path, tmp_path: Path) -> None:
    check_refused(tmp_path / "none", target, "none: no such folder on")
    (tmp_path / "empty").mkdir()
    check_refused(tmp_path / "empty", target, "empty: holds no file to copy")
    check_refused(source, target, r"2 shards need a multiple of 2 nodes, but the job has 1 node; give --shards 1", shards=2)
    check_refused(source, target, "0 shards need", shards=0)
    check_refused(source, target, "blocks of 0 bytes, expected 4,096 to", block=0)
    with pytest.raises(DataError, match="recipe.json/target: cannot be written on .*: Not a directory; name a folder"):
        stage(tmp_path / "source", write_files(tmp_path / "other", {"recipe.json": 3}, ()) / "recipe.json/target")


def test_a_record_of_another_source_is_refused(source: Path, target: Path, tmp_path: Path) -> None:
    stage(source, target)
    other = write_files(tmp_path / "other", {"x.h5": 3}, ())
    check_refused(other, target, f"target: holds files staged from {source}, not from {other}; name another folder")
    with pytest.raises(DataError, match="holds files staged from"):
        staged_paths(target, other)
    for record in ("{", "[]", '{"files": []}', '{"files": {"a": 3}, "source": "x", "verified": true}', '{"files": {}}'):
        (target / plan.RECORD).write_text(record)
        check_refused(source, target, f"{plan.RECORD}: not a record of staged files.* delete it and stage again")
    with pytest.raises(DataError, match="not there; run hpcai data stage"):
        staged_paths(tmp_path / "nowhere", source)


def test_a_target_is_locked_by_a_job(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    descriptor = os.open(target, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another job stages to it"):
        stage(source, target)
    os.close(descriptor)
    check_staged(source, target)


# ---- errors while copying


def check_complete_files(source: Path, target: Path, without: str) -> None:
    """Assert that the target has complete files only, and not the file ``without``."""
    copied = read_tree(target)
    assert without not in copied and all((source / name).read_bytes() == data for name, data in copied.items())
    assert has_only_record(target)


def test_a_flipped_bit_is_detected(source: Path, target: Path) -> None:
    path = source / "train/b.h5"
    content = path.read_bytes()
    path.write_bytes(content[:20000] + bytes([content[20000] ^ 4]) + content[20001:])
    actual, expected = hashlib.sha256(path.read_bytes()).hexdigest(), hashlib.sha256(content).hexdigest()
    with pytest.raises(DataError, match=f"train/b.h5: the copy on .* has SHA-256 {actual}, index.json has {expected}; compare"):
        stage(source, target)
    check_complete_files(source, target, "train/b.h5")
    path.write_bytes(content)
    check_staged(source, target)


def test_a_flipped_bit_is_not_detected_without_verification(source: Path, target: Path) -> None:
    (source / "train/b.h5").write_bytes(bytes(FILES["train/b.h5"]))
    stage(source, target, verify=False)
    assert read_tree(target) == read_tree(source)


def truncate(path: Path) -> None:
    os.truncate(path, 2 * BLOCK)


def break_disk(path: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    "name, fault, verify, message",
    [
        ("train/a.h5", truncate, True, "train/a.h5: ends at byte 32,768, but bytes"),
        (ODD, os.utime, True, "npy: was rewritten while it was copied"),  # without an index entry: found by its modification time
        (ODD, os.utime, False, "npy: was rewritten while it was copied"),
        (ODD, break_disk, True, r"npy: bytes .* cannot be read: .*\(EIO\)"),
    ],
)
def test_a_file_that_fails_during_the_copy(
    source: Path, target: Path, name: str, fault: Callable[[Path], Any], verify: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        if offset == 2 * BLOCK and os.readlink(f"/proc/self/fd/{descriptor}") == str(source / name):
            fault(source / name)
        return os.preadv(descriptor, views, offset)

    monkeypatch.setattr(job, "Reader", partial(Reader, preadv=preadv))
    with pytest.raises(DataError, match=message):
        stage(source, target, verify=verify)
    monkeypatch.undo()
    check_complete_files(source, target, name)
    if fault is not truncate:
        check_staged(source, target)


@pytest.mark.parametrize("operation", ["write", "allocate", "flush"])
def test_a_full_disk_raises(source: Path, target: Path, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*args: Any) -> Any:
        if operation == "flush" and os.fstat(args[0]).st_size != FILES["train/b.h5"]:
            return original(*args)
        if operation == "allocate" and args[2] != FILES["train/b.h5"]:
            return original(*args)
        if operation == "write" and args[2] != BLOCK:
            return original(*args)
        raise error

    name = {"write": "pwrite", "allocate": "posix_fallocate", "flush": "fsync"}[operation]
    original: Any = getattr(os, name)
    monkeypatch.setattr(os, name, fail)
    message = r"\.(npy|h5): cannot be written on mynode: No space left on device \(ENOSPC\); free space on this node"
    with pytest.raises(DataError, match=message) as caught:
        stage(source, target, node="mynode")
    monkeypatch.undo()
    assert caught.value.__cause__ is not None
    check_complete_files(source, target, str(caught.value).split(": cannot")[0].removeprefix(f"{target}/"))
    check_staged(source, target)


def test_a_write_of_zero_bytes_raises(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 0)
    with pytest.raises(DataError, match=r"cannot be written on .*\(EIO\)"):
        stage(source, target)
    assert has_only_record(target)


def test_progress_is_reported(source: Path, target: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = stage(source, target, progress=lambda *args: calls.append(args))
    assert calls[0] == (0, result.bytes) and calls[-1] == (result.bytes, result.bytes) and len(calls) > 3
    assert [a for a, _ in calls] == sorted(a for a, _ in calls)
    with pytest.raises(DataError, match="ZeroDivisionError"):
        stage(source, target.with_name("other"), progress=lambda done, total: 1 // (done == 0))


def test_writes_bypass_the_page_cache(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    original = os.pwrite

    def pwrite(descriptor: int, *args: Any) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return original(descriptor, *args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    try:
        os.close(os.open(source / "recipe.json", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    stage(source, target)
    assert flags and all(flags)


# ---- the command


def test_command(source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DISK", str(target.parent))
    monkeypatch.setattr(progress, "EVERY", 0.0)
    args = ["data", "stage", str(source), "$MY_DISK/target", "--block", "1"]
    assert hpcai(args) == 0
    out, err = capsys.readouterr()
    size = sum(map(len, read_tree(source).values()))
    assert out.startswith(f"staged {log.format_bytes(size)} to 1 node in ") and out.endswith("kept 0 B, SHA-256 compared\n")
    assert err.startswith("staged: 0 B of ") and read_tree(target) == read_tree(source)
    assert hpcai([*args, "--json", "--no-verify", "--node", "$MY_DISK"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [report[name] for name in ("kept", "read", "bytes", "verified", "gb_per_s")] == [size, 0, size, False, 0.0]
    assert report["nodes"][0]["node"] == str(target.parent)


def test_command_errors(source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.setenv("EMPTY", "")
    target.mkdir(parents=True)
    monkeypatch.chdir(target)
    for name in ("$NO_SUCH", "${NO_SUCH}", "${NO_SUCH", "$EMPTY", "$"):
        assert hpcai(["data", "stage", str(source), f"{name}/x"]) == 2
        assert f"{name} is not set on this node; set it" in capsys.readouterr().err
    assert hpcai(["data", "stage", str(source), "~nobody-here/x"]) == 2 and "~nobody-here is no user on" in capsys.readouterr().err
    for blank in ("", " "):
        assert hpcai(["data", "stage", str(source), blank]) == 2 and f"{blank!r} is no name" in capsys.readouterr().err
    assert list(target.iterdir()) == []
    assert hpcai(["data", "stage", str(source), str(source)]) == 2
    assert capsys.readouterr().err.startswith("hpcai data stage: ")
