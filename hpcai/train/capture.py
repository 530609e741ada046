"""A step as a CUDA Graph: recorded once for each shape of the batch, after two steps of that shape, then started by one call.

What is recorded may depend on nothing that changes on the host: inputs lie in the graph's own memory; the learning rate, the
counters and the scale of the gradient are device tensors; random numbers come from the generator that the graph advances.
"""

import linecache
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.data.assemble import tree_map
from hpcai.dist.watchdog import before_destroy_process_group
from hpcai.errors import ConfigError
from hpcai.nn.graph import Graph, graph_factory, no_collection
from hpcai.train import rng

_WARM = 2  # steps of a shape in which libraries choose their algorithms, and collectives connect, before it is recorded
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive")


@dataclass
class _Slot:
    """Batches of one shape: how many of them ran, and what was recorded then."""

    graph: Graph
    runs: int = 0
    batch: Any = None
    values: Any = None


class Capture:
    """``capture(batch)`` does what ``function(batch)`` does, by a graph for each of up to ``limit`` shapes of the batch.

    The first steps of a shape run as they are, beside the graph, and are steps like all others. So a process needs no other one to
    record its own: its messages stay the same, in the same order, whether they are recorded yet or not.
    ``traced``: also find the operation that cannot be recorded, which compiled code does not allow. What cannot be recorded raises
    ConfigError; with ``tries`` it runs uncaptured, and ``news`` says why.
    """

    def __init__(
        self, function: Callable[[Any], Any], limit: int, graph: Callable[[], Graph] | None = None, traced: bool = True,
        tries: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.limit, self.traced, self.tries = function, limit, traced, tries
        self._slots: dict[Any, _Slot] = {}
        self._copies = torch.cuda.Stream() if graph is None else None
        self.graph = graph or graph_factory(self)
        self.device = torch.device("cpu" if graph else "cuda")
        self.news: list[str] = []
        self.made: list[str] = []  # what there is to tell of graphs, which only this process may have recorded
        self._told = False
        _open.add(self)

    def __call__(self, batch: Any) -> Any:
        slot = self._slot(shapes(batch))
        if slot is not None and slot.batch is None and slot.runs == _WARM:
            slot = self._record(slot, batch)
        if slot is None:
            return self.function(self._moved(batch))
        if slot.batch is None:
            return self._warm(slot, batch)
        self._fill(slot.batch, batch)
        slot.graph.replay()
        return _copied(slot.values)

    def recorded(self) -> int:
        """How many shapes have a graph."""
        return sum(slot.batch is not None for slot in self._slots.values())

    def close(self) -> None:
        """Forget what was recorded: from now on ``function`` itself runs."""
        if self._copies is not None:
            torch.cuda.synchronize()  # a graph may be running
        for slot in self._slots.values():
            slot.graph.reset()
        self._slots.clear()
        self.limit = 0

    def _slot(self, key: Any) -> _Slot | None:
        """That of batches of these shapes; None where ``function`` itself is to run."""
        if key not in self._slots and len(self._slots) >= self.limit:
            if self._slots:
                seen = "; ".join(str(k) for k in self._slots)
                self._refuse(
                    f"a batch of another shape, {key}, after {len(self._slots)} that were captured ({seen})",
                    "give batches of one shape (drop the last of an epoch), raise step.capture_shapes, or set step.capture=none",
                )
            return None
        if key not in self._slots:
            self._slots[key] = _Slot(self.graph())
        return self._slots[key]

    def _refuse(self, reason: str, advice: str, cause: Exception | None = None) -> None:
        """Say why a step runs uncaptured, where it may. Otherwise raises ConfigError."""
        if not self.tries:
            raise ConfigError(f"step.capture: {reason}; {advice}") from cause
        self.news += [] if self._told else [f"step.capture: {reason}; such steps run uncaptured from now on"]
        self._told = True

    def _warm(self, slot: _Slot, batch: Any) -> Any:
        """A step of a shape that is not recorded yet."""
        slot.runs += 1
        given, reads, values = self._moved(batch), _Reads(), []
        watch = reads if slot.runs == 1 and self.traced else nullcontext()
        slot.graph.warm(lambda: values.append(self._run(given, watch)))
        if reads.first:
            self.close()
            what = f"{reads.first} makes the host wait for the device, which cannot be captured"
            self._refuse(what, "keep it on the device (torch.where), or set step.capture=none")
        return _copied(values[0])  # its memory belongs to the stream of the graph

    def _record(self, slot: _Slot, batch: Any) -> _Slot | None:
        """The slot with its graph; None where there can be none."""
        static, last, numbers, began = tree_map(batch, self._room), _Last(), rng.state(), time.perf_counter()
        try:
            with no_collection():
                slot.values = slot.graph.record(lambda: self._run(static, last if self.traced else nullcontext()))
        except (RuntimeError, NotImplementedError) as error:
            by, first = f" by {last}" if last.function else "", next(iter(str(error).strip().splitlines()), "")
            self.close()
            advice = "set step.capture=none, or forward without the update"
            self._refuse(f"the step cannot be captured{by}: {first}", advice, error)
            return None
        finally:
            rng.restore(numbers)
        slot.batch = static
        seconds = time.perf_counter() - began
        self.made.append(f"step.capture: graph {self.recorded()} of at most {self.limit} recorded in {seconds:.1f} s")
        return slot

    def _run(self, batch: Any, watch: Any) -> Any:
        with watch:
            return self.function(batch)

    def _moved(self, batch: Any) -> Any:
        return tree_map(batch, lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x)

    def _room(self, leaf: Any) -> Any:
        return torch.empty_like(leaf, device=self.device).copy_(leaf) if isinstance(leaf, Tensor) else leaf

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


before_destroy_process_group.append(close_all)


class _Reads(TorchDispatchMode):
    """Notes the first place where the host reads a number from the device."""

    first = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in _READS and not self.first:
            self.first = f"aten.{name} at {_shown(_line())}"
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


def _copied(values: Any) -> Any:
    return tree_map(values, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found
