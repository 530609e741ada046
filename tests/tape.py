"""A CPU double of a CUDA Graph: the operations of a function on the memory that they used, done again in the same order.

What a graph cannot record shows here too: a number that changes on the host stays what it was, and memory that is another in
every step is no longer written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs else None for t in tree_leaves(made)
        ]
        self.operations.append((function, args, kwargs, fresh))
        return made

    def warm(self, function: Callable[[], Any]) -> None:
        function()

    def record(self, function: Callable[[], Any]) -> Any:
        with self:
            return function()

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
