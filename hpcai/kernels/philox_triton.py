# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``philox``: each lane computes one counter and writes its elements next to each other."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcai.kernels.triton_support import signed

BLOCK, WARPS = 256, 4


@triton.jit
def _uniform(high, low, WIDE: tl.constexpr):
    if WIDE:
        value = ((high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)).to(tl.float64) * 1.1102230246251565e-16
    else:
        value = (high >> 8).to(tl.float32) * 5.9604644775390625e-08
    return value


@triton.jit
def _gauss(a, b, c, d, WIDE: tl.constexpr):
    """Return the pair of Box and Muller: from the words a and b in float32, from all four in float64."""
    if WIDE:
        uniform = ((((a.to(tl.uint64) << 21) | (b >> 11).to(tl.uint64)).to(tl.float64)) + 0.5) * 1.1102230246251565e-16
        angle = ((c.to(tl.uint64) << 21) | (d >> 11).to(tl.uint64)).to(tl.float64) * 6.975736996017264e-16
    else:
        uniform = (a.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        angle = b.to(tl.float32) * 1.4629180792671596e-09
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _elements(a, b, c, d, KIND: tl.constexpr, WIDE: tl.constexpr):
    """Return the four elements of the words of a counter; in float64 two elements, twice."""
    if KIND == "bits":
        w, x, y, z = a.to(tl.int64), b.to(tl.int64), c.to(tl.int64), d.to(tl.int64)
    elif WIDE:
        if KIND == "normal":
            w, x = _gauss(a, b, c, d, WIDE)
        else:
            w, x = _uniform(a, b, WIDE), _uniform(c, d, WIDE)
        y, z = w, x
    elif KIND == "normal":
        w, x = _gauss(a, b, a, b, WIDE)
        y, z = _gauss(c, d, c, d, WIDE)
    else:
        w, x, y, z = _uniform(a, b, WIDE), _uniform(b, b, WIDE), _uniform(c, d, WIDE), _uniform(d, d, WIDE)
    return w, x, y, z


@triton.jit
def _words(key, counter, upper):
    """Return the four words of counters of 128 bits."""
    high, top = (counter >> 32).to(tl.uint32), (upper >> 32).to(tl.uint32)
    return tl.philox(key, counter.to(tl.uint32), high, upper.to(tl.uint32), top)


@triton.jit(do_not_specialize=["first", "key", "upper"])
def draw(out_, key_, first, key, upper, n, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write elements ``first`` to ``first + n`` of one stream, whose key is ``key`` or is loaded from ``key_``."""
    key = key.to(tl.int64) if key_ is None else tl.load(key_)
    each: tl.constexpr = 2 if WIDE else 4
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = first.to(tl.int64)
    counter = first // each + start + tl.arange(0, BLOCK)
    upper = tl.zeros((BLOCK,), tl.int64) + upper.to(tl.int64)
    a, b, c, d = _words(key, counter, upper)
    w, x, y, z = _elements(a, b, c, d, KIND, WIDE)
    if WIDE:
        row = tl.interleave(w, x)
    else:
        row = tl.interleave(tl.interleave(w, y), tl.interleave(x, z))
    at = start * each - first % each + tl.arange(0, BLOCK * each)
    tl.store(out_ + at, row, (at >= 0) & (at < n))


@triton.jit
def draw_at(
    out_, indices_, keys_, uppers_, rows, count, per, KIND: tl.constexpr, WIDE: tl.constexpr, EACH_KEY: tl.constexpr,
    EACH_UPPER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``count`` elements from each of ``rows`` indices on, of one stream or of one stream for each index. ``per`` lanes
    compute the counters of a row, which are enough wherever it begins."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, lane = lane // per, lane % per
    mask = row < rows
    index = tl.load(indices_ + row, mask, other=0)
    key = tl.load(keys_ + row, mask, other=0) if EACH_KEY else tl.load(keys_)
    upper = tl.load(uppers_ + row, mask, other=0) if EACH_UPPER else tl.zeros((BLOCK,), tl.int64) + tl.load(uppers_)
    each: tl.constexpr = 2 if WIDE else 4
    a, b, c, d = _words(key, index // each + lane, upper)
    w, x, y, z = _elements(a, b, c, d, KIND, WIDE)
    at = lane * each - index % each
    out_ += row * count
    tl.store(out_ + at, w, mask & (at >= 0) & (at < count))
    tl.store(out_ + at + 1, x, mask & (at + 1 >= 0) & (at + 1 < count))
    if not WIDE:
        tl.store(out_ + at + 2, y, mask & (at + 2 >= 0) & (at + 2 < count))
        tl.store(out_ + at + 3, z, mask & (at + 3 < count))


def run(kind: str, key: int | Tensor, first: int | Tensor, upper: int | Tensor, out: Tensor) -> None:
    """Fill ``out`` [n]; with indices [*] in ``first``, ``out`` [*] or [*, n]."""
    kwargs: dict[str, Any] = {"KIND": kind, "WIDE": out.dtype == torch.float64, "BLOCK": BLOCK, "num_warps": WARPS}
    n, each = out.numel(), 2 if kwargs["WIDE"] else 4
    with torch.cuda.device_of(out):
        if isinstance(first, int):
            assert isinstance(upper, int)
            programs = triton.cdiv(n + first % each, BLOCK * each)
            arguments = (key, first, 0) if isinstance(key, Tensor) else (None, first, signed(key))
            draw[(programs,)](out, *arguments, signed(upper), n, **kwargs)
            return
        count = out.shape[-1] if out.ndim > first.ndim else 1
        per = (count + each - 2) // each + 1
        keys, uppers = (_rows(x, first) for x in (key, upper))
        each_one = {"EACH_KEY": keys.numel() > 1, "EACH_UPPER": uppers.numel() > 1}
        programs = triton.cdiv(first.numel() * per, BLOCK)
        draw_at[(programs,)](out, first.contiguous(), keys, uppers, first.numel(), count, per, **each_one, **kwargs)


def _rows(number: int | Tensor, first: Tensor) -> Tensor:
    """Return one value, or one for each index, on its device."""
    if isinstance(number, int):
        return torch.full((1,), signed(number), device=first.device)
    return number.expand(first.shape).contiguous() if number.numel() > 1 else number.reshape(1)
