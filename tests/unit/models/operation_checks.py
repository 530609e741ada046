"""Checks of operations at run time: reads of the device, and tensors saved for the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "lift_fresh")  # from the device, or copies to it


class ForbidOps(TorchDispatchMode):
    """A mode that fails on the named operations, also in backward passes; by default on reads, which no CUDA graph can record."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names or READS

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in self.names, function
        return function(*args, **(kwargs or {}))


@contextmanager
def saved_tensor_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes, by storage, that operations in the context save for the backward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    original, tensors, sizes = torch.autograd.graph.saved_tensors_hooks, list[Tensor](), dict[int, int]()

    def record(x: Any) -> Any:
        saved = [x] if isinstance(x, Tensor) else [t for t in x[0].args if isinstance(t, Tensor)]  # inputs of a recomputed result
        for tensor in saved:
            if tensor.untyped_storage().data_ptr() not in own:
                tensors.append(tensor)
                sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return x

    class RecordingHooks(original):
        """Saved-tensor hooks of the code under test, which would hide the hooks around them."""

        def __init__(self, pack: Any, unpack: Any) -> None:
            super().__init__(lambda x: record(pack(x)), unpack)

    with patch.object(torch.autograd.graph, "saved_tensors_hooks", RecordingHooks), original(record, lambda x: x):
        yield sizes
