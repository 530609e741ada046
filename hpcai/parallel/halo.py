"""Exchange of slices between the parts of a cut dim, with the adjoint, and convolutions over them.

A dim of S places is cut into the ranges that the ranks of an axis hold. Each rank says which range it needs; what it lacks comes
from the ranks that hold it: a slice from a neighbour, slabs of several ranks where they are thinner than the halo, or all slabs.
Gradients go back the same way and are added on the rank that holds the places. What a rank needs of a dim that comes back to its
beginning may go beyond the ends: place -1 is the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcai.dist.collectives import get_backend
from hpcai.dist.mesh import Axis
from hpcai.nn.conv import conv3d, conv3d_gradients

Range = tuple[int, int]


def shared(one: Range, other: Range) -> Range:
    """The places that are in both, or a range of length 0."""
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


@dataclass(frozen=True)
class Route:
    """What each rank of ``axis`` holds and needs of ``dim``, in places of the whole. ``before`` and ``after``: how many places of
    fill this rank puts around what it needs, beyond the ends of the whole. ``period``: how many places the whole has, where it
    comes back to its beginning, otherwise 0; a rank then needs at most as many beyond either end."""

    dim: int
    axis: Axis
    have: tuple[Range, ...]
    need: tuple[Range, ...]
    before: int = 0
    after: int = 0
    period: int = 0

    @property
    def own(self) -> Range:
        return self.have[self.axis.rank]

    @property
    def wanted(self) -> Range:
        return self.need[self.axis.rank]

    @cached_property
    def gets(self) -> list[tuple[int, Range]]:
        """What this rank gets, as (from which rank, which places), in the order of the places."""
        return self._gets(self.axis.rank)

    def _gets(self, rank: int) -> list[tuple[int, Range]]:
        need, held = self.need[rank], self.have[rank]
        if (self.period and held == (0, self.period)) or (held[0] <= need[0] and need[1] <= held[1]):
            return []
        parts = [(r, part) for r in range(self.axis.size) if r != rank for part in self._held(need, self.have[r])]
        return sorted(parts, key=lambda part: part[1])

    def _held(self, need: Range, have: Range, beyond: bool = False) -> list[Range]:
        """Which places of ``need`` are among ``have``, also one period away; or those alone (``beyond``)."""
        away = [-self.period, self.period] if self.period else []
        parts = [shared(need, (have[0] + by, have[1] + by)) for by in (away if beyond else [0, *away])]
        return [part for part in parts if part[1] > part[0]]

    def at_home(self, part: Range) -> Range:
        """The same places within the whole."""
        by = part[0] // self.period * self.period if self.period else 0
        return part[0] - by, part[1] - by

    @cached_property
    def returned(self) -> list[Range]:
        """What this rank needs beyond the ends of the whole and holds itself."""
        return self._held(self.wanted, self.own, beyond=True)

    @cached_property
    def gives(self) -> list[tuple[int, Range]]:
        """What this rank gives, as (to which rank, which places)."""
        me = self.axis.rank
        others = [r for r in range(self.axis.size) if r != me]
        return [(r, self.at_home(part)) for r in others for giver, part in self._gets(r) if giver == me]

    @property
    def is_local(self) -> bool:
        """Whether this rank needs just what it has, and no other rank needs any of it."""
        return self.wanted == self.own and not (self.before or self.after or self.gives)


def _rows(x: Tensor) -> Tensor:
    """[B, C, D, H, W] -> [B, D, H, W, C], in which slices of one sample in channels-last memory lie in one piece."""
    return x.movedim(1, -1)


def _is_last(x: Tensor) -> bool:
    form = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    return x.ndim in (4, 5) and x.is_contiguous(memory_format=form)


def _like(x: Tensor, dim: int, count: int) -> Tensor:
    """New memory for ``count`` places along ``dim``, in the memory format of ``x``."""
    shape = list(x.shape)
    shape[dim] = count
    return _rows(x).new_empty([*shape[:1], *shape[2:], shape[1]]).movedim(-1, 1) if _is_last(x) else x.new_empty(shape)


class Flight:
    """Slices on their way. Those of ``gives`` are cut from ``x``, whose dim begins at place ``first``; ``wait`` returns those of
    ``gets``."""

    def __init__(
        self, x: Tensor, dim: int, axis: Axis, gives: Sequence[tuple[int, Range]], gets: Sequence[tuple[int, Range]], first: int,
    ) -> None:  # fmt: skip
        turn = _rows if _is_last(x) else (lambda tensor: tensor)
        # gloo sends from the memory of the host only.
        at = torch.device("cpu") if x.is_cuda and get_backend(x.device, axis) == "gloo" else x.device
        self._sent = [turn(x.narrow(dim, a - first, b - a)).contiguous().to(at) for _, (a, b) in gives]
        self.slices = [_like(x, dim, b - a) for _, (a, b) in gets]
        self.bytes = sum(t.numel() * t.element_size() for t in self._sent)
        ops = []
        places = [turn(tensor) for tensor in self.slices]
        coming = [place if place.device == at else torch.empty_like(place, device=at) for place in places]
        self._landed = [(place, came) for place, came in zip(places, coming) if place is not came]
        for tensors, peers, do in ((self._sent, gives, torch_dist.isend), (coming, gets, torch_dist.irecv)):
            for tensor, (rank, _) in zip(tensors, peers):
                peer = torch_dist.get_global_rank(axis.group, rank)  # type: ignore[arg-type]  # where it has peers it has a group
                ops.append(torch_dist.P2POp(do, tensor, peer, axis.group))
        self.is_used = bool(ops)
        self._works = torch_dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        for place, came in self._landed:
            place.copy_(came)
        self._works, self._sent, self._landed = [], [], []
        return self.slices


@dataclass
class Traffic:
    """Bytes that this process has sent to others, and in how many exchanges."""

    sent: int = 0
    messages: int = 0

    def count(self, flight: "Flight") -> None:
        self.sent += flight.bytes
        self.messages += flight.is_used


def depart(x: Tensor, route: Route, traffic: Traffic) -> Flight:
    flight = Flight(x, route.dim, route.axis, route.gives, route.gets, route.own[0])
    traffic.count(flight)
    return flight


def around(x: Tensor, slices: Sequence[Tensor], route: Route, fill: float = 0.0, within: Range | None = None) -> Tensor:
    """What this rank needs, made of its own ``x`` and the ``slices`` that came. ``within``: only these places, counted from
    ``before`` places ahead of the first one needed."""
    start = route.wanted[0] - route.before
    first, end = within or (0, route.wanted[1] + route.after - start)
    first, end = start + first, start + end
    dim, parts = route.dim, []

    def filled(count: int) -> None:
        if count > 0:
            parts.append(_like(x, dim, count).fill_(fill))

    filled(min(route.wanted[0], end) - first)
    mine = [(route.own[0], shared(route.own, route.wanted), x)]
    mine += [(part[0] + route.own[0] - route.at_home(part)[0], part, x) for part in route.returned]
    pieces = [(part[0], part, tensor) for (_, part), tensor in zip(route.gets, slices)] + mine
    for origin, part, tensor in sorted(pieces, key=lambda piece: piece[1]):
        low, high = shared(part, (first, end))
        if high > low:
            whole = low == origin and high - low == tensor.shape[dim]
            parts.append(tensor if whole else tensor.narrow(dim, low - origin, high - low))
    filled(end - max(route.wanted[1], first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Exchange(torch.autograd.Function):
    """[.., s, ..] what each rank holds -> [.., before + n + after, ..] what it needs. Gradients are added on the
    ranks that hold the places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, traffic: Traffic, fill: float) -> Tensor:
        ctx.route, ctx.traffic = route, traffic
        y = around(x, depart(x, route, traffic).wait(), route, fill)
        return y.view_as(y) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        route = ctx.route
        return bring_back([(0, dy.clone() if route.gives or route.returned else dy)], route, ctx.traffic), None, None, None


def bring_back(pieces: Sequence[tuple[int, Tensor]], route: Route, traffic: Traffic, flight: Flight | None = None) -> Tensor:
    """The gradient of what this rank holds, from ``pieces`` of the gradient of what it needed: (first place, as ``around`` counts
    them, values). ``flight``: what other ranks send back, if it is under way already."""
    dim, start = route.dim, route.wanted[0] - route.before
    flight = flight or returning(pieces, route, traffic)
    own = route.own
    first, piece = max(pieces, key=lambda item: item[1].shape[dim])  # a piece that covers all is used where it lies
    low, high = start + first, start + first + piece.shape[dim]
    if low <= own[0] and own[1] <= high:
        dx = piece.narrow(dim, own[0] - low, own[1] - own[0])
        rest = [item for item in pieces if item[1] is not piece]
    else:
        dx, rest = _like(piece, dim, own[1] - own[0]).zero_(), list(pieces)
    def add(place: int, piece: Tensor, first: int, part: Range) -> None:
        low, high = shared(part, (start + first, start + first + piece.shape[dim]))
        if high > low:
            to = low - part[0] + place - own[0]
            dx.narrow(dim, to, high - low).add_(piece.narrow(dim, low - start - first, high - low))

    for first, piece in rest:
        add(own[0], piece, first, own)
    for part in route.returned:
        for first, piece in pieces:
            add(route.at_home(part)[0], piece, first, part)
    for (_, (a, b)), tensor in zip(route.gives, flight.wait()):
        dx.narrow(dim, a - own[0], b - a).add_(tensor)
    return dx


def returning(pieces: Sequence[tuple[int, Tensor]], route: Route, traffic: Traffic) -> Flight:
    """Send the gradients of slices that came from other ranks back to them. ``pieces`` cover all these slices."""
    dim, start, gets = route.dim, route.wanted[0] - route.before, route.gets
    if len(pieces) == 1:
        first, whole = pieces[0]
        first += start
    else:  # each slice lies in one or more of the pieces
        first, end = min((p[0] for _, p in gets), default=0), max((p[1] for _, p in gets), default=0)
        whole = _like(pieces[0][1], dim, end - first).zero_()
        for at, piece in pieces:
            low, high = shared((first, end), (start + at, start + at + piece.shape[dim]))
            if high > low:
                whole.narrow(dim, low - first, high - low).add_(piece.narrow(dim, low - start - at, high - low))
    flight = Flight(whole, dim, route.axis, gets, route.gives, first)
    traffic.count(flight)
    return flight


@dataclass(frozen=True)
class How:
    """A convolution without its weights. ``padding`` is 0 along dims that have a route. ``kept``: the part of its output that is
    kept along these, as (dim, first place, count)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None  # a transposed convolution has one
    kept: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether this convolves a volume and is not transposed: ``hpcai.nn.conv`` does that faster than torch."""
        return len(self.stride) == 3 and self.output_padding is None

    @property
    def words(self) -> tuple[Any, ...]:
        """What torch's own operations are told."""
        transposed, more = self.output_padding is not None, self.output_padding or (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, transposed, more, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_plain:
            return conv3d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return torch.convolution(x, weight, bias, *self.words)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, want: list[bool]) -> Any:
        if self.is_plain:
            return conv3d_gradients(dy, x, weight, self.stride, self.padding, self.dilation, self.groups, want)
        sizes = [dy.shape[1]] if want[2] else None
        return torch.ops.aten.convolution_backward(dy, x, weight, sizes, *self.words, want)

    def crop(self, y: Tensor) -> Tensor:
        for dim, first, count in self.kept:
            y = y.narrow(dim, first, count)
        return y

    def uncrop(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The adjoint of ``crop``: zeros where it cut something off."""
        for dim, first, count in self.kept:
            i = dim - 2
            span = self.dilation[i] * (weight.shape[dim] - 1) + 1
            wide = _like(dy, dim, (x.shape[dim] - 1) * self.stride[i] + span).zero_()
            wide.narrow(dim, first, count).copy_(dy)
            dy = wide
        return dy


class Convolution(torch.autograd.Function):
    """A convolution of a cut volume. ``routes`` bring what this rank's output needs; the slices of the first dim travel last, and
    with ``apart`` what needs none of them is convolved meanwhile. For the backward pass ``x`` and the slices that came are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, routes: tuple[Route, ...], how: How, traffic: Traffic,
        apart: bool,
    ) -> Tensor:  # fmt: skip
        came: list[Tensor] = []
        wide, parts = x, _WHOLE
        for route in reversed(routes[1:]):
            slices = depart(wide, route, traffic).wait()
            wide, came = around(wide, slices, route), [*slices, *came]
        if routes:
            flight = depart(wide, routes[0], traffic)
            parts = _parts(routes[0], how, weight) if apart and flight.bytes else _WHOLE
            inner = [how.forward(around(wide, [], routes[0], within=cells), weight, bias) for _, cells in parts[:1] if cells]
            slices = flight.wait()
            came = [*slices, *came]
            outer = [how.forward(around(wide, slices, routes[0], within=cells), weight, bias) for _, cells in parts[len(inner) :]]
            pieces = sorted(zip([out for out, _ in parts], inner + outer), key=lambda piece: piece[0] or (0, 0))
            y = pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces], routes[0].dim)
        else:
            y = how.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, *came)
        ctx.routes, ctx.how, ctx.traffic, ctx.parts, ctx.bias = routes, how, traffic, parts, bias is not None
        return how.crop(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, *came = ctx.saved_tensors
        routes, how, traffic = ctx.routes, ctx.how, ctx.traffic
        by_input, by_weight, by_bias = ctx.needs_input_grad[:3]
        wide = x
        for route in reversed(routes[1:]):
            count = len(route.gets)
            came, slices = came[: len(came) - count], came[len(came) - count :]
            wide = around(wide, slices, route)
        dweight = dbias = None
        pieces: list[tuple[int, Tensor]] = []
        flight = None
        want = [by_input, by_weight, ctx.bias and by_bias]
        # The edges come before the interior (the first part), because other ranks wait for their gradients.
        for number, (out, cells) in reversed(list(enumerate(ctx.parts))):
            if number == 0 and pieces and routes and by_input:
                flight = returning(pieces, routes[0], traffic)
            part = around(wide, came, routes[0], within=cells) if routes else wide
            own = dy if out is None else dy.narrow(routes[0].dim, out[0], out[1] - out[0])
            dpart, dw, db = how.backward(how.uncrop(own, part, weight), part, weight, want)
            pieces.append((cells[0] if cells else 0, dpart))
            dweight = dw if dweight is None or dw is None else dweight.add_(dw)
            dbias = db if dbias is None or db is None else dbias.add_(db)
        dx = None
        if by_input:
            dx = bring_back(pieces, routes[0], traffic, flight) if routes else pieces[0][1]
            for route in routes[1:]:
                dx = bring_back([(0, dx)], route, traffic)
        return dx, dweight, dbias, None, None, None, None


_WHOLE: tuple[tuple[Range | None, Range | None], ...] = ((None, None),)
_APART = 4  # where fewer places of the output need nothing from other ranks, one convolution of all is cheaper


def _parts(route: Route, how: How, weight: Tensor) -> tuple[tuple[Range | None, Range | None], ...]:
    """The parts in which a convolution is computed, as (places of the output, places of the input), the interior first."""
    i = route.dim - 2
    stride, span = how.stride[i], how.dilation[i] * (weight.shape[route.dim] - 1) + 1
    start = route.wanted[0] - route.before
    size = route.wanted[1] + route.after - start
    count = (size - span) // stride + 1
    low, high = (place - start for place in shared(route.own, route.wanted))
    first, end = -(-low // stride), (high - span) // stride + 1
    if how.output_padding is not None or end - first < _APART:
        return _WHOLE
    outs = [(first, end), (0, first), (end, count)]
    return tuple((out, (out[0] * stride, (out[1] - 1) * stride + span)) for out in outs if out[1] > out[0])
