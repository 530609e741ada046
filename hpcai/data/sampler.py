"""Who reads what: a pure function of (seed, epoch, position), the same on any number of processes."""

import numpy as np


def order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Indices of all ``count`` samples in the order of one epoch."""
    if not shuffle:
        return np.arange(count)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def share(indices: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The neighbouring part of ``indices`` that process ``rank`` of ``size`` takes; parts differ by one sample at most."""
    first = len(indices) * rank // size
    return indices[first : len(indices) * (rank + 1) // size]
