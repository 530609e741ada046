"""DALI gives what plain numpy gives, in the order of ``Loader``, on any number of processes and from any place; nothing hangs."""

import io
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hpcai import dist, train
from hpcai.data import dali
from hpcai.data.ahead import Ready, Task
from hpcai.data.dali import DaliLoader, Field, apply, draw
from hpcai.data.direct import Memory
from hpcai.data.loader import Loader
from hpcai.data.sampler import Balanced
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.settings import StepConfig, TrainConfig
from tests.meshes import mesh_of

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
    Field("volume", "DHWC", crop=(3, 4, 5), crop_at="random", flip="DHW", mean=1.0, std=2.0),
    Field("label", "DHW", crop=(3, 4, 5), crop_at="random", flip="DHW"),
    Field("index"),
)


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
    spatial = [dim for dim, letter in enumerate(layout) if letter != "C"]
    if layout and rng.random() < 0.6:
        words["crop"] = tuple(int(rng.integers(1, shape[dim] + 1)) for dim in spatial)
        words["crop_at"] = str(rng.choice(["center", "random"]))
    if layout and rng.random() < 0.6:
        words["flip"] = "".join(layout[dim] for dim in spatial if rng.random() < 0.6)
    if (r := rng.random()) < 0.3:
        words |= {"mean": 1.5, "std": 2.5}
    elif r < 0.6 and "C" in layout:
        words |= {"mean": [1.0, 2.0, 3.0], "std": [2.0, 3.0, 4.0]}
    return Field("x", layout, **words)


def any_array(rng: np.random.Generator, field: Field) -> np.ndarray:
    moved = field.crop is not None or field.flip  # by operators that do not know these
    dtype = str(rng.choice([name for name in dali._TYPES if not moved or name not in ("bool", "float16")]))
    x = rng.integers(0, 2 if dtype == "bool" else 100, SHAPES[field.layout])
    return (x * 0.3 if dtype.startswith("float") else x).astype(dtype)


def through_dali(fields: tuple[Field, ...], samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    class Given(Volumes):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            return samples[index]

    with new_loader(Given(len(samples)), len(samples), fields=fields, shuffle=False, workers=1) as loader:
        return next(loader.epoch(0))


def new_graph(field: Field, first: np.ndarray) -> Any:
    return dali._Graph([field], [first], batch=4, threads=1, device=torch.device("cpu"), name="graph", describe=str)


def ready(index: int, array: np.ndarray, drawn: np.ndarray | None = None) -> Ready:
    return Ready(Task(0, index, index), dali._Item((array,), np.zeros((2, 3), int) if drawn is None else drawn))


def test_what_dali_makes_is_what_numpy_makes() -> None:
    rng, mismatched = np.random.default_rng(0), []
    for number in range(150):
        field = any_field(rng)
        arrays = [any_array(rng, field)]
        arrays.append(arrays[0][::-1].copy())
        graph, draws = new_graph(field, arrays[0]), [draw(number, 0, position) for position in (0, 1)]
        graph.start(0, [ready(position, array, draws[position]) for position, array in enumerate(arrays)])
        _, _, (got,) = graph.finish()
        want = torch.from_numpy(np.stack([apply(field, array, drawn) for array, drawn in zip(arrays, draws)]))
        loss = 1e-6 if got.is_floating_point() else 0
        fits = got.dtype == want.dtype and got.shape == want.shape
        if not fits or not torch.allclose(got.double(), want.double(), rtol=loss, atol=loss):
            mismatched.append((field, arrays[0].dtype.name, got.dtype, got.shape, want.shape))
    assert not mismatched, mismatched[:3]


def test_all_that_is_made_for_a_gpu_ends_there() -> None:
    """Only the definition is made, since without a driver no such graph can be built."""
    graph = object.__new__(dali._Graph)
    graph._dali, graph._device, graph._on_gpu = dali._imported(), torch.device("cuda"), True
    rng = np.random.default_rng(3)
    fields = [Field("image", "HWC", decode=True, crop=(4, 4), mean=1.0), Field("plain"), *(any_field(rng) for _ in range(40))]
    with graph._dali.Pipeline(batch_size=1, num_threads=1, device_id=0):
        for i, field in enumerate(fields):
            first = np.zeros(3, np.uint8) if field.decode else any_array(rng, field)
            assert graph._define(i, field, first).device == "gpu", field


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_decoded_exactly(channels: int) -> None:
    images = [np.random.default_rng(i).integers(0, 256, (13 + i, 17, channels)).astype(np.uint8) for i in range(3)]
    field = Field("x", "HWC", decode=True, crop=(12, 11), crop_at="random", flip="W")
    made = through_dali((field,), [{"x": png(image)} for image in images])["x"]
    expected = [apply(field, image, draw(0, 0, i)) for i, image in enumerate(images)]
    assert made.dtype == torch.uint8 and np.array_equal(made, expected)


def test_a_jpeg_is_decoded_and_normalised() -> None:
    from PIL import Image

    ramp = (np.add.outer(np.arange(64), np.arange(64))[..., None] * np.array([1, 1, 2])).astype(np.uint8)
    Image.fromarray(ramp).save(buffer := io.BytesIO(), "jpeg")
    field = Field("x", "HWC", decode=True, mean=[120.0, 110.0, 100.0], std=[60.0, 60.0, 60.0])
    made = through_dali((field,), [{"x": buffer.getvalue()}])["x"][0].numpy()
    assert made.shape == (64, 64, 3)
    assert np.abs(made - apply(field, np.asarray(Image.open(buffer)), draw(0, 0, 0))).max() < 3 / 60


def test_all_that_a_sample_may_be() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    turned = np.arange(12).reshape(3, 4).T
    samples = [{"x": torch.arange(6).reshape(2, 3) + i, "y": 0.5 * i, "other": None, "z": turned} for i in range(2)]
    made = through_dali((Field("x"), Field("y"), Field("z")), samples)
    assert made["x"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]]
    assert made["y"].dtype == torch.float64 and made["y"].tolist() == [0, 0.5]
    assert np.array_equal(made["z"][0], turned)
    with new_loader(Volumes(), fields=FIELDS[:2], collect=lambda batch: Pair(batch["volume"], batch["label"])) as loader:
        batch = next(loader.epoch(0))
        assert isinstance(batch, Pair) and batch.y.shape == (4, 3, 4, 5)


# ---- the order


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_order_is_the_loaders_and_augmentation_does_not_depend_on_processes(size: int) -> None:
    data = Volumes()
    plain = Loader(data, 8, mesh_of(0, 1), name="train", seed=5)
    for epoch in (0, 1):
        order = [batch["index"].tolist() for batch in plain.epoch(epoch)]
        with new_loader(data, 8, seed=5) as alone:
            whole = list(alone.epoch(epoch))
        assert numbers(whole) == order and len(order) == 3
        loaders = [new_loader(data, 8, mesh_of(rank, size), seed=5) for rank in range(size)]
        ranks = [list(loader.epoch(epoch)) for loader in loaders]
        assert all(same(joined(list(parts)), batch) for parts, batch in zip(zip(*ranks), whole))
    sample, drawn = Volumes().sample(order[0][3], 1), draw(5, 1, 3)
    for field in FIELDS:
        assert np.allclose(whole[0][field.name][3], apply(field, sample[field.name], drawn), rtol=1e-6)


def test_an_epoch_goes_on_where_it_was_left() -> None:
    data = Volumes()
    with new_loader(data, seed=1) as loader, new_loader(data, 2, seed=1) as other:
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


def test_more_epochs_follow_without_a_break() -> None:
    data = Volumes()
    with new_loader(data, seed=1) as loader, new_loader(data, seed=1) as other:
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
def test_each_sample_as_often_as_last_says(size: int, last: Any) -> None:
    data = Volumes()
    loaders = [new_loader(data, 20, mesh_of(r, size), last=last, shuffle=False) for r in range(size)]
    found = sorted(index for loader in loaders for batch in numbers(loader.epoch(0)) for index in batch)
    expected = {"keep": [*range(24)], "drop": [*range(20)], "pad": sorted([*range(24), *range(16)])}[last]
    assert found == expected and loaders[0].samples == len(expected)


def test_parts_of_any_size() -> None:
    data = Volumes()
    sampler = Balanced([1] * 21 + [100] * 3, 8, equal=False)
    loaders = [new_loader(data, 8, mesh_of(r, 2), sampler=sampler) for r in range(2)]
    parts = [numbers(loader.epoch(0)) for loader in loaders]
    assert sorted(sum(parts[0] + parts[1], [])) == list(range(24)) and len({len(p) for p in parts[0] + parts[1]}) > 1


def test_a_training_cannot_tell_it_from_the_loader() -> None:
    fields = (Field("volume", mean=25.0, std=50.0), Field("index", mean=0.0))

    class Normal(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            sample = super().sample(index, epoch)
            return {"volume": (sample["volume"].astype(np.float32) - 25) / 50, "index": np.float32(index)}

    def loss(model: torch.nn.Module, batch: dict) -> dict:
        return {"loss": (model(batch["volume"].flatten(1)) - batch["index"][:, None] / 24).square().mean()}

    losses = []
    for data in (new_loader(Volumes(), fields=fields, seed=2), Loader(Normal(), 4, mesh_of(0, 1), name="train", seed=2)):
        torch.manual_seed(0)
        step = train.Step(torch.nn.Linear(672, 1), loss, StepConfig(optimizer="sgd", lr=1e-2), dist.alone())
        with data:
            result = train.fit(step, data, TrainConfig(steps=14, report_every=2))
        losses.append([report["loss"] for report in result])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]


# ---- memory


def test_a_batch_stays_as_it_is_while_later_ones_are_made_and_memory_is_used_again() -> None:
    class Reused(Volumes):  # as the direct reader does: memory goes back, and is written again, once nothing views it
        memory = Memory(keep=1 << 20)

        def sample(self, index: int, epoch: int) -> Any:
            return {name: self.memory.copy(array) for name, array in super().sample(index, epoch).items()}

    for batch, fields in ((4, FIELDS), (1, (Field("volume", "DHWC"), Field("index")))):
        with new_loader(Reused(), batch, fields=fields, prefetch=4096) as loader:
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
    x = np.zeros((5, 4), np.float32)
    graph = new_graph(Field("x", mean=1.0), x)
    run, outputs = graph._pipe.schedule_run, []

    def write_and_run() -> None:
        x[:] = 7  # after it was fed
        run()

    tensor = graph._tensor
    monkeypatch.setattr(graph._pipe, "schedule_run", write_and_run)
    monkeypatch.setattr(graph, "_tensor", lambda field, output: (outputs.append(output), tensor(field, output))[1])
    graph.start(0, [ready(0, x)])
    assert graph.under_way[0].items[0].arrays[0] is x, "what DALI looks at is kept"
    made = graph.finish()[2][0]
    assert (made == 6).all() and made.data_ptr() == outputs[0].as_tensor().data_ptr()


def test_two_batches_are_in_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    start, counts = dali._Graph.start, []

    def counted(graph: Any, number: int, found: Any) -> None:
        start(graph, number, found)
        counts.append(len(graph.under_way))

    monkeypatch.setattr(dali._Graph, "start", counted)
    with new_loader(Volumes()) as loader:
        for epoch in range(3):
            for _ in loader.epoch(epoch, more=epoch < 2):
                time.sleep(0.003)
    assert len(counts) == 18 and max(counts) == 2


def test_a_batch_is_given_while_the_samples_of_the_next_are_awaited() -> None:
    given = threading.Event()
    with new_loader(Volumes(fault=lambda index: index == 4 and given.wait(20)), shuffle=False) as loader:  # type: ignore
        epoch, began = loader.epoch(0), time.monotonic()
        next(epoch)
        assert time.monotonic() - began < 10
        given.set()
        assert len(list(epoch)) == 5


def test_what_dali_refuses_to_begin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(2, np.float32)
    graph = new_graph(Field("x"), x)

    def refuse() -> None:
        raise RuntimeError("Error in x\nencountered:\n\nno luck\nC++ context: [x.cc]\nCurrent pipeline object is no longer valid.")

    monkeypatch.setattr(graph._pipe, "schedule_run", refuse)
    with pytest.raises(DataError, match=r"^graph, in or after the batch of samples 7 \(7\): DALI stops: no luck$"):
        graph.start(0, [ready(7, x)])


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


def test_an_epoch_may_be_left_and_another_begun() -> None:
    data = Volumes()
    before, native = threading.active_count(), native_threads()
    loader = new_loader(data, seed=1)
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
        ({"batch": 6, "mesh": mesh_of(0, 4)}, "a batch of 6 samples does not divide by 4 copies"),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(words: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        new_loader(Volumes(), **words)


@pytest.mark.parametrize(
    "field, value, text",
    [
        (Field("x", "HWC", crop=(5, 3)), np.zeros((4, 4, 1)), "samples 0 .*DALI stops: Slice can't be placed"),
        (Field("x", "HWC"), np.zeros((4, 4)), r"shape \(4, 4\), but layout 'HWC' has 3 dims"),
        (Field("x", "HWC", mean=[1.0, 2.0]), np.zeros((4, 4, 3)), "samples 0 .*DALI stops: "),
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
    class Growing(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            return {"x": np.full((index + 1, 2), index)}

    with new_loader(Growing(5), 1, fields=(Field("x"),), shuffle=False) as loader:  # alone in its batch each size is right
        assert [tuple(batch["x"].shape) for batch in loader.epoch(0)] == [(1, i + 1, 2) for i in range(5)]

