"""Fused optimizer steps of a flat parameter: weights, gradient and moments are read once and written once.

On CUDA each function is one Triton kernel (``fused_optimizer_triton``). Elsewhere, and for float64, it is torch, in chunks, so that
the weights are still in the cache when average and bfloat16 copy are updated. Scalars are tensors on the device, and nothing is
read back: a CUDA graph can capture each call. With ``found_inf`` 1 all tensors keep their bits, whatever the gradient holds.

Arguments, with n elements of the flat parameter and S segments, each the range of one parameter:
    weights: [n] float32 or float64, the master weights.
    gradient: [n] float32, bfloat16 or float64, read only. It is multiplied by ``scale`` (None: 1).
    exp_avg, exp_avg_sq, momentum_buffer: Moments [n], in the dtype of the weights, or in bfloat16 with stochastic rounding.
    lr, average_rate, step, scale, found_inf: Scalars on the device; ``step`` counts from 1.
    bf16_copy, average: [n] bfloat16 copy of the weights, rounded to nearest even; [n] their average, a += average_rate*(w - a).
    seed, offset: Random bits of the stochastic rounding of element i depend on ``seed`` (int64, another one in every step) and on
        ``offset`` + i modulo 2^32, so that a shard of a flat parameter draws the bits of the full one.
Raises ConfigError if shapes or dtypes do not fit together.
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
from hpcai.kernels import triton_support
from hpcai.kernels.triton_support import signed

# Elements of a chunk for one thread. Smaller chunks would fit the L2 cache, but lose more by the 3 to 6 us of each operation of
# torch than they gain (10 M weights: 14.6 ms at 32 Ki, 9.5 ms at 256 Ki, 26 ms unchunked; EPYC, one thread).
_CHUNK = 1 << 17
_GPU = 1 << 26  # elements of a chunk on a GPU, which bounds scratch memory


def _chunk(x: Tensor) -> int:
    return _CHUNK * (1 + torch.get_num_threads()) if x.device.type == "cpu" else _GPU


class Segments:
    """The ranges of a flat parameter that are one parameter each, for norms and ratios per parameter.

    Padding between them is updated with ratio 1 and counts in no norm. Kernels use vector loads of 16 bytes if all starts and the
    size are multiples of 16.

    Args:
        ranges: (start, length) of each parameter, in order. A length may be 0.
        size: The elements of the flat parameter, if there is padding after the last range.

    Raises ConfigError if ranges are out of order, overlap, or exceed the size.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], device: torch.device | str, size: int | None = None) -> None:
        end = 0
        for k, (start, length) in enumerate(ranges):
            if start < end or length < 0:
                raise ConfigError(f"segment {k} is ({start}, {length}), expected a start from {end} on and a length from 0 on")
            end = start + length
        if size is not None and size < end:
            raise ConfigError(f"the flat parameter has {size} elements, but its last segment ends at {end}")
        self.size, self.count, self.block = end if size is None else size, len(ranges), 2048
        starts, ends = [start for start, _ in ranges], [start + length for start, length in ranges]
        self.align = gcd(16, self.size, *starts)
        # One tile before the first start and one from each start to the next, divided into blocks: none is in two segments.
        begin, stop, norm_ends = (torch.tensor(x) for x in ([0, *starts], [*starts, self.size], [0, *ends]))
        blocks = (stop - begin + self.block - 1) // self.block
        upto = blocks.cumsum(0)
        tile = torch.repeat_interleave(torch.arange(len(blocks)), blocks)
        first = begin[tile] + (torch.arange(len(tile)) - (upto - blocks)[tile]) * self.block
        last = torch.minimum(first + self.block, stop[tile])
        columns = ((tile - 1).clamp(min=0), first // self.align, last // self.align, norm_ends[tile])
        self.table = torch.stack(columns, 1).to(device)  # [blocks, 4]: segment, first, last, end of the elements of its norm
        self.upto = upto.to(device)  # [S + 1]: segment k has the blocks upto[k] to upto[k + 1]
        # For the reference: lengths of pieces, their segments (S: padding), and the number of pieces of each segment.
        edges = sorted({*starts, *ends, *range(0, self.size, _chunk(self.table)), self.size})
        last_starts = [bisect_right(starts, edge) - 1 for edge in edges[:-1]]  # of segments with one start all but one are empty
        owners = [k if k >= 0 and edge < ends[k] else self.count for k, edge in zip(last_starts, edges)]
        counts = torch.tensor(owners, dtype=torch.long).bincount(minlength=self.count + 1)[: self.count]
        self.pieces = [b - a for a, b in pairwise(edges)], owners, counts.to(device)


def adam_(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: Tensor, step: Tensor, scale: Tensor | None,
          found_inf: Tensor, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool = True,
          **kwargs: Any) -> None:  # fmt: skip
    """Adam (Kingma and Ba 2015) with bias correction; ``decoupled``: AdamW (Loshchilov and Hutter 2019), otherwise the weight decay
    is added to the gradient."""
    operands = Operands(weights, gradient, (exp_avg, exp_avg_sq), scale, found_inf, **kwargs)
    _adam(operands, "adamw" if decoupled else "adam", lr, step, betas, eps, weight_decay)


def sgd_(weights: Tensor, gradient: Tensor, momentum_buffer: Tensor | None, *, lr: Tensor, scale: Tensor | None, found_inf: Tensor,
         momentum: float, weight_decay: float, lr_in_momentum: bool, nesterov: bool = False, **kwargs: Any) -> None:  # fmt: skip
    """SGD: v = mu v + g + wd w, w -= lr v; with ``lr_in_momentum`` v = mu v + lr (g + wd w), w -= v (Keras). Momentum 0 needs no
    momentum buffer. ``nesterov``: w -= lr (g + wd w + mu v) (Sutskever et al. 2013, as torch implements it)."""
    operands = Operands(weights, gradient, (momentum_buffer,) if momentum else (), scale, found_inf, **kwargs)
    _sgd_update(operands, "inside" if lr_in_momentum else "outside", lr, momentum, weight_decay, nesterov and momentum > 0)


def adagrad_(weights: Tensor, gradient: Tensor, sum: Tensor, *, lr: Tensor, scale: Tensor | None, found_inf: Tensor, eps: float,
             weight_decay: float, **kwargs: Any) -> None:  # fmt: skip
    """Adagrad (Duchi et al. 2011) without a decay of the learning rate: s += g^2, w -= lr g/(sqrt(s) + eps), with the weight decay
    added to the gradient."""
    operands = Operands(weights, gradient, (sum,), scale, found_inf, **kwargs)
    if operands.triton:
        return operands.triton.run(operands, "adagrad", lr=lr, eps=eps, decay=weight_decay)
    step = torch.zeros((), dtype=torch.float32, device=weights.device)

    def update(w: Tensor, g: Tensor, m: list[Tensor], k: int) -> None:
        torch._fused_adagrad_([w], [g], [m[0]], [step], lr=lr, lr_decay=0.0, weight_decay=weight_decay, eps=eps, maximize=False,
                              found_inf=found_inf)  # fmt: skip

    return operands.run_chunked(update)


def lamb_direction_(weights: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, direction: Tensor,
                    segments: Segments, *, step: Tensor, scale: Tensor | None, found_inf: Tensor, betas: tuple[float, float],
                    eps: float, weight_decay: float, **kwargs: Any) -> Tensor:  # fmt: skip
    """First half of LAMB (You et al. 2020): moments, and ``direction`` [n] = m_hat/(sqrt(v_hat) + eps) + weight_decay*w.

    Return sums of squares of weights and direction [S, 2], in the dtype of the weights; undefined if ``found_inf`` is 1.
    """
    operands = Operands(weights, gradient, (exp_avg, exp_avg_sq), scale, found_inf, segments=segments, direction=direction,
                        **kwargs)  # fmt: skip
    return _adam(operands, "lamb", None, step, betas, eps, weight_decay)


def lamb_update_(weights: Tensor, direction: Tensor, segments: Segments, ratio: Tensor, *, lr: Tensor, found_inf: Tensor,
                 **kwargs: Any) -> None:  # fmt: skip
    """Second half of LAMB: w -= lr * ratio[segment] * direction.   ``ratio`` [S]"""
    _sgd_update(Operands(weights, direction, (), None, found_inf, segments=segments, ratio=ratio, **kwargs), "inside", lr, 0.0, 0.0)


def lars_norms(weights: Tensor, gradient: Tensor, segments: Segments, *, scale: Tensor | None) -> Tensor:
    """Return sums of squares of weights and scale*gradient for each segment [S, 2], in the dtype of the weights."""
    operands = Operands(weights, gradient, (), scale, None, segments=segments)
    return operands.triton.run(operands, "norms") if operands.triton else operands.run_chunked(lambda w, g, m, k: g, norms=True)


def lars_(weights: Tensor, gradient: Tensor, momentum_buffer: Tensor | None, segments: Segments, ratio: Tensor, *, lr: Tensor,
          scale: Tensor | None, found_inf: Tensor, momentum: float, weight_decay: float, **kwargs: Any) -> None:  # fmt: skip
    """LARS (You et al. 2017): v = mu v + lr*ratio[segment]*(g + wd w), w -= v.   ``ratio`` [S]"""
    operands = Operands(weights, gradient, (momentum_buffer,) if momentum else (), scale, found_inf, segments=segments,
                        ratio=ratio, **kwargs)  # fmt: skip
    _sgd_update(operands, "inside", lr, momentum, weight_decay)


def trust_ratio(sums: Tensor, *, weight_decay: float, coefficient: float = 1.0, lars: bool = False) -> Tensor:
    """Return the trust ratios [S] for sums of squares [S, 2]: |w|/|u| of LAMB, or coefficient*|w|/(|g| + weight_decay*|w|) of LARS;
    1 where a norm is 0."""
    weight, other = sums.sqrt().unbind(1)
    ratio = coefficient * weight / (other + weight_decay * weight) if lars else weight / other
    return torch.where((weight == 0) | (other == 0), 1.0, ratio)


def _adam(operands: "Operands", kind: str, lr: Any, step: Tensor, betas: tuple[float, float], eps: float, decay: float) -> Any:
    if operands.triton:
        return operands.triton.run(operands, kind, lr=lr, step=step, betas=betas, eps=eps, decay=decay)
    op: Any = torch._fused_adam_ if kind == "adam" else torch._fused_adamw_

    def update(w: Tensor, g: Tensor, m: list[Tensor], k: int, d: Tensor | None = None) -> Tensor:
        # LAMB: with learning rate -1, Adam adds its direction to its weights.
        x = w if d is None else torch.mul(w, decay, out=d)
        op([x], [g], [m[0]], [m[1]], [], [step], lr=-1.0 if lr is None else lr, beta1=betas[0], beta2=betas[1], eps=eps,
           weight_decay=decay if d is None else 0.0, amsgrad=False, maximize=False, found_inf=operands.found_inf)  # fmt: skip
        return x

    return operands.run_chunked(update, norms=operands.direction is not None)


def _sgd_update(operands: "Operands", kind: str, lr: Tensor, mu: float, decay: float, nesterov: bool = False) -> None:
    """SGD with momentum; kind "inside": learning rate and ratios are part of the momentum."""
    if operands.triton:
        return operands.triton.run(operands, kind, lr=lr, mu=mu, decay=decay, nesterov=nesterov)
    ratios = operands.ratio.unbind() if operands.ratio is not None else ()

    def update(w: Tensor, g: Tensor, m: list[Tensor], k: int) -> None:
        if kind == "outside":
            return _sgd(w, g, m, lr, mu, decay, operands.found_inf, nesterov)
        if decay:
            g.add_(w, alpha=decay)
        if k < len(ratios):
            g.mul_(ratios[k])
        return _sgd(w, g.mul_(lr) if m else g, m, 1.0 if m else lr, mu, 0.0, operands.found_inf, nesterov)

    return operands.run_chunked(update, writes=kind == "inside")


def _sgd(w: Tensor, g: Tensor, m: list[Tensor], lr: Any, mu: float, decay: float, found_inf: Any, nesterov: bool = False,
         maximize: bool = False) -> None:  # fmt: skip
    torch._fused_sgd_([w], [g], m, weight_decay=decay, momentum=mu, lr=lr, dampening=0.0, nesterov=nesterov, maximize=maximize,
                      is_first_step=False, found_inf=found_inf)  # fmt: skip


class Operands:
    """The tensors of one call, validated."""

    def __init__(self, weights: Tensor, gradient: Tensor, moments: tuple[Any, ...], scale: Tensor | None, found_inf: Tensor | None,
                 bf16_copy: Tensor | None = None, average: Tensor | None = None, average_rate: Tensor | None = None,
                 seed: Tensor | None = None, offset: int = 0, segments: Segments | None = None, ratio: Tensor | None = None,
                 direction: Tensor | None = None) -> None:  # fmt: skip
        self.weights, self.gradient, self.moments, self.scale, self.found_inf = weights, gradient, moments, scale, found_inf
        self.bf16_copy, self.average, self.average_rate, self.seed, self.offset = bf16_copy, average, average_rate, seed, offset
        self.segments, self.ratio, self.direction = segments, ratio, direction
        w, n, real, half = weights.dtype, weights.numel(), (torch.float32, torch.float64), torch.bfloat16
        allowed = {"weights": real, "gradient": (*real, half), "bf16_copy": (half,), "average": (w,), "direction": (w,)}
        tensors = [(name, getattr(self, name), dtypes) for name, dtypes in allowed.items() if getattr(self, name) is not None]
        if any(m is None for m in moments):
            raise ConfigError("momentum other than 0 needs a momentum_buffer, but momentum_buffer is None")
        for name, row, dtypes in [*tensors, *(("a moment", m, (w, half)) for m in moments)]:
            if row.dtype not in dtypes or row.shape != (n,) or not row.is_contiguous():
                description = f"{row.dtype} {list(row.shape)} with strides {row.stride()}"
                raise ConfigError(f"{name} is {description}, expected contiguous [{n}] of {' or '.join(map(str, dtypes))}")
        if seed is None and any(m.dtype != w for m in moments):
            raise ConfigError("moments in bfloat16 are rounded stochastically and need a seed, but seed is None")
        if average is not None and average_rate is None:
            raise ConfigError("average needs average_rate, but average_rate is None")
        if segments is not None and segments.size != n:
            raise ConfigError(f"the flat parameter has {n} elements, its segments {segments.size}; construct them with size={n}")
        if segments is not None and ratio is not None and ratio.shape != (segments.count,):
            raise ConfigError(f"ratio is {list(ratio.shape)}, expected one element for each of {segments.count} segments")
        on_triton = triton_support.is_supported(weights) and w == torch.float32
        # Imported on use: CPU builds of torch have no triton.
        self.triton: Any = import_module("hpcai.kernels.fused_optimizer_triton") if on_triton else None

    @torch.no_grad()
    def run_chunked(self, update: Callable[..., Any], writes: bool = False, norms: bool = False) -> Any:
        """Call ``update(w, g, moments, segment[, direction])`` for each chunk, none in two segments; then update its average and
        bf16 copy.

        ``g`` is scale*gradient: a scratch copy, since torch's fused operations write to their gradient, or the gradient itself if
        ``update`` only reads it. With ``norms``, return sums of squares of w and of the result of ``update`` [S, 2].
        """
        n, dtype = self.weights.numel(), self.weights.dtype
        unsegmented = _chunk(self.weights), repeat(0), self.weights
        lengths, owners, counts = self.segments.pieces if self.segments else unsegmented
        buffer = torch.empty_like(self.weights[: max(lengths, default=0) if isinstance(lengths, list) else lengths])
        has_bf16 = self.bf16_copy is not None  # flat parameters may be many and short: only buffers that are needed
        buffer16 = torch.empty_like(buffer, dtype=torch.bfloat16) if has_bf16 else buffer
        wide = [buffer if m.dtype == dtype else torch.empty_like(buffer) for m in self.moments]
        rounding = _StochasticRounding(self.seed, buffer) if self.seed is not None and any(x is not buffer for x in wide) else None
        # All bits set, or none if skipped.
        update_mask = (self.found_inf != 1).to(torch.int16).neg_() if has_bf16 and self.found_inf is not None else buffer
        tensors = (self.weights, self.gradient, owners, self.bf16_copy, self.average, self.direction, *self.moments)
        is_single = not isinstance(lengths, list) and n <= lengths
        chunks: list = [
            repeat(x) if x is None else x if not isinstance(x, Tensor) else (x,) if is_single else x.split(lengths) for x in tensors
        ]
        scale = self.scale.to(dtype).view(1) if self.scale is not None else None  # [1]: a product with [] would be rounded to bf16
        squares, position = [buffer.new_zeros(())] * 2 if norms else [], self.offset
        for w, gradient, k, bf16, average, direction, *moments in zip(*chunks) if n else ():
            scratch = buffer[: w.numel()]
            if scale is not None:
                g = torch.mul(gradient, scale, out=scratch)
            else:
                g = scratch.copy_(gradient) if writes or gradient.dtype != dtype else gradient
            m = [m if m.dtype == dtype else x[: w.numel()].copy_(m) for m, x in zip(moments, wide)]
            u = update(w, g, m, k) if direction is None else update(w, g, m, k, direction)
            if norms and k < len(counts):
                squares += torch.dot(w, w), torch.dot(u, u)
            if rounding is not None:
                rounding.store(position, moments, m)
            if average is not None and dtype == torch.float64:  # on a GPU, torch's fused operations read the rate as float32
                assert self.found_inf is not None
                average.copy_(torch.where(self.found_inf == 1, average, average.lerp(w, self.average_rate)))
            elif average is not None:
                # a += average_rate*(w - a): ascent of a along w with weight decay 1, by an operation that takes found_inf.
                _sgd(average, w, [], self.average_rate, 0.0, 1.0, self.found_inf, maximize=True)
            if bf16 is not None:
                # Bitwise selection of new or old: torch.where takes three times as long.
                old, new = bf16.view(torch.int16), buffer16[: w.numel()].copy_(w).view(torch.int16)
                old.bitwise_xor_(new.bitwise_xor_(old).bitwise_and_(update_mask))
            position += w.numel()
        if not norms:
            return None
        pairs = torch.stack(squares).view(-1, 2)[1:].double()
        return torch.segment_reduce(pairs, "sum", lengths=counts, axis=0, unsafe=True).to(dtype)


class _StochasticRounding:
    """Stochastic rounding with 32 random bits per element, a function of the seed and of offset + i, the same as in the kernels:
    multiplications and xor-shifts, keyed by splitmix64 of the seed (Steele et al. 2014). The lower 16 bits round the first moment,
    the upper 16 the second."""

    def __init__(self, seed: Tensor, like: Tensor) -> None:
        z = seed + signed(0x9E3779B97F4A7C15, 64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * signed(factor, 64)
        self._keys = z.to(torch.int32), (z >> 32).to(torch.int32)
        self._ramp = torch.arange(like.numel(), dtype=torch.int32, device=like.device) * signed(0x9E3779B1, 32)
        self._scratch = torch.empty_like(self._ramp), torch.empty_like(self._ramp)

    def store(self, position: int, moments: list[Tensor], wide: list[Tensor]) -> None:
        """Store ``wide`` in bfloat16 ``moments``: random bits are added below the 16 stored ones, and the rest is truncated. NaN is
        first made one that survives the truncation."""
        x, y = (buffer[: moments[0].numel()] for buffer in self._scratch)

        def upper(shift: int) -> Tensor:
            return torch.bitwise_right_shift(x, shift, out=y).bitwise_and_((1 << 32 - shift) - 1)

        torch.add(self._ramp[: x.numel()], self._keys[0] + signed(position * 0x9E3779B1, 32), out=x)
        x.bitwise_xor_(upper(16)).add_(self._keys[1]).mul_(signed(0x21F0AAAD, 32))
        x.bitwise_xor_(upper(15)).mul_(signed(0xD35A2D97, 32)).bitwise_xor_(upper(16))
        for k, (moment, value) in enumerate(zip(moments, wide)):
            if moment.dtype == torch.bfloat16:
                noise = upper(16) if k else torch.bitwise_and(x, 0xFFFF, out=y)
                value = value.float().nan_to_num_(torch.nan, torch.inf, -torch.inf)
                value.view(torch.int32).add_(noise).bitwise_and_(~0xFFFF)
                moment.copy_(value)
