"""Tests of this folder need a GPU; each starts with torch's default settings and frees its memory."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcai.train import rng
from tests.gpu.device import GPU, ON_GPU
from tests.gpu.volumes import make_volume

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = ON_GPU and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if no_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu"))


@pytest.fixture(scope="module")
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write as many volumes as the module has, of its shape."""
    folder = tmp_path_factory.mktemp("volumes")
    for index in range(request.module.COUNT):
        np.save(folder / f"{index:03d}.npy", make_volume(index, request.module.SHAPE))
    return sorted(folder.glob("*.npy"))


@pytest.fixture(autouse=True)
def restore_state() -> Iterator[None]:
    """Restore process-wide settings and free memory after a test, also after a failure."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    matmul_precision, dtype, threads = torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_num_threads()
    environ, rng_state = dict(os.environ), rng.state()
    cuda_state = (torch.cuda.current_device(), torch.cuda.current_stream()) if ON_GPU else None
    yield
    if cuda_state is not None:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_device(cuda_state[0])
        torch.cuda.set_stream(cuda_state[1])
    torch.set_float32_matmul_precision(matmul_precision)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = flags
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environ)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if cuda_state is not None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:  # later tests cannot use it
            pytest.exit(f"the {GPU} device has failed: {error}", returncode=1)
    rng.restore(rng_state)
