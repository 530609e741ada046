"""A data loader with the operators of NVIDIA DALI, on the CPU or the GPU: decode, crop, flip, normalize.

Order and random numbers are not DALI's: random numbers of a sample are a pure function of (seed, epoch, position), and an input
of the pipeline. There is hence no state to save, and a resumed run gets the same batches on any number of ranks.

Observed with DALI 2.4.0, and tested: inputs are not copied (``no_copy``), and outputs have memory of their own, which torch takes
over through DLPack, so that later batches do not overwrite it. DALI guesses a layout for an array without one, and then flips the
wrong dims.
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

from hpcai.data.collate import tree_bytes
from hpcai.data.loader import Loader, Source, _ActiveEpoch, _EpochPlan
from hpcai.data.prefetch import PrefetchQueue, Ready, Task
from hpcai.data.sampler import Sampler
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError, MissingExtraError

_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "uint16": "UINT16", "int16": "INT16", "uint32": "UINT32", "int32": "INT32",
    "uint64": "UINT64", "int64": "INT64", "float16": "FLOAT16", "float32": "FLOAT", "float64": "FLOAT64",
}  # fmt: skip
_DEPTH = 2  # batches in flight in DALI


@dataclass(frozen=True)
class Field:
    """One array of a sample. An encoded image (PNG, JPEG) is an array [bytes] uint8, or bytes.

    Args:
        layout: The names of its dims for DALI, such as HWC or CDHW, or empty.
        operators: ``operators(x, random)`` returns the output node of the pipeline. ``x`` is the node of the array, on the CPU, and
            ``random`` that of eight random numbers in [0, 1), equal for all fields of a sample and new in each epoch. For example
            ``lambda x, random: fn.crop(x, crop=(64, 64), crop_pos_x=random[0], crop_pos_y=random[1])``, fn of ``nvidia.dali``.
        inputs: The names of fields whose nodes are further arguments of ``operators``.
        output: Whether the batch has the field, or only others use it.
    """

    name: str
    layout: str = ""
    operators: Callable[..., Any] | None = None
    inputs: tuple[str, ...] = ()
    output: bool = True


def random_numbers(seed: int, epoch: int, position: int) -> np.ndarray:
    """Return the random numbers of a sample in [0, 1).   [8] float32"""
    return np.random.Generator(np.random.PCG64([seed, epoch, position, 0xDA11])).random(8, np.float32)


def _array(field: Field, sample: Any) -> np.ndarray:
    label = f"field '{field.name}'"
    if not isinstance(sample, Mapping) or field.name not in sample:
        has = ", ".join(map(str, sample)) or "nothing" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise DataError(f"{label}: is not in the sample, which has {has}; sample() returns a dict with an array for each field")
    value = sample[field.name]
    if isinstance(value, Tensor):
        value = value.numpy()
    x = np.frombuffer(value, np.uint8) if isinstance(value, bytes | bytearray | memoryview) else np.asarray(value)
    if x.dtype.name not in _TYPES or not x.dtype.isnative:
        raise DataError(f"{label}: values of {x.dtype.str}, expected {', '.join(_TYPES)} in this machine's byte order: use .astype")
    if field.layout and x.ndim != len(field.layout):
        raise DataError(f"{label}: an array of shape {x.shape}, but layout {field.layout!r} has {len(field.layout)} dims")
    return np.asarray(x, order="C")


class _Item(NamedTuple):
    """A sample as pipeline input: an array for each field, and random numbers."""

    arrays: tuple[np.ndarray, ...]
    random: np.ndarray


class _Pipeline:
    """A DALI pipeline over ``fields``, with up to two batches of up to ``batch`` samples in flight.

    Outputs on the CPU are copied to the GPU, if the device is one. All samples have the dtypes and numbers of dims of ``first``.
    Raises DataError, with ``name`` and the samples by ``describe``, for errors of DALI.
    """

    def __init__(
        self, fields: Sequence[Field], first: Sequence[np.ndarray], *, batch: int, threads: int, device: torch.device, name: str,
        describe: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._dali, self._fields, self._device, self._name, self._describe = _import_dali(), fields, device, name, describe
        self._on_gpu, self._outputs = device.type == "cuda", [field for field in fields if field.output]
        index = None
        if self._on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
        self.in_flight: deque[tuple[int, Sequence[Ready]]] = deque()  # number and samples of each batch
        # exec_dynamic, which DLPack needs: only then the memory of outputs is not reused.
        with self._naming_samples(()):
            self._pipeline: Any = self._dali.Pipeline(
                batch_size=batch, num_threads=threads, device_id=index, prefetch_queue_depth=_DEPTH, exec_dynamic=True, seed=0
            )
            with self._pipeline:
                random = self._dali.fn.external_source(name="drawn", dtype=self._dali.types.FLOAT, ndim=1)
                nodes = {field.name: self._input(i, field, x) for i, (field, x) in enumerate(zip(fields, first))}
                outputs = [self._define(field, nodes, random) for field in self._outputs]
                self._pipeline.set_outputs(*outputs, random)  # otherwise DALI prunes an unused input, and refuses to be fed
            self._pipeline.build()
        self._pipeline._first_iter = False  # otherwise the first schedule_run needs all batches of the prefetch queue
        self._uploading: deque[tuple[torch.cuda.Event, Any]] = deque()

    def _input(self, i: int, field: Field, first: np.ndarray) -> Any:
        kwargs = {"layout": field.layout} if field.layout else {}
        dtype = getattr(self._dali.types, _TYPES[first.dtype.name])
        return self._dali.fn.external_source(name=f"field{i}", no_copy=True, dtype=dtype, ndim=first.ndim, **kwargs)

    def _define(self, field: Field, nodes: Mapping[str, Any], random: Any) -> Any:
        x = nodes[field.name]
        if field.operators is not None:
            x = field.operators(x, random, *(nodes[name] for name in field.inputs))
        return x.gpu() if self._on_gpu and x.device == "cpu" else x

    @property
    def is_closed(self) -> bool:
        return self._pipeline is None

    def start(self, number: int, samples: Sequence[Ready]) -> None:
        """Feed a batch, and start DALI on it."""
        self.in_flight.append((number, samples))
        with self._naming_samples(self.in_flight[0][1]):
            for i in range(len(self._fields)):
                self._pipeline.feed_input(f"field{i}", [ready.sample.arrays[i] for ready in samples])
            self._pipeline.feed_input("drawn", [ready.sample.random for ready in samples])
            self._pipeline.schedule_run()

    def finish(self) -> tuple[int, list[Task], list[Tensor]]:
        """Return number, tasks and tensors of the oldest batch. On a GPU the host does not wait."""
        number, samples = self.in_flight[0]
        stream = torch.cuda.current_stream(self._device) if self._on_gpu else None
        with self._naming_samples(samples), torch.cuda.device(self._device) if self._on_gpu else nullcontext():
            tensors = [self._tensor(field, output) for field, output in zip(self._outputs, self._pipeline.share_outputs(stream))]
            self._pipeline.release_outputs()
            if stream is not None:
                done = torch.cuda.Event()
                done.record(stream)
                self._uploading.append((done, samples))
        while self._uploading and self._uploading[0][0].query():
            self._uploading.popleft()
        self.in_flight.popleft()
        return number, [ready.task for ready in samples], tensors

    def _tensor(self, field: Field, output: Any) -> Tensor:
        if not output.is_dense_tensor():
            shapes = ", ".join(map(str, sorted(set(map(tuple, output.shape())))))
            raise DataError(f"field '{field.name}': shapes {shapes} in one batch; crop to one size, or make batches of one sample")
        return torch.from_dlpack(output.as_tensor())

    @contextmanager
    def _naming_samples(self, samples: Sequence[Ready]) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            names = ", ".join(f"{task.index} ({self._describe(task.index)})" for task, _ in samples[:8])
            if isinstance(problem, DataError):  # from checks of this module
                raise DataError(f"{self._name}, batch of samples {names}: {problem}") from problem
            context = f", in or after the batch of samples {names}" if names else ""  # DALI runs ahead
            traceback.clear_frames(problem.__traceback__)  # they reference DALI's threads
            # The message of DALI, without the traceback of the operator's definition.
            text = str(problem).rpartition("encountered:")[2].partition("Current pipeline object")[0].partition("C++ context")[0]
            reason = " ".join(text.split()) or type(problem).__name__
            raise DataError(f"{self._name}{context}: DALI stops: {reason}") from problem

    def close(self) -> None:
        """Stop the threads of DALI, then release its input arrays."""
        self._pipeline = None
        self.in_flight.clear()
        for done, _ in self._uploading:
            done.synchronize()
        self._uploading.clear()


def _import_dali() -> Any:
    try:
        for part in ("fn", "types"):
            import_module(f"nvidia.dali.{part}")
        return import_module("nvidia.dali")
    except ImportError as problem:
        fault = f"NVIDIA DALI cannot be imported ({problem})"
        raise MissingExtraError(f"{fault}: pip install 'hpcai-suite[dali]', or read without it: data.reader=direct") from problem


class _DaliEpoch(_ActiveEpoch):
    """A running epoch with a pipeline, which is built when the first samples are ready."""

    def __init__(self, plan: _EpochPlan, queue: PrefetchQueue) -> None:
        super().__init__(plan, queue)
        self.pipeline: _Pipeline | None = None
        self.in_flight = 0  # batches in the pipeline
        self.pending = next(self.remaining, None)

    def close(self) -> None:
        super().close()
        if self.pipeline is not None and self.pipeline.in_flight:
            self.pipeline.close()


class DaliLoader(Loader):
    """A ``Loader`` that builds batches by DALI. Samples have the same order and positions as in ``Loader``.

    Dicts of arrays, ``source.sample(index, epoch)``, are prefetched by ``workers`` threads within ``prefetch`` bytes. Two further
    batches are in DALI, which has as many threads, on the device of the mesh. A batch is a dict of tensors by field, or the
    ``make_batch`` of it; ``collate`` of the source is not called. It is ordered with the current stream of the caller, and must not
    be used on another.

    Sizes that differ within a batch, a crop larger than its sample, dtypes unknown to DALI, and errors of DALI raise DataError with
    field and index. There is no ``on_bad_sample`` (a bad sample stops the run) and no ``ready`` order (``deferred()`` is empty).
    The source must check that values are finite. Raises MissingExtraError without DALI.
    """

    def __init__(
        self, source: Source, batch: int, mesh: Mesh, fields: Sequence[Field], *, name: str, sampler: Sampler | None = None,
        seed: int = 0, shuffle: bool = True, last_batch: Literal["drop", "pad", "keep"] = "drop", accumulate: int = 1,
        workers: int = 2, prefetch: int = 1 << 30, make_batch: Callable[[dict[str, Tensor]], Any] | None = None,
        patience: float = 600.0,
    ) -> None:  # fmt: skip
        self.fields, self.seed = tuple(fields), seed
        names = [field.name for field in self.fields]
        if not names or len(set(names)) < len(names):
            raise DataError(f"{name}: fields {', '.join(names) or 'none'}; expected at least one, each name once")
        _import_dali()
        super().__init__(
            source, batch, mesh, name=name, sampler=sampler, seed=seed, shuffle=shuffle, last_batch=last_batch,
            accumulate=accumulate, workers=workers, prefetch=prefetch, patience=patience,
        )  # fmt: skip
        self._make_batch = make_batch
        self._reference: tuple[int, tuple[np.ndarray, ...]] | None = None  # index, dtypes and dims of a sample that all must match
        self._reference_lock = threading.Lock()
        self._pipeline: _Pipeline | None = None

    def close(self) -> None:
        """Stop DALI and the workers, and close the source if it has ``close``."""
        if self._pipeline is not None:
            self._pipeline.close()
        super().close()

    def _new_epoch(self, plan: _EpochPlan, queue: PrefetchQueue) -> _DaliEpoch:
        return _DaliEpoch(plan, queue)

    def _prepare(self, task: Task, worker: int) -> tuple[_Item, int]:
        try:
            sample = self.source.sample(task.index, task.epoch)
            sample = sample._asdict() if hasattr(sample, "_asdict") else sample
            arrays = tuple(_array(field, sample) for field in self.fields)
            with self._reference_lock:
                self._reference = self._reference or (task.index, tuple(np.empty([0] * x.ndim, x.dtype) for x in arrays))
                other, first = self._reference
            for field, x, like in zip(self.fields, arrays, first):
                if (x.dtype, x.ndim) != (like.dtype, like.ndim):
                    text = f"{x.dtype} with {x.ndim} dims, but {like.dtype} with {like.ndim} in sample {other}"
                    raise DataError(f"field '{field.name}': {text}; all samples need the same")
        except DataError as problem:
            raise DataError(f"{self.name}, rank {self._rank}, sample {task.index}: {problem}") from problem
        return _Item(arrays, random_numbers(self.seed, task.epoch, task.position)), tree_bytes(arrays)

    def _batches(self, active: _DaliEpoch, following: _DaliEpoch | None) -> Iterator[Any]:  # type: ignore[override]
        self._fill(active, wait=True)
        while active.pipeline is not None and active.in_flight:
            number, tasks, tensors = active.pipeline.finish()
            active.in_flight -= 1
            self._fill(active, wait=False)  # the next batches are built during the computation of this one
            if active.pending is None and following is not None:
                self._fill(following, wait=False)
            active.plan.record(number, tasks)
            batch = dict(zip((field.name for field in self.fields if field.output), tensors))
            del tensors
            yield batch if self._make_batch is None else self._make_batch(batch)
            del batch
            self._fill(active, wait=True)

    def _fill(self, active: _DaliEpoch, wait: bool) -> None:
        """Start batches while the pipeline has room and samples are ready. With ``wait``, wait for one if none is in flight."""
        while active.pending is not None and (self._pipeline is None or len(self._pipeline.in_flight) < _DEPTH):
            number, positions = active.pending
            samples = active.queue.take(active.plan.epoch, len(positions), positions.tolist(), wait and not active.in_flight)
            if samples is None:
                return
            if self._pipeline is None or self._pipeline.is_closed:
                assert self._reference is not None
                self._pipeline = _Pipeline(
                    self.fields, self._reference[1], batch=self.batch_size, threads=self._workers, device=self.device,
                    name=f"{self.name}, rank {self._rank}", describe=self.source.describe,
                )  # fmt: skip
            active.pipeline = self._pipeline
            active.pipeline.start(number, samples)
            active.in_flight += 1
            active.pending = next(active.remaining, None)
