"""GPUDirect Storage reads slices of arrays like the direct reader. KvikIO is replaced by a fake that reads with os.pread."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data import gds
from hpcai.data.direct import ALIGN, Reader
from hpcai.data.gds import GdsReader
from hpcai.data.layout import Layout, npy_layout
from hpcai.errors import DataError, MissingExtraError
from tests.array_files import arrays_and_slices, write_arrays

CPU = torch.device("cpu")


class FakeKvikIO:
    """A replacement of KvikIO. ``change(count, offset)`` returns the number of bytes that a read returns, or raises."""

    def __init__(self) -> None:
        self.defaults, self.settings, self.compatible = self, {}, False
        self.pool = ThreadPoolExecutor(4)
        self.reads: list[tuple[int, int, int, int]] = []  # address, bytes, offset, task
        self.open: list[Any] = []
        self.opened = self.closed = self.in_flight = self.max_in_flight = 0
        self.change: Callable[[int, int], int] = lambda count, offset: count
        self.delay = 0.0
        self.lock = threading.Lock()

    def set(self, settings: dict[str, int]) -> None:
        self.settings |= settings

    def is_compat_mode_preferred(self) -> bool:
        return self.compatible

    def CuFile(self, path: Path, flags: str) -> "FakeFile":  # noqa: N802
        assert flags == "r"
        self.opened += 1
        return FakeFile(self, path)


class FakeFile:
    def __init__(self, module: FakeKvikIO, path: Path) -> None:
        self.module, self.descriptor = module, os.open(path, os.O_RDONLY)

    def pread(self, buffer: torch.Tensor, size: int, offset: int, task: int) -> Any:
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous() and len(buffer) == size and size > 0
        if offset + size > os.fstat(self.descriptor).st_size:
            raise RuntimeError("POSIX error on pread: EOF")  # as KvikIO does
        module = self.module
        module.reads.append((buffer.data_ptr(), size, offset, task))

        def run() -> int:
            with module.lock:
                module.in_flight += 1
                module.max_in_flight = max(module.max_in_flight, module.in_flight)
            time.sleep(module.delay)
            try:
                count = module.change(size, offset)
                buffer.numpy()[:count] = np.frombuffer(os.pread(self.descriptor, count, offset), np.uint8)
                return count
            finally:
                with module.lock:
                    module.in_flight -= 1

        future = module.pool.submit(run)
        future.get = future.result  # type: ignore[attr-defined]
        return future

    def close(self) -> None:
        os.close(self.descriptor)
        self.module.closed += 1


@pytest.fixture
def kvikio() -> Iterator[FakeKvikIO]:
    module = FakeKvikIO()
    yield module
    module.pool.shutdown()


@pytest.fixture
def reader(kvikio: FakeKvikIO) -> Iterator[GdsReader]:
    with GdsReader(CPU, kvikio=kvikio) as reader:
        yield reader


@given(
    arrays_and_slices(["i2", "f4", "f8", "u1"]), st.sampled_from([0, 1, 3, 4096, 5001]), st.booleans(),
    st.sampled_from([1, 5000, 1 << 28]),
)  # fmt: skip
@settings(max_examples=40)
def test_any_slice_of_any_array_is_read_exactly(tmp_path_factory: Any, case: Any, offset: int, partial: bool, staging: int) -> None:
    array, chunks, index = case
    array, layouts = write_arrays(tmp_path_factory.mktemp("gds"), array, chunks, partial, offset)
    layout = layouts[0 if chunks else 2]
    module = FakeKvikIO()
    with module.pool, patch.object(gds, "_STAGING_BYTES", staging), GdsReader(CPU, kvikio=module) as reader:
        actual = reader.read(layout, *index)
    expected = array[tuple(index)]
    assert actual.dtype == torch.from_numpy(array).dtype and tuple(actual.shape) == expected.shape
    assert np.array_equal(actual.numpy(), expected)
    assert all(address % ALIGN == 0 and first % ALIGN == 0 for address, _, first, _ in module.reads)
    end = layout.path.stat().st_size
    assert all(size % ALIGN == 0 or first + size == end for _, size, first, _ in module.reads)
    assert module.opened == module.closed


@pytest.fixture
def volume(tmp_path: Path) -> tuple[Layout, np.ndarray]:
    array = np.random.default_rng(0).integers(-999, 999, (16, 256, 64, 4)).astype(np.int16)
    np.save(tmp_path / "volume.npy", array)
    return npy_layout(tmp_path / "volume.npy"), array


def test_a_single_range_is_not_copied(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    actual = reader.read(layout, slice(3, 9))
    assert torch.equal(actual, torch.from_numpy(array[3:9]))
    ((address, size, offset, task),) = kvikio.reads
    start = layout.offset + 3 * array[0].nbytes
    assert offset == start // ALIGN * ALIGN and actual.data_ptr() == address + start - offset, "no copy"
    assert task == 4 << 20 and kvikio.settings == {"num_threads": 8, "task_size": 4 << 20}
    assert 6 * array[0].nbytes <= size <= 6 * array[0].nbytes + 2 * ALIGN
    with Reader("auto") as direct:
        assert np.array_equal(actual.numpy(), layout.read(direct, slice(3, 9)))


def test_unaligned_values_are_copied(reader: GdsReader, tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.float64)
    (tmp_path / "x").write_bytes(b"123" + array.tobytes())
    actual = reader.read(Layout(tmp_path / "x", "x", (1000,), np.dtype(np.float64), 3))
    assert actual.data_ptr() % 8 == 0 and torch.equal(actual, torch.from_numpy(array))


def test_scalars_and_empty_slices(reader: GdsReader, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.float32(2.5))
    assert reader.read(npy_layout(tmp_path / "x.npy")) == 2.5
    np.save(tmp_path / "y.npy", np.zeros((3, 4), np.float16))
    assert reader.read(npy_layout(tmp_path / "y.npy"), slice(1, 1)).shape == (0, 4)
    assert reader.read(npy_layout(tmp_path / "y.npy"), 1, 2).dtype == torch.float16


def test_many_reads_are_in_flight(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    kvikio.delay = 0.02
    assert torch.equal(reader.read(layout, slice(0, 16), slice(5, 40)), torch.from_numpy(array[:, 5:40]))
    assert len(kvikio.reads) == 16 and kvikio.max_in_flight == 4, "limited by the number of threads"


def test_staging_memory_is_bounded(reader: GdsReader, volume: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, array = volume
    monkeypatch.setattr(gds, "_STAGING_BYTES", 100_000)
    fetch, counts = reader._fetch, []
    monkeypatch.setattr(reader, "_fetch", lambda path, runs: (counts.append(len(runs)), fetch(path, runs))[1])
    assert torch.equal(reader.read(layout, slice(0, 16), slice(5, 40)), torch.from_numpy(array[:, 5:40]))
    assert counts == [4, 4, 4, 4], "ranges of 17,920 bytes take 20,480, plus one block for alignment"


def test_a_file_may_be_evicted_during_a_read(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    with ThreadPoolExecutor(1) as pool:
        kvikio.delay = 0.3
        future = pool.submit(reader.read, layout)
        while not kvikio.in_flight:
            time.sleep(0.01)
        reader.close()
        assert kvikio.in_flight and kvikio.closed == 0, "its reads continue"
        assert torch.equal(future.result(), torch.from_numpy(array))
    assert (kvikio.opened, kvikio.closed) == (1, 1)


def test_reads_from_many_threads(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: reader.read(layout, i % 16), range(64)))
    assert all(torch.equal(actual, torch.from_numpy(array[i % 16])) for i, actual in enumerate(results))


def test_the_number_of_open_files_is_limited(kvikio: FakeKvikIO, reader: GdsReader, tmp_path: Path) -> None:
    reader._files._limit = 4
    layouts = []
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", np.full(10, i))
        layouts.append(npy_layout(tmp_path / f"{i}.npy"))
    for _ in range(3):
        assert [int(reader.read(layout)[0]) for layout in layouts[:4]] == [0, 1, 2, 3]
    assert (kvikio.opened, kvikio.closed) == (4, 0)
    assert [int(reader.read(layout)[0]) for layout in layouts] == [0, 1, 2, 3, 4, 5]
    assert (kvikio.opened, kvikio.closed) == (6, 2)
    assert int(reader.read(layouts[2])[0]) == 2 and kvikio.opened == 6, "the least recently used file is closed"
    reader.read(layouts[0])
    assert int(reader.read(layouts[2])[0]) == 2 and kvikio.opened == 7
    values = reader.read(layouts[5])
    reader.close()
    assert kvikio.opened == kvikio.closed and int(values[9]) == 5
    assert int(reader.read(layouts[0])[0]) == 0, "a closed reader reopens files"


def test_short_files_and_short_reads_raise(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    kvikio.change = lambda count, offset: count - 3 * ALIGN
    with pytest.raises(DataError, match=r"volume.npy: bytes 393,344 to 524,416 are requested, but reads stop at byte 516,096 of"):
        reader.read(layout, 3)
    kvikio.change = lambda count, offset: count - 1  # a byte that only alignment has added
    assert torch.equal(reader.read(layout, 3), torch.from_numpy(array[3]))
    os.truncate(layout.path, 100_000)
    reader.close()
    with pytest.raises(DataError, match=r"volume.npy: ends at byte 100,000, but bytes up to 524,416 are requested; it is"):
        reader.read(layout, 3)


def test_an_error_of_the_driver_names_the_file_and_all_reads_end(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    layout, array = volume
    completed: list[int] = []

    def fail(count: int, offset: int) -> int:
        if offset < ALIGN:
            raise RuntimeError("cuFile: internal error")
        time.sleep(0.1)
        completed.append(offset)
        return count

    kvikio.change = fail
    with pytest.raises(DataError, match="volume.npy: bytes .* cannot be read to the GPU: cuFile: internal error; data.reader"):
        reader.read(layout, slice(0, 4), slice(0, 40))
    assert kvikio.in_flight == 0 and len(completed) == 3, "memory is freed only after the last read into it"
    kvikio.change = lambda count, offset: count
    assert torch.equal(reader.read(layout), torch.from_numpy(array))
    layout.path.unlink()
    reader.close()
    with pytest.raises(DataError, match=r"volume.npy: cannot be opened: No such file"):
        reader.read(layout)


def test_a_file_that_the_driver_refuses_is_named(kvikio: FakeKvikIO, reader: GdsReader, volume: Any) -> None:
    kvikio.CuFile = Mock(side_effect=OSError("cuFileHandleRegister: not supported"))  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"volume.npy: cannot be opened for the GPU: cuFileHandleRegister: not supported; data"):
        reader.read(volume[0])


@pytest.mark.parametrize("dtype, message", [(">f4", "'x' is >f4, not in this machine's byte order"), ("V6", "torch has no dtype")])
def test_dtypes_unknown_to_torch_raise(reader: GdsReader, tmp_path: Path, dtype: str, message: str) -> None:
    (tmp_path / "x").write_bytes(bytes(600))
    with pytest.raises(DataError, match=message):
        reader.read(Layout(tmp_path / "x", "x", (50,), np.dtype(dtype), 0))


def test_the_mode_of_kvikio_is_logged_once(kvikio: FakeKvikIO, caplog: pytest.LogCaptureFixture) -> None:
    gds._log_mode.cache_clear()
    caplog.set_level(logging.INFO)
    for kvikio.compatible in (True, True, False, False):
        GdsReader(CPU, kvikio=kvikio)
    assert [("compatibility mode" in text, "is available" in text) for text in caplog.messages] == [(True, False), (False, True)]


def test_without_kvikio_or_a_driver_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'hpcai-suite\[gds\]'; data.reader=direct needs neither"):
        GdsReader(torch.device("cuda"))
    module = FakeKvikIO()
    monkeypatch.setattr(gds, "import_module", lambda name: module)
    with pytest.raises(DataError, match="the device is cpu and CUDA is .*libcuda.so.1"):
        GdsReader(CPU)
    fail_to_load = OSError("libcufile.so.0: cannot open shared object file")
    monkeypatch.setattr(gds, "import_module", Mock(side_effect=fail_to_load))
    with pytest.raises(DataError, match="installed but does not load .libcufile.so.0"):
        GdsReader(CPU)
    fail_to_set = RuntimeError("libcuda.so.1: cannot open shared object file")
    module.set = Mock(side_effect=fail_to_set)  # type: ignore[method-assign]
    with pytest.raises(DataError, match="KvikIO cannot be set up: libcuda.so.1: .*; data.reader=direct"):
        GdsReader(CPU, kvikio=module)
