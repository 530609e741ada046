"""Light of galaxies on a grid of pixels: profiles, spiral arms, bars, rings, edge-on discs with dust, encounters of two discs.

A map is the fraction of the light of a component in each pixel; without structure its sum over an infinite grid is 1.

P pixels per side of a grid   lengths in arcsec, angles in radians   R, phi polar coordinates in the plane of a disc"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Point = tuple[float, float]

CORE, FINE = 5, 9                               # pixels around a centre, and points per side of each, where a profile is a cusp
SOFTENING = 0.25                                # of the potentials of an encounter, in pericentres
DUST = np.array((1.43, 1.0, 0.74), np.float32)  # extinction in g, r, i relative to r (Cardelli et al. 1989, R_V = 3.1)


@dataclass(frozen=True)
class Grid:
    """Square pixels of width ``step`` around the origin."""

    side: int
    step: float

    @cached_property
    def axis(self) -> Array:
        return ((np.arange(self.side) - (self.side - 1) / 2) * self.step).astype(np.float32)

    def add_points(self, points: Array, weights: Array | float) -> Array:
        """Return a map of point sources, each spread over four pixels.   Shape: points [n, 2] (x, y)"""
        at = points / self.step + (self.side - 1) / 2
        low = np.floor(at).astype(int)
        part, result = at - low, np.zeros((self.side + 1) ** 2)
        for x, y in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = weights * np.abs(1 - x - part[:, 0]) * np.abs(1 - y - part[:, 1])
            column, row = low[:, 0] + x, low[:, 1] + y
            inside = (np.minimum(column, row) >= 0) & (np.maximum(column, row) < self.side)
            index = np.where(inside, row * (self.side + 1) + column, self.side)     # a cell beyond the last column
            result += np.bincount(index, share, len(result))
        return result.reshape(self.side + 1, -1)[:-1, :-1].astype(np.float32)


@dataclass(frozen=True)
class Plane:
    """Coordinates of an ellipse or an inclined disc: its centre, position angle of its major axis, and axis ratio."""

    grid: Grid
    centre: Point = (0.0, 0.0)
    angle: float = 0.0
    ratio: float = 1.0

    def project(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return coordinates along the major axis, and along the minor axis divided by the axis ratio."""
        cosine, sine = math.cos(self.angle), math.sin(self.angle)
        x, y = x - self.centre[0], y - self.centre[1]
        return cosine * x + sine * y, (cosine * y - sine * x) / self.ratio

    def to_sky(self, points: Array) -> Array:
        """Return the positions (x, y) of points of the plane.   Shape: [n, 2]"""
        cosine, sine = math.cos(self.angle), math.sin(self.angle)
        x, y = points[:, 0], points[:, 1] * self.ratio
        return np.stack((cosine * x - sine * y, sine * x + cosine * y), 1) + self.centre

    @cached_property
    def coordinates(self) -> tuple[Array, Array]:
        return self.project(self.grid.axis[None, :], self.grid.axis[:, None])

    @cached_property
    def polar(self) -> tuple[Array, Array]:
        """R, at least a quarter of a pixel, and phi."""
        x, y = self.coordinates
        return np.maximum(np.hypot(x, y), self.grid.step / 4), np.arctan2(y, x)


def axis_ratio(inclination: float, thickness: float) -> float:
    """Return the apparent axis ratio of an oblate spheroid with the axis ratio ``thickness`` (Hubble 1926)."""
    return math.hypot(math.cos(inclination), thickness * math.sin(inclination))


def sersic_b(n: float) -> float:
    """Return b with half of the light within the effective radius (Ciotti and Bertin 1999, equation 18), for n of 0.5 or more."""
    return 2 * n - 1 / 3 + 4 / (405 * n) + 46 / (25515 * n**2) + 131 / (1148175 * n**3) - 2194697 / (30690717750 * n**4)


def sersic(plane: Plane, radius: float, n: float) -> Array:
    """Return a map of exp(-b (R / radius)^(1/n)); n = 1 is an exponential disc, n = 4 de Vaucouleurs' law. ``radius`` is the
    half-light radius along the major axis."""
    grid, b = plane.grid, sersic_b(n)
    total = 2 * math.pi * n * radius**2 * plane.ratio * b ** (-2 * n) * math.gamma(2 * n)

    def profile(x: Array, y: Array) -> Array:
        return np.exp(-b * ((x * x + y * y) / radius**2) ** np.float32(0.5 / n)) * np.float32(grid.step**2 / total)

    light = profile(*plane.coordinates)
    fine = ((np.arange(FINE) + 0.5) / FINE - 0.5) * grid.step
    begin = [int(np.clip(round(x / grid.step + (grid.side - CORE) / 2), 0, grid.side - CORE)) for x in plane.centre]
    x, y = ((grid.axis[first : first + CORE, None] + fine).ravel() for first in begin)
    core = profile(*plane.project(x[None, :], y[:, None])).reshape(CORE, FINE, CORE, FINE).mean((1, 3))
    light[begin[1] : begin[1] + CORE, begin[0] : begin[0] + CORE] = core
    return light


def bar(plane: Plane, length: float, ratio: float, angle: float, boxiness: float = 3.0) -> Array:
    """Return a map of a bar in a disc: (1 - m^2)^2 (Ferrers 1877) within m = 1, a generalised ellipse (Athanassoula et al. 1990)
    of semi-axis ``length`` and exponent ``boxiness``. ``angle`` is from the line of nodes."""
    (x, y), c = plane.coordinates, boxiness
    along, across = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
    m = (np.abs(along / length) ** c + np.abs(across / (ratio * length)) ** c) ** (1 / c)
    area = 4 * ratio * length**2 * plane.ratio * math.gamma(1 + 1 / c) ** 2 / math.gamma(1 + 2 / c)
    return np.clip(1 - m * m, 0, None) ** 2 * (3 * plane.grid.step**2 / area)


def ring(plane: Plane, radius: float, width: float) -> Array:
    """Return a map of a ring in a disc, Gaussian in R with standard deviation ``width``, which is much less than ``radius``."""
    light = np.exp(-0.5 * ((plane.polar[0] - radius) / width) ** 2)
    return light * (plane.grid.step**2 / (plane.ratio * radius * width * (2 * math.pi) ** 1.5))


# ---- spiral arms


@dataclass(frozen=True)
class Arms:
    """Logarithmic spirals phi = phase + ln(R / start) / tan(pitch), from about ``start`` outwards. The profile across an arm is a
    von Mises function of concentration ``sharpness``."""

    number: int
    pitch: float                                # negative: the other sense
    phase: float
    start: float
    sharpness: float

    def crests(self, radius: Array) -> Array:
        return self.phase + np.log(radius / self.start) / math.tan(self.pitch)

    def modulation(self, plane: Plane, lag: float = 0.0) -> Array:
        """Return the factor of the light of a disc, whose mean over phi is 1. Arms that ``lag`` are nearer to the
        centre."""
        radius, phi = plane.polar
        weight = (r := (radius / self.start) ** 4) / (1 + r)
        wave = np.exp(self.sharpness * (np.cos(self.number * (phi - self.crests(radius)) - math.copysign(lag, self.pitch)) - 1))
        return 1 + weight * (wave / (float(np.i0(self.sharpness)) * math.exp(-self.sharpness)) - 1)

    def knots(self, rng: np.random.Generator, count: int, scale: float) -> Array:
        """Return positions of star-forming regions of an exponential disc, along the arms.   Shape: [count, 2]"""
        radius = np.maximum(rng.gamma(2, scale, count), 0.8 * self.start)
        phi = self.crests(radius) + (rng.integers(self.number, size=count) * 2 * math.pi + rng.normal(0, 0.5, count)) / self.number
        return np.stack((radius * np.cos(phi), radius * np.sin(phi)), 1)

    def flocculence(self, plane: Plane, rng: np.random.Generator, strength: float, waves: int = 8) -> Array:
        """Return a lognormal factor of mean about 1: short segments of spirals of the same pitch (Elmegreen 1981)."""
        radius, phi = plane.polar
        along, total = phi - self.crests(radius), np.zeros_like(radius)
        logarithm = np.log(radius / self.start)
        for m, k, theta in zip(rng.integers(2, 12, waves), rng.normal(0, 5, waves), rng.uniform(0, 2 * math.pi, waves)):
            total += np.cos(np.float32(m) * along + np.float32(k) * logarithm + np.float32(theta))
        return np.exp(strength * math.sqrt(2 / waves) * total - strength**2 / 2)


# ---- edge-on discs


def thick_disc(
    plane: Plane, inclination: float, scale: float, height: float, dust: tuple[float, float, float], samples: int = 32,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the light in g, r, i of the disc exp(-R / scale) sech^2(z / height) within dust, without scattering, and what the
    dust leaves of a source in the middle (van der Kruit and Searle 1981; Xilouris et al. 1999). ``plane`` has ratio 1; ``dust``
    is the optical depth in r through the centre of the face-on disc, and the scales of exp(-R / l - |z| / h).   Shape: [3, P, P]"""
    depth, dust_scale, dust_height = dust
    cosine, sine, step = math.cos(inclination), math.sin(inclination), plane.grid.step
    x, y = plane.coordinates
    seen = (np.abs(y) < 7 * scale * cosine + 4 * height) & (np.abs(x) < 8 * scale)
    x, y = x[seen][:, None], y[seen][:, None]
    # Samples lie densely where the line of sight crosses the plane, nearest to the observer first.
    t = np.linspace(-1, 1, samples, dtype=np.float32)
    s, ds = 6 * scale * (0.3 * t + 0.7 * t**3), 6 * scale * (0.3 + 2.1 * t**2) * (t[1] - t[0])
    radius, z = np.hypot(x, y * cosine + s * sine), np.abs(y * sine - s * cosine)
    fall = np.exp(-2 * z / height)
    emission = np.exp(-radius / scale) * (4 * fall / (1 + fall) ** 2) * (ds * step**2 / (4 * math.pi * scale**2 * height))
    opacity = np.exp(-radius / dust_scale - z / dust_height) * (ds * depth / (2 * dust_height))
    before = np.cumsum(opacity, 1) - opacity / 2
    light, left = np.zeros((3, *seen.shape), np.float32), np.ones((3, *seen.shape), np.float32)
    for band, extinction in enumerate(DUST):
        light[band, seen] = (emission * np.exp(-extinction * before)).sum(1)
        left[band, seen] = (1 + np.exp(-extinction * opacity.sum(1))) / 2
    return light, left


# ---- encounters


def parabola(times: Array, mass: float) -> Array:
    """Return the separation of two bodies of total ``mass`` (G = 1) on a parabola with pericentre 1, which they pass at time 0,
    by Barker's equation.   Shape: [n, 3]"""
    a = 1.5 * times * math.sqrt(mass / 2)
    b = np.cbrt(a + np.sqrt(a * a + 1))
    d = b - 1 / b
    return np.stack((1 - d * d, 2 * d, np.zeros_like(d)), -1)


def rotation(rng: np.random.Generator) -> Array:
    """Return a random rotation, uniform over all.   Shape: [3, 3]"""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q *= np.sign(np.diag(r))
    return q * np.sign(np.linalg.det(q))


def encounter(
    rng: np.random.Generator, mass: float, scales: tuple[float, float], turns: tuple[Array, Array], counts: tuple[int, int],
    end: float, step: float = 0.1,
) -> tuple[Array, Array]:  # fmt: skip
    """Return bodies and disc particles of two galaxies at time ``end`` after pericentre (Toomre and Toomre 1972): test particles,
    first on circular orbits in discs of orientations ``turns``, in the potentials of two bodies of masses 1 and ``mass``.

    Lengths are in pericentres. ``scales`` are those of the exponential discs.   Shape: [2, 3], [sum(counts), 3]"""
    times = np.arange(2 * round((end + 4) / step) + 1) * (step / 2) - 4
    apart = parabola(times, 1 + mass) / (1 + mass)
    track = np.stack((-mass * apart, apart), 1).astype(np.float32)
    speed = (track[2] - track[0]) / step
    position, velocity = [], []
    for body, (own, scale, turn, count) in enumerate(zip((1.0, mass), scales, turns, counts)):
        radius = np.minimum(rng.gamma(2, scale, count), 4.5 * scale)
        angle = rng.uniform(0, 2 * math.pi, count)
        rate = np.sqrt(own) * (radius**2 + SOFTENING**2) ** -0.75
        cosine, sine = radius * np.cos(angle), radius * np.sin(angle)
        position.append(np.stack((cosine, sine, rng.normal(0, 0.08 * scale, count)), 1) @ turn.T + track[0, body])
        velocity.append(np.stack((-rate * sine, rate * cosine, np.zeros(count)), 1) @ turn.T + speed[body])
    x, v = np.concatenate(position).T.astype(np.float32), np.concatenate(velocity).T.astype(np.float32)
    for bodies in track[1::2]:                  # leapfrog: drift, kick, drift
        x += (step / 2) * v
        for own, body in zip((1.0, mass), bodies):
            d = x - body[:, None]
            v -= (step * own) * d * (d[0] ** 2 + d[1] ** 2 + d[2] ** 2 + np.float32(SOFTENING**2)) ** np.float32(-1.5)
        x += (step / 2) * v
    return track[-1], x.T
