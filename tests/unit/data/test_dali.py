"""DALI gives what plain numpy gives, in the order of ``Loader``, on any number of processes and from any place; nothing hangs."""

import io
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hpcai import dist, train
from hpcai.data import dali
from hpcai.data.ahead import Ready, Task
from hpcai.data.dali import DaliLoader, Field, apply, draw
from hpcai.data.direct import Memory, Reader
from hpcai.data.loader import Loader
from hpcai.data.npy import Files
from hpcai.data.sampler import Balanced
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.settings import StepConfig, TrainConfig
from tests.meshes import mesh_of
from tests.page_cache import resident

HAS_DALI = find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None
pytestmark = pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed: pip install 'hpcai-suite[dali]'")


class Volumes:
    """Sample i is a volume and its labels; ``fault(i)`` may raise."""

    def __init__(self, count: int = 24, shape: tuple[int, ...] = (6, 7, 8, 2), fault: Callable[[int], None] | None = None) -> None:
        self.count, self.shape, self.fault, self.closed = count, shape, fault, False

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        if self.fault:
            self.fault(index)
        volume = np.random.default_rng(index).integers(0, 50, self.shape).astype(np.int16)
        return {"volume": volume, "label": volume[..., 0].astype(np.uint8), "index": np.array(index)}

    def describe(self, index: int) -> str:
        return f"volume {index}"

    def close(self) -> None:
        self.closed = True


FIELDS = (
    Field("volume", "DHWC", crop=(3, 4, 5), crop_at="random", flip=(0, 1, 2), log1p=True, dtype="float32", transpose=(3, 0, 1, 2)),
    Field("label", "DHW", crop=(3, 4, 5), crop_at="random", flip=(0, 1, 2), dtype="int64"),
    Field("index"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = Volumes()
    for index in range(len(source)):
        for name, array in source.sample(index, 0).items():
            np.save(tmp_path / f"{index:03d}_{name}.npy", array)
    os.sync()
    return tmp_path


class OnDisk(Files):
    """The same samples in .npy files."""

    def __init__(self, folder: Path) -> None:
        fields = {
            "volume": ("*_volume.npy", "int16", (6, 7, 8, 2)), "label": ("*_label.npy", "uint8", (6, 7, 8)),
            "index": ("*_index.npy", "int64", ()),
        }  # fmt: skip
        super().__init__(folder, fields, reader=Reader("auto", threads=2))
        for index in range(len(self)):  # not in threads: Python 3.11 fails now and then when several parse a header
            self.read(index)

    def sample(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        return self.read(index)

    def close(self) -> None:
        """Stay open, since several loaders of a test read from it."""


@pytest.fixture(params=["external", "numpy"])
def source(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    if request.param == "numpy":
        yield OnDisk(request.getfixturevalue("folder")), "numpy"
    else:
        yield Volumes(), "external"


def new_loader(source: Any, batch: int = 4, mesh: Mesh | None = None, fields: Any = FIELDS, **words: Any) -> DaliLoader:
    return DaliLoader(source, batch, mesh or mesh_of(0, 1), fields, name="train", **words)


def numbers(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def native_threads(at_most: int = 0) -> int:
    """Threads of this process, DALI's own among them. One that has ended is seen for a moment longer."""
    end = time.monotonic() + 2
    while (count := len(os.listdir("/proc/self/task"))) > at_most > 0 and time.monotonic() < end:
        time.sleep(0.01)
    return count


def png(image: np.ndarray) -> bytes:
    """An 8-bit PNG without any loss.   [H, W, 1 or 3]"""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width, channels = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# ---- the pipeline and its twin


SHAPES = {"HWC": (9, 10, 3), "CHW": (3, 9, 10), "DHWC": (6, 9, 10, 3), "CDHW": (3, 6, 9, 10), "HW": (9, 10), "DHW": (6, 9, 10),
          "": (6, 9, 3)}  # fmt: skip


def any_field(rng: np.random.Generator) -> Field:
    layout = str(rng.choice(list(SHAPES)))
    shape, words = SHAPES[layout], {}
    spatial = [dim for dim, letter in enumerate(layout) if letter != "C"] if layout else [0, 1]
    if rng.random() < 0.6:
        words["crop"] = tuple(int(rng.integers(1, shape[dim] + 1)) for dim in spatial)
        words["crop_at"] = str(rng.choice(["center", "random"]))
    if layout and rng.random() < 0.6:
        words["flip"] = tuple(dim for dim in spatial if rng.random() < 0.6)
    words["log1p"] = rng.random() < 0.4
    if (r := rng.random()) < 0.3:
        words |= {"mean": 1.5, "std": 2.5}
    elif r < 0.5 and "C" in layout:
        words |= {"mean": [1.0, 2.0, 3.0], "std": [2.0, 3.0, 4.0]}
    if rng.random() < 0.5:
        words["dtype"] = str(rng.choice(dali._MADE))
    if rng.random() < 0.5:
        words["transpose"] = tuple(int(dim) for dim in rng.permutation(len(shape)))
    return Field("x", layout, **words)


def any_array(rng: np.random.Generator, field: Field) -> np.ndarray:
    dtype = str(rng.choice(list(dali._TYPES)))
    x = rng.integers(0, 2 if dtype == "bool" else 100, SHAPES[field.layout])
    return (x * 0.3 if dtype.startswith("float") else x).astype(dtype)


def through_dali(fields: tuple[Field, ...], samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    class Given(Volumes):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            return samples[index]

    with new_loader(Given(len(samples)), len(samples), fields=fields, shuffle=False, workers=1) as loader:
        return next(loader.epoch(0))


def new_graph(field: Field, kinds: list[Any]) -> Any:
    return dali._Graph(
        [field], kinds, batch=4, depth=1, threads=1, device=torch.device("cpu"), on_gpu=False, name="graph", describe=str
    )


def test_what_dali_makes_is_what_numpy_makes() -> None:
    rng, mismatched = np.random.default_rng(0), []
    for number in range(200):
        field = any_field(rng)
        arrays = [any_array(rng, field)]
        arrays.append(arrays[0][::-1].copy())
        kinds = [dali._kind(field, arrays[0].shape, arrays[0].dtype.name, 0)]
        graph = new_graph(field, kinds)
        found, expected = [], []
        for position, array in enumerate(arrays):
            drawn = draw([field], number, 0, position)
            crop = drawn[0][0, field.slots] if field.crop and field.crop_at == "random" else None
            item = dali._Item((array,), (crop,), (dali._bits(field, drawn[0][1]) if field.flip else None,))
            found.append(Ready(Task(0, position, position), item))
            expected.append(apply([field], {"x": array}, drawn)["x"])
        graph.start(0, found)
        _, _, (got,) = graph.finish()
        want = torch.from_numpy(np.stack(expected))
        loss = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(got.dtype, 1e-6 if got.is_floating_point() else 0)
        if field.dtype == "bfloat16" and got.dtype == torch.bfloat16:
            want = want.bfloat16()
        fits = got.dtype == want.dtype and got.shape == want.shape
        if not fits or not torch.allclose(got.double(), want.double(), rtol=loss, atol=min(loss, 1e-6)):
            mismatched.append((field, arrays[0].dtype.name, got.dtype, got.shape, want.shape))
    assert not mismatched, mismatched[:3]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_all_that_is_made_for_a_gpu_ends_there(on_gpu: bool) -> None:
    """Only the definition is made, since without a driver no such graph can be built."""
    graph = object.__new__(dali._Graph)
    graph._dali, graph._device, graph._on_gpu, graph._files = dali._imported(), torch.device("cuda"), on_gpu, None
    rng = np.random.default_rng(3)
    fields = [Field("image", "HWC", decode=True, crop=(4, 4), mean=1.0), Field("plain"), *(any_field(rng) for _ in range(40))]
    with graph._dali.Pipeline(batch_size=1, num_threads=1, device_id=0):
        for i, field in enumerate(fields):
            kind = dali._Kind("uint8" if field.decode else str(rng.choice(list(dali._TYPES))), len(SHAPES[field.layout]), None, 0)
            assert graph._define(i, field, kind).device == "gpu", field


def test_small_floats_keep_their_digits_in_the_logarithm() -> None:
    x = np.array([0, 1e-30, 1e-8, 1e-4, 0.1, 10, 1e6, 1e10], np.float32)
    assert np.allclose(through_dali((Field("x", log1p=True),), [{"x": x}])["x"][0], np.log1p(x), rtol=3e-7, atol=0)


def test_a_cast_rounds_and_keeps_within_the_range() -> None:
    x = np.array([-3.5, -0.5, 0.49, 0.5, 1.5, 2.5, 254.6, 300, -1e9], np.float32)
    made = through_dali((Field("x", dtype="uint8"),), [{"x": x}])["x"][0]
    assert made.tolist() == [0, 0, 0, 1, 2, 3, 255, 255, 0]
    assert apply([Field("x", dtype="uint8")], {"x": x}, {0: np.zeros((2, 12), int)})["x"].tolist() == made.tolist()
    wide = np.array([-300, 5, 40000], np.int32)
    assert through_dali((Field("x", dtype="int16"),), [{"x": wide}])["x"][0].tolist() == [-300, 5, 32767]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_decoded_exactly(channels: int) -> None:
    images = [np.random.default_rng(i).integers(0, 256, (13 + i, 17, channels)).astype(np.uint8) for i in range(3)]
    field = Field("x", "HWC", decode=True, crop=(12, 11), crop_at="random", flip=(1,), transpose=(2, 0, 1))
    samples = [{"x": png(image)} for image in images]
    made = through_dali((field,), samples)["x"]
    expected = [apply([field], sample, draw([field], 0, 0, i))["x"] for i, sample in enumerate(samples)]
    assert made.dtype == torch.uint8 and np.array_equal(made, expected)
    plain = Field("x", "HWC", decode=True)
    assert np.array_equal(apply([plain], samples[0], {0: np.zeros((2, 12), int)})["x"], images[0])
    assert np.array_equal(through_dali((plain,), samples[:1])["x"][0], images[0])


def test_a_jpeg_is_decoded_and_normalised() -> None:
    from PIL import Image

    ramp = (np.add.outer(np.arange(64), np.arange(64))[..., None] * np.array([1, 1, 2])).astype(np.uint8)
    Image.fromarray(ramp).save(buffer := io.BytesIO(), "jpeg")
    field = Field("x", "HWC", decode=True, mean=[120.0, 110.0, 100.0], std=[60.0, 60.0, 60.0], transpose=(2, 0, 1))
    sample = {"x": buffer.getvalue()}
    made = through_dali((field,), [sample])["x"][0].numpy()
    assert made.shape == (3, 64, 64) and np.abs(made - apply([field], sample, draw([field], 0, 0, 0))["x"]).max() < 3 / 60


def test_all_that_a_sample_may_be() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    turned = np.arange(12).reshape(3, 4).T
    samples = [{"x": torch.arange(6).reshape(2, 3) + i, "y": 0.5 * i, "other": None, "z": turned} for i in range(2)]
    made = through_dali((Field("x"), Field("y", dtype="bfloat16"), Field("z")), samples)
    assert made["x"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]]
    assert made["y"].dtype == torch.bfloat16 and made["y"].tolist() == [0, 0.5]
    assert np.array_equal(made["z"][0], turned)
    with new_loader(Volumes(), fields=FIELDS[:2], collect=lambda batch: Pair(batch["volume"], batch["label"])) as loader:
        batch = next(loader.epoch(0))
        assert isinstance(batch, Pair) and batch.y.shape == (4, 3, 4, 5)


# ---- the order


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_order_is_the_loaders_and_augmentation_does_not_depend_on_processes(source: tuple[Any, str], size: int) -> None:
    data, reader = source
    plain = Loader(data, 8, mesh_of(0, 1), name="train", seed=5)
    for epoch in (0, 1):
        order = [batch["index"].tolist() for batch in plain.epoch(epoch)]
        with new_loader(data, 8, seed=5, reader=reader) as alone:
            whole = list(alone.epoch(epoch))
        assert numbers(whole) == order and len(order) == 3
        loaders = [new_loader(data, 8, mesh_of(rank, size), seed=5, reader=reader) for rank in range(size)]
        ranks = [list(loader.epoch(epoch)) for loader in loaders]
        assert all(same(joined(list(parts)), batch) for parts, batch in zip(zip(*ranks), whole))
    row = draw(FIELDS, 5, 1, 3)
    expected = apply(FIELDS, Volumes().sample(order[0][3], 1), row)
    assert all(np.array_equal(whole[0][name][3], expected[name]) for name in expected if name != "volume")
    assert np.allclose(whole[0]["volume"][3], expected["volume"], rtol=1e-6)


def test_an_epoch_goes_on_where_it_was_left(source: tuple[Any, str]) -> None:
    data, reader = source
    with new_loader(data, seed=1, reader=reader) as loader, new_loader(data, 2, seed=1, reader=reader) as other:
        whole = list(loader.epoch(2))
        rest = list(loader.epoch(2, 8))
        assert len(rest) == 4 and all(map(same, rest, whole[2:]))
        assert same(joined(list(other.epoch(2, 8))), joined(whole[2:])), "also with another batch"
        first = next(loader.epoch(2))
        assert same(first, whole[0]) and not same(whole[0], next(loader.epoch(3)))
        assert list(loader.epoch(2, 24)) == []
        plain = Loader(data, 4, mesh_of(0, 1), name="train", seed=1)
        assert numbers(loader.epoch(2, 10, (3, 5))) == numbers(plain.epoch(2, 10, (3, 5))), "passed over before, these come first"
        assert loader.late() == [] and loader.skipped == [] and loader.news() == []


def test_more_epochs_follow_without_a_break(source: tuple[Any, str]) -> None:
    data, reader = source
    with new_loader(data, seed=1, reader=reader) as loader, new_loader(data, seed=1, reader=reader) as other:
        for epoch in range(3):
            assert all(map(same, loader.epoch(epoch, more=epoch < 2), other.epoch(epoch)))
            assert epoch == 2 or (loader._following.graph is not None and loader._following.started), (
                "the next one is in DALI already"
            )
            assert sum(thread.name.startswith("train-") for thread in threading.enumerate()) <= 2
        list(loader.epoch(3, more=True))
        assert same(next(loader.epoch(7)), next(other.epoch(7))), "another one than was prepared"
        list(loader.epoch(3, more=True))
        assert same(next(loader.epoch(4, 8)), next(other.epoch(4, 8))), "not all of what was prepared"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("last", ["keep", "pad", "drop"])
def test_each_sample_as_often_as_last_says(source: tuple[Any, str], size: int, last: Any) -> None:
    data, reader = source
    loaders = [new_loader(data, 20, mesh_of(r, size), last=last, shuffle=False, reader=reader) for r in range(size)]
    found = sorted(index for loader in loaders for batch in numbers(loader.epoch(0)) for index in batch)
    expected = {"keep": [*range(24)], "drop": [*range(20)], "pad": sorted([*range(24), *range(16)])}[last]
    assert found == expected and loaders[0].samples == len(expected)


def test_parts_of_any_size(source: tuple[Any, str]) -> None:
    data, reader = source
    sampler = Balanced([1] * 21 + [100] * 3, 8, equal=False)
    loaders = [new_loader(data, 8, mesh_of(r, 2), sampler=sampler, reader=reader) for r in range(2)]
    parts = [numbers(loader.epoch(0)) for loader in loaders]
    assert sorted(sum(parts[0] + parts[1], [])) == list(range(24)) and len({len(p) for p in parts[0] + parts[1]}) > 1


def test_a_training_cannot_tell_it_from_the_loader() -> None:
    fields = (Field("volume", log1p=True), Field("index", dtype="float32"))

    class Logarithms(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            sample = super().sample(index, epoch)
            return {"volume": np.log1p(sample["volume"].astype(np.float32)), "index": np.float32(index)}

    def loss(model: torch.nn.Module, batch: dict) -> dict:
        return {"loss": (model(batch["volume"].flatten(1)) - batch["index"][:, None] / 24).square().mean()}

    losses = []
    for data in (new_loader(Volumes(), fields=fields, seed=2), Loader(Logarithms(), 4, mesh_of(0, 1), name="train", seed=2)):
        torch.manual_seed(0)
        step = train.Step(torch.nn.Linear(672, 1), loss, StepConfig(optimizer="sgd", lr=1e-4), dist.alone())
        with data:
            result = train.fit(step, data, TrainConfig(steps=14, report_every=2))
        losses.append([report["loss"] for report in result])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]


# ---- memory


def test_a_batch_stays_as_it_is_while_later_ones_are_made_and_memory_is_used_again(source: tuple[Any, str]) -> None:
    data, reader = source

    class Reused(Volumes):  # as the direct reader does: memory goes back, and is written again, once nothing views it
        memory = Memory(keep=1 << 20)

        def sample(self, index: int, epoch: int) -> Any:
            return {name: self.memory.copy(array) for name, array in super().sample(index, epoch).items()}

    used = Reused() if reader == "external" else data
    for batch, fields in ((4, FIELDS), (1, (Field("volume", "DHWC"), Field("index")))):
        with new_loader(used, batch, fields=fields, reader=reader, prefetch=4096) as loader:
            kept = list(loader.epoch(0))
            copies = [{name: tensor.clone() for name, tensor in part.items()} for part in kept]
            kept[0]["volume"] += 0  # they are ours, and may be written
            list(loader.epoch(1))
            del loader._graph
            loader._graph = None
        for part, copy in zip(kept, copies):
            assert same(part, copy)
            for row, index in enumerate(part["index"].tolist()):
                if len(fields) == 2:
                    assert np.array_equal(part["volume"][row], Volumes().sample(index, 0)["volume"])


def test_samples_go_in_without_a_copy_and_are_let_go() -> None:
    memory, addresses = Memory(keep=1 << 30), set()

    class Large(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            place = memory.take(1 << 20)
            place[:] = index
            addresses.add(place.ctypes.data)
            return {"volume": place}

    with new_loader(Large(60), 2, fields=(Field("volume"),), prefetch=8 << 20, shuffle=False) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            assert (batch["volume"] == torch.tensor([[2 * number], [2 * number + 1]])).all()
    assert number == 29 and len(addresses) <= 16, "memory is used again, within the budget"


def test_nothing_is_copied_on_the_way_in_and_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, field = np.zeros((5, 4), np.float32), Field("x", dtype="float64")
    graph = new_graph(field, [dali._kind(field, x.shape, "float32", 0)])
    run, outputs = graph._pipe.schedule_run, []

    def write_and_run() -> None:
        x[:] = 7  # after it was fed
        run()

    tensor = graph._tensor
    monkeypatch.setattr(graph._pipe, "schedule_run", write_and_run)
    monkeypatch.setattr(graph, "_tensor", lambda i, output, count: (outputs.append(output), tensor(i, output, count))[1])
    graph.start(0, [Ready(Task(0, 0, 0), dali._Item((x,), (None,), (None,)))])
    assert graph.under_way[0].arrays[0][0] is x, "what DALI looks at is kept"
    made = graph.finish()[2][0]
    assert (made == 7).all() and made.data_ptr() == outputs[0].as_tensor().data_ptr()


@pytest.mark.parametrize("batches, depth", [(0, 1), (3, 3), (1000, 8)])
def test_prefetch_tells_how_many_batches_are_in_dali(source: tuple[Any, str], batches: int, depth: int) -> None:
    data, reader = source
    into, out = 6 * 7 * 8 * (2 * 2 + 1) + 8, 60 * (2 * 4 + 8) + 8
    size = 4 * ((into if reader == "external" else 3 * into) + out)  # the file reader is two batches ahead
    with new_loader(data, prefetch=2 * batches * size, reader=reader) as loader:  # half of it is for DALI
        epoch = loader.epoch(0)
        next(epoch)
        graph = epoch.gi_frame.f_locals["course"].graph
        assert graph.depth == depth
        assert len(graph.under_way) <= depth and (reader == "external" or len(graph.under_way) == min(depth, 5))
        assert len(list(epoch)) == 5


def test_no_more_batches_are_in_dali_than_there_is_room_for(source: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    data, reader = source
    start, counts = dali._Graph.start, []

    def counted(graph: Any, number: int, found: Any) -> None:
        start(graph, number, found)
        counts.append((len(graph.under_way), graph.depth))

    monkeypatch.setattr(dali._Graph, "start", counted)
    with new_loader(data, reader=reader, prefetch=4 * 4 * 2648) as loader:
        for epoch in range(3):
            for _ in loader.epoch(epoch, more=epoch < 2):
                time.sleep(0.003)
    assert len(counts) == 18 and all(count <= depth < 4 for count, depth in counts) and max(counts)[0] == max(counts)[1]


def test_a_batch_is_given_while_the_samples_of_the_next_are_awaited() -> None:
    given = threading.Event()
    with new_loader(Volumes(fault=lambda index: index == 4 and given.wait(20)), shuffle=False) as loader:  # type: ignore
        epoch, began = loader.epoch(0), time.monotonic()
        next(epoch)
        assert time.monotonic() - began < 10
        given.set()
        assert len(list(epoch)) == 5


def test_what_dali_refuses_to_begin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = new_graph(Field("x"), [dali._kind(Field("x"), (2,), "float32", 0)])

    def refuse() -> None:
        raise RuntimeError("Error in x\nencountered:\n\nno luck\nC++ context: [x.cc]\nCurrent pipeline object is no longer valid.")

    monkeypatch.setattr(graph._pipe, "schedule_run", refuse)
    with pytest.raises(DataError, match=r"^graph, in or after the batch of samples 7 \(7\): DALI stops: no luck$"):
        graph.start(0, [Ready(Task(0, 0, 7), dali._Item((np.zeros(2, np.float32),), (None,), (None,)))])


def test_dali_reads_files_past_the_page_cache(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}_volume.npy" for i in range(4)]
    for path in paths:
        np.save(path, np.full((1 << 19,), int(path.name[0]), np.int16))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if max(map(resident, paths)) > 0.1:
        pytest.skip("this file system keeps its pages")

    class Here(Volumes):
        def files(self, index: int) -> dict[str, Path]:
            return {"volume": paths[index]}

    with new_loader(Here(4), 2, fields=(Field("volume"),), reader="numpy", shuffle=False) as loader:
        assert [batch["volume"][:, -1].tolist() for batch in loader.epoch(0)] == [[0, 1], [2, 3]]
    assert max(map(resident, paths)) < 0.1


# ---- what goes wrong


@pytest.mark.parametrize("problem", [DataError("file seven is damaged"), RuntimeError("seven"), MemoryError()])
def test_an_error_of_the_source_is_raised_soon_and_nothing_hangs_or_stays(problem: Exception) -> None:
    def fault(index: int) -> None:
        if index == 7:
            raise problem

    before, native, began = threading.active_count(), native_threads(), time.monotonic()
    source = Volumes(fault=fault)
    with new_loader(source, 2, shuffle=False) as loader, pytest.raises(DataError, match=r"(sample|index) 7"):
        list(loader.epoch(0))
    assert source.closed and time.monotonic() - began < 5
    assert threading.active_count() == before and native_threads(native) <= native


def test_an_epoch_may_be_left_and_another_begun(source: tuple[Any, str]) -> None:
    data, reader = source
    before, native = threading.active_count(), native_threads()
    loader = new_loader(data, seed=1, reader=reader)
    with Loader(data, 4, mesh_of(0, 1), name="train", seed=1) as other:
        plain = numbers(other.epoch(1))
    for _ in range(3):
        epoch = loader.epoch(0, more=True)
        next(epoch), next(epoch)
        epoch.close()
    assert numbers(loader.epoch(1)) == plain
    half = loader.epoch(0)
    next(half)
    loader.close()
    half.close()
    assert threading.active_count() <= before and native_threads(native) <= native


@pytest.mark.parametrize(
    "words, text",
    [
        ({"fields": ()}, "expected at least one"),
        ({"fields": (FIELDS[2], FIELDS[2])}, "fields index, index; .* each name once"),
        ({"device": "gpu"}, "DALI on the GPU, but the mesh is on the cpu"),
        ({"reader": "mmap"}, "reader 'mmap', expected external or numpy"),
        ({"reader": "numpy"}, r"a Volumes has no files\(index\); set reader to external"),
        ({"batch": 6, "mesh": mesh_of(0, 4)}, "a batch of 6 samples does not divide by 4 copies"),
        ({"fields": (Field("a", "HWC", flip=(0,)), Field("b", "HW", flip=(1,)))}, "'a' and 'b' share geometry 0, .* along H"),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(words: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        new_loader(Volumes(), **words)


@pytest.mark.parametrize(
    "field, value, text",
    [
        (Field("x", "HWC", crop=(5, 3)), np.zeros((4, 4, 1)), r"sample 0: field 'x': a crop of \(5, 3\) from .* \(4, 4, 1\)"),
        (Field("x", "HWC"), np.zeros((4, 4)), r"shape \(4, 4\), but layout 'HWC' has 3 dims"),
        (Field("x", "HWC", mean=[1.0, 2.0]), np.zeros((4, 4, 3)), r"means of 2 channels for an array of shape \(4, 4, 3\)"),
        (Field("x", transpose=(1, 0)), np.zeros(3), r"transpose \(1, 0\) for an array of shape \(3,\)"),
        (Field("x"), np.zeros(3, complex), "values of <c16, expected bool"),
        (Field("x"), np.zeros(3, ">f4"), "values of >f4, .* byte order: use .astype"),
        (Field("x"), "text", "values of <U4"),
        (Field("y"), np.zeros(3), "field 'y': is not in the sample, which has x"),
        (Field("x", "HWC", decode=True), np.zeros((4, 4, 3), np.uint8), r"expected an encoded image \[bytes\] uint8"),
        (Field("x", "HWC", decode=True), b"no image at all", "samples 0 .*DALI stops: .*nvImageCodec"),
        (Field("x", "HWC", decode=True, crop=(9, 9)), png(np.zeros((8, 8, 3), np.uint8)), "DALI stops: Slice can't be placed"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(field: Field, value: Any, text: str) -> None:
    native = native_threads()
    with pytest.raises(DataError, match=text):
        through_dali((field,), [{"x": value}] * 2)
    assert native_threads(native) <= native


def test_samples_that_do_not_fit_together_are_named() -> None:
    shapes = [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}]
    with pytest.raises(DataError, match=r"samples 0 \(volume 0\), 1 .*shapes \(2, 3\), \(2, 4\) in one batch; crop"):
        through_dali((Field("x"),), shapes)
    with pytest.raises(DataError, match=r"sample 1: field 'x': float32 with 1 dims, but float64 with 1 in sample 0"):
        through_dali((Field("x"),), [{"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}])
    fields = Field("x", "HW", crop=(2, 2), crop_at="random"), Field("y", "HWC", crop=(1, 2), crop_at="random")
    with pytest.raises(DataError, match=r"'x' and 'y' are cropped together, but 2 of 4 and 1 of 2 along dim 0; give them another"):
        through_dali(fields, [{"x": np.zeros((4, 4)), "y": np.zeros((2, 4, 1))}])

    class Growing(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            return {"x": np.full((index + 1, 2), index)}

    with new_loader(Growing(5), 1, fields=(Field("x"),), shuffle=False) as loader:  # alone in its batch each size is right
        assert [tuple(batch["x"].shape) for batch in loader.epoch(0)] == [(1, i + 1, 2) for i in range(5)]


@pytest.mark.parametrize(
    "batch, break_it, text",
    [
        (4, lambda path: path.unlink(), "in or after the batch of samples .*DALI stops: .*Could not open file .*005_volume.npy"),
        (4, lambda path: path.write_bytes(path.read_bytes()[:700]), "Failed to read file: .*005_volume.npy"),
        (4, lambda path: path.write_bytes(b"garbage" * 300), "not a numpy file.*005_volume.npy"),
        (4, lambda path: np.save(path, np.zeros((6, 7, 8, 2), np.float32)), "DALI stops|values of"),
        (1, lambda path: np.save(path, np.zeros((6, 7, 8, 2), np.float32)), r"samples 5 .*'volume': values of torch.float32, but"),
        (4, lambda path: np.save(path, np.zeros((6, 7, 4, 2), np.int16)), "samples .*Slice can't be placed out of bounds"),
    ],
)
def test_a_file_that_dali_cannot_read_is_named(folder: Path, batch: int, break_it: Callable[[Path], Any], text: str) -> None:
    source, native, began = OnDisk(folder), native_threads(), time.monotonic()
    break_it(folder / "005_volume.npy")
    fields = FIELDS if batch > 1 else (Field("volume"),)
    with new_loader(source, batch, fields=fields, shuffle=False, reader="numpy") as loader, pytest.raises(DataError, match=text):
        list(loader.epoch(0))
    assert native_threads(native) <= native and time.monotonic() - began < 60  # the first of all imports DALI


def test_the_first_file_is_looked_at_before_dali_is(folder: Path) -> None:
    source = OnDisk(folder)
    loader = new_loader(source, fields=(Field("volume", "DHWC", crop=(9, 4, 4)),), shuffle=False, reader="numpy")
    with loader, pytest.raises(DataError, match=r"000_volume.npy\): field 'volume': a crop of \(9, 4, 4\)"):
        list(loader.epoch(0))
    loader = new_loader(source, fields=(Field("mask"),), reader="numpy")
    with loader, pytest.raises(DataError, match=r"files\(\) names volume, label, index, but not 'mask'"):
        list(loader.epoch(0))
    with pytest.raises(DataError, match="field 'volume' is an encoded image, which no .npy file holds"):
        new_loader(source, fields=(Field("volume", "HWC", decode=True),), reader="numpy")
