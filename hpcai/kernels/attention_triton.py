# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``gated_attention``: tiles of logits live in registers, and nothing of size N^2 but the bias is in memory.

At B 1, I 128, N 256, H 8, C 32 in bf16 the forward pass moves 83 MiB (five tensors of [B, I, N, H * C], the bias, two numbers a query)
and the backward pass 351 MiB (21 of the former), each kernel reading a tensor once; of the plain form's six tensors [B, I, H, N, N] each
is 128 MiB, or 1,536 MiB written and read once.
The forward pass is the online softmax of Milakov and Gimelshein (2018) over tiles of keys, the backward pass computes probabilities
again from what it kept of each query (Dao et al. 2022). Each sum belongs to one program, or is the sum of parts in a fixed order: there
are no atomics, and the same input gives the same bits.
B batch, I rows, N entries of a row, H heads, C channels.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Queries and keys of a tile. A tile of logits is 32 registers a thread: the backward pass holds two, and sums of [TILE, C].
TILE, WARPS = 64, 4
# Programs that sum the gradient of the bias: two rounds of two on each of 132 multiprocessors. Where a program for each tile of it is
# fewer, rows are split. The number is not asked of the device, so that the order of the sums is the same on every GPU.
PROGRAMS = 2 * 2 * 132
# Adjacent channels that one load may take: 16 bytes of a 16-bit type. Where strides are no multiples of it, single values are moved.
UNIT = 8
CHANNELS = 64  # the most that a head may have: more would not leave the registers that a tile needs

LOG2_E = tl.constexpr(1.4426950408889634)
ABSENT = tl.constexpr(1e9 * 1.4426950408889634)  # in units of log2: what an absent entry has less
LOW = tl.constexpr(-3e38)  # below all logits but -inf, which then needs no case of its own

# N, and the strides of the bias, are specialised on whether 16 divides them: rows of the bias are then read as vectors.
_jit = triton.jit(do_not_specialize=["heads", "rows", "span", "x", "o", "m", "t"])


@triton.jit
def _place(N, heads, rows, TILE: tl.constexpr):
    """Batch, row, head and first entry of this program's tile, and the first of that row and head among all: [B, I, H, N]."""
    tiles = tl.cdiv(N, TILE)
    one = tl.program_id(0) // tiles
    row = one // heads
    first = (tl.program_id(0) % tiles) * TILE
    return (row // rows).to(tl.int64), (row % rows).to(tl.int64), (one % heads).to(tl.int64), first, one.to(tl.int64) * N


@triton.jit
def _spot(place, stride, N, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Where the channels of these entries are, and which of them exist [T, WIDE]."""
    channel = tl.arange(0, WIDE)[None, :]
    return place.to(tl.int64)[:, None] * (stride * UNIT) + channel, (place < N)[:, None] & (channel < C)


@triton.jit
def _logits(product, mask_, step, bias_, w, query, key, N, SCALE: tl.constexpr):
    """In units of log2. A key that does not exist has -inf, and no part in a row where none of those that do is present."""
    exists = key < N
    absent = (tl.load(mask_ + key.to(tl.int64) * step, exists, other=1.0).to(tl.float32) - 1.0) * ABSENT
    logits = product * (SCALE * LOG2_E) + tl.where(exists, absent, float("-inf"))
    if bias_ is not None:
        bias = tl.load(bias_ + query.to(tl.int64) * w[2] + key.to(tl.int64) * w[3], exists & (query < N), other=0.0)
        logits += bias.to(tl.float32) * LOG2_E
    return logits


@_jit
def _forward(
    qkvg_, x, gate_bias_, mask_, m, bias_, w, out_, o, norms_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of some queries. Kept are the largest logit and the sum of exponentials below it: their log-sum-exp would lose the sum's digits
    in a row where nothing is present."""
    b, i, h, first, norm = _place(N, heads, rows, TILE)
    query = first + tl.arange(0, TILE)
    qkvg_ += (b * x[0] + i * x[1] + h * x[4]) * UNIT
    mask_ += b * m[0] + i * m[1]
    if bias_ is not None:
        bias_ += b * w[0] + h * w[1]
    here, known = _spot(query, x[2], N, C, UNIT, WIDE)
    q = tl.load(qkvg_ + here, known, other=0.0)
    largest, total = tl.full((TILE,), LOW, tl.float32), tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, TILE):
        key = start + tl.arange(0, TILE)
        there, some = _spot(key, x[2], N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[3] * UNIT + there, some, other=0.0)
        v = tl.load(qkvg_ + 2 * x[3] * UNIT + there, some, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=EXACT)
        logits = _logits(product, mask_, m[2], bias_, w, query[:, None], key[None, :], N, SCALE)
        larger = tl.maximum(largest, tl.max(logits, 1))
        less = tl.exp2(largest - larger)
        p = tl.exp2(logits - larger[:, None])
        total = total * less + tl.sum(p, 1)
        result = result * less[:, None] + tl.dot(p.to(v.dtype), v, input_precision=EXACT)
        largest = larger
    g = tl.load(qkvg_ + 3 * x[3] * UNIT + here, known, other=0.0).to(tl.float32)
    channel = tl.arange(0, WIDE)
    g += tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    result = result / total[:, None] * tl.sigmoid(g)
    at, known = _spot(query, o[2], N, C, UNIT, WIDE)
    tl.store(out_ + (b * o[0] + i * o[1] + h * o[3]) * UNIT + at, result.to(out_.dtype.element_ty), known)
    tl.store(norms_ + norm + query, largest, query < N)
    tl.store(norms_ + tl.num_programs(0).to(tl.int64) // tl.cdiv(N, TILE) * N + norm + query, total, query < N)


@_jit
def _by_gate(
    qkvg_, x, gate_bias_, out_, o, grad_, t, norms_, d_, d_out_, delta_, partial_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient by the gate of some entries; that by what it multiplies, and its product with that, both divided by the sum of
    exponentials: what follows then needs no probabilities, only exponentials."""
    b, i, h, first, norm = _place(N, heads, rows, TILE)
    entry, channel = first + tl.arange(0, TILE), tl.arange(0, WIDE)
    here, known = _spot(entry, x[2], N, C, UNIT, WIDE)
    there, _ = _spot(entry, o[2], N, C, UNIT, WIDE)
    other, _ = _spot(entry, t[2], N, C, UNIT, WIDE)
    base, into = (b * x[0] + i * x[1] + h * x[4] + 3 * x[3]) * UNIT, (b * o[0] + i * o[1] + h * o[3]) * UNIT
    g = tl.load(qkvg_ + base + here, known, other=0.0).to(tl.float32)
    g += tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    gate = tl.sigmoid(g)
    grad = tl.load(grad_ + (b * t[0] + i * t[1] + h * t[3]) * UNIT + other, known, other=0.0).to(tl.float32)
    both = grad * tl.load(out_ + into + there, known, other=0.0).to(tl.float32)
    total = tl.load(norms_ + tl.num_programs(0).to(tl.int64) // tl.cdiv(N, TILE) * N + norm + entry, entry < N, other=1.0)
    by_gate = both * (1.0 - gate)
    tl.store(d_ + base + here, by_gate.to(d_.dtype.element_ty), known)
    tl.store(d_out_ + into + there, (grad * gate / total[:, None]).to(d_out_.dtype.element_ty), known)
    tl.store(delta_ + norm + entry, tl.sum(both, 1) / total, entry < N)
    part = ((b * rows + i) * tl.cdiv(N, TILE) + first // TILE) * heads + h
    tl.store(partial_ + part * C + channel, tl.sum(by_gate, 0), channel < C)


@_jit
def _by_key(
    qkvg_, x, mask_, m, bias_, w, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients by some keys and their values, from all queries."""
    b, i, h, first, norm = _place(N, heads, rows, TILE)
    key = first + tl.arange(0, TILE)
    base = (b * x[0] + i * x[1] + h * x[4]) * UNIT
    qkvg_, d_, d_out_ = qkvg_ + base, d_ + base, d_out_ + (b * o[0] + i * o[1] + h * o[3]) * UNIT
    mask_ += b * m[0] + i * m[1]
    if bias_ is not None:
        bias_ += b * w[0] + h * w[1]
    there, some = _spot(key, x[2], N, C, UNIT, WIDE)
    k = tl.load(qkvg_ + x[3] * UNIT + there, some, other=0.0)
    v = tl.load(qkvg_ + 2 * x[3] * UNIT + there, some, other=0.0)
    by_k, by_v = tl.zeros((TILE, WIDE), tl.float32), tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, TILE):
        query = start + tl.arange(0, TILE)
        here, known = _spot(query, x[2], N, C, UNIT, WIDE)
        at, _ = _spot(query, o[2], N, C, UNIT, WIDE)
        q, d_out = tl.load(qkvg_ + here, known, other=0.0), tl.load(d_out_ + at, known, other=0.0)
        largest = tl.load(norms_ + norm + query, query < N, other=0.0)
        delta = tl.load(delta_ + norm + query, query < N, other=0.0)
        product = tl.dot(k, tl.trans(q), input_precision=EXACT)
        logits = _logits(product, mask_, m[2], bias_, w, query[None, :], key[:, None], N, SCALE)
        e = tl.exp2(tl.where(query[None, :] < N, logits - largest[None, :], float("-inf")))
        by_v += tl.dot(e.to(v.dtype), d_out, input_precision=EXACT)
        e *= tl.dot(v, tl.trans(d_out), input_precision=EXACT) - delta[None, :]
        by_k += tl.dot(e.to(q.dtype), q, input_precision=EXACT)
    tl.store(d_ + x[3] * UNIT + there, (by_k * SCALE).to(d_.dtype.element_ty), some)
    tl.store(d_ + 2 * x[3] * UNIT + there, by_v.to(d_.dtype.element_ty), some)


@_jit
def _by_query(
    qkvg_, x, mask_, m, bias_, w, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient by some queries, from all keys."""
    b, i, h, first, norm = _place(N, heads, rows, TILE)
    query = first + tl.arange(0, TILE)
    base = (b * x[0] + i * x[1] + h * x[4]) * UNIT
    qkvg_ += base
    mask_ += b * m[0] + i * m[1]
    if bias_ is not None:
        bias_ += b * w[0] + h * w[1]
    here, known = _spot(query, x[2], N, C, UNIT, WIDE)
    at, _ = _spot(query, o[2], N, C, UNIT, WIDE)
    q = tl.load(qkvg_ + here, known, other=0.0)
    d_out = tl.load(d_out_ + (b * o[0] + i * o[1] + h * o[3]) * UNIT + at, known, other=0.0)
    largest = tl.load(norms_ + norm + query, query < N, other=0.0)
    delta = tl.load(delta_ + norm + query, query < N, other=0.0)
    by_q = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, TILE):
        key = start + tl.arange(0, TILE)
        there, some = _spot(key, x[2], N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[3] * UNIT + there, some, other=0.0)
        v = tl.load(qkvg_ + 2 * x[3] * UNIT + there, some, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=EXACT)
        logits = _logits(product, mask_, m[2], bias_, w, query[:, None], key[None, :], N, SCALE)
        e = tl.exp2(logits - largest[:, None])
        e *= tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None]
        by_q += tl.dot(e.to(k.dtype), k, input_precision=EXACT)
    tl.store(d_ + base + here, (by_q * SCALE).to(d_.dtype.element_ty), known)


@_jit
def _by_bias(
    qkvg_, x, mask_, m, bias_, w, norms_, d_out_, o, delta_, partial_, N, heads, rows, span, C: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient by a tile of the bias, from ``span`` rows. Programs of one strip start together and read the same rows."""
    tiles = tl.cdiv(N, TILE)
    tile, one = tl.program_id(0) % (tiles * tiles), tl.program_id(0) // (tiles * tiles)
    query, key = tile // tiles * TILE + tl.arange(0, TILE), tile % tiles * TILE + tl.arange(0, TILE)
    batch, h = (one // heads).to(tl.int64), (one % heads).to(tl.int64)
    qkvg_ += (batch * x[0] + h * x[4]) * UNIT
    d_out_ += (batch * o[0] + h * o[3]) * UNIT
    mask_ += batch * m[0]
    bias_ += batch * w[0] + h * w[1]
    here, known = _spot(query, x[2], N, C, UNIT, WIDE)
    at, _ = _spot(query, o[2], N, C, UNIT, WIDE)
    there, some = _spot(key, x[2], N, C, UNIT, WIDE)
    result = tl.zeros((TILE, TILE), tl.float32)
    begin = tl.program_id(1).to(tl.int64) * span
    for i in range(begin, tl.minimum(begin + span, rows)):
        part_ = qkvg_ + i * x[1] * UNIT
        q = tl.load(part_ + here, known, other=0.0)
        k = tl.load(part_ + x[3] * UNIT + there, some, other=0.0)
        v = tl.load(part_ + 2 * x[3] * UNIT + there, some, other=0.0)
        d_out = tl.load(d_out_ + i * o[1] * UNIT + at, known, other=0.0)
        norm = ((batch * rows + i) * heads + h) * N + query
        largest = tl.load(norms_ + norm, query < N, other=0.0)
        delta = tl.load(delta_ + norm, query < N, other=0.0)
        product = tl.dot(q, tl.trans(k), input_precision=EXACT)
        logits = _logits(product, mask_ + i * m[1], m[2], bias_, w, query[:, None], key[None, :], N, SCALE)
        e = tl.exp2(logits - largest[:, None])
        result += e * (tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None])
    partial_ += (tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // (tiles * tiles)) + one) * N * N
    at = query.to(tl.int64)[:, None] * N + key[None, :]
    tl.store(partial_ + at, result, (query < N)[:, None] & (key < N)[None, :])


def _laid(*tensors: Tensor) -> list[Any]:
    """How many channels one load may take, and the strides of each tensor but those of its channels, in as many."""
    strides = [x.stride()[:-1] for x in tensors]
    unit = UNIT if all(step % UNIT == 0 for steps in strides for step in steps) else 1
    return [unit, *(tuple(step // unit for step in steps) for steps in strides)]


def _words(qkvg: Tensor, unit: int) -> dict[str, Any]:
    """A product of tensor cores takes 16 channels or more; of float32 it is three of TF32, which lose its last digit alone."""
    entries, channels = qkvg.shape[2], qkvg.shape[-1]
    wide, tile = (max(16, triton.next_power_of_2(n)) for n in (channels, min(entries, TILE)))
    return {"C": channels, "UNIT": unit, "WIDE": wide, "TILE": tile, "num_warps": WARPS}


def _products(qkvg: Tensor) -> dict[str, Any]:
    return {"SCALE": qkvg.shape[-1] ** -0.5, "EXACT": "tf32x3"}


def _dense(x: Tensor) -> Tensor:
    """With its channels beside each other and nothing between its values, in which a tensor that is made like it has its strides."""
    return x if x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


@torch.library.custom_op("hpcai::gated_attention", mutates_args=())
def _attend(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result [B, I, N, H, C], and of each query the largest logit and the sum of exponentials [2, B, I, H, N]."""
    qkvg = _dense(qkvg)
    out, norms = _empty(qkvg, gate_bias, mask, bias)
    batch, rows, entries, _, heads, _ = qkvg.shape
    unit, x, o = _laid(qkvg, out)
    words = _words(qkvg, unit)
    with torch.cuda.device_of(qkvg):
        _forward[(batch * rows * heads * triton.cdiv(entries, words["TILE"]),)](
            qkvg, x, gate_bias.contiguous(), mask, mask.stride(), bias, None if bias is None else bias.stride(), out, o, norms,
            entries, heads, rows, **words, **_products(qkvg),
        )  # fmt: skip
    return out, norms


@_attend.register_fake
def _empty(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, rows, entries, _, heads, _ = qkvg.shape
    norms = qkvg.new_empty((2, batch, rows, heads, entries), dtype=torch.float32)
    return torch.empty_like(_dense(qkvg)[..., 0, :, :]), norms


@torch.library.custom_op("hpcai::gated_attention_backward", mutates_args=())
def _back(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
          learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by qkvg, gate_bias and, to ``learn`` it, bias."""
    grad, qkvg = _dense(grad), _dense(qkvg)
    d, by_gate_bias, by_bias = _empty_back(grad, out, norms, qkvg, gate_bias, mask, bias, learn)
    d_out, delta = torch.empty_like(out), torch.empty_like(norms[0])
    batch, rows, entries, _, heads, channels = qkvg.shape
    unit, x, o, t = _laid(qkvg, out, grad)
    words, products = _words(qkvg, unit), _products(qkvg)
    tiles, sizes = triton.cdiv(entries, words["TILE"]), (entries, heads, rows)
    shared = (qkvg, x, mask, mask.stride(), bias, None if bias is None else bias.stride(), norms)
    with torch.cuda.device_of(qkvg):
        partial = norms.new_empty(batch * rows * tiles, heads * channels)
        every = (batch * rows * heads * tiles,)
        _by_gate[every](qkvg, x, gate_bias.contiguous(), out, o, grad, t, norms, d, d_out, delta, partial, *sizes, **words)
        by_gate_bias.copy_(partial.sum(0))
        _by_key[every](*shared, d, d_out, o, delta, *sizes, **words, **products)
        _by_query[every](*shared, d, d_out, o, delta, *sizes, **words, **products)
        if learn:
            each = batch * heads * tiles * tiles
            span = triton.cdiv(rows, max(1, min(rows, PROGRAMS // max(1, each))))
            strips = triton.cdiv(rows, max(1, span))
            partial = norms.new_empty(strips, *by_bias.shape)
            _by_bias[(each, strips)](*shared, d_out, o, delta, partial, *sizes, span, **words, **products)
            by_bias.copy_(partial.sum(0))
    return d, by_gate_bias, by_bias


@_back.register_fake
def _empty_back(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
                learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_bias = qkvg.new_empty(0) if bias is None or not learn else bias.new_empty(bias.shape)
    return torch.empty_like(_dense(qkvg)), gate_bias.new_empty(gate_bias.shape), by_bias


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _gradients(ctx: Any, grad: Tensor, _: None) -> Any:
    learn = ctx.needs_input_grad[3]
    d, by_gate_bias, by_bias = _back(grad, *ctx.saved_tensors, learn)
    return d, by_gate_bias, None, by_bias if learn else None


_attend.register_autograd(_gradients, setup_context=_keep)


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    batch, rows, entries, _, heads, channels = qkvg.shape
    shape = batch, heads, entries, entries
    gate_bias, mask = gate_bias.expand(heads * channels), mask.expand(batch, rows, entries)  # or a kernel would read past their end
    return _attend(qkvg, gate_bias, mask, None if bias is None else bias.expand(shape))[0].flatten(-2)


def variants() -> Iterator[tuple[str, Any, dict[str, Any], dict[Any, Any], dict[Any, Any]]]:
    """(name, kernel, signature, constexprs, attributes) of what OpenFold launches, for compilation ahead of time: N 256 and 384."""
    wide = torch.empty(1, 1, 256, 4, 1, 1)
    for channels, biases in ((8, ("rows",)), (16, ("rows", "columns")), (32, ("none", "rows", "columns"))):
        words = _words(wide.expand(-1, -1, -1, -1, -1, channels), UNIT)
        words |= _products(wide.expand(-1, -1, -1, -1, -1, channels))
        for kernel in (_forward, _by_gate, _by_key, _by_query, _by_bias):
            names = kernel.arg_names
            for bias in biases if "bias_" in names else ("none",):
                if kernel is _by_bias and bias == "none":
                    continue
                fixed = {name: words[name] for name in names if name in words}
                fixed |= {"bias_": None, "w": None} if bias == "none" and "bias_" in names else {}
                for kind in ("bf16", "fp32"):
                    types = {name: _type(name, kind, bias) for name in names} | dict.fromkeys(fixed, "constexpr")
                    one = {} if "w" in fixed or "w" not in names else {(names.index("w"), 3 if bias == "rows" else 2): 1}
                    even = [(i,) for i, name in enumerate(names) if name[-1] == "_" or name == "N"]
                    even += [(names.index("w"), i) for i in range(4) if "w" in names and (names.index("w"), i) not in one]
                    attributes = {at: [["tt.divisibility", 16]] for at in even if types[names[at[0]]] != "constexpr"}
                    yield f"{kernel.fn.__name__} {kind} C={channels} bias={bias}", kernel, types, {**fixed, **one}, attributes


def _type(name: str, kind: str, bias: str) -> Any:
    """Of a kernel's argument. Sums, the mask and the gate's bias are float32."""
    if name[-1] == "_":
        return f"*{kind}" if name in ("qkvg_", "bias_", "out_", "grad_", "d_", "d_out_") else "*fp32"
    if name == "w":
        return tuple("constexpr" if i == (3 if bias == "rows" else 2) else "i32" for i in range(4))
    return ("i32",) * {"x": 5, "o": 4, "t": 4, "m": 3}[name] if name in ("x", "o", "t", "m") else "i32"
