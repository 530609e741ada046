"""A CPU replacement of a CUDA Graph: records the operations of a function with their memory, and replays them in order.

As in a graph, capture has no effect: collectives are not sent, and memory that existed before keeps its content. Errors of capture
show here too: a number computed on the host stays constant, and memory allocated anew in every step is no longer written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoHostRead(TorchDispatchMode):
    """A mode in which an operation raises that makes the host wait for the value of a tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{function} reads the device inside a step")
        return function(*args, **(kwargs or {}))


class CPUGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for storage in inputs:  # also inputs that are only read: schemas of some operations omit mutations
            if storage.data_ptr() not in self._own | self._before.keys():
                self._before[storage.data_ptr()] = storage, storage.clone()
        outputs = _skip_collective(function, args) if function.namespace == "c10d" else function(*args, **kwargs)
        known = {storage.data_ptr() for storage in inputs}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known else None for t in tree_leaves(outputs)
        ]
        self._own |= {t.untyped_storage().data_ptr() for t in fresh if t is not None}
        self.operations.append((function, args, kwargs, fresh))
        return outputs

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def capture(self, function: Callable[[], Any]) -> Any:
        try:
            with self:
                return function()
        finally:
            for storage, before in self._before.values():
                storage.copy_(before)
            self._before.clear()

    def reset(self) -> None:
        self.operations.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, fresh in self.operations:
            for to, value in zip(fresh, tree_leaves(function(*args, **kwargs))):
                if to is not None:
                    to.copy_(value)
                elif hasattr(value, "wait"):  # collectives too complete in order
                    value.wait()


def _skip_collective(function: Any, args: Any) -> Any:
    """Return the results of a collective without communication: its first argument and completed work."""
    outputs = tuple(FakeWork().boxed() if "Work" in str(each.type) else args[0] for each in function._schema.returns)
    return outputs if len(outputs) != 1 else outputs[0]
