"""Volumes and images through NVIDIA DALI: cropped, flipped, normalised and decoded by its operators, on the CPU or the GPU.

Order and random numbers are ours: each crop and flip is a pure function of (seed, epoch, position), fed to the pipeline beside
the sample. So there is no state to save, and a resumed run gets the same batches on any number of processes. ``apply`` is the
whole pipeline in plain numpy.

Found with DALI 2.4.0, and held by the tests: it has no bfloat16, so that such a field leaves it as float32 and is rounded by
torch on the device. Arrays go in without a copy (``no_copy``); what comes out has memory of its own, which torch takes over
through DLPack: an earlier batch stays as it is while later ones are made. DALI guesses the layout of an array that has none,
and then flips the wrong dims; a slice with a negative step gives wrong values along the first dim. Neither is used here.
"""

import io
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcai.data.ahead import Ahead, Ready, Task
from hpcai.data.assemble import tree_bytes
from hpcai.data.layout import npy
from hpcai.data.loader import Loader, Source, _Course, _Plan
from hpcai.data.sampler import Sampler
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, MissingExtraError

_LAYOUTS = ("", "HW", "HWC", "CHW", "DHW", "DHWC", "CDHW")
_SPATIAL = "DHW"
_DIMS = 8
_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16", "uint32": "UINT32", "int32": "INT32",
    "uint64": "UINT64", "int64": "INT64", "float16": "FLOAT16", "float32": "FLOAT", "float64": "FLOAT64",
}  # fmt: skip
_MADE = (*[name for name in _TYPES if name != "bool"], "bfloat16")
_MOVED = {"bool": "UINT8", "float16": "INT16"}  # flip and slice do not know these, but do know integers of their size
_NORMALISED = ("uint8", "int16", "uint16", "int32", "float16", "float32")  # what crop_mirror_normalize takes
_ONE = 1 << 30
"""A drawn number, divided by this, lies in [0, 1). DALI's constants have 32 bits."""
_DEEPEST = 8
_READ_AHEAD = 2  # batches that DALI's own reader is ahead: a third faster than one

Draws = Mapping[int, np.ndarray]


# ---- what is done with an array


@dataclass(frozen=True)
class Field:
    """One array of a sample, and what is done with it, in this order: decoded, cropped, flipped, log(1 + x), normalised, cast,
    transposed.

    ``layout`` names the dims: HW, HWC, CHW, DHW, DHWC or CDHW; an empty one leaves them without names, and then nothing can be
    flipped. ``decode``: the array is an encoded image (PNG, JPEG) [bytes] uint8; its layout is HWC, with the channels it has.
    ``crop`` has a size for each dim but C (for the leading dims, without a layout). ``flip`` lists dims that are reversed at
    random, each half of the time. Fields with the same ``geometry`` are cropped and flipped alike.
    log(1 + x), for x above -1, and (x - ``mean``) / ``std``, with one number each or one per channel, are float32. A cast to
    integers rounds, a half away from 0, and keeps within their range. ``transpose`` is the order of the dims that come out.
    Raises DataError, naming the field, for what contradicts itself.
    """

    name: str
    layout: str = ""
    decode: bool = False
    crop: tuple[int, ...] | None = None
    crop_at: Literal["center", "random"] = "center"
    flip: tuple[int, ...] = ()
    log1p: bool = False
    mean: float | Sequence[float] | None = None
    std: float | Sequence[float] | None = None
    dtype: str | None = None
    transpose: tuple[int, ...] | None = None
    geometry: int = 0

    def __post_init__(self) -> None:
        where, dims = f"field '{self.name}'", len(self.layout)
        if self.layout not in _LAYOUTS:
            raise DataError(f"{where}: layout {self.layout!r}, expected one of {', '.join(map(repr, _LAYOUTS))}")
        if self.decode and self.layout != "HWC":
            raise DataError(f"{where}: a decoded image is HWC, but layout is {self.layout!r}; use transpose for another order")
        if self.crop_at not in ("center", "random"):
            raise DataError(f"{where}: crop_at {self.crop_at!r}, expected center or random")
        if self.crop is not None and (min(self.crop, default=0) < 1 or (dims and len(self.crop) != len(self.spatial))):
            letters = self.layout.replace("C", "") or "the leading dims"
            raise DataError(f"{where}: crop {self.crop}, expected a size of at least 1 for each of {letters}")
        if unnamed := [dim for dim in self.flip if not 0 <= dim < dims or self.layout[dim] == "C"]:
            raise DataError(f"{where}: dim {unnamed[0]} is flipped, but only D, H and W can be, and layout is {self.layout!r}")
        if self.dtype not in (None, *_MADE):
            raise DataError(f"{where}: dtype {self.dtype!r}, expected None or one of {', '.join(_MADE)}")
        order = self.transpose
        if order is not None and (sorted(order) != list(range(len(order))) or (dims and len(order) != dims)):
            raise DataError(f"{where}: transpose {order}, expected each of the {dims or 'n'} dims once")
        means, stds = self.normal
        if len(means) != len(stds):
            raise DataError(f"{where}: {len(means)} means and {len(stds)} standard deviations; give as many of each, or one")
        if len(means) > 1 and "C" not in self.layout:
            raise DataError(f"{where}: {len(means)} means, one per channel, but layout {self.layout!r} has no C")
        if not np.isfinite([*means, *stds]).all() or 0 in stds:
            raise DataError(f"{where}: mean {self.mean}, std {self.std}; expected finite numbers, and a std that is not 0")

    @property
    def spatial(self) -> tuple[int, ...]:
        """Dims that are cropped."""
        if not self.layout:
            return tuple(range(len(self.crop or ())))
        return tuple(dim for dim, letter in enumerate(self.layout) if letter != "C")

    @property
    def normal(self) -> tuple[list[float], list[float]]:
        """Means and standard deviations: one of each, or one per channel."""
        means = np.atleast_1d(0.0 if self.mean is None else self.mean).astype(float)
        stds = np.atleast_1d(1.0 if self.std is None else self.std).astype(float)
        size = max(len(means), len(stds))
        rows = [row if len(row) > 1 else row.repeat(size) for row in (means, stds)]
        return rows[0].tolist(), rows[1].tolist()

    @property
    def crops_at_random(self) -> bool:
        return self.crop is not None and self.crop_at == "random"

    @property
    def is_normalised(self) -> bool:
        return self.mean is not None or self.std is not None

    @property
    def slots(self) -> list[int]:
        """Which of the numbers drawn for a geometry belong to the dims that are cropped."""
        return [_slot(self.layout, dim) for dim in self.spatial]

    def after(self, shape: Sequence[int], dtype: str) -> int:
        """The bytes of what becomes of an array. Raises DataError for one that does not fit."""
        where, found = f"field '{self.name}'", tuple(shape)
        if self.layout and len(found) != len(self.layout):
            raise DataError(f"{where}: an array of shape {found}, but layout {self.layout!r} has {len(self.layout)} dims")
        if len(found) > _DIMS or len(self.spatial if self.crop else ()) > len(found):
            raise DataError(f"{where}: an array of shape {found}; crop {self.crop} needs as many dims, and {_DIMS} are the most")
        if self.crop and any(n < size for n, size in zip((found[dim] for dim in self.spatial), self.crop)):
            raise DataError(f"{where}: a crop of {self.crop} from an array of shape {found}; make it smaller, or the sample larger")
        channels = len(self.normal[0])
        if channels > 1 and found[self.layout.index("C")] != channels:
            raise DataError(f"{where}: means of {channels} channels for an array of shape {found}, layout {self.layout!r}")
        if self.transpose is not None and len(self.transpose) != len(found):
            raise DataError(f"{where}: transpose {self.transpose} for an array of shape {found}")
        sizes = list(found)
        for dim, size in zip(self.spatial, self.crop or ()):
            sizes[dim] = size
        return math.prod(sizes) * np.dtype(self.made(dtype)).itemsize

    def made(self, dtype: str) -> str:
        """The dtype with which values of ``dtype`` leave DALI."""
        if self.dtype == "bfloat16":
            return "float32"
        return self.dtype or ("float32" if self.log1p or self.is_normalised else dtype)


def _slot(layout: str, dim: int) -> int:
    return "CDHW".index(layout[dim]) if layout else 4 + dim


def draw(fields: Sequence[Field], seed: int, epoch: int, position: int) -> dict[int, np.ndarray]:
    """For each geometry with something random: the numbers in [0, 2**30) that place a crop, and the bits that flip.
    [2, slots]"""
    found = {}
    for g in {f.geometry for f in fields if f.flip or f.crops_at_random}:
        generator = np.random.Generator(np.random.PCG64([seed, epoch, position, g % (1 << 32), 0xDA11]))
        found[g] = np.stack([generator.integers(0, _ONE, 4 + _DIMS), generator.integers(0, 2, 4 + _DIMS)])
    return found


def apply(fields: Sequence[Field], sample: Mapping[str, Any], draws: Draws) -> dict[str, np.ndarray]:
    """What the pipeline makes of one sample, in numpy. A bfloat16 field comes as float32 with values that bfloat16 has."""
    return {field.name: _apply(field, _array(field, sample), draws.get(field.geometry, _NO_DRAW)) for field in fields}


_NO_DRAW = np.zeros((2, 4 + _DIMS), np.int64)


def _apply(field: Field, x: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    if field.decode:
        x = _decoded(x)
    field.after(x.shape, x.dtype.name)
    for dim, slot, size in zip(field.spatial, field.slots, field.crop or ()):
        free = x.shape[dim] - size
        start = free // 2 if field.crop_at == "center" else int(drawn[0, slot]) * (free + 1) // _ONE
        x = x.take(range(start, start + size), dim)
    x = np.flip(x, tuple(dim for dim in field.flip if drawn[1, _slot(field.layout, dim)]))
    if field.log1p:
        x = np.log1p(x.astype(np.float32))
    if field.is_normalised:
        rows = [np.asarray(row, np.float32) for row in field.normal]
        if "C" in field.layout:
            rows = [row.reshape([-1 if letter == "C" else 1 for letter in field.layout]) for row in rows]
        x = (x.astype(np.float32) - rows[0]) / rows[1]
    x = _cast(x, field.dtype)
    return np.asarray(x if field.transpose is None else x.transpose(field.transpose), order="C")


def _cast(x: np.ndarray, dtype: str | None) -> np.ndarray:
    if dtype is None:
        return x
    if dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if np.dtype(dtype).kind not in "iu" or x.dtype.kind == "b":
        with np.errstate(over="ignore"):
            return x.astype(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if x.dtype.kind == "f":
        x = x.astype(np.float64)
        return np.clip(np.trunc(x + np.copysign(0.5, x)), low, high).astype(dtype)
    return np.clip(x, max(low, np.iinfo(x.dtype).min), min(high, np.iinfo(x.dtype).max)).astype(dtype)


def _decoded(x: np.ndarray) -> np.ndarray:
    from PIL import Image

    image = np.asarray(Image.open(io.BytesIO(x.tobytes())))
    return image if image.ndim == 3 else image[..., None]


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
    return np.asarray(x, order="C")


class _Kind(NamedTuple):
    """What a sample says about a field; all samples agree with the first one in dtype and dims."""

    dtype: str
    dims: int
    shape: tuple[int, ...] | None
    nbytes: int


def _kind(field: Field, shape: tuple[int, ...], dtype: str, nbytes: int) -> _Kind:
    if field.decode:  # its size is known to the decoder only
        size = math.prod(field.crop) * 3 * 4 if field.crop else 16 * nbytes
        return _Kind(dtype, 1, None, nbytes + size)
    return _Kind(dtype, len(shape), shape, nbytes + field.after(shape, dtype))


def _agree(fields: Sequence[Field], kinds: Sequence[_Kind]) -> None:
    """Raise DataError for fields that are cropped at random places together and differ in their sizes."""
    found: dict[tuple[int, int], tuple[str, int, int]] = {}
    for field, kind in zip(fields, kinds):
        if kind.shape is None or not field.crops_at_random:
            continue
        for dim, slot, size in zip(field.spatial, field.slots, field.crop or ()):
            name, n, other = found.setdefault((field.geometry, slot), (field.name, kind.shape[dim], size))
            if (n, other) != (kind.shape[dim], size):
                raise DataError(
                    f"fields '{name}' and '{field.name}' are cropped together, but {other} of {n} and {size} of {kind.shape[dim]} "
                    f"along dim {dim}; give them another geometry, or make their sizes equal"
                )


def _check_together(name: str, fields: Sequence[Field]) -> None:
    names = [field.name for field in fields]
    if not names or len(set(names)) < len(names):
        raise DataError(f"{name}: fields {', '.join(names) or 'none'}; expected at least one, each name once")
    for field in fields:
        for other in fields:
            if field.geometry == other.geometry:
                flipped, also = ({f.layout[dim] for dim in f.flip} for f in (field, other))
                if missing := sorted((flipped - also) & set(other.layout)):
                    raise DataError(
                        f"{name}: fields '{field.name}' and '{other.name}' share geometry {field.geometry}, but only the first is "
                        f"flipped along {missing[0]}; flip both, or give them another geometry"
                    )


# ---- the graph


class _Item(NamedTuple):
    """A sample on its way into the graph: its arrays (none where DALI reads the files), and what was drawn for each field."""

    arrays: tuple[np.ndarray, ...]
    crops: tuple[np.ndarray | None, ...]
    flips: tuple[np.ndarray | None, ...]


class _UnderWay(NamedTuple):
    number: int
    tasks: list[Task]
    arrays: list[tuple[np.ndarray, ...]]


class _Graph:
    """A DALI pipeline over ``fields``, with up to ``depth`` batches of up to ``batch`` samples in it.

    ``files`` has the files of each field, ``batch`` of them for each batch; without it samples are fed. The operators are the
    same on the CPU and the GPU. Only crops are always made where the array lies, so that nothing else is uploaded.
    Raises DataError, with ``name`` and the samples by ``describe``, for what DALI refuses.
    """

    def __init__(
        self, fields: Sequence[Field], kinds: Sequence[_Kind], *, batch: int, depth: int, threads: int, device: torch.device,
        on_gpu: bool, name: str, describe: Callable[[int], str], files: Sequence[Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self._dali, self._fields, self.depth, self.batch = _imported(), fields, depth, batch
        self._name, self._describe = name, describe
        self._device, self._on_gpu, self._files = device, on_gpu, files
        self._dtypes = [getattr(torch, field.made(kind.dtype)) for field, kind in zip(fields, kinds)]
        index = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
        self.under_way: deque[_UnderWay] = deque()
        # DLPack needs exec_dynamic: only then an output has memory that is not used again.
        with self._named(()):
            self._pipe: Any = self._dali.Pipeline(
                batch_size=batch, num_threads=threads, device_id=index, prefetch_queue_depth=depth, exec_dynamic=True, seed=0
            )
            with self._pipe:
                self._pipe.set_outputs(*(self._define(i, field, kind) for i, (field, kind) in enumerate(zip(fields, kinds))))
            self._pipe.build()
        self._pipe._first_iter = False  # otherwise the first schedule_run wants ``depth`` batches before it gives one
        self._uploading: deque[tuple[torch.cuda.Event, Any]] = deque()

    def _define(self, i: int, field: Field, kind: _Kind) -> Any:
        fn, types, log = self._dali.fn, self._dali.types, self._dali.math.log
        if self._files is not None:
            x = fn.readers.numpy(
                files=list(self._files[i]), use_o_direct=True, dont_use_mmap=True, prefetch_queue_depth=_READ_AHEAD
            )
            x = fn.reshape(x, layout=field.layout) if field.layout else x
        else:
            named = {"layout": field.layout} if field.layout and not field.decode else {}
            dtype = getattr(types, _TYPES[kind.dtype])
            x = fn.external_source(name=f"field{i}", no_copy=True, dtype=dtype, ndim=kind.dims, **named)
        floats = np.dtype(kind.dtype).kind == "f"
        if field.decode:
            x = fn.decoders.image(x, device="mixed" if self._on_gpu else "cpu", output_type=types.ANY_DATA)
        as_integers = kind.dtype in _MOVED and (field.crop or field.flip)
        if as_integers:
            x = fn.reinterpret(x, dtype=getattr(types, _MOVED[kind.dtype]))
        if field.crop is not None:
            x = self._cropped(i, field, x)
        if self._on_gpu and not field.decode:
            x = x.gpu()
        with_channel = field.layout in ("HW", "DHW") and (field.flip or field.is_normalised)
        layout = field.layout + "C" if with_channel else field.layout
        if with_channel:  # flip and crop_mirror_normalize know no others
            x = fn.expand_dims(x, axes=[len(field.layout)], new_axis_names="C")
        if field.flip:
            bits = fn.external_source(name=f"flip{i}", dtype=types.INT32, ndim=1)
            x = fn.flip(x, depthwise=bits[0] if "D" in layout else 0, vertical=bits[1], horizontal=bits[2])
        if as_integers:
            x = fn.reinterpret(x, dtype=getattr(types, _TYPES[kind.dtype]))
        if field.log1p:
            if floats or kind.dtype == "bool":
                x = fn.cast(x, dtype=types.FLOAT)
            above = x + 1.0
            # The second term is what 1 + x has lost of a small x, to first order.
            x = log(above) - ((above - 1.0) - x) / above if floats else log(above)
        order, now, made = field.transpose, "float32" if field.log1p else kind.dtype, field.made(kind.dtype)
        if field.is_normalised:
            x, order, now = self._normalised(field, layout, now, x)
        if made != now:
            x = fn.cast(x, dtype=getattr(types, _TYPES[made]))
        if with_channel:
            x = fn.squeeze(x, axes=[len(field.layout)])
        if order is not None:
            x = fn.transpose(x, perm=list(order))
        return x.gpu() if self._device.type == "cuda" and not self._on_gpu else x

    def _cropped(self, i: int, field: Field, x: Any) -> Any:
        fn, types = self._dali.fn, self._dali.types
        first, size = field.spatial[0], np.array(field.crop)
        free = x.shape(dtype=types.INT64)[first : first + len(size)] - types.Constant(size, dtype=types.INT64)
        if field.crop_at == "random":
            start = fn.external_source(name=f"crop{i}", dtype=types.INT64, ndim=1) * (free + 1) // _ONE
        else:
            start = free // 2
        return fn.slice(x, start=fn.cast(start, dtype=types.INT32), shape=size.tolist(), axes=list(field.spatial))

    def _normalised(self, field: Field, layout: str, now: str, x: Any) -> tuple[Any, tuple[int, ...] | None, str]:
        """(x - mean) / std, with the channels moved where that gives the wanted order; the order still to be made; the dtype."""
        fn, types = self._dali.fn, self._dali.types
        means, stds = field.normal
        order, out = field.transpose, layout
        if now not in _NORMALISED or not layout:
            x = fn.cast(x, dtype=types.FLOAT)
        if not layout:
            return (x - means[0]) / stds[0], order, "float32"
        if layout == field.layout and order is not None and (moved := "".join(layout[dim] for dim in order)) in _LAYOUTS:
            order, out = None, moved
        half = field.dtype == "float16"
        # One pass over the values, where single operators make five.
        x = fn.crop_mirror_normalize(x, mean=means, std=stds, output_layout=out, dtype=types.FLOAT16 if half else types.FLOAT)
        return x, order, "float16" if half else "float32"

    @property
    def has_room(self) -> bool:
        return len(self.under_way) < self.depth

    @property
    def is_closed(self) -> bool:
        return self._pipe is None

    def start(self, number: int, found: Sequence[Ready]) -> None:
        """Feed one batch, and let DALI begin with it."""
        items: list[_Item] = [ready.sample for ready in found]
        self.under_way.append(_UnderWay(number, [ready.task for ready in found], [item.arrays for item in items]))
        if self._files is not None:
            items += items[-1:] * (self.batch - len(items))  # the reader always gives whole batches
        with self._named(self.under_way[0].tasks):
            for i in range(len(self._fields)):
                if self._files is None:
                    self._pipe.feed_input(f"field{i}", [item.arrays[i] for item in items])
                for name, rows in (("crop", [item.crops[i] for item in items]), ("flip", [item.flips[i] for item in items])):
                    if rows[0] is not None:
                        self._pipe.feed_input(f"{name}{i}", rows)
            self._pipe.schedule_run()

    def finish(self) -> tuple[int, list[Task], list[Tensor]]:
        """Number, tasks and tensors of the oldest batch. On a GPU the host does not wait for it."""
        made = self.under_way[0]
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if cuda else None
        with self._named(made.tasks), torch.cuda.device(self._device) if cuda else nullcontext():
            outputs = self._pipe.share_outputs(stream)
            tensors = [self._tensor(i, output, len(made.tasks)) for i, output in enumerate(outputs)]
            self._pipe.release_outputs()
            if stream is not None:
                done = torch.cuda.Event()
                done.record(stream)
                self._uploading.append((done, made.arrays))
        while self._uploading and self._uploading[0][0].query():
            self._uploading.popleft()
        self.under_way.popleft()
        return made.number, made.tasks, tensors

    def _tensor(self, i: int, output: Any, count: int) -> Tensor:
        field = self._fields[i]
        if not output.is_dense_tensor():
            shapes = ", ".join(map(str, sorted(set(map(tuple, output.shape())))))
            raise DataError(f"field '{field.name}': shapes {shapes} in one batch; crop to one size, or make batches of one sample")
        tensor = torch.from_dlpack(output.as_tensor())[:count]
        if tensor.dtype != self._dtypes[i]:
            raise DataError(f"field '{field.name}': values of {tensor.dtype}, but {self._dtypes[i]} in the first sample")
        return tensor.to(torch.bfloat16) if field.dtype == "bfloat16" else tensor

    @contextmanager
    def _named(self, tasks: Sequence[Task]) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            names = ", ".join(f"{task.index} ({self._describe(task.index)})" for task in tasks[:8])
            if isinstance(problem, DataError):  # from our own checks
                raise DataError(f"{self._name}, batch of samples {names}: {problem}") from problem
            # DALI's reader is ahead, and may have failed with a later one: then DALI names the file.
            where = f", in or after the batch of samples {names}" if names else ""
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
        for part in ("fn", "types", "math"):
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

    ``reader``: ``external`` takes ``source.sample(index, epoch)`` -> dict of arrays, prepared ahead by ``workers`` threads;
    ``numpy`` has DALI read, past the page cache, the .npy files that ``source.files(index)`` -> {field: path} names (DALI
    checks all headers but the first, which we check; it reads up to two batches more than an epoch has). DALI works with as many
    threads again. A batch is a dict of tensors by field, or what ``collect`` makes of it; a source's own ``collate`` is not asked.
    ``device``: where the operators run; None is the mesh's. The batch is on the mesh's device either way, in order with the
    caller's current stream there, and must not be used on another one.

    Half of ``prefetch`` bytes is for samples as they were read; from the first sample's size the other half tells how many
    batches, 1 to 8, are in DALI at a time. Sizes that differ within a batch, a crop that is larger than its sample, and values
    that DALI does not know raise DataError with field and index; so does all that DALI itself refuses. There is no on_bad_sample
    (a sample that cannot be read stops the run) and no order "ready" (``late()`` is always empty); whether values are finite is
    for the source to see.
    Raises MissingExtraError without DALI.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, fields: Sequence[Field], *, name: str, sampler: Sampler | None = None,
        seed: int = 0, shuffle: bool = True, last: Literal["drop", "pad", "keep"] = "drop", accumulate: int = 1, workers: int = 2,
        prefetch: int = 1 << 30, reader: Literal["external", "numpy"] = "external",
        collect: Callable[[dict[str, Tensor]], Any] | None = None, device: Literal["cpu", "gpu"] | None = None,
        patience: float = 600.0,
    ) -> None:  # fmt: skip
        self.fields, self.reader, self.seed = tuple(fields), reader, seed
        _check_together(name, self.fields)
        if device == "gpu" and mesh.device.type != "cuda":
            raise DataError(f"{name}: DALI on the GPU, but the mesh is on the {mesh.device.type}; set device to cpu or None")
        if reader not in ("external", "numpy"):
            raise DataError(f"{name}: reader {reader!r}, expected external or numpy")
        if reader == "numpy" and not hasattr(source, "files"):
            raise DataError(f"{name}: reader is numpy, but a {type(source).__name__} has no files(index); set reader to external")
        if reader == "numpy" and (encoded := [field.name for field in self.fields if field.decode]):
            raise DataError(f"{name}: field '{encoded[0]}' is an encoded image, which no .npy file holds; set reader to external")
        _imported()
        super().__init__(
            source, batch, mesh, name=name, sampler=sampler, seed=seed, shuffle=shuffle, last=last, accumulate=accumulate,
            workers=workers, prefetch=prefetch // 2, patience=patience,
        )  # fmt: skip
        self._on_gpu = mesh.device.type == "cuda" and device != "cpu"
        self._collect = collect
        self._kinds: tuple[int, list[_Kind]] | None = None  # the first sample, and the kinds of its fields
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
        arrays = () if self.reader == "numpy" else self._arrays(task)
        draws = draw(self.fields, self.seed, task.epoch, task.position)
        crops = tuple(draws[f.geometry][0, f.slots] if f.crops_at_random else None for f in self.fields)
        flips = tuple(_bits(f, draws[f.geometry][1]) if f.flip else None for f in self.fields)
        item = _Item(arrays, crops, flips)
        return item, tree_bytes(item)

    def _arrays(self, task: Task) -> tuple[np.ndarray, ...]:
        try:
            sample = self.source.sample(task.index, task.epoch)
            sample = sample._asdict() if hasattr(sample, "_asdict") else sample
            arrays = tuple(_array(field, sample) for field in self.fields)
            self._compare(task.index, [_kind(f, x.shape, x.dtype.name, x.nbytes) for f, x in zip(self.fields, arrays)])
        except DataError as problem:
            raise DataError(f"{self.name}, rank {self._rank}, sample {task.index}: {problem}") from problem
        return arrays

    def _compare(self, index: int, kinds: list[_Kind]) -> None:
        _agree(self.fields, kinds)
        with self._first_lock:
            self._kinds = self._kinds or (index, kinds)
            other, first = self._kinds
        for field, kind, one in zip(self.fields, kinds, first):
            if (kind.dtype, kind.dims) != (one.dtype, one.dims):
                raise DataError(
                    f"field '{field.name}': {kind.dtype} with {kind.dims} dims, but {one.dtype} with {one.dims} in sample {other}; "
                    "all samples need the same"
                )

    # ---- batches

    def _batches(self, course: _Flow, following: _Flow | None) -> Iterator[Any]:  # type: ignore[override]
        try:
            self._fill(course, wait=True)
            while course.graph is not None and course.started:
                number, tasks, tensors = course.graph.finish()
                course.started -= 1
                self._fill(course, wait=False)  # the next batches are made while this one is computed with
                if course.part is None and following is not None:
                    if self.reader == "external":
                        following.graph = course.graph
                    self._fill(following, wait=False)
                course.plan.deliver(number, tasks)
                batch = dict(zip((field.name for field in self.fields), tensors))
                del tensors
                yield batch if self._collect is None else self._collect(batch)
                del batch
                self._fill(course, wait=True)
        finally:
            if self.reader == "numpy" and course.graph is not None:  # its reader knows the files of this epoch only
                course.graph.close()

    def _fill(self, flow: _Flow, wait: bool) -> None:
        """Start batches as long as there is room and their samples are ready; ``wait`` for those of one if there is none."""
        while flow.part is not None and (flow.graph is None or flow.graph.has_room):
            number, positions = flow.part
            found = flow.ahead.take(flow.plan.epoch, len(positions), positions.tolist(), wait and not flow.started)
            if found is None:
                return
            flow.graph = flow.graph or self._graph_of(flow.plan)
            flow.graph.start(number, found)
            flow.started += 1
            flow.part = next(flow.parts, None)

    def _graph_of(self, plan: _Plan) -> _Graph:
        """The graph that samples are fed to, used in all epochs, or one that reads the files of this epoch."""
        if self.reader == "external":
            if self._graph is None or self._graph.is_closed:
                self._graph = self._new_graph(self.size, -(-self.size // self.copies.size))
            return self._graph
        parts = [part for _, part in plan.parts()]
        batch = max(map(len, parts))
        rows = [self._at(plan.epoch, part).tolist() for part in parts]
        indices = [index for row in rows for index in row + row[-1:] * (batch - len(row))]
        found = {index: self._files(index) for index in dict.fromkeys(indices)}
        heads = [npy(path) for path in found[indices[0]]]
        try:
            kinds = [_kind(f, h.shape, h.dtype.name, (1 + _READ_AHEAD) * h.nbytes) for f, h in zip(self.fields, heads)]
            self._compare(indices[0], kinds)
        except DataError as problem:
            where = ", ".join(str(head.path) for head in heads)
            raise DataError(f"{self.name}, rank {self._rank}, sample {indices[0]} ({where}): {problem}") from problem
        return self._new_graph(batch, batch, [[str(found[index][i]) for index in indices] for i in range(len(self.fields))])

    def _files(self, index: int) -> list[Path]:
        found = self.source.files(index)  # type: ignore[attr-defined]
        if missing := [field.name for field in self.fields if field.name not in found]:
            raise DataError(f"{self.name}, sample {index}: files() names {', '.join(found) or 'none'}, but not '{missing[0]}'")
        return [Path(found[field.name]) for field in self.fields]

    def _new_graph(self, batch: int, part: int, files: Sequence[Sequence[str]] | None = None) -> _Graph:
        assert self._kinds is not None
        size = part * sum(kind.nbytes for kind in self._kinds[1])
        depth = min(max(self._prefetch // max(size, 1), 1), _DEEPEST)
        return _Graph(
            self.fields, self._kinds[1], batch=batch, depth=depth, threads=self._workers, device=self.device, on_gpu=self._on_gpu,
            name=f"{self.name}, rank {self._rank}", describe=self.source.describe, files=files,
        )  # fmt: skip


def _bits(field: Field, drawn: np.ndarray) -> np.ndarray:
    """Which of D, H and W are reversed.   [3] int32"""
    flipped = {field.layout[dim] for dim in field.flip}
    return np.array([drawn["CDHW".index(letter)] if letter in flipped else 0 for letter in _SPATIAL], np.int32)
