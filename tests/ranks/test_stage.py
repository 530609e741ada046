"""Staging by many nodes: each byte is read once, every node gets its shard, and one failure is raised on all ranks within seconds.

Ranks of this machine act as nodes, each with its own folder.
"""

import errno
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
from tests.ranks.test_launch_mpi import LAUNCHER_VARIABLES, MPICH, ROOT, SOON, mpich
from tests.unit.data.test_stage import read_tree, write_index

BLOCK = 16384
SIZES = [5 * BLOCK + 1, 20 * BLOCK, 7 * BLOCK - 1, 11 * BLOCK + 4097, 3, 30 * BLOCK]
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write two data folders, one with an index and one without, and small files."""
    source = tmp_path / "source"
    (source / "validation").mkdir(parents=True)
    (source / "train").mkdir()
    for i, size in enumerate(SIZES):
        (source / f"train/u {i}.h5").write_bytes(np.random.default_rng(i).bytes(size))
        (source / f"validation/u{i}.npy").write_bytes(np.random.default_rng(100 + i).bytes(size // 2))
    write_index(source / "train")
    (source / "recipe.json").write_text("{}")
    (source / "empty").write_text("")
    return source


def open_resources() -> tuple[int, list[str]]:
    """Return the number of open descriptors, and the names of Python's threads."""
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def stage(mesh: Mesh, source: Path, target: Path, per_node: int, options: dict[str, Any]) -> tuple[Staged | str, float, int]:
    """Return the result, or the text of the DataError; its seconds; the number of descriptors that remain open."""
    options = dict(options)
    rank, failing_rank, fault = mesh.rank, options.pop("rank", None), options.pop("fault", "")
    node = options.pop("node", [f"node{rank // per_node}"] * mesh.world)[rank]
    folder = options.pop("folder", [target / node] * mesh.world)[rank]
    reads = 0
    original_pwrite, broadcast, disk_usage = os.pwrite, exchange.Exchange.broadcast, shutil.disk_usage(source)

    def preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        nonlocal reads
        reads += 1
        if fault == "read" and reads > 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, views, offset)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if offset >= 4 * BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original_pwrite(descriptor, data, offset)

    def flip(self: Any, block: np.ndarray, root: int) -> None:
        broadcast(self, block, root)
        if len(block) > 8192:  # not in small files
            block[77] ^= 1

    before, start = open_resources(), time.monotonic()
    result: Staged | str
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing_rank:
            patch.setattr(job, "Reader", partial(Reader, preadv=preadv))
            if fault == "progress":
                options["progress"] = lambda done, total: 1 // (done == 0)
            if fault == "write":
                patch.setattr(os, "pwrite", pwrite)
            if fault == "flip":
                patch.setattr(exchange.Exchange, "broadcast", flip)
            if fault == "small":
                patch.setattr(shutil, "disk_usage", lambda path: disk_usage._replace(free=1000))
        try:
            result = stage_in(source, folder, mesh, node=node, block=BLOCK, **options)
        except DataError as error:
            result = str(error)
    seconds, after = time.monotonic() - start, open_resources()
    assert after[1] == before[1], "threads outlived the call"
    return result, seconds, after[0] - before[0]


def stage_all(source: Path, target: Path, ranks: int, per_node: int, **options: Any) -> list[Staged]:
    results = [result for result, _, _ in on_ranks({"replicate": ranks}, stage, source, target, per_node, options)]
    assert all(isinstance(result, Staged) for result in results), results
    return results  # type: ignore[return-value]


def stage_error(source: Path, target: Path, ranks: int, per_node: int, **options: Any) -> str:
    """Return the message of the DataError that all ranks raise, within seconds."""
    results = on_ranks({"replicate": ranks}, stage, source, target, per_node, options)
    texts = {result for result, _, _ in results}
    assert len(texts) == 1 and isinstance(results[0][0], str), results
    assert max(seconds for _, seconds, _ in results) < SOON
    assert not list(target.rglob("*.partial"))
    for folder in target.iterdir() if target.exists() else []:
        assert all((source / name).read_bytes() == data for name, data in read_tree(folder).items()), "a damaged file remains"
    return results[0][0]


# ---- each byte once


@pytest.mark.parametrize("ranks, per_node, shards", [(2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2)])
def test_each_byte_is_read_once_and_arrives(source: Path, tmp_path: Path, ranks: int, per_node: int, shards: int) -> None:
    target, verify = tmp_path / "target", shards != 2
    results = stage_all(source, target, ranks, per_node, shards=shards, verify=verify)
    nodes = {result.node: result for result in results}
    files, count = read_tree(source), ranks // per_node
    assert list(nodes) == [f"node{i}" for i in range(count)]
    assert [node.shard for node in nodes.values()] == [i * shards // count for i in range(count)]
    # Each byte of a shard leaves the source once; small files once for every shard
    small = sum(len(data) for name, data in files.items() if not name.startswith(("train/u", "validation/u")))
    expected = sum(map(len, files.values())) + (shards - 1) * small
    read = sum(node.read for node in nodes.values())
    assert expected <= read <= 1.05 * expected + 4096 * len(files) * shards
    for shard in range(shards):
        group = [node for node in nodes.values() if node.shard == shard]
        assert len({node.bytes for node in group}) == 1
        share = group[0].bytes / len(group)
        assert all(abs(node.read - share) < 0.2 * share + 4 * BLOCK for node in group), "one node reads for the others"
        assert all(abs(node.received - (group[0].bytes - share)) < 0.2 * share + 4 * BLOCK for node in group)
    shards_by_name: dict[str, set[int]] = {}
    for node in nodes.values():
        staged = read_tree(node.directory)
        assert all(files[name] == data for name, data in staged.items()) and sum(map(len, staged.values())) == node.bytes
        assert set(staged_paths(node.directory, source)) == {source / name for name in staged}
        for name in staged:
            shards_by_name.setdefault(name, set()).add(node.shard)
    assert set(shards_by_name) == set(files)
    for name, shards_with_file in shards_by_name.items():
        data = name.startswith(("train/u", "validation/u"))
        assert len(shards_with_file) == (1 if data else shards)
    for folder in ("train/u", "validation/u"):
        counts = np.bincount([next(iter(s)) for name, s in shards_by_name.items() if name.startswith(folder)], minlength=shards)
        assert counts.max() - counts.min() <= 1
    second = stage_all(source, target, ranks, per_node, shards=shards, verify=verify)
    assert all(result.read == result.received == 0 and result.kept == result.bytes for result in second)


def test_nodes_with_different_numbers_of_processes(source: Path, tmp_path: Path) -> None:
    names = ["b", "a", "b"]  # ordered by their lowest ranks, not by name
    results = stage_all(source, tmp_path / "target", 3, 1, node=names, folder=[tmp_path / "target" / name for name in names])
    assert [result.node for result in results] == names
    assert read_tree(tmp_path / "target/a") == read_tree(tmp_path / "target/b") == read_tree(source)


def test_lost_files_of_a_node_are_read_once_and_written_only_there(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    stage_all(source, target, 4, 1)
    lost = {0: ["train/u 1.h5"], 2: ["train/u 1.h5", "train/u 5.h5", "validation/u3.npy"], 3: ["train/u 5.h5"]}
    for node, names in lost.items():
        for name in names:
            (target / f"node{node}" / name).unlink()
    inodes = {path: path.stat().st_ino for path in target.rglob("*.*") if not path.name.startswith(".")}
    results = stage_all(source, target, 4, 1)
    size = {name: (source / name).stat().st_size for names in lost.values() for name in names}
    assert sum(size.values()) <= sum(result.read for result in results) <= sum(size.values()) + 4096 * len(size)
    for node, result in enumerate(results):
        assert result.bytes - result.kept == sum(size[name] for name in lost.get(node, []))
        assert read_tree(target / f"node{node}") == read_tree(source)
    assert all(path.stat().st_ino == inode for path, inode in inodes.items())


# ---- one fails, all fail


@pytest.mark.parametrize(
    "fault, rank, per_node, shards, verify",
    [("read", 0, 2, 1, True), ("read", 3, 2, 1, False), ("write", 0, 2, 1, False), ("write", 3, 2, 1, True),
     ("progress", 0, 2, 1, True), ("read", 3, 1, 2, False), ("write", 0, 1, 2, True)],
)  # fmt: skip
def test_a_failure_of_one_rank_is_raised_on_all(
    source: Path, tmp_path: Path, fault: str, rank: int, per_node: int, shards: int, verify: bool
) -> None:
    target, ranks = tmp_path / "target", 4
    text = stage_error(source, target, ranks, per_node, fault=fault, rank=rank, shards=shards, verify=verify)
    reason = {"read": r"cannot be read: .*EIO", "write": r"cannot be written on node\d: .*ENOSPC", "progress": "ZeroDivisionError"}
    assert text.startswith(f"rank {rank} on node{rank // per_node}: ")
    assert pytest.raises(AssertionError, match=reason[fault]).matches(AssertionError(text))
    files = read_tree(source)
    before = {node: read_tree(target / node) for node in os.listdir(target)}
    assert all(files[name] == data for staged in before.values() for name, data in staged.items())
    for result in stage_all(source, target, ranks, per_node, shards=shards, verify=verify):
        staged = read_tree(result.directory)
        assert len(staged) == result.files == len(staged_paths(result.directory, source))
        assert all(files[name] == data for name, data in staged.items())
        assert result.kept == sum(map(len, before[result.node].values()))


def test_damage_during_the_exchange_is_reported(source: Path, tmp_path: Path) -> None:
    text = stage_error(source, tmp_path / "target", 2, 1, fault="flip", rank=1)
    assert text.startswith("rank 1 on node1: ") and "train/u" in text and "index.json has" in text


def test_errors_are_raised_on_all_ranks(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert "1,000 are free" in stage_error(source, target, 4, 2, fault="small", rank=2)
    assert not read_tree(target)
    text = stage_error(source, target, 2, 1, folder=[target / "x"] * 2)
    assert f"{target}/x: is one folder for node0 and node1" in text or f"{target}/x: is one folder for node1 and node0" in text
    text = stage_error(source, target, 4, 1, shards=3)
    assert "3 shards need a multiple of 3 nodes, but the job has 4 nodes; give --shards 1" in text
    (source / "train/u 3.h5").unlink()
    assert "train/u 3.h5: is missing" in stage_error(source, target, 4, 2)
    assert not target.exists() or not read_tree(target)


# ---- real launchers


def run_command(ranks: int, folder: Path, args: str) -> "subprocess.CompletedProcess[str]":
    """Run ``hpcai data stage`` on ranks that act as two nodes."""
    script = folder / "stage.sh"
    script.write_text(f"#!/bin/sh\nexport NODE=node$((PMI_RANK * 2 / {ranks}))\nexec {MPICH.parent}/hpcai data stage {args}\n")
    script.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60"}
    return subprocess.run([*mpich(ranks), script], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.claim)])
def test_command_behind_mpiexec(source: Path, tmp_path: Path, ranks: int) -> None:
    result = run_command(ranks, tmp_path, f"'{source}' '{tmp_path}/target/$NODE' --node '$NODE' --json --block 1")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    report = json.loads(line)
    assert report["exchange"] == "MPI"
    assert [node["node"] for node in report["nodes"]] == ["node0", "node1"]
    assert all(node["received"] > 0 for node in report["nodes"])
    files = read_tree(source)
    assert read_tree(tmp_path / "target/node0") == read_tree(tmp_path / "target/node1") == files
    size = sum(map(len, files.values()))
    assert size <= report["read"] <= 1.05 * size + 4096 * len(files)
