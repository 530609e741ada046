"""Volumes and images through NVIDIA DALI: decoded, cropped, flipped and normalised by its operators, on the CPU or the GPU.

Order and random numbers are ours: each crop and flip is a pure function of (seed, epoch, position), fed to the pipeline beside
the sample. So there is no state to save, and a resumed run gets the same batches on any number of processes. ``apply`` is the
whole pipeline in plain numpy, but for decoding.

Found with DALI 2.4.0, and held by the tests: arrays go in without a copy (``no_copy``); what comes out has memory of its own,
which torch takes over through DLPack: an earlier batch stays as it is while later ones are made. DALI guesses the layout of an
array that has none, and then flips the wrong dims.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.data.ahead import Ahead, Ready, Task
from hpcai.data.assemble import tree_bytes
from hpcai.data.loader import Loader, Source, _Course, _Plan
from hpcai.data.sampler import Sampler
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, MissingExtraError

_LAYOUTS = ("", "HW", "HWC", "CHW", "DHW", "DHWC", "CDHW")
_SPATIAL = "DHW"
_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16", "uint32": "UINT32", "int32": "INT32",
    "uint64": "UINT64", "int64": "INT64", "float16": "FLOAT16", "float32": "FLOAT", "float64": "FLOAT64",
}  # fmt: skip
_NORMALISED = ("uint8", "int16", "uint16", "int32", "float16", "float32")  # what crop_mirror_normalize takes
_ONE = 1 << 30
"""A drawn number, divided by this, lies in [0, 1). DALI's constants have 32 bits."""
_DEPTH = 2  # batches that are in DALI at a time


# ---- operators


@dataclass(frozen=True)
class Field:
    """One array of a sample, and what is done with it, in this order: decoded, cropped, flipped, normalised.

    ``layout`` names the dims: HW, HWC, CHW, DHW, DHWC or CDHW; an empty one leaves them without names, and then only ``mean`` and
    ``std`` of one number are possible. ``decode``: the array is an encoded image (PNG, JPEG) [bytes] uint8; its layout is HWC, with
    the channels it has. ``crop`` has a size for each dim but C. ``flip`` names dims, such as "HW", that are reversed at random,
    each half of the time. All fields of a sample are cropped and flipped alike. ``mean`` and ``std`` have one number or one per
    channel: the result is (x - mean) / std in float32. Raises DataError, naming the field, for what contradicts itself.
    """

    name: str
    layout: str = ""
    decode: bool = False
    crop: tuple[int, ...] | None = None
    crop_at: Literal["center", "random"] = "center"
    flip: str = ""
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        where = f"field '{self.name}'"
        if self.layout not in _LAYOUTS:
            raise DataError(f"{where}: layout {self.layout!r}, expected one of {', '.join(map(repr, _LAYOUTS))}")
        if self.decode and self.layout != "HWC":
            raise DataError(f"{where}: a decoded image is HWC, but layout is {self.layout!r}")
        if self.crop_at not in ("center", "random"):
            raise DataError(f"{where}: crop_at {self.crop_at!r}, expected center or random")
        if self.crop is not None and (not self.layout or len(self.crop) != len(self.spatial) or min(self.crop) < 1):
            letters = self.layout.replace("C", "") or "the dims of a layout"
            raise DataError(f"{where}: crop {self.crop}, expected a size of at least 1 for each of {letters}")
        if set(self.flip) - (set(self.layout) & set(_SPATIAL)):
            raise DataError(f"{where}: flip {self.flip!r}, expected letters among D, H and W of the layout {self.layout!r}")
        means, stds = self.normal
        if max(means.size, stds.size) > 1 and "C" not in self.layout:
            raise DataError(f"{where}: a mean and std per channel, but layout {self.layout!r} has no C")
        if not np.isfinite([*means.flat, *stds.flat]).all() or 0 in stds or len({1, means.size, stds.size}) > 2:
            found = f"mean {self.mean}, std {self.std}"
            raise DataError(f"{where}: {found}; expected as many finite numbers of each, or one, and a std that is not 0")

    @property
    def spatial(self) -> list[int]:
        """Dims that are cropped."""
        return [dim for dim, letter in enumerate(self.layout) if letter != "C"]

    @property
    def normal(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation, which broadcast to an array of the layout."""
        given = (0.0 if self.mean is None else self.mean, 1.0 if self.std is None else self.std)
        pair = [np.atleast_1d(np.asarray(x, np.float32)) for x in given]
        after = len(self.layout) - 1 - self.layout.find("C") if "C" in self.layout else 0
        mean, std = (x.reshape(-1, *[1] * after) if x.size > 1 else x for x in pair)
        return mean, std

    @property
    def is_normalised(self) -> bool:
        return self.mean is not None or self.std is not None


def draw(seed: int, epoch: int, position: int) -> np.ndarray:
    """For D, H and W: a number in [0, 2**30) that places a crop, and a bit that flips.   [2, 3] int64"""
    generator = np.random.Generator(np.random.PCG64([seed, epoch, position, 0xDA11]))
    return np.stack([generator.integers(0, _ONE, 3), generator.integers(0, 2, 3)])


def apply(field: Field, x: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """What the pipeline makes of an array, in numpy."""
    for dim, size in zip(field.spatial, field.crop or ()):
        free, at = x.shape[dim] - size, int(drawn[0, _SPATIAL.index(field.layout[dim])])
        start = free // 2 if field.crop_at == "center" else at * (free + 1) // _ONE
        x = x.take(range(start, start + size), dim)
    flipped = {letter for letter, bit in zip(_SPATIAL, drawn[1]) if bit and letter in field.flip}
    x = np.flip(x, tuple(dim for dim in field.spatial if field.layout[dim] in flipped))
    if field.is_normalised:
        mean, std = field.normal
        x = (x.astype(np.float32) - mean) / std
    return np.asarray(x, order="C")


def _array(field: Field, sample: Any) -> np.ndarray:
    where = f"field '{field.name}'"
    if not isinstance(sample, Mapping) or field.name not in sample:
        has = ", ".join(map(str, sample)) or "nothing" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise DataError(f"{where}: is not in the sample, which has {has}; sample() returns a dict with an array for each field")
    value = sample[field.name]
    if isinstance(value, Tensor):
        value = value.numpy()
    x = np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray | memoryview) else np.asarray(value)
    if x.dtype.name not in _TYPES or not x.dtype.isnative:
        raise DataError(f"{where}: values of {x.dtype.str}, expected {', '.join(_TYPES)} in this machine's byte order: use .astype")
    if field.decode and (x.ndim != 1 or x.dtype != np.uint8):
        raise DataError(f"{where}: {x.dtype} of shape {x.shape}, expected an encoded image [bytes] uint8; or set decode=False")
    if not field.decode and field.layout and x.ndim != len(field.layout):
        raise DataError(f"{where}: an array of shape {x.shape}, but layout {field.layout!r} has {len(field.layout)} dims")
    return np.asarray(x, order="C")


# ---- the graph


class _Item(NamedTuple):
    """A sample on its way into the graph: an array for each field, and its random numbers."""

    arrays: tuple[np.ndarray, ...]
    drawn: np.ndarray


class _UnderWay(NamedTuple):
    number: int
    tasks: list[Task]
    items: list[_Item]


class _Graph:
    """A DALI pipeline over ``fields``, with up to two batches of up to ``batch`` samples in it.

    The operators are the same on the CPU and the GPU. Only crops are always made where the array lies, so that nothing else is
    uploaded. All samples have the dtypes and dims of ``first``. Raises DataError, with ``name`` and the samples by ``describe``,
    for what DALI refuses.
    """

    def __init__(
        self, fields: Sequence[Field], first: Sequence[np.ndarray], *, batch: int, threads: int, device: torch.device, name: str,
        describe: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._dali, self._fields, self._device, self._name, self._describe = _imported(), fields, device, name, describe
        self._on_gpu = device.type == "cuda"
        index = None
        if self._on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
        self.under_way: deque[_UnderWay] = deque()
        # DLPack needs exec_dynamic: only then an output has memory that is not used again.
        with self._named(()):
            self._pipe: Any = self._dali.Pipeline(
                batch_size=batch, num_threads=threads, device_id=index, prefetch_queue_depth=_DEPTH, exec_dynamic=True, seed=0
            )
            with self._pipe:
                self._pipe.set_outputs(*(self._define(i, field, x) for i, (field, x) in enumerate(zip(fields, first))))
            self._pipe.build()
        self._pipe._first_iter = False  # otherwise the first schedule_run wants all batches before it gives one
        self._uploading: deque[tuple[torch.cuda.Event, Any]] = deque()

    def _define(self, i: int, field: Field, first: np.ndarray) -> Any:
        fn, types = self._dali.fn, self._dali.types
        named = {"layout": field.layout} if field.layout and not field.decode else {}
        x = fn.external_source(
            name=f"field{i}", no_copy=True, dtype=getattr(types, _TYPES[first.dtype.name]), ndim=first.ndim, **named
        )  # fmt: skip
        if field.decode:
            x = fn.decoders.image(x, device="mixed" if self._on_gpu else "cpu", output_type=types.ANY_DATA)
        if field.crop is not None:
            begin, size = field.spatial[0], np.array(field.crop)
            free = x.shape(dtype=types.INT64)[begin : begin + len(size)] - types.Constant(size, dtype=types.INT64)
            start = free // 2
            if field.crop_at == "random":
                start = fn.external_source(name=f"crop{i}", dtype=types.INT64, ndim=1) * (free + 1) // _ONE
            x = fn.slice(x, start=fn.cast(start, dtype=types.INT32), shape=size.tolist(), axes=field.spatial)
        if self._on_gpu and not field.decode:
            x = x.gpu()
        if field.flip:
            without = "C" not in field.layout
            if without:  # flip knows no others
                x = fn.expand_dims(x, axes=[len(field.layout)], new_axis_names="C")
            bits = fn.external_source(name=f"flip{i}", dtype=types.INT32, ndim=1)
            x = fn.flip(x, depthwise=bits[0] if "D" in field.layout else 0, vertical=bits[1], horizontal=bits[2])
            x = fn.squeeze(x, axes=[len(field.layout)]) if without else x
        if field.is_normalised:
            mean, std = (row.ravel().tolist() for row in field.normal)
            if first.dtype.name not in _NORMALISED or "C" not in field.layout:
                x = fn.cast(x, dtype=types.FLOAT)
            if "C" in field.layout:  # one pass over the values
                x = fn.crop_mirror_normalize(x, mean=mean, std=std, output_layout=field.layout, dtype=types.FLOAT)
            else:
                x = (x - mean[0]) / std[0]
        return x

    @property
    def has_room(self) -> bool:
        return len(self.under_way) < _DEPTH

    @property
    def is_closed(self) -> bool:
        return self._pipe is None

    def start(self, number: int, found: Sequence[Ready]) -> None:
        """Feed one batch, and let DALI begin with it."""
        items: list[_Item] = [ready.sample for ready in found]
        self.under_way.append(_UnderWay(number, [ready.task for ready in found], items))
        with self._named(self.under_way[0].tasks):
            for i, field in enumerate(self._fields):
                self._pipe.feed_input(f"field{i}", [item.arrays[i] for item in items])
                if field.crop and field.crop_at == "random":
                    slots = [_SPATIAL.index(field.layout[dim]) for dim in field.spatial]
                    self._pipe.feed_input(f"crop{i}", [item.drawn[0, slots] for item in items])
                if field.flip:
                    wanted = np.array([letter in field.flip for letter in _SPATIAL])
                    self._pipe.feed_input(f"flip{i}", [(item.drawn[1] * wanted).astype(np.int32) for item in items])
            self._pipe.schedule_run()

    def finish(self) -> tuple[int, list[Task], list[Tensor]]:
        """Number, tasks and tensors of the oldest batch. On a GPU the host does not wait for it."""
        made = self.under_way[0]
        stream = torch.cuda.current_stream(self._device) if self._on_gpu else None
        with self._named(made.tasks), torch.cuda.device(self._device) if self._on_gpu else nullcontext():
            tensors = [self._tensor(field, output) for field, output in zip(self._fields, self._pipe.share_outputs(stream))]
            self._pipe.release_outputs()
            if stream is not None:
                done = torch.cuda.Event()
                done.record(stream)
                self._uploading.append((done, made.items))
        while self._uploading and self._uploading[0][0].query():
            self._uploading.popleft()
        self.under_way.popleft()
        return made.number, made.tasks, tensors

    def _tensor(self, field: Field, output: Any) -> Tensor:
        if not output.is_dense_tensor():
            shapes = ", ".join(map(str, sorted(set(map(tuple, output.shape())))))
            raise DataError(f"field '{field.name}': shapes {shapes} in one batch; crop to one size, or make batches of one sample")
        return torch.from_dlpack(output.as_tensor())

    @contextmanager
    def _named(self, tasks: Sequence[Task]) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            names = ", ".join(f"{task.index} ({self._describe(task.index)})" for task in tasks[:8])
            if isinstance(problem, DataError):  # from our own checks
                raise DataError(f"{self._name}, batch of samples {names}: {problem}") from problem
            where = f", in or after the batch of samples {names}" if names else ""  # DALI is ahead
            traceback.clear_frames(problem.__traceback__)  # variables of DALI's functions, which hold its threads
            raise DataError(f"{self._name}{where}: DALI stops: {_short(problem)}") from problem

    def close(self) -> None:
        """End DALI's threads, then let go of the arrays that it looked at."""
        self._pipe = None
        self.under_way.clear()
        for done, _ in self._uploading:
            done.synchronize()
        self._uploading.clear()


def _imported() -> Any:
    try:
        for part in ("fn", "types"):
            import_module(f"nvidia.dali.{part}")
        return import_module("nvidia.dali")
    except ImportError as problem:
        raise MissingExtraError(
            f"NVIDIA DALI cannot be imported ({problem}): pip install 'hpcai-suite[dali]', or read without it: data.reader=direct"
        ) from problem


def _short(problem: Exception) -> str:
    """DALI's message, without the place in our code where the operator was defined."""
    text = str(problem).rpartition("encountered:")[2].partition("Current pipeline object")[0].partition("C++ context")[0]
    return " ".join(text.split()) or type(problem).__name__


# ---- the loader


class _Flow(_Course):
    """An epoch on its way through a graph, which is made when its first samples are there."""

    def __init__(self, plan: _Plan, ahead: Ahead) -> None:
        super().__init__(plan, ahead)
        self.graph: _Graph | None = None
        self.started = 0  # batches in the graph
        self.part = next(self.parts, None)

    def close(self) -> None:
        super().close()
        if self.graph is not None and self.graph.under_way:
            self.graph.close()


class DaliLoader(Loader):
    """``Loader``, with DALI between the samples and the batch. The same sampler gives the same samples at the same place.

    ``source.sample(index, epoch)`` -> dict of arrays is prepared ahead by ``workers`` threads, within ``prefetch`` bytes; two
    batches more are in DALI, which works with as many threads again, on the mesh's device. A batch is a dict of tensors by field,
    or what ``collect`` makes of it; a source's own ``collate`` is not asked. It is in order with the caller's current stream, and
    must not be used on another one.

    Sizes that differ within a batch, a crop that is larger than its sample, and values that DALI does not know raise DataError with
    field and index; so does all that DALI itself refuses. There is no on_bad_sample (a sample that cannot be read stops the run)
    and no order "ready" (``late()`` is always empty); whether values are finite is for the source to see.
    Raises MissingExtraError without DALI.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, fields: Sequence[Field], *, name: str, sampler: Sampler | None = None,
        seed: int = 0, shuffle: bool = True, last: Literal["drop", "pad", "keep"] = "drop", accumulate: int = 1, workers: int = 2,
        prefetch: int = 1 << 30, collect: Callable[[dict[str, Tensor]], Any] | None = None, patience: float = 600.0,
    ) -> None:  # fmt: skip
        self.fields, self.seed = tuple(fields), seed
        names = [field.name for field in self.fields]
        if not names or len(set(names)) < len(names):
            raise DataError(f"{name}: fields {', '.join(names) or 'none'}; expected at least one, each name once")
        _imported()
        super().__init__(
            source, batch, mesh, name=name, sampler=sampler, seed=seed, shuffle=shuffle, last=last, accumulate=accumulate,
            workers=workers, prefetch=prefetch, patience=patience,
        )  # fmt: skip
        self._collect = collect
        self._first: tuple[int, tuple[np.ndarray, ...]] | None = None  # a sample to which all others are alike, and its index
        self._first_lock = threading.Lock()
        self._graph: _Graph | None = None

    def close(self) -> None:
        """End DALI, workers, and the source where it wants that."""
        if self._graph is not None:
            self._graph.close()
        super().close()

    # ---- samples

    def _course(self, plan: _Plan, ahead: Ahead) -> _Flow:
        return _Flow(plan, ahead)

    def _prepare(self, task: Task, worker: int) -> tuple[_Item, int]:
        try:
            sample = self.source.sample(task.index, task.epoch)
            sample = sample._asdict() if hasattr(sample, "_asdict") else sample
            arrays = tuple(_array(field, sample) for field in self.fields)
            self._compare(task.index, arrays)
        except DataError as problem:
            raise DataError(f"{self.name}, rank {self._rank}, sample {task.index}: {problem}") from problem
        return _Item(arrays, draw(self.seed, task.epoch, task.position)), tree_bytes(arrays)

    def _compare(self, index: int, arrays: tuple[np.ndarray, ...]) -> None:
        with self._first_lock:
            self._first = self._first or (index, tuple(np.empty([0] * x.ndim, x.dtype) for x in arrays))
            other, first = self._first
        for field, x, like in zip(self.fields, arrays, first):
            if (x.dtype, x.ndim) != (like.dtype, like.ndim):
                raise DataError(
                    f"field '{field.name}': {x.dtype} with {x.ndim} dims, but {like.dtype} with {like.ndim} in sample {other}; all "
                    "samples need the same"
                )

    # ---- batches

    def _batches(self, course: _Flow, following: _Flow | None) -> Iterator[Any]:  # type: ignore[override]
        self._fill(course, wait=True)
        while course.graph is not None and course.started:
            number, tasks, tensors = course.graph.finish()
            course.started -= 1
            self._fill(course, wait=False)  # the next batches are made while this one is computed with
            if course.part is None and following is not None:
                self._fill(following, wait=False)
            course.plan.deliver(number, tasks)
            batch = dict(zip((field.name for field in self.fields), tensors))
            del tensors
            yield batch if self._collect is None else self._collect(batch)
            del batch
            self._fill(course, wait=True)

    def _fill(self, flow: _Flow, wait: bool) -> None:
        """Start batches as long as there is room and their samples are ready; ``wait`` for those of one if there is none."""
        while flow.part is not None and (self._graph is None or self._graph.is_closed or self._graph.has_room):
            number, positions = flow.part
            found = flow.ahead.take(flow.plan.epoch, len(positions), positions.tolist(), wait and not flow.started)
            if found is None:
                return
            if self._graph is None or self._graph.is_closed:
                assert self._first is not None
                self._graph = _Graph(
                    self.fields, self._first[1], batch=self.size, threads=self._workers, device=self.device,
                    name=f"{self.name}, rank {self._rank}", describe=self.source.describe,
                )  # fmt: skip
            flow.graph = self._graph
            flow.graph.start(number, found)
            flow.started += 1
            flow.part = next(flow.parts, None)
