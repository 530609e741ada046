"""Samples as one pickle, and their arrays as buffers beside it (PEP 574), for a copy of each array at most."""

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpcai.errors import DataError

_ALIGN = 64  # bytes; a cache line, and what torch wants


def flatten(sample: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle of ``sample``, and the bytes of its arrays and CPU tensors, for ``pickle.loads(stream, buffers=buffers)``."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=buffers.append)
    ways: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, np.ndarray: _reduce_array, np.memmap: _reduce_array}
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        ways[tensor] = _reduce_tensor
    pickler.dispatch_table = ways
    pickler.dump(sample)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def starts(lengths: Sequence[int]) -> list[int]:
    """Return the offset of each buffer in one block, and the end of the last one, in bytes."""
    return list(accumulate((-(-length // _ALIGN) * _ALIGN for length in lengths), initial=0))


def _order(strides: Sequence[int]) -> list[int]:
    """Dims as they lie in memory."""
    return sorted(range(len(strides)), key=lambda dim: -abs(strides[dim]))


def _back(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _reduce_array(array: np.ndarray) -> Any:
    array = np.asarray(array)
    if array.flags.forc:
        return array.__reduce_ex__(5)
    order = _order(array.strides)  # pickle would copy what is not contiguous into itself
    return np.transpose, (np.ascontiguousarray(array.transpose(order)), _back(order))


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise DataError(f"a tensor is on {tensor.device}, expected one on the CPU")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        return tensor.__reduce_ex__(5)
    order = _order(tensor.stride())
    dense = tensor.permute(order).resolve_conj().resolve_neg().contiguous()
    return _tensor, (dense.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(dense.shape), _back(order))


def _tensor(flat: np.ndarray, dtype: Any, shape: tuple[int, ...], back: list[int]) -> Any:
    import torch

    return torch.from_numpy(flat).view(dtype).reshape(shape).permute(back)
