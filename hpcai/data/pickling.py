"""Pickling of samples with out-of-band buffers (PEP 574): each array is copied at most once."""

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpcai.errors import DataError

_ALIGN = 64  # bytes: a cache line, and the alignment of torch


def flatten(sample: Any) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of ``sample`` and buffers of its arrays and CPU tensors, for ``pickle.loads(stream, buffers=buffers)``."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=buffers.append)
    reducers: dict[type, Callable[[Any], Any]] = {**copyreg.dispatch_table, np.ndarray: _reduce_array, np.memmap: _reduce_array}
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        reducers[tensor] = _reduce_tensor
    pickler.dispatch_table = reducers
    pickler.dump(sample)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def buffer_offsets(lengths: Sequence[int]) -> list[int]:
    """Return the offset of each buffer in one block, and the size of the block, in bytes."""
    return list(accumulate((-(-length // _ALIGN) * _ALIGN for length in lengths), initial=0))


def _reduce_array(array: np.ndarray) -> Any:
    array = np.asarray(array)
    if array.flags.forc:
        return array.__reduce_ex__(5)
    # The dims by descending stride; pickle copies non-contiguous arrays into its stream.
    order = sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim]))
    return np.transpose, (np.ascontiguousarray(array.transpose(order)), np.argsort(order).tolist())


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise DataError(f"a tensor is on {tensor.device}, expected one on the CPU")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        return tensor.__reduce_ex__(5)
    order = sorted(range(tensor.ndim), key=lambda dim: -abs(tensor.stride(dim)))
    dense = tensor.permute(order).resolve_conj().resolve_neg().contiguous()
    flat = dense.reshape(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (flat, tensor.dtype, tuple(dense.shape), np.argsort(order).tolist())


def _rebuild_tensor(flat: np.ndarray, dtype: Any, shape: tuple[int, ...], back: list[int]) -> Any:
    import torch

    return torch.from_numpy(flat).view(dtype).reshape(shape).permute(back)
