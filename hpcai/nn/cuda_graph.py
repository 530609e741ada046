"""CUDA graphs: GPU work that is captured once and launched by one call."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """The device work of a function, captured and replayed."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call ``function`` once on the capture stream."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Capture ``function`` and return its result, whose memory ``replay`` fills. The device does not run it."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Delete the captured work."""


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``. Graphs that share a memory pool must not be replayed at the same time."""

    def __init__(self, pool: Any, stream: Any) -> None:
        self._pool, self._stream, self.graph = pool, stream, torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        before, device = torch.cuda.current_stream(), torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        rng_state, was_enabled = generator.clone_state(), gc.isenabled()
        gc.collect()
        gc.disable()  # a collection could free CUDA memory and so end the capture
        try:
            # thread_local: the loader's threads go on allocating and copying meanwhile.
            with torch.cuda.graph(self.graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                return function()
        except BaseException:
            # A failed capture leaves its stream current, its pool in use and the generator in capture mode (torch 2.13).
            torch.cuda.set_stream(before)
            with suppress(RuntimeError, AttributeError):  # the capture did end, or this torch has other names
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
            self.reset()
            generator.graphsafe_set_state(rng_state)
            raise
        finally:
            if was_enabled:
                gc.enable()

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()


_idle_streams: dict[torch.device | None, list[Any]] = {}


def graph_factory(owner: Any, device: torch.device | None = None) -> Callable[[], CudaGraph]:
    """Return a constructor of graphs that share a memory pool and a capture stream while ``owner`` lives.

    The next owner reuses the stream: cuBLAS keeps a workspace for every stream that it was called on.
    """
    idle = _idle_streams.setdefault(device, [])
    stream = idle.pop() if idle else torch.cuda.Stream(device)
    weakref.finalize(owner, idle.append, stream).atexit = False
    # A new pool: one that outlives its graphs, with a block in use, does not accept another capture.
    return partial(CudaGraph, torch.cuda.graph_pool_handle(), stream)
