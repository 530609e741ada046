"""Counter-based random numbers: Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).

Element i of a stream is a function of the key of the stream and of i alone, whatever the order of calls, the process and the
device. On CUDA each call is one Triton kernel (``philox_triton``); elsewhere it is torch in int64, in blocks that fit the cache.
The same device gives the same bits; normal numbers of two devices may differ by rounding. A counter, the 64-bit integer j followed
by the 64 bits of ``upper``, gives four words of 32 bits: element i of a float32 stream is made of word i % 4 of counter i // 4,
element i of a float64 stream of two words of counter i // 2. Streams of one key with another dtype or distribution use the same
words: take another key, or another ``upper``, for each use.

Args of all functions:
    key: 64 bits, an int or an int64 tensor.
    first: The index of the first of ``count`` elements [count], an int from 0; or a tensor of indices [*], int64, for one element
        each [*], or ``count`` elements from each on [*, count]. ``key`` and ``upper`` may then have a value for each index.
    upper: The upper 64 bits of the counters. out: A contiguous tensor to write to, which sets device and dtype; otherwise
    ``dtype``, and ``device`` or the device of ``first``.
        bfloat16 and float16 are rounded from float32.
Raises ConfigError if shape or dtype of ``out`` do not fit, or a count is missing.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from hpcai.errors import ConfigError
from hpcai.kernels import triton_support

Kind = Literal["bits", "uniform", "normal"]

WORD = 0xFFFFFFFF
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # table 2 of the paper, and its Weyl sequence for the key
_ROUNDS = 10
# Counters of a block, for one thread: six rows of them are 1.5 MiB of the L2 cache. A call costs torch 1 us (ns for a uniform
# element on a Xeon of 2023: 22 with 4096, 11 with 16384, 10 with 32768, 11 with 65536).
_BLOCK = 1 << 15


def bits(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
         device: torch.device | str | None = None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return words of 32 bits, from 0 to 2^32 - 1, as int64."""
    return _draw("bits", key, first, count, upper, device, torch.int64, out)


def uniform(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
            device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
            out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return uniform elements of [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64. bfloat16 and float16 may round to
    1."""
    return _draw("uniform", key, first, count, upper, device, dtype, out)


def normal(key: int | Tensor, first: int | Tensor, count: int | None = None, *, upper: int | Tensor = 0,
           device: torch.device | str | None = None, dtype: torch.dtype = torch.float32,
           out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return standard normal elements, in pairs of one counter (Box and Muller 1958).

    Their absolute values are at most 6.8 in float32 (which one in 10^11 would exceed) and 8.7 in float64. The inverse of the
    distribution, which ends at 5.4 in float32, would take as long on a CPU: 1 ns, beside 8 ns for the words.
    """
    return _draw("normal", key, first, count, upper, device, dtype, out)


def _draw(kind: Kind, key: int | Tensor, first: int | Tensor, count: int | None, upper: int | Tensor,
           device: torch.device | str | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:  # fmt: skip
    if isinstance(first, int) and count is None:
        raise ConfigError(f"philox.{kind}: first is {first} and count is None; expected a count, or a tensor of indices")
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
        raise ConfigError(f"philox.{kind}: first is {first} and upper a tensor; expected a tensor of indices, too")
    result = out if out.dtype in (torch.int64, torch.float32, torch.float64) else torch.empty_like(out, dtype=torch.float32)
    if triton_support.is_supported(out):
        from hpcai.kernels import philox_triton

        philox_triton.run(kind, key, first, upper, result)
    else:
        _reference(kind, key, first, count, upper, result)
    return out if result is out else out.copy_(result)


def _reference(kind: Kind, key: int | Tensor, first: int | Tensor, count: int | None, upper: int | Tensor, out: Tensor) -> None:
    per = 2 if out.dtype == torch.float64 else 4  # elements of a counter
    flat, threads = out.view(-1), torch.get_num_threads()
    workspace = _Workspace(_BLOCK * threads, kind, out)  # torch gives a thread 2^15 elements, or more
    if isinstance(first, int):
        position, k = 0, _halves(key)
        begin, skipped = divmod(first, per)
        while position < len(flat):
            size = min(workspace.size, -(-(skipped + len(flat) - position) // per))
            counters = torch.arange(begin, begin + size, out=workspace.rows[0][:size])
            values = workspace.elements(counters, k, _halves(upper))[skipped : skipped + len(flat) - position]
            flat[position : position + len(values)] = values
            position, begin, skipped = position + len(values), begin + size, 0
        return
    starts, columns_per_row = first.reshape(-1, 1), 1 if count is None else count
    keys, uppers = (x.expand(first.shape).reshape(-1, 1) if isinstance(x, Tensor) else x for x in (key, upper))
    into = flat.view(len(starts), columns_per_row)
    for rows, columns in _tiles(len(starts), columns_per_row, workspace.size, per):
        begin, width = starts[rows] + columns.start, columns.stop - columns.start
        counters = begin.div(per, rounding_mode="floor") + torch.arange((width + per - 2) // per + 1, device=out.device)
        key, upper = (x[rows] if isinstance(x, Tensor) else x for x in (keys, uppers))
        values = workspace.elements(counters, _halves(key), _halves(upper))
        position = begin.remainder(per) + torch.arange(width, device=out.device)
        into[rows, columns] = values.view(len(begin), -1).gather(1, position)


def _tiles(rows: int, columns: int, counters: int, per: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles of a table of elements that take at most ``counters`` counters, wherever each row begins."""
    width = min(columns, (counters - 2) * per)
    height = max(counters // ((width + per - 2) // per + 1), 1)
    for c in range(0, columns, width):
        for r in range(0, rows, height):
            yield slice(r, min(r + height, rows)), slice(c, min(c + width, columns))


def _halves(key: int | Tensor) -> tuple[Any, Any]:
    return key & WORD, (key >> 32) & WORD


def _words(rows: list[Tensor], buffers: list[Tensor], key: tuple[Any, Any]) -> list[Tensor]:
    """Compute ten rounds in place. Bits above 32 are cleared where they would matter: in factors, and at the end."""
    (a, b, c, d), (p, q), (low, high) = rows, buffers, key
    for _ in range(_ROUNDS):
        torch.mul(a, _FACTORS[0], out=p)
        torch.mul(c, _FACTORS[1], out=q)
        torch.bitwise_right_shift(q, 32, out=a).bitwise_xor_(b).bitwise_xor_(low).bitwise_and_(WORD)
        torch.bitwise_right_shift(p, 32, out=c).bitwise_xor_(d).bitwise_xor_(high).bitwise_and_(WORD)
        b, d, q, p = q, p, b, d
        low, high = (low + _STEPS[0]) & WORD, (high + _STEPS[1]) & WORD
    return [a, b.bitwise_and_(WORD), c, d.bitwise_and_(WORD)]


class _Workspace:
    """Buffers for the elements of ``size`` counters."""

    def __init__(self, size: int, kind: Kind, out: Tensor) -> None:
        self.size, self.kind = min(size, out.numel() + 4), kind  # + 4: one element may need a second counter
        self.rows = [torch.empty(self.size, dtype=torch.int64, device=out.device) for _ in range(6)]
        self.made = torch.empty(4 * self.size, dtype=out.dtype, device=out.device)
        self.reals = [torch.empty(self.size, dtype=out.dtype, device=out.device) for _ in range(3)]

    def elements(self, counters: Tensor, key: tuple[Any, Any], upper: tuple[Any, Any]) -> Tensor:
        """Return all elements of counters [n] or [r, n], flat. Keys and upper bits are ints or [r, 1]."""
        n = counters.numel()
        a, b, c, d, p, q = (row[:n].view(counters.shape) for row in self.rows)
        torch.bitwise_right_shift(counters, 32, out=b)
        a.copy_(counters).bitwise_and_(WORD)
        for row, half in zip((c, d), upper):
            row.copy_(half) if isinstance(half, Tensor) else row.fill_(half)
        values = [word.view(-1) for word in _words([a, b, c, d], [p, q], key)]
        if self.made.dtype == torch.float64:
            for high, low in (values[:2], values[2:]):
                high.bitwise_left_shift_(32).bitwise_or_(low).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
            values, size = values[::2], 53
        else:
            size = 32
        result = self.made[: n * len(values)].view(n, len(values))
        if self.kind == "normal":
            for index in range(0, len(values), 2):
                pair = values[index], values[index + 1], size, result[:, index], result[:, index + 1]
                _gauss(*pair, [real[:n] for real in self.reals])
        else:
            for index, word in enumerate(values):
                result[:, index] = word.bitwise_right_shift_(8) if self.kind == "uniform" and size == 32 else word
            if self.kind == "uniform":
                result.mul_(2.0 ** -(53 if size == 53 else 24))
        return result.view(-1)


def _gauss(first: Tensor, second: Tensor, size: int, x: Tensor, y: Tensor, workspace: list[Tensor]) -> None:
    """Write the pair of Box and Muller for two words of ``size`` bits."""
    radius, angle, scratch = workspace
    radius.copy_(first).add_(0.5).mul_(2.0**-size).log_().mul_(-2.0).sqrt_()  # in (0, 1]; the radius of 1 is 0
    angle.copy_(second).mul_(2 * math.pi * 2.0**-size)
    torch.mul(radius, torch.cos(angle, out=scratch), out=x)
    torch.mul(radius, angle.sin_(), out=y)
