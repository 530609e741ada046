# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``paged_attention``: keys and values are read once, from where they lie in the pool.

A program has one query, query heads of one KV head, and one of several equal ranges of the tokens before it, so that few queries
of long texts occupy a GPU (Dao et al. 2023, "Flash-Decoding"). The number of ranges depends on shapes alone: a captured launch is
right for all lengths of the texts. A second kernel merges the ranges in a fixed order; there are no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of a tile of keys; pipeline stages. Two programs' tiles of keys and values, in flight, hide the latency of memory.
BYTES, WARPS, STAGES = 8192, 4, 2
PROGRAMS = 4 * 132  # to which tokens are split, on every GPU: the same bits
RANGE, SPLITS = 128, 32  # tokens of a range, at least; ranges, at most
ROWS = 64  # query heads of a program, at most, and 16 at least, the rows of a product
LOG2_E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(-3e38)  # below all logits but -inf, which then needs no special case


@triton.jit(do_not_specialize=["columns"])
def _attend(
    q_, k_, v_, tables_, positions_, sinks_, y_, logs_, columns, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the attention to a range of tokens, and the logarithm of its sum of exponentials, to the base 2. A sink is a key of the
    first range."""
    query, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv, row = tl.program_id(1) // tl.cdiv(G, ROWS), tl.program_id(1) % tl.cdiv(G, ROWS) * ROWS + tl.arange(0, ROWS)
    head, channel = kv * G + row, tl.arange(0, WIDE)[None, :]
    valid = (row < G)[:, None] & (channel < D)
    q = tl.load(q_ + (query * (K * G) + head)[:, None] * D + channel, valid, other=0.0)
    after = tl.load(positions_ + query).to(tl.int32) + 1
    first = 0 if WINDOW is None else tl.maximum(after - WINDOW, 0)
    size = tl.cdiv(tl.cdiv(after - first, SPLITS), TILE) * TILE
    start = first + split * size
    end = tl.minimum(start + size, after)
    largest, total = tl.full((ROWS,), LOW, tl.float32), tl.zeros((ROWS,), tl.float32)
    if sinks_ is not None:
        sink = tl.load(sinks_ + head, row < G, other=0.0).to(tl.float32) * LOG2_E
        largest, total = tl.where(split == 0, sink, largest), tl.where(split == 0, 1.0, total)
    result = tl.zeros((ROWS, WIDE), tl.float32)
    for begin in range(start, end, TILE):
        token = begin + tl.arange(0, TILE)
        exists = token < end
        block = tl.load(tables_ + query * columns + token // P, exists, other=0).to(tl.int64)
        at, mask = ((block * K + kv) * P + token % P)[:, None] * D + channel, exists[:, None] & (channel < D)
        k, v = tl.load(k_ + at, mask, other=0.0), tl.load(v_ + at, mask, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        if SOFTCAP is not None:
            logits = SOFTCAP * (2 * tl.sigmoid(logits * (2 / SOFTCAP)) - 1)  # tanh
        logits = tl.where(exists[None, :], logits * LOG2_E, float("-inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))
        less, e = tl.exp2(largest - larger), tl.exp2(logits - larger[:, None])
        total, largest = total * less + tl.sum(e, 1), larger
        result = tl.dot(e.to(v.dtype), v, result * less[:, None], input_precision=PRECISION)
    into = (query * (K * G) + head) * SPLITS + split
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(y_ + into[:, None] * D + channel, result.to(y_.dtype.element_ty), valid)
    if logs_ is not None:
        tl.store(logs_ + into, tl.where(total > 0, largest + tl.log2(total), float("-inf")), row < G)


@triton.jit
def _merge(parts_, logs_, y_, D: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr):
    row, split, channel = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, WIDE)
    logs = tl.load(logs_ + row * SPLITS + split)
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), LOW))
    parts = tl.load(parts_ + (row * SPLITS + split)[:, None] * D + channel[None, :], (channel < D)[None, :], other=0.0)
    total = tl.sum(weights, 0)
    y = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(y_ + row * D + channel, y.to(y_.dtype.element_ty), channel < D)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, positions: Tensor, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute ``hpcai.kernels.paged_attention.paged_attention``. Raises ValueError for sizes and dtypes that differ."""
    (N, H, D), (_, K, P, _) = q.shape, k.shape
    rows = len(tables), len(positions), H if sinks is None else len(sinks)
    is_equal = k.shape == v.shape and k.shape[3] == D and H % K == 0 and rows == (N, N, H) and q.dtype == k.dtype == v.dtype
    if not (is_equal and k.is_contiguous() and v.is_contiguous()):
        pools = f"k {list(k.shape)} {k.dtype}, v {list(v.shape)} {v.dtype}, tables {list(tables.shape)}"
        raise ValueError(f"q is {list(q.shape)} {q.dtype}, {pools}; expected contiguous pools of equal sizes, a table per query")
    G, wide = H // K, max(triton.next_power_of_2(D), 16)
    rows = min(max(triton.next_power_of_2(G), 16), ROWS)
    tiles = K * triton.cdiv(G, rows)
    most = min(PROGRAMS // max(N * tiles, 1), tables.shape[1] * P // RANGE, SPLITS)
    splits = 1 << max(most, 1).bit_length() - 1  # a power of two
    parts, logs = (y := torch.empty_like(q, memory_format=torch.contiguous_format)), None
    if splits > 1:
        parts, logs = (torch.empty(N, H, splits, *size, dtype=torch.float32, device=q.device) for size in ((D,), ()))
    tile, precision = BYTES // (wide * q.element_size()), "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    options = {"K": K, "G": G, "D": D, "P": P, "WINDOW": window, "SOFTCAP": softcap, "SCALE": D**-0.5, "ROWS": rows, "WIDE": wide}
    options |= {"TILE": max(tile, 16), "SPLITS": splits, "PRECISION": precision, "num_warps": WARPS}
    options["num_stages"] = STAGES if tile >= 16 else 1  # wide heads in float32 have larger tiles
    inputs = q.contiguous(), k, v, tables.contiguous(), positions.contiguous(), None if sinks is None else sinks.contiguous()
    with torch.cuda.device_of(q):
        if N:
            _attend[(N, tiles, splits)](*inputs, parts, logs, tables.shape[1], **options)
        if N and splits > 1:
            _merge[(N * H,)](parts, logs, y, D=D, WIDE=wide, SPLITS=splits)
    return y
