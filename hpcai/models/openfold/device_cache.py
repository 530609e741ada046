"""A cache of constant arrays on devices."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_cache: dict[tuple[int, torch.device, torch.dtype], tuple[Any, Tensor]] = {}


def to_device(array: np.ndarray, like: Tensor) -> Tensor:
    """Return a constant of ``hpcai.models.openfold.residues`` on the device and in the dtype of ``like``.

    It is copied once: a copy blocks the host, and cannot be captured in a CUDA graph (a step is warmed up before capture).
    """
    key = id(array), like.device, like.dtype
    if key in _cache:
        return _cache[key][1]
    with torch.inference_mode(False):  # also for training
        tensor = torch.tensor(array).to(like)
    if type(tensor) is Tensor:  # not a fake tensor of hpcai.plan
        _cache[key] = array, tensor
    return tensor
