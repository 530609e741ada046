# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``philox``: one counter a lane, whose numbers it writes beside each other."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 256, 4


@triton.jit
def _uniform(high, low, WIDE: tl.constexpr):
    if WIDE:
        made = ((high.to(tl.uint64) << 21) | (low >> 11).to(tl.uint64)).to(tl.float64) * 1.1102230246251565e-16
    else:
        made = (high >> 8).to(tl.float32) * 5.9604644775390625e-08
    return made


@triton.jit
def _gauss(a, b, c, d, WIDE: tl.constexpr):
    """Box and Muller's pair: of the words a and b in float32, of all four in float64."""
    if WIDE:
        one = ((((a.to(tl.uint64) << 21) | (b >> 11).to(tl.uint64)).to(tl.float64)) + 0.5) * 1.1102230246251565e-16
        angle = ((c.to(tl.uint64) << 21) | (d >> 11).to(tl.uint64)).to(tl.float64) * 6.975736996017264e-16
    else:
        one = (a.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        angle = b.to(tl.float32) * 1.4629180792671596e-09
    radius = tl.sqrt(-2.0 * tl.log(one))
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _numbers(a, b, c, d, KIND: tl.constexpr, WIDE: tl.constexpr):
    """What a counter's words a, b, c, d give: four numbers, or two and the same two again."""
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


@triton.jit(do_not_specialize=["first", "key"])
def draw(out_, key_, first, key, n, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers ``first`` to ``first + n`` of one stream, whose key is ``key`` or lies at ``key_``."""
    key = key.to(tl.int64) if key_ is None else tl.load(key_)
    each: tl.constexpr = 2 if WIDE else 4
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = first.to(tl.int64)
    counter = first // each + start + tl.arange(0, BLOCK)
    zero = counter.to(tl.uint32) * 0
    a, b, c, d = tl.philox(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero)
    w, x, y, z = _numbers(a, b, c, d, KIND, WIDE)
    if WIDE:
        row = tl.interleave(w, x)
    else:
        row = tl.interleave(tl.interleave(w, y), tl.interleave(x, z))
    at = start * each - first % each + tl.arange(0, BLOCK * each)
    tl.store(out_ + at, row, (at >= 0) & (at < n))


@triton.jit
def draw_at(out_, places_, keys_, n, KIND: tl.constexpr, WIDE: tl.constexpr, EACH_KEY: tl.constexpr, BLOCK: tl.constexpr):
    """One number for each place, of one stream or of one for each place."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < n
    place = tl.load(places_ + lane, mask, other=0)
    key = tl.load(keys_ + lane, mask, other=0) if EACH_KEY else tl.load(keys_)
    each: tl.constexpr = 2 if WIDE else 4
    counter, which = place // each, place % each
    zero = counter.to(tl.uint32) * 0
    a, b, c, d = tl.philox(key, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), zero, zero)
    w, x, y, z = _numbers(a, b, c, d, KIND, WIDE)
    tl.store(out_ + lane, tl.where(which == 0, w, tl.where(which == 1, x, tl.where(which == 2, y, z))), mask)


def run(kind: str, key: int | Tensor, first: int | Tensor, out: Tensor) -> None:
    """Fill ``out`` [n] or, where ``first`` has places [*], out [*] or [*, n] from each on."""
    words: dict[str, Any] = {"KIND": kind, "WIDE": out.dtype == torch.float64, "BLOCK": BLOCK, "num_warps": WARPS}
    n, each = out.numel(), 2 if words["WIDE"] else 4
    with torch.cuda.device_of(out):
        if isinstance(first, int):
            programs = triton.cdiv(n + first % each, BLOCK * each)
            if isinstance(key, Tensor):
                draw[(programs,)](out, key, first, 0, n, **words)
            else:
                draw[(programs,)](out, None, first, (key + (1 << 63)) % (1 << 64) - (1 << 63), n, **words)
            return
        wide = first[..., None] if out.ndim > first.ndim else first
        places = wide + torch.arange(out.shape[-1], device=out.device) if out.ndim > first.ndim else wide.contiguous()
        if isinstance(key, Tensor) and key.numel() > 1:
            keys = key.expand(first.shape)
            keys = (keys[..., None] if out.ndim > first.ndim else keys).expand(out.shape).contiguous()
        else:
            value = key if isinstance(key, Tensor) else (key + (1 << 63)) % (1 << 64) - (1 << 63)
            keys = value.reshape(1) if isinstance(value, Tensor) else torch.full((1,), value, device=out.device)
        draw_at[(triton.cdiv(n, BLOCK),)](out, places, keys, n, EACH_KEY=keys.numel() > 1, **words)


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """(name, kernel, signature, constexprs) of all that can be launched, for compilation ahead of time."""
    for kind, wide in (("bits", False), ("uniform", False), ("uniform", True), ("normal", False), ("normal", True)):
        fixed = {"KIND": kind, "WIDE": wide, "BLOCK": BLOCK}
        out = "*i64" if kind == "bits" else "*fp64" if wide else "*fp32"
        types = {"out_": out, "key_": "constexpr", "first": "i64", "key": "i64", "n": "i64"} | dict.fromkeys(fixed, "constexpr")
        name = f"{kind} {'float64' if wide else 'int64' if kind == 'bits' else 'float32'}"
        yield f"draw {name}", draw, types, {"key_": None, **fixed}
        at = {"out_": out, "places_": "*i64", "keys_": "*i64", "n": "i64"} | dict.fromkeys((*fixed, "EACH_KEY"), "constexpr")
        yield f"draw_at {name}", draw_at, at, {"EACH_KEY": True, **fixed}
