"""One GPU: what arrives there is what lies in the files, in order with a busy stream, and the host waits for nothing."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.data.dali import DaliLoader, Field, random_numbers
from hpcai.data.direct import MemoryPool, Reader
from hpcai.data.gds import GdsReader
from hpcai.data.layout import Layout, hdf5_layout, npy_layout
from hpcai.data.loader import Loader
from hpcai.nn.cuda_graph import graph_factory
from tests.gpu.machine import DEVICE, ON_GPU, busy, nothing_waits, wait

COUNT, SHAPE = 48, (16, 32, 32, 4)


def value(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 100, SHAPE).astype(np.int16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("volumes")
    for index in range(COUNT):
        np.save(folder / f"{index:03d}.npy", value(index))
    return sorted(folder.glob("*.npy"))


class Volumes:
    """Samples read past the page cache into pinned memory, of which little is kept, so that it is soon written again."""

    def __init__(self, files: list[Path], device: torch.device, mode: Any = "auto") -> None:
        self.paths = files
        self.layouts = [npy_layout(path) for path in files if path.suffix == ".npy"]
        self.reader = Reader(mode, threads=4, memory=MemoryPool(max_unused=1 << 20, pin=device if device.type == "cuda" else None))

    def __len__(self) -> int:
        return len(self.paths)

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        return {"volume": self.layouts[index].read(self.reader), "index": np.array(index)}

    def describe(self, index: int) -> str:
        return self.paths[index].name

    def close(self) -> None:
        self.reader.close()


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_direct_reads_into_pinned_memory_are_right_after_the_upload(files: list[Path], mode: Any) -> None:
    with Reader(mode, memory=MemoryPool(max_unused=4 << 20, pin=DEVICE if ON_GPU else None)) as reader, Reader("buffered") as plain:
        for turn in range(3):
            for index, path in enumerate(files):
                read = torch.from_numpy(npy_layout(path).read(reader, slice(index % 5, 12)))
                assert read.is_pinned() is ON_GPU
                there = read.to(DEVICE, non_blocking=True)
                wait()  # or the memory is read into again below the copy
                del read
                expected = npy_layout(path).read(plain, slice(index % 5, 12))
                assert np.array_equal(there.cpu(), expected) and np.array_equal(expected, value(index)[index % 5 : 12]), turn


def test_pinned_memory_comes_and_goes_in_threads_while_graphs_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    def turns(seed: int) -> None:
        memory, draw = MemoryPool(max_unused=1 << 16, pin=DEVICE if ON_GPU else None), random.Random(seed)
        kept: list[np.ndarray] = []
        for turn in range(300):
            block = memory.allocate(draw.randrange(1, 1 << 18))
            block[:] = turn % 251
            there = torch.from_numpy(block).to(DEVICE, non_blocking=True)
            assert bool((there == turn % 251).all())
            kept = [block, *kept][: draw.randrange(4)]
            if draw.random() < 0.05:
                memory = MemoryPool(max_unused=draw.choice([0, 1 << 20]), pin=memory.pin)

    with ThreadPoolExecutor(6) as pool:
        under_way = [pool.submit(turns, seed) for seed in range(6)]
        x, new_graph = torch.ones(1 << 16, device=DEVICE), graph_factory(pool) if ON_GPU else None
        while new_graph is not None and not all(one.done() for one in under_way):
            graph = new_graph()
            graph.capture(lambda: x.add(1))
            graph.replay()
        for one in under_way:
            one.result()
    assert not caplog.records


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("batch", [1, 4])
def test_batches_are_right_while_the_stream_is_busy(files: list[Path], order: Any, batch: int) -> None:
    device = dist.single_process(DEVICE)
    words: dict[str, Any] = {"name": "train", "seed": 1, "order": order, "workers": 4, "prefetch": 1 << 20}
    seen: list[int] = []
    kept = []
    with Loader(Volumes(files, DEVICE), batch, device, **words) as loader:
        for epoch in range(3):
            for part in loader.epoch(epoch, more=epoch < 2):
                busy()  # the copies of the next batches run meanwhile, and samples are read into memory that is used again
                kept.append((part["index"] * 1, part["volume"].clone()))
                del part
            seen += [int(i) for index, _ in kept[-len(loader) :] for i in index]
    for index, volume in kept:
        for i, found in zip(index.tolist(), volume.cpu()):
            assert np.array_equal(found, value(i)), f"sample {i}"
    assert [sorted(seen[e * COUNT : (e + 1) * COUNT]) for e in range(3)] == [list(range(COUNT))] * 3
    if order == "strict":
        with Loader(Volumes(files, torch.device("cpu")), batch, dist.single_process(), **words) as loader:
            assert seen == [i for epoch in range(3) for part in loader.epoch(epoch) for i in part["index"].tolist()]


def test_the_host_waits_for_nothing_when_a_batch_is_handed_over(files: list[Path]) -> None:
    with Loader(Volumes(files, DEVICE), 4, dist.single_process(DEVICE), name="train", workers=4) as loader:
        batches = loader.epoch(0)
        next(batches)
        with nothing_waits():
            for part in batches:
                busy()
                part["volume"].add_(1)


# ---- DALI


def flipped(x: Any, drawn: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.flip(x.gpu(), horizontal=fn.cast(drawn[0] < 0.5, dtype=types.INT32))


FIELDS = (Field("volume", "DHWC", flipped), Field("index"))


@pytest.fixture
def needs_dali() -> Iterator[None]:
    if not ON_GPU:
        pytest.skip("the CPU has tests of its own")
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    yield


def new_dali(files: list[Path], batch: int = 4, fields: Any = FIELDS, **words: Any) -> DaliLoader:
    mesh = words.pop("mesh", None) or dist.single_process(DEVICE)
    return DaliLoader(Volumes(files, mesh.device), batch, mesh, fields, name="train", seed=3, **words)


@pytest.mark.usefixtures("needs_dali")
def test_dali_gives_what_numpy_gives_while_the_stream_is_busy(files: list[Path]) -> None:
    with new_dali(files, prefetch=8 << 20) as loader:
        order = [loader.indices(epoch, first) for epoch in range(2) for first in range(0, COUNT, 4)]
        kept = []
        for epoch in range(2):
            for part in loader.epoch(epoch, more=epoch < 1):
                busy()
                assert part["volume"].device.type == DEVICE.type
                kept.append({name: tensor.clone() for name, tensor in part.items()})
                del part
    assert len(kept) == len(order) == 2 * COUNT // 4
    for number, (indices, part) in enumerate(zip(order, kept)):
        for row, index in enumerate(indices.tolist()):
            drawn = random_numbers(3, number * 4 // COUNT, number * 4 % COUNT + row)
            expected = value(index)[:, :, ::-1] if drawn[0] < 0.5 else value(index)
            assert np.array_equal(part["volume"][row].cpu(), expected), (number, row)
            assert int(part["index"][row]) == index


@pytest.mark.usefixtures("needs_dali")
def test_images_are_decoded_on_the_gpu(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = [np.random.default_rng(i).integers(0, 256, (24, 31, 3)).astype(np.uint8) for i in range(8)]
    for i, picture in enumerate(pictures):
        image.fromarray(picture).save(tmp_path / f"{i}.png")

    class Pictures(Volumes):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            return {"image": self.paths[index].read_bytes()}

    from nvidia.dali import fn

    field = Field("image", "", lambda x, drawn: fn.crop(fn.decoders.image(x, device="mixed"), crop=(20, 20)))
    source = Pictures(sorted(tmp_path.glob("*.png")), DEVICE)
    with DaliLoader(source, 4, dist.single_process(DEVICE), [field], name="train", shuffle=False) as loader:
        found = torch.cat([part["image"] for part in loader.epoch(0)])
    assert found.device.type == DEVICE.type
    assert np.array_equal(found.cpu(), [picture[2:22, 5:25] for picture in pictures])


# ---- GPUDirect Storage, or what KvikIO has instead


@pytest.fixture
def gds() -> Iterator[GdsReader]:
    if not ON_GPU:
        pytest.skip("the CPU has tests of its own")
    pytest.importorskip("kvikio", reason="KvikIO is not installed")
    with GdsReader(DEVICE) as reader:
        yield reader


def chunked(folder: Path) -> Layout:
    with h5py.File(folder / "x.h5", "w") as file:
        data = file.create_dataset("x", (20, 30, 40), np.float32, chunks=(6, 7, 40), fillvalue=3)
        data[:12] = np.arange(14400).reshape(12, 30, 40)
    with h5py.File(folder / "x.h5") as file:
        return hdf5_layout(file, "x")


def test_gds_reads_what_the_direct_reader_reads_while_the_stream_is_busy(gds: GdsReader, files: list[Path], tmp_path: Path) -> None:
    boxes: list[tuple[Any, ...]] = [(), (3,), (slice(2, 9),), (slice(0, 16), slice(3, 8)), (2, 5, slice(1, 30), 2)]
    layouts = [npy_layout(path) for path in files[:8]]
    kept = []
    with Reader("auto") as direct:
        for _ in range(3):
            for layout in [*layouts, chunked(tmp_path)]:
                for box in boxes:
                    where = box[: len(layout.shape)]
                    found = gds.read(layout, *where)
                    busy()  # what was read before is still used, while the allocator hands out memory for the next read
                    kept.append((found * 1, layout.read(direct, *where).copy()))
                    del found
    for found, expected in kept:
        assert found.device.type == DEVICE.type and np.array_equal(found.cpu(), expected)
    assert gds.transferred >= gds.requested > 0
