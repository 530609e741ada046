"""The recorded initialisation of a parameter. Replayed for a shard, it gives the elements of the full tensor."""

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
from hpcai.nn.safetensors_files import Lazy

Box = tuple[slice, ...]

_CHUNK = 1 << 18  # elements that one thread computes at a time: 1 MiB in float32
FILL_OPS = ("fill_", "zero_")
RANDOM_OPS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, dict[str, Any]], Tensor]]] = {
    "uniform_": (philox.uniform, lambda x, w: x.mul_(w["to"] - w["from"]).add_(w["from"])),
    "normal_": (philox.normal, lambda x, w: x.mul_(w["std"]).add_(w["mean"])),
}


@dataclass
class InitTrace:
    """The initialisation of a parameter of ``size``: ``base`` (None: the first operation writes all elements), then ``ops``."""

    seed: int
    size: tuple[int, ...]
    base: Tensor | Lazy | None
    ops: list["InitOp"] = field(default_factory=list)
    draws: int = 0
    name: str | None = None
    version: int | None = None  # of the parameter at the end of the recording

    def write(self, local: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Write the shard ``local``, which holds these index ranges of each dim of the full tensor, concatenated."""
        base, ops = self.base, self.ops
        if not all(op.is_elementwise for op in ops):
            base, ops = self._full(), []
        for local_box, full_box in _chunks(ranges, local):
            x = local[local_box]
            if ops:
                x = torch.empty(x.shape, dtype=_compute_dtype(ops[0].dtype), device=x.device)
            if base is not None:
                x.copy_(base[full_box])
            starts = _row_starts(full_box, self.size, x) if ops else torch.empty(0)
            for op in ops:
                x = x.to(_compute_dtype(op.dtype))
                op.apply(x, starts)
            if ops:
                local[local_box] = x

    def _full(self) -> Tensor:
        """Return the full tensor, by replaying all operations."""
        x = torch.empty(self.size, dtype=self.ops[0].dtype)
        if self.base is not None:
            x.copy_(self.base[tuple(slice(0, n) for n in self.size)])
        for op in self.ops:
            x = torch.empty_strided(self.size, op.strides, dtype=op.dtype).copy_(x)
            op.apply(x if op.view is None else x.as_strided(*op.view), torch.zeros(1, dtype=torch.int64))
        return x


@dataclass(frozen=True, eq=False)
class InitOp:
    """An in-place operation on a parameter with these ``strides`` and ``dtype``, or on a ``view`` (size, strides, offset) of it.

    ``...`` stands for the parameter among the arguments. ``draw``: The number of random operations on it before this one.
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
        """Whether it can be applied to a shard alone."""
        scalars = all(not isinstance(x, Tensor) or x.ndim == 0 for x in tree_leaves((self.args, self.kwargs)))
        pointwise = self.name in (*RANDOM_OPS, *FILL_OPS) or (torch.Tag.pointwise in self.func.tags and not self.is_random)
        return self.view is None and scalars and pointwise

    def apply(self, x: Tensor, starts: Tensor) -> None:
        """Apply it to ``x``, whose rows of equal length start at the indices ``starts`` [r] of the flat full tensor."""
        if self.is_random and self.name in RANDOM_OPS:
            draw, shape = RANDOM_OPS[self.name]
            arguments = {a.name: a.default_value for a in self.func._schema.arguments}
            arguments |= dict(zip(arguments, self.args)) | self.kwargs
            out = torch.empty(x.shape, dtype=_compute_dtype(x.dtype), device=x.device)
            if len(starts) == 1:
                draw(self._key(), int(starts), x.numel(), out=out.view(-1))
            elif x.numel():
                draw(self._key(), starts, x.numel() // len(starts), out=out.view(len(starts), -1))
            x.copy_(shape(out, arguments))
            return
        with torch.random.fork_rng(devices=[]) if self.is_random else nullcontext():
            if self.is_random:
                torch.default_generator.manual_seed(self._key())
            args, kwargs = tree_map(lambda a: x if a is ... else a, (self.args, self.kwargs))
            self.func(*args, **kwargs)

    def _key(self) -> int:
        if self.trace.name is None:
            raise ConfigError(f"{self.name}: its elements were copied from a parameter that is not in the model; keep that one")
        text = f"{self.trace.seed} {self.trace.name} {self.draw}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # seeds of torch have a sign


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _chunks(ranges: Sequence[Sequence[tuple[int, int]]], local: Tensor) -> Iterator[tuple[Box, Box]]:
    """Yield boxes of ``local`` with few elements, split along dim 0, and the same boxes of the full tensor."""
    max_elements = _CHUNK * (torch.get_num_threads() if local.device.type == "cpu" else 64)
    dims: list[list[tuple[slice, slice]]] = []
    for d, dim_ranges in enumerate(ranges):
        at, dim = 0, list[tuple[slice, slice]]()
        for a, b in dim_ranges:
            step = max(max_elements // math.prod(local.shape[1:]) if d == 0 and local.numel() else b - a, 1)
            dim += [(slice(at + c - a, at + min(c + step, b) - a), slice(c, min(c + step, b))) for c in range(a, b, step)]
            at += b - a
        dims.append(dim)
    for pairs in product(*dims):
        yield tuple(local_slice for local_slice, _ in pairs), tuple(full_slice for _, full_slice in pairs)


def _row_starts(box: Box, size: tuple[int, ...], x: Tensor) -> Tensor:
    """Return the flat indices [r] at which the contiguous rows of a box start in the full tensor."""
    dim = max((d for d, part in enumerate(box) if part != slice(0, size[d])), default=0)
    starts = torch.tensor([box[dim].start * math.prod(size[dim + 1 :]) if box else 0])
    for d in range(dim):
        starts = starts[..., None] + torch.arange(box[d].start, box[d].stop) * math.prod(size[d + 1 :])
    return starts.view(-1) if starts.numel() == 1 else starts.view(-1).to(x.device)
