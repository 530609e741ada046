"""Sharded parameters, and the flat parameters that an optimizer updates.

A sharded parameter has a ``ShardSpec``: the index ranges of the full tensor that this rank holds. A flat parameter (FSDP's term)
concatenates parameters, each in its memory order (channels-last stays channels-last), or is a shard of such a concatenation.
Weights, gradients, moments and averages are flat tensors of the same length.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError

ALONE = Axis("alone")
Ranges = tuple[tuple[int, int], ...]  # (begin, end) of each


@dataclass(frozen=True)
class ShardSpec:
    """The shard of a tensor that this rank holds: for each dim, the index ranges of the full tensor, concatenated.

    Ranks along ``axes`` hold the other shards. Ranks along ``exclusive_axes`` do not have the tensor at all (another pipeline
    stage, other experts). Along every other axis of the mesh all ranks hold the same shard.
    """

    global_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    axes: tuple[Axis, ...] = ()
    exclusive_axes: tuple[Axis, ...] = ()

    @classmethod
    def full(cls, size: Sequence[int]) -> "ShardSpec":
        return cls(tuple(size), tuple(((0, n),) for n in size))

    @property
    def axis_names(self) -> set[str]:
        """The names of the mesh axes along which ranks hold different elements."""
        return {axis.parent or axis.name for axis in (*self.axes, *self.exclusive_axes)}

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Split a box of the shard into boxes of the full tensor: yield its offsets there and slices of the given box."""
        dims = [list(_intersect(ranges, o, o + n)) for ranges, o, n in zip(self.ranges, offsets, sizes)]
        for pieces in product(*dims):
            yield tuple(start for start, _, _ in pieces), tuple(slice(a - o, b - o) for (_, a, b), o in zip(pieces, offsets))


def _intersect(ranges: Ranges, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Split elements ``begin`` to ``end`` of the concatenated ranges: yield (global start, local start, local end) per piece."""
    position = 0
    for first, last in ranges:
        a, b = max(begin, position), min(end, position + last - first)
        if a < b or first == last == begin:
            yield first + a - position, a, b
        position += last - first


def subrange(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return elements ``begin`` to ``end`` of the concatenated ranges, as ranges of the full tensor."""
    return tuple((start, start + b - a) for start, a, b in _intersect(ranges, begin, end))


def shard_spec(tensor: Tensor) -> ShardSpec:
    """Return the spec of ``tensor``; a tensor that was not sharded is full."""
    return getattr(tensor, "shard_spec", None) or ShardSpec.full(tensor.shape)


def with_spec(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` with the spec of ``like``, if it has one."""
    if hasattr(like, "shard_spec"):
        tensor.shard_spec = like.shard_spec  # type: ignore[attr-defined]
    return tensor


@torch.no_grad()
def shard_(tensor: Tensor, dim: int, axis: Axis, sizes: Sequence[int] = ()) -> None:
    """Shard ``tensor``, a parameter or a buffer, along ``dim`` in place: rank r holds elements n*r/size to n*(r+1)/size of n.

    ``sizes``: Sizes of tensors that are concatenated along ``dim`` and sharded separately (queries, keys and values in one weight).
    A tensor that was already sharded this way, because two modules share it, is left unchanged. Raises ConfigError if a rank would
    hold no element, or if the tensor is already sharded over ``axis`` in another dim.
    """
    spec = shard_spec(tensor)
    dim, length = dim % tensor.ndim, tensor.shape[dim]
    if axis.size == 1:
        return
    if axis in spec.axes:
        if spec.ranges[dim] == ((0, spec.global_shape[dim]),):
            raise ConfigError(f"a weight {list(spec.global_shape)} is sharded over {axis.name} in another dim than {dim}; keep one")
        return
    sizes = sizes or (length,)
    if sum(sizes) != length or min(sizes) < axis.size:
        fault = f"a weight {list(tensor.shape)} cannot be sharded over {axis.name} in dim {dim}: sizes are {list(sizes)}"
        raise ConfigError(f"{fault}, expected a sum of {length} and at least one element for each of {axis.size} ranks")
    local, start = [], 0
    for n in sizes:
        local.append((start + n * axis.rank // axis.size, start + n * (axis.rank + 1) // axis.size))
        start += n
    ranges = tuple(part for first, last in local for part in subrange(spec.ranges[dim], first, last))
    all_ranges = (*spec.ranges[:dim], ranges, *spec.ranges[dim + 1 :])
    pieces = [tensor.data.narrow(dim, first, last - first) for first, last in local]
    tensor.data = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.preserve_format)
    tensor.shard_spec = replace(spec, ranges=all_ranges, axes=(*spec.axes, axis))  # type: ignore[attr-defined]


def mark_exclusive(tensor: Tensor, axis: Axis) -> None:
    """Record that other ranks along ``axis`` do not have ``tensor``, a parameter or a buffer: they hold other layers."""
    spec = shard_spec(tensor)
    if axis.size > 1 and axis not in spec.exclusive_axes:
        tensor.shard_spec = replace(spec, exclusive_axes=(*spec.exclusive_axes, axis))  # type: ignore[attr-defined]


def sum_axes(parameter: Tensor) -> tuple[Axis, ...]:
    """Return the axes over which gradients are summed besides replicate: each rank sees a part of a sample
    (``sum_gradients_over``), or the axis is a subset of one over which the parameter is sharded (``Axis.parent``)."""
    return tuple(axis for axis in getattr(parameter, "sum_axes", ()) if axis.size > 1)


def replica_axes(tensor: Tensor, mesh: Mesh, shard_axis: Axis = ALONE, replicate_axis: Axis = ALONE) -> tuple[Axis, ...]:
    """Return the axes along which all ranks hold the same elements of ``tensor``: as few as possible, no two along one mesh axis.

    With ``shard_axis``: of a shard of it, where ranks along ``shard_axis`` hold the other shards, and ranks along
    ``replicate_axis`` the same shard (hybrid sharding).
    """
    differing = shard_spec(tensor).axis_names | {shard_axis.parent or shard_axis.name}
    merged = mesh.flatten(*(axis.name for axis in mesh.used if axis.name not in differing))
    axes = (merged, replicate_axis, *(axis for axis in sum_axes(tensor) if axis.parent in differing))
    return tuple(axis for axis in axes if axis.size > 1)


@dataclass(frozen=True)
class FlatView:
    """``length`` elements of a parameter from ``param_offset``, in memory order, at ``flat_offset`` of a flat parameter."""

    name: str
    parameter: nn.Parameter
    param_offset: int
    length: int
    flat_offset: int
    spec: ShardSpec

    def full(self, flat: Tensor) -> Tensor:
        """Return the view of ``flat`` in the shape of the parameter, all of whose elements it must hold."""
        return torch.as_strided(flat, self.parameter.size(), self.parameter.stride(), flat.storage_offset() + self.flat_offset)

    def boxes(self, flat: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Split the elements into boxes of the full weight: yield (offsets, a view of ``flat`` in the shape of the box)."""
        stride, spec = self.parameter.stride(), self.spec
        for offsets, sizes in boxes(tuple(self.parameter.shape), stride, self.param_offset, self.param_offset + self.length):
            position = sum(o * s for o, s in zip(offsets, stride)) - self.param_offset + self.flat_offset
            piece = torch.as_strided(flat, sizes, stride, flat.storage_offset() + position)
            yield from ((global_offsets, piece[part]) for global_offsets, part in spec.boxes(offsets, sizes))


class FlatParameter:
    """Parameters that are updated in one pass: ``weights`` [n] in the compute dtype, and a view for each parameter.

    ``gradient()`` returns the flat gradient [n], summed over all replicas, or None if there is none. Ranks along ``shard_axis``
    hold the other shards of the flat parameter (size 1: it is full), and this shard begins at ``offset``. All shards list the same
    parameters, including those of which they hold no element. All views have the same ``axes`` and ``exclusive_axes`` and the same
    gradient sums. All ranks along ``replica_axes`` hold the same elements.
    """

    def __init__(
        self, views: Sequence[FlatView], weights: Tensor, gradient: Callable[[], Tensor | None], decays: bool,
        replica_axes: tuple[Axis, ...] = (), shard_axis: Axis = ALONE, offset: int = 0,
    ) -> None:  # fmt: skip
        self.views, self.weights, self.gradient, self.decays = list(views), weights, gradient, decays
        self.replica_axes, self.shard_axis, self.offset = replica_axes, shard_axis, offset

    @property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks hold the other shards of the same weights."""
        axes = self.views[0].spec.axes
        return axes if self.shard_axis.size == 1 else (*axes, self.shard_axis)

    @property
    def partition_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks hold all other elements of the model."""
        return (*self.sharded_axes, *self.views[0].spec.exclusive_axes)

    @property
    def is_counted(self) -> bool:
        """Whether a sum over ``partition_axes`` includes this rank: elements that several of its ranks hold count once."""
        names = {axis.name for axis in self.partition_axes}
        return all(axis.rank == 0 for axis in self.replica_axes if axis.parent in names)


@dataclass(frozen=True)
class FlatShard:
    """The elements of one weight that this rank, like all ranks along ``replica_axes``, holds: some, all or none."""

    view: FlatView
    flat: Tensor
    replica_axes: tuple[Axis, ...]


def global_sum(values: Iterable[tuple[FlatParameter, Tensor]]) -> Tensor:
    """Return the sum over all elements of the model, each once, from the sum [] of each flat parameter: an all-reduce per axis."""
    sums: dict[tuple[Axis, ...], Tensor] = {}

    def add(axes: tuple[Axis, ...], value: Tensor) -> None:
        sums[axes] = sums[axes] + value if axes in sums else value

    for flat, value in values:
        add(tuple(sorted(flat.partition_axes, key=_last_is_pipeline)), value if flat.is_counted else torch.zeros_like(value))
    for axis in sorted({axis for axes in sums for axis in axes}, key=_last_is_pipeline):
        pending = {others: sums.pop(others) for others in list(sums) if axis in others}
        reduced = all_reduce_(torch.stack(list(pending.values())), axis)
        for axes, value in zip(pending, reduced):
            add(axes[1:], value)
    return sums[()]


def _last_is_pipeline(axis: Axis) -> tuple[bool, str]:
    """Sort key of axes, the same on all ranks. Stages have different flat parameters, which the other axes reduce to one sum."""
    return (axis.parent or axis.name) == "pipeline", axis.name


def local_view(view: FlatView, flat: Tensor, like: FlatParameter) -> Tensor | FlatShard:
    """Return the elements that ``flat``, in the layout of ``like``, holds of a weight: the full tensor in its shape, or a shard."""
    return FlatShard(view, flat, like.replica_axes) if like.partition_axes else view.full(flat)


def boxes(shape: tuple[int, ...], stride: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements ``begin`` to ``end`` of a dense tensor in memory order into boxes (offsets, sizes), fewer than two per dim."""
    order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d] > 1), reverse=True)
    lengths = [shape[d] for d in order]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def add(fixed: list[int], first: int, last: int) -> None:
        dim = len(fixed)
        offsets, sizes = [0] * len(shape), [1] * len(shape)
        for d, position in zip(order, fixed):
            offsets[d] = position
        if dim < len(order):
            offsets[order[dim]], sizes[order[dim]] = first, last - first
            for d in order[dim + 1 :]:
                sizes[d] = shape[d]
        pieces.append((tuple(offsets), tuple(sizes)))

    def split(fixed: list[int], a: int, b: int) -> None:
        if len(fixed) == len(order):
            add(fixed, 0, 0)
            return
        inner = prod(lengths[len(fixed) + 1 :])
        (first, a), (last, b) = divmod(a, inner), divmod(b, inner)
        if first == last:
            split([*fixed, first], a, b)
            return
        if a:
            split([*fixed, first], a, inner)
            first += 1
        if last > first:
            add(fixed, first, last)
        if b:
            split([*fixed, last], 0, b)

    if begin < end:
        split([], begin, end)
    return pieces


def flatten(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in the memory order of ``parameter`` [n]: a view if both have the same strides."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def as_flat_parameter(name: str, parameter: nn.Parameter, decays: bool, replica_axes: tuple[Axis, ...] = ()) -> FlatParameter:
    """Return a flat parameter that is one parameter in its own memory, with the gradient that autograd left: nothing is copied."""

    def gradient() -> Tensor | None:
        if flat.weights.data_ptr() != parameter.data_ptr():  # the parameter has new memory
            flat.weights = flatten(parameter.detach(), parameter)
        return None if parameter.grad is None else flatten(parameter.grad, parameter)

    view = FlatView(name, parameter, 0, parameter.numel(), 0, shard_spec(parameter))
    flat = FlatParameter([view], flatten(parameter.detach(), parameter), gradient, decays, replica_axes)
    return flat


def check_dense(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for a parameter whose elements are not contiguous in memory, in any order of dims."""
    for name, parameter in parameters.items():
        if sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride())) + 1 != parameter.numel():
            raise ConfigError(f"parameter {name} has gaps or overlaps in memory (strides {parameter.stride()}); make it contiguous")
