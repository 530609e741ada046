"""``hpcai bench data [PART ...]``: measure the rate of reading samples from a disk, compared with other software.

    direct    our reader and fio: the same file, block sizes and reads in flight
    rows      random rows of a file by id, and fio: the same block of the disk for each row
    peers     our Loader, torch's DataLoader over h5py, and h5py alone, with samples of 16.8 MB and of 56.6 MB

Caches are cold at the start of each run. Runs of ours and of the others alternate; medians.
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
from collections.abc import Iterator, Sequence
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
from hpcai.cli import make_parser
from hpcai.cli.bench.timing import Row, machine_info, parse_parts, print_results
from hpcai.cli.check.disk import evict
from hpcai.data import Loader, Reader, Rows
from hpcai.data.rows_file import RowsFile
from hpcai.data.splits import Samples
from hpcai.errors import HpcaiError

GIB, MIB = 1 << 30, 1 << 20
Shape = tuple[int, ...]
_SAMPLES: Sequence[tuple[Shape, str]] = (((128, 128, 128, 4), "int16"), ((768, 1152, 16), "float32"))


def main(argv: Sequence[str]) -> int:
    measure = {"direct": _direct, "rows": _rows, "peers": _peers}
    parser = make_parser("bench data", __doc__, parts=", ".join(measure))
    args = parse_parts(parser, list(measure), argv)
    args.bytes = int(args.gib * GIB)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.directory) as folder:
        result = {part: measure[part](Path(folder), args) for part in args.parts}
    return print_results({"bench": "data", **machine_info()} | result, args.parts, args.json)


@contextmanager
def _write_volumes(folder: Path, count: int, shape: Shape, dtype: str) -> Iterator[Path]:
    """Yield a temporary folder of ``count`` rows in HDF5 files of up to 16, contiguous and aligned as data_prep writes them."""
    row = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for first in range(0, count, 16):
            with h5py.File(f"{name}/{first:06d}.h5", "w", alignment_threshold=1 << 16, alignment_interval=4096) as file:
                file.create_dataset("values", (min(16, count - first), *shape), dtype)[:] = row
        yield Path(name)


class _Clock:
    """Context manager that measures MB/s and CPU seconds per GiB of reading ``size`` bytes, including ended child processes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> "_Clock":
        self.cpu, self.began = sum(os.times()[:4]), time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mb_s = self.size / (time.perf_counter() - self.began) / 1e6
        self.cpu_s_gib = (sum(os.times()[:4]) - self.cpu) / (self.size / GIB)


def _medians(clocks: Sequence[Any]) -> Row:
    return {
        "mb_s": round(statistics.median(clock.mb_s for clock in clocks)),
        "cpu_s_gib": round(statistics.median(clock.cpu_s_gib for clock in clocks), 3),
    }


@contextmanager
def _write_random(folder: Path, args: Any) -> Iterator[tuple[Path, int]]:
    """Yield a file of random bytes, and its size."""
    path, chunk = folder / "direct.bin", 64 * MIB
    size, random_bytes = args.bytes // chunk * chunk, np.random.default_rng(0).bytes(chunk)
    with path.open("wb") as file:
        for _ in range(size // chunk):
            file.write(random_bytes)
    yield path, size
    path.unlink()


def _run_fio(path: Path, size: int, block: int, read: int, threads: int) -> _Clock:
    command = [
        "fio", "--name=read", f"--filename={path}", "--rw=randread", f"--bs={block}", "--direct=1", "--ioengine=psync",
        "--thread", f"--numjobs={threads}", f"--size={size}", f"--io_size={read // threads}",
        "--group_reporting", "--output-format=json", "--randrepeat=0", "--allow_file_create=0",
    ]  # fmt: skip
    (job,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"]
    clock = _Clock(job["read"]["io_bytes"])
    clock.mb_s = job["read"]["bw_bytes"] / 1e6
    clock.cpu_s_gib = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 / (clock.size / GIB)
    return clock


def _rows(folder: Path, args: Any) -> list[Row]:
    if shutil.which("fio") is None:
        return [_NO_FIO]
    rows, block = [], 4096
    with _write_random(folder, args) as (path, size):
        count, random = size // block // 16, np.random.default_rng(1)
        for width in (2048, block):
            fio_clocks, row_clocks = [], []
            for _ in range(args.repeats):
                fio_clocks.append(_run_fio(path, size, block, count * block, args.threads))
                ids = np.sort(random.choice(size // block // 2, count, replace=False)) * (2 * block // width)  # none are adjacent
                with Reader("direct", threads=args.threads) as reader:
                    table = RowsFile(path, size // width, width, np.dtype(np.uint8), reader)
                    into = reader.memory.allocate(count * width).reshape(count, width)
                    into[:] = 0
                    with _Clock(count * block) as clock:
                        table.read(ids, into)
                row_clocks.append(clock)
            theirs, own = (statistics.median(clock.mb_s * 1e6 / block for clock in clocks) for clocks in (fio_clocks, row_clocks))
            rows.append({"row_bytes": width, "threads": args.threads, "fio_reads_s": round(theirs), "ours_rows_s": round(own),
                         "ours_over_fio": round(own / theirs, 2)})  # fmt: skip
    return rows


_NO_FIO = {"left out": "fio is not installed (Debian: apt-get install fio)"}


def _direct(folder: Path, args: Any) -> list[Row]:
    if shutil.which("fio") is None:
        return [_NO_FIO]
    with _write_random(folder, args) as (path, size):
        return _read_samples(path, size, args)


def _read_samples(path: Path, size: int, args: Any) -> list[Row]:
    rows = []
    for block, fetch in ((1 * MIB, 16 * MIB), (4 * MIB, 16 * MIB), (4 * MIB, 64 * MIB)):
        offsets = [int(offset) * fetch for offset in np.random.default_rng(1).permutation(size // fetch)]
        fio_clocks, reader_clocks = [], []
        for _ in range(args.repeats):
            fio_clocks.append(_run_fio(path, size, block, size, args.threads))
            # As in a loader: two samples are requested at a time, by threads that also read.
            reader = Reader("direct", threads=max(args.threads - 2, 1), block=block)
            with reader, ThreadPoolExecutor(2) as pool, _Clock(size) as clock:
                list(pool.map(partial(_read, reader, path, fetch), offsets))
            reader_clocks.append(clock)
        theirs, own = _medians(fio_clocks), _medians(reader_clocks)
        speeds = {f"{name}_{key}": value for name, row in (("fio", theirs), ("ours", own)) for key, value in row.items()}
        rows.append({"block_mib": block // MIB, "sample_mib": fetch // MIB, **speeds,
                     "ours_over_fio": round(own["mb_s"] / theirs["mb_s"], 2)})  # fmt: skip
    return rows


def _read(reader: Reader, path: Path, size: int, offset: int) -> None:
    reader.fetch(path, offset, size)  # the bytes are discarded


class _H5pyDataset(Dataset[Any]):
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


def _hpcai_loader(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Any]:
    rows = Rows(folder, {"values": (dtype, shape)}, reader="direct")
    kwargs: Any = {"workers": threads, "last_batch": "keep", "prefetch": 64 * MIB}
    with Loader(Samples(rows, len(rows)), 1, dist.single_process(), name="bench", **kwargs) as loader:
        yield from loader.epoch(0)
    rows.close()


def _torch_loader(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Any]:
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    generator = torch.Generator().manual_seed(0)
    yield from DataLoader(_H5pyDataset(folder), 1, shuffle=True, num_workers=threads, generator=generator)


def _h5py_loader(folder: Path, shape: Shape, dtype: str, threads: int) -> Iterator[Any]:
    """Yield arrays in order, without batches."""
    data = _H5pyDataset(folder)
    return (data[index] for index in range(len(data)))


_LOADERS = {"ours": _hpcai_loader, "torch DataLoader": _torch_loader, "h5py alone": _h5py_loader}


def _peers(folder: Path, args: Any) -> list[Row]:
    rows = []
    for shape, dtype in _SAMPLES:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        count = max(args.bytes // size, 2)
        clocks: dict[str, list[Any]] = {name: [] for name in _LOADERS}
        with _write_volumes(folder, count, shape, dtype) as data:
            for name in [*_LOADERS] * args.repeats:
                for path in data.iterdir():
                    evict(path)
                with _Clock(count * size) as clock:
                    count_read = sum(1 for _ in _LOADERS[name](data, shape, dtype, args.threads))
                if count_read != count:
                    raise HpcaiError(f"{name} gave {count_read} batches of one sample, expected {count}")
                clocks[name].append(clock)
        for name, runs in clocks.items():
            ratio = statistics.median(ours.mb_s / other.mb_s for ours, other in zip(clocks["ours"], runs))
            rows.append({"sample_mb": round(size / 1e6, 1), "loader": name, **_medians(runs), "ours_over_it": round(ratio, 2)})
    return rows
