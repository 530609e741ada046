"""Basis functions of distance and direction: spherical Bessel functions with an envelope, and real spherical harmonics.

Gasteiger, Gross and Guennemann, ICLR 2020, section 5.   E edges, L orders, R radial functions of each order.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcai.dynamo import needs_plain_derivatives

# ---- Bessel functions


def _bessel(x: Any, orders: int, sin: Any, cos: Any) -> list[Any]:
    """Return j_0(x) ... j_(orders-1)(x) by the upward recurrence: in float64 good to 1e-9 for x >= 0.5 and orders up to 7."""
    values = [sin(x) / x]
    if orders > 1:
        values.append((values[0] - cos(x)) / x)
    for n in range(1, orders - 1):
        values.append((2 * n + 1) / x * values[n] - values[n - 1])
    return values


@lru_cache
def spherical_bessel_zeros(orders: int, count: int) -> NDArray[np.float64]:
    """Return the first ``count`` positive zeros of j_0 ... j_(orders-1).   [L, R]

    Between two neighbouring zeros of one order lies one of the next, found by bisection.
    """
    rows = [np.arange(1, count + orders) * np.pi]
    for order in range(1, orders):
        low, high = rows[-1][:-1].copy(), rows[-1][1:].copy()
        rising = _bessel(low, order + 1, np.sin, np.cos)[order] < 0
        for _ in range(60):
            middle = (low + high) / 2
            left = (_bessel(middle, order + 1, np.sin, np.cos)[order] < 0) == rising
            low, high = np.where(left, middle, low), np.where(left, high, middle)
        rows.append((low + high) / 2)
    return np.stack([row[:count] for row in rows])


def envelope(x: Tensor, exponent: int, order: int = 0) -> Tensor:
    """Return 1/x + a x^(p-1) + b x^p + c x^(p+1) with p = ``exponent`` + 1, or its derivative of ``order``. The function and its
    first two derivatives are 0 at x = 1; beyond, it is 0."""
    p = exponent + 1
    a, b, c = -(p + 1) * (p + 2) / 2, p * (p + 2), -p * (p + 1) / 2
    y = (-1) ** order * math.factorial(order) / x ** (order + 1)
    for factor, power in ((a, p - 1), (b, p), (c, p + 1)):
        y = y + factor * math.perm(power, order) * x ** max(power - order, 0)
    return torch.where(x < 1, y, 0.0)


class SphericalBessel(nn.Module):
    """j_l(z_ln d/c) with the envelope, normalised in the sphere of radius c.   d [E] -> [E, L * R]

    Computed in float64, with derivatives in closed form: in float32 the recurrence for j_6 is off by 2e-4 at 1.1 angstrom.
    """

    z: Tensor  # [L, R]
    norm: Tensor  # [L, R]

    def __init__(self, orders: int, count: int, cutoff: float, exponent: int) -> None:
        super().__init__()
        self.cutoff, self.exponent = cutoff, exponent
        z = spherical_bessel_zeros(orders, count)
        norm = [math.sqrt(2) / np.abs(_bessel(z[n], n + 2, np.sin, np.cos)[n + 1]) for n in range(orders)]
        self._float64_buffers = {"z": torch.from_numpy(z), "norm": torch.from_numpy(np.stack(norm))}
        for name, values in self._float64_buffers.items():
            self.register_buffer(name, values, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "SphericalBessel":
        """Keep the constants in float64 when the model is cast to a lower precision."""
        super()._apply(fn, recurse)
        for name, values in self._float64_buffers.items():
            self._buffers[name] = values.to(getattr(self, name).device)
        return self

    def forward(self, d: Tensor) -> Tensor:
        args = d, self.z, self.norm, self.cutoff, self.exponent, 0
        return radial_functions(*args) if needs_plain_derivatives() else _RadialFunctions.apply(*args)


def radial_functions(d: Tensor, z: Tensor, norm: Tensor, cutoff: float, exponent: int, order: int = 0) -> Tensor:
    """Return the radial functions, or their derivatives of ``order`` with respect to d.   [E] -> [E, L * R]"""
    x = (d.double() / cutoff)[:, None]
    envelopes = [envelope(x, exponent, k) / cutoff**order * math.comb(order, k) for k in range(order + 1)]
    rows = []
    for n in range(len(z)):
        y = x * z[n]
        j = _bessel(y, n + (2 if order else 1), torch.sin, torch.cos)
        row = envelopes[order] * j[n]
        if order:
            derivative = n / y * j[n] - j[n + 1]
            row = row + envelopes[order - 1] * z[n] * derivative
            if order == 2:
                row = row + envelopes[0] * z[n] ** 2 * ((n * (n + 1) / y**2 - 1) * j[n] - 2 / y * derivative)
        rows.append(row * norm[n])
    return torch.cat(rows, 1).to(d.dtype)


class _RadialFunctions(torch.autograd.Function):
    """``radial_functions`` with the next derivative as its gradient. It is wrong, and not used, under torch.compile."""

    forward = staticmethod(radial_functions)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.words = inputs[3:]
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (d, z, norm), (cutoff, exponent, order) = ctx.saved_tensors, ctx.words
        if order == 2:
            raise NotImplementedError("third derivatives of the radial functions are not implemented")
        return (grad_output * _RadialFunctions.apply(d, z, norm, cutoff, exponent, order + 1)).sum(1), None, None, None, None, None


# ---- harmonics


def spherical_harmonics(u: Tensor, orders: int) -> Tensor:
    """Return real spherical harmonics of unit vectors, ordered by l.   [E, 3] -> [E, L * L]

    They are scaled so that the sum over m of Y_lm(u) Y_lm(v) is the Legendre polynomial P_l(u.v) (addition theorem), and computed
    as polynomials in x, y and z by the recurrences of the associated Legendre functions: smooth also at the poles.
    """
    x, y, z = u.unbind(-1)
    ones = torch.ones_like(x)
    real, imaginary = [ones], [torch.zeros_like(x)]  # (x + iy)^m
    for m in range(1, orders):
        real.append(x * real[m - 1] - y * imaginary[m - 1])
        imaginary.append(x * imaginary[m - 1] + y * real[m - 1])
    legendre: dict[tuple[int, int], Tensor] = {}
    for m in range(orders):
        legendre[m, m] = ones * math.prod(range(1, 2 * m, 2))
        if m + 1 < orders:
            legendre[m + 1, m] = (2 * m + 1) * z * legendre[m, m]
        for n in range(m + 2, orders):
            legendre[n, m] = ((2 * n - 1) * z * legendre[n - 1, m] - (n + m - 1) * legendre[n - 2, m]) / (n - m)
    columns = []
    for n in range(orders):
        for m in range(-n, n + 1):
            k = abs(m)
            factor = math.sqrt((2.0 if k else 1.0) * math.factorial(n - k) / math.factorial(n + k))
            columns.append(factor * legendre[n, k] * (imaginary[k] if m < 0 else real[k]))
    return torch.stack(columns, -1)


def angular_factor(order: Tensor) -> Tensor:
    """Return the factor in Y_l0(angle) = factor * P_l(cos angle)."""
    return ((2 * order + 1) / (4 * math.pi)).sqrt()
