"""Random numbers that are counted, not followed: Philox 4x32 of 10 rounds (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC11).

Number i of a stream depends on the key of the stream and on i alone, in whatever order, on whatever process and device it is asked
for. On CUDA each call is one Triton kernel (``philox_triton``); elsewhere it is the plain-torch twin in this file, which works in
int64 and in blocks that stay in cache. On one device a number is always the same to the bit; on another a normal one may differ by
rounding. A counter, the 64-bit number j followed by the 64 bits of ``upper``, gives four words of 32 bits: number i of a float32
stream is made of word i % 4 of counter i // 4, number i of a float64 stream of two words of counter i // 2. Streams of one key and
another dtype or distribution use the same words: take a key, or an ``upper``, for each use.

``key``: 64 bits, as an int or an int64 tensor. ``first``: where to begin, an int, and then ``count`` numbers [count]; or places in
an int64 tensor [*], and then one number for each [*], or with ``count`` as many from each place on [*, count]. ``key`` and
``upper``, 64 bits too, may then have a value for each place. Places count from 0. ``out``: a contiguous tensor to write to, whose
device and dtype count; otherwise those of ``first`` count, or ``device`` and ``dtype``. bfloat16 and float16 are float32 numbers,
rounded.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import compiler

Kind = Literal["bits", "uniform", "normal"]

WORD = 0xFFFFFFFF
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # table 2 of the paper, and its Weyl sequence for the key
_ROUNDS = 10
# Counters that one thread takes at a time: six rows of them are 1.5 MiB of an L2 cache. A call costs torch 1 us (ns per uniform
# number on a Xeon of 2023: 22 with 4096, 11 with 16384, 10 with 32768, 11 with 65536).
_BLOCK = 1 << 15


def bits(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
         device: torch.device | str | None = None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Words of 32 bits, from 0 to 2^32 - 1, as int64."""
    return _drawn("bits", key, first, count, upper, device, torch.int64, out)


def uniform(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
            device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
            out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Numbers of [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64. 0 is one of them, 1 is not (bfloat16 and float16 may
    round to it)."""
    return _drawn("uniform", key, first, count, upper, device, dtype, out)


def normal(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
           device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
           out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Numbers of the normal distribution of mean 0 and deviation 1, two and two of one counter (Box and Muller 1958). None is
    beyond 6.8 in float32 (one of 10^11 would be), 8.7 in float64.

    On a CPU this takes as long as the inverse of the distribution, which in float32 ends at 5.4: 1 ns beside 8 for the words.
    """
    return _drawn("normal", key, first, count, upper, device, dtype, out)


def words(counter: Sequence[Tensor | int], key: int | Tensor) -> list[Tensor]:
    """The four words of counters of four words each, as int64; the rounds themselves, for what is counted otherwise."""
    some = next(c for c in counter if isinstance(c, Tensor))
    rows = [torch.empty_like(some).copy_(c) if isinstance(c, Tensor) else torch.full_like(some, c) for c in counter]
    return _words(rows, [torch.empty_like(some) for _ in range(2)], _halves(key))


def _drawn(kind: Kind, key: int | Tensor, first: int | Tensor, count: int | None, upper: int | Tensor,
           device: torch.device | str | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:  # fmt: skip
    if isinstance(first, int) and count is None:
        raise ConfigError(f"philox.{kind}: first is {first} and count is None; say how many numbers, or give places in a tensor")
    shape = (*(first.shape if isinstance(first, Tensor) else ()), *(() if count is None else (count,)))
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=first.device if device is None and isinstance(first, Tensor) else device)
    if out.shape != shape or not out.is_contiguous() or (out.is_floating_point() == (kind == "bits")):
        raise ConfigError(f"philox.{kind}: out is {out.dtype} {list(out.shape)}, expected contiguous {dtype} {list(shape)}")
    if not out.numel():
        return out
    if isinstance(first, Tensor):
        first = first.to(out.device, torch.int64)
    if isinstance(key, Tensor):
        key = key.item() if key.numel() == 1 and key.device.type == "cpu" else key.to(out.device, torch.int64)  # type: ignore[assignment]
    if isinstance(upper, Tensor):
        upper = upper.to(out.device, torch.int64)
    if isinstance(first, int) and isinstance(upper, Tensor):
        raise ConfigError(f"philox.{kind}: first is {first} and upper a tensor; give places in a tensor, too")
    made = out if out.dtype in (torch.int64, torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    if compiler.takes(out):
        _triton().run(kind, key, first, upper, made)
    else:
        _plain(kind, key, first, count, upper, made)
    return out if made is out else out.copy_(made)


@cache
def _triton() -> Any:
    return import_module("hpcai.kernels.philox_triton")


def _plain(kind: Kind, key: int | Tensor, first: int | Tensor, count: int | None, upper: int | Tensor, out: Tensor) -> None:
    each = 2 if out.dtype == torch.float64 else 4  # numbers that a counter gives
    flat, threads = out.view(-1), torch.get_num_threads()
    room = _Room(_BLOCK * threads, kind, out)  # torch gives a thread 2^15 numbers, or more
    if isinstance(first, int):
        at, k = 0, _halves(key)
        begin, skipped = divmod(first, each)
        while at < len(flat):
            size = min(room.size, -(-(skipped + len(flat) - at) // each))
            counters = torch.arange(begin, begin + size, out=room.rows[0][:size])
            found = room.numbers(counters, k, _halves(upper))[skipped : skipped + len(flat) - at]
            flat[at : at + len(found)] = found
            at, begin, skipped = at + len(found), begin + size, 0
        return
    starts, wanted = first.reshape(-1, 1), 1 if count is None else count
    keys, uppers = (x.expand(first.shape).reshape(-1, 1) if isinstance(x, Tensor) else x for x in (key, upper))
    into = flat.view(len(starts), wanted)
    for rows, columns in _tiles(len(starts), wanted, room.size, each):
        begin, width = starts[rows] + columns.start, columns.stop - columns.start
        counters = begin.div(each, rounding_mode="floor") + torch.arange((width + each - 2) // each + 1, device=out.device)
        key, upper = (x[rows] if isinstance(x, Tensor) else x for x in (keys, uppers))
        found = room.numbers(counters, _halves(key), _halves(upper))
        at = begin.remainder(each) + torch.arange(width, device=out.device)
        into[rows, columns] = found.view(len(begin), -1).gather(1, at)


def _tiles(rows: int, columns: int, counters: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a table of numbers for which so many ``counters`` are enough, wherever each row begins."""
    width = min(columns, (counters - 2) * each)
    height = max(counters // ((width + each - 2) // each + 1), 1)
    for c in range(0, columns, width):
        for r in range(0, rows, height):
            yield slice(r, min(r + height, rows)), slice(c, min(c + width, columns))


def _halves(key: int | Tensor) -> tuple[Any, Any]:
    return key & WORD, (key >> 32) & WORD


def _words(rows: list[Tensor], free: list[Tensor], key: tuple[Any, Any]) -> list[Tensor]:
    """Ten rounds, in place. Bits above 32 are wiped off where they would count: in what is multiplied, and at the end."""
    (a, b, c, d), (p, q), (low, high) = rows, free, key
    for _ in range(_ROUNDS):
        torch.mul(a, _FACTORS[0], out=p)
        torch.mul(c, _FACTORS[1], out=q)
        torch.bitwise_right_shift(q, 32, out=a).bitwise_xor_(b).bitwise_xor_(low).bitwise_and_(WORD)
        torch.bitwise_right_shift(p, 32, out=c).bitwise_xor_(d).bitwise_xor_(high).bitwise_and_(WORD)
        b, d, q, p = q, p, b, d
        low, high = (low + _STEPS[0]) & WORD, (high + _STEPS[1]) & WORD
    return [a, b.bitwise_and_(WORD), c, d.bitwise_and_(WORD)]


class _Room:
    """Memory for the numbers of ``size`` counters."""

    def __init__(self, size: int, kind: Kind, out: Tensor) -> None:
        self.size, self.kind = min(size, out.numel() + 4), kind  # + 4: a single number may need a second counter
        self.rows = [torch.empty(self.size, dtype=torch.int64, device=out.device) for _ in range(6)]
        self.made = torch.empty(4 * self.size, dtype=out.dtype, device=out.device)
        self.reals = [torch.empty(self.size, dtype=out.dtype, device=out.device) for _ in range(3)]

    def numbers(self, counters: Tensor, key: tuple[Any, Any], upper: tuple[Any, Any]) -> Tensor:
        """All numbers of these counters [n] or [r, n], one after another. What is of keys and upper bits is a number or [r, 1]."""
        n = counters.numel()
        a, b, c, d, p, q = (row[:n].view(counters.shape) for row in self.rows)
        torch.bitwise_right_shift(counters, 32, out=b)
        a.copy_(counters).bitwise_and_(WORD)
        for row, half in zip((c, d), upper):
            row.copy_(half) if isinstance(half, Tensor) else row.fill_(half)
        found = [word.view(-1) for word in _words([a, b, c, d], [p, q], key)]
        if self.made.dtype == torch.float64:
            for high, low in (found[:2], found[2:]):
                high.bitwise_left_shift_(32).bitwise_or_(low).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
            found, size = found[::2], 53
        else:
            size = 32
        made = self.made[: n * len(found)].view(n, len(found))
        if self.kind == "normal":
            for one in range(0, len(found), 2):
                _gauss(found[one], found[one + 1], size, made[:, one], made[:, one + 1], [real[:n] for real in self.reals])
        else:
            for one, word in enumerate(found):
                made[:, one] = word.bitwise_right_shift_(8) if self.kind == "uniform" and size == 32 else word
            if self.kind == "uniform":
                made.mul_(2.0 ** -(53 if size == 53 else 24))
        return made.view(-1)


def _gauss(one: Tensor, other: Tensor, size: int, x: Tensor, y: Tensor, room: list[Tensor]) -> None:
    """Box and Muller's pair, of words of ``size`` bits."""
    radius, angle, turned = room
    radius.copy_(one).add_(0.5).mul_(2.0**-size).log_().mul_(-2.0).sqrt_()  # neither end of (0, 1] but 1, whose radius is 0
    angle.copy_(other).mul_(2 * math.pi * 2.0**-size)
    torch.mul(radius, torch.cos(angle, out=turned), out=x)
    torch.mul(radius, angle.sin_(), out=y)
