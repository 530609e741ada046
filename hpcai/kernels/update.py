"""One optimizer step over one flat row of numbers: weights, gradient and moments are read once and written once.

On CUDA each function is one Triton kernel (``update_triton``); elsewhere, and for float64, the plain-torch twin in this file,
which takes the row in chunks so that average and bf16 copy find the weights still in the cache.

n elements of the row; S segments, the stretches of it that are one parameter each. ``weights`` [n]: float32 or float64, the
master weights. ``gradient`` [n]: float32, bfloat16 or float64, read only; what counts is ``scale*gradient`` (``scale`` None: 1).
Moments (``first``, ``second``, ``velocity``) [n]: of the dtype of the weights, or bfloat16, then rounded stochastically with bits
that depend on ``seed`` (int64, another at every step) and on ``offset`` + i modulo 2^32, so that a shard of a row draws what the
whole row draws. ``low`` [n]: bfloat16, the weights rounded to nearest even. ``average`` [n]: of the dtype of the weights,
a += take*(w - a). ``lr``, ``take``, ``step`` (counts from 1), ``scale``, ``skip`` and ``seed`` are scalars on the device, and
nothing is read from it: every call can be captured in a CUDA graph. ``skip`` 1 leaves weights, moments, low and average as they
are, to the bit, whatever the gradient holds. ``after`` stands for low, average, take, seed and offset. Rows that do not fit
together raise ConfigError.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise, repeat
from math import gcd
from typing import Any

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import compiler

# The twin's chunk, for one thread: 1 MiB of each float32 row. Smaller chunks fit the L2 cache, but lose more by torch's 3 to 6 us
# per operation and chunk than they gain (10 M weights: 14.6 ms at 32 Ki, 9.5 ms at 256 Ki, 26 ms unchunked; EPYC, one thread).
_CHUNK = 1 << 17
_GPU = 1 << 26  # elements, where the twin runs on a GPU: a launch is dearer there, and scratch memory is bounded


def _chunk(x: Tensor) -> int:
    return _CHUNK * (1 + torch.get_num_threads()) if x.device.type == "cpu" else _GPU


class Segments:
    """The stretches (start, length) of a row that are one parameter each, in order, for norms and ratios per parameter.

    A length may be 0. What lies between them (padding) is updated with ratio 1 and counts in no norm. ``size``: the elements of
    the row, if it goes on after the last stretch. Kernels move 16 bytes at a time if all starts and the size are multiples of 16.
    Stretches that are out of order, overlap or leave the row raise ConfigError.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]], device: torch.device | str, size: int | None = None) -> None:
        end = 0
        for k, (start, length) in enumerate(stretches):
            if start < end or length < 0:
                raise ConfigError(f"segment {k} is ({start}, {length}), expected a start from {end} on and a length from 0 on")
            end = start + length
        if size is not None and size < end:
            raise ConfigError(f"the row has {size} elements, but its last segment ends at {end}")
        self.size, self.count, self.block = end if size is None else size, len(stretches), 2048
        starts, ends = [start for start, _ in stretches], [start + length for start, length in stretches]
        self.align = gcd(16, self.size, *starts)
        # One tile before the first start and one from each start to the next; blocks fill a tile: none is in two segments.
        begin, stop, counted = (torch.tensor(x) for x in ([0, *starts], [*starts, self.size], [0, *ends]))
        blocks = (stop - begin + self.block - 1) // self.block
        upto = blocks.cumsum(0)
        tile = torch.repeat_interleave(torch.arange(len(blocks)), blocks)
        first = begin[tile] + (torch.arange(len(tile)) - (upto - blocks)[tile]) * self.block
        last = torch.minimum(first + self.block, stop[tile])
        columns = ((tile - 1).clamp(min=0), first // self.align, last // self.align, counted[tile])
        self.table = torch.stack(columns, 1).to(device)  # [blocks, 4]: segment, first, last, end of what its norm counts
        self.upto = upto.to(device)  # [S + 1]: segment k has the blocks upto[k] to upto[k + 1]
        # For the twin: lengths of pieces of the row, their segments (S: padding) and how many each segment has.
        edges = sorted({*starts, *ends, *range(0, self.size, _chunk(self.table)), self.size})
        near = [bisect_right(starts, edge) - 1 for edge in edges[:-1]]  # several may start at one place: all but the last are empty
        owners = [k if k >= 0 and edge < ends[k] else self.count for k, edge in zip(near, edges)]
        counts = torch.tensor(owners, dtype=torch.long).bincount(minlength=self.count + 1)[: self.count]
        self.pieces = [b - a for a, b in pairwise(edges)], owners, counts.to(device)


def adam_(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, lr: Tensor, step: Tensor, scale: Tensor | None,
          skip: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool = True,
          **after: Any) -> None:  # fmt: skip
    """Adam (Kingma and Ba 2015), bias-corrected; ``decoupled``: AdamW (Loshchilov and Hutter 2019), otherwise decay in the
    gradient."""
    given = Operands(weights, gradient, (first, second), scale, skip, **after)
    _adam(given, "adamw" if decoupled else "adam", lr, step, betas, eps, weight_decay)


def sgd_(weights: Tensor, gradient: Tensor, velocity: Tensor | None, *, lr: Tensor, scale: Tensor | None, skip: Tensor,
         momentum: float, weight_decay: float, lr_in_momentum: bool, nesterov: bool = False, **after: Any) -> None:  # fmt: skip
    """v = mu v + g + wd w, w -= lr v; with ``lr_in_momentum`` v = mu v + lr (g + wd w), w -= v (Keras). Momentum 0: no velocity.
    ``nesterov``: what is subtracted looks one step ahead, w -= lr (g + wd w + mu v) (Sutskever et al. 2013, as torch has it)."""
    given = Operands(weights, gradient, (velocity,) if momentum else (), scale, skip, **after)
    _descend(given, "inside" if lr_in_momentum else "outside", lr, momentum, weight_decay, nesterov and momentum > 0)


def lamb_direction_(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, direction: Tensor, segments: Segments, *,
                    step: Tensor, scale: Tensor | None, skip: Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
                    **after: Any) -> Tensor:  # fmt: skip
    """First half of LAMB (You et al. 2020): moments, and ``direction`` [n] = m_hat/(sqrt(v_hat) + eps) + weight_decay*w.
    -> [S, 2], of the dtype of the weights like ``direction``: sums of squares of weights and direction; void if ``skip`` is 1."""
    given = Operands(weights, gradient, (first, second), scale, skip, segments=segments, direction=direction, **after)
    return _adam(given, "lamb", None, step, betas, eps, weight_decay)


def trust_(weights: Tensor, direction: Tensor, segments: Segments, ratio: Tensor, *, lr: Tensor, skip: Tensor,
           **after: Any) -> None:  # fmt: skip
    """Second half of LAMB: w -= lr * ratio[segment] * direction.   ``ratio`` [S]"""
    _descend(Operands(weights, direction, (), None, skip, segments=segments, ratio=ratio, **after), "inside", lr, 0.0, 0.0)


def lars_norms(weights: Tensor, gradient: Tensor, segments: Segments, *, scale: Tensor | None) -> Tensor:
    """-> [S, 2], of the dtype of the weights: sums of squares of the weights and of scale*gradient, per segment."""
    given = Operands(weights, gradient, (), scale, None, segments=segments)
    return given.triton.run(given, "norms") if given.triton else given.by_chunks(lambda w, g, m, k: g, norms=True)


def lars_(weights: Tensor, gradient: Tensor, velocity: Tensor | None, segments: Segments, ratio: Tensor, *, lr: Tensor,
          scale: Tensor | None, skip: Tensor, momentum: float, weight_decay: float, **after: Any) -> None:  # fmt: skip
    """LARS (You et al. 2017): v = mu v + lr*ratio[segment]*(g + wd w), w -= v.   ``ratio`` [S]"""
    given = Operands(weights, gradient, (velocity,) if momentum else (), scale, skip, segments=segments, ratio=ratio, **after)
    _descend(given, "inside", lr, momentum, weight_decay)


def trust_ratio(sums: Tensor, *, weight_decay: float, coefficient: float = 1.0, lars: bool = False) -> Tensor:
    """[S, 2] sums of squares -> [S]: |w|/|u| of LAMB, or LARS's coefficient*|w|/(|g| + weight_decay*|w|); 1 where a norm is 0."""
    weight, other = sums.sqrt().unbind(1)
    ratio = coefficient * weight / (other + weight_decay * weight) if lars else weight / other
    return torch.where((weight == 0) | (other == 0), 1.0, ratio)


def _adam(given: "Operands", kind: str, lr: Any, step: Tensor, betas: tuple[float, float], eps: float, decay: float) -> Any:
    if given.triton:
        return given.triton.run(given, kind, lr=lr, step=step, betas=betas, eps=eps, decay=decay)
    op: Any = torch._fused_adam_ if kind == "adam" else torch._fused_adamw_

    def update(w: Tensor, g: Tensor, m: list[Tensor], k: int, d: Tensor | None = None) -> Tensor:
        # LAMB: at rate -1 Adam adds its direction to what it takes for weights.
        x = w if d is None else torch.mul(w, decay, out=d)
        op([x], [g], [m[0]], [m[1]], [], [step], lr=-1.0 if lr is None else lr, beta1=betas[0], beta2=betas[1], eps=eps,
           weight_decay=decay if d is None else 0.0, amsgrad=False, maximize=False, found_inf=given.skip)  # fmt: skip
        return x

    return given.by_chunks(update, norms=given.direction is not None)


def _descend(given: "Operands", kind: str, lr: Tensor, mu: float, decay: float, ahead: bool = False) -> None:
    """Descent with momentum; ``inside``: the learning rate, and the ratios if there are any, are in the momentum."""
    if given.triton:
        return given.triton.run(given, kind, lr=lr, mu=mu, decay=decay, nesterov=ahead)
    ratios = given.ratio.unbind() if given.ratio is not None else ()

    def update(w: Tensor, g: Tensor, m: list[Tensor], k: int) -> None:
        if kind == "outside":
            return _sgd(w, g, m, lr, mu, decay, given.skip, ahead)
        if decay:
            g.add_(w, alpha=decay)
        if k < len(ratios):
            g.mul_(ratios[k])
        return _sgd(w, g.mul_(lr) if m else g, m, 1.0 if m else lr, mu, 0.0, given.skip, ahead)

    return given.by_chunks(update, writes=kind == "inside")


def _sgd(w: Tensor, g: Tensor, m: list[Tensor], lr: Any, mu: float, decay: float, skip: Any, ahead: bool = False,
         up: bool = False) -> None:  # fmt: skip
    torch._fused_sgd_([w], [g], m, weight_decay=decay, momentum=mu, lr=lr, dampening=0.0, nesterov=ahead, maximize=up,
                      is_first_step=False, found_inf=skip)  # fmt: skip


class Operands:
    """What one call reads and writes, checked."""

    def __init__(self, weights: Tensor, gradient: Tensor, moments: tuple[Any, ...], scale: Tensor | None, skip: Tensor | None,
                 low: Tensor | None = None, average: Tensor | None = None, take: Tensor | None = None, seed: Tensor | None = None,
                 offset: int = 0, segments: Segments | None = None, ratio: Tensor | None = None,
                 direction: Tensor | None = None) -> None:  # fmt: skip
        self.weights, self.gradient, self.moments, self.scale, self.skip = weights, gradient, moments, scale, skip
        self.low, self.average, self.take, self.seed, self.offset = low, average, take, seed, offset
        self.segments, self.ratio, self.direction = segments, ratio, direction
        w, n, real, half = weights.dtype, weights.numel(), (torch.float32, torch.float64), torch.bfloat16
        allowed = {"weights": real, "gradient": (*real, half), "low": (half,), "average": (w,), "direction": (w,)}
        rows = [(name, getattr(self, name), dtypes) for name, dtypes in allowed.items() if getattr(self, name) is not None]
        if any(m is None for m in moments):
            raise ConfigError("momentum other than 0 needs a row for the velocity, but velocity is None")
        for name, row, dtypes in [*rows, *(("a moment", m, (w, half)) for m in moments)]:
            if row.dtype not in dtypes or row.shape != (n,) or not row.is_contiguous():
                found = f"{row.dtype} {list(row.shape)} with strides {row.stride()}"
                raise ConfigError(f"{name} is {found}, expected a contiguous row of {n} of {' or '.join(map(str, dtypes))}")
        if seed is None and any(m.dtype != w for m in moments):
            raise ConfigError("moments in bfloat16 are rounded stochastically and need a seed, but seed is None")
        if average is not None and take is None:
            raise ConfigError("an average takes a share of the weights, but take is None")
        if segments is not None and segments.size != n:
            raise ConfigError(f"the row has {n} elements, its segments were made for {segments.size}; give them its size")
        if segments is not None and ratio is not None and ratio.shape != (segments.count,):
            raise ConfigError(f"ratio is {list(ratio.shape)}, expected one number for each of {segments.count} segments")
        on_triton = compiler.takes(weights) and w == torch.float32  # imported on use: torch for the CPU has no triton
        self.triton: Any = import_module("hpcai.kernels.update_triton") if on_triton else None

    @torch.no_grad()
    def by_chunks(self, update: Callable[..., Any], writes: bool = False, norms: bool = False) -> Any:
        """Run ``update(w, g, moments, segment[, direction])`` for each chunk, none in two segments; then its average and bf16 copy.

        ``g`` is scale*gradient: a scratch copy (torch's fused operations would write it into the caller's gradient), or that
        gradient if ``update`` only reads it. ``norms``: [S, 2] sums of squares of w and of what ``update`` returns.
        """
        n, dtype = self.weights.numel(), self.weights.dtype
        whole = _chunk(self.weights), repeat(0), self.weights
        lengths, owners, counts = self.segments.pieces if self.segments else whole
        room = torch.empty_like(self.weights[: max(lengths, default=0) if isinstance(lengths, list) else lengths])
        low = self.low is not None  # rows may be many and short: nothing is made that none of them needs
        room16 = torch.empty_like(room, dtype=torch.bfloat16) if low else room
        wide = [room if m.dtype == dtype else torch.empty_like(room) for m in self.moments]
        bits = _Bits(self.seed, room) if self.seed is not None and any(x is not room for x in wide) else None
        # All bits, or none when skipped.
        chosen = (self.skip != 1).to(torch.int16).neg_() if low and self.skip is not None else room
        rows = (self.weights, self.gradient, owners, self.low, self.average, self.direction, *self.moments)
        one = not isinstance(lengths, list) and n <= lengths
        split: list = [
            repeat(x) if x is None else x if not isinstance(x, Tensor) else (x,) if one else x.split(lengths) for x in rows
        ]
        scale = self.scale.to(dtype).view(1) if self.scale is not None else None  # [1]: with [] a bf16 product would be rounded
        squares, place = [room.new_zeros(())] * 2 if norms else [], self.offset
        for w, gradient, k, narrow, average, direction, *moments in zip(*split) if n else ():
            scratch = room[: w.numel()]
            if scale is not None:
                g = torch.mul(gradient, scale, out=scratch)
            else:
                g = scratch.copy_(gradient) if writes or gradient.dtype != dtype else gradient
            m = [m if m.dtype == dtype else x[: w.numel()].copy_(m) for m, x in zip(moments, wide)]
            u = update(w, g, m, k) if direction is None else update(w, g, m, k, direction)
            if norms and k < len(counts):
                squares += torch.dot(w, w), torch.dot(u, u)
            if bits is not None:
                bits.store(place, moments, m)
            if average is not None and dtype == torch.float64:  # on a GPU, torch's fused operations read a rate as float32
                assert self.skip is not None
                average.copy_(torch.where(self.skip == 1, average, average.lerp(w, self.take)))
            elif average is not None:
                # a += take*(w - a): ascent of a along w at weight decay 1, which knows how to skip.
                _sgd(average, w, [], self.take, 0.0, 1.0, self.skip, up=True)
            if narrow is not None:
                # Bit by bit: new where chosen, otherwise old (torch.where takes three times as long).
                old, new = narrow.view(torch.int16), room16[: w.numel()].copy_(w).view(torch.int16)
                old.bitwise_xor_(new.bitwise_xor_(old).bitwise_and_(chosen))
            place += w.numel()
        if not norms:
            return None
        pairs = torch.stack(squares).view(-1, 2)[1:].double()
        return torch.segment_reduce(pairs, "sum", lengths=counts, axis=0, unsafe=True).to(dtype)


class _Bits:
    """32 random bits per element, a function of the seed and of offset + i, the same as in the kernels: multiplications and
    xor-shifts, keyed by splitmix64 of the seed (Steele et al. 2014). The lower 16 round the first moment, the upper the second."""

    def __init__(self, seed: Tensor, like: Tensor) -> None:
        z = seed + _signed(0x9E3779B97F4A7C15, 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * _signed(factor, 64)
        self._keys = z.to(torch.int32), (z >> 32).to(torch.int32)
        self._ramp = torch.arange(like.numel(), dtype=torch.int32, device=like.device) * _signed(0x9E3779B1, 32)
        self._room = torch.empty_like(self._ramp), torch.empty_like(self._ramp)

    def store(self, place: int, moments: list[Tensor], wide: list[Tensor]) -> None:
        """Store ``wide`` in bfloat16 ``moments``: bits are added below the 16 that these keep, and the rest is dropped. A NaN first
        gets the form that remains one."""
        x, y = (room[: moments[0].numel()] for room in self._room)

        def upper(shift: int) -> Tensor:
            return torch.bitwise_right_shift(x, shift, out=y).bitwise_and_((1 << 32 - shift) - 1)

        torch.add(self._ramp[: x.numel()], self._keys[0] + _signed(place * 0x9E3779B1, 32), out=x)
        x.bitwise_xor_(upper(16)).add_(self._keys[1]).mul_(_signed(0x21F0AAAD, 32))
        x.bitwise_xor_(upper(15)).mul_(_signed(0xD35A2D97, 32)).bitwise_xor_(upper(16))
        for k, (moment, value) in enumerate(zip(moments, wide)):
            if moment.dtype == torch.bfloat16:
                noise = upper(16) if k else torch.bitwise_and(x, 0xFFFF, out=y)
                value = value.float().nan_to_num_(torch.nan, torch.inf, -torch.inf)
                value.view(torch.int32).add_(noise).bitwise_and_(~0xFFFF)
                moment.copy_(value)


def _signed(number: int, bits: int) -> int:
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
