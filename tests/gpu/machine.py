"""The device of these tests: a GPU. With HPCAI_TEST_DEVICE=cpu they run where there is none, with doubles of what CUDA alone has:
all that this proves is that the tests themselves run."""

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
"""what records a captured step: CUDA's own graph"""
cuda_alone = pytest.mark.skipif(not ON_GPU, reason="CUDA alone has what this test looks at")


def wait() -> None:
    """Return when the GPU has done what it was asked to."""
    if ON_GPU:
        torch.cuda.synchronize()


def precisely() -> None:
    """Have products and convolutions of float32 rounded to nothing less, as on a CPU."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside, whatever has the host wait for the GPU raises, in any thread."""
    wait()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def busy() -> None:
    """Some milliseconds of work on the current stream: what is not in order with it comes too early or too late."""
    if ON_GPU:
        torch.cuda._sleep(20_000_000)
