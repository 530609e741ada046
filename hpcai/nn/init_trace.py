"""How a tensor gets its numbers: notes of operations, which are done again to any part of it, with the numbers of the whole."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hpcai.errors import ConfigError
from hpcai.kernels import philox
from hpcai.nn.safetensors_files import LazyTensor

Box = tuple[slice, ...]

_BLOCK = 1 << 18  # numbers that one thread has under way: 1 MiB in float32
FILL_OPS = ("fill_", "zero_")
RANDOM_OPS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, dict[str, Any]], Tensor]]] = {
    "uniform_": (philox.uniform, lambda x, w: x.mul_(w["to"] - w["from"]).add_(w["from"])),
    "normal_": (philox.normal, lambda x, w: x.mul_(w["std"]).add_(w["mean"])),
}


@dataclass
class InitTrace:
    """How a parameter of ``size`` gets its numbers: from ``base`` (None: the first note writes them all), and then by ``notes``."""

    seed: int
    size: tuple[int, ...]
    base: Tensor | LazyTensor | None
    ops: list["InitOp"] = field(default_factory=list)
    draws: int = 0
    name: str | None = None
    version: int | None = None  # of the parameter when notes ended

    def write(self, local: Tensor, ranges: Sequence[Sequence[tuple[int, int]]], seed: int | None) -> None:
        """Write to ``local`` its numbers, which are those ``stretches`` of the whole in each dim, one after another."""
        base, notes = self.base, self.ops
        if not all(note.is_elementwise for note in notes):
            base, notes = self._full(seed), []
        for here, there in _chunks(ranges, local):
            x = local[here]
            if notes:
                x = torch.empty(x.shape, dtype=_compute_dtype(notes[0].dtype), device=x.device)
            if base is not None:
                x.copy_(base[there])
            first = _row_starts(there, self.size, x) if notes else torch.empty(0)
            for note in notes:
                x = x.to(_compute_dtype(note.dtype))
                note.apply(x, first, seed)
            if notes:
                local[here] = x

    def _full(self, seed: int | None) -> Tensor:
        """The whole tensor, by doing again all that was done."""
        x = torch.empty(self.size, dtype=self.ops[0].dtype)
        if self.base is not None:
            x.copy_(self.base[tuple(slice(0, n) for n in self.size)])
        for note in self.ops:
            x = torch.empty_strided(self.size, note.strides, dtype=note.dtype).copy_(x)
            note.apply(x if note.view is None else x.as_strided(*note.view), torch.zeros(1, dtype=torch.int64), seed)
        return x


@dataclass(frozen=True, eq=False)
class InitOp:
    """An operation on a parameter of ``layout`` (strides) and ``dtype``, or on what ``lies`` (size, strides, offset) in its memory.

    ``...`` stands for that among the arguments. ``number``: which it is of the random operations on the parameter of ``record``.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    view: tuple[Any, ...] | None
    strides: tuple[int, ...]
    dtype: torch.dtype
    trace: InitTrace
    draw: int

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def is_elementwise(self) -> bool:
        """Whether it does to a part what it does to the whole."""
        scalars = all(not isinstance(x, Tensor) or x.ndim == 0 for x in tree_leaves((self.args, self.kwargs)))
        alike = self.name in (*RANDOM_OPS, *FILL_OPS) or (torch.Tag.pointwise in self.func.tags and not self.is_random)
        return self.view is None and scalars and alike

    def apply(self, x: Tensor, first: Tensor, seed: int | None) -> None:
        """To ``x``, of which equally long rows begin at ``first`` [r] in the whole."""
        if self.is_random and self.name in RANDOM_OPS:
            draw, shape = RANDOM_OPS[self.name]
            words = {a.name: a.default_value for a in self.func._schema.arguments}
            words |= dict(zip(words, self.args)) | self.kwargs
            out = torch.empty(x.shape, dtype=_compute_dtype(x.dtype), device=x.device)
            if len(first) == 1:
                draw(self._key(seed), int(first), x.numel(), out=out.view(-1))
            elif x.numel():
                draw(self._key(seed), first, x.numel() // len(first), out=out.view(len(first), -1))
            x.copy_(shape(out, words))
            return
        with torch.random.fork_rng(devices=[]) if self.is_random else nullcontext():
            if self.is_random:
                torch.default_generator.manual_seed(self._key(seed))
            args, kwargs = tree_map(lambda a: x if a is ... else a, (self.args, self.kwargs))
            self.func(*args, **kwargs)

    def _key(self, seed: int | None) -> int:
        if self.trace.name is None:
            raise ConfigError(f"{self.name}: its numbers were copied from a parameter that is not in the model; keep that one")
        text = f"{self.trace.seed if seed is None else seed} {self.trace.name} {self.draw}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # seeds of torch have a sign


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _chunks(stretches: Sequence[Sequence[tuple[int, int]]], local: Tensor) -> Iterator[tuple[Box, Box]]:
    """Parts of ``local`` with few numbers, cut in dim 0, and where they are in the whole."""
    most = _BLOCK * (torch.get_num_threads() if local.device.type == "cpu" else 64)
    dims: list[list[tuple[slice, slice]]] = []
    for d, held in enumerate(stretches):
        at, dim = 0, list[tuple[slice, slice]]()
        for a, b in held:
            step = max(most // math.prod(local.shape[1:]) if d == 0 and local.numel() else b - a, 1)
            dim += [(slice(at + c - a, at + min(c + step, b) - a), slice(c, min(c + step, b))) for c in range(a, b, step)]
            at += b - a
        dims.append(dim)
    for pairs in product(*dims):
        yield tuple(here for here, _ in pairs), tuple(there for _, there in pairs)


def _row_starts(box: Box, size: tuple[int, ...], x: Tensor) -> Tensor:
    """Where the rows of a box begin in the whole: what lies together, from the last dim on that is not whole.   [r]"""
    dim = max((d for d, part in enumerate(box) if part != slice(0, size[d])), default=0)
    first = torch.tensor([box[dim].start * math.prod(size[dim + 1 :]) if box else 0])
    for d in range(dim):
        first = first[..., None] + torch.arange(box[d].start, box[d].stop) * math.prod(size[d + 1 :])
    return first.view(-1) if first.numel() == 1 else first.view(-1).to(x.device)
