"""The device of these tests. HPCAI_TEST_DEVICE=cpu replaces CUDA features, which proves only that the tests themselves run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.cpu_graph import CPUGraph

DEVICE = torch.device(os.environ.get("HPCAI_TEST_DEVICE", "cuda"))
GPU = DEVICE.type
ON_GPU = GPU == "cuda"
GRAPH: Callable[[], Any] | None = None if ON_GPU else CPUGraph
"""constructs the graph of a captured step; None: a CUDA graph"""
cuda_only = pytest.mark.skipif(not ON_GPU, reason="needs a feature of CUDA")


def synchronize() -> None:
    """Wait for all work on the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()


def disable_tf32() -> None:
    """Compute matrix products and convolutions of float32 without TF32, as on a CPU."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Context manager: an operation that makes the host wait for the GPU raises, in any thread."""
    synchronize()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def occupy_stream() -> None:
    """Occupy the current stream for milliseconds, so that operations without the necessary synchronization give wrong results."""
    if ON_GPU:
        torch.cuda._sleep(20_000_000)
