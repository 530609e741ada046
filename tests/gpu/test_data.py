"""Loading to a GPU: data equal the files while the stream is busy, and the host never waits."""

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
from tests.gpu.device import DEVICE, ON_GPU, forbid_synchronization, occupy_stream, synchronize
from tests.gpu.volumes import Volumes, make_volume

COUNT, SHAPE = 48, (16, 32, 32, 4)


@pytest.mark.parametrize("mode", ["auto", "buffered"])
def test_direct_reads_into_pinned_memory_are_right_after_the_upload(files: list[Path], mode: Any) -> None:
    memory = MemoryPool(max_unused=4 << 20, pin=DEVICE if ON_GPU else None)
    with Reader(mode, memory=memory) as reader, Reader("buffered") as buffered:
        for turn in range(3):
            for index, path in enumerate(files):
                array = torch.from_numpy(npy_layout(path).read(reader, slice(index % 5, 12)))
                assert array.is_pinned() is ON_GPU
                copied = array.to(DEVICE, non_blocking=True)
                synchronize()  # otherwise the memory could be reused before the copy
                del array
                expected = npy_layout(path).read(buffered, slice(index % 5, 12))
                volume = make_volume(index, SHAPE)
                assert np.array_equal(copied.cpu(), expected) and np.array_equal(expected, volume[index % 5 : 12]), turn


def test_pinned_memory_comes_and_goes_in_threads_while_graphs_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    def use_memory(seed: int) -> None:
        memory, draw = MemoryPool(max_unused=1 << 16, pin=DEVICE if ON_GPU else None), random.Random(seed)
        blocks: list[np.ndarray] = []
        for repetition in range(300):
            block = memory.allocate(draw.randrange(1, 1 << 18))
            block[:] = repetition % 251
            copied = torch.from_numpy(block).to(DEVICE, non_blocking=True)
            assert bool((copied == repetition % 251).all())
            blocks = [block, *blocks][: draw.randrange(4)]
            if draw.random() < 0.05:
                memory = MemoryPool(max_unused=draw.choice([0, 1 << 20]), pin=memory.pin)

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(use_memory, seed) for seed in range(6)]
        x, new_graph = torch.ones(1 << 16, device=DEVICE), graph_factory(pool) if ON_GPU else None
        while new_graph is not None and not all(future.done() for future in futures):
            graph = new_graph()
            graph.capture(lambda: x.add(1))
            graph.replay()
        for future in futures:
            future.result()
    assert not caplog.records


@pytest.mark.parametrize("order", ["strict", "ready"])
@pytest.mark.parametrize("batch", [1, 4])
def test_batches_are_right_while_the_stream_is_busy(files: list[Path], order: Any, batch: int) -> None:
    mesh = dist.single_process(DEVICE)
    kwargs: dict[str, Any] = {"name": "train", "seed": 1, "order": order, "workers": 4, "prefetch": 1 << 20}
    delivered: list[int] = []
    batches = []
    with Loader(Volumes(files, DEVICE), batch, mesh, **kwargs) as loader:
        for epoch in range(3):
            for loaded in loader.epoch(epoch, more=epoch < 2):
                occupy_stream()  # meanwhile the next batches are copied, and samples are read into reused memory
                batches.append((loaded["index"] * 1, loaded["volume"].clone()))
                del loaded
            delivered += [int(i) for index, _ in batches[-len(loader) :] for i in index]
    for index, volume in batches:
        for i, array in zip(index.tolist(), volume.cpu()):
            assert np.array_equal(array, make_volume(i, SHAPE)), f"sample {i}"
    assert [sorted(delivered[e * COUNT : (e + 1) * COUNT]) for e in range(3)] == [list(range(COUNT))] * 3
    if order == "strict":
        with Loader(Volumes(files, torch.device("cpu")), batch, dist.single_process(), **kwargs) as loader:
            assert delivered == [i for epoch in range(3) for loaded in loader.epoch(epoch) for i in loaded["index"].tolist()]


def test_the_host_waits_for_nothing_when_a_batch_is_handed_over(files: list[Path]) -> None:
    with Loader(Volumes(files, DEVICE), 4, dist.single_process(DEVICE), name="train", workers=4) as loader:
        batches = loader.epoch(0)
        next(batches)
        with forbid_synchronization():
            for batch in batches:
                occupy_stream()
                batch["volume"].add_(1)


# ---- DALI


def flip(x: Any, draws: Any) -> Any:
    from nvidia.dali import fn, types

    return fn.flip(x.gpu(), horizontal=fn.cast(draws[0] < 0.5, dtype=types.INT32))


FIELDS = (Field("volume", "DHWC", flip), Field("index"))


@pytest.fixture
def needs_dali() -> Iterator[None]:
    if not ON_GPU:
        pytest.skip("separate tests cover the CPU")
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    yield


def new_dali(files: list[Path], batch: int = 4, fields: Any = FIELDS, **kwargs: Any) -> DaliLoader:
    mesh = kwargs.pop("mesh", None) or dist.single_process(DEVICE)
    return DaliLoader(Volumes(files, mesh.device), batch, mesh, fields, name="train", seed=3, **kwargs)


@pytest.mark.usefixtures("needs_dali")
def test_dali_gives_what_numpy_gives_while_the_stream_is_busy(files: list[Path]) -> None:
    with new_dali(files, prefetch=8 << 20) as loader:
        order = [loader.indices(epoch, first) for epoch in range(2) for first in range(0, COUNT, 4)]
        batches = []
        for epoch in range(2):
            for batch in loader.epoch(epoch, more=epoch < 1):
                occupy_stream()
                assert batch["volume"].device.type == DEVICE.type
                batches.append({name: tensor.clone() for name, tensor in batch.items()})
                del batch
    assert len(batches) == len(order) == 2 * COUNT // 4
    for number, (indices, batch) in enumerate(zip(order, batches)):
        for row, index in enumerate(indices.tolist()):
            draws = random_numbers(3, number * 4 // COUNT, number * 4 % COUNT + row)
            expected = make_volume(index, SHAPE)[:, :, ::-1] if draws[0] < 0.5 else make_volume(index, SHAPE)
            assert np.array_equal(batch["volume"][row].cpu(), expected), (number, row)
            assert int(batch["index"][row]) == index


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
        decoded = torch.cat([part["image"] for part in loader.epoch(0)])
    assert decoded.device.type == DEVICE.type
    assert np.array_equal(decoded.cpu(), [picture[2:22, 5:25] for picture in pictures])


# ---- GPUDirect Storage, or KvikIO's fallback


@pytest.fixture
def gds() -> Iterator[GdsReader]:
    if not ON_GPU:
        pytest.skip("separate tests cover the CPU")
    pytest.importorskip("kvikio", reason="KvikIO is not installed")
    with GdsReader(DEVICE) as reader:
        yield reader


def write_chunked(folder: Path) -> Layout:
    with h5py.File(folder / "x.h5", "w") as file:
        data = file.create_dataset("x", (20, 30, 40), np.float32, chunks=(6, 7, 40), fillvalue=3)
        data[:12] = np.arange(14400).reshape(12, 30, 40)
    with h5py.File(folder / "x.h5") as file:
        return hdf5_layout(file, "x")


def test_gds_reads_what_the_direct_reader_reads_while_the_stream_is_busy(gds: GdsReader, files: list[Path], tmp_path: Path) -> None:
    boxes: list[tuple[Any, ...]] = [(), (3,), (slice(2, 9),), (slice(0, 16), slice(3, 8)), (2, 5, slice(1, 30), 2)]
    layouts = [npy_layout(path) for path in files[:8]]
    arrays = []
    with Reader("auto") as direct:
        for _ in range(3):
            for layout in [*layouts, write_chunked(tmp_path)]:
                for box in boxes:
                    index = box[: len(layout.shape)]
                    actual = gds.read(layout, *index)
                    occupy_stream()  # earlier reads are still in use when the allocator provides memory for the next one
                    arrays.append((actual * 1, layout.read(direct, *index).copy()))
                    del actual
    for actual, expected in arrays:
        assert actual.device.type == DEVICE.type and np.array_equal(actual.cpu(), expected)
    assert gds.transferred >= gds.requested > 0
