"""Random number generators of a process: seeding, and their state as tensors."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hpcai import startup
from hpcai.nn.deferred_init import deferred


def seed_all(seed: int) -> None:
    """Seed all generators of this process: torch, NumPy, ``random``, and the GPU if it is in use."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed queries all device types: 0.1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_step(seed: int, replica: int, step: int) -> None:
    """Seed all generators for one step of one model replica."""
    digest = hashlib.blake2b(f"{seed} {replica} {step}".encode(), digest_size=8)
    seed_all(int.from_bytes(digest.digest()) >> 1)


@contextmanager
def seeds(seed: int) -> Iterator[None]:
    """Context manager for building models: parameters are created and sharded without memory, and ``Step`` initializes them
    (``deferred_init``). Other random numbers are the same on all ranks. Steps have their own seeds, different for each replica."""
    startup.begin("network")
    seed_all(seed)
    with deferred(seed):
        yield
    seed_all(seed)


def state() -> dict[str, Tensor]:
    """Return the states of all generators as tensors, which a checkpoint can hold without a pickle."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.array([*keys, position, has_gauss], dtype=np.int64)),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore(tensors: dict[str, Tensor]) -> None:
    """Restore the states that ``state`` returned."""
    torch.set_rng_state(tensors["torch"])
    gauss = tensors["python_gauss"].item()
    random.setstate((3, tuple(tensors["python"].tolist()), None if gauss != gauss else gauss))
    words = tensors["numpy"].numpy()
    np.random.set_state(("MT19937", words[:-2].astype(np.uint32), int(words[-2]), int(words[-1]), tensors["numpy_gauss"].item()))
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
