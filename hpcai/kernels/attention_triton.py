# mypy: disable-error-code="no-untyped-def"
"""Triton kernels of ``gated_attention``: tiles of logits stay in registers, and the bias is the only tensor of size N^2 in memory.

At B 1, I 128, N 256, H 8, C 32 in bf16, with one read of each tensor by each kernel, the forward pass moves 83 MiB and the backward
pass 353 MiB; the six tensors [B, I, H, N, N] of the reference, 128 MiB each, take 1,536 MiB to be written and read once.

The forward pass is an online softmax over tiles of keys (Milakov and Gimelshein 2018); the backward pass recomputes exponentials
from two saved elements of each query (Dao et al. 2022). Each sum belongs to one program or has partial sums added in a fixed order:
there are no atomics, and the same input gives the same bits.

B batch, I rows, N entries of a row, H heads, C channels.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# Entries of a program, and its pipeline stages. It loops over the other entries in steps of the same size, half of it in float32,
# whose products need twice the registers. The backward pass, which holds two tiles of logits, has twice the warps.
TILE, WARPS, STAGES = 64, 4, 2
# Programs that sum the gradient of the bias: two waves of two on each of 132 multiprocessors. Rows are split where there are fewer
# tiles. The number is fixed, so that sums are added in the same order on every GPU.
PROGRAMS = 2 * 2 * 132
# Channels of a vector load: 16 bytes of a 16-bit type. Strides that are no multiples of it take scalar loads.
UNIT = 8

LOG2_E = tl.constexpr(1.4426950408889634)
ABSENT = tl.constexpr(1e9 * 1.4426950408889634)  # in units of log2: subtracted from the logits of masked entries
LOW = tl.constexpr(-3e38)  # below all logits but -inf, which then needs no special case

# N and the strides are specialised on divisibility by 16: rows of the bias are then vector loads.
_jit = triton.jit(do_not_specialize=["heads", "rows", "span"])


@triton.jit
def _tile_indices(N, heads, rows, TILE: tl.constexpr):
    """Return batch, row, head, their index in [B, I, H], and the entries of the tile of this program."""
    tiles = tl.cdiv(N, TILE)
    index = (tl.program_id(0) // tiles).to(tl.int64)
    entry = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    return index // heads // rows, index // heads % rows, index % heads, index, entry


@triton.jit
def _offsets(b, i, h, entry, steps, N, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets of the channels of entries in a tensor with these strides, and their mask [T, WIDE]."""
    channel = tl.arange(0, WIDE)[None, :]
    base = (b * steps[0] + i * steps[1] + h * steps[3]) * UNIT
    return base + entry.to(tl.int64)[:, None] * (steps[2] * UNIT) + channel, (entry < N)[:, None] & (channel < C)


@triton.jit
def _logits(first, second, mask_, bias_, row, head, query, key, N, SCALE: tl.constexpr, EXACT: tl.constexpr):
    """Return logits in units of log2, with one ``row`` of the masks and one ``head`` of the biases. Keys beyond the end have -inf:
    they have no weight even in a row that is masked as a whole."""
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
    """Attention of a tile of queries. Their log-sum-exp is saved as two elements, the largest logit and the sum of exponentials
    below it: in one element the sum of a row that is masked as a whole would be lost beside -1e9."""
    b, i, h, index, query = _tile_indices(N, heads, rows, TILE)
    norm = index * N + query
    offsets, valid = _offsets(b, i, h, query, x, N, C, UNIT, WIDE)
    q = tl.load(qkvg_ + offsets, valid, other=0.0)
    largest, total = tl.full((TILE,), LOW, tl.float32), tl.zeros((TILE,), tl.float32)
    result = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        key = start + tl.arange(0, STEP)
        key_offsets, valid_key = _offsets(b, i, h, key, x, N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[4] * UNIT + key_offsets, valid_key, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + key_offsets, valid_key, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        larger = tl.maximum(largest, tl.max(logits, 1))
        less = tl.exp2(largest - larger)
        e = tl.exp2(logits - larger[:, None])
        total = total * less + tl.sum(e, 1)
        result = result * less[:, None] + tl.dot(e.to(v.dtype), v, input_precision=EXACT)
        largest = larger
    channel = tl.arange(0, WIDE)
    g = tl.load(qkvg_ + 3 * x[4] * UNIT + offsets, valid, other=0.0).to(tl.float32)
    g += tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :]
    into, _ = _offsets(b, i, h, query, o, N, C, UNIT, WIDE)
    tl.store(out_ + into, (result / total[:, None] * tl.sigmoid(g)).to(out_.dtype.element_ty), valid)
    tl.store(norms_ + 2 * norm, largest, query < N)
    tl.store(norms_ + 2 * norm + 1, total, query < N)


@_jit
def _grad_gate(
    qkvg_, x, norms_, gate_bias_, out_, o, grad_, t, d_, d_out_, delta_, partial_, N, heads, rows, C: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of the gate of a tile of entries. The gradient of its other factor, and delta, are divided by the sum of
    exponentials, so that the kernels below need exponentials, no probabilities."""
    b, i, h, index, entry = _tile_indices(N, heads, rows, TILE)
    norm = index * N + entry
    channel = tl.arange(0, WIDE)
    offsets, valid = _offsets(b, i, h, entry, x, N, C, UNIT, WIDE)
    into, _ = _offsets(b, i, h, entry, o, N, C, UNIT, WIDE)
    other, _ = _offsets(b, i, h, entry, t, N, C, UNIT, WIDE)
    offsets += 3 * x[4] * UNIT
    g = tl.load(qkvg_ + offsets, valid, other=0.0).to(tl.float32)
    gate = tl.sigmoid(g + tl.load(gate_bias_ + h * C + channel, channel < C, other=0.0).to(tl.float32)[None, :])
    grad = tl.load(grad_ + other, valid, other=0.0).to(tl.float32)
    both = grad * tl.load(out_ + into, valid, other=0.0).to(tl.float32)
    total = tl.load(norms_ + 2 * norm + 1, entry < N, other=1.0)
    grad_gate = both * (1.0 - gate)
    tl.store(d_ + offsets, grad_gate.to(d_.dtype.element_ty), valid)
    tl.store(d_out_ + into, (grad * gate / total[:, None]).to(d_out_.dtype.element_ty), valid)
    tl.store(delta_ + norm, tl.sum(both, 1) / total, entry < N)
    part = ((b * rows + i) * tl.cdiv(N, TILE) + tl.program_id(0) % tl.cdiv(N, TILE)) * heads + h
    tl.store(partial_ + part * C + channel, tl.sum(grad_gate, 0), channel < C)


@_jit
def _grad_key(
    qkvg_, x, mask_, bias_, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, from all queries."""
    b, i, h, index, key = _tile_indices(N, heads, rows, TILE)
    key_offsets, valid_key = _offsets(b, i, h, key, x, N, C, UNIT, WIDE)
    k = tl.load(qkvg_ + x[4] * UNIT + key_offsets, valid_key, other=0.0)
    v = tl.load(qkvg_ + 2 * x[4] * UNIT + key_offsets, valid_key, other=0.0)
    grad_k, grad_v = tl.zeros((TILE, WIDE), tl.float32), tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        query = start + tl.arange(0, STEP)
        offsets, valid = _offsets(b, i, h, query, x, N, C, UNIT, WIDE)
        at, _ = _offsets(b, i, h, query, o, N, C, UNIT, WIDE)
        q, d_out = tl.load(qkvg_ + offsets, valid, other=0.0), tl.load(d_out_ + at, valid, other=0.0)
        norm = index * N + query
        largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
        logits = _logits(k, q, mask_, bias_, b * rows + i, b * heads + h, query[None, :], key[:, None], N, SCALE, EXACT)
        e = tl.exp2(logits - largest[None, :])
        grad_v += tl.dot(e.to(v.dtype), d_out, input_precision=EXACT)
        e *= tl.dot(v, tl.trans(d_out), input_precision=EXACT) - delta[None, :]
        grad_k += tl.dot(e.to(q.dtype), q, input_precision=EXACT)
    tl.store(d_ + x[4] * UNIT + key_offsets, (grad_k * SCALE).to(d_.dtype.element_ty), valid_key)
    tl.store(d_ + 2 * x[4] * UNIT + key_offsets, grad_v.to(d_.dtype.element_ty), valid_key)


@_jit
def _grad_query(
    qkvg_, x, mask_, bias_, norms_, d_, d_out_, o, delta_, N, heads, rows, C: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries, from all keys."""
    b, i, h, index, query = _tile_indices(N, heads, rows, TILE)
    norm = index * N + query
    offsets, valid = _offsets(b, i, h, query, x, N, C, UNIT, WIDE)
    at, _ = _offsets(b, i, h, query, o, N, C, UNIT, WIDE)
    q, d_out = tl.load(qkvg_ + offsets, valid, other=0.0), tl.load(d_out_ + at, valid, other=0.0)
    largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
    grad_q = tl.zeros((TILE, WIDE), tl.float32)
    for start in range(0, N, STEP):
        key = start + tl.arange(0, STEP)
        key_offsets, valid_key = _offsets(b, i, h, key, x, N, C, UNIT, WIDE)
        k = tl.load(qkvg_ + x[4] * UNIT + key_offsets, valid_key, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + key_offsets, valid_key, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        grad_exp = tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None]
        grad_q += tl.dot((tl.exp2(logits - largest[:, None]) * grad_exp).to(k.dtype), k, input_precision=EXACT)
    tl.store(d_ + offsets, (grad_q * SCALE).to(d_.dtype.element_ty), valid)


@_jit
def _grad_bias(
    qkvg_, x, mask_, bias_, norms_, d_out_, o, delta_, partial_, N, heads, rows, span, C: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of the bias, from ``span`` rows. Programs of one strip process the same rows together."""
    across, each = tl.cdiv(N, STEP), tl.cdiv(N, TILE) * tl.cdiv(N, STEP)
    tile, index = tl.program_id(0) % each, (tl.program_id(0) // each).to(tl.int64)
    query, key = tile // across * TILE + tl.arange(0, TILE), tile % across * STEP + tl.arange(0, STEP)
    b, h, begin = index // heads, index % heads, tl.program_id(1).to(tl.int64) * span
    result = tl.zeros((TILE, STEP), tl.float32)
    for i in range(begin, tl.minimum(begin + span, rows)):
        offsets, valid = _offsets(b, i, h, query, x, N, C, UNIT, WIDE)
        key_offsets, valid_key = _offsets(b, i, h, key, x, N, C, UNIT, WIDE)
        at, _ = _offsets(b, i, h, query, o, N, C, UNIT, WIDE)
        q, d_out = tl.load(qkvg_ + offsets, valid, other=0.0), tl.load(d_out_ + at, valid, other=0.0)
        k = tl.load(qkvg_ + x[4] * UNIT + key_offsets, valid_key, other=0.0)
        v = tl.load(qkvg_ + 2 * x[4] * UNIT + key_offsets, valid_key, other=0.0)
        norm = ((b * rows + i) * heads + h) * N + query
        largest, delta = tl.load(norms_ + 2 * norm, query < N, other=0.0), tl.load(delta_ + norm, query < N, other=0.0)
        logits = _logits(q, k, mask_, bias_, b * rows + i, b * heads + h, query[:, None], key[None, :], N, SCALE, EXACT)
        grad_exp = tl.dot(d_out, tl.trans(v), input_precision=EXACT) - delta[:, None]
        result += tl.exp2(logits - largest[:, None]) * grad_exp
    offsets = (tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // each) + index) * N * N + query.to(tl.int64)[:, None] * N
    tl.store(partial_ + offsets + key[None, :], result, (query < N)[:, None] & (key < N)[None, :])


def _strides(*tensors: Tensor) -> list[Any]:
    """Return the channels of a vector load, and the strides of all dims of each tensor but the last, in that unit."""
    strides = [x.stride()[:-1] for x in tensors]
    unit = UNIT if all(step % UNIT == 0 for steps in strides for step in steps) else 1
    return [unit, *(tuple(step // unit for step in steps) for steps in strides)]


def _launch_kwargs(channels: int, entries: int, unit: int, narrow: bool) -> list[dict[str, Any]]:
    """Return the arguments of the launches of forward and backward pass, for 16-bit types (``narrow``) or float32. Tensor cores
    take 16 channels or more, and for float32 three products in TF32, which lose its last digit alone."""
    wide, tile = (max(16, triton.next_power_of_2(n)) for n in (channels, min(entries, TILE if narrow else TILE // 2)))
    kwargs = {"C": channels, "UNIT": unit, "WIDE": wide, "TILE": tile, "STEP": tile if narrow else max(16, tile // 2)}
    kwargs |= {"SCALE": channels**-0.5, "EXACT": "tf32x3", "num_stages": STAGES if narrow else 1}
    return [{**kwargs, "num_warps": WARPS}, {**kwargs, "num_warps": 2 * WARPS if narrow else WARPS}]


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous channels and no gaps, whose strides ``empty_like`` preserves."""
    return x if x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()


@torch.library.custom_op("hpcai::gated_attention", mutates_args=())
def _attend(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the result [B, I, N, H, C], and the largest logit and sum of exponentials of each query [B, I, H, N, 2]."""
    qkvg = _dense(qkvg)
    out, norms = _empty(qkvg, gate_bias, mask, bias)
    batch, rows, entries, _, heads, channels = qkvg.shape
    unit, x, o = _strides(qkvg.transpose(3, 4), out)
    kwargs = _launch_kwargs(channels, entries, unit, qkvg.dtype != torch.float32)[0]
    programs, bias = batch * rows * heads * triton.cdiv(entries, kwargs["TILE"]), None if bias is None else bias.contiguous()
    with torch.cuda.device_of(qkvg):
        _forward[(programs,)](
            qkvg, x, mask.contiguous(), bias, norms, gate_bias.contiguous(), out, o, entries, heads, rows, **kwargs
        )
    return out, norms


@_attend.register_fake
def _empty(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, rows, entries, _, heads, _ = qkvg.shape
    return torch.empty_like(_dense(qkvg)[..., 0, :, :]), qkvg.new_empty((batch, rows, heads, entries, 2), dtype=torch.float32)


@torch.library.custom_op("hpcai::gated_attention_backward", mutates_args=())
def _attend_backward(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
          learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkvg, gate_bias and, if ``learn``, bias."""
    grad, qkvg = _dense(grad), _dense(qkvg)
    d, grad_gate_bias, grad_bias = _empty_backward(grad, out, norms, qkvg, gate_bias, mask, bias, learn)
    d_out, delta = torch.empty_like(out), torch.empty_like(norms[..., 0])
    batch, rows, entries, _, heads, channels = qkvg.shape
    unit, x, o, t = _strides(qkvg.transpose(3, 4), out, grad)
    kwargs = _launch_kwargs(channels, entries, unit, qkvg.dtype != torch.float32)[1]
    tiles, sizes = triton.cdiv(entries, kwargs["TILE"]), (entries, heads, rows)
    shared = (qkvg, x, mask.contiguous(), None if bias is None else bias.contiguous(), norms)
    with torch.cuda.device_of(qkvg):
        partial, every = norms.new_empty(batch * rows * tiles, heads * channels), (batch * rows * heads * tiles,)
        _grad_gate[every](qkvg, x, norms, gate_bias.contiguous(), out, o, grad, t, d, d_out, delta, partial, *sizes, **kwargs)
        grad_gate_bias.copy_(partial.sum(0))
        _grad_key[every](*shared, d, d_out, o, delta, *sizes, **kwargs)
        _grad_query[every](*shared, d, d_out, o, delta, *sizes, **kwargs)
        if learn:
            each = batch * heads * tiles * triton.cdiv(entries, kwargs["STEP"])
            span = triton.cdiv(rows, min(rows, max(1, PROGRAMS // each)))
            partial = norms.new_empty(triton.cdiv(rows, span), *grad_bias.shape)
            _grad_bias[(each, len(partial))](*shared, d_out, o, delta, partial, *sizes, span, **kwargs)
            grad_bias.copy_(partial.sum(0))
    return d, grad_gate_bias, grad_bias


@_attend_backward.register_fake
def _empty_backward(grad: Tensor, out: Tensor, norms: Tensor, qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None,
                learn: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_bias = bias.new_empty(bias.shape) if bias is not None and learn else qkvg.new_empty(0)
    return torch.empty_like(_dense(qkvg)), gate_bias.new_empty(gate_bias.shape), grad_bias


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs)


def _gradients(ctx: Any, grad: Tensor, _: None) -> Any:
    learn = ctx.needs_input_grad[3]
    d, grad_gate_bias, grad_bias = _attend_backward(grad, *ctx.saved_tensors, learn)
    return d, grad_gate_bias, None, grad_bias if learn else None


_attend.register_autograd(_gradients, setup_context=_setup_context)


@register_flop_formula(torch.ops.hpcai.gated_attention)
def _flops(qkvg: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the two products: logits, and weighted sums of values."""
    batch, rows, entries, _, heads, channels = qkvg
    return 4 * math.prod((batch, rows, heads, entries, entries, channels))


@register_flop_formula(torch.ops.hpcai.gated_attention_backward)
def _flops_backward(grad: Any, out: Any, norms: Any, qkvg: Any, gate_bias: Any, mask: Any, bias: Any, learn: bool, **_: Any) -> int:
    """Return the FLOPs of four products for keys, three for queries, and two for a bias that learns: each kernel recomputes
    logits."""
    return (14 + 4 * learn) * _flops(qkvg) // 4


def gated_attention(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the same as the reference, in bfloat16 or float32, for at most 64 channels, with which a tile fits the registers."""
    batch, rows, entries, _, heads, channels = qkvg.shape
    gate_bias, mask = gate_bias.expand(heads * channels), mask.expand(batch, rows, entries)  # a kernel would read past their ends
    return _attend(qkvg, gate_bias, mask, None if bias is None else bias.expand(batch, heads, entries, entries))[0].flatten(-2)
