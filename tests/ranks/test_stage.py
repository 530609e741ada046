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
from hpcai.data.stage import Staged, exchange, holds, job, stage_in
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from tests.ranks.launch import on_ranks
from tests.ranks.test_launch_mpi import MPICH, OF_LAUNCHERS, ROOT, SOON, mpich, run, run_forked

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
    plain, broadcast, usage = os.pwrite, exchange._OverGloo.broadcast, shutil.disk_usage(source)

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
                patch.setattr(exchange._OverGloo, "broadcast", flip)
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
        assert set(holds(node.directory, source)) == {source / name for name in there}
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


def test_all_processes_of_a_node_take_part(source: Path, tmp_path: Path) -> None:
    """Lanes: each process of a node passes on about the same number of bytes."""
    taken = on_ranks({"replicate": 4}, passes_on, source, tmp_path / "target")
    assert taken[0] == taken[2] and taken[1] == taken[3] and not set(taken[0]) & set(taken[1])
    loads = [sum((source / name).stat().st_size for name in names) for names in taken[:2]]
    assert max(loads) - min(loads) <= max(SIZES) and set(taken[0]) | set(taken[1]) == set(tree(source))


def passes_on(mesh: Mesh, source: Path, target: Path) -> list[str]:
    names: list[str] = []

    class Noted(job.Copying):
        def __init__(self, lane: job.Lane, *words: Any) -> None:
            super().__init__(lane, *words)
            names.extend(file.name for file in lane.files)

    node = f"node{mesh.rank // 2}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "Copying", Noted)
        stage_in(source, target / node, mesh, node=node, block=BLOCK)
    return names


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


def test_progress_counts_all_nodes(source: Path, tmp_path: Path) -> None:
    found = on_ranks({"replicate": 4}, counted, source, tmp_path / "target")
    assert [len(told) for told in found[1:]] == [0, 0, 0]
    total = 2 * sum(map(len, tree(source).values()))
    assert found[0][0] == (0, total) and found[0][-1] == (total, total)
    assert len(found[0]) > 4 and [done for done, _ in found[0]] == sorted(done for done, _ in found[0])


def counted(mesh: Mesh, source: Path, target: Path) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    node = f"node{mesh.rank // 2}"
    stage_in(source, target / node, mesh, node=node, block=BLOCK, progress=lambda *words: told.append(words))
    return told


def test_descriptors_do_not_add_up(source: Path, tmp_path: Path) -> None:
    left = on_ranks({"replicate": 4}, many_times, source, tmp_path / "target")
    assert all(more[-1] <= 0 for more in left), left


def many_times(mesh: Mesh, source: Path, target: Path) -> list[int]:
    """Descriptors left open by each of four runs; the first opens some for good."""
    found = []
    for i in range(4):
        how = {"grief": "read", "rank": 1} if i == 2 else {}
        found.append(staged(mesh, source, target / str(i), 2, how)[2])
    return found


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
        assert len(there) == result.files == len(holds(result.directory, source))
        assert all(whole[name] == data for name, data in there.items())
        assert result.kept == sum(map(len, kept[result.node].values()))


def test_a_block_that_could_not_be_read_is_kept_nowhere(tmp_path: Path) -> None:
    """Files of one block, which would be whole before all know of the failure."""
    (tmp_path / "source").mkdir()
    for i in range(60):
        (tmp_path / f"source/{i}.npy").write_bytes(np.random.default_rng(i).bytes(BLOCK))
    assert "EIO" in fails(tmp_path / "source", tmp_path / "target", 4, 1, grief="read", rank=1)


def test_all_stop_soon_after_a_failure(tmp_path: Path) -> None:
    """Two beats of eight blocks, of thousands; also those whose files are other ones."""
    (tmp_path / "source").mkdir()
    for i in range(4):
        (tmp_path / f"source/{i}.h5").write_bytes(bytes(300 * BLOCK))
    for shards in (1, 2):
        found = on_ranks({"replicate": 4}, reads_until_stop, tmp_path / "source", tmp_path / f"target{shards}", shards)
        assert all(0 < count <= 24 for count in found), found


def reads_until_stop(mesh: Mesh, source: Path, target: Path, shards: int) -> int:
    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    node, readers = f"node{mesh.rank // 2 if shards == 1 else mesh.rank}", list[Reader]()

    def opened() -> Reader:
        readers.append(Reader("buffered"))
        return readers[0]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match=r"rank 1 on node\d: .*EIO"):
        patch.setattr(job, "Reader", opened)
        if mesh.rank == 1:
            patch.setattr(os, "pwrite", pwrite)
        stage_in(source, target / node, mesh, node=node, shards=shards, block=BLOCK)
    return readers[0].transferred // BLOCK


def test_damage_on_the_way(source: Path, tmp_path: Path) -> None:
    text = fails(source, tmp_path / "target", 2, 1, grief="flip", rank=1)
    assert text.startswith("rank 1 on node1: ") and "train/u" in text and "index.json says" in text


def test_refusals_reach_all(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "1,000 are free" in fails(source, target, 4, 2, grief="small", rank=2)
    assert not tree(target)
    text = fails(source, target, 2, 1, folder=[target / "x"] * 2)
    assert f"{target}/x: is one folder for node0 and node1" in text or f"{target}/x: is one folder for node1 and node0" in text
    assert "node0: rank 0 has the target" in fails(source, target, 2, 2, folder=[target / "x", target / "y"])
    assert "3 shards need a multiple of 3 nodes, but the job has 4 nodes; give --shards 1, 2, 4" in fails(
        source, target, 4, 1, shards=3
    )
    assert "8 shards need a multiple of 8 nodes" in fails(source, target, 4, 1, shards=8)
    (source / "train/u 3.h5").unlink()
    assert "train/u 3.h5: is missing" in fails(source, target, 4, 2)
    assert not target.exists() or not tree(target)


def test_different_settings(source: Path, tmp_path: Path) -> None:
    first, second = on_ranks({"replicate": 2}, differs, source, tmp_path / "target")
    assert first == second and "rank 1 was told (shards, block, verify)" in first


def differs(mesh: Mesh, source: Path, target: Path) -> str:
    with pytest.raises(DataError) as caught:
        stage_in(source, target, mesh, verify=mesh.rank == 0)
    return str(caught.value)


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


def test_refusal_is_one_line(source: Path) -> None:
    ended = run_forked(2, str(MPICH.with_name("hpcai")), "data", "stage", str(source), str(source / "x"))
    assert [each.code for each in ended] == [2, 2]
    text = "".join(each.err for each in ended)
    assert text.count("hpcai data stage: ") == 1 and "holds or lies in the source" in text


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
