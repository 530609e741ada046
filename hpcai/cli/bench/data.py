"""``hpcai bench data [PART ...]``: how fast samples come from the disk at hand, ours against what else there is.

    direct    our reader against fio: the same file, blocks and reads in flight
    peers     our Loader, torch's DataLoader over h5py, and h5py alone, with samples of 16.8 MB and of 56.6 MB

Caches are cold at the beginning of each run. Runs of ours and of others alternate; medians.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hpcai import dist
from hpcai.cli.bench.timing import Row, finish, machine, parse, parser
from hpcai.cli.check.disk import evict
from hpcai.data import Loader, Reader, Rows
from hpcai.data.splits import Samples
from hpcai.errors import HpcaiError

GIB, MIB = 1 << 30, 1 << 20
Shape = tuple[int, ...]
_SAMPLES: Sequence[tuple[Shape, str]] = (((128, 128, 128, 4), "int16"), ((768, 1152, 16), "float32"))


def main(argv: Sequence[str]) -> int:
    made = parser("data", __doc__)
    made.add_argument("--directory", type=Path, default=Path("."), help="a folder on the disk to be measured")
    made.add_argument("--gib", type=float, default=2.0, help="size of the data that are made there, and deleted after")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--threads", type=int, default=4, help="reads in flight, and workers of the others")
    measure = {"direct": _direct, "peers": _peers}
    words = parse(made, list(measure), argv)
    words.bytes = int(words.gib * GIB)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=words.directory) as folder:
        found = {part: measure[part](Path(folder), words) for part in words.parts}
    return finish({"bench": "data", **machine()} | found, words.parts, words.json)


@contextmanager
def _volumes(folder: Path, count: int, shape: Shape, dtype: str) -> Iterator[Path]:
    """A folder with ``count`` rows in HDF5 files of up to 16, contiguous and aligned, as data_prep writes them; deleted after."""
    folder = folder / "volumes"
    folder.mkdir()
    row = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    for first in range(0, count, 16):
        rows = min(16, count - first)
        with h5py.File(folder / f"{first:06d}.h5", "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
            data = file.create_dataset("values", (rows, *shape), dtype)
            for i in range(rows):
                data[i] = row
    yield folder
    shutil.rmtree(folder)


def _forget(folder: Path) -> None:
    for path in folder.iterdir():
        evict(path)


class _Clock:
    """MB/s and CPU seconds per GiB of what reads ``size`` bytes inside, those of processes that have ended included."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> "_Clock":
        self.cpu, self.began = sum(os.times()[:4]), time.perf_counter()
        return self

    def __exit__(self, *problem: object) -> None:
        self.mb_s = self.size / (time.perf_counter() - self.began) / 1e6
        self.cpu_s_gib = (sum(os.times()[:4]) - self.cpu) / (self.size / GIB)


def _medians(clocks: Sequence[Any]) -> Row:
    return {
        "mb_s": round(statistics.median(each.mb_s for each in clocks)),
        "cpu_s_gib": round(statistics.median(each.cpu_s_gib for each in clocks), 3),
    }


# ---- our reader against fio


def _direct(folder: Path, words: Any) -> list[Row]:
    if shutil.which("fio") is None:
        return [{"left out": "fio is not installed (Debian: apt-get install fio)"}]
    path, piece = folder / "direct.bin", 64 * MIB
    size, noise = words.bytes // piece * piece, np.random.default_rng(0).bytes(piece)
    with path.open("wb") as file:
        for _ in range(size // piece):
            file.write(noise)
    rows = []
    for block, fetch in ((1 * MIB, 16 * MIB), (4 * MIB, 16 * MIB), (4 * MIB, 64 * MIB)):
        places = [int(place) * fetch for place in np.random.default_rng(1).permutation(size // fetch)]
        theirs, ours = [], []
        for _ in range(words.repeats):
            theirs.append(_fio(path, block, words.threads))
            # As a loader has it: two samples are wanted at a time, by threads that read along.
            reader = Reader("direct", threads=max(words.threads - 2, 1), block=block)
            with reader, ThreadPoolExecutor(2) as pool, _Clock(size) as clock:
                list(pool.map(partial(_read, reader, path, fetch), places))
            ours.append(clock)
        fio, own = _medians(theirs), _medians(ours)
        speeds = {f"{name}_{what}": value for name, one in (("fio", fio), ("ours", own)) for what, value in one.items()}
        rows.append({"block_mib": block // MIB, "sample_mib": fetch // MIB, **speeds,
                     "ours_over_fio": round(own["mb_s"] / fio["mb_s"], 2)})  # fmt: skip
    path.unlink()
    return rows


def _read(reader: Reader, path: Path, size: int, place: int) -> None:
    reader.fetch(path, place, size)  # nobody keeps the bytes


def _fio(path: Path, block: int, depth: int) -> Any:
    """fio with as many threads, each with one read in flight."""
    size = path.stat().st_size
    command = [
        "fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={block}", "--direct=1", "--ioengine=psync", "--thread",
        f"--numjobs={depth}", f"--size={size}", f"--io_size={size // depth}", "--group_reporting", "--output-format=json",
        "--randrepeat=0", "--allow_file_create=0",
    ]  # fmt: skip
    (job,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"]
    found = _Clock(job["read"]["io_bytes"])
    found.mb_s = job["read"]["bw_bytes"] / 1e6
    found.cpu_s_gib = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 / (found.size / GIB)
    return found


# ---- loaders


class _H5py(Dataset[Any]):
    """The rows of a folder as one reads them with h5py."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[Path, Any] = {}
        self.rows = []
        for path in sorted(folder.glob("*.h5")):
            with h5py.File(path) as file:
                self.rows += [(path, row) for row in range(len(file["values"]))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        path, row = self.rows[index]
        if path not in self.files:  # opened by each worker
            self.files[path] = h5py.File(path)
        return {"values": self.files[path]["values"][row]}


@contextmanager
def _by_ours(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Iterable[Any]]:
    rows = Rows(folder, {"values": (dtype, shape)}, reader="direct")
    words: Any = {"workers": threads, "last_batch": "keep", "prefetch": 64 * MIB}
    with Loader(Samples(rows, len(rows)), 1, dist.alone(), name="bench", **words) as loader:
        yield loader.epoch(0)
    rows.close()


@contextmanager
def _by_torch(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Iterable[Any]]:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    random = torch.Generator().manual_seed(0)
    loader = DataLoader(_H5py(folder), 1, shuffle=True, num_workers=threads, generator=random)
    yield loader


@contextmanager
def _by_h5py(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Iterable[Any]]:
    """Arrays in order, and no batches."""
    data = _H5py(folder)
    yield (data[index] for index in range(len(data)))


_LOADERS = {"ours": _by_ours, "torch DataLoader": _by_torch, "h5py alone": _by_h5py}


def _peers(folder: Path, words: Any) -> list[Row]:
    rows = []
    for shape, dtype in _SAMPLES:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        count = max(words.bytes // size, 2)
        clocks: dict[str, list[Any]] = {name: [] for name in _LOADERS}
        with _volumes(folder, count, shape, dtype) as data:
            for name in [*_LOADERS] * words.repeats:
                _forget(data)
                with _Clock(count * size) as clock, _LOADERS[name](data, shape, dtype, words.threads) as batches:
                    seen = sum(1 for _ in batches)
                if seen != count:
                    raise HpcaiError(f"{name} gave {seen} batches of one sample, expected {count}")
                clocks[name].append(clock)
        for name, each in clocks.items():
            ratio = statistics.median(ours.mb_s / other.mb_s for ours, other in zip(clocks["ours"], each))
            rows.append({"sample_mb": round(size / 1e6, 1), "loader": name, **_medians(each), "ours_over_it": round(ratio, 2)})
    return rows
