"""Direct reads: exact bytes of any range, without the page cache; reused memory; errors with the file name; no leaks."""

import copy
import ctypes
import errno
import gc
import mmap
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data import direct
from hpcai.data.direct import ALIGN, MemoryPool, Reader
from hpcai.data.file_cache import FileCache
from hpcai.errors import DataError
from tests.unit.data.conftest import open_resources

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 3 * (1 << 20) + 1234
CONTENT = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "file.bin"
    path.write_bytes(CONTENT)
    os.sync()
    return path


@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.sampled_from([1, 7, 512, 4096, 5000, 1 << 20])), min_size=1, max_size=5),
    st.sampled_from(["auto", "direct", "buffered"]), st.sampled_from([4096, 1 << 16, 4 << 20]), st.integers(0, 4100),
)  # fmt: skip
@settings(max_examples=40)
def test_any_range_is_read_exactly(file: Path, ranges: list[tuple[int, int]], mode: Any, block: int, shift: int) -> None:
    ranges = [(offset, min(length, SIZE - offset)) for offset, length in ranges]
    with Reader(mode, threads=3, block=block) as reader:
        for (offset, length), data in zip(ranges, reader.fetch_all([(file, o, n) for o, n in ranges])):
            assert data.tobytes() == CONTENT[offset : offset + length]
        buffers = [np.full(length + shift + 50, 0xAA, np.uint8) for _, length in ranges]
        reader.read([(file, o, buffer[shift : shift + n]) for (o, n), buffer in zip(ranges, buffers)])
        for (offset, length), buffer in zip(ranges, buffers):
            assert buffer[shift : shift + length].tobytes() == CONTENT[offset : offset + length]
            assert (buffer[:shift] == 0xAA).all() and (buffer[shift + length :] == 0xAA).all(), "other bytes are not written"
        requested = 2 * sum(length for _, length in ranges)
        assert requested <= reader.transferred <= requested + 2 * len(ranges) * (2 * ALIGN + 2 * ALIGN)
        if mode == "buffered":
            assert reader.transferred == requested


def resident_fraction(path: Path) -> float:
    """Return the fraction of a file's pages in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_direct_reads_bypass_the_page_cache(file: Path) -> None:
    def drop_page_cache() -> None:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    drop_page_cache()
    with Reader("direct") as reader:
        reader.fetch(file, 5, SIZE - 5)
        reader.read([(file, 17, np.empty(1 << 20, np.uint8))])
    assert resident_fraction(file) < 0.05
    with Reader("buffered") as reader:
        reader.fetch(file, 0, SIZE)
    assert resident_fraction(file) > 0.9
    drop_page_cache()


def test_aligned_reads_are_not_copied(file: Path) -> None:
    addresses: list[int] = []

    def recording_preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        addresses.append(np.frombuffer(views[0], np.uint8).ctypes.data)
        return os.preadv(descriptor, views, offset)

    with Reader("direct", preadv=recording_preadv) as reader:
        buffer = reader.memory.allocate(1 << 20)
        reader.read([(file, 8192, buffer)])
        assert addresses == [buffer.ctypes.data]
        addresses.clear()
        data = reader.fetch(file, 8192 + 100, 9000)
        assert addresses == [data.ctypes.data - 100] and data.ctypes.data % ALIGN == 100


@pytest.mark.parametrize("offset, length", [(100, 1 << 16), (4096, 10_000), (0, 8192), (4000, 200), (4095, 4098)])
def test_ends_within_a_block_are_read(file: Path, offset: int, length: int) -> None:
    with Reader("direct", block=1 << 14) as reader:
        buffer = reader.memory.allocate(length + 2 * ALIGN)
        buffer[:] = 0xAA
        view = buffer[offset % ALIGN :][:length]  # aligned in memory as in the file
        reader.read([(file, offset, view)])
        assert view.tobytes() == CONTENT[offset : offset + length]
        assert (buffer[: offset % ALIGN] == 0xAA).all() and (buffer[offset % ALIGN + length :] == 0xAA).all()


def test_a_file_is_not_closed_while_it_is_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(6)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 8192)

    def slow_preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        time.sleep(0.005)
        return os.preadv(descriptor, views, offset)

    with Reader("direct", threads=6, files=1, preadv=slow_preadv) as reader:
        for _ in range(10):
            assert [int(data[-1]) for data in reader.fetch_all([(path, 0, 8192) for path in paths])] == list(range(6))


# ---- memory


def test_memory_is_reused_after_the_last_view() -> None:
    memory = MemoryPool()
    block = memory.allocate(1 << 20)
    address = block.ctypes.data
    assert address % ALIGN == 0 and memory.unused == 0
    view = block[100:200].view(np.int16).reshape(5, 10)
    del block
    other = memory.allocate(1 << 20)
    assert other.ctypes.data != address, "a view of a view keeps the memory alive"
    del view
    gc.collect()
    assert memory.allocate(1 << 20).ctypes.data == address


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=30))
@settings(max_examples=30)
def test_unused_memory_stays_within_its_bound(sizes: list[int]) -> None:
    memory = MemoryPool(max_unused=4 << 20)
    blocks = []
    for i, size in enumerate(sizes):
        blocks.append(memory.allocate(size))
        assert len(blocks[-1]) == size
        if i % 3 == 2:
            blocks.clear()
        assert memory.unused <= max(4 << 20, 3 * 1.25 * max(sizes) + 3 * ALIGN)
    blocks.clear()
    assert memory.unused <= max(4 << 20, 3 * 1.25 * max(sizes) + 3 * ALIGN)


def test_memory_is_never_allocated_twice_by_several_threads() -> None:
    memory, overwritten = MemoryPool(max_unused=1 << 20), []

    def fill(number: int) -> None:
        for i in range(300):
            block = memory.allocate(4096 * (1 + i % 5))
            block[:] = number
            if not (block == number).all():
                overwritten.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(fill, range(6)))
    assert not overwritten


def test_copies_are_contiguous_and_keep_shape_and_type() -> None:
    memory = MemoryPool()
    source = np.arange(24, dtype=">i4").reshape(2, 3, 4).transpose(2, 0, 1)[::-1]
    copied = memory.copy(source)
    assert copied.flags.c_contiguous and copied.dtype == source.dtype and np.array_equal(copied, source)
    assert memory.copy(np.empty((0, 3))).shape == (0, 3) and memory.copy(np.array(7)).shape == ()


# ---- errors


def test_short_reads_are_continued(file: Path) -> None:
    calls = 0

    def short_preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        nonlocal calls
        calls += 1
        assert offset % ALIGN == 0 or mode == "buffered", "a disk of 4 KiB blocks refuses unaligned reads"
        return os.preadv(descriptor, [views[0][: min(len(views[0]), 4096 * (1 + calls % 2) if calls % 5 else 512)]], offset)

    for mode in ("direct", "buffered"):
        with Reader(mode, threads=1, preadv=short_preadv) as reader:  # type: ignore[arg-type]
            assert reader.fetch(file, 3000, 100_000).tobytes() == CONTENT[3000:103_000]


def test_a_disk_error_names_the_file_and_the_range(file: Path) -> None:
    def failing_preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        if offset >= 1 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, views, offset)

    with Reader("direct", block=1 << 18, preadv=failing_preadv) as reader:
        with pytest.raises(DataError, match=r"file.bin: bytes [\d,]+ to [\d,]+ cannot be read: Input/output error \(EIO\)"):
            reader.fetch(file, 0, SIZE)
        assert reader.fetch(file, 0, 1 << 20).tobytes() == CONTENT[: 1 << 20], "other ranges can still be read"


@pytest.mark.parametrize("mode", ["auto", "direct", "buffered"])
def test_reads_beyond_the_end_and_of_missing_files_raise(file: Path, tmp_path: Path, mode: Any) -> None:
    with Reader(mode) as reader:
        with pytest.raises(DataError, match=r"file.bin: ends at byte 3,146,962, but bytes 3,145,728 to 3,147,728 are requested"):
            reader.fetch(file, 3 << 20, 2000)
        with pytest.raises(DataError, match="ends at byte 3,146,962"):
            reader.read([(file, 4 << 20, np.empty(10, np.uint8))])
        with pytest.raises(DataError, match=r"none.bin: cannot be opened: no such file \(moved or deleted"):
            reader.fetch(tmp_path / "none.bin", 0, 1)
        with pytest.raises(DataError, match="cannot be"):
            reader.fetch(tmp_path, 0, 1)


def test_a_file_system_without_direct_reads_is_logged_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    system_open, refused_paths = os.open, []

    def open_without_direct(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            refused_paths.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, *rest)

    monkeypatch.setattr(direct, "_without_direct", set())
    monkeypatch.setattr(os, "open", open_without_direct)
    with Reader("auto", files=1) as reader:
        for _ in range(3):
            assert reader.fetch(file, 10, 5000).tobytes() == CONTENT[10:5010]
    assert len(refused_paths) == 1 and [r.message for r in caplog.records if "does not support O_DIRECT" in r.message] != []
    with Reader("direct") as reader, pytest.raises(DataError, match="may not support O_DIRECT: set the reader to auto or buffered"):
        reader.fetch(file, 10, 5000)
    monkeypatch.undo()


def test_a_refused_first_direct_read_falls_back_to_buffered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_without_direct", set())
    refused_offsets = []

    def refusing_preadv(descriptor: int, views: Sequence[Any], offset: int) -> int:
        if os.O_DIRECT & int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8):
            refused_offsets.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, views, offset)

    with Reader("auto", threads=1, block=1 << 18, preadv=refusing_preadv) as reader:
        assert reader.fetch(file, 100, 1 << 20).tobytes() == CONTENT[100 : 100 + (1 << 20)]
        assert len(refused_offsets) <= 2


def test_the_number_of_open_files_is_limited(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(40)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 5000)
    with Reader("direct", files=8) as reader:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: [reader.fetch(path, 0, 5000) for path in paths for _ in range(3)], range(4)))
        assert sum(open_resources()[str(path)] for path in paths) <= 8
        assert all(reader.fetch(path, 4000, 1000)[0] == i for i, path in enumerate(paths))


def test_the_limit_of_open_files_is_raised_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    for soft, hard, kept in ((64, 128, 16), (64, 64, 8), (64, resource.RLIM_INFINITY, 64)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, pair=(soft, hard): pair)
        assert FileCache(str, str, 64)._limit == kept
    assert limits == [(128, 128), (1 << 20, resource.RLIM_INFINITY)]


def test_a_reader_is_pickled_without_its_files(file: Path) -> None:
    with Reader("direct", threads=2, block=8192) as reader:
        reader.fetch(file, 0, 10)
        with copy.copy(reader) as restored:  # by the pickle protocol
            assert (restored.mode, restored.block) == ("direct", 8192) and restored.fetch(file, 1, 9).tobytes() == CONTENT[1:10]


def test_memory_is_pinned_and_unpinned_with_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    registered: dict[int, int] = {}

    @contextmanager
    def cuda_device(device: Any) -> Any:
        events.append(device)
        yield
        events.append("exited")

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            assert all(address + size <= start or start + length <= address for start, length in registered.items())
            registered[address] = size
            events.append("pinned")
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            ctypes.string_at(address, registered.pop(address))  # still mapped
            events.append("unpinned")
            return 0

    monkeypatch.setattr(torch.cuda, "device", cuda_device)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    gpu = torch.device("cuda", 3)
    memory = MemoryPool(max_unused=0, pin=gpu)
    sizes = [1 << 12, 1 << 13, 1 << 14, 1 << 15]
    for size in sizes:
        memory.allocate(size)
    assert events[:3] == [gpu, "pinned", "exited"]
    memory._largest = 0
    assert memory.unused == 0 and events[-3:] == [gpu, "unpinned", "exited"]
    for _ in range(20):  # the kernel maps each block at the address of its predecessor
        memory = MemoryPool(pin=gpu)
        blocks = memory.allocate(1 << 16), memory.allocate(1 << 20)
        del memory
        assert len(registered) == 2
        del blocks
        assert not registered
