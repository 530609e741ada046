"""DaliLoader: order and random numbers as in ``Loader``, on any number of ranks and from any position; memory; errors."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from io import BytesIO
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from hpcai import dist
from hpcai.data import dali
from hpcai.data.dali import DaliLoader, Field, random_numbers
from hpcai.data.direct import MemoryPool
from hpcai.data.images import dali_fields
from hpcai.data.loader import Loader
from hpcai.data.prefetch import Ready, Task
from hpcai.data.sampler import Balanced
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, MissingExtraError
from tests.replica_mesh import replica_mesh

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


def augment(x: Any, random: Any) -> Any:
    """Crop at a random position, flip at random, and convert to float32, as ``augment_by_numpy``."""
    from nvidia.dali import fn, types

    x = fn.crop(x, crop_d=3, crop_h=4, crop_w=5, crop_pos_z=random[0], crop_pos_y=random[1], crop_pos_x=random[2])
    x = fn.flip(x, horizontal=fn.cast(random[3] < 0.5, dtype=types.INT32))
    return fn.cast(x, dtype=types.FLOAT) / 2


def augment_by_numpy(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    for dim, size in enumerate((3, 4, 5)):
        start = int(np.float32(random[dim]) * (x.shape[dim] - size) + 0.5)
        x = x.take(range(start, start + size), dim)
    return (x[:, :, ::-1] if random[3] < 0.5 else x).astype(np.float32) / 2


FIELDS = (Field("volume", "DHWC", augment), Field("label", "DHW"), Field("index"))


def new_loader(source: Any, batch: int = 4, mesh: Mesh | None = None, fields: Any = FIELDS, **kwargs: Any) -> DaliLoader:
    return DaliLoader(source, batch, mesh or replica_mesh(0, 1), fields, name="train", **kwargs)


def sample_indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def is_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def concatenate(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def count_threads(at_most: int = 0) -> int:
    """Return the number of threads of this process, including those of DALI. An ended thread is listed for a moment longer."""
    end = time.monotonic() + 2
    while (count := len(os.listdir("/proc/self/task"))) > at_most > 0 and time.monotonic() < end:
        time.sleep(0.01)
    return count


# ---- pipeline


def load_by_dali(fields: tuple[Field, ...], samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    class Fixed(Volumes):
        def sample(self, index: int, epoch: int) -> dict[str, Any]:
            return samples[index]

    with new_loader(Fixed(len(samples)), len(samples), fields=fields, shuffle=False, workers=1) as loader:
        return next(loader.epoch(0))


def new_pipeline(field: Field, first: np.ndarray) -> Any:
    return dali._Pipeline([field], [first], batch=4, threads=1, device=torch.device("cpu"), name="graph", describe=str)


def new_ready(index: int, array: np.ndarray, random: np.ndarray | None = None) -> Ready:
    return Ready(Task(0, index, index), dali._Item((array,), np.zeros(8, np.float32) if random is None else random))


def test_operators_get_the_sample_and_the_random_numbers_of_its_position() -> None:
    data, crops = Volumes(100), set()
    with new_loader(data, 10, seed=5) as loader:
        for number, batch in enumerate(loader.epoch(1)):
            for row, index in enumerate(batch["index"].tolist()):
                random = random_numbers(5, 1, 10 * number + row)
                crops.add((random[:4] * [4, 4, 4, 2]).astype(int).tobytes())
                assert np.array_equal(batch["volume"][row], augment_by_numpy(data.sample(index, 1)["volume"], random))
    assert len(crops) > 50 and len({random_numbers(*at).tobytes() for at in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))}) == 4


def test_outputs_are_copied_to_the_gpu() -> None:
    """The pipeline is only defined, because it cannot be built without a driver."""
    from nvidia.dali import fn

    pipeline = object.__new__(dali._Pipeline)
    pipeline._dali, pipeline._device, pipeline._on_gpu = dali._import_dali(), torch.device("cuda"), True
    decode = Field("image", "", lambda x, random: fn.decoders.image(x, device="mixed"))
    with pipeline._dali.Pipeline(batch_size=1, num_threads=1, device_id=0):
        random = fn.external_source(name="drawn", ndim=1)
        fields = [decode, *dali_fields(Mock(size=8, rotate90=True), gpu=True)[:2], *FIELDS]
        for field in fields:
            nodes = {each.name: pipeline._input(0, each, np.zeros([1] * max(len(each.layout), 1), np.uint8)) for each in fields}
            assert pipeline._define(field, nodes, random).device == "gpu", field


def test_a_png_is_decoded_exactly() -> None:
    from nvidia.dali import fn

    images = [np.random.default_rng(i).integers(0, 256, (13, 17, 3)).astype(np.uint8) for i in range(3)]
    buffers = [BytesIO() for _ in images]
    for image, buffer in zip(images, buffers):
        Image.fromarray(image).save(buffer, "png")
    field = Field("x", "", lambda x, random: fn.decoders.image(x))
    assert np.array_equal(load_by_dali((field,), [{"x": buffer.getvalue()} for buffer in buffers])["x"], images)


def test_supported_samples() -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    transposed = np.arange(12).reshape(3, 4).T
    samples = [{"x": torch.arange(6).reshape(2, 3) + i, "y": 0.5 * i, "other": None, "z": transposed} for i in range(2)]
    outputs = load_by_dali((Field("x"), Field("y"), Field("z")), samples)
    assert outputs["x"].tolist() == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]]]
    assert outputs["y"].dtype == torch.float64 and outputs["y"].tolist() == [0, 0.5]
    assert np.array_equal(outputs["z"][0], transposed)
    with new_loader(Volumes(), fields=FIELDS[:2], make_batch=lambda batch: Pair(batch["volume"], batch["label"])) as loader:
        batch = next(loader.epoch(0))
        assert isinstance(batch, Pair) and batch.y.shape == (4, 6, 7, 8)


# ---- order


@pytest.mark.parametrize("size", [1, 2, 4])
def test_order_and_augmentation_do_not_depend_on_the_number_of_ranks(size: int) -> None:
    data = Volumes()
    reference = Loader(data, 8, replica_mesh(0, 1), name="train", seed=5)
    for epoch in (0, 1):
        order = [batch["index"].tolist() for batch in reference.epoch(epoch)]
        with new_loader(data, 8, seed=5) as single:
            full = list(single.epoch(epoch))
        assert sample_indices(full) == order and len(order) == 3
        loaders = [new_loader(data, 8, replica_mesh(rank, size), seed=5) for rank in range(size)]
        ranks = [list(loader.epoch(epoch)) for loader in loaders]
        assert all(is_equal(concatenate(list(parts)), batch) for parts, batch in zip(zip(*ranks), full))


def test_an_epoch_resumes_from_any_batch() -> None:
    data = Volumes()
    with new_loader(data, seed=1) as loader, new_loader(data, 2, seed=1) as other:
        full = list(loader.epoch(2))
        rest = list(loader.epoch(2, 8))
        assert len(rest) == 4 and all(map(is_equal, rest, full[2:]))
        assert is_equal(concatenate(list(other.epoch(2, 8))), concatenate(full[2:])), "also with another batch"
        first = next(loader.epoch(2))
        assert is_equal(first, full[0]) and not is_equal(full[0], next(loader.epoch(3)))
        assert list(loader.epoch(2, 24)) == []
        reference = Loader(data, 4, replica_mesh(0, 1), name="train", seed=1)
        assert sample_indices(loader.epoch(2, 10, (3, 5))) == sample_indices(reference.epoch(2, 10, (3, 5))), "deferred first"
        assert loader.deferred() == [] and loader.skipped == [] and loader.news() == []


def test_the_next_epoch_is_prefetched() -> None:
    data = Volumes()
    with new_loader(data, seed=1) as loader, new_loader(data, seed=1) as other:
        for epoch in range(3):
            assert all(map(is_equal, loader.epoch(epoch, more=epoch < 2), other.epoch(epoch)))
            assert epoch == 2 or (loader._next_epoch.pipeline is not None and loader._next_epoch.in_flight), (
                "the pipeline of the next epoch has batches in flight"
            )
            assert sum(thread.name.startswith("train-") for thread in threading.enumerate()) <= 2
        list(loader.epoch(3, more=True))
        assert is_equal(next(loader.epoch(7)), next(other.epoch(7))), "an epoch other than the prefetched one"
        list(loader.epoch(3, more=True))
        assert is_equal(next(loader.epoch(4, 8)), next(other.epoch(4, 8))), "a part of the prefetched epoch"


def test_local_batches_of_any_size() -> None:
    data = Volumes()
    sampler = Balanced([1] * 21 + [100] * 3, equal=False)
    loaders = [new_loader(data, 8, replica_mesh(r, 2), sampler=sampler) for r in range(2)]
    parts = [sample_indices(loader.epoch(0)) for loader in loaders]
    assert sorted(sum(parts[0] + parts[1], [])) == list(range(24)) and len({len(p) for p in parts[0] + parts[1]}) > 1


# ---- memory


def test_later_batches_do_not_overwrite_a_batch_and_memory_is_reused() -> None:
    class Reused(Volumes):  # as in the direct reader: memory is overwritten once it has no view
        memory = MemoryPool(max_unused=1 << 20)

        def sample(self, index: int, epoch: int) -> Any:
            return {name: self.memory.copy(array) for name, array in super().sample(index, epoch).items()}

    for batch, fields in ((4, FIELDS), (1, (Field("volume", "DHWC"), Field("index")))):
        with new_loader(Reused(), batch, fields=fields, prefetch=4096) as loader:
            batches = list(loader.epoch(0))
            copies = [{name: tensor.clone() for name, tensor in part.items()} for part in batches]
            batches[0]["volume"] += 0  # a batch may be modified
            list(loader.epoch(1))
            del loader._pipeline
            loader._pipeline = None
        for part, copy in zip(batches, copies):
            assert is_equal(part, copy)
            for row, index in enumerate(part["index"].tolist()):
                if len(fields) == 2:
                    assert np.array_equal(part["volume"][row], Volumes().sample(index, 0)["volume"])


def test_inputs_are_not_copied_and_are_released() -> None:
    memory, addresses = MemoryPool(max_unused=1 << 30), set()

    class Large(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            buffer = memory.allocate(1 << 20)
            buffer[:] = index
            addresses.add(buffer.ctypes.data)
            return {"volume": buffer}

    with new_loader(Large(60), 2, fields=(Field("volume"),), prefetch=8 << 20, shuffle=False) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            assert (batch["volume"] == torch.tensor([[2 * number], [2 * number + 1]])).all()
    assert number == 29 and len(addresses) <= 16, "memory is reused, within the budget"


def test_inputs_and_outputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((5, 4), np.float32)
    pipeline = new_pipeline(Field("x"), x)
    run, outputs = pipeline._pipeline.schedule_run, []

    def write_and_run() -> None:
        x[:] = 7  # after the input was fed
        run()

    tensor = pipeline._tensor
    monkeypatch.setattr(pipeline._pipeline, "schedule_run", write_and_run)
    monkeypatch.setattr(pipeline, "_tensor", lambda field, output: (outputs.append(output), tensor(field, output))[1])
    pipeline.start(0, [new_ready(0, x)])
    assert pipeline.in_flight[0][1][0].sample.arrays[0] is x, "the input of DALI is kept alive"
    output_tensor = pipeline.finish()[2][0]
    assert (output_tensor == 7).all() and output_tensor.data_ptr() == outputs[0].as_tensor().data_ptr()


def test_two_batches_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    start, counts = dali._Pipeline.start, []

    def start_and_count(pipeline: Any, number: int, samples: Any) -> None:
        start(pipeline, number, samples)
        counts.append(len(pipeline.in_flight))

    monkeypatch.setattr(dali._Pipeline, "start", start_and_count)
    with new_loader(Volumes()) as loader:
        for epoch in range(3):
            for _ in loader.epoch(epoch, more=epoch < 2):
                time.sleep(0.003)
    assert len(counts) == 18 and max(counts) == 2


def test_a_batch_is_delivered_before_the_samples_of_the_next_are_ready() -> None:
    released = threading.Event()
    with new_loader(Volumes(fault=lambda index: index == 4 and released.wait(20)), shuffle=False) as loader:  # type: ignore
        epoch, start = loader.epoch(0), time.monotonic()
        next(epoch)
        assert time.monotonic() - start < 10
        released.set()
        assert len(list(epoch)) == 5


def test_errors_of_dali_at_the_start_name_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(2, np.float32)
    pipeline = new_pipeline(Field("x"), x)
    error = RuntimeError("Error in x\nencountered:\n\nno luck\nC++ context: [x.cc]\nCurrent pipeline object is no longer valid.")
    monkeypatch.setattr(pipeline._pipeline, "schedule_run", Mock(side_effect=error))
    with pytest.raises(DataError, match=r"^graph, in or after the batch of samples 7 \(7\): DALI stops: no luck$"):
        pipeline.start(0, [new_ready(7, x)])


# ---- errors


@pytest.mark.parametrize("problem", [DataError("file seven is damaged"), RuntimeError("seven"), MemoryError()])
def test_an_error_of_the_source_is_raised_soon_and_all_threads_end(problem: Exception) -> None:
    def fault(index: int) -> None:
        if index == 7:
            raise problem

    before, thread_count, start = threading.active_count(), count_threads(), time.monotonic()
    source = Volumes(fault=fault)
    with new_loader(source, 2, shuffle=False) as loader, pytest.raises(DataError, match=r"(sample|index) 7"):
        list(loader.epoch(0))
    assert source.closed and time.monotonic() - start < 5
    assert threading.active_count() == before and count_threads(thread_count) <= thread_count


def test_an_epoch_can_be_abandoned_for_another() -> None:
    data = Volumes()
    with Loader(data, 4, replica_mesh(0, 1), name="train", seed=1) as other:
        expected = sample_indices(other.epoch(1))
    before, thread_count = threading.active_count(), count_threads()
    loader = new_loader(data, seed=1)
    for _ in range(3):
        epoch = loader.epoch(0, more=True)
        next(epoch), next(epoch)
        epoch.close()
    assert sample_indices(loader.epoch(1)) == expected
    partial_epoch = loader.epoch(0)
    next(partial_epoch)
    loader.close()
    partial_epoch.close()
    assert threading.active_count() <= before and count_threads(thread_count) <= thread_count


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"fields": ()}, "expected at least one"),
        ({"fields": (FIELDS[2], FIELDS[2])}, "fields index, index; .* each name once"),
        ({"batch": 6, "mesh": replica_mesh(0, 4)}, "a batch of 6 samples does not divide by 4 replicas"),
    ],
)
def test_contradictory_arguments_raise_at_construction(kwargs: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        new_loader(Volumes(), **kwargs)


@pytest.mark.parametrize(
    "field, value, message",
    [
        (FIELDS[0], np.zeros((2, 2, 2, 1)), "samples 0 .*DALI stops: "),
        (Field("x", "HWC"), np.zeros((4, 4)), r"shape \(4, 4\), but layout 'HWC' has 3 dims"),
        (Field("x"), np.zeros(3, complex), "values of <c16, expected bool"),
        (Field("x"), np.zeros(3, ">f4"), "values of >f4, .* byte order: use .astype"),
        (Field("x"), "text", "values of <U4"),
        (Field("y"), np.zeros(3), "field 'y': is not in the sample, which has x"),
    ],
)
def test_a_sample_that_contradicts_its_field_is_named(field: Field, value: Any, message: str) -> None:
    thread_count = count_threads()
    with pytest.raises(DataError, match=message):
        load_by_dali((field,), [{"x": value, "volume": value}] * 2)
    assert count_threads(thread_count) <= thread_count


def test_incompatible_samples_of_a_batch_are_named() -> None:
    samples = [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}]
    with pytest.raises(DataError, match=r"samples 0 \(volume 0\), 1 .*shapes \(2, 3\), \(2, 4\) in one batch; crop"):
        load_by_dali((Field("x"),), samples)
    with pytest.raises(DataError, match=r"sample 1: field 'x': float32 with 1 dims, but float64 with 1 in sample 0"):
        load_by_dali((Field("x"),), [{"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}])

    class Growing(Volumes):
        def sample(self, index: int, epoch: int) -> Any:
            return {"x": np.full((index + 1, 2), index)}

    with new_loader(Growing(5), 1, fields=(Field("x"),), shuffle=False) as loader:  # alone in its batch a sample may have any size
        assert [tuple(batch["x"].shape) for batch in loader.epoch(0)] == [(1, i + 1, 2) for i in range(5)]


# ---- without DALI


def test_without_dali_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "import_module", Mock(side_effect=ModuleNotFoundError("no module", name="nvidia.dali")))
    with pytest.raises(MissingExtraError, match=r"pip install 'hpcai-suite\[dali\]', or read without it: data.reader=direct"):
        DaliLoader(np.zeros(3), 1, dist.single_process(), [Field("x")], name="train")  # type: ignore[arg-type]
