"""Rows: stretches of numbers that an optimizer updates as one.

A row holds parameters one after another, each in its own order of memory (a channels-last weight stays channels-last), or this
process's share of them. Weights, gradients, moments and averages are rows of the same length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError

ALONE = Axis("alone")


@dataclass(frozen=True)
class Part:
    """Numbers ``begin`` to ``begin + length`` of a parameter, in its order of memory, which begin at ``start`` of a row."""

    name: str
    parameter: nn.Parameter
    begin: int
    length: int
    start: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.parameter.numel()

    def whole(self, row: Tensor) -> Tensor:
        """The parameter's numbers in ``row``, in its shape. The part must be whole."""
        return torch.as_strided(row, self.parameter.size(), self.parameter.stride(), row.storage_offset() + self.start)

    def boxes(self, row: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The numbers of this part as rectangular pieces of the parameter: (offsets, a view of ``row`` in the piece's shape)."""
        stride = self.parameter.stride()
        for offsets, sizes in boxes(tuple(self.parameter.shape), stride, self.begin, self.begin + self.length):
            at = sum(o * s for o, s in zip(offsets, stride)) - self.begin + self.start
            yield offsets, torch.as_strided(row, sizes, stride, row.storage_offset() + at)


class Row:
    """What one process updates together: ``weights`` [n] in the dtype that the model computes with, and where each parameter lies.

    ``gradient()`` gives the row of gradients [n], summed over all copies of the model, or None where there is none. ``cut`` is the
    axis whose ranks hold the other shares of these parameters (size 1: there are none), and ``first`` is where this share begins.
    All shares name the same parameters, even those of which they hold no number.
    """

    def __init__(
        self, parts: Sequence[Part], weights: Tensor, gradient: Callable[[], Tensor | None], decays: bool,
        cut: Axis = ALONE, first: int = 0,
    ) -> None:  # fmt: skip
        self.parts, self.weights, self.gradient, self.decays = list(parts), weights, gradient, decays
        self.cut, self.first = cut, first


@dataclass(frozen=True)
class Share:
    """The numbers of one parameter that this process alone holds: some, all or none."""

    part: Part
    row: Tensor


def held(part: Part, row: Tensor, cut: Axis = ALONE) -> Tensor | Share:
    """What ``row`` holds of the parameter of ``part``: the whole in its shape, or, of a row that is cut, a share."""
    return part.whole(row) if cut.size == 1 else Share(part, row)


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


def loose(name: str, parameter: nn.Parameter, decays: bool) -> Row:
    """A row of one parameter where it lies, with the gradient that autograd left: nothing is copied."""

    def gradient() -> Tensor | None:
        if row.weights.data_ptr() != parameter.data_ptr():  # the parameter was given other memory
            row.weights = row_of(parameter.detach(), parameter)
        return None if parameter.grad is None else row_of(parameter.grad, parameter)

    part = Part(name, parameter, 0, parameter.numel(), 0)
    row = Row([part], row_of(parameter.detach(), parameter), gradient, decays)
    return row


def check_dense(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for a parameter whose numbers do not lie one after another."""
    for name, parameter in parameters.items():
        if sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride())) + 1 != parameter.numel():
            raise ConfigError(
                f"parameter {name} has gaps in memory or repeats itself (strides {parameter.stride()}); make it contiguous"
            )
