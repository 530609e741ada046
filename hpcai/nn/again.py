"""Results that are cheap to make, made again for the backward pass instead of kept: norms, rotations, activations.

    with again(cfg.recompute == "selective"):
        y = down(cheap(gelu, up(x)))            # up(x) is kept, gelu(up(x)) is not

What the marked results are made of is kept, so it should be what is kept anyway; products of matrices, attention and messages run
once (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, and their order turned round). It
is done where autograd keeps a tensor, not by a second forward pass: what reads a result may be any layer, cut or adapted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_Notes = dict[int, tuple[Tensor, "_Made", int]]
_open: ContextVar[_Notes | None] = ContextVar("again", default=None)


def cheap(function: Callable[..., Any], *given: Any) -> Any:
    """``function(*given)``, a tensor or a tuple of them, made again in the backward pass if this is inside ``again``. The function
    draws no random numbers, and its own backward pass does not want its results."""
    found = function(*given)
    if not torch.compiler.is_compiling() and (notes := _open.get()) is not None:
        made = _Made(function, given)
        for place, x in enumerate(found if isinstance(found, tuple) else (found,)):
            notes[x.untyped_storage()._cdata] = x, made, place
    return found


@contextmanager
def again(wanted: bool = True) -> Iterator[None]:
    """Inside, and where ``wanted``, what is kept of ``cheap`` results is how to make them. A compiler decides that by itself."""
    if not wanted or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    notes: _Notes = {}  # holds the results meanwhile, so that no other tensor can have their memory

    def pack(x: Tensor) -> Any:
        found = notes.get(x.untyped_storage()._cdata)
        return x if found is None else (*found[1:], x.size(), x.stride(), x.storage_offset())

    before = _open.set(notes)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _open.reset(before)
        notes.clear()  # autograd holds ``pack``


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    made, place, *lying = kept
    return made.results()[place].as_strided(*lying)


class _Made:
    """How results were made. Those made again live until the last layer that read them has its gradient: what autograd keeps for
    such layers alone refers to this."""

    def __init__(self, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.function, self.given = function, [x.detach() if isinstance(x, Tensor) else x for x in given]
        self.kind = next(x.device.type for x in given if isinstance(x, Tensor))
        self.dtype = torch.get_autocast_dtype(self.kind) if torch.is_autocast_enabled(self.kind) else None
        self.found: tuple[Tensor, ...] | None = None

    def results(self) -> tuple[Tensor, ...]:
        if self.found is None:
            with torch.no_grad(), torch.autocast(self.kind, self.dtype, enabled=self.dtype is not None):
                found = self.function(*self.given)
            self.found = found if isinstance(found, tuple) else (found,)
        return self.found
