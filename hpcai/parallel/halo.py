"""Halo exchange along a sharded dim with its adjoint, and convolutions of sharded volumes.

A dim of S indices is sharded into the ranges that the ranks of an axis hold. Each rank needs a range, and receives the missing
indices from the ranks that hold them: a slice of a neighbour, slabs of several ranks if they are thinner than the halo, or all
slabs. Gradients are sent back the same way and summed on the rank that holds the indices. In a periodic dim the needed range may
exceed the ends: index -1 is the last one.
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
from hpcai.dynamo import UntransformedFunction
from hpcai.kernels.batchnorm import in_channels_last
from hpcai.nn.conv import conv3d, conv3d_gradients

Range = tuple[int, int]


def intersect(a: Range, b: Range) -> Range:
    """Return the indices that are in both, or a range of length 0."""
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


@dataclass(frozen=True)
class HaloPlan:
    """The ranges of ``dim`` that each rank of ``axis`` holds and needs, in indices of the full dim. ``pad_before``, ``pad_after``:
    Padding of this rank beyond the ends of the full dim. ``period``: The size of a periodic dim, otherwise 0; a rank then needs at
    most so many indices beyond either end."""

    dim: int
    axis: Axis
    held_ranges: tuple[Range, ...]
    needed_ranges: tuple[Range, ...]
    pad_before: int = 0
    pad_after: int = 0
    period: int = 0

    @property
    def local(self) -> Range:
        return self.held_ranges[self.axis.rank]

    @property
    def needed(self) -> Range:
        return self.needed_ranges[self.axis.rank]

    @cached_property
    def receives(self) -> list[tuple[int, Range]]:
        """(source rank, range) of each slice that this rank receives, in the order of the indices."""
        return self._receives(self.axis.rank)

    def _receives(self, rank: int) -> list[tuple[int, Range]]:
        needed, held = self.needed_ranges[rank], self.held_ranges[rank]
        if (self.period and held == (0, self.period)) or (held[0] <= needed[0] and needed[1] <= held[1]):
            return []
        parts = [(r, part) for r in range(self.axis.size) if r != rank for part in self._overlaps(needed, self.held_ranges[r])]
        return sorted(parts, key=lambda part: part[1])

    def _overlaps(self, needed: Range, held: Range, beyond_ends: bool = False) -> list[Range]:
        """Return the ranges of ``needed`` that lie in ``held`` or its periodic images; with ``beyond_ends`` in the images alone."""
        shifts = [-self.period, self.period] if self.period else []
        parts = [intersect(needed, (held[0] + shift, held[1] + shift)) for shift in (shifts if beyond_ends else [0, *shifts])]
        return [part for part in parts if part[1] > part[0]]

    def wrap(self, part: Range) -> Range:
        """Return the range shifted by whole periods into the full dim."""
        shift = part[0] // self.period * self.period if self.period else 0
        return part[0] - shift, part[1] - shift

    @cached_property
    def local_wraps(self) -> list[Range]:
        """The needed ranges beyond the ends of the full dim that this rank holds itself."""
        return self._overlaps(self.needed, self.local, beyond_ends=True)

    @cached_property
    def sends(self) -> list[tuple[int, Range]]:
        """(target rank, range) of each slice that this rank sends."""
        rank = self.axis.rank
        others = [r for r in range(self.axis.size) if r != rank]
        return [(r, self.wrap(part)) for r in others for source, part in self._receives(r) if source == rank]

    @property
    def is_local(self) -> bool:
        """Whether this rank needs exactly the range that it holds, and no other rank needs any of it."""
        return self.needed == self.local and not (self.pad_before or self.pad_after or self.sends)


def _to_last(x: Tensor) -> Tensor:
    """[B, C, D, H, W] -> [B, D, H, W, C], where slices of one sample in channels-last memory are contiguous."""
    return x.movedim(1, -1)


def _empty_like(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an empty tensor like ``x``, in its memory format, with ``size`` elements along ``dim``."""
    shape = list(x.shape)
    shape[dim] = size
    return _to_last(x).new_empty([*shape[:1], *shape[2:], shape[1]]).movedim(-1, 1) if in_channels_last(x) else x.new_empty(shape)


class PendingExchange:
    """A running exchange: slices ``sends`` of ``x``, whose dim begins at index ``first``, are sent; ``wait`` returns ``recvs``."""

    def __init__(
        self, x: Tensor, dim: int, axis: Axis, sends: Sequence[tuple[int, Range]], recvs: Sequence[tuple[int, Range]], first: int
    ) -> None:
        to_layout = _to_last if in_channels_last(x) else (lambda tensor: tensor)
        # gloo sends from host memory only.
        device = torch.device("cpu") if x.is_cuda and get_backend(x.device, axis) == "gloo" else x.device
        self._send_buffers = [to_layout(x.narrow(dim, a - first, b - a)).contiguous().to(device) for _, (a, b) in sends]
        self.slices = [_empty_like(x, dim, b - a) for _, (a, b) in recvs]
        ops = []
        targets = [to_layout(tensor) for tensor in self.slices]
        buffers = [target if target.device == device else torch.empty_like(target, device=device) for target in targets]
        self._staged = [(target, buffer) for target, buffer in zip(targets, buffers) if target is not buffer]
        for tensors, peers, op in ((self._send_buffers, sends, torch_dist.isend), (buffers, recvs, torch_dist.irecv)):
            for tensor, (rank, _) in zip(tensors, peers):
                peer = torch_dist.get_global_rank(axis.group, rank)  # type: ignore[arg-type]  # an axis with peers has a group
                ops.append(torch_dist.P2POp(op, tensor, peer, axis.group))
        self._works = torch_dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        for target, buffer in self._staged:
            target.copy_(buffer)
        self._works, self._send_buffers, self._staged = [], [], []
        return self.slices


def start_exchange(x: Tensor, plan: HaloPlan) -> PendingExchange:
    return PendingExchange(x, plan.dim, plan.axis, plan.sends, plan.receives, plan.local[0])


def assemble(x: Tensor, slices: Sequence[Tensor], plan: HaloPlan, fill: float = 0.0, within: Range | None = None) -> Tensor:
    """Concatenate padding, the local ``x`` and the received ``slices`` to the range that this rank needs. ``within``: The part to
    return, in indices relative to the start of the padding."""
    start = plan.needed[0] - plan.pad_before
    first, end = within or (0, plan.needed[1] + plan.pad_after - start)
    first, end = start + first, start + end
    dim, parts = plan.dim, []

    def add_fill(count: int) -> None:
        if count > 0:
            parts.append(_empty_like(x, dim, count).fill_(fill))

    add_fill(min(plan.needed[0], end) - first)
    local = [(plan.local[0], intersect(plan.local, plan.needed), x)]
    local += [(part[0] + plan.local[0] - plan.wrap(part)[0], part, x) for part in plan.local_wraps]
    pieces = [(part[0], part, tensor) for (_, part), tensor in zip(plan.receives, slices)] + local
    for origin, part, tensor in sorted(pieces, key=lambda piece: piece[1]):
        low, high = intersect(part, (first, end))
        if high > low:
            is_full = low == origin and high - low == tensor.shape[dim]
            parts.append(tensor if is_full else tensor.narrow(dim, low - origin, high - low))
    add_fill(end - max(plan.needed[1], first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class HaloExchange(UntransformedFunction):
    """Exchange halos; the backward pass sums gradients on the ranks that hold the indices.
    Shape: x [.., held, ..] -> [.., pad_before + needed + pad_after, ..]"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, fill: float) -> Tensor:
        ctx.plan = plan
        y = assemble(x, start_exchange(x, plan).wait(), plan, fill)
        return y.view_as(y) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan = ctx.plan
        return reduce_halo([(0, dy.clone() if plan.sends or plan.local_wraps else dy)], plan), None, None


def reduce_halo(pieces: Sequence[tuple[int, Tensor]], plan: HaloPlan, exchange: PendingExchange | None = None) -> Tensor:
    """Return the gradient of the held range, from ``pieces`` (first index, as ``assemble`` counts, values) of the gradient of the
    needed range. ``exchange``: The gradients from other ranks, if they are already on their way."""
    dim, start = plan.dim, plan.needed[0] - plan.pad_before
    exchange = exchange or start_reduce(pieces, plan)
    held = plan.local
    first, piece = max(pieces, key=lambda item: item[1].shape[dim])  # a piece that covers all is used in place
    low, high = start + first, start + first + piece.shape[dim]
    if low <= held[0] and held[1] <= high:
        dx = piece.narrow(dim, held[0] - low, held[1] - held[0])
        rest = [item for item in pieces if item[1] is not piece]
    else:
        dx, rest = _empty_like(piece, dim, held[1] - held[0]).zero_(), list(pieces)
    def add(target: int, piece: Tensor, first: int, part: Range) -> None:
        low, high = intersect(part, (start + first, start + first + piece.shape[dim]))
        if high > low:
            to = low - part[0] + target - held[0]
            dx.narrow(dim, to, high - low).add_(piece.narrow(dim, low - start - first, high - low))

    for first, piece in rest:
        add(held[0], piece, first, held)
    for part in plan.local_wraps:
        for first, piece in pieces:
            add(plan.wrap(part)[0], piece, first, part)
    for (_, (a, b)), tensor in zip(plan.sends, exchange.wait()):
        dx.narrow(dim, a - held[0], b - a).add_(tensor)
    return dx


def start_reduce(pieces: Sequence[tuple[int, Tensor]], plan: HaloPlan) -> PendingExchange:
    """Start to send the gradients of received slices back to their ranks. ``pieces`` must cover all these slices."""
    dim, start, receives = plan.dim, plan.needed[0] - plan.pad_before, plan.receives
    if len(pieces) == 1:
        first, full = pieces[0]
        first += start
    else:  # a slice may span several pieces
        first, end = min((p[0] for _, p in receives), default=0), max((p[1] for _, p in receives), default=0)
        full = _empty_like(pieces[0][1], dim, end - first).zero_()
        for offset, piece in pieces:
            low, high = intersect((first, end), (start + offset, start + offset + piece.shape[dim]))
            if high > low:
                full.narrow(dim, low - first, high - low).add_(piece.narrow(dim, low - start - offset, high - low))
    return PendingExchange(full, dim, plan.axis, receives, plan.sends, first)


@dataclass(frozen=True)
class ConvArgs:
    """The arguments of a convolution beside its weights. ``padding`` is 0 along dims that have a halo plan. ``crops``: Slices (dim,
    first, count) of the output that are kept."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None  # of a transposed convolution
    crops: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_conv3d(self) -> bool:
        """Whether this is a 3-D convolution that is not transposed, for which ``hpcai.nn.conv`` is faster than torch."""
        return len(self.stride) == 3 and self.output_padding is None

    @property
    def args(self) -> tuple[Any, ...]:
        """The trailing arguments of ``torch.convolution``."""
        transposed, output_padding = self.output_padding is not None, self.output_padding or (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, transposed, output_padding, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_conv3d:
            return conv3d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return torch.convolution(x, weight, bias, *self.args)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, output_mask: list[bool]) -> Any:
        if self.is_conv3d:
            return conv3d_gradients(dy, x, weight, self.stride, self.padding, self.dilation, self.groups, output_mask)
        bias_sizes = [dy.shape[1]] if output_mask[2] else None
        return torch.ops.aten.convolution_backward(dy, x, weight, bias_sizes, *self.args, output_mask)

    def crop(self, y: Tensor) -> Tensor:
        for dim, first, count in self.crops:
            y = y.narrow(dim, first, count)
        return y

    def uncrop(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The adjoint of ``crop``: padding with zeros."""
        for dim, first, count in self.crops:
            k = dim - 2
            span = self.dilation[k] * (weight.shape[dim] - 1) + 1
            full = _empty_like(dy, dim, (x.shape[dim] - 1) * self.stride[k] + span).zero_()
            full.narrow(dim, first, count).copy_(dy)
            dy = full
        return dy


class HaloConvolution(UntransformedFunction):
    """A convolution of a sharded volume. ``plans``, at least one, exchange the halos that this rank's output needs, the first dim
    last; with ``overlap`` the interior, which needs no halo of it, is convolved meanwhile. ``x`` and the received slices are
    saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plans: tuple[HaloPlan, ...], conv: ConvArgs, overlap: bool
    ) -> Tensor:
        received: list[Tensor] = []
        padded = x
        for plan in reversed(plans[1:]):
            slices = start_exchange(padded, plan).wait()
            padded, received = assemble(padded, slices, plan), [*slices, *received]
        exchange = start_exchange(padded, plans[0])
        parts = _split_interior(plans[0], conv, weight) if overlap and plans[0].sends else _UNSPLIT
        inner = [conv.forward(assemble(padded, [], plans[0], within=part), weight, bias) for _, part in parts[:1] if part]
        slices = exchange.wait()
        received = [*slices, *received]
        outer = [conv.forward(assemble(padded, slices, plans[0], within=part), weight, bias) for _, part in parts[len(inner) :]]
        pieces = sorted(zip([out for out, _ in parts], inner + outer), key=lambda piece: piece[0] or (0, 0))
        y = pieces[0][1] if len(pieces) == 1 else torch.cat([piece for _, piece in pieces], plans[0].dim)
        ctx.save_for_backward(x, weight, *received)
        ctx.plans, ctx.conv, ctx.parts, ctx.has_bias = plans, conv, parts, bias is not None
        return conv.crop(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, *received = ctx.saved_tensors
        plans, conv = ctx.plans, ctx.conv
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        padded = x
        for plan in reversed(plans[1:]):
            count = len(plan.receives)
            received, slices = received[: len(received) - count], received[len(received) - count :]
            padded = assemble(padded, slices, plan)
        dweight = dbias = None
        pieces: list[tuple[int, Tensor]] = []
        exchange = None
        output_mask = [needs_input, needs_weight, ctx.has_bias and needs_bias]
        # The edges come before the interior (the first part): other ranks wait for their gradients.
        for number, (out, cells) in reversed(list(enumerate(ctx.parts))):
            if number == 0 and pieces and needs_input:
                exchange = start_reduce(pieces, plans[0])
            part = assemble(padded, received, plans[0], within=cells)
            dy_part = dy if out is None else dy.narrow(plans[0].dim, out[0], out[1] - out[0])
            dpart, dw, db = conv.backward(conv.uncrop(dy_part, part, weight), part, weight, output_mask)
            pieces.append((cells[0] if cells else 0, dpart))
            dweight = dw if dweight is None or dw is None else dweight.add_(dw)
            dbias = db if dbias is None or db is None else dbias.add_(db)
        dx = None
        if needs_input:
            dx = reduce_halo(pieces, plans[0], exchange)
            for plan in plans[1:]:
                dx = reduce_halo([(0, dx)], plan)
        return dx, dweight, dbias, None, None, None


_UNSPLIT: tuple[tuple[Range | None, Range | None], ...] = ((None, None),)
_MIN_INTERIOR = 4  # output indices; one convolution of everything is cheaper than a smaller interior


def _split_interior(plan: HaloPlan, conv: ConvArgs, weight: Tensor) -> tuple[tuple[Range | None, Range | None], ...]:
    """Split a convolution into parts (output range, input range), the interior first."""
    i = plan.dim - 2
    stride, span = conv.stride[i], conv.dilation[i] * (weight.shape[plan.dim] - 1) + 1
    start = plan.needed[0] - plan.pad_before
    size = plan.needed[1] + plan.pad_after - start
    count = (size - span) // stride + 1
    low, high = (index - start for index in intersect(plan.local, plan.needed))
    first, end = -(-low // stride), (high - span) // stride + 1
    if conv.output_padding is not None or end - first < _MIN_INTERIOR:
        return _UNSPLIT
    outs = [(first, end), (0, first), (end, count)]
    return tuple((out, (out[0] * stride, (out[1] - 1) * stride + span)) for out in outs if out[1] > out[0])
