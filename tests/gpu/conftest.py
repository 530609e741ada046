"""Every test of this folder needs a GPU, finds the settings of the process as torch has them, and leaves no memory behind."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hpcai.train import rng
from tests.gpu.machine import GPU, ON_GPU

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = ON_GPU and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu"))


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Put back what a test has set for the whole process, and free what it held, also where it failed."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    precision, kind, threads = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads()
    environ, random = dict(os.environ), rng.state()
    here = (torch.cuda.current_device(), torch.cuda.current_stream()) if ON_GPU else None
    yield
    if here is not None:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_device(here[0])
        torch.cuda.set_stream(here[1])
    torch.set_float32_matmul_precision(precision)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = flags
    torch.set_default_dtype(kind)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if here is not None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as problem:  # no test after this one could use it
            pytest.exit(f"the {GPU} device has failed: {problem}", returncode=1)
    rng.restore(random)
