# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind ``gated_attention``: tiles of logits stay in registers, and of size N^2 only the bias is in memory.

At B 1, I 128, N 256, H 8, C 32 in bf16, where each kernel reads a tensor once, the forward pass moves 83 MiB and the backward pass
353 MiB; the plain form's six tensors [B, I, H, N, N] of 128 MiB take 1,536 MiB to be written and read once each.

The forward pass is the online softmax of Milakov and Gimelshein (2018) over tiles of keys; the backward pass computes exponentials
again from what was kept of each query (Dao et al. 2022). Each sum belongs to one program or has parts added in a fixed order: no
atomics, the same input gives the same bits.
B batch, I rows, N entries of a row, H heads, C channels.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# Entries of a program, and how many loads are on their way while it computes. It goes through the others in steps as large; of half
# in float32, whose products need twice the registers. The backward pass, which holds two tiles of logits, has twice the warps.
TILE, WARPS, STAGES = 64, 4, 2
# Programs that sum the gradient of the bias: two rounds of two on each of 132 multiprocessors. Rows are split where its tiles are
# fewer. The number is not asked of the device, so that the order of the sums is the same on every GPU.
PROGRAMS = 2 * 2 * 132
# Adjacent channels that one load may take: 16 bytes of a 16-bit type. Where a stride is no multiple of it, single values are moved.
UNIT = 8

LOG2_E = tl.constexpr(1.4426950408889634)
ABSENT = tl.constexpr(1e9 * 1.4426950408889634)  # in units of log2: what an absent entry has less
LOW = tl.constexpr(-3e38)  # below all logits but -inf, which then needs no case of its own

# N and the strides are specialised on whether 16 divides them: rows of the bias are then read as vectors.
_jit = triton.jit(do_not_specialize=["heads", "rows", "span"])


@triton.jit
def _place(N, heads, rows, TILE: tl.constexpr):
    """Batch, row, head, which of all [B, I, H] that is, and the entries of this program's tile."""
    tiles = tl.cdiv(N, TILE)
    one = (tl.program_id(0) // tiles).to(tl.int64)
    entry = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    return one // heads // rows, one // heads % rows, one % heads, one, entry


@triton.jit
def _spot(b, i, h, entry, steps, N, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Where the channels of some entries are in a tensor with these strides, and which of them exist [T, WIDE]."""
    channel = tl.arange(0, WIDE)[None, :]
    base = (b * steps[0] + i * steps[1] + h * steps[3]) * UNIT
    return base + entry.to(tl.int64)[:, None] * (steps[2] * UNIT) + channel, (entry < N)[:, None] & (channel < C)


@triton.jit
def _logits(first, second, mask_, bias_, row, head, query, key, N, SCALE: tl.constexpr, EXACT: tl.constexpr):
    """In units of log2, of one ``row`` of all masks and one ``head`` of all biases. A key that does not exist has -inf, and no part
    even in a row where nothing is present."""
    exists = key < N
    absent = tl.load(mask_ + row * N + key, exists, other=1.0).to(tl.float32) * ABSENT - ABSENT
    product = tl.dot(first, tl.trans(second), input_precision=EXACT)
    logits = product * (SCALE * LOG2_E) + tl.where(exists, absent, float("-inf"))
    if bias_ is not None:
        bias = tl.load(bias_ + head * N * N + query.to(tl.int64) * N + key, exists & (query < N), other=0.0)
        logits += bias.to(tl.float32) * LOG2_E
    return logits


@_jit
def _forward(
    qkvg_, x, mask_, bias_, norms_, gate_bias_, out_, o, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of some queries. Their log-sum-exp is kept as the largest logit and the sum of exponentials below it: in one number the sum
    of a row where nothing is present would be lost beside -1e9."""
    b, i, h, one, query = _place(N, heads, rows, TILE)
    norm = one * N + query
    here, known = _spot(b, i, h, query, x, N, C, UNIT, WIDE)
    q = tl.load(qkvg_ + here, known, other=0.0)
    largest, total = tl.full((TILE,), LOW, tl.float32), tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        key = start + tl.arange(0, STEP)
        there, some = _spot(b, i, h, key, x, N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[4] * UNIT + there, some, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + there, some, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        larger = tl.maximum(largest, tl.max(logits, 1))
        less = tl.exp2(largest - larger)
        e = tl.exp2(logits - larger[:, None])
        total = total * less + tl.sum(e, 1)
        result = result * less[:, None] + tl.dot(e.to(v.dtype), v, input_precision=EXACT)
        largest = larger
    channel = tl.arange(0, WIDE)
    g = tl.load(qkvg_ + 3 * x[4] * UNIT + here, known, other=0.0).to(tl.float32)
    g += tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    into, _ = _spot(b, i, h, query, o, N, C, UNIT, WIDE)
    tl.store(out_ + into, (result / total[:, None] * tl.sigmoid(g)).to(out_.dtype.element_ty), known)
    tl.store(norms_ + 2 * norm, largest, query < N)
    tl.store(norms_ + 2 * norm + 1, total, query < N)


@_jit
def _by_gate(
    qkvg_, x, norms_, gate_bias_, out_, o, grad_, t, d_, d_out_, delta_, partial_, N, heads, rows, C: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient by the gate of some entries; that by what it multiplies, and the product of the two, both divided by the sum of
    exponentials: the kernels below then need no probabilities, only exponentials."""
    b, i, h, one, entry = _place(N, heads, rows, TILE)
    norm = one * N + entry
    channel = tl.arange(0, WIDE)
    here, known = _spot(b, i, h, entry, x, N, C, UNIT, WIDE)
    into, _ = _spot(b, i, h, entry, o, N, C, UNIT, WIDE)
    other, _ = _spot(b, i, h, entry, t, N, C, UNIT, WIDE)
    here += 3 * x[4] * UNIT
    g = tl.load(qkvg_ + here, known, other=0.0).to(tl.float32)
    gate = tl.sigmoid(g + tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :])
    grad = tl.load(grad_ + other, known, other=0.0).to(tl.float32)
    both = grad * tl.load(out_ + into, known, other=0.0).to(tl.float32)
    total = tl.load(norms_ + 2 * norm + 1, entry < N, other=1.0)
    by_gate = both * (1.0 - gate)
    tl.store(d_ + here, by_gate.to(d_.dtype.element_ty), known)
    tl.store(d_out_ + into, (grad * gate / total[:, None]).to(d_out_.dtype.element_ty), known)
    tl.store(delta_ + norm, tl.sum(both, 1) / total, entry < N)
    part = ((b * rows + i) * tl.cdiv(N, TILE) + tl.program_id(0) % tl.cdiv(N, TILE)) * heads + h
    tl.store(partial_ + part * C + channel, tl.sum(by_gate, 0), channel < C)


@_jit
def _by_key(
    qkvg_, x, mask_, bias_, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients by some keys and their values, from all queries."""
    b, i, h, one, key = _place(N, heads, rows, TILE)
    there, some = _spot(b, i, h, key, x, N, C, UNIT, WIDE)
    k = tl.load(qkvg_ + x[4] * UNIT + there, some, other=0.0)
    v = tl.load(qkvg_ + 2 * x[4] * UNIT + there, some, other=0.0)
    by_k, by_v = tl.zeros((TILE, WIDE), tl.float32), tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        query = start + tl.arange(0, STEP)
        here, known = _spot(b, i, h, query, x, N, C, UNIT, WIDE)
        at, _ = _spot(b, i, h, query, o, N, C, UNIT, WIDE)
        q, d_out = tl.load(qkvg_ + here, known, other=0.0), tl.load(d_out_ + at, known, other=0.0)
        norm = one * N + query
        largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
        logits = _logits(k, q, mask_, bias_, b * rows + i, b * heads + h, query[None, :], key[:, None], N, SCALE, EXACT)
        e = tl.exp2(logits - largest[None, :])
        by_v += tl.dot(e.to(v.dtype), d_out, input_precision=EXACT)
        e *= tl.dot(v, tl.trans(d_out), input_precision=EXACT) - delta[None, :]
        by_k += tl.dot(e.to(q.dtype), q, input_precision=EXACT)
    tl.store(d_ + x[4] * UNIT + there, (by_k * SCALE).to(d_.dtype.element_ty), some)
    tl.store(d_ + 2 * x[4] * UNIT + there, by_v.to(d_.dtype.element_ty), some)


@_jit
def _by_query(
    qkvg_, x, mask_, bias_, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient by some queries, from all keys."""
    b, i, h, one, query = _place(N, heads, rows, TILE)
    norm = one * N + query
    here, known = _spot(b, i, h, query, x, N, C, UNIT, WIDE)
    at, _ = _spot(b, i, h, query, o, N, C, UNIT, WIDE)
    q, d_out = tl.load(qkvg_ + here, known, other=0.0), tl.load(d_out_ + at, known, other=0.0)
    largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
    by_q = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        key = start + tl.arange(0, STEP)
        there, some = _spot(b, i, h, key, x, N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[4] * UNIT + there, some, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + there, some, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        by_e = tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None]
        by_q += tl.dot((tl.exp2(logits - largest[:, None]) * by_e).to(k.dtype), k, input_precision=EXACT)
    tl.store(d_ + here, (by_q * SCALE).to(d_.dtype.element_ty), known)


@_jit
def _by_bias(
    qkvg_, x, mask_, bias_, norms_, d_out_, o, delta_, partial_, N, heads, rows, span, C: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient by a tile of the bias, from ``span`` rows. Programs of one strip go through the same rows together."""
    across, each = tl.cdiv(N, STEP), tl.cdiv(N, TILE) * tl.cdiv(N, STEP)
    tile, one = tl.program_id(0) % each, (tl.program_id(0) // each).to(tl.int64)
    query, key = tile // across * TILE + tl.arange(0, TILE), tile % across * STEP + tl.arange(0, STEP)
    b, h, begin = one // heads, one % heads, tl.program_id(1).to(tl.int64) * span
    result = tl.zeros((TILE, STEP), tl.float32)
    for i in range(begin, tl.minimum(begin + span, rows)):
        here, known = _spot(b, i, h, query, x, N, C, UNIT, WIDE)
        there, some = _spot(b, i, h, key, x, N, C, UNIT, WIDE)
        at, _ = _spot(b, i, h, query, o, N, C, UNIT, WIDE)
        q, d_out = tl.load(qkvg_ + here, known, other=0.0), tl.load(d_out_ + at, known, other=0.0)
        k = tl.load(qkvg_ + x[4] * UNIT + there, some, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + there, some, other=0.0)
        norm = ((b * rows + i) * heads + h) * N + query
        largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        by_e = tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None]
        result += tl.exp2(logits - largest[:, None]) * by_e
    here = (tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // each) + one) * N * N + query.to(tl.int64)[:, None] * N
    tl.store(partial_ + here + key[None, :], result, (query < N)[:, None] & (key < N)[None, :])


def _laid(*tensors: Tensor) -> list[Any]:
    """How many channels one load may take, and the strides of each tensor but those of its channels, in as many."""
    strides = [x.stride()[:-1] for x in tensors]
    unit = UNIT if all(step % UNIT == 0 for steps in strides for step in steps) else 1
    return [unit, *(tuple(step // unit for step in steps) for steps in strides)]


def _words(channels: int, entries: int, unit: int, narrow: bool) -> list[dict[str, Any]]:
    """Of the forward and of the backward pass, for ``narrow`` values or float32. Tensor cores take 16 channels or more; of float32
    they take three products of TF32, which together lose its last digit alone."""
    wide, tile = (max(16, triton.next_power_of_2(n)) for n in (channels, min(entries, TILE if narrow else TILE // 2)))
    words = {"C": channels, "UNIT": unit, "WIDE": wide, "TILE": tile, "STEP": tile if narrow else max(16, tile // 2)}
    words |= {"SCALE": channels**-0.5, "EXACT": "tf32x3", "num_stages": STAGES if narrow else 1}
    return [{**words, "num_warps": WARPS}, {**words, "num_warps": 2 * WARPS if narrow else WARPS}]


def _dense(x: Tensor) -> Tensor:
    """With its channels beside each other and nothing between its values: what is made like it then has its strides."""
    return x if x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


@torch.library.custom_op("hpcai::gated_attention", mutates_args=())
def _attend(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result [B, I, N, H, C], and of each query the largest logit and the sum of exponentials below it [B, I, H, N, 2]."""
    qkvg = _dense(qkvg)
    out, norms = _empty(qkvg, gate_bias, mask, bias)
    batch, rows, entries, _, heads, channels = qkvg.shape
    unit, x, o = _laid(qkvg.transpose(3, 4), out)
    words = _words(channels, entries, unit, qkvg.dtype != torch.float32)[0]
    programs, bias = batch * rows * heads * triton.cdiv(entries, words["TILE"]), None if bias is None else bias.contiguous()
    with torch.cuda.device_of(qkvg):
        _forward[(programs,)](
            qkvg, x, mask.contiguous(), bias, norms, gate_bias.contiguous(), out, o, entries, heads, rows, **words
        )
    return out, norms


@_attend.register_fake
def _empty(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, rows, entries, _, heads, _ = qkvg.shape
    return torch.empty_like(_dense(qkvg)[..., 0, :, :]), qkvg.new_empty((batch, rows, heads, entries, 2), dtype=torch.float32)


@torch.library.custom_op("hpcai::gated_attention_backward", mutates_args=())
def _back(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
          learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by qkvg, gate_bias and, to ``learn`` it, bias."""
    grad, qkvg = _dense(grad), _dense(qkvg)
    d, by_gate_bias, by_bias = _empty_back(grad, out, norms, qkvg, gate_bias, mask, bias, learn)
    d_out, delta = torch.empty_like(out), torch.empty_like(norms[..., 0])
    batch, rows, entries, _, heads, channels = qkvg.shape
    unit, x, o, t = _laid(qkvg.transpose(3, 4), out, grad)
    words = _words(channels, entries, unit, qkvg.dtype != torch.float32)[1]
    tiles, sizes = triton.cdiv(entries, words["TILE"]), (entries, heads, rows)
    shared = (qkvg, x, mask.contiguous(), None if bias is None else bias.contiguous(), norms)
    with torch.cuda.device_of(qkvg):
        partial, every = norms.new_empty(batch * rows * tiles, heads * channels), (batch * rows * heads * tiles,)
        _by_gate[every](qkvg, x, norms, gate_bias.contiguous(), out, o, grad, t, d, d_out, delta, partial, *sizes, **words)
        by_gate_bias.copy_(partial.sum(0))
        _by_key[every](*shared, d, d_out, o, delta, *sizes, **words)
        _by_query[every](*shared, d, d_out, o, delta, *sizes, **words)
        if learn:
            each = batch * heads * tiles * triton.cdiv(entries, words["STEP"])
            span = triton.cdiv(rows, min(rows, max(1, PROGRAMS // each)))
            partial = norms.new_empty(triton.cdiv(rows, span), *by_bias.shape)
            _by_bias[(each, len(partial))](*shared, d_out, o, delta, partial, *sizes, span, **words)
            by_bias.copy_(partial.sum(0))
    return d, by_gate_bias, by_bias


@_back.register_fake
def _empty_back(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
                learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    by_bias = bias.new_empty(bias.shape) if bias is not None and learn else qkvg.new_empty(0)
    return torch.empty_like(_dense(qkvg)), gate_bias.new_empty(gate_bias.shape), by_bias


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _gradients(ctx: Any, grad: Tensor, _: None) -> Any:
    learn = ctx.needs_input_grad[3]
    d, by_gate_bias, by_bias = _back(grad, *ctx.saved_tensors, learn)
    return d, by_gate_bias, None, by_bias if learn else None


_attend.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.hpcai.gated_attention)
def _products(qkvg: Any, *_: Any, **__: Any) -> int:
    """Multiplications and additions of its products: logits, and their sums of values."""
    batch, rows, entries, _, heads, channels = qkvg
    return 4 * math.prod((batch, rows, heads, entries, entries, channels))


@register_flop_formula(torch.ops.hpcai.gated_attention_backward)
def _products_back(grad: Any, out: Any, norms: Any, qkvg: Any, gate_bias: Any, mask: Any, bias: Any, learn: bool, **_: Any) -> int:
    """Those of four by keys and three by queries, and of two by the bias that learns: logits are computed anew in each."""
    return (14 + 4 * learn) * _products(qkvg) // 4


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """What its twin is, for bfloat16 and float32; more than 64 channels would not leave the registers that a tile needs."""
    batch, rows, entries, _, heads, channels = qkvg.shape
    gate_bias, mask = gate_bias.expand(heads * channels), mask.expand(batch, rows, entries)  # a kernel would read past their ends
    return _attend(qkvg, gate_bias, mask, None if bias is None else bias.expand(batch, heads, entries, entries))[0].flatten(-2)


def variants() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(name, kernel, signature, constexprs, options) of all that OpenFold launches, where 16 divides N, for compilation ahead of
    time."""
    kernels = _forward, _by_gate, _by_key, _by_query, _by_bias
    steps = {"x": ("i32",) * 5, "o": ("i32",) * 4, "t": ("i32",) * 4}
    for kernel, channels, biased, kind in product(kernels, (8, 16, 32), (True, False), ("bf16", "fp32")):
        names, words = kernel.arg_names, _words(channels, TILE, UNIT, kind == "bf16")[kernel is not _forward]
        if not biased and (kernel is _by_bias or (kernel is not _by_gate and channels < 32)):
            continue  # of all attentions that along columns alone has none, 32 channels a head
        if biased and kernel is _by_gate:
            continue
        whole = ("qkvg_", "bias_", "out_", "grad_", "d_", "d_out_")
        types = {x: steps.get(x, f"*{kind if x in whole else 'fp32'}" if x[-1] == "_" else "i32") for x in names}
        fixed = {x: words[x] for x in names if x in words} | ({"bias_": None} if "bias_" in names and not biased else {})
        name = f"{kernel.fn.__name__} {kind} C={channels}{' bias' if biased else ''}"
        options = {x: words[x] for x in ("num_warps", "num_stages")}
        yield name, kernel, types | dict.fromkeys(fixed, "constexpr"), fixed, options
