"""Staging by one process: what arrives, what is kept, what is refused, and that nothing bad, half or open stays."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
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

pytestmark = pytest.mark.usefixtures("nothing_stays")

BLOCK = 16384
ODD = "a name with spaces/Größe α β.npy"
FILES = {
    "train/a.h5": 3 * BLOCK + 5, "train/b.h5": 2 * BLOCK, "train/c.h5": 4095, "train/d.h5": 4096, "train/e.h5": 4097,
    "validation/a.h5": BLOCK + 4096, "validation/empty.h5": 0, "recipe.json": 40, "deep/er/README": 13, "nothing": 0,
    ODD: 9 * BLOCK + 1, "tab\tand\nnewline.txt": 7,
}  # fmt: skip


def content(name: str, size: int) -> bytes:
    return np.random.default_rng(len(name) + size).bytes(size)


def make(folder: Path, files: dict[str, int], indexed: Sequence[str] = ("train", "validation")) -> Path:
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name, size))
    for part in indexed:
        index(folder / part)
    return folder


def index(folder: Path) -> None:
    listed = [
        {"name": p.name, "rows": 1, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted(folder.glob("*.h5"))
    ]
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": listed}))


def tree(folder: Path, hidden: bool = False) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and (hidden or not p.name.startswith("."))]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def clean(target: Path) -> bool:
    """Whether the record is the only hidden file."""
    return [p.name for p in target.rglob(".*")] == [plan.RECORD]


def run(source: Path, target: Path, **other: Any) -> Staged:
    return stage_in(source, target, dist.single_process(), **{"block": BLOCK, **other})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source", FILES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "target"


# ---- which node holds what


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 5))
def test_shards_are_even_in_every_folder_and_over_all(
    tmp_path_factory: pytest.TempPathFactory, folders: list[list[int]], shards: int
) -> None:
    sizes = {f"{f}/{i}.npy": size for f, some in enumerate(folders) for i, size in enumerate(some)}
    source = make(tmp_path_factory.mktemp("shards"), sizes, ())
    found = {str(path.relative_to(source)): shard for path, shard in assign_shards(source, shards).items()}
    assert set(found) == set(sizes)
    for prefix in ["", *(f"{f}/" for f in range(len(folders)))]:
        names = [name for name in found if name.startswith(prefix)]
        files = np.bincount([found[name] for name in names], minlength=shards)
        assert files.max() - files.min() <= 1
        if prefix:
            weights = np.bincount([found[name] for name in names], [sizes[name] for name in names], shards)
            assert weights.max() - weights.min() <= max(sizes[name] for name in names)


# ---- what arrives


@pytest.mark.parametrize("verify", [True, False])
def test_every_byte_arrives_and_a_second_run_reads_nothing(source: Path, target: Path, verify: bool) -> None:
    (source / ".hidden").write_text("x")
    (source / "train/half.h5.partial").write_text("x")
    done = run(source, target, verify=verify)
    whole = {name: data for name, data in tree(source).items() if not name.endswith(".partial")}
    assert tree(target) == whole and clean(target)
    size = sum(map(len, whole.values()))
    assert (done.files, done.bytes, done.kept, done.received, done.exchange) == (len(whole), size, 0, 0, "none")
    assert size <= done.read <= size + 4096 * len(whole)
    record = json.loads((target / plan.RECORD).read_text())
    assert (record["source"], record["verified"], set(record["files"])) == (str(source), verify, set(whole))
    assert set(staged_paths(target, source)) == {source / name for name in whole}
    inodes = {p: p.stat().st_ino for p in target.rglob("*") if p.name != plan.RECORD}
    again = run(source, target, verify=verify)
    assert (again.read, again.kept) == (0, size)
    assert {p: p.stat().st_ino for p in inodes} == inodes


@settings(max_examples=20)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=5), st.sampled_from([4096, BLOCK]))
def test_sizes_around_blocks(tmp_path_factory: pytest.TempPathFactory, around: list[int], block: int) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    make(folder / "source", {f"{i}.npy": max(0, i * 4096 + more) for i, more in enumerate(around)}, ())
    run(folder / "source", folder / "target", block=block)
    assert tree(folder / "target") == tree(folder / "source")


def test_links(source: Path, target: Path, tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", {"x.h5": 5000, "folder/y.h5": 6000}, ())
    (source / "inside.h5").symlink_to("train/a.h5")
    (source / "out.h5").symlink_to(outside / "x.h5")
    (source / "folder").symlink_to(outside / "folder")
    run(source, target)
    assert tree(target) == tree(source) | {"folder/y.h5": content("folder/y.h5", 6000)}
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_name_that_is_not_text(source: Path, target: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe.h5")
    (source / odd).write_bytes(b"12345")
    run(source, target)
    assert (target / odd).read_bytes() == b"12345"
    assert staged_paths(target, source)[source / odd] == target / odd
    assert run(source, target).read == 0


def test_long_name(source: Path, target: Path) -> None:
    (source / ("n" * 255)).write_bytes(b"12345")
    run(source, target)
    assert tree(target) == tree(source) and clean(target)


def test_small_files_go_everywhere_and_data_to_shards(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_DATA_BYTES", 30)  # the indexes are longer, as those of many files, and so is a table
    (source / "train/index-0123abcd.safetensors").write_bytes(bytes(99))
    found = {file.name: file.shard for file in plan.scan(source, 2)}
    assert {name for name, shard in found.items() if shard is None} == {
        "train/index.json", "train/index-0123abcd.safetensors", "validation/index.json", "recipe.json", "deep/er/README", "nothing",
        "tab\tand\nnewline.txt",
    }  # fmt: skip
    (source / "deep/er/README").write_bytes(bytes(30))
    assert {file.name: file.shard for file in plan.scan(source, 2)}["deep/er/README"] is not None


# ---- what is kept


def test_changed_source_is_copied_anew(source: Path, target: Path) -> None:
    run(source, target)
    (source / "train/a.h5").write_bytes(content("other", FILES["train/a.h5"]))
    index(source / "train")
    (source / ODD).write_bytes(b"shorter")
    os.utime(source / "recipe.json")
    again = run(source, target)
    assert tree(target) == tree(source) and clean(target)
    changed = FILES["train/a.h5"] + 7 + 40 + len((source / "train/index.json").read_bytes())
    assert again.bytes - again.kept == changed


@pytest.mark.parametrize(
    "spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(bytes(p.stat().st_size)), lambda p: p.write_bytes(b"")]
)
def test_spoiled_copy_is_copied_anew(source: Path, target: Path, spoil: Callable[[Path], Any]) -> None:
    run(source, target)
    spoil(target / "train/a.h5")
    assert source / "train/a.h5" not in staged_paths(target, source)
    again = run(source, target)
    assert again.bytes - again.kept == FILES["train/a.h5"]
    assert tree(target) == tree(source)


def test_without_a_record_everything_is_copied(source: Path, target: Path) -> None:
    run(source, target)
    (target / plan.RECORD).unlink()
    assert run(source, target).kept == 0 and tree(target) == tree(source)


def test_unverified_files_are_copied_again_with_verify(source: Path, target: Path) -> None:
    def verified() -> bool:
        return bool(json.loads((target / plan.RECORD).read_text())["verified"])

    whole = run(source, target, verify=False).bytes
    assert not verified() and run(source, target, verify=False).kept == whole
    assert run(source, target).kept == 0 and verified()
    assert run(source, target, verify=False).kept == whole and verified()
    (target / "train/a.h5").unlink()
    run(source, target, verify=False)
    assert not verified()


def test_leftovers_of_a_killed_run(source: Path, target: Path) -> None:
    (target / "train").mkdir(parents=True)
    (target / ".stage.0123.partial").write_bytes(b"half")
    (target / "train/a.h5").write_bytes(b"short")
    run(source, target)
    assert tree(target) == tree(source) and clean(target)


def stop(done: int, total: int) -> None:
    if done > total / 2:
        raise KeyboardInterrupt


def test_an_interrupted_run_resumes(source: Path, target: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(source, target, progress=stop, block=4096)
    there = tree(target)
    assert clean(target) and there and all((source / name).read_bytes() == data for name, data in there.items())
    assert run(source, target).kept == sum(map(len, there.values())) > 0
    assert tree(target) == tree(source) and clean(target)


def test_an_interrupted_verification_keeps_only_verified_files(source: Path, target: Path) -> None:
    run(source, target, verify=False)
    damaged = target / "train/c.h5"
    damaged.write_bytes(bytes(FILES["train/c.h5"]))
    shutil.copystat(source / "train/c.h5", damaged)
    with pytest.raises(KeyboardInterrupt):
        run(source, target, progress=stop, block=4096)
    run(source, target)
    assert tree(target) == tree(source)


def test_file_that_the_source_no_longer_has(source: Path, target: Path) -> None:
    run(source, target)
    (target / "mine.txt").write_text("not staged")
    (source / "train/a.h5").unlink()
    index(source / "train")
    run(source, target)
    assert tree(target) == tree(source) | {"mine.txt": b"not staged"}


# ---- what is refused, before anything is written


def refused(source: Path, target: Path, text: str, **other: Any) -> None:
    there = tree(target, hidden=True)
    with pytest.raises(DataError, match=text):
        run(source, target, **other)
    assert tree(target, hidden=True) == there


def test_index_and_files_must_agree(source: Path, target: Path) -> None:
    os.truncate(source / "train/a.h5", 100)
    refused(source, target, r"train/a.h5: has 100 bytes \(truncated or rewritten\?\), index.json has 49,157 bytes; restore")
    (source / "train/a.h5").unlink()
    (source / "train/b.h5").unlink()
    refused(source, target, r"train/a.h5: is missing, index.json has 49,157 bytes \(and 1 more files\)")


@pytest.mark.parametrize(
    "entry, text",
    [
        ({"name": "../b.h5", "bytes": 1}, "entry 0: name '../b.h5': .*expected the name of a file in the folder"),
        ({"name": "/b.h5", "bytes": 1}, "entry 0: name '/b.h5': .*expected the name of a file"),
        ({"name": 3, "bytes": 1}, "entry 0: name 3: .*string"),
        ({"name": "a.h5"}, "entry 0: bytes .*required"),
        ({"name": "a.h5", "bytes": 49157, "sha256": "12"}, "entry 0: sha256 '12': .*pattern"),
        ("{", "cannot be read as JSON"),
    ],
)
def test_bad_index(source: Path, target: Path, entry: Any, text: str) -> None:
    (source / "train/index.json").write_text(entry if entry == "{" else json.dumps({"files": [entry]}))
    refused(source, target, f"train/index.json: {text}")


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', '{"files": ["a.h5"]}', "{}"])
def test_index_of_something_else_is_a_file(source: Path, target: Path, content: str) -> None:
    (source / "train/index.json").write_text(content)
    run(source, target)
    assert tree(target) == tree(source)


def test_links_that_lead_nowhere_or_round(source: Path, target: Path) -> None:
    (source / "broken").symlink_to("gone")
    refused(source, target, "broken: leads nowhere; mend or delete it")
    (source / "broken").unlink()
    (source / "deep/round").symlink_to("..")
    refused(source, target, "deep/round: this link leads back to a folder that contains it")


def test_free_space_is_checked_first(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)
    free = sum(-(-len(data) // 4096) * 4096 for data in tree(source).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    refused(
        source,
        target,
        rf"target: {int(free * 1.05):,} bytes are needed on here \({free:,} to copy, 5% reserve.* {free:,} are free; free space",
        node="here",
    )
    monkeypatch.setattr(job, "RESERVE", 0.0)
    run(source, target)
    free = 0
    assert run(source, target).read == 0  # nothing to copy needs no room


@pytest.mark.parametrize("inside", ["", "train", "..", "new/folder"])
def test_target_and_source_apart(source: Path, inside: str) -> None:
    before = tree(source, hidden=True)
    with pytest.raises(DataError, match="is, contains or is within the source"):
        run(source, source / inside)
    assert tree(source, hidden=True) == before


def test_other_refusals(source: Path, target: Path, tmp_path: Path) -> None:
    refused(tmp_path / "none", target, "none: no such folder on")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", target, "empty: holds no file to copy")
    refused(source, target, r"2 shards need a multiple of 2 nodes, but the job has 1 node; give --shards 1", shards=2)
    refused(source, target, "0 shards need", shards=0)
    refused(source, target, "blocks of 0 bytes, expected 4,096 to", block=0)
    with pytest.raises(DataError, match="recipe.json/target: cannot be written on .*: Not a directory; name a folder"):
        run(tmp_path / "source", make(tmp_path / "other", {"recipe.json": 3}, ()) / "recipe.json/target")


def test_record_of_another_source(source: Path, target: Path, tmp_path: Path) -> None:
    run(source, target)
    other = make(tmp_path / "other", {"x.h5": 3}, ())
    refused(other, target, f"target: holds files staged from {source}, not from {other}; name another folder")
    with pytest.raises(DataError, match="holds files staged from"):
        staged_paths(target, other)
    for bad in ("{", "[]", '{"files": []}', '{"files": {"a": 3}, "source": "x", "verified": true}', '{"files": {}}'):
        (target / plan.RECORD).write_text(bad)
        refused(source, target, f"{plan.RECORD}: not a record of staged files.* delete it and stage again")
    with pytest.raises(DataError, match="not there; run hpcai data stage"):
        staged_paths(tmp_path / "nowhere", source)


def test_two_jobs_do_not_share_a_target(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    other = os.open(target, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another job stages to it"):
        run(source, target)
    os.close(other)
    run(source, target)
    assert tree(target) == tree(source)


# ---- what fails on the way


def left_in_order(source: Path, target: Path, without: str) -> None:
    """Whole files only, and the bad one is not there."""
    there = tree(target)
    assert without not in there and all((source / name).read_bytes() == data for name, data in there.items())
    assert clean(target)


def test_flipped_bit(source: Path, target: Path) -> None:
    path = source / "train/b.h5"
    good = path.read_bytes()
    path.write_bytes(good[:20000] + bytes([good[20000] ^ 4]) + good[20001:])
    found, listed = hashlib.sha256(path.read_bytes()).hexdigest(), hashlib.sha256(good).hexdigest()
    with pytest.raises(DataError, match=f"train/b.h5: the copy on .* has SHA-256 {found}, index.json has {listed}; compare"):
        run(source, target)
    left_in_order(source, target, "train/b.h5")
    path.write_bytes(good)
    run(source, target)
    assert tree(target) == tree(source)


def test_flipped_bit_passes_where_nothing_is_compared(source: Path, target: Path) -> None:
    (source / "train/b.h5").write_bytes(bytes(FILES["train/b.h5"]))
    run(source, target, verify=False)
    assert tree(target) == tree(source)


def cut(path: Path) -> None:
    os.truncate(path, 2 * BLOCK)


def break_disk(path: Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    "name, fault, verify, text",
    [
        ("train/a.h5", cut, True, "train/a.h5: ends at byte 32,768, but bytes"),
        (ODD, os.utime, True, "npy: was rewritten while it was copied"),  # no index states what it must hold: its time tells
        (ODD, os.utime, False, "npy: was rewritten while it was copied"),
        (ODD, break_disk, True, r"npy: bytes .* cannot be read: .*\(EIO\)"),
    ],
)
def test_file_that_fails_while_it_is_copied(
    source: Path, target: Path, name: str, fault: Callable[[Path], Any], verify: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        if offset == 2 * BLOCK and os.readlink(f"/proc/self/fd/{descriptor}") == str(source / name):
            fault(source / name)
        return os.preadv(descriptor, views, offset)

    monkeypatch.setattr(job, "Reader", partial(Reader, preadv=preadv))
    with pytest.raises(DataError, match=text):
        run(source, target, verify=verify)
    monkeypatch.undo()
    left_in_order(source, target, name)
    if fault is not cut:
        run(source, target)
        assert tree(target) == tree(source)


@pytest.mark.parametrize("how", ["write", "allocate", "flush"])
def test_full_disk(source: Path, target: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*words: Any) -> Any:
        if how == "flush" and os.fstat(words[0]).st_size != FILES["train/b.h5"]:
            return plain(*words)
        if how == "allocate" and words[2] != FILES["train/b.h5"]:
            return plain(*words)
        if how == "write" and words[2] != BLOCK:
            return plain(*words)
        raise full

    call = {"write": "pwrite", "allocate": "posix_fallocate", "flush": "fsync"}[how]
    plain: Any = getattr(os, call)
    monkeypatch.setattr(os, call, fails)
    text = r"\.(npy|h5): cannot be written on mynode: No space left on device \(ENOSPC\); free space on this node"
    with pytest.raises(DataError, match=text) as caught:
        run(source, target, node="mynode")
    monkeypatch.undo()
    assert caught.value.__cause__ is not None
    left_in_order(source, target, str(caught.value).split(": cannot")[0].removeprefix(f"{target}/"))
    run(source, target)
    assert tree(target) == tree(source)


def test_write_without_progress(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 0)
    with pytest.raises(DataError, match=r"cannot be written on .*\(EIO\)"):
        run(source, target)
    assert clean(target)


def test_progress(source: Path, target: Path) -> None:
    told: list[tuple[int, int]] = []
    done = run(source, target, progress=lambda *words: told.append(words))
    assert told[0] == (0, done.bytes) and told[-1] == (done.bytes, done.bytes) and len(told) > 3
    assert [a for a, _ in told] == sorted(a for a, _ in told)
    with pytest.raises(DataError, match="ZeroDivisionError"):
        run(source, target.with_name("other"), progress=lambda done, total: 1 // (done == 0))


def test_data_passes_the_page_cache(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []
    plain = os.pwrite

    def pwrite(descriptor: int, *words: Any) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return plain(descriptor, *words)

    monkeypatch.setattr(os, "pwrite", pwrite)
    try:
        os.close(os.open(source / "recipe.json", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    run(source, target)
    assert flags and all(flags)


# ---- the command


def test_command(source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DISK", str(target.parent))
    monkeypatch.setattr(progress, "EVERY", 0.0)
    words = ["data", "stage", str(source), "$MY_DISK/target", "--block", "1"]
    assert hpcai(words) == 0
    out, err = capsys.readouterr()
    size = sum(map(len, tree(source).values()))
    assert out.startswith(f"staged {log.format_bytes(size)} to 1 node in ") and out.endswith("kept 0 B, SHA-256 compared\n")
    assert err.startswith("staged: 0 B of ") and tree(target) == tree(source)
    assert hpcai([*words, "--json", "--no-verify", "--node", "$MY_DISK"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("kept", "read", "bytes", "verified", "gb_per_s")] == [size, 0, size, False, 0.0]
    assert found["nodes"][0]["node"] == str(target.parent)


def test_command_refuses(source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_bar_on_a_terminal(source: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert hpcai(["data", "stage", str(source), str(target)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "stage" in err and "\x1b[" in err
