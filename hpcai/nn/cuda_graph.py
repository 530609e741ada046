"""What a GPU does, recorded once and started by one call."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Records what a function does on the device, and does it again."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Do it once, where it will be recorded."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, whose memory ``replay`` fills. Nothing is done on the device."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Forget what was recorded."""


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``. Those of one pool of memory are never replayed at the same time."""

    def __init__(self, pool: Any, stream: Any) -> None:
        self._pool, self._stream, self.graph = pool, stream, torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> Any:
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
            with suppress(RuntimeError, AttributeError):  # it did end, or this torch has other names
                torch._C._cuda_endAllocateToPool(here, self._pool)
                torch._C._cuda_releasePool(here, self._pool)
            self.reset()
            generator.graphsafe_set_state(numbers)
            raise

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()


_idle_streams: dict[torch.device | None, list[Any]] = {}


def graph_factory(owner: Any, device: torch.device | None = None) -> Callable[[], CudaGraph]:
    """A constructor of graphs that share a memory pool and a capture stream while ``owner`` lives.

    The next owner reuses the stream: cuBLAS keeps a workspace for every stream that it was called on.
    """
    idle = _idle_streams.setdefault(device, [])
    stream = idle.pop() if idle else torch.cuda.Stream(device)
    weakref.finalize(owner, idle.append, stream).atexit = False
    # A pool of its own: one that outlives its graphs, and of which a block is in use, can record no more.
    return partial(CudaGraph, torch.cuda.graph_pool_handle(), stream)


@contextmanager
def no_gc() -> Iterator[None]:
    """A collection in the middle of a capture could free CUDA memory, which ends it."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
