"""What tests see of operations as they are made: reads of the device, and what is kept for a backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "lift_fresh")  # from the device, or copies to it


class Without(TorchDispatchMode):
    """Refuses operations by name, those of backward passes too; first of all those that no CUDA graph can hold."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names or READS

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.overloadpacket.__name__ not in self.names, function
        return function(*args, **(kwargs or {}))


@contextmanager
def kept(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes by storage that the backward pass of what is done within keeps, but those of parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    every, inside, found = torch.autograd.graph.saved_tensors_hooks, list[Tensor](), dict[int, int]()

    def note(x: Any) -> Any:
        of = [x] if isinstance(x, Tensor) else [t for t in x[0].args if isinstance(t, Tensor)]  # of what a result is made
        for tensor in of:
            if tensor.untyped_storage().data_ptr() not in own:
                inside.append(tensor)
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return x

    class Noted(every):
        """Those of the code under test, which hide the ones around them."""

        def __init__(self, pack: Any, unpack: Any) -> None:
            super().__init__(lambda x: note(pack(x)), unpack)

    torch.autograd.graph.saved_tensors_hooks = Noted  # type: ignore[assignment,misc]
    try:
        with every(note, lambda x: x):
            yield found
    finally:
        torch.autograd.graph.saved_tensors_hooks = every  # type: ignore[misc]
