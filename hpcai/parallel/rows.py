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

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError

ALONE = Axis("alone")
Stretches = tuple[tuple[int, int], ...]  # first and last + 1 of each


@dataclass(frozen=True)
class Place:
    """Where a tensor lies within a whole of ``size``: in each dim, the ``stretches`` of the whole that are here, one after another.

    The ranks along ``axes`` hold its other parts; those along ``apart`` have no such tensor (another stage of a pipeline, other
    experts). Along every other axis of the mesh all hold the same.
    """

    size: tuple[int, ...]
    stretches: tuple[Stretches, ...]
    axes: tuple[Axis, ...] = ()
    apart: tuple[Axis, ...] = ()

    @classmethod
    def whole(cls, size: Sequence[int]) -> "Place":
        return cls(tuple(size), tuple(((0, n),) for n in size))

    @property
    def directions(self) -> set[str]:
        """The axes of the mesh along which not all ranks hold the same."""
        return {axis.parent or axis.name for axis in (*self.axes, *self.apart)}

    def boxes(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """A box of the tensor as boxes of the whole: the offsets there, and which part of the box it is."""
        dims = [list(_common(stretches, o, o + n)) for stretches, o, n in zip(self.stretches, offsets, sizes)]
        for pieces in product(*dims):
            yield tuple(at for at, _, _ in pieces), tuple(slice(a - o, b - o) for (_, a, b), o in zip(pieces, offsets))


def _common(stretches: Stretches, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Numbers ``begin`` to ``end`` of what the stretches are together: where each piece begins in the whole, and here; its end."""
    here = 0
    for first, last in stretches:
        a, b = max(begin, here), min(end, here + last - first)
        if a < b or first == last == begin:
            yield first + a - here, a, b
        here += last - first


def within(stretches: Stretches, begin: int, end: int) -> Stretches:
    """Numbers ``begin`` to ``end`` of what the stretches are together, as stretches of the whole."""
    return tuple((at, at + b - a) for at, a, b in _common(stretches, begin, end))


def place_of(tensor: Tensor) -> Place:
    """Where ``tensor`` lies; one that nobody cut is whole."""
    return getattr(tensor, "place", None) or Place.whole(tensor.shape)


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor``, which lies where ``like`` does."""
    if hasattr(like, "place"):
        tensor.place = like.place  # type: ignore[attr-defined]
    return tensor


@torch.no_grad()
def cut(tensor: Tensor, dim: int, axis: Axis, parts: Sequence[int] = ()) -> None:
    """Leave of ``tensor``, a parameter or a buffer, this rank's share along ``dim``, in place: of n numbers, from n*r/size on.

    ``parts``: the sizes of tensors that lie one behind another along ``dim``, of which each is cut by itself (queries, keys and
    values in one weight). A tensor that has been cut like this already, since two modules share it, stays as it is. Raises
    ConfigError where there is less than one number for each rank, or where it is cut along ``axis`` in another dim.
    """
    before = place_of(tensor)
    dim, length = dim % tensor.ndim, tensor.shape[dim]
    if axis.size == 1:
        return
    if axis in before.axes:
        if before.stretches[dim] == ((0, before.size[dim]),):
            raise ConfigError(f"a weight of {list(before.size)} is cut over {axis.name} in another dim than {dim}; keep one")
        return
    parts = parts or (length,)
    if sum(parts) != length or min(parts) < axis.size:
        raise ConfigError(
            f"a weight of {list(tensor.shape)} cannot be cut over {axis.name} in dim {dim}: its parts are {list(parts)}, expected "
            f"a sum of {length} and at least one number for each of {axis.size} ranks"
        )
    own, at = [], 0
    for n in parts:
        own.append((at + n * axis.rank // axis.size, at + n * (axis.rank + 1) // axis.size))
        at += n
    stretches = tuple(part for first, last in own for part in within(before.stretches[dim], first, last))
    grown = (*before.stretches[:dim], stretches, *before.stretches[dim + 1 :])
    pieces = [tensor.data.narrow(dim, first, last - first) for first, last in own]
    tensor.data = torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.preserve_format)
    tensor.place = replace(before, stretches=grown, axes=(*before.axes, axis))  # type: ignore[attr-defined]


def keep_apart(module: nn.Module, axis: Axis) -> None:
    """Record that the ranks along ``axis`` have no such ``module``: they hold other layers, or other experts."""
    for tensor in (*module.parameters(), *module.buffers()):
        set_apart(tensor, axis)


def set_apart(tensor: Tensor, axis: Axis) -> None:
    """``keep_apart`` of one parameter or buffer."""
    before = place_of(tensor)
    if axis.size > 1 and axis not in before.apart:
        tensor.place = replace(before, apart=(*before.apart, axis))  # type: ignore[attr-defined]


def sum_axes(parameter: Tensor) -> tuple[Axis, ...]:
    """The axes over which gradients are added besides replicate, because each rank sees a part of a sample (``sum_over``), and
    those of a part of an axis along which it is cut (``Axis.parent``)."""
    return tuple(axis for axis in getattr(parameter, "sum_axes", ()) if axis.size > 1)


def alike(tensor: Tensor, mesh: Mesh, cut: Axis = ALONE, between: Axis = ALONE) -> tuple[Axis, ...]:
    """The axes along which all ranks hold the same numbers of ``tensor``: as few as can be, no two of them in one direction.

    ``cut``: of a share of it, which the ranks along ``cut`` have shares of; groups that divide it alike lie along ``between``.
    """
    unlike = place_of(tensor).directions | {cut.parent or cut.name}
    together = mesh.flatten(*(axis.name for axis in mesh.used if axis.name not in unlike))
    found = (together, between, *(axis for axis in sum_axes(tensor) if axis.parent in unlike))
    return tuple(axis for axis in found if axis.size > 1)


@dataclass(frozen=True)
class Part:
    """Numbers ``begin`` to ``begin + length`` of a parameter, in its order of memory, which begin at ``start`` of a row."""

    name: str
    parameter: nn.Parameter
    begin: int
    length: int
    start: int
    place: Place

    def whole(self, row: Tensor) -> Tensor:
        """The parameter's numbers in ``row``, in its shape. The part must be whole."""
        return torch.as_strided(row, self.parameter.size(), self.parameter.stride(), row.storage_offset() + self.start)

    def boxes(self, row: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The numbers of this part as rectangular pieces of the whole weight: (offsets, a view of ``row`` in the piece's shape)."""
        stride, place = self.parameter.stride(), self.place
        for offsets, sizes in boxes(tuple(self.parameter.shape), stride, self.begin, self.begin + self.length):
            at = sum(o * s for o, s in zip(offsets, stride)) - self.begin + self.start
            piece = torch.as_strided(row, sizes, stride, row.storage_offset() + at)
            yield from ((whole, piece[part]) for whole, part in place.boxes(offsets, sizes))


class Row:
    """What one process updates together: ``weights`` [n] in the dtype that the model computes with, and where each parameter lies.

    ``gradient()`` gives the row of gradients [n], summed over all copies of the model, or None where there is none. ``cut`` is the
    axis whose ranks hold the other shares of the row (size 1: there are none), and ``first`` is where this share begins.
    All shares name the same parameters, even those of which they hold no number. All parts have the same ``axes`` and ``apart``
    (``Place``) and the same sums; ``copies`` are the axes along which all hold the same.
    """

    def __init__(
        self, parts: Sequence[Part], weights: Tensor, gradient: Callable[[], Tensor | None], decays: bool,
        copies: tuple[Axis, ...] = (), cut: Axis = ALONE, first: int = 0,
    ) -> None:  # fmt: skip
        self.parts, self.weights, self.gradient, self.decays = list(parts), weights, gradient, decays
        self.copies, self.cut, self.first = copies, cut, first

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes along which lie the other parts of the same weights."""
        own = self.parts[0].place.axes
        return own if self.cut.size == 1 else (*own, self.cut)

    @property
    def others(self) -> tuple[Axis, ...]:
        """The axes along which lie all other numbers of the model."""
        return (*self.axes, *self.parts[0].place.apart)

    @property
    def counts(self) -> bool:
        """Whether these numbers count in a sum over ``others``: they do once, where several of those ranks hold the same."""
        names = {axis.name for axis in self.others}
        return all(axis.rank == 0 for axis in self.copies if axis.parent in names)


@dataclass(frozen=True)
class Share:
    """The numbers of one weight that this process, and those along ``copies``, hold: some, all or none."""

    part: Part
    row: Tensor
    copies: tuple[Axis, ...]


def total(found: Iterable[tuple[Row, Tensor]]) -> Tensor:
    """The sum over all numbers of the model, of which each counts once, from each row's own sum []: one message for each axis."""
    sums: dict[tuple[Axis, ...], Tensor] = {}

    def add(others: tuple[Axis, ...], value: Tensor) -> None:
        sums[others] = sums[others] + value if others in sums else value

    for row, value in found:
        add(tuple(sorted(row.others, key=_last_is_pipeline)), value if row.counts else torch.zeros_like(value))
    for axis in sorted({axis for others in sums for axis in others}, key=_last_is_pipeline):
        open_sums = {others: sums.pop(others) for others in list(sums) if axis in others}
        added = all_reduce_(torch.stack(list(open_sums.values())), axis)
        for others, value in zip(open_sums, added):
            add(others[1:], value)
    return sums[()]


def _last_is_pipeline(axis: Axis) -> tuple[bool, str]:
    """An order of axes that all ranks have. Stages have other rows, of which the other axes leave one sum."""
    return (axis.parent or axis.name) == "pipeline", axis.name


def held(part: Part, row: Tensor, of: Row) -> Tensor | Share:
    """What ``row``, which lies like the row ``of``, holds of the weight of ``part``: the whole in its shape, or a share."""
    return Share(part, row, of.copies) if of.others else part.whole(row)


def boxes(shape: tuple[int, ...], stride: tuple[int, ...], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``begin`` to ``end`` of a dense tensor, in its order of memory, as rectangular pieces (offsets, sizes); these are
    fewer than two for each dim."""
    order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d] > 1), reverse=True)
    lengths = [shape[d] for d in order]
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def add(fixed: list[int], first: int, last: int) -> None:
        dim = len(fixed)
        offsets, sizes = [0] * len(shape), [1] * len(shape)
        for d, at in zip(order, fixed):
            offsets[d] = at
        if dim < len(order):
            offsets[order[dim]], sizes[order[dim]] = first, last - first
            for d in order[dim + 1 :]:
                sizes[d] = shape[d]
        found.append((tuple(offsets), tuple(sizes)))

    def part(fixed: list[int], a: int, b: int) -> None:
        if len(fixed) == len(order):
            add(fixed, 0, 0)
            return
        inner = prod(lengths[len(fixed) + 1 :])
        (first, a), (last, b) = divmod(a, inner), divmod(b, inner)
        if first == last:
            part([*fixed, first], a, b)
            return
        if a:
            part([*fixed, first], a, inner)
            first += 1
        if last > first:
            add(fixed, first, last)
        if b:
            part([*fixed, last], 0, b)

    if begin < end:
        part([], begin, end)
    return found


def row_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The numbers of ``tensor`` in the order in which ``parameter`` lies in memory: a view where both lie alike."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def loose(name: str, parameter: nn.Parameter, decays: bool, copies: tuple[Axis, ...] = ()) -> Row:
    """A row of one parameter where it lies, with the gradient that autograd left: nothing is copied."""

    def gradient() -> Tensor | None:
        if row.weights.data_ptr() != parameter.data_ptr():  # the parameter was given other memory
            row.weights = row_of(parameter.detach(), parameter)
        return None if parameter.grad is None else row_of(parameter.grad, parameter)

    part = Part(name, parameter, 0, parameter.numel(), 0, place_of(parameter))
    row = Row([part], row_of(parameter.detach(), parameter), gradient, decays, copies)
    return row


def check_dense(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for a parameter whose numbers do not lie one after another."""
    for name, parameter in parameters.items():
        if sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride())) + 1 != parameter.numel():
            raise ConfigError(
                f"parameter {name} has gaps in memory or repeats itself (strides {parameter.stride()}); make it contiguous"
            )
