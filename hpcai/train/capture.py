"""A step as a CUDA Graph: recorded once for each shape of the batch, then started by one call.

What is recorded may depend on nothing that changes on the host: inputs lie in the graph's own memory; the learning rate, the
counters and the scale of the gradient are device tensors; random numbers come from the generator that the graph advances.
"""

import gc
import linecache
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.data.assemble import tree_map
from hpcai.dist.collect import gather_objects
from hpcai.dist.mesh import Axis
from hpcai.dist.watch import before_groups_end
from hpcai.errors import ConfigError

_WARM = 3  # runs in which libraries choose their algorithms, and collectives connect, before anything is recorded
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive")


class Graph(Protocol):
    """Records what a function does on the device, and does it again."""

    def warm(self, function: Callable[[], Any]) -> None: ...

    def record(self, function: Callable[[], Any]) -> Any: ...

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Forget what was recorded."""


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``. Those of one ``Capture`` share a pool of memory and are never replayed at the same time."""

    def __init__(self, pool: Any, stream: Any) -> None:
        self._pool, self._stream, self.graph = pool, stream, torch.cuda.CUDAGraph()

    def warm(self, function: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        before, here = torch.cuda.current_stream(), torch.cuda.current_device()
        generator = torch.cuda.default_generators[here]
        numbers = generator.clone_state()
        try:
            # thread_local: the loader's threads go on allocating and copying meanwhile.
            with torch.cuda.graph(self.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                return function()
        except BaseException:
            # A capture that cannot end leaves its stream current, its pool in use and the generator within it (torch 2.13).
            torch.cuda.set_stream(before)
            with suppress(RuntimeError):  # it did end
                torch._C._cuda_endAllocateToPool(here, self._pool)
                torch._C._cuda_releasePool(here, self._pool)
            self.reset()
            generator.graphsafe_set_state(numbers)
            raise

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()


@dataclass
class _Slot:
    graph: Graph
    batch: Any
    values: Any


class Capture:
    """``capture(batch)`` does what ``function(batch)`` does, by a graph for each of up to ``limit`` shapes of the batch.

    ``untouched()`` is a context in which ``function`` leaves no trace but in scratch memory; warm-up runs are made inside it.
    ``traced``: also find the operation that cannot be recorded, which compiled code does not allow. What cannot be recorded raises
    ConfigError; with ``together``, the processes that make the step, it runs uncaptured on all of them, and ``news`` says why.
    """

    def __init__(
        self, function: Callable[[Any], Any], untouched: Callable[[], Any], limit: int, graph: Callable[[], Graph] | None = None,
        traced: bool = True, together: Axis | None = None,
    ) -> None:  # fmt: skip
        self.function, self.untouched, self.limit, self.traced, self.together = function, untouched, limit, traced, together
        self._slots: dict[Any, _Slot] = {}
        self._copies = torch.cuda.Stream() if graph is None else None
        # A pool of its own: one that outlives its graphs, and of which a block is in use, can record no more.
        self.graph = graph or partial(CudaGraph, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
        self.device = torch.device("cpu" if graph else "cuda")
        self.news: list[str] = []
        self._closed = self._told = False
        _open.add(self)

    def __call__(self, batch: Any) -> Any:
        slot = self._slot(batch, shapes(batch))
        if slot is None:
            return self.function(tree_map(batch, lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x))
        self._fill(slot.batch, batch)
        slot.graph.replay()
        return tree_map(slot.values, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    def close(self) -> None:
        """Forget what was recorded: from now on ``function`` itself runs."""
        if self._copies is not None:
            torch.cuda.synchronize()  # a graph may be running, or sums that a warm-up has left
        for slot in self._slots.values():
            slot.graph.reset()
        self._slots.clear()
        self._closed = True

    def _slot(self, batch: Any, key: Any) -> _Slot | None:
        """What is recorded for batches of these shapes; None where ``function`` itself is to run."""
        if key in self._slots or self._closed:
            return self._slots.get(key)
        if len(self._slots) >= self.limit:
            seen = "; ".join(str(k) for k in self._slots)
            self._tell(self._excused(_RefusedError(
                f"a batch of another shape, {key}, after {len(self._slots)} that were captured ({seen})",
                "give batches of one shape (drop the last of an epoch), raise step.capture_shapes, or set step.capture=none",
            )))  # fmt: skip
            return None
        why = ""
        try:
            self._slots[key] = self._record(batch)
        except _RefusedError as problem:
            why = self._excused(problem)
        except RuntimeError as error:  # of a warm-up; other processes would now wait for this one's part in a sum
            if self.together is None or self.together.size > 1:
                raise
            why = f"a first run failed: {error}"
        if self.together is not None and any(gather_objects(bool(why), self.together)):
            self.close()
            self._tell(why or "another process cannot capture the step")
        return self._slots.get(key)

    def _excused(self, problem: "_RefusedError") -> str:
        """The reason, where a step may run uncaptured. Otherwise raises ConfigError."""
        if self.together is None:
            raise ConfigError(f"step.capture: {problem}; {problem.advice}") from problem.__cause__
        return str(problem)

    def _tell(self, why: str) -> None:
        self.news += [] if self._told else [f"step.capture: {why}; such steps run uncaptured from now on"]
        self._told = True

    def _record(self, batch: Any) -> _Slot:
        static = tree_map(batch, lambda x: torch.empty_like(x, device=self.device).copy_(x) if isinstance(x, Tensor) else x)
        graph, last = self.graph(), _Last()
        with _no_collection(), self.untouched():
            try:
                graph.warm(lambda: self._run(static, _Trap()))
            except _HostReadError as read:
                raise _RefusedError(str(read), "keep it on the device (torch.where), or set step.capture=none") from None
            for _ in range(_WARM - 1):
                graph.warm(lambda: self.function(static))
            try:
                values = graph.record(lambda: self._run(static, last))
            except (RuntimeError, NotImplementedError) as error:
                by, first = f" by {last}" if last.function else "", next(iter(str(error).strip().splitlines()), "")
                advice = "set step.capture=none, or forward without the update"
                raise _RefusedError(f"the step cannot be captured{by}: {first}", advice) from error
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


_open: "weakref.WeakSet[Capture]" = weakref.WeakSet()


def close_all() -> None:
    """Close every capture. A graph that holds sums of gradients must go before its process group: the end of NCCL waits for it."""
    for capture in list(_open):
        capture.close()


before_groups_end.append(close_all)


class _RefusedError(Exception):
    """Why a step cannot be captured, and what to do about it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class _HostReadError(Exception):
    pass


class _Trap(TorchDispatchMode):
    """Raises where the host reads a number from the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in _READS:
            raise _HostReadError(f"aten.{name} at {_shown(_line())} makes the host wait for the device, which cannot be captured")
        return function(*args, **(kwargs or {}))


class _Last(TorchDispatchMode):
    """Remembers the last operation and the line that called it, of 100,000 in some steps: nothing is formatted before it is asked
    for, and no frame is kept, which would hold its tensors."""

    function: Any = None
    line: tuple[str, int] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.function, self.line = function, _line()
        return function(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return f"{self.function} at {_shown(self.line)}"


def _line() -> tuple[str, int] | None:
    """File and number of the innermost line of a model or an app, outside torch and this file."""
    frame = sys._getframe(1)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame and (frame.f_code.co_filename, frame.f_lineno)


def _shown(line: tuple[str, int] | None) -> str:
    return f"{line[0]}:{line[1]} ({linecache.getline(*line).strip()})" if line else "an unknown place"


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


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found
