"""``hpcai bench data [PART ...]``: how fast samples come from the disk at hand, ours against what else there is.

    direct        our reader against fio, the same file, block and depth
    larger        samples in a memory too small for them: direct reads against torch's DataLoader with h5py
    late          one sample in a thousand takes a hundred times as long: what it costs, ours and an in-order DataLoader
    cut           bytes that 2 and 4 ranks read which cut each sample, against one that reads it whole
    utilisation   of an emulated accelerator, MLPerf Storage's samples, and the rate at which it would drop to 90 %
    peers         DALI, torch's DataLoader and h5py alone, samples of 16.8 MB and 56 MB

Caches are cold unless a part says otherwise. Runs of ours and of others alternate; medians.
"""

import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpcai import dist
from hpcai.cli.bench.timing import Row, finish, machine, parse, parser, processes
from hpcai.cli.check.disk import evict
from hpcai.data import Loader, Reader, Rows
from hpcai.errors import HpcaiError
from hpcai.parallel.spatial import part as part_of

GIB, MIB = 1 << 30, 1 << 20
Speed = list[float]  # MB/s, CPU seconds per GiB


def main(argv: Sequence[str]) -> int:
    made = parser("data", __doc__)
    made.add_argument("--directory", type=Path, default=Path("."), help="a folder on the disk to be measured")
    made.add_argument("--gib", type=float, default=2.0, help="size of the data that are made there, and deleted after")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--threads", type=int, default=4, help="reads in flight, and workers of the others")
    measure = {
        "direct": _direct, "larger": _larger, "late": _late, "cut": _cut, "utilisation": _utilisation, "peers": _peers
    }  # fmt: skip
    words = parse(made, list(measure), argv)
    words.bytes = int(words.gib * GIB)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=words.directory) as folder:
        found = {part: measure[part](Path(folder), words) for part in words.parts}
    return finish({"bench": "data", **machine()} | found, words.parts, words.json)


# ---- data, caches, clocks


@contextmanager
def _volumes(folder: Path, count: int, shape: tuple[int, ...], dtype: str) -> Iterator[Path]:
    """A folder with ``count`` rows in HDF5 files of up to 16, contiguous and aligned, as data_prep writes them; deleted after."""
    folder = folder / "volumes"
    folder.mkdir()
    row = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    for first in range(0, count, 16):
        with h5py.File(folder / f"{first:06d}.h5", "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            rows = min(16, count - first)
            data = file.create_dataset("counts", (rows, *shape), dtype)
            for i in range(rows):
                row.flat[0] = (first + i) % 100
                data[i] = row
            file["target"] = np.zeros((rows, 4), np.float32)
    _forget(folder)
    yield folder
    shutil.rmtree(folder)


def _forget(folder: Path) -> None:
    """The page cache lets go of all files of a folder."""
    for path in folder.iterdir():
        evict(path)


@contextmanager
def _timed(size: int) -> Iterator[Speed]:
    """The speed of what reads ``size`` bytes, once it has; its CPU seconds are also those of processes that have ended."""
    speed: Speed = []
    cpu, began = sum(os.times()[:4]), time.perf_counter()
    yield speed
    speed += [size / (time.perf_counter() - began) / 1e6, (sum(os.times()[:4]) - cpu) / (size / GIB)]


def _median(values: Sequence[float], digits: int = 3) -> float:
    return round(statistics.median(values), digits)


class _Samples:
    """The rows of a folder as a source."""

    def __init__(self, folder: Path, shape: tuple[int, ...], dtype: str, reader: Any) -> None:
        self.rows = Rows(folder, {"counts": (dtype, shape), "target": ("float32", (4,))}, reader=reader)

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int, epoch: int) -> Any:
        return self.rows.read(index)

    def describe(self, index: int) -> str:
        return self.rows.describe(index)


class _Plain:
    """The same samples as anybody reads them: a torch data set over h5py."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[int, Any] = {}
        self.paths = sorted(folder.glob("*.h5"))
        self.places = [(i, row) for i, path in enumerate(self.paths) for row in range(len(h5py.File(path)["target"]))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        file, row = self.places[index]
        if file not in self.files:
            self.files[file] = h5py.File(self.paths[file], "r")
        return {name: self.files[file][name][row] for name in ("counts", "target")}


def _loader(source: Any, batch: int, threads: int, **words: Any) -> Any:
    return Loader(source, batch, dist.alone(), name="bench", workers=threads, last="keep", **words)


def _torch_loader(data: Any, batch: int, workers: int) -> Any:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=workers, generator=generator)


# ---- parts


def _direct(folder: Path, words: Any) -> list[Row]:
    if shutil.which("fio") is None:
        return [{"left out": "fio is not installed (Debian: apt-get install fio)"}]
    path = folder / "direct.bin"
    size = words.bytes // (64 * MIB) * 64 * MIB
    noise = np.random.default_rng(0).bytes(64 * MIB)
    with path.open("wb") as file:
        for _ in range(size // len(noise)):
            file.write(noise)
    rows = []
    for block, fetch in ((1 * MIB, 16 * MIB), (4 * MIB, 16 * MIB), (4 * MIB, 64 * MIB)):
        places = [int(place) * fetch for place in np.random.default_rng(1).permutation(size // fetch)]
        times: dict[str, list[Speed]] = {"fio": [], "huge": [], "ours": []}
        for _ in range(words.repeats):
            times["fio"].append(_fio(path, block, words.threads))
            with _huge_pages(words.threads * block) as there:
                times["huge"] += [_fio(path, block, words.threads, "--iomem=mmaphuge")] if there else []
            # As a loader has it: two samples are wanted at a time, by threads that read along.
            reader = Reader("direct", threads=max(words.threads - 2, 1), block=block)
            with reader, ThreadPoolExecutor(2) as pool, _timed(size) as speed:
                list(pool.map(partial(_fetch, reader, path, fetch), places))
            times["ours"].append(speed)
        mb_s = {kind: _median([mb_s for mb_s, _ in each], 0) for kind, each in times.items() if each}
        cpu = {kind: _median([cpu for _, cpu in each]) for kind, each in times.items() if each}
        rows.append({
            "block_mib": block // MIB, "depth": words.threads, "sample_mib": fetch // MIB, "fio_mb_s": mb_s["fio"],
            "fio_huge_pages_mb_s": mb_s.get("huge", "none to be had"), "ours_mb_s": mb_s["ours"],
            "ours_over_fio": round(mb_s["ours"] / mb_s["fio"], 2),
            "ours_over_huge": round(mb_s["ours"] / mb_s["huge"], 2) if "huge" in mb_s else "",
            "cpu_s_gib": " ".join(f"{kind} {value}" for kind, value in cpu.items()),
        })  # fmt: skip
    path.unlink()
    return rows


def _fetch(reader: Reader, path: Path, size: int, place: int) -> None:
    reader.fetch(path, place, size)  # nobody keeps the bytes


@contextmanager
def _huge_pages(size: int) -> Iterator[bool]:
    """Huge pages for fio, which ours gets by asking (madvise): a read of the disk then has few pieces. Needs root."""
    path = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = path.read_text()
        need = int(before) + size // (2 * MIB) + 8
        path.write_text(str(need))
        there = int(path.read_text()) >= need
    except OSError:
        yield False
        return
    try:
        yield there
    finally:
        path.write_text(before)


def _fio(path: Path, block: int, depth: int, *more: str) -> Speed:
    """The speed of fio with the same number of threads, each with one read in flight."""
    command = [
        "fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={block}", "--direct=1", "--ioengine=psync", "--thread",
        f"--numjobs={depth}", f"--size={path.stat().st_size}", f"--io_size={path.stat().st_size // depth}", "--group_reporting",
        "--output-format=json", "--randrepeat=0", "--allow_file_create=0", *more,
    ]  # fmt: skip
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    job = done["jobs"][0]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return [job["read"]["bw_bytes"] / 1e6, cpu / (job["read"]["io_bytes"] / GIB)]


def _larger(folder: Path, words: Any) -> list[Row]:
    """Each loader in a process of its own within a memory cgroup of 40 % of the data."""
    shape, sample = (64, 64, 64, 4), 2 * 64**3 * 4
    count = max(words.bytes // sample, 64)
    # torch's workers and ours need some memory of their own; the rest is the page cache.
    limit = int(0.25 * count * sample) + 300 * MIB
    rows = []
    with _volumes(folder, count, shape, "int16") as data, _memory_group(limit) as group:
        if not group:
            return [{"left out": "needs root and a memory cgroup, /sys/fs/cgroup/memory or /sys/fs/cgroup"}]
        for kind in ("torch", "ours"):
            _forget(data)
            try:
                with processes(1) as pool:
                    epochs = pool.submit(_epochs, kind, data, shape, group, words.threads).result()
            except (BrokenExecutor, HpcaiError, OSError, RuntimeError) as problem:
                return [{"failed": str(problem)}]
            rest = epochs[1:]  # the first one opens the files
            rows.append({
                "loader": kind, "data_mib": count * sample // MIB, "memory_mib": limit // MIB,
                "mb_s": _median([e["mb_s"] for e in rest], 0), "each": [round(e["mb_s"]) for e in epochs],
                "cpu_s_gib": _median([e["cpu"] for e in rest]), "refaults": max(e["refaults"] for e in rest),
                "read_of_data": _median([e["read"] for e in rest]),
            })  # fmt: skip
    rows[1]["ratio"] = round(rows[1]["mb_s"] / rows[0]["mb_s"], 2)
    rows[1]["cpu_ratio"] = round(rows[1]["cpu_s_gib"] / rows[0]["cpu_s_gib"], 2)
    return rows


@contextmanager
def _memory_group(limit: int) -> Iterator[str]:
    """The folder of a new memory cgroup, or nothing."""
    for base, name in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = base / f"hpcai-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(limit))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        try:
            yield str(group)
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:  # its last process is being reaped
                    time.sleep(0.1)
        return
    yield ""


def _epochs(kind: str, folder: Path, shape: tuple[int, ...], group: str, threads: int) -> list[dict[str, float]]:
    """Four epochs of a loader in the cgroup: its speed, and what the page cache did for the processes of the group."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    size = sum(path.stat().st_size for path in folder.glob("*.h5"))
    if kind == "ours":
        loader = _loader(_Samples(folder, shape, "int16", "auto"), 4, threads, prefetch=64 * MIB)
    else:
        loader = _torch_loader(_Plain(folder), 4, threads)
    rows = []
    for epoch in range(4):
        batches = loader.epoch(epoch) if kind == "ours" else loader
        refaults, read = _group_numbers(group)
        with _timed(size) as speed:
            for batch in batches:
                batch["counts"][:, 0, 0, 0, 0].sum()
        mb_s, cpu = speed
        after = _group_numbers(group)
        rows.append({"mb_s": mb_s, "cpu": cpu, "refaults": after[0] - refaults, "read": (after[1] - read) / size})
    if kind == "ours":
        loader.close()
    return rows


def _group_numbers(group: str) -> tuple[float, float]:
    """Pages that came back to the page cache of a cgroup, and bytes that its processes read, the ended ones included."""
    stat = dict(line.split() for line in Path(group, "memory.stat").read_text().splitlines())
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return float(stat.get("workingset_refault_file", stat.get("workingset_refault", 0))), float(io["read_bytes"])


class _Late:
    """Samples that take ``cost`` seconds, one in a thousand a hundred times as long."""

    def __init__(self, count: int, cost: float, slow: bool) -> None:
        self.count, self.cost, self.slow = count, cost, slow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.cost * (100 if self.slow and index % 1000 == 500 else 1))
        return np.full(16, index)

    def sample(self, index: int, epoch: int) -> Any:
        return self[index]

    def describe(self, index: int) -> str:
        return str(index)


def _late(folder: Path, words: Any) -> list[Row]:
    count, batch, cost, compute = int(min(words.gib, 2.0) * 4) * 1000, 4, 0.002, 0.004
    kinds: dict[str, Callable[[bool], Any]] = {
        "ours, ready order": lambda slow: _loader(_Late(count, cost, slow), batch, 2 * words.threads, order="ready", prefetch=MIB),
        "ours, strict order": lambda slow: _loader(_Late(count, cost, slow), batch, 2 * words.threads, prefetch=8 * 1024),
        "torch DataLoader": lambda slow: _torch_loader(_Late(count, cost, slow), batch, 2 * words.threads),
    }
    rows = []
    waits: dict[tuple[str, bool], list[float]] = {}
    for _, kind, slow in itertools.product(range(words.repeats), kinds, (False, True)):
        loader = kinds[kind](slow)
        batches = loader.epoch(0) if hasattr(loader, "epoch") else iter(loader)
        next(batches)
        waited, seen = 0.0, batch
        while True:
            began = time.perf_counter()
            got = next(batches, None)
            waited += time.perf_counter() - began
            if got is None:
                break
            seen += len(got)
            time.sleep(compute)  # an accelerator at work
        assert seen == count
        waits.setdefault((kind, slow), []).append(waited)
        if hasattr(loader, "close"):
            loader.close()
    work = compute * (count // batch - 1)
    for kind in kinds:
        plain, late = (statistics.median(waits[kind, slow]) for slow in (False, True))
        rows.append({
            "loader": kind, "samples": count, "workers": 2 * words.threads, "compute_s": round(work, 2),
            "waited_without_s": round(plain, 2), "waited_with_s": round(late, 2),
            "throughput_kept": round((work + plain) / (work + late), 3),
        })  # fmt: skip
    return rows


def _cut(folder: Path, words: Any) -> list[Row]:
    shape = (128, 128, 128, 4)
    rows, whole = [], 0
    with _volumes(folder, 8, shape, "int16") as data:
        for ranks in (1, 2, 4):
            total = 0
            for rank in range(ranks):
                with Reader("direct") as reader:
                    every = Rows(data, {"counts": ("int16", shape)}, reader=reader)
                    for index in range(len(every)):
                        every.read(index, {"counts": (slice(*part_of(128, rank, ranks)),)})
                    total += reader.transferred
            whole = whole or total
            rows.append({"ranks": ranks, "bytes_read": total, "of_one_whole_read": round(total / whole, 4)})
    return rows


def _utilisation(folder: Path, words: Any) -> list[Row]:
    """Compute seconds over wall seconds, the first epoch left out, batches landed in memory; past the page cache throughout."""
    rows = []
    for name, shape, batch, needed in (("3D U-Net", (280, 512, 512), 7, 3.18), ("CosmoFlow", (88, 127, 127), 1, 0.81)):
        size = 2 * math.prod(shape)
        with _volumes(folder, max(words.bytes // size, 5 * batch), shape, "int16") as data:
            source = _Samples(data, shape, "int16", "direct")
            full = _fed(source, batch, words, 0.0)[0]
            tried = {share: _fed(source, batch, words, batch * size / (share * full))[1] for share in (0.5, 0.7, 0.8, 0.9)}
            source.rows.close()
        rows.append({
            "samples": name, "sample_mb": round(size / 1e6, 1), "batch": batch, "disk_gb_s": round(full / 1e9, 2),
            **{f"at_{share:.0%}_of_it": round(used, 3) for share, used in tried.items()},
            "drops_to_90%_at_gb_s": round(full * _crossing(tried) / 1e9, 2), "an_h100_takes_gb_s": needed,
            "above_90": any(used >= 0.9 for used in tried.values()),
        })  # fmt: skip
    return rows


def _crossing(tried: dict[float, float]) -> float:
    """The share of the full rate at which the utilisation falls through 0.9, by a straight line between those tried."""
    points = sorted(tried.items())
    for (a, high), (b, low) in itertools.pairwise(points):
        if high >= 0.9 > low:
            return a + (b - a) * (high - 0.9) / (high - low)
    return points[-1][0] if points[-1][1] >= 0.9 else points[0][0]


def _fed(source: _Samples, batch: int, words: Any, compute: float) -> list[float]:
    """Bytes per second, and the part of the time that the emulated accelerator computes; medians."""
    return [statistics.median(each) for each in zip(*(_feed(source, batch, words.threads, compute) for _ in range(words.repeats)))]


def _feed(source: _Samples, batch: int, threads: int, compute: float) -> tuple[float, float]:
    busy, count, epochs = 0.0, 0, 4
    loader = Loader(source, batch, dist.alone(), name="bench", workers=threads, last="drop", prefetch=2 * GIB)
    began = time.perf_counter()
    for epoch in range(epochs):
        if epoch == 1:  # before, memory is touched for the first time
            busy, count, began = 0.0, 0, time.perf_counter()
        for part in loader.epoch(epoch, more=epoch < epochs - 1):
            count += part["counts"].nbytes
            if compute:
                before = time.perf_counter()
                time.sleep(compute)
                busy += time.perf_counter() - before
            del part
    wall = time.perf_counter() - began
    return count / wall, busy / wall


def _peers(folder: Path, words: Any) -> list[Row]:
    rows = []
    for name, shape, dtype in (("CosmoFlow", (128, 128, 128, 4), "int16"), ("DeepCAM", (768, 1152, 16), "float32")):
        size = np.dtype(dtype).itemsize * math.prod(shape)
        count = max(words.bytes // size, 8)
        with _volumes(folder, count, shape, dtype) as data:
            runs: dict[str, Callable[[], Iterator[Any]]] = {
                "ours": partial(_ours, data, shape, dtype, words.threads),
                "h5py alone": partial(_alone, data),
                "torch DataLoader, 0 workers": partial(_torch, data, 0),
                f"torch DataLoader, {words.threads} workers": partial(_torch, data, words.threads),
                **_dali(data, words.threads),
            }
            times: dict[str, list[Speed]] = {kind: [] for kind in runs}
            for repeat in range(words.repeats):
                for kind, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
                    _forget(data)
                    with _timed(count * size) as speed:
                        seen = sum(1 for _ in run())
                    assert seen == count, (kind, seen)
                    times[kind].append(speed)
        for kind, each in times.items():
            rows.append({
                "samples": name, "mb": round(size / 1e6, 1), "loader": kind, "mb_s": _median([mb_s for mb_s, _ in each], 0),
                "ours_over_it": _median([ours / mb_s for (ours, _), (mb_s, _) in zip(times["ours"], each)], 2),
                "cpu_s_gib": _median([cpu for _, cpu in each]),
            })  # fmt: skip
    return rows


def _ours(folder: Path, shape: tuple[int, ...], dtype: str, threads: int) -> Iterator[Any]:
    source = _Samples(folder, shape, dtype, "direct")
    with _loader(source, 1, threads) as loader:
        for batch in loader.epoch(0):
            yield batch["counts"]
    source.rows.close()


def _alone(folder: Path) -> Iterator[Any]:
    data = _Plain(folder)
    for index in range(len(data)):
        yield data[index]["counts"]


def _torch(folder: Path, workers: int) -> Iterator[Any]:
    for batch in _torch_loader(_Plain(folder), 1, workers):
        yield batch["counts"]


def _dali(folder: Path, threads: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """DALI reads no HDF5: the same samples as .npy files, and by its own reader."""
    try:
        from nvidia.dali import fn, pipeline_def
    except ImportError:
        return {}
    data = _Plain(folder)
    paths = []
    for i in range(len(data)):
        paths.append(str(folder / f"{i:06d}.npy"))
        np.save(paths[-1], data[i]["counts"])
    _forget(folder)

    def run(direct: bool) -> Iterator[Any]:
        @pipeline_def
        def pipeline() -> Any:
            words: dict[str, Any] = {"use_o_direct": True, "dont_use_mmap": True} if direct else {}
            return fn.readers.numpy(files=paths, random_shuffle=True, initial_fill=16, **words)

        built = pipeline(batch_size=1, num_threads=threads, device_id=None, prefetch_queue_depth=4)
        built.build()
        for _ in paths:
            yield built.run()[0].as_array()  # type: ignore[union-attr]

    return {"DALI, direct": partial(run, True), "DALI, mmap": partial(run, False)}
