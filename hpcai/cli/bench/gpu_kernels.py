"""Each kernel compared with its peers, at the sizes of the published networks.

A row is one implementation at one size in one dtype; docs/benchmarks.md ("One GPU") lists its columns.
A new kernel is one more ``Kernel`` in ``KERNELS``, with its sizes in gpu_kernels.toml.
"""

import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai import dist
from hpcai.cli.bench import timing
from hpcai.cli.bench.timing import Row
from hpcai.errors import HpcaiError
from hpcai.kernels import attention, float8, fused_optimizer, gates, layernorm, outer_product, philox, triangle_multiplication
from hpcai.kernels import focal_loss as focal
from hpcai.kernels import paged_attention as paged
from hpcai.kernels.grouped_mm import implementation, reference
from hpcai.nn import BatchNorm, GroupNorm, InstanceNorm, moe
from hpcai.nn.cuda_graph import CudaGraph

Function = Callable[..., Tensor]
_CACHE = 256 << 20  # bytes of inputs, more than the last-level cache of any GPU
_GRAPH_S = 2e-3  # seconds of a graph of calls, next to which its launch is negligible
_GROUPS = 8
_SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class LeftOutError(HpcaiError):
    """The reason why an implementation is not measured here."""


class RandomInputs:
    """Random inputs: ``draw(2, 3)`` is a tensor [2, 3] of the measured dtype, with ``wide`` of float32, and with ``fixed`` without
    gradient. All differ, and are the same in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, wide: bool = False, fixed: bool = False, last: bool = False, scale: float = 1.0) -> Tensor:
        """``last``: In channels-last memory."""
        x = torch.randn(shape, generator=self.generator, device=self.device).mul_(scale)
        x = x.to(torch.float32 if wide else self.dtype)
        if last:
            x = x.to(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        return x.requires_grad_(not fixed)

    def mask(self, *shape: int) -> Tensor:
        """Return a float32 mask with about one zero in ten."""
        return (torch.rand(shape, generator=self.generator, device=self.device) > 0.1).float()


@dataclass(frozen=True)
class Kernel:
    """``ours``, ``reference`` and the ``peers`` are functions of the same ``inputs`` with the same result."""

    name: str
    inputs: Callable[..., list[Any]]
    """(draw, *size) -> tensors, or None"""
    ours: Function
    reference: Function
    peers: Mapping[str, Function] = field(default_factory=dict)
    moved_bytes: Callable[[Sequence[Tensor], bool], int] | None = None
    """(inputs, whether also backward) -> bytes that must be moved, if not each tensor once"""
    has_backward: bool = True
    """whether there is a backward pass; a kernel without one may change its inputs"""
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(size) for name, size in _SIZES[self.name].items() if name != "tiny"}

    @property
    def tiny(self) -> tuple[int, ...]:
        """The size measured on a CPU."""
        return tuple(_SIZES[self.name]["tiny"])

    def implementations(self) -> dict[str, Function]:
        functions = {"ours": self.ours}
        if self.reference is not self.ours:
            functions |= {"plain": self.reference, "compiled": partial(_compiled, self.reference)}
        return {**functions, **self.peers}


@cache
def _compiler(function: Function) -> Any:
    torch._dynamo.config.recompile_limit = 64  # versions of one function: dtypes, sizes, with gradients and without
    return torch.compile(function, dynamic=False, options={"triton.cudagraphs": False})


def _compiled(function: Function, *inputs: Any) -> Tensor:
    if not inputs[0].is_cuda:
        raise LeftOutError(f"there is no GPU: this process computes on {inputs[0].device.type}")
    return _compiler(function)(*inputs)


def _attention_inputs(draw: RandomInputs, rows: int, entries: int, heads: int, channels: int, bias: bool = True) -> list[Any]:
    """Shape: qkvg [B, I, N, 4, H, C], gate_bias [H * C], mask [B, I, N], bias [B, H, N, N]"""
    gate_bias, mask = draw(heads * channels, wide=True), draw.mask(1, rows, entries)
    return [draw(1, rows, entries, 4, heads, channels), gate_bias, mask, draw(1, heads, entries, entries) if bias else None]


def _channels_last_inputs(draw: RandomInputs, batch: int, channels: int, *places: int) -> list[Any]:
    """Shape: x [B, C, ...] in channels-last memory, weight and bias [C]"""
    return [draw(batch, channels, *places, last=True), draw(channels, wide=True), draw(channels, wide=True)]


def _layer_norm_inputs(draw: RandomInputs, rows: int, entries: int, channels: int, channels_first: bool = False) -> list[Any]:
    """Shape: x [..., C], whose channels may come first in memory; weight and bias [C]"""
    x = draw(1, channels, rows, entries).detach().movedim(1, -1) if channels_first else draw(1, rows, entries, channels)
    return [x.requires_grad_(), draw(channels, wide=True), draw(channels, wide=True)]


def _outer_inputs(draw: RandomInputs, rows: int, entries: int, few: int, channels: int) -> list[Any]:
    count = torch.full((1, entries, entries), rows, device=draw.device, dtype=draw.dtype)
    left, right = draw(1, rows, entries, few), draw(1, rows, entries, few)
    return [left, right, draw(channels, few * few, scale=1 / few), draw(channels), count]


def _gated(o: Tensor, qkvg: Tensor, gate_bias: Tensor) -> Tensor:
    """Shape: o [B, I, N, H, C] -> [B, I, N, H * C]"""
    g = qkvg[..., 3, :, :]
    return o.flatten(-2) * (g.flatten(-2) + gate_bias.to(g.dtype)).sigmoid()


def _heads(qkvg: Tensor) -> list[Tensor]:
    """Return q, k, v [B * I, H, N, C]."""
    return [x.transpose(-2, -3).flatten(0, 1) for x in qkvg.unbind(3)[:3]]


def _sdpa(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    """Attention by torch, with mask and bias as one tensor of all logits."""
    absent = ((1 - mask) * -1e9).to(qkvg.dtype)[:, :, None, None, :]
    logits = absent if bias is None else absent + bias[:, None]  # [B, I, H, N, N]
    q, k, v = _heads(qkvg)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=logits.flatten(0, 1))
    return _gated(o.unflatten(0, qkvg.shape[:2]).transpose(-2, -3), qkvg, gate_bias)


def _flex(qkvg: Tensor, gate_bias: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    rows, absent = qkvg.shape[1], (1 - mask) * -1e9

    def score(logit: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        logit = logit + absent[b // rows, b % rows, k]
        return logit if bias is None else logit + bias[b // rows, h, q, k]

    q, k, v = _heads(qkvg)
    o: Any = flex_attention(q, k, v, score_mod=score)
    return _gated(o.unflatten(0, qkvg.shape[:2]).transpose(-2, -3), qkvg, gate_bias)


def _paged_inputs(draw: RandomInputs, queries: int, heads: int, kv_heads: int, channels: int, size: int, blocks: int) -> list[Any]:
    """Shape: q [N, H, D], k and v [N M, K, P, D], tables [N, M] and positions [N], the last ones of the tables"""
    q, *pools = (draw(*shape, channels, fixed=True) for shape in ((queries, heads), *[(queries * blocks, kv_heads, size)] * 2))
    tables = torch.arange(queries * blocks, device=draw.device).view(blocks, queries).t().contiguous()
    return [q, *pools, tables, torch.full((queries,), size * blocks - 1, device=draw.device)]


@cache
def _meta_module(kind: Callable[[int], nn.Module], channels: int) -> nn.Module:
    return kind(channels).to("meta")


def _norm_module(kind: Callable[[int], nn.Module], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.func.functional_call(_meta_module(kind, x.shape[1]), {"weight": weight, "bias": bias}, (x,))


def _combine_inputs(draw: RandomInputs, tokens: int, k: int, channels: int) -> list[Any]:
    """Shape: rows [N k, C], weights [N, k], the row of each pair [N, k] and the token of each row [N k]"""
    index = torch.randperm(tokens * k, generator=draw.generator, device=draw.device)
    return [draw(tokens * k, channels), draw(tokens, k, wide=True), index.view(tokens, k), index.argsort() // k]


def _grouped_mm_inputs(draw: RandomInputs, rows: int, groups: int, inputs: int, outputs: int) -> list[Any]:
    """Shape: x [R, K], matrices [G, K, N] and the ends of equal groups [G]"""
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=draw.device) * (rows // groups)
    return [draw(rows, inputs), draw(groups, outputs, inputs, scale=inputs**-0.5).mT, ends]


def _quantize_both(cast: Callable[..., float8.Float8Tensor], x: Tensor) -> Tensor:
    columns = cast(x, torch.float8_e4m3fn, rows=True, columns=True, scale=None).columns
    assert columns is not None
    return columns


# ---- updates


@cache
def _scalar(value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((), value, device=device, dtype=dtype)


@cache
def _segments(size: int, device: torch.device) -> fused_optimizer.Segments:
    length = max(size // 100 // 16 * 16, 16)
    return fused_optimizer.Segments([(start, min(length, size - start)) for start in range(0, size, length)], device, size)


def _update_kwargs(w: Tensor) -> dict[str, Any]:
    seed = _scalar(1, w.device, torch.int64)
    return {"found_inf": _scalar(0, w.device), "scale": None, "weight_decay": 0.01, "seed": seed}


def _adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    lr, step = _scalar(1e-3, w.device, w.dtype), _scalar(3, w.device)
    fused_optimizer.adam_(w, g, m, v, lr=lr, step=step, betas=(0.9, 0.999), eps=1e-6, **_update_kwargs(w))
    return w


def _lamb(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    kwargs, segments, direction = _update_kwargs(w), _segments(len(w), w.device), torch.empty_like(w)
    step = _scalar(3, w.device)
    norms = fused_optimizer.lamb_direction_(w, g, m, v, direction, segments, step=step, betas=(0.9, 0.999), eps=1e-6, **kwargs)
    ratio = fused_optimizer.trust_ratio(norms, weight_decay=0.01)
    fused_optimizer.lamb_update_(w, direction, segments, ratio, lr=_scalar(1e-3, w.device, w.dtype), found_inf=kwargs["found_inf"])
    return w


def _sgd(w: Tensor, g: Tensor, m: Tensor) -> Tensor:
    lr = _scalar(1e-3, w.device, w.dtype)
    fused_optimizer.sgd_(w, g, m, lr=lr, momentum=0.9, lr_in_momentum=False, nesterov=True, **_update_kwargs(w))
    return w


def _torch_update(op: Any, w: Tensor, g: Tensor, *moments: Tensor, **settings: Any) -> Tensor:
    if moments[0].dtype != w.dtype:
        raise LeftOutError("torch's moments are of the type of the weights")
    op([w], [g], *([m] for m in moments), lr=1e-3, weight_decay=0.01, maximize=False, found_inf=_scalar(0, w.device), **settings)
    return w


def _torch_adam(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    more: Any = {"max_exp_avg_sqs": [], "state_steps": [_scalar(3, w.device)]}
    return _torch_update(torch._fused_adamw_, w, g, m, v, **more, beta1=0.9, beta2=0.999, eps=1e-6, amsgrad=False)


def _update_bytes(passes: int, inputs: Sequence[Tensor], both: bool) -> int:
    """Return the bytes of an update: weights and moments are read and written, the gradient is read. A second pass reads weights
    and the direction that the first has written, and writes weights."""
    w, g, *moments = inputs
    return 2 * w.nbytes + g.nbytes + 2 * sum(m.nbytes for m in moments) + (passes - 1) * 3 * w.nbytes


def _optimizer(name: str, ours: Function, moments: int, passes: int = 1, **peers: Function) -> Kernel:
    def inputs(draw: RandomInputs, n: int) -> list[Any]:
        """Return weights and gradient [n] float32, and moments [n] of the measured dtype."""
        return [*(draw(n, wide=True, fixed=True) for _ in range(2)), *(draw(n, fixed=True).abs_() for _ in range(moments))]

    return Kernel(name, inputs, ours, ours, peers, partial(_update_bytes, passes), has_backward=False)


def _random(name: str, function: Any, torch_function: Function) -> Kernel:
    def ours(out: Tensor) -> Tensor:
        return function(7, 0, len(out), out=out)

    return Kernel(
        name, lambda draw, n: [torch.empty(n, device=draw.device)], ours, ours, {"torch": torch_function},
        lambda inputs, both: inputs[0].nbytes, has_backward=False, dtypes=(torch.float32,),
    )  # fmt: skip


KERNELS = [
    Kernel(
        "attention", _attention_inputs, attention.gated_attention, attention.reference,
        {"sdpa": _sdpa, "flex": partial(_compiled, _flex)},
    ),
    Kernel(
        "layernorm", _layer_norm_inputs, layernorm.layer_norm,
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype)),
    ),
    Kernel(
        "batchnorm", _channels_last_inputs, partial(_norm_module, partial(BatchNorm, relu=True, track_running_stats=False)),
        lambda x, weight, bias: F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5)),
    ),
    Kernel(
        "instancenorm", _channels_last_inputs, partial(_norm_module, partial(InstanceNorm, activation="relu")),
        lambda x, weight, bias: F.relu(F.instance_norm(x, weight=weight.to(x.dtype), bias=bias.to(x.dtype))),
    ),
    Kernel(
        "groupnorm", _channels_last_inputs, partial(_norm_module, partial(GroupNorm, _GROUPS, activation="silu")),
        lambda x, weight, bias: F.silu(F.group_norm(x, _GROUPS, weight.to(x.dtype), bias.to(x.dtype))),
    ),
    Kernel(
        "gate", lambda draw, n, channels: [draw(1, channels, n, n), draw(1, channels, n, n), draw.mask(1, 1, n, n)],
        gates.gate, gates.reference,
    ),
    Kernel(
        "halves", lambda draw, n, channels: [draw(1, 2 * channels, n, n), draw.mask(1, 1, n, n)],
        gates.glu_halves, gates.reference_glu_halves,
    ),
    Kernel(
        "triangle", lambda draw, n, channels: [draw(1, 2 * channels, n, n, scale=n**-0.5)],
        partial(triangle_multiplication.triangle_multiplication, outgoing=True),
        partial(triangle_multiplication.reference, outgoing=True), moved_bytes=lambda inputs, both: 0,  # it is compute-bound
    ),
    Kernel("outer", _outer_inputs, outer_product.outer_product, outer_product.reference, moved_bytes=lambda inputs, both: 0),
    Kernel(
        "float8", lambda draw, rows, channels: [draw(rows, channels, fixed=True)],
        partial(_quantize_both, float8.quantize), partial(_quantize_both, float8.reference),
        moved_bytes=lambda inputs, both: 2 * inputs[0].nbytes + 2 * inputs[0].numel(),  # read for the scale, and again for the cast
        has_backward=False,
    ),
    Kernel(
        "combine", _combine_inputs,
        lambda rows, weights, index, tokens: moe.Combine.apply(rows, weights, moe.RowOrder(tokens, index, None)),
        lambda rows, weights, index, _: (rows[index] * weights[..., None]).sum(1).to(rows.dtype),
    ),
    Kernel(
        "grouped_mm", _grouped_mm_inputs, lambda x, matrices, ends: implementation(x, x.dtype)(x, matrices, ends, x.dtype),
        lambda x, matrices, ends: reference(x, matrices, ends, x.dtype),
        {"torch": lambda x, matrices, ends: F.grouped_mm(x, matrices, offs=ends)}, lambda inputs, both: 0, has_backward=False,
    ),
    Kernel(
        "focal", lambda draw, anchors, classes: [
            draw(anchors, classes, scale=3), torch.arange(anchors, device=draw.device) % (2 * classes) - classes,
        ],
        focal.focal_loss, focal.reference,
    ),
    Kernel("paged_attention", _paged_inputs, paged.paged_attention, paged.reference, has_backward=False),
    _optimizer("adam", _adam, 2, torch=_torch_adam),
    _optimizer("lamb", _lamb, 2, passes=2),
    _optimizer("sgd", _sgd, 1, torch=partial(
        _torch_update, torch._fused_sgd_, momentum=0.9, dampening=0.0, nesterov=True, is_first_step=False)),
    _random("philox-uniform", philox.uniform, lambda out: out.uniform_()),
    _random("philox-normal", philox.normal, lambda out: out.normal_()),
]  # fmt: skip
VARIANTS = list(dict.fromkeys(form for kernel in KERNELS for form in kernel.implementations()))


# ---- measuring


def cases() -> dict[str, tuple[Kernel, tuple[int, ...]]]:
    return {f"{kernel.name}-{name}": (kernel, size) for kernel in KERNELS for name, size in kernel.sizes.items()}


def measure(name: str, args: Any) -> Iterator[Row]:
    """Yield the rows of the case ``name``: all implementations in each dtype."""
    kernel, size = cases()[name]
    for dtype in kernel.dtypes:
        yield from compare(name, kernel, kernel.tiny if args.tiny else size, dtype, dist.single_process().device, args)


def compare(name: str, kernel: Kernel, size: tuple[int, ...], dtype: torch.dtype, device: torch.device, args: Any) -> Iterator[Row]:
    sets = [kernel.inputs(RandomInputs(device, dtype, 0), *size)]
    set_bytes = sum(tensor.nbytes for tensor in _tensors(sets[0]))
    additional = min(_CACHE // max(set_bytes, 1), 15) if device.type == "cuda" else 0
    sets += [kernel.inputs(RandomInputs(device, dtype, 1 + i), *size) for i in range(additional)]
    key = "both_ms" if kernel.has_backward else "forward_ms"
    ours: float | None = None
    for form, function in kernel.implementations().items():
        if form not in (args.variants or kernel.implementations()):
            continue
        row: Row = {"case": name, "form": form, "dtype": str(dtype).removeprefix("torch."), "size": size}
        try:
            row |= _time_row(kernel, function, sets, args)
            ours = row[key] if form == "ours" else ours
            row["over_ours"] = round(row[key] / ours, 3) if ours else None
        except LeftOutError as reason:
            row["left_out"] = str(reason)
        except Exception as error:  # any: the other implementations continue
            row["failed"] = timing.describe_error(error)
        finally:
            timing.free_memory()
        yield row


def _tensors(inputs: Sequence[Any]) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor)]


def _time_row(kernel: Kernel, function: Function, sets: Sequence[list[Any]], args: Any) -> Row:
    """Return the milliseconds of a call, and its share of the copy rate."""
    with torch.no_grad():
        result = function(*sets[0])
        grad = torch.randn_like(result) if kernel.has_backward else result

    def forward(i: int) -> Any:
        with torch.no_grad():
            return function(*sets[i % len(sets)])

    def both(i: int) -> Any:
        inputs = sets[i % len(sets)]
        return torch.autograd.grad(function(*inputs), [x for x in _tensors(inputs) if x.requires_grad], grad)

    passes = {"forward": forward, "both": both} if kernel.has_backward else {"forward": forward}
    row: Row = {"graph": True}
    for pass_name, call in passes.items():
        s, captured = seconds_per_call(call, len(sets), args.repeats)
        moved_bytes = (kernel.moved_bytes or partial(bytes_once, grad))(_tensors(sets[0]), pass_name == "both")
        rate = moved_bytes / s / 1e9 if moved_bytes else None
        row |= {f"{pass_name}_ms": round(1e3 * s, 5), f"{pass_name}_gb_s": rate and round(rate, 1)}
        row |= {"of_copy": rate and round(rate / args.rates["copy_gb_s"], 3), "graph": row["graph"] and captured}
    return row


def bytes_once(result: Tensor, inputs: Sequence[Tensor], both: bool) -> int:
    """Return the bytes of each tensor, counted once per access."""
    read, written = sum(x.nbytes for x in inputs), result.nbytes
    return read + written + (read + 2 * written + sum(x.nbytes for x in inputs if x.requires_grad) if both else 0)


def seconds_per_call(call: Callable[[int], Any], sets: int, repeats: int) -> tuple[float, bool]:
    """Return the seconds of a call, and whether it was captured: the median over windows of a graph of many calls.

    Not triton.testing.do_bench_cudagraph: a failed capture there leaves its stream and its pool in use (``CudaGraph``).
    """
    if not torch.cuda.is_available():
        call(0)
        return max(statistics.median(timing.time_window(call, 2)), 1e-9), False
    for i in range(2 * sets):
        call(i)
    estimate = statistics.median(timing.time_window(call, max(5, sets)))
    count = sets * max(1, min(round(_GRAPH_S / max(estimate, 1e-6) / sets), 200 // sets))
    graph = CudaGraph(torch.cuda.graph_pool_handle(), torch.cuda.Stream())

    def calls() -> None:
        for i in range(count):
            call(i)

    try:
        graph.warm_up(calls)
        graph.capture(calls)
    except RuntimeError:
        return statistics.median(statistics.mean(timing.time_window(call, 2 * count)) for _ in range(repeats)), False
    try:
        timing.time_window(lambda i: graph.replay(), 3)
        return statistics.median(s for _ in range(repeats) for s in timing.time_window(lambda i: graph.replay(), 5)) / count, True
    finally:
        graph.reset()
