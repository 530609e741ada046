"""A CPU double of a CUDA Graph: the operations of a function on the memory that they used, done again in the same order.

As with a graph, nothing has happened when something is recorded: messages are not sent, and memory that was there before is as it
was. What a graph cannot record shows here too: a number that changes on the host stays what it was, and memory that is another in
every step is no longer written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for storage in inputs:  # also what is only read: some operations write what their schema does not tell
            if storage.data_ptr() not in self._own | self._before.keys():
                self._before[storage.data_ptr()] = storage, storage.clone()
        made = _unsent(function, args) if function.namespace == "c10d" else function(*args, **kwargs)
        known = {storage.data_ptr() for storage in inputs}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known else None for t in tree_leaves(made)
        ]
        self._own |= {t.untyped_storage().data_ptr() for t in fresh if t is not None}
        self.operations.append((function, args, kwargs, fresh))
        return made

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
                elif hasattr(value, "wait"):  # messages keep the order of a graph too
                    value.wait()


def _unsent(function: Any, args: Any) -> Any:
    """What a message returns, without it: its first argument, and work that is done."""
    made = tuple(FakeWork().boxed() if "Work" in str(each.type) else args[0] for each in function._schema.returns)
    return made if len(made) != 1 else made[0]
