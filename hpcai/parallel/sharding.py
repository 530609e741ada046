"""Where weights lie: places within a whole that several processes hold together, and rows that an optimizer updates as one.

A weight that is cut has a ``Place``, which says what part of the whole it is. A row holds parameters one after another, each in its
own order of memory (a channels-last weight stays channels-last), or this process's share of them. Weights, gradients, moments and
averages are rows of the same length.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from hpcai.dist.collect import sum_in_place
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError

ALONE = Axis("alone")
Ranges = tuple[tuple[int, int], ...]  # first and last + 1 of each


@dataclass(frozen=True)
class ShardSpec:
    """Where a tensor lies within a whole of ``size``: in each dim, the ``stretches`` of the whole that are here, one after another.

    The ranks along ``axes`` hold its other parts; those along ``apart`` have no such tensor (another stage of a pipeline, other
    experts). Along every other axis of the mesh all hold the same.
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
        """The axes of the mesh along which not all ranks hold the same."""
        return {axis.of or axis.name for axis in (*self.axes, *self.exclusive_axes)}

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """A box of the tensor as boxes of the whole: the offsets there, and which part of the box it is."""
        dims = [list(_intersect(stretches, o, o + n)) for stretches, o, n in zip(self.ranges, offsets, sizes)]
        for pieces in product(*dims):
            yield tuple(at for at, _, _ in pieces), tuple(slice(a - o, b - o) for (_, a, b), o in zip(pieces, offsets))


def _intersect(ranges: Ranges, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Numbers ``begin`` to ``end`` of what the stretches are together: where each piece begins in the whole, and here; its end."""
    position = 0
    for first, last in ranges:
        a, b = max(begin, position), min(end, position + last - first)
        if a < b or first == last == begin:
            yield first + a - position, a, b
        position += last - first


def subrange(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Numbers ``begin`` to ``end`` of what the stretches are together, as stretches of the whole."""
    return tuple((at, at + b - a) for at, a, b in _intersect(ranges, begin, end))


def shard_spec(tensor: Tensor) -> ShardSpec:
    """Where ``tensor`` lies; one that nobody cut is whole."""
    return getattr(tensor, "shard_spec", None) or ShardSpec.full(tensor.shape)


def with_spec(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, which lies where ``like`` does."""
    if hasattr(like, "shard_spec"):
        tensor.shard_spec = like.shard_spec  # type: ignore[attr-defined]
    return tensor


@torch.no_grad()
def shard_(tensor: Tensor, dim: int, axis: Axis, sizes: Sequence[int] = ()) -> None:
    """Leave of ``tensor``, a parameter or a buffer, this rank's share along ``dim``, in place: of n numbers, from n*r/size on.

    ``parts``: the sizes of tensors that lie one behind another along ``dim``, of which each is cut by itself (queries, keys and
    values in one weight). A tensor that has been cut like this already, since two modules share it, stays as it is. Raises
    ConfigError where there is less than one number for each rank, or where it is cut along ``axis`` in another dim.
    """
    spec = shard_spec(tensor)
    dim, length = dim % tensor.ndim, tensor.shape[dim]
    if axis.size == 1:
        return
    if axis in spec.axes:
        if spec.ranges[dim] == ((0, spec.global_shape[dim]),):
            raise ConfigError(f"a weight of {list(spec.global_shape)} is cut over {axis.name} in another dim than {dim}; keep one")
        return
    sizes = sizes or (length,)
    if sum(sizes) != length or min(sizes) < axis.size:
        raise ConfigError(
            f"a weight of {list(tensor.shape)} cannot be cut over {axis.name} in dim {dim}: its parts are {list(sizes)}, expected "
            f"a sum of {length} and at least one number for each of {axis.size} ranks"
        )
    local, start = [], 0
    for n in sizes:
        local.append((start + n * axis.rank // axis.size, start + n * (axis.rank + 1) // axis.size))
        start += n
    ranges = tuple(part for first, last in local for part in subrange(spec.ranges[dim], first, last))
    all_ranges = (*spec.ranges[:dim], ranges, *spec.ranges[dim + 1 :])
    pieces = [tensor.data.narrow(dim, first, last - first) for first, last in local]
    tensor.data = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.preserve_format)
    tensor.shard_spec = replace(spec, ranges=all_ranges, axes=(*spec.axes, axis))  # type: ignore[attr-defined]


def mark_exclusive(module: nn.Module, axis: Axis) -> None:
    """Record that the ranks along ``axis`` have no such ``module``: they hold other layers, or other experts."""
    for tensor in (*module.parameters(), *module.buffers()):
        mark_tensor_exclusive(tensor, axis)


def mark_tensor_exclusive(tensor: Tensor, axis: Axis) -> None:
    """``keep_apart`` of one parameter or buffer."""
    spec = shard_spec(tensor)
    if axis.size > 1 and axis not in spec.exclusive_axes:
        tensor.shard_spec = replace(spec, exclusive_axes=(*spec.exclusive_axes, axis))  # type: ignore[attr-defined]


def sum_axes(parameter: Tensor) -> tuple[Axis, ...]:
    """The axes over which gradients are added besides replicate, because each rank sees a part of a sample (``sum_over``), and
    those of a part of an axis along which it is cut (``Axis.of``)."""
    return tuple(axis for axis in getattr(parameter, "sum_axes", ()) if axis.size > 1)


def replica_axes(tensor: Tensor, mesh: Mesh, shard_axis: Axis = ALONE, replicate_axis: Axis = ALONE) -> tuple[Axis, ...]:
    """The axes along which all ranks hold the same numbers of ``tensor``: as few as can be, no two of them in one direction.

    ``cut``: of a share of it, which the ranks along ``cut`` have shares of; groups that divide it alike lie along ``between``.
    """
    differing = shard_spec(tensor).axis_names | {shard_axis.of or shard_axis.name}
    merged = mesh.over(*(axis.name for axis in mesh.used if axis.name not in differing))
    axes = (merged, replicate_axis, *(axis for axis in sum_axes(tensor) if axis.of in differing))
    return tuple(axis for axis in axes if axis.size > 1)


@dataclass(frozen=True)
class FlatView:
    """Numbers ``begin`` to ``begin + length`` of a parameter, in its order of memory, which begin at ``start`` of a row."""

    name: str
    parameter: nn.Parameter
    param_offset: int
    length: int
    flat_offset: int
    spec: ShardSpec

    def full(self, flat: Tensor) -> Tensor:
        """The parameter's numbers in ``row``, in its shape. The part must be whole."""
        return torch.as_strided(flat, self.parameter.size(), self.parameter.stride(), flat.storage_offset() + self.flat_offset)

    def boxes(self, flat: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The numbers of this part as rectangular pieces of the whole weight: (offsets, a view of ``row`` in the piece's shape)."""
        stride, spec = self.parameter.stride(), self.spec
        for offsets, sizes in boxes(tuple(self.parameter.shape), stride, self.param_offset, self.param_offset + self.length):
            position = sum(o * s for o, s in zip(offsets, stride)) - self.param_offset + self.flat_offset
            piece = torch.as_strided(flat, sizes, stride, flat.storage_offset() + position)
            yield from ((global_offsets, piece[part]) for global_offsets, part in spec.boxes(offsets, sizes))


class FlatParameter:
    """What one process updates together: ``weights`` [n] in the dtype that the model computes with, and where each parameter lies.

    ``gradient()`` gives the row of gradients [n], summed over all copies of the model, or None where there is none. ``cut`` is the
    axis whose ranks hold the other shares of the row (size 1: there are none), and ``first`` is where this share begins.
    All shares name the same parameters, even those of which they hold no number. All parts have the same ``axes`` and ``apart``
    (``Place``) and the same sums; ``copies`` are the axes along which all hold the same.
    """

    def __init__(
        self, views: Sequence[FlatView], weights: Tensor, gradient: Callable[[], Tensor | None], decays: bool,
        replica_axes: tuple[Axis, ...] = (), shard_axis: Axis = ALONE, offset: int = 0,
    ) -> None:  # fmt: skip
        self.views, self.weights, self.gradient, self.decays = list(views), weights, gradient, decays
        self.replica_axes, self.shard_axis, self.offset = replica_axes, shard_axis, offset

    @property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """The axes along which lie the other parts of the same weights."""
        axes = self.views[0].spec.axes
        return axes if self.shard_axis.size == 1 else (*axes, self.shard_axis)

    @property
    def partition_axes(self) -> tuple[Axis, ...]:
        """The axes along which lie all other numbers of the model."""
        return (*self.sharded_axes, *self.views[0].spec.exclusive_axes)

    @property
    def is_counted(self) -> bool:
        """Whether these numbers count in a sum over ``others``: they do once, where several of those ranks hold the same."""
        names = {axis.name for axis in self.partition_axes}
        return all(axis.rank == 0 for axis in self.replica_axes if axis.of in names)


@dataclass(frozen=True)
class FlatShard:
    """The numbers of one weight that this process, and those along ``copies``, hold: some, all or none."""

    view: FlatView
    flat: Tensor
    replica_axes: tuple[Axis, ...]


def global_sum(values: Iterable[tuple[FlatParameter, Tensor]]) -> Tensor:
    """The sum over all numbers of the model, of which each counts once, from each row's own sum []: one message for each axis."""
    sums: dict[tuple[Axis, ...], Tensor] = {}

    def add(axes: tuple[Axis, ...], value: Tensor) -> None:
        sums[axes] = sums[axes] + value if axes in sums else value

    for flat, value in values:
        add(tuple(sorted(flat.partition_axes, key=_last_is_pipeline)), value if flat.is_counted else torch.zeros_like(value))
    for axis in sorted({axis for axes in sums for axis in axes}, key=_last_is_pipeline):
        pending = {others: sums.pop(others) for others in list(sums) if axis in others}
        reduced = sum_in_place(torch.stack(list(pending.values())), axis)
        for axes, value in zip(pending, reduced):
            add(axes[1:], value)
    return sums[()]


def _last_is_pipeline(axis: Axis) -> tuple[bool, str]:
    """An order of axes that all ranks have. Stages have other rows, of which the other axes leave one sum."""
    return (axis.of or axis.name) == "pipeline", axis.name


def local_view(view: FlatView, flat: Tensor, like: FlatParameter) -> Tensor | FlatShard:
    """What ``row``, which lies like the row ``of``, holds of the weight of ``part``: the whole in its shape, or a share."""
    return FlatShard(view, flat, like.replica_axes) if like.partition_axes else view.full(flat)


def boxes(shape: tuple[int, ...], stride: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``begin`` to ``end`` of a dense tensor, in its order of memory, as rectangular pieces (offsets, sizes); these are
    fewer than two for each dim."""
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


def flatten_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The numbers of ``tensor`` in the order in which ``parameter`` lies in memory: a view where both lie alike."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def unflatten(name: str, parameter: nn.Parameter, decays: bool, replica_axes: tuple[Axis, ...] = ()) -> FlatParameter:
    """A row of one parameter where it lies, with the gradient that autograd left: nothing is copied."""

    def gradient() -> Tensor | None:
        if flat.weights.data_ptr() != parameter.data_ptr():  # the parameter was given other memory
            flat.weights = flatten_like(parameter.detach(), parameter)
        return None if parameter.grad is None else flatten_like(parameter.grad, parameter)

    view = FlatView(name, parameter, 0, parameter.numel(), 0, shard_spec(parameter))
    flat = FlatParameter([view], flatten_like(parameter.detach(), parameter), gradient, decays, replica_axes)
    return flat


def check_dense(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for a parameter whose numbers do not lie one after another."""
    for name, parameter in parameters.items():
        if sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride())) + 1 != parameter.numel():
            raise ConfigError(
                f"parameter {name} has gaps in memory or repeats itself (strides {parameter.stride()}); make it contiguous"
            )
