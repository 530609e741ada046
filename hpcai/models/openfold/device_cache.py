"""Constants of residues as tensors of a device."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

_cache: dict[tuple[int, torch.device, torch.dtype], tuple[Any, Tensor]] = {}


def to_device(array: np.ndarray, like: Tensor) -> Tensor:
    """A constant of ``hpcai.models.openfold.residues`` on the device and in the dtype of ``like``.

    It is copied there once: each such copy holds up the host, and none can be captured (a step is warmed up before that).
    """
    key = id(array), like.device, like.dtype
    if key in _cache:
        return _cache[key][1]
    with torch.inference_mode(False):  # training may want it too
        tensor = torch.tensor(array).to(like)
    if type(tensor) is Tensor:  # one on paper (hpcai.plan) has no numbers
        _cache[key] = array, tensor
    return tensor
