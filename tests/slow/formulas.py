"""What the Triton kernels of norms, gates, activations and rotations must be, from float64, on a GPU or in Triton's interpreter;
those of matrices in 8 bits must have the bits of their twin.

``norm(case, x, y, device)`` and ``gates(case, kind, device)`` raise AssertionError; the cases are keys of ``NORMS`` and ``GATES``,
``KINDS`` the dtypes of a norm's input and result. They call the kernels themselves, not what chooses them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcai.kernels import activations_triton, float8, float8_triton, gates_triton, layernorm_triton, rmsnorm_triton, rotary_triton
from hpcai.kernels.float8_formats import MAX_EXPONENT

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}  # the interpreter truncates to bfloat16
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = (BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)


def _first(*shape: int) -> Callable[[Tensor], Tensor]:
    """[B, C, I, J] as [B, I, J, C]"""
    return lambda values: values.view(shape).movedim(1, -1)


# Of values that are made in one piece: how many, and how the kernel is given them.
NORMS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "rows of 128": (3 * 33 * 128, lambda v: v.view(3, 33, 128)),
    "rows of 64, as many as fill tiles": (128 * 64, lambda v: v.view(128, 64)),
    "rows of 384": (5 * 384, lambda v: v.view(1, 5, 384)),
    "rows of 256": (2 * 19 * 256, lambda v: v.view(2, 19, 256)),
    "rows of 1024": (9 * 1024, lambda v: v.view(9, 1024)),
    "rows of 23": (37 * 23, lambda v: v.view(37, 23)),
    "rows of 1": (70, lambda v: v.view(70, 1)),
    "one row of 2": (2, lambda v: v),
    "no row": (0, lambda v: v.view(0, 4, 16)),
    "a part of rows": (3 * 21 * 96, lambda v: v.view(3, 21, 96)[..., :40]),
    "a part of rows, one value further": (40 * 65, lambda v: v.view(40, 65)[:, 1:]),
    "the first of several": (3 * 4 * 11 * 32, lambda v: v.view(3, 4, 11, 32)[:, 0]),
    "rows again and again": (9 * 48, lambda v: v.view(9, 48).expand(5, 9, 48)),
    "channels first": (2 * 128 * 8 * 16, _first(2, 128, 8, 16)),
    "channels first of one": (64 * 12 * 12, _first(1, 64, 12, 12)),
    "channels first in odd pictures": (2 * 40 * 7 * 5, _first(2, 40, 7, 5)),
    "some rows of channels first": (2 * 32 * 9 * 8, lambda v: v.view(2, 32, 9, 8)[:, :, 2:6].permute(0, 2, 3, 1)),
    "some channels of channels first": (2 * 80 * 8 * 8, lambda v: v.view(2, 80, 8, 8)[:, 8:48].permute(0, 2, 3, 1)),
    "turned": (3 * 5 * 6 * 16, lambda v: v.view(3, 5, 6, 16).transpose(1, 2)),
    "turned channels first": (2 * 16 * 5 * 6, lambda v: v.view(2, 16, 5, 6).permute(0, 3, 2, 1)),
    "every second": (6 * 20 * 2, lambda v: v.view(6, 20, 2)[..., 0]),
}
# Those whose gradient lies as they do, without gaps; that of others is contiguous.
DENSE = {name for name in NORMS if "channels first" in name and "turned" not in name}


def _near(name: str, found: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Within rounding of ``terms``, the sizes of what is added up, and of the result itself."""
    over = (found.double() - expected).abs() - 4e-6 * terms - ULP[found.dtype] * expected.abs()
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    assert (over <= 0).all(), (name, float(over.max()))  # a NaN is not below


def _draw(device: str) -> Callable[..., Tensor]:
    draw = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(shape, device=device, generator=draw)


def norm(case: str, x: torch.dtype, y: torch.dtype, device: str, away: float = 0.3) -> None:
    """Of values whose mean is ``away`` deviations from 0."""
    count, lay = NORMS[case]
    draw = _draw(device)
    given = lay((3 * (draw(count) + away)).to(x))
    channels = given.shape[-1]
    weight, bias, dy = draw(channels), draw(channels), draw(*given.shape).to(y)

    def learnt(given: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (given, weight, bias)]
        out = layernorm_triton.layer_norm(leaves[0], leaves[1], leaves[2], 1e-5, y)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    found = learnt(given)
    assert all(torch.equal(one, other) for one, other in zip(found, learnt(given))), "the same bits twice"
    out, dx, by_weight, by_bias = found
    assert out.dtype == y and out.is_contiguous() and dx.dtype == x
    assert dx.stride() == torch.empty_like(given).stride() if case in DENSE else dx.is_contiguous()
    with torch.no_grad():
        assert torch.equal(layernorm_triton.layer_norm(given, weight, bias, 1e-5, y), out), "nothing kept, the same result"
    X, W, B, D = (t.double() for t in (given, weight, bias, dy))
    rstd = (X.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    N, G = (X - X.mean(-1, keepdim=True)) * rstd, D * W
    _near("y", out, W * N + B, W.abs() * (N.abs() + 1) + B.abs())
    mean, along = G.mean(-1, keepdim=True), (G * N).mean(-1, keepdim=True)
    sizes = G.abs() + G.abs().mean(-1, keepdim=True) + N.abs() * (G * N).abs().mean(-1, keepdim=True)
    _near("dx", dx, rstd * (G - mean - N * along), rstd * sizes)
    N, D = N.reshape(-1, channels), D.view(-1, channels)
    _near("by weight", by_weight, (D * N).sum(0), (D.abs() * (N.abs() + 1)).sum(0))
    _near("by bias", by_bias, D.sum(0), D.abs().sum(0))


def norm_of_bad_rows(device: str) -> None:
    """What is not finite stays in its row, whether channels come last or first."""
    draw = _draw(device)
    for given, rows in ((draw(40, 32), ((3,), (7,))), (draw(2, 32, 8, 8).movedim(1, -1), ((0, 0, 3), (1, 2, 7)))):
        weight, bias, dy = draw(32), draw(32), draw(*given.shape)
        bad, found = torch.zeros(given.shape[:-1], dtype=torch.bool, device=device), []
        for values in ((), (torch.nan, torch.inf)):
            x = given.clone()
            for row, value in zip(rows, values):
                x[row][5], bad[row] = value, True
            x.requires_grad_()
            y = layernorm_triton.layer_norm(x, weight, bias, 1e-5, FP32)
            found.append((y.detach(), *torch.autograd.grad(y, x, dy)))
        for clean, spoilt in zip(*found):
            assert spoilt[bad].isnan().all() and torch.equal(spoilt[~bad], clean[~bad])


def _halves(mask: Callable[[Tensor], Tensor], *shape: int) -> Callable[[Callable[..., Tensor]], Any]:
    """Projections and gates of pairs as one product with channels first, and the mask of the pairs."""
    return lambda draw: (*draw(*shape).chunk(2, 1), mask(draw(shape[0], *shape[2:])))


# x, g and the mask, of what is drawn.
GATES: dict[str, Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor, Tensor | None]]] = {
    "triangles": _halves(lambda m: m[:, None], 2, 16, 24, 40),
    "triangles, incoming": _halves(lambda m: m.transpose(1, 2)[:, None], 2, 16, 24, 24),
    "triangles in one protein": _halves(lambda m: m[:, None], 1, 16, 72, 64),
    "odd triangles": _halves(lambda m: m[:, None], 2, 6, 7, 9),
    "channels last": lambda draw: (draw(3, 37, 128), draw(3, 37, 128), None),
    "odd channels last": lambda draw: (draw(5, 7, 11), draw(5, 7, 11), None),
    "one mask for a row": lambda draw: (draw(5, 40, 24), draw(5, 40, 24), draw(5, 40, 1)),
    "one mask for a column": lambda draw: (draw(50, 24), draw(50, 24), draw(24)),
    "a mask of other dims": lambda draw: (draw(3, 4, 5, 6), draw(3, 4, 5, 6), draw(3, 1, 5, 1)),
    "turned": lambda draw: (draw(4, 9, 16).transpose(0, 1), draw(9, 4, 16), draw(9, 1, 16)),
    "both turned": lambda draw: (draw(4, 9, 5).transpose(0, 2), draw(4, 9, 5).transpose(0, 2), None),
    "again and again": lambda draw: (draw(1, 6, 8).expand(5, 6, 8), draw(5, 6, 8), draw(1, 1, 1)),
    "two halves of rows": lambda draw: (*draw(19, 80).chunk(2, 1), None),
    "one number": lambda draw: (draw(1)[0], draw(1)[0], draw(1)[0]),
    "nothing": lambda draw: (draw(0, 8), draw(0, 8), None),
}


def gates(case: str, kind: torch.dtype, device: str) -> None:
    draw = _draw(device)
    x, g, mask = GATES[case](lambda *shape: 3 * draw(*shape).to(kind))
    mask = None if mask is None else (mask > 0).float() * 1.5
    dy = draw(*x.shape).to(kind)

    def learnt() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, g)]
        out = gates_triton.gate(leaves[0], leaves[1], mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    found = learnt()
    assert all(torch.equal(one, other) for one, other in zip(found, learnt())), "the same bits twice"
    assert all(t.is_contiguous() and t.dtype == kind for t in found)
    X, S, D = x.double(), g.double().sigmoid(), dy.double()
    M = torch.ones_like(X) if mask is None else mask.double()
    for name, ours, theirs in zip(("y", "dx", "dg"), found, (X * S * M, D * S * M, D * X * M * S * (1 - S))):
        _near(name, ours, theirs, theirs.abs() + (D * X * M * S).abs() * (name == "dg"))


def halves(kind: torch.dtype, device: str) -> None:
    """A gate of halves has the bits of a gate, and its gradient lies as what it was given."""
    draw = _draw(device)
    for shape, masked in (((2, 10, 6, 8), True), ((1, 32, 5, 7), True), ((3, 4, 9), False)):
        xg, dy = draw(*shape).to(kind).requires_grad_(), draw(shape[0], shape[1] // 2, *shape[2:]).to(kind)
        mask = (draw(shape[0], 1, *shape[2:]) > 0).float() if masked else None
        x, g = (part.detach().requires_grad_() for part in xg.chunk(2, 1))
        out, expected = gates_triton.glu_halves(xg, mask), gates_triton.gate(x, g, mask)
        assert out.is_contiguous() and torch.equal(out, expected)
        (found,) = torch.autograd.grad(out, xg, dy)
        assert found.is_contiguous() and torch.equal(found, torch.cat(torch.autograd.grad(expected, (x, g), dy), 1))


ROOTS = (3, 33, 128), (128, 64), (5, 384), (2, 19, 23), (70, 1), (2,), (0, 16), (3, 8192), (9, 5120)


def root(shape: tuple[int, ...], x: torch.dtype, y: torch.dtype, device: str, learns: bool = True) -> None:
    """A norm by the root of the mean square, of a weight that is learnt or not."""
    draw = _draw(device)
    given, weight, dy = (3 * draw(*shape)).to(x), draw(shape[-1]), draw(*shape).to(y)

    def learnt() -> list[Tensor]:
        leaves = [given.detach().requires_grad_(), weight.detach().requires_grad_(learns)]
        out = rmsnorm_triton.rms_norm(*leaves, 1e-5, y)
        return [out.detach(), *torch.autograd.grad(out, leaves[: 1 + learns], dy)]

    found = learnt()
    assert all(torch.equal(one, other) for one, other in zip(found, learnt(), strict=True)), "the same bits twice"
    out, dx, *by_weight = found
    assert out.dtype == y and dx.dtype == x and out.is_contiguous() and dx.is_contiguous()
    with torch.no_grad():
        assert torch.equal(rmsnorm_triton.rms_norm(given, weight, 1e-5, y), out), "nothing kept, the same result"
    X, W, D = (t.double() for t in (given, weight, dy))
    rstd = (X.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    N, G = X * rstd, D * W
    _near("y", out, W * N, (W * N).abs())
    sizes = G.abs() + N.abs() * (G * N).abs().mean(-1, keepdim=True)
    _near("dx", dx, rstd * (G - N * (G * N).mean(-1, keepdim=True)), rstd * sizes)
    if learns:
        N, D = N.reshape(-1, shape[-1]), D.view(-1, shape[-1])
        _near("by weight", by_weight[0], (D * N).sum(0), (D * N).abs().sum(0))


def swiglu(shape: tuple[int, ...], kind: torch.dtype, device: str) -> None:
    draw = _draw(device)
    g, x, dy = (3 * draw(*shape).to(kind) for _ in range(3))
    leaves = [t.requires_grad_() for t in (g, x)]
    out = activations_triton.swiglu(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, dy)]
    assert all(t.is_contiguous() and t.dtype == kind for t in found)
    X, G, D = (t.detach().double() for t in (x, g, dy))
    S = G.sigmoid()
    for name, ours, theirs in zip(("y", "dg", "dx"), found, (X * G * S, D * X * S * (1 + G * (1 - S)), D * G * S)):
        _near(name, ours, theirs, theirs.abs() + (D * X * S * (1 + G.abs())).abs() * (name == "dg"))


# B texts, H heads of queries and of keys, T tokens, D channels; whether the heads of a token are beside each other.
TURNS = (2, 4, 2, 37, 16, True), (1, 3, 3, 70, 64, False), (3, 2, 1, 1, 6, True), (2, 1, 1, 129, 128, True), (1, 2, 1, 9, 2, False)


def rotation(
    case: tuple[int, int, int, int, int, bool], kind: torch.dtype, of: torch.dtype, each: bool, device: str,
    neighbours: bool = False,
) -> None:  # fmt: skip
    """Angles in ``of``, of ``each`` text or the same for all; the gradient is turned back."""
    B, Q, K, T, D, beside = case
    draw = _draw(device)

    def heads(count: int) -> Tensor:
        return draw(B, T, count, D).transpose(1, 2).to(kind) if beside else draw(B, count, T, D).to(kind)

    q, k, dq, dk = heads(Q), heads(K), heads(Q), heads(K)
    angle = draw(B if each else 1, T, D // 2).repeat(1, 1, 2)
    cosines, sines = angle.cos().to(of), angle.sin().to(of)
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    out = rotary_triton.apply_rotary(*leaves, cosines, sines, neighbours)
    gradients = torch.autograd.grad(out, leaves, (dq, dk))
    C, S = cosines.double()[:, None], sines.double()[:, None]
    for given, found, sign in ((q, out[0], 1), (k, out[1], 1), (dq, gradients[0], -1), (dk, gradients[1], -1)):
        assert found.dtype == kind and found.transpose(1, 2).is_contiguous()
        if neighbours:  # then halves, as they were told in the other form
            given, found = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (given, found))
        first, second = given.double().chunk(2, -1)
        crossed = torch.cat((-second, first), -1)
        _near("turned", found.detach(), given.double() * C + sign * crossed * S, (given.double() * C).abs() + (crossed * S).abs())


MATRICES = (37, 24), (128, 64), (1, 1), (150, 80), (16, 5), (129, 65)


def quantize(shape: tuple[int, int], dtype: torch.dtype, kind: torch.dtype, device: str) -> None:
    """A matrix in 8 bits, bit for bit as the twin makes it, of numbers of all sizes."""
    draw = _draw(device)
    x = (draw(*shape) * (4 * draw(*shape)).exp()).to(kind)
    x[-1, -1] = 2 * x.abs().max()  # which the last tile has
    for given in (x, x * 2.0**-110, x * 2.0**90, draw(*shape[::-1]).to(kind).t()):
        _is_twin(given, dtype)
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[-1, -1] = bad
        rows, columns, scale = float8_triton.quantize(x, dtype, True, True, None)
        assert scale.isnan() and rows.double().isnan().all() and columns[:, : len(x)].double().isnan().all(), bad


def scales(device: str) -> None:
    """At the ends of float32, and where one scale gives way to the next."""
    for dtype in MAX_EXPONENT:
        for most in (0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-118, 448.0, 448.0001, 57344.0, 57345.0, 1.0, 1.7499999, 3.3e38):
            _is_twin(torch.full((1, 16), most, device=device), dtype)
            _is_twin(torch.full((1, 16), -most, device=device).bfloat16(), dtype)


def _is_twin(x: Tensor, dtype: torch.dtype) -> None:
    expected = float8.reference(x, dtype, True, True, None)
    known = expected.scale
    for rows, columns, scale in ((True, True, None), (True, False, known), (False, True, None), (True, True, known)):
        found = float8_triton.quantize(x, dtype, rows, columns, scale)
        for ours, theirs, wanted in zip(found, expected, (rows, columns, True), strict=True):
            assert (ours is not None) is wanted
            if wanted:
                assert ours.is_contiguous() and ours.shape == theirs.shape and ours.dtype == theirs.dtype
                assert torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)), (x.shape, x.dtype, dtype)
