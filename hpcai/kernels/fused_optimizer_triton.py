# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``fused_optimizer``, in float32 arithmetic. Code that depends on a pointer that is None is not compiled."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.fused_optimizer import Operands


@triton.jit
def _random_bits(seed_, position):
    """Return the 32 random bits of each position, as ``fused_optimizer._StochasticRounding``."""
    z = tl.load(seed_).to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    x = position * 0x9E3779B1 + z.to(tl.uint32)
    x = ((x ^ (x >> 16)) + (z >> 32).to(tl.uint32)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 16)


@triton.jit
def _store(row_, value, mask, noise):
    """Store a moment, in bfloat16 with stochastic rounding."""
    if row_.dtype.element_ty == tl.bfloat16:
        upper = (value.to(tl.uint32, bitcast=True) + noise) >> 16
        value = tl.where(value == value, upper, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    tl.store(row_, value, mask)


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0 without cancellation: Adam's bias corrections are 1 - beta^step."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _store_copies(bf16_, average_, average_rate_, w, at, mask):
    """Update the bfloat16 copy and the average of the weights."""
    if bf16_ is not None:
        tl.store(bf16_ + at, w.to(tl.bfloat16), mask)
    if average_ is not None:
        a = tl.load(average_ + at, mask, other=0.0)
        tl.store(average_ + at, a + tl.load(average_rate_) * (w - a), mask)


@triton.jit
def update(
    w_, g_, m_, v_, bf16_, average_, direction_, ratio_, table_, sums_, lr_, average_rate_, step_, scale_, found_inf_, seed_, n,
    offset, log_beta1, one_minus_beta1, log_beta2, beta2, one_minus_beta2, eps, mu, decay, KIND: tl.constexpr,
    NESTEROV: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if table_ is None:
        first, last, norm_end = block * BLOCK, n, n
    else:
        first, last = tl.load(table_ + 4 * block + 1) * ALIGN, tl.load(table_ + 4 * block + 2) * ALIGN
        norm_end = tl.load(table_ + 4 * block + 3)
    if found_inf_ is not None:
        last = tl.where(tl.load(found_inf_) == 1.0, first, last)
    mask = lane < tl.minimum(last - first, BLOCK).to(tl.int32)
    in_norm = lane < tl.minimum(tl.maximum(norm_end - first, 0), BLOCK).to(tl.int32)
    w = tl.load(w_ + first + lane, mask, other=0.0)
    u = tl.load(g_ + first + lane, mask, other=0.0).to(tl.float32)
    if scale_ is not None:
        u *= tl.load(scale_)
    lr = tl.load(lr_) if lr_ is not None else 0.0
    noise = tl.zeros((BLOCK,), tl.uint32)
    if seed_ is not None:
        noise = _random_bits(seed_, (first + offset).to(tl.uint32) + lane.to(tl.uint32))
    if KIND == "adam" or KIND == "adamw" or KIND == "lamb":
        if KIND == "adam":
            u += decay * w
        m = tl.load(m_ + first + lane, mask, other=0.0).to(tl.float32)
        v = tl.load(v_ + first + lane, mask, other=0.0).to(tl.float32)
        m += one_minus_beta1 * (u - m)
        v = beta2 * v + one_minus_beta2 * u * u
        _store(m_ + first + lane, m, mask, noise & 0xFFFF)
        _store(v_ + first + lane, v, mask, noise >> 16)
        step = tl.load(step_)
        u = m / (_one_minus_exp(log_beta1 * step) * (tl.sqrt(v) / tl.sqrt(_one_minus_exp(log_beta2 * step)) + eps))
        if KIND == "lamb":
            u += decay * w
            tl.store(direction_ + first + lane, u, mask)
        else:
            if KIND == "adamw":
                w *= 1.0 - lr * decay
            w -= lr * u
    elif KIND == "adagrad":
        u += decay * w
        s = tl.load(m_ + first + lane, mask, other=0.0).to(tl.float32) + u * u
        _store(m_ + first + lane, s, mask, noise & 0xFFFF)
        w -= lr * u / (tl.sqrt(s) + eps)
    elif KIND == "inside" or KIND == "outside":
        u += decay * w
        if ratio_ is not None:
            ratio = tl.load(ratio_ + tl.load(table_ + 4 * block), first < norm_end, other=1.0)
            u *= tl.where(in_norm, ratio, 1.0)
        if KIND == "inside":
            u *= lr
        if m_ is not None:
            v = u + mu * tl.load(m_ + first + lane, mask, other=0.0).to(tl.float32)
            _store(m_ + first + lane, v, mask, noise & 0xFFFF)
            u = u + mu * v if NESTEROV else v
        w -= lr * u if KIND == "outside" else u
    if sums_ is not None:
        tl.store(sums_ + 2 * block, tl.sum(tl.where(in_norm, w * w, 0.0)))
        tl.store(sums_ + 2 * block + 1, tl.sum(tl.where(in_norm, u * u, 0.0)))
    else:
        tl.store(w_ + first + lane, w, mask)
        _store_copies(bf16_, average_, average_rate_, w, first + lane, mask)


@triton.jit
def fold(sums_, upto_, total_, BLOCK: tl.constexpr):
    """Add the partial sums of the blocks of a segment, in a fixed order."""
    segment, pair = tl.program_id(0).to(tl.int64), tl.arange(0, 2)
    total, first, last = tl.zeros((BLOCK, 2), tl.float64), tl.load(upto_ + segment), tl.load(upto_ + segment + 1)
    while first < last:
        block = (first + tl.arange(0, BLOCK))[:, None]
        total += tl.load(sums_ + 2 * block + pair[None, :], block < last, other=0.0)
        first += BLOCK
    tl.store(total_ + 2 * segment + pair, tl.sum(total, 0).to(tl.float32))


def run(
    operands: Operands, kind: str, lr: Tensor | None = None, step: Tensor | None = None, betas: tuple[float, float] = (0.0, 0.0),
    eps: float = 0.0, mu: float = 0.0, decay: float = 0.0, nesterov: bool = False,
) -> Tensor | None:  # fmt: skip
    """Launch the kernels. Kinds "lamb" and "norms" return sums of squares [S, 2]."""
    s, w, n, (m, v) = operands.segments, operands.weights, operands.weights.numel(), (*operands.moments, None, None)[:2]
    block, blocks, align = (1024, triton.cdiv(n, 1024), 1) if s is None else (s.block, len(s.table), s.align)
    sums = w.new_empty(blocks, 2) if kind in ("lamb", "norms") else None
    log_beta1, log_beta2 = (math.log(beta) if beta else -math.inf for beta in betas)
    with torch.cuda.device_of(w):
        update[(blocks,)](
            w, operands.gradient, m, v, operands.bf16_copy, operands.average, operands.direction, operands.ratio,
            None if s is None else s.table, sums, lr, operands.average_rate, step, operands.scale, operands.found_inf,
            operands.seed, n, operands.offset, log_beta1, 1 - betas[0], log_beta2, betas[1], 1 - betas[1], eps, mu, decay,
            KIND=kind, NESTEROV=nesterov, ALIGN=align, BLOCK=block, num_warps=block // 256,
        )  # fmt: skip
        if s is None or sums is None:
            return None
        total = w.new_empty(s.count, 2)
        fold[(s.count,)](sums, s.upto, total, BLOCK=512, num_warps=4)
    return total
