"""Staging by many nodes: each byte is read once, every node gets its shard, and one failure is everybody's within seconds.

Ranks of this machine play nodes, each with a folder of its own.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.data.direct import Reader
from hpcai.data.stage import Staged, exchange, job, stage_in, staged_paths
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from tests.ranks.launch import on_ranks
from tests.ranks.test_launch_mpi import MPICH, OF_LAUNCHERS, ROOT, SOON, mpich, run

BLOCK = 16384
SIZES = [5 * BLOCK + 1, 20 * BLOCK, 7 * BLOCK - 1, 11 * BLOCK + 4097, 3, 30 * BLOCK]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two folders of data, one with an index and one without, and small files."""
    source = tmp_path / "source"
    (source / "validation").mkdir(parents=True)
    (source / "train").mkdir()
    for i, size in enumerate(SIZES):
        (source / f"train/u {i}.h5").write_bytes(np.random.default_rng(i).bytes(size))
        (source / f"validation/u{i}.npy").write_bytes(np.random.default_rng(100 + i).bytes(size // 2))
    write_index(source)
    (source / "recipe.json").write_text("{}")
    (source / "empty").write_text("")
    return source


def write_index(source: Path) -> None:
    files = [
        {"name": p.name, "rows": 1, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted((source / "train").glob("*.h5"))
    ]
    (source / "train/index.json").write_text(json.dumps({"files": files}))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}


def held() -> tuple[int, list[str]]:
    """The number of open descriptors, and Python's threads."""
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def staged(mesh: Mesh, source: Path, target: Path, per_node: int, how: dict[str, Any]) -> tuple[Staged | str, float, int]:
    """The result, or the text of the refusal; the seconds that it took; descriptors that it left open."""
    how = dict(how)
    rank, bad, grief = mesh.rank, how.pop("rank", None), how.pop("grief", "")
    node = how.pop("node", [f"node{rank // per_node}"] * mesh.world)[rank]
    folder = how.pop("folder", [target / node] * mesh.world)[rank]
    seen = 0
    plain, broadcast, usage = os.pwrite, exchange._GlooExchange.broadcast, shutil.disk_usage(source)

    def preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        nonlocal seen
        seen += 1
        if grief == "read" and seen > 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, views, offset)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if offset >= 4 * BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, data, offset)

    def flip(self: Any, block: np.ndarray, root: int) -> None:
        broadcast(self, block, root)
        if len(block) > 8192:  # none of the small files
            block[77] ^= 1

    before, began = held(), time.monotonic()
    result: Staged | str
    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(job, "Reader", partial(Reader, preadv=preadv))
            if grief == "progress":
                how["progress"] = lambda done, total: 1 // (done == 0)
            if grief == "write":
                patch.setattr(os, "pwrite", pwrite)
            if grief == "flip":
                patch.setattr(exchange._GlooExchange, "broadcast", flip)
            if grief == "small":
                patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        try:
            result = stage_in(source, folder, mesh, node=node, block=BLOCK, **how)
        except DataError as error:
            result = str(error)
    seconds, after = time.monotonic() - began, held()
    assert after[1] == before[1], "threads outlived the call"
    return result, seconds, after[0] - before[0]


def go(source: Path, target: Path, ranks: int, per_node: int, **how: Any) -> list[Staged]:
    found = [result for result, _, _ in on_ranks({"replicate": ranks}, staged, source, target, per_node, how)]
    assert all(isinstance(result, Staged) for result in found), found
    return found  # type: ignore[return-value]


def fails(source: Path, target: Path, ranks: int, per_node: int, **how: Any) -> str:
    """The one text that all ranks raise, within seconds."""
    found = on_ranks({"replicate": ranks}, staged, source, target, per_node, how)
    texts = {result for result, _, _ in found}
    assert len(texts) == 1 and isinstance(found[0][0], str), found
    assert max(seconds for _, seconds, _ in found) < SOON
    assert not list(target.rglob("*.partial"))
    for folder in target.iterdir() if target.exists() else []:
        assert all((source / name).read_bytes() == data for name, data in tree(folder).items()), "a bad file stayed"
    return found[0][0]


# ---- each byte once


@pytest.mark.parametrize(
    "ranks, per_node, shards",
    [(2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2)],
)
def test_each_byte_is_read_once_and_arrives(source: Path, tmp_path: Path, ranks: int, per_node: int, shards: int) -> None:
    target, verify = tmp_path / "target", shards != 2
    found = go(source, target, ranks, per_node, shards=shards, verify=verify)
    nodes = {result.node: result for result in found}
    whole, count = tree(source), ranks // per_node
    assert list(nodes) == [f"node{i}" for i in range(count)]
    assert [node.shard for node in nodes.values()] == [i * shards // count for i in range(count)]
    # Each byte of a shard leaves the source once; small files once for every shard
    small = sum(len(data) for name, data in whole.items() if not name.startswith(("train/u", "validation/u")))
    expected = sum(map(len, whole.values())) + (shards - 1) * small
    read = sum(node.read for node in nodes.values())
    assert expected <= read <= 1.05 * expected + 4096 * len(whole) * shards
    for shard in range(shards):
        group = [node for node in nodes.values() if node.shard == shard]
        assert len({node.bytes for node in group}) == 1
        share = group[0].bytes / len(group)
        assert all(abs(node.read - share) < 0.2 * share + 4 * BLOCK for node in group), "one node reads for the others"
        assert all(abs(node.received - (group[0].bytes - share)) < 0.2 * share + 4 * BLOCK for node in group)
    held_by: dict[str, set[int]] = {}
    for node in nodes.values():
        there = tree(node.directory)
        assert all(whole[name] == data for name, data in there.items()) and sum(map(len, there.values())) == node.bytes
        assert set(staged_paths(node.directory, source)) == {source / name for name in there}
        for name in there:
            held_by.setdefault(name, set()).add(node.shard)
    assert set(held_by) == set(whole)
    for name, shards_of in held_by.items():
        data = name.startswith(("train/u", "validation/u"))
        assert len(shards_of) == (1 if data else shards)
    for folder in ("train/u", "validation/u"):
        counts = np.bincount([next(iter(s)) for name, s in held_by.items() if name.startswith(folder)], minlength=shards)
        assert counts.max() - counts.min() <= 1
    again = go(source, target, ranks, per_node, shards=shards, verify=verify)
    assert all(result.read == result.received == 0 and result.kept == result.bytes for result in again)


def test_nodes_with_different_numbers_of_processes(source: Path, tmp_path: Path) -> None:
    names = ["b", "a", "b"]  # ordered by their lowest ranks, not by name
    found = go(source, tmp_path / "target", 3, 1, node=names, folder=[tmp_path / "target" / name for name in names])
    assert [result.node for result in found] == names
    assert tree(tmp_path / "target/a") == tree(tmp_path / "target/b") == tree(source)


def test_what_a_node_has_lost_is_read_once_and_only_there_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    go(source, target, 4, 1)
    lost = {0: ["train/u 1.h5"], 2: ["train/u 1.h5", "train/u 5.h5", "validation/u3.npy"], 3: ["train/u 5.h5"]}
    for node, names in lost.items():
        for name in names:
            (target / f"node{node}" / name).unlink()
    inodes = {path: path.stat().st_ino for path in target.rglob("*.*") if not path.name.startswith(".")}
    found = go(source, target, 4, 1)
    size = {name: (source / name).stat().st_size for names in lost.values() for name in names}
    assert sum(size.values()) <= sum(result.read for result in found) <= sum(size.values()) + 4096 * len(size)
    for node, result in enumerate(found):
        assert result.bytes - result.kept == sum(size[name] for name in lost.get(node, []))
        assert tree(target / f"node{node}") == tree(source)
    assert all(path.stat().st_ino == inode for path, inode in inodes.items())


# ---- one fails, all fail


@pytest.mark.parametrize(
    "grief, rank, per_node, shards, verify",
    [("read", 0, 2, 1, True), ("read", 3, 2, 1, False), ("write", 0, 2, 1, False), ("write", 3, 2, 1, True),
     ("progress", 0, 2, 1, True), ("read", 3, 1, 2, False), ("write", 0, 1, 2, True)],
)  # fmt: skip
def test_one_failure_is_everybodys(
    source: Path, tmp_path: Path, grief: str, rank: int, per_node: int, shards: int, verify: bool
) -> None:
    target, ranks = tmp_path / "target", 4
    text = fails(source, target, ranks, per_node, grief=grief, rank=rank, shards=shards, verify=verify)
    reason = {"read": r"cannot be read: .*EIO", "write": r"cannot be written on node\d: .*ENOSPC", "progress": "ZeroDivisionError"}
    assert text.startswith(f"rank {rank} on node{rank // per_node}: ")
    assert pytest.raises(AssertionError, match=reason[grief]).matches(AssertionError(text))
    whole = tree(source)
    kept = {node: tree(target / node) for node in os.listdir(target)}
    assert all(whole[name] == data for there in kept.values() for name, data in there.items())
    for result in go(source, target, ranks, per_node, shards=shards, verify=verify):
        there = tree(result.directory)
        assert len(there) == result.files == len(staged_paths(result.directory, source))
        assert all(whole[name] == data for name, data in there.items())
        assert result.kept == sum(map(len, kept[result.node].values()))


def test_damage_on_the_way(source: Path, tmp_path: Path) -> None:
    text = fails(source, tmp_path / "target", 2, 1, grief="flip", rank=1)
    assert text.startswith("rank 1 on node1: ") and "train/u" in text and "index.json has" in text


def test_refusals_reach_all(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "1,000 are free" in fails(source, target, 4, 2, grief="small", rank=2)
    assert not tree(target)
    text = fails(source, target, 2, 1, folder=[target / "x"] * 2)
    assert f"{target}/x: is one folder for node0 and node1" in text or f"{target}/x: is one folder for node1 and node0" in text
    assert "3 shards need a multiple of 3 nodes, but the job has 4 nodes; give --shards 1" in fails(source, target, 4, 1, shards=3)
    (source / "train/u 3.h5").unlink()
    assert "train/u 3.h5: is missing" in fails(source, target, 4, 2)
    assert not target.exists() or not tree(target)


# ---- real launchers


def command(ranks: int, folder: Path, words: str) -> "subprocess.CompletedProcess[str]":
    """``hpcai data stage`` on ranks that play two nodes."""
    script = folder / "stage.sh"
    script.write_text(f"#!/bin/sh\nexport NODE=node$((PMI_RANK * 2 / {ranks}))\nexec {MPICH.parent}/hpcai data stage {words}\n")
    script.chmod(0o755)
    mine = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)}
    mine |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60"}
    return subprocess.run([*mpich(ranks), script], env=mine, capture_output=True, text=True, timeout=60)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.claim)])
def test_command_behind_mpiexec(source: Path, tmp_path: Path, ranks: int) -> None:
    ended = command(ranks, tmp_path, f"'{source}' '{tmp_path}/target/$NODE' --node '$NODE' --json --block 1")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert found["exchange"] == "MPI"
    assert [node["node"] for node in found["nodes"]] == ["node0", "node1"]
    assert all(node["received"] > 0 for node in found["nodes"])
    whole = tree(source)
    assert tree(tmp_path / "target/node0") == tree(tmp_path / "target/node1") == whole
    size = sum(map(len, whole.values()))
    assert size <= found["read"] <= 1.05 * size + 4096 * len(whole)


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["full", pytest.param("kill", marks=pytest.mark.claim)])
def test_failure_over_mpi_ends_all(source: Path, tmp_path: Path, how: str) -> None:
    ended = run(mpich(2), "stage.py", str(source), str(tmp_path / "target"), "1", how, "1")
    assert ended.after < SOON
    if how == "kill":
        assert ended.code != 0
    else:
        said = ended.said()
        assert ended.code == 0 and len(said) == 2
        assert {line["error"] for line in said} == {said[0]["error"]}
        assert str(said[0]["error"]).startswith("rank 1 on node1: ") and "ENOSPC" in str(said[0]["error"])
        assert not list((tmp_path / "target").rglob("*.partial"))
    go(source, tmp_path / "target", 4, 2)
    assert tree(tmp_path / "target/node0") == tree(tmp_path / "target/node1") == tree(source)
    assert not list((tmp_path / "target").rglob("*.partial"))
