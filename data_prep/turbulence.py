"""Two-dimensional turbulence: the incompressible Navier-Stokes equations on a periodic square of side 2 pi, for their vorticity w.

    dw/dt + u dw/dx + v dw/dy = forcing - drag w + viscosity laplace(w)

Pseudo-spectral with 2/3 dealiasing (Orszag 1971); viscosity and drag are integrated exactly, advection by fourth-order Runge-Kutta.
The forcing is white noise in time at the wavenumbers of ``RING``, which injects enstrophy at a rate of 1. Drag takes the energy
that flows to large scales, viscosity the enstrophy that flows to small ones, so that all statistics become steady.

K cells of the square along a side, k wavenumbers [K, K/3 + 1] of a real field, those of y first"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Spectrum = NDArray[np.complex128]

RING = 3.0, 5.0                 # wavenumbers of the forcing, in radians per unit of length
DRAG = 0.1
DISSIPATION = 0.5               # viscosity in units of 1 / (largest wavenumber)^2
COURANT = 2.6                   # dt k (|u| + |v|) at most: RK4 is stable to 2.8
SPIN_UP = 10.0, 1.5             # time on a grid of half the cells, then on the full one
NOISE = 12                      # cells a side of a grid that holds the wavenumbers of the forcing
_Y = np.fft.fftfreq(NOISE, 1 / NOISE).astype(int)[:, None]
_FORCED = np.abs(np.hypot(_Y, _Y.T) - sum(RING) / 2) <= (RING[1] - RING[0]) / 2


class Flow:
    """The equations on a grid of ``cells`` a side. Arrays are reused: allocating them takes longer than the transforms."""

    def __init__(self, cells: int, viscosity: float, drag: float) -> None:
        self.cells, self.highest = cells, (cells - 1) // 3
        x, y = np.arange(self.highest + 1.0), np.fft.fftfreq(cells, 1 / cells)[:, None]
        k2, modes = x**2 + y**2, np.abs(y) <= self.highest
        self.rates = viscosity * k2 + drag
        self._velocity = 1j * modes * np.stack(np.broadcast_arrays(y, -x)) / np.maximum(k2, 1)     # from w to (u, v)
        self._advection = modes * np.stack((x**2 - y**2, x * y))    # from (u v, v^2 - u^2) to that of w: Basdevant 1983
        self._waves, self._half = (np.empty((2, cells, n), complex) for n in (self.highest + 1, cells // 2 + 1))
        self._cells = np.empty((2, 2, cells, cells))             # (u, v) and their products

    def to_cells(self, w: Spectrum) -> Array:
        return np.fft.irfft(np.fft.ifft(w, axis=0), self.cells)

    def advect(self, w: Spectrum) -> Spectrum:
        """Return -(u dw/dx + v dw/dy).   [*k]"""
        waves, ((u, v), products) = self._waves, self._cells
        np.fft.ifft(np.multiply(self._velocity, w, out=waves), axis=1, out=waves)
        np.fft.irfft(waves, self.cells, out=self._cells[0])
        np.multiply(u, v, out=products[0])
        np.multiply(v - u, v + u, out=products[1])
        np.fft.fft(np.fft.rfft(products, out=self._half)[..., : self.highest + 1], axis=1, out=waves)
        waves *= self._advection
        return waves[0] + waves[1]

    def step(self, w: Spectrum, dt: float) -> Spectrum:
        """Return the vorticity after a step without forcing.   [*k]"""
        half = np.exp(-self.rates * dt / 2)
        a = self.advect(w)
        b = self.advect(half * (w + dt / 2 * a))
        c = self.advect(half * w + dt / 2 * b)
        d = self.advect(half * (half * w + dt * c))
        return half * (half * (w + dt / 6 * a) + dt / 3 * (b + c)) + dt / 6 * d

    def advance(self, w: Spectrum, time: float, random: np.random.Generator) -> Spectrum:
        """Return the vorticity after some time with forcing.   [*k]"""
        self.advect(w)
        while time > 0:
            speed = max(float(np.abs(self._cells[0]).sum(0).max()), 1.0)
            dt = time / math.ceil(time * self.highest * speed / COURANT)
            noise = np.fft.rfft2(random.standard_normal((NOISE, NOISE)))[:, :-1] * _FORCED[:, : NOISE // 2]
            w = self.step(w, dt)
            w[_Y[:, 0], : NOISE // 2] += self.cells**2 / NOISE * math.sqrt(2 * dt / _FORCED.sum()) * noise
            time -= dt
        return w


def simulate(cells: int, frames: int, interval: float, random: np.random.Generator) -> Array:
    """Return frames of steady turbulence, ``interval`` apart.   [frames, K, K]"""
    w, small = np.zeros((1, 1), complex), 1
    for size, time in zip((cells // 2, cells), SPIN_UP):
        flow = Flow(size, DISSIPATION / ((size - 1) // 3) ** 2, DRAG)
        start = np.zeros_like(flow.rates, complex)
        start[np.fft.fftfreq(small, 1 / small).astype(int), : w.shape[1]] = w * (size / small) ** 2
        w, small = flow.advance(start, time, random), size
    values = [flow.to_cells(w)]
    while len(values) < frames:
        w = flow.advance(w, interval, random)
        values.append(flow.to_cells(w))
    return np.array(values)
