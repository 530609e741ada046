"""Deterministic pseudorandom numbers seeded by a name: inputs and weights of the golden cases."""

import zlib

import numpy as np
from torch import Tensor, from_numpy, nn


def hash_values(count: int, salt: str) -> np.ndarray:
    """Return ``count`` numbers in [0, 1): a 32-bit hash of the index and the CRC of ``salt``."""
    mask = np.uint64(0xFFFFFFFF)
    z = (np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(zlib.crc32(salt.encode()) * 40503)) & mask
    for _ in range(2):
        z ^= z >> np.uint64(16)
        z = (z * np.uint64(0x45D9F3B)) & mask
    z ^= z >> np.uint64(16)
    return z.astype(np.float64) / 2.0**32


def fill_parameters(model: nn.Module) -> None:
    """Set the parameters and buffers to the ``formula`` weights of the golden cases."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(_formula(name, tensor))


def _formula(name: str, tensor: Tensor) -> Tensor:
    v = 2 * hash_values(tensor.numel(), name) - 1
    if name.endswith(("running_mean", "bias")):
        v = 0.1 * v
    elif name.endswith(("running_var", ".weights")) or tensor.ndim == 1:
        v = 1 + 0.1 * v
    else:
        v = v * np.sqrt(3 / tensor[0].numel())
    return from_numpy(v.reshape(tensor.shape)).to(tensor.dtype)
