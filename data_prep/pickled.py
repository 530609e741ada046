"""Pickles of torch_geometric's Data, opened without it.

A pickle can name any function and have it called. This one lets through only what arrays and tensors are built of, and puts a plain
object in the place of every class of torch_geometric.
"""

import io
import pickle
import warnings
from typing import Any


class _Plain:
    """Stands for any class of torch_geometric, and has its attributes."""

    def __init__(self, *words: Any, **named: Any) -> None:
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0] if isinstance(state, tuple) else state)


def _storage(data: bytes) -> Any:
    """Stands for torch.storage._load_from_bytes, which would open the pickle in a storage without a look at it."""
    import torch

    with warnings.catch_warnings(action="ignore", category=UserWarning):       # about the protocol, once for each tensor
        return torch.load(io.BytesIO(data), weights_only=True)


def _bytes(text: str, _: str) -> bytes:
    """Stands for _codecs.encode, with which protocol 2 writes bytes."""
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    ARRAYS = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("numpy", "ndarray"), ("numpy", "dtype"),
              ("torch", "Size"), ("torch._utils", "_rebuild_tensor"), ("torch._utils", "_rebuild_tensor_v2"),
              *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
              *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core"))}  # fmt: skip
    OURS = {("torch.storage", "_load_from_bytes"): _storage, ("_codecs", "encode"): _bytes}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "torch_geometric":
            return _Plain
        if (module, name) in self.OURS:
            return self.OURS[module, name]
        if (module, name) in self.ARRAYS:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of arrays or of torch_geometric; nothing was called")


def load(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()
