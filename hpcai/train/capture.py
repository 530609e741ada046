"""Capture of a step in CUDA graphs: one graph for each shape of the batch, recorded after two steps of that shape, then replayed.

A recorded step may depend on nothing that changes on the host. Inputs are copied to static memory of the graph. The learning rate,
the counters and the gradient scale are device tensors. Random numbers come from the generator that the graph advances.
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

from hpcai.data.collate import tree_map, tree_zip
from hpcai.dist.watchdog import before_destroy_process_group
from hpcai.errors import ConfigError
from hpcai.nn.cuda_graph import Graph, graph_factory
from hpcai.train import rng

_WARMUP_STEPS = 2  # steps of a shape before its capture: libraries choose algorithms, and collectives connect
_SYNC_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim", "unique_consecutive")


@dataclass
class _Slot:
    """The state of one shape of the batch: the number of its steps, and its graph with static inputs and outputs."""

    graph: Graph
    runs: int = 0
    batch: Any = None
    values: Any = None


class Capture:
    """A function of a batch that is replayed as a graph, one for each of up to ``limit`` shapes of the batch.

    The first steps of a shape run uncaptured, on the stream of the graph, and count as all others. Each rank can therefore record
    on its own: its communication is the same, in the same order, whether it has recorded yet or not.

    Args:
        traced: Also find the operation that cannot be captured, which compiled code does not allow.
        fallback: Run uncaptured what cannot be captured, with the reason in ``fallback_messages``. Otherwise it raises ConfigError.
    """

    def __init__(
        self, function: Callable[[Any], Any], limit: int, graph: Callable[[], Graph] | None = None, traced: bool = True,
        fallback: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.limit, self.traced, self.fallback = function, limit, traced, fallback
        self._slots: dict[Any, _Slot] = {}
        self._copy_stream = torch.cuda.Stream() if graph is None else None
        self.graph = graph or graph_factory(self)
        self.device = torch.device("cpu" if graph else "cuda")
        self.fallback_messages: list[str] = []
        self.recorded_messages: list[str] = []  # of graphs, which differ between ranks
        self._fell_back = False
        _captures.add(self)

    def __call__(self, batch: Any) -> Any:
        slot = self._slot(batch_signature(batch))
        if slot is not None and slot.batch is None and slot.runs == _WARMUP_STEPS:
            slot = self._record(slot, batch)
        if slot is None:
            return self.function(self._to_device(batch))
        if slot.batch is None:
            slot.runs += 1
            inputs, watch, values = self._to_device(batch), _Watch(), []
            traced = watch if slot.runs == 1 and self.traced else nullcontext()
            slot.graph.warm_up(lambda: values.append(self._run(inputs, traced)))
            if watch.first_read:
                self.close()
                reason = f"{watch.first_read} makes the host wait for the device, which cannot be captured"
                self._fall_back(reason, "keep it on the device (torch.where), or set step.capture=none")
            return _clone(values[0])  # since its memory belongs to the stream of the graph
        self._copy_batch(slot.batch, batch)
        slot.graph.replay()
        return _clone(slot.values)

    def recorded(self) -> int:
        """Return the number of shapes that have a graph."""
        return sum(slot.batch is not None for slot in self._slots.values())

    def close(self) -> None:
        """Delete all graphs; from now on ``function`` runs uncaptured."""
        if self._copy_stream is not None:
            torch.cuda.synchronize()  # a graph may be running
        for slot in self._slots.values():
            slot.graph.reset()
        self._slots.clear()
        self.limit = 0

    def _slot(self, key: Any) -> _Slot | None:
        """Return the slot of a batch signature, or None if ``function`` runs uncaptured."""
        if key not in self._slots and len(self._slots) >= self.limit:
            if self._slots:
                seen = "; ".join(str(k) for k in self._slots)
                self._fall_back(
                    f"a batch of another shape, {key}, after {len(self._slots)} that were captured ({seen})",
                    "give batches of one shape (drop the last of an epoch), raise step.capture_shapes, or set step.capture=none",
                )
            return None
        if key not in self._slots:
            self._slots[key] = _Slot(self.graph())
        return self._slots[key]

    def _fall_back(self, reason: str, advice: str, cause: Exception | None = None) -> None:
        """Record why a step runs uncaptured, or raise ConfigError without ``fallback``."""
        if not self.fallback:
            raise ConfigError(f"step.capture: {reason}; {advice}") from cause
        self.fallback_messages += [] if self._fell_back else [f"step.capture: {reason}; such steps run uncaptured from now on"]
        self._fell_back = True

    def _record(self, slot: _Slot, batch: Any) -> _Slot | None:
        """Return the slot with a recorded graph, or None if the step cannot be captured."""
        static = tree_map(batch, lambda x: torch.empty_like(x, device=self.device).copy_(x) if isinstance(x, Tensor) else x)
        last, rng_state, began = _Watch(), rng.state(), time.perf_counter()
        try:
            slot.values = slot.graph.capture(lambda: self._run(static, last if self.traced else nullcontext()))
        except (RuntimeError, NotImplementedError) as error:
            location, first = f" by {last}" if last.function else "", next(iter(str(error).strip().splitlines()), "")
            self.close()
            advice = "set step.capture=none, or forward without the update"
            self._fall_back(f"the step cannot be captured{location}: {first}", advice, error)
            return None
        finally:
            rng.restore(rng_state)
        slot.batch = static
        seconds = time.perf_counter() - began
        self.recorded_messages.append(f"step.capture: graph {self.recorded()} of at most {self.limit} recorded in {seconds:.1f} s")
        return slot

    def _run(self, batch: Any, watch: Any) -> Any:
        with watch:
            return self.function(batch)

    def _to_device(self, batch: Any) -> Any:
        return tree_map(batch, lambda x: x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x)

    def _copy_batch(self, static: Any, batch: Any) -> None:
        """Copy a batch into static memory. Tensors of the host are copied on a separate stream."""
        leaves: list[Any] = []
        tree_zip([static, batch], leaves.append)
        pairs = [(to, x) for to, x in leaves if isinstance(x, Tensor)]
        hosts = [(to, x) for to, x in pairs if self._copy_stream is not None and x.device.type == "cpu"]
        if self._copy_stream is not None and hosts:
            now = torch.cuda.current_stream()
            self._copy_stream.wait_stream(now)  # the graph has read the previous batch
            with torch.cuda.stream(self._copy_stream):
                for to, x in hosts:
                    to.copy_(x, non_blocking=True)
            now.wait_stream(self._copy_stream)
        for to, x in pairs:
            if self._copy_stream is None or x.device.type != "cpu":
                to.copy_(x, non_blocking=True)


def batch_signature(batch: Any) -> Any:
    """Return a key for the graph of a batch: shapes and dtypes of its tensors, and all else by value."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), str(batch.dtype).removeprefix("torch."))
    if isinstance(batch, dict):
        return tuple((name, batch_signature(value)) for name, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(batch_signature(value) for value in batch)
    return batch


_captures: "weakref.WeakSet[Capture]" = weakref.WeakSet()


def close_all() -> None:
    """Close every capture. A graph with collectives must be deleted before its process group, since NCCL waits for it on exit."""
    for capture in list(_captures):
        capture.close()


before_destroy_process_group.append(close_all)


class _Watch(TorchDispatchMode):
    """A dispatch mode that records the last operation, and the first by which the host reads a value from the device. There are
    100,000 of them in some steps: nothing is formatted before it is needed, and no frame is kept, which would hold its tensors."""

    function: Any = None
    line: tuple[str, int] | None = None
    first_read = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.function, self.line = function, _calling_line()
        if (name := function.overloadpacket.__name__) in _SYNC_OPS and not self.first_read:
            self.first_read = f"aten.{name} at {_format_line(self.line)}"
        return function(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return f"{self.function} at {_format_line(self.line)}"


def _calling_line() -> tuple[str, int] | None:
    """Return file and number of the innermost line of a model or an app, outside torch and this file."""
    frame = sys._getframe(1)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame and (frame.f_code.co_filename, frame.f_lineno)


def _format_line(line: tuple[str, int] | None) -> str:
    return f"{line[0]}:{line[1]} ({linecache.getline(*line).strip()})" if line else "an unknown line"


def _clone(values: Any) -> Any:
    return tree_map(values, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
