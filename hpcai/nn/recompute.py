"""Selective activation recomputation: cheap functions (norms, rotations, activations) run again in the backward pass.

    with recompute_cheap(cfg.recompute == "selective"):
        y = down(cheap(gelu, up(x)))            # saves up(x), not gelu(up(x))

The arguments of a cheap function are saved instead of its result, so they should be saved anyway. Matrix products, attention and
communication run once (the reverse of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
Hooks act where autograd saves a tensor, without a second forward pass: any layer, sharded or adapted, may read a result.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcai.dynamo import is_transformed
from hpcai.kernels.triton_support import needs_plain_ops

_Registry = dict[int, tuple[Tensor, "_Recomputation", int]]
_registry: ContextVar[_Registry | None] = ContextVar("recompute_cheap", default=None)


def run_block(block: Callable[..., Any], recompute: str, *args: Any) -> Any:
    """Return ``block(*args)``, of which the backward pass recomputes all ("layers"), cheap functions ("selective") or nothing.
    Under ``torch.func``, which has no hooks of saved tensors, it is nothing. Reentrant checkpoints break under data parallelism."""
    if recompute == "layers" and torch.is_grad_enabled() and not is_transformed():
        return checkpoint(block, *args, use_reentrant=False)
    with recompute_cheap(recompute == "selective"):
        return block(*args)


def cheap(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, a tensor or a tuple of tensors. Inside ``recompute_cheap`` the backward pass recomputes it. The
    function must not draw random numbers, and its own backward pass must not need its results."""
    outputs = function(*args)
    if not needs_plain_ops() and (registry := _registry.get()) is not None:
        recomputation = _Recomputation(function, args)
        for index, x in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
            registry[x.untyped_storage()._cdata] = x, recomputation, index
    return outputs


@contextmanager
def recompute_cheap(enabled: bool = True) -> Iterator[None]:
    """Context manager: results of functions called by ``cheap`` are recomputed in the backward pass instead of being saved. It has
    no effect without gradients, under ``torch.compile``, which chooses itself, and under transforms of ``torch.func``."""
    if not enabled or not torch.is_grad_enabled() or needs_plain_ops():
        yield
        return
    registry: _Registry = {}  # holds the results until the exit, so that no other tensor can have their memory

    def pack(x: Tensor) -> Any:
        entry = registry.get(x.untyped_storage()._cdata)
        return x if entry is None else (*entry[1:], x.size(), x.stride(), x.storage_offset())

    before = _registry.set(registry)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _registry.reset(before)
        registry.clear()  # autograd holds ``pack``


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    recomputation, index, *geometry = saved
    return recomputation.results()[index].as_strided(*geometry)


class _Recomputation:
    """A call that can be repeated. Its repeated results live until the last layer that reads them has its gradient, since only the
    saved tensors of such layers refer to it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, [x.detach() if isinstance(x, Tensor) else x for x in args]
        self.device_type = next(x.device.type for x in args if isinstance(x, Tensor))
        self.dtype = torch.get_autocast_dtype(self.device_type) if torch.is_autocast_enabled(self.device_type) else None
        self.outputs: tuple[Tensor, ...] | None = None

    def results(self) -> tuple[Tensor, ...]:
        if self.outputs is None:
            with torch.no_grad(), torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None):
                outputs = self.function(*self.args)
            self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return self.outputs
