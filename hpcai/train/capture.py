"""A step as a CUDA Graph: recorded once for each shape of the batch, then started by one call.

What is recorded may depend on nothing that changes on the host: inputs lie in the graph's own memory; the learning rate, the
counters and the scale of the gradient are device tensors; random numbers come from the generator that the graph advances.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.data.assemble import tree_map
from hpcai.errors import ConfigError

_WARM = 3  # runs in which libraries choose their algorithms, and collectives connect, before anything is recorded
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive")


class Graph(Protocol):
    """Records what a function does on the device, and does it again."""

    def warm(self, function: Callable[[], Any]) -> None: ...

    def record(self, function: Callable[[], Any]) -> Any: ...

    def replay(self) -> None: ...


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``; all of a process share one pool of memory and are never replayed at the same time."""

    _pool: Any = None
    _stream: Any = None

    def __init__(self) -> None:
        if CudaGraph._pool is None:
            CudaGraph._pool, CudaGraph._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def warm(self, function: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        # thread_local: the loader's threads go on allocating and copying meanwhile.
        with torch.cuda.graph(self.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class _Slot:
    graph: Graph
    batch: Any
    values: Any


class Capture:
    """``capture(batch)`` does what ``function(batch)`` does, by a graph for each of up to ``limit`` shapes of the batch.

    ``untouched()`` is a context in which ``function`` leaves no trace but in scratch memory; warm-up runs are made inside it.
    ``traced``: also find the operation that cannot be recorded, which compiled code does not allow.
    """

    def __init__(
        self, function: Callable[[Any], Any], untouched: Callable[[], Any], limit: int, graph: Callable[[], Graph] = CudaGraph,
        traced: bool = True,
    ) -> None:  # fmt: skip
        self.function, self.untouched, self.limit, self.graph, self.traced = function, untouched, limit, graph, traced
        self._slots: dict[Any, _Slot] = {}
        self._copies = torch.cuda.Stream() if graph is CudaGraph else None
        self.device = torch.device("cpu" if self._copies is None else "cuda")

    def __call__(self, batch: Any) -> Any:
        key = shapes(batch)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._record(batch, key)
        self._fill(slot.batch, batch)
        slot.graph.replay()
        return tree_map(slot.values, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    def _record(self, batch: Any, key: Any) -> _Slot:
        if len(self._slots) >= self.limit:
            seen = "; ".join(str(k) for k in self._slots)
            raise ConfigError(
                f"step.capture: a batch of another shape, {key}, after {len(self._slots)} that were captured ({seen}); give "
                "batches of one shape (drop the last of an epoch), raise step.capture_shapes, or set step.capture=none"
            )
        static = tree_map(batch, lambda x: torch.empty_like(x, device=self.device).copy_(x) if isinstance(x, Tensor) else x)
        graph, last = self.graph(), _Last()
        with _no_collection(), self.untouched():
            try:
                graph.warm(lambda: self._run(static, _Trap()))
                with _no_synchronisation(self._copies is not None):
                    for _ in range(_WARM - 1):
                        graph.warm(lambda: self.function(static))
            except _HostReadError as read:
                raise ConfigError(f"step.capture: {read}; keep it on the device (torch.where), or set step.capture=none") from None
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                raise ConfigError(_reason(str(error), "")) from error
            try:
                values = graph.record(lambda: self._run(static, last))
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(_reason(str(error), last.operation)) from error
        return _Slot(graph, static, values)

    def _run(self, batch: Any, watch: TorchDispatchMode) -> Any:
        with watch if self.traced else nullcontext():
            return self.function(batch)

    def _fill(self, static: Any, batch: Any) -> None:
        """Copy a batch into the memory of the graph; tensors of the host are copied on a stream of their own."""
        pairs = list(zip(_tensors(static), _tensors(batch)))
        hosts = [(to, x) for to, x in pairs if self._copies is not None and x.device.type == "cpu"]
        if self._copies is not None and hosts:
            now = torch.cuda.current_stream()
            self._copies.wait_stream(now)  # the graph has read the batch before
            with torch.cuda.stream(self._copies):
                for to, x in hosts:
                    to.copy_(x, non_blocking=True)
            now.wait_stream(self._copies)
        for to, x in pairs:
            if self._copies is None or x.device.type != "cpu":
                to.copy_(x, non_blocking=True)


def shapes(batch: Any) -> Any:
    """What distinguishes one captured batch from another: the shapes and dtypes of its tensors, and everything else by value."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), str(batch.dtype).removeprefix("torch."))
    if isinstance(batch, dict):
        return tuple((name, shapes(value)) for name, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(shapes(value) for value in batch)
    return batch


class _HostReadError(Exception):
    pass


class _Trap(TorchDispatchMode):
    """Raises where the host reads a number from the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in _READS:
            raise _HostReadError(f"aten.{name} at {_where()} makes the host wait for the device, which cannot be captured")
        return function(*args, **(kwargs or {}))


class _Last(TorchDispatchMode):
    """Remembers the last operation and where it was called."""

    operation = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operation = f"{function} at {_where()}"
        return function(*args, **(kwargs or {}))


def _where() -> str:
    """The innermost line of a model or an app, outside torch and this file."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "an unknown place"


def _reason(error: str, operation: str) -> str:
    what = f" by {operation}" if operation else ""
    first = next(iter(error.strip().splitlines()), "")
    return f"step.capture: the step cannot be captured{what}: {first}; set step.capture=none, or forward without the update"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection in the middle of a capture could free CUDA memory, which ends it."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _no_synchronisation(on_gpu: bool) -> Iterator[None]:
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found
