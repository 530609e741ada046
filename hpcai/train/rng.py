"""Random numbers of a process: one seed for all generators, and their state as tensors."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hpcai import startup
from hpcai.nn.deferred import deferred


def seed_all(seed: int) -> None:
    """Seed every generator of this process: those of the host, and of the GPU if it is in use."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every kind of device: 0.1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_step(seed: int, copy: int, step: int) -> None:
    """Seed every generator for one step of one copy of a model."""
    told = hashlib.blake2b(f"{seed} {copy} {step}".encode(), digest_size=8)
    seed_all(int.from_bytes(told.digest()) >> 1)


@contextmanager
def seeds(seed: int) -> Iterator[None]:
    """Inside, models are built and cut without memory for their parameters, which ``Step`` draws (``nn.deferred``); what else is
    drawn is the same on all processes. Steps seed their own random numbers, for each copy of the model others."""
    startup.begin("network")
    seed_all(seed)
    with deferred(seed):
        yield
    seed_all(seed)


def state() -> dict[str, Tensor]:
    """Every generator of this process as tensors, which a checkpoint can hold without a pickle."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.array([*keys, position, has_gauss], dtype=np.int64)),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(own: dict[str, Tensor]) -> None:
    """Put back what ``state()`` gave."""
    torch.set_rng_state(own["torch"])
    gauss = own["python_gauss"].item()
    random.setstate((3, tuple(own["python"].tolist()), None if gauss != gauss else gauss))
    numbers = own["numpy"].numpy()
    np.random.set_state(("MT19937", numbers[:-2].astype(np.uint32), int(numbers[-2]), int(numbers[-1]), own["numpy_gauss"].item()))
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])
