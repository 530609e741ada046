"""Checks of Triton kernels, on a GPU or in Triton's interpreter: norms, gates, activations and rotary embeddings against their
formulas in float64, FP8 quantization bitwise against its reference.

``check_layer_norm(case, x, y, device)`` and the like raise AssertionError; ``LAYOUTS`` and ``GATES`` are cases by name, ``DTYPES``
the dtypes of a norm's input and result. The kernels are called directly, without the dispatch in front of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import float8, float8_triton, focal_loss, focal_loss_triton, gates_triton, layernorm_triton, rotary_triton
from hpcai.kernels import graph_attention as graph
from hpcai.kernels import paged_attention as paged
from hpcai.kernels.embedding_update import Layout, adagrad_, dense_gradients
from hpcai.kernels.embedding_update_triton import update as update_table
from hpcai.kernels.float8_formats import MAX_EXPONENT
from hpcai.kernels.graph_attention_triton import GraphAttention
from hpcai.kernels.grouped_mm import reference
from hpcai.kernels.moe_triton import combine, combine_backward, grouped_mm
from hpcai.kernels.paged_attention_triton import paged_attention
from hpcai.nn.moe import RowOrder

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # the interpreter truncates to bfloat16
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = (BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)


def _channels_first(*shape: int) -> Callable[[Tensor], Tensor]:
    """Return a function that views elements as [B, C, I, J] and permutes them to [B, I, J, C]."""
    return lambda values: values.view(shape).movedim(1, -1)


# The number of contiguous elements, and the view of them that is the input of the kernel.
LAYOUTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "rows of 128": (3 * 33 * 128, lambda v: v.view(3, 33, 128)),
    "rows of 64 that fill tiles": (128 * 64, lambda v: v.view(128, 64)),
    "rows of 384": (5 * 384, lambda v: v.view(1, 5, 384)),
    "rows of 256": (2 * 19 * 256, lambda v: v.view(2, 19, 256)),
    "rows of 1024": (9 * 1024, lambda v: v.view(9, 1024)),
    "rows of 23": (37 * 23, lambda v: v.view(37, 23)),
    "rows of 1": (70, lambda v: v.view(70, 1)),
    "one row of 2": (2, lambda v: v),
    "no row": (0, lambda v: v.view(0, 4, 16)),
    "slices of rows": (3 * 21 * 96, lambda v: v.view(3, 21, 96)[..., :40]),
    "slices of rows, one element further": (40 * 65, lambda v: v.view(40, 65)[:, 1:]),
    "the first of several": (3 * 4 * 11 * 32, lambda v: v.view(3, 4, 11, 32)[:, 0]),
    "broadcast rows": (9 * 48, lambda v: v.view(9, 48).expand(5, 9, 48)),
    "channels first": (2 * 128 * 8 * 16, _channels_first(2, 128, 8, 16)),
    "channels first of one": (64 * 12 * 12, _channels_first(1, 64, 12, 12)),
    "channels first, odd height and width": (2 * 40 * 7 * 5, _channels_first(2, 40, 7, 5)),
    "a slice of rows, channels first": (2 * 32 * 9 * 8, lambda v: v.view(2, 32, 9, 8)[:, :, 2:6].permute(0, 2, 3, 1)),
    "a slice of channels, channels first": (2 * 80 * 8 * 8, lambda v: v.view(2, 80, 8, 8)[:, 8:48].permute(0, 2, 3, 1)),
    "transposed": (3 * 5 * 6 * 16, lambda v: v.view(3, 5, 6, 16).transpose(1, 2)),
    "transposed channels first": (2 * 16 * 5 * 6, lambda v: v.view(2, 16, 5, 6).permute(0, 3, 2, 1)),
    "every second element": (6 * 20 * 2, lambda v: v.view(6, 20, 2)[..., 0]),
}
# Layouts without gaps, which the gradient has too; other gradients are contiguous.
DENSE = {name for name in LAYOUTS if "channels first" in name and "transposed" not in name}


def _check_close(name: str, actual: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Assert closeness within rounding of ``terms``, the magnitudes of the summands, and of the result itself."""
    over = (actual.double() - expected).abs() - 4e-6 * terms - ULP[actual.dtype] * expected.abs()
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert (over <= 0).all(), (name, float(over.max()))  # NaN fails too


def _seeded_randn(device: str) -> Callable[..., Tensor]:
    draw = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, device=device, generator=draw)


def check_layer_norm(case: str, x: torch.dtype, y: torch.dtype, device: str, away: float = 0.3) -> None:
    """Check values whose mean is ``away`` standard deviations from 0."""
    count, view = LAYOUTS[case]
    draw = _seeded_randn(device)
    values = view((3 * (draw(count) + away)).to(x))
    parameters = [draw(values.shape[-1]) for _ in range(2)]
    dx = _check_norm(values, parameters, draw(*values.shape).to(y))
    assert dx.stride() == torch.empty_like(values).stride() if case in DENSE else dx.is_contiguous()


def _check_norm(values: Tensor, parameters: list[Tensor], dy: Tensor, trainable: bool = True) -> Tensor:
    """Check a layer norm with weight and bias, or an RMS norm with a weight, and return the gradient of ``values``."""
    centred, channels = len(parameters) == 2, values.shape[-1]
    norm = layernorm_triton.layer_norm if centred else layernorm_triton.rms_norm

    def run() -> list[Tensor]:
        x, own = values.detach().requires_grad_(), [p.detach().requires_grad_(trainable) for p in parameters]
        out = norm(x, *own, 1e-5, dy.dtype)
        return [out.detach(), *torch.autograd.grad(out, [x, *own] if trainable else [x], dy)]

    out, dx, *sums = results = run()
    assert not out.is_cuda or all(map(torch.equal, results, run())), "reproducible bitwise"  # as the interpreter always is
    assert out.dtype == dy.dtype and out.is_contiguous() and dx.dtype == values.dtype
    with torch.no_grad():
        assert torch.equal(norm(values, *parameters, 1e-5, dy.dtype), out), "the same result without saved tensors"
    X, D, W, *rest = (t.double() for t in (values, dy, *parameters))
    B = rest[0] if centred else torch.zeros_like(W)
    X, G = X - centred * X.mean(-1, keepdim=True), D * W
    rstd = (X.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    N = X * rstd
    _check_close("y", out, W * N + B, W.abs() * (N.abs() + centred) + B.abs())
    mean, along = centred * G.mean(-1, keepdim=True), (G * N).mean(-1, keepdim=True)
    magnitudes = G.abs() + centred * G.abs().mean(-1, keepdim=True) + N.abs() * (G * N).abs().mean(-1, keepdim=True)
    _check_close("dx", dx, rstd * (G - mean - N * along), rstd * magnitudes)
    N, D = N.reshape(-1, channels), D.view(-1, channels)
    expected = ("grad_weight", (D * N).sum(0), (D.abs() * (N.abs() + centred)).sum(0)), ("grad_bias", D.sum(0), D.abs().sum(0))
    for actual, (name, value, terms) in zip(sums, expected):
        _check_close(name, actual, value, terms)
    return dx


def check_nonfinite_rows(device: str) -> None:
    """Check that non-finite values stay in their rows, with channels last and first."""
    draw = _seeded_randn(device)
    for inputs, rows in ((draw(40, 32), ((3,), (7,))), (draw(2, 32, 8, 8).movedim(1, -1), ((0, 0, 3), (1, 2, 7)))):
        weight, bias, dy = draw(32), draw(32), draw(*inputs.shape)
        bad, results = torch.zeros(inputs.shape[:-1], dtype=torch.bool, device=device), []
        for values in ((), (torch.nan, torch.inf)):
            x = inputs.clone()
            for row, value in zip(rows, values):
                x[row][5], bad[row] = value, True
            x.requires_grad_()
            y = layernorm_triton.layer_norm(x, weight, bias, 1e-5, FP32)
            results.append((y.detach(), *torch.autograd.grad(y, x, dy)))
        for clean, damaged in zip(*results):
            assert damaged[bad].isnan().all() and torch.equal(damaged[~bad], clean[~bad])


def _glu_case(mask: Callable[[Tensor], Tensor], *shape: int) -> Callable[[Callable[..., Tensor]], Any]:
    """Return a case: projections and gates of pairs from one product with channels first, and the mask of the pairs."""
    return lambda draw: (*draw(*shape).chunk(2, 1), mask(draw(shape[0], *shape[2:])))


# x, g and the mask, from a function that draws tensors.
GATES: dict[str, Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor, Tensor | None]]] = {
    "triangles": _glu_case(lambda m: m[:, None], 2, 16, 24, 40),
    "triangles, incoming": _glu_case(lambda m: m.transpose(1, 2)[:, None], 2, 16, 24, 24),
    "triangles in one protein": _glu_case(lambda m: m[:, None], 1, 16, 72, 64),
    "odd triangles": _glu_case(lambda m: m[:, None], 2, 6, 7, 9),
    "channels last": lambda draw: (draw(3, 37, 128), draw(3, 37, 128), None),
    "odd channels last": lambda draw: (draw(5, 7, 11), draw(5, 7, 11), None),
    "one mask for a row": lambda draw: (draw(5, 40, 24), draw(5, 40, 24), draw(5, 40, 1)),
    "one mask for a column": lambda draw: (draw(50, 24), draw(50, 24), draw(24)),
    "a mask of other dims": lambda draw: (draw(3, 4, 5, 6), draw(3, 4, 5, 6), draw(3, 1, 5, 1)),
    "transposed": lambda draw: (draw(4, 9, 16).transpose(0, 1), draw(9, 4, 16), draw(9, 1, 16)),
    "both transposed": lambda draw: (draw(4, 9, 5).transpose(0, 2), draw(4, 9, 5).transpose(0, 2), None),
    "broadcast": lambda draw: (draw(1, 6, 8).expand(5, 6, 8), draw(5, 6, 8), draw(1, 1, 1)),
    "two halves of rows": lambda draw: (*draw(19, 80).chunk(2, 1), None),
    "one element": lambda draw: (draw(1)[0], draw(1)[0], draw(1)[0]),
    "empty": lambda draw: (draw(0, 8), draw(0, 8), None),
}


def check_gate(case: str, dtype: torch.dtype, device: str) -> None:
    """Check a gate and, without a mask, SwiGLU."""
    draw = _seeded_randn(device)
    x, g, mask = GATES[case](lambda *shape: 3 * draw(*shape).to(dtype))
    mask = None if mask is None else (mask > 0).float() * 1.5
    dy = draw(*x.shape).to(dtype)
    X, G, D = x.double(), g.double(), dy.double()
    M, S = torch.ones_like(X) if mask is None else mask.double(), G.sigmoid()
    expected = X * S * M, D * S * M, D * X * M * S * (1 - S)
    _check_product(lambda x, g: gates_triton.gate(x, g, mask), x, g, dy, expected, D * X * M * S)
    if mask is None:
        expected = X * G * S, D * G * S, D * X * S * (1 + G * (1 - S))
        _check_product(lambda x, g: gates_triton.swiglu(g, x), x, g, dy, expected, D * X * S * (1 + G.abs()))


def _check_product(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, g: Tensor, dy: Tensor, expected: tuple[Tensor, ...], dg_terms: Tensor
) -> None:
    """Check the result of a function and its gradients by ``x`` and ``g``."""

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, g)]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    results = run()
    assert not x.is_cuda or all(map(torch.equal, results, run())), "reproducible bitwise"
    assert all(t.is_contiguous() and t.dtype == x.dtype for t in results)
    for name, actual, value in zip(("y", "dx", "dg"), results, expected):
        _check_close(name, actual, value, value.abs() + dg_terms.abs() * (name == "dg"))


def check_glu_halves(dtype: torch.dtype, device: str) -> None:
    """Check that a gate of halves equals a gate bitwise, and that its gradient is contiguous."""
    draw = _seeded_randn(device)
    for shape, masked in (((2, 10, 6, 8), True), ((1, 32, 5, 7), True), ((3, 4, 9), False)):
        xg, dy = draw(*shape).to(dtype).requires_grad_(), draw(shape[0], shape[1] // 2, *shape[2:]).to(dtype)
        mask = (draw(shape[0], 1, *shape[2:]) > 0).float() if masked else None
        x, g = (part.detach().requires_grad_() for part in xg.chunk(2, 1))
        out, expected = gates_triton.glu_halves(xg, mask), gates_triton.gate(x, g, mask)
        assert out.is_contiguous() and torch.equal(out, expected)
        (grad,) = torch.autograd.grad(out, xg, dy)
        assert grad.is_contiguous() and torch.equal(grad, torch.cat(torch.autograd.grad(expected, (x, g), dy), 1))


# Shapes of logits, alpha and gamma.
FOCAL = ((3, 41, 91), 0.25, 2.0), ((130, 64), 0.25, 2.0), ((2, 5, 3, 9, 24), -1.0, 1.5), ((7, 1), 0.5, 0.0), ((0, 8), 0.25, 2.0)


def check_focal_loss(case: tuple[tuple[int, ...], float, float], dtype: torch.dtype, device: str) -> None:
    """Check logits of 4 standard deviations, of which some are 100 and -100."""
    shape, *options = case
    draw = _seeded_randn(device)
    logits, dloss = (4 * draw(*shape)).to(dtype), draw(*shape[:-1])
    labels = (draw(*shape[:-1]).mul_(shape[-1]).long() % (2 * shape[-1])) - shape[-1]  # half of them negative
    logits.view(-1)[::7], logits.view(-1)[1::13] = 100, -100

    def run(function: Callable[..., Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = function(x, labels, *options)
        return loss.detach(), torch.autograd.grad(loss, x, grad)[0]

    loss, grad = results = run(focal_loss_triton.focal_loss, logits, dloss)
    assert not logits.is_cuda or all(map(torch.equal, results, run(focal_loss_triton.focal_loss, logits, dloss)))
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    expected, slope = run(focal_loss.reference, logits.double(), dloss.double())
    _check_close("loss", loss, expected, expected + shape[-1])
    _check_close("grad", grad, slope, slope.abs() + dloss.abs()[..., None])


# Rows of a table, columns, bags and ids of a bag.
TABLES = (50, 8, 16, 3), (3, 128, 70, 1), (1000, 128, 9, 20), (7, 24, 5, 4), (1, 1, 1, 1), (20, 16, 3, 1), (20, 512, 40, 2)


def check_embedding_update(case: tuple[int, int, int, int], rowwise: bool, dtype: torch.dtype, device: str) -> None:
    """Check gradients of rows and their update by Adagrad, with padding, repeated ids and ids of other shards."""
    rows, channels, bags, hotness = case
    draw, scalars = _seeded_randn(device), [torch.tensor(x, device=device) for x in (0.1, 0.5, 0.0)]
    ids = (draw(bags, hotness + 2) * rows).long().int()[:, 1:-1]  # with others beside them; a third is outside of the table
    ids[::3] = ids[0].clone()
    x = draw(rows, channels), draw(rows, 1 if rowwise else channels).square(), draw(bags, 2, channels)[:, :1]
    weight, state, grad = (part.cpu().double() for part in x)
    w, s, g = (part.to(dtype) for part in x)
    for skip in (1, 0):  # a skipped update changes nothing
        update_table(w, s, ids, g[:, 0], *scalars[:2], scalars[2] + skip, 1e-6)
    update_table(dense := g.new_zeros(rows, channels), None, ids, g[:, 0], None, None, None, 0.0)
    layout, (lr, scale, skip) = Layout((hotness,), (rows,), (0,)), [x.cpu() for x in scalars]
    adagrad_([weight], [state], layout, ids.cpu(), grad, lr=lr, scale=scale, found_inf=skip, eps=1e-6)
    for actual, expected in zip((w, s, dense), (weight, state, dense_gradients(layout, ids.cpu(), grad))):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-5)


RMS_NORM_SHAPES = (3, 33, 128), (128, 64), (5, 384), (2, 19, 23), (70, 1), (2,), (0, 16), (3, 8192), (9, 5120)


def check_rms_norm(shape: tuple[int, ...], x: torch.dtype, y: torch.dtype, device: str, trainable: bool = True) -> None:
    """Check RMSNorm with a weight that is trainable or not."""
    draw = _seeded_randn(device)
    values, weight, dy = (3 * draw(*shape)).to(x), draw(shape[-1]), draw(*shape).to(y)
    assert _check_norm(values, [weight], dy, trainable).is_contiguous()


# Batch, heads of queries, heads of keys, tokens, channels; whether the heads of a token are adjacent in memory.
ROTARY = (2, 4, 2, 37, 16, True), (1, 3, 3, 70, 64, False), (3, 2, 1, 1, 6, True), (2, 1, 1, 129, 128, True), (1, 2, 1, 9, 2, False)


def check_rotary(
    case: tuple[int, int, int, int, int, bool], dtype: torch.dtype, table_dtype: torch.dtype, per_sample: bool, device: str,
    interleaved: bool = False,
) -> None:  # fmt: skip
    """Check rotary embeddings with tables of ``table_dtype``, per sample or shared; gradients are rotated back."""
    B, Q, K, T, D, adjacent = case
    draw = _seeded_randn(device)

    def heads(count: int) -> Tensor:
        return draw(B, T, count, D).transpose(1, 2).to(dtype) if adjacent else draw(B, count, T, D).to(dtype)

    q, k, dq, dk = heads(Q), heads(K), heads(Q), heads(K)
    angle = draw(B if per_sample else 1, T, D // 2).repeat(1, 1, 2)
    cosines, sines = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    out = rotary_triton.apply_rotary(*leaves, cosines, sines, interleaved)
    gradients = torch.autograd.grad(out, leaves, (dq, dk))
    C, S = cosines.double()[:, None], sines.double()[:, None]
    for inputs, outputs, sign in ((q, out[0], 1), (k, out[1], 1), (dq, gradients[0], -1), (dk, gradients[1], -1)):
        assert outputs.dtype == dtype and outputs.transpose(1, 2).is_contiguous()
        if interleaved:  # as halves, like in the other form
            inputs, outputs = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (inputs, outputs))
        first, second = inputs.double().chunk(2, -1)
        crossed = torch.cat((-second, first), -1)
        _check_close("rotated", outputs.detach(), inputs.double() * C + sign * crossed * S,
                     (inputs.double() * C).abs() + (crossed * S).abs())  # fmt: skip


# Tokens, their rows, channels, and the capacity of each of 5 experts.
COMBINED = (37, 2, 70, None), (9, 1, 2100, None), (40, 3, 64, 7), (40, 1, 24, 30), (0, 2, 8, None)


def check_combine(case: tuple[int, int, int, int | None], dtype: torch.dtype, device: str) -> None:
    """Check the sums of rows, with weights and without, and their gradients, with rows that are not contiguous."""
    N, k, C, capacity = case
    draw = _seeded_randn(device)
    chosen = draw(N, 5).topk(k)[1]
    order = RowOrder.by_expert(chosen, chosen.flatten().bincount(minlength=5), capacity)
    rows, dy, weights = draw(C, len(order.tokens)).T.to(dtype), draw(N, C).to(dtype), draw(N, k)
    X, W = rows.double().requires_grad_(), weights.double().requires_grad_()
    y, plain = ((X[order.rows] * order.mask(w)[..., None]).sum(1) for w in (W, torch.ones_like(W)))
    dX, dW = torch.autograd.grad(y, (X, W), dy.double())
    drows, dweights = combine_backward(dy, rows, order.row_index(), weights, order.kept is None)
    _check_close("y", combine(rows, order.row_index(), weights), y, (X.abs()[order.rows] * W.abs()[..., None]).sum(1))
    _check_close("without weights", combine(rows, order.row_index(), None), plain, X.abs()[order.rows].sum(1))
    _check_close("drows", drows, dX, dX.abs() + 0.02)  # float16 has no smaller step than 6e-8
    _check_close("dweights", dweights, dW, (X[order.rows] * dy.double()[:, None]).abs().sum(-1))


# Rows of each group, channels of the input and of the output.
GROUPED = ([5, 0, 130, 1], 24, 40), ([7], 130, 9), ([0, 0, 3], 1, 3), ([0, 0], 16, 16), ([128, 128], 64, 32)


def check_grouped_mm(case: tuple[list[int], int, int], dtype: torch.dtype | None, device: str) -> None:
    """Check the outputs and the gradients of a product, in FP8 if ``dtype`` is None, whose sums Hopper rounds."""
    counts, K, N = case
    draw, ends = _seeded_randn(device), torch.tensor(counts, device=device).cumsum(0).int()
    x, w, dy = (draw(*shape).to(dtype or FP32) for shape in ((sum(counts), K), (len(counts), N, K), (sum(counts), N)))
    scale = None
    if dtype is None:
        scale = torch.full((), 0.25, device=device)
        x, w, dy = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), dy.to(torch.float8_e5m2)
    for number, (a, b) in enumerate(((x, w.mT), (dy, w), (dy.T, x))):
        actual = grouped_mm(a, b, ends, dtype or BF16, scale)
        expected, terms = (reference(f(a.double()), f(b.double()), ends, torch.float64, scale) for f in (Tensor.clone, abs))
        _check_close(f"product {number}", actual, expected, 64 * terms if dtype is None else terms)


# Sources, destinations, edges, heads, channels, and whether a row is that of all heads.
GRAPHS = (
    (9, 7, 60, 4, 24, True), (9, 7, 60, 4, 24, False), (30, 5, 200, 3, 70, False), (5, 40, 30, 1, 3, True), (6, 4, 0, 2, 8, False),
    (8, 3, 9, 2, 2100, True), (0, 3, 0, 2, 8, True), (4, 0, 0, 2, 8, False),
)  # fmt: skip


def check_graph_attention(case: tuple[int, int, int, int, int, bool], dtype: torch.dtype, device: str) -> None:
    """Check sums over edges with isolated nodes and pairs twice, and their gradients."""
    N, M, E, H, C, shared = case
    draw = _seeded_randn(device)
    ends = [(draw(E).sigmoid() * count).long().clamp(max=max(count - 1, 0)) for count in (N, M)]
    edges = torch.stack((ends[0], ends[1].sort().values))
    inputs = 3 * draw(N, H), 3 * draw(M, H), (draw(N, C) if shared else draw(N, H, C)).to(dtype)
    leaves, wide = ([x.to(d or x.dtype).requires_grad_() for x in inputs] for d in (None, torch.float64))
    out, expected = GraphAttention.apply(*leaves, edges, 0.2), graph.reference(*wide, edges, 0.2)
    dout = draw(*out.shape).to(dtype)
    terms = graph.reference(inputs[0].double(), inputs[1].double(), inputs[2].double().abs(), edges, 0.2)
    _check_close("out", out.detach(), expected.detach(), terms)
    actual, known = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, wide, dout.double())
    rounding = ULP[dtype] * (1 + max(int(edges[1].bincount().max()) if E else 0, 1))  # of out, from which the gradient is computed
    for name, own, other in zip(("source score", "destination score", "x"), actual, known):
        _check_close(name, own, other, other.abs() + (rounding / 4e-6 if name != "x" else 1) * (C**0.5) * 4)


# Query heads, KV heads, channels, tokens of a block, blocks of a table; window, soft cap, whether there are sinks.
PAGED = (
    (4, 2, 64, 16, 9, None, None, False), (8, 1, 96, 7, 30, 33, None, True), (3, 3, 80, 32, 5, None, 20.0, False),
    (2, 2, 192, 16, 12, 500, None, False), (70, 1, 24, 1, 40, 1, 5.0, True), (4, 4, 8, 32, 33, None, None, True),
)  # fmt: skip


def check_paged_attention(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    """Check queries of several texts, of which two lie next to each other in one text, and padding rows."""
    H, K, D, P, M, window, softcap, has_sinks = case
    draw, last = _seeded_randn(device), P * M - 1
    positions = torch.tensor([0, last - 1, last, -1, last // 2, P - 1, -1], device=device)
    pools = [draw(3 * M + 2, K, P, D).to(dtype) for _ in range(2)]
    tables = draw(5, 3 * M + 2).argsort(1)[:, :M][[0, 1, 1, 2, 3, 4, 4]]
    q, sinks = draw(H, 7, D).to(dtype).transpose(0, 1), draw(H) if has_sinks else None
    actual = paged_attention(q, *pools, tables.int() if has_sinks else tables, positions, window, softcap, sinks)
    Q, X, Y = (x.double() for x in (q, *pools))
    expected, terms = (paged.reference(Q, X, f(Y), tables, positions, window, softcap, sinks) for f in (Tensor.clone, abs))
    assert not actual[positions < 0].any()
    _check_close("y", actual, expected, (2 if dtype == FP32 else 2 * ULP[dtype] / 4e-6) * terms)  # weights are of ``dtype``


MATRICES = (37, 24), (128, 64), (1, 1), (150, 80), (16, 5), (129, 65)


def check_quantize(shape: tuple[int, int], dtype: torch.dtype, x_dtype: torch.dtype, device: str) -> None:
    """Check that a matrix with elements of all magnitudes is quantized bitwise as by the reference."""
    draw = _seeded_randn(device)
    x = (draw(*shape) * (4 * draw(*shape)).exp()).to(x_dtype)
    x[-1, -1] = 2 * x.abs().max()  # in the last tile
    for matrix in (x, x * 2.0**-110, x * 2.0**90, draw(*shape[::-1]).to(x_dtype).t()):
        _check_reference(matrix, dtype)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[-1, -1] = bad
        rows, columns, scale = float8_triton.quantize(x, dtype, True, True, None)
        assert scale.isnan() and rows.double().isnan().all() and columns[:, : len(x)].double().isnan().all(), bad


def check_scales(device: str) -> None:
    """Check the scales at the ends of float32's range, and around the maxima where the scale changes."""
    for dtype in MAX_EXPONENT:
        for amax in (0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-118, 448.0, 448.00003, 57344.0, 57344.004, 1.0, 1.7499999, 3.3e38):
            _check_reference(torch.full((1, 16), amax, device=device), dtype, forms=1)
            _check_reference(torch.full((1, 16), -amax, device=device).bfloat16(), dtype, forms=1)


def _check_reference(x: Tensor, dtype: torch.dtype, forms: int = 4) -> None:
    expected = float8.reference(x, dtype, True, True, None)
    fixed = expected.scale
    for rows, columns, scale in ((True, True, None), (True, False, fixed), (False, True, None), (True, True, fixed))[:forms]:
        actual = float8_triton.quantize(x, dtype, rows, columns, scale)
        for out, ref, present in zip(actual, expected, (rows, columns, True), strict=True):
            assert (out is not None) is present
            if present:
                assert out.is_contiguous() and out.shape == ref.shape and out.dtype == ref.dtype
                assert torch.equal(out.flatten().view(torch.uint8), ref.flatten().view(torch.uint8)), (x.shape, x.dtype, dtype)
