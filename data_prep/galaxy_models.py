"""Light of galaxies on a grid of pixels, and a telescope: profiles, spiral arms, edge-on discs with dust, encounters, images.

A map is the fraction of the light of a component in each pixel; without structure its sum over an infinite grid is 1. A scene is
electrons in g, r, i, on finer pixels than those of the image, with a margin from which light is spread into it.

S pixels per side of an image   P = OVERSAMPLE (S + 2 MARGIN), of a scene   lengths in arcsec, angles in radians
R, phi polar coordinates in the plane of a disc"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]
Point = tuple[float, float]

CORE, FINE = 5, 9                               # pixels around a centre, and points per side of each, where a profile is a cusp
SOFTENING, STEP = 0.25, 0.1                     # of the potentials of an encounter, in pericentres; of time
DUST = np.array((1.43, 1.0, 0.74), np.float32)[:, None, None]   # extinction relative to r (Cardelli et al. 1989, R_V = 3.1)
ZERO_POINT = np.array((25.9, 25.7, 25.3), np.float32)     # magnitude of 1 electron/s; as of SDSS (York et al. 2000)
SKY = np.array((21.9, 20.9, 20.2), np.float32)            # magnitudes per square arcsec
WAVELENGTH = np.array((0.477, 0.623, 0.763), np.float32)  # micrometres
READ_NOISE = 6.0                                          # electrons per pixel
OVERSAMPLE, MARGIN = 2, 8                                 # pixels of a scene per pixel of the image; pixels of the image
MOFFAT_BETA = 3.0
BALANCE = np.array((1.5, 1.0, 0.8), np.float32)           # of blue, green, red light in a colour image
SOFTNESS, BRIGHTNESS = 6.0, 0.07                          # Q and alpha of Lupton et al. 2004, flux in units of the noise of the sky


@dataclass(frozen=True)
class Grid:
    """Square pixels of width ``step`` around the origin."""

    side: int
    step: float

    @cached_property
    def axis(self) -> Array:
        return ((np.arange(self.side) - (self.side - 1) / 2) * self.step).astype(np.float32)

    def add_points(self, points: Array, weights: Array) -> Array:
        """Return a map of point sources, each in one pixel.   Shape: points [n, 2] (x, y), weights [n]"""
        column, row = np.floor(points / self.step + self.side / 2).astype(int).T
        inside = (np.minimum(column, row) >= 0) & (np.maximum(column, row) < self.side)
        light = np.bincount((row * self.side + column)[inside], weights[inside], self.side**2)
        return light.reshape(self.side, self.side).astype(float, copy=False)


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


def sersic(plane: Plane, radius: float, n: float) -> Array:
    """Return a map of exp(-b (R / radius)^(1/n)); n = 1 is an exponential disc, n = 4 de Vaucouleurs' law. ``radius`` is the
    half-light radius along the major axis; b is from Ciotti and Bertin 1999, for n of 0.5 or more."""
    grid, b = plane.grid, 2 * n - 1 / 3 + 4 / (405 * n) + 46 / (25515 * n**2) + 131 / (1148175 * n**3)
    total = 2 * math.pi * n * radius**2 * plane.ratio * b ** (-2 * n) * math.gamma(2 * n)

    def profile(x: Array, y: Array) -> Array:
        return np.exp(-b * ((x * x + y * y) / radius**2) ** np.float32(0.5 / n)) * np.float32(grid.step**2 / total)

    light = profile(*plane.coordinates)
    fine = ((np.arange(FINE) + 0.5) / FINE - 0.5) * grid.step
    column, row = (int(np.clip(round(x / grid.step + (grid.side - CORE) / 2), 0, grid.side - CORE)) for x in plane.centre)
    x, y = ((grid.axis[first : first + CORE, None] + fine).ravel() for first in (column, row))
    core = profile(*plane.project(x[None, :], y[:, None])).reshape(CORE, FINE, CORE, FINE)
    light[row : row + CORE, column : column + CORE] = core.mean((1, 3))
    return light


def bar(plane: Plane, length: float, ratio: float, angle: float) -> Array:
    """Return a map of a bar in a disc: (1 - m^2)^2 (Ferrers 1877) within m = 1, an ellipse of semi-axis ``length``. ``angle`` is
    from the line of nodes."""
    radius, phi = plane.polar
    square = (radius / length) ** 2 * (np.cos(phi - angle) ** 2 + np.sin(phi - angle) ** 2 / ratio**2)
    return np.clip(1 - square, 0, None) ** 2 * (3 * plane.grid.step**2 / (math.pi * ratio * length**2 * plane.ratio))


def ring(plane: Plane, radius: float, width: float) -> Array:
    """Return a map of a ring in a disc, Gaussian in R with standard deviation ``width``, much less than ``radius``."""
    light = np.exp(-0.5 * ((plane.polar[0] - radius) / width) ** 2)
    return light * (plane.grid.step**2 / (plane.ratio * radius * width * (2 * math.pi) ** 1.5))


def spiral_arms(plane: Plane, number: int, pitch: float, phase: float, start: float, sharpness: float) -> Array:
    """Return the factor of the light of a disc, of mean 1 over phi, by arms phi = phase + ln(R / start) / tan(pitch), from about
    ``start`` outwards. The profile across an arm is a von Mises function of concentration ``sharpness``."""
    radius, phi = plane.polar
    crest = phase + np.log(radius / start) / math.tan(pitch)
    wave = np.exp(sharpness * np.cos(number * (phi - crest))) / float(np.i0(sharpness))
    return 1 + (wave - 1) / (1 + (start / radius) ** 4)


def edge_on_disc(plane: Plane, inclination: float, scale: float, height: float) -> Array:
    """Return a map of the disc exp(-R / scale) sech^2(z / height) (van der Kruit and Searle 1981) at an inclination near pi / 2.
    Within 2.5 %, sqrt(1 + pi x / 2) exp(-x) is their x K1(x). The height grows by the second moment of the inclined disc."""
    x, y = np.abs(plane.coordinates)
    height = math.hypot(height * math.sin(inclination), 6 / math.pi * scale * math.cos(inclination))
    fall = np.exp(-2 / height * y)
    light = np.sqrt(1 + math.pi / 2 / scale * x) * np.exp(-x / scale) * 4 * fall / (1 + fall) ** 2
    return light * (plane.grid.step**2 / (2 * math.pi * scale * height))


def dust_lane(plane: Plane, inclination: float, depth: float, scale: float, height: float) -> Array:
    """Return what dust of density exp(-R / scale - |z| / height) leaves of light that is mixed with it (Disney et al. 1989), at an
    inclination near pi / 2. ``depth`` is the optical depth in r through the centre of the face-on disc.   Shape: [3, P, P]"""
    x, y = plane.coordinates
    shift = scale * math.cos(inclination)       # dust in front of the middle is on the near side
    apparent = math.hypot(height * math.sin(inclination), shift)
    tau = DUST * (depth * scale / apparent * np.exp(-np.abs(x) / scale - np.abs(y - shift) / apparent) + 1e-6)
    return -np.expm1(-tau) / tau


def parabola(times: Array, mass: float) -> Array:
    """Return the separation of two bodies of total ``mass`` (G = 1) on a parabola with pericentre 1, which they pass at time 0,
    by Barker's equation.   Shape: [n, 3]"""
    a = 1.5 * times * math.sqrt(mass / 2)
    b = np.cbrt(a + np.sqrt(a * a + 1))
    d = b - 1 / b
    return np.stack((1 - d * d, 2 * d, np.zeros_like(d)), -1)


def encounter(
    rng: np.random.Generator, masses: Point, scales: Point, turns: Sequence[Array], counts: tuple[int, int], end: float,
) -> tuple[Array, Array]:  # fmt: skip
    """Return bodies and disc particles of two galaxies at time ``end`` after pericentre (Toomre and Toomre 1972): test particles,
    first on circular orbits in exponential discs of orientations ``turns``, in the potentials of two bodies. Lengths are in
    pericentres, G = 1.   Shape: [2, 3], [sum(counts), 3]"""
    times = np.arange(2 * round((end + 4) / STEP) + 1) * (STEP / 2) - 4
    apart = parabola(times, sum(masses)) / sum(masses)
    track = np.stack((-masses[1] * apart, masses[0] * apart), 1).astype(np.float32)
    speed = (track[2] - track[0]) / STEP
    position, velocity = [], []
    for body, (mass, scale, turn, count) in enumerate(zip(masses, scales, turns, counts)):
        radius, angle = np.minimum(rng.gamma(2, scale, count), 4.5 * scale), rng.uniform(0, 2 * math.pi, count)
        rate = np.sqrt(mass) * (radius**2 + SOFTENING**2) ** -0.75
        disc = np.stack((radius * np.cos(angle), radius * np.sin(angle), np.zeros(count)), 1)
        position.append(disc @ turn.T + track[0, body])
        velocity.append(rate[:, None] * np.cross((0, 0, 1), disc) @ turn.T + speed[body])
    x, v = np.concatenate(position).T.astype(np.float32), np.concatenate(velocity).T.astype(np.float32)
    for bodies in track[1::2]:                  # leapfrog: drift, kick, drift
        x += STEP / 2 * v
        for mass, body in zip(masses, bodies):
            d = x - body[:, None]
            v -= STEP * mass * d * (d[0] ** 2 + d[1] ** 2 + d[2] ** 2 + np.float32(SOFTENING**2)) ** np.float32(-1.5)
        x += STEP / 2 * v
    return track[-1], x.T


@dataclass(frozen=True)
class Camera:
    """Pixels per side of an image, their width and the seeing (FWHM in r) in arcsec, exposure in s."""

    size: int
    pixel: float
    seeing: float
    exposure: float

    @cached_property
    def grid(self) -> Grid:
        return Grid(OVERSAMPLE * (self.size + 2 * MARGIN), self.pixel / OVERSAMPLE)

    def electrons(self, magnitude: Array | float) -> Array:
        """Return the electrons of magnitudes in g, r, i.   Shape: [3, 1, 1]"""
        return (self.exposure * 10 ** (0.4 * (ZERO_POINT - magnitude)))[:, None, None]

    @cached_property
    def sky(self) -> Array:
        """Electrons per pixel.   Shape: [3, 1, 1]"""
        return self.electrons(SKY) * self.pixel**2

    @cached_property
    def psf_spectrum(self) -> NDArray[np.complexfloating]:
        """Fourier transform of Moffat's function of beta 3, wider at short wavelengths (Kolmogorov).   Shape: [3, P, P / 2 + 1]"""
        fwhm = self.seeing * (WAVELENGTH / WAVELENGTH[1]) ** -0.2
        width = (fwhm / (2 * math.sqrt(2 ** (1 / MOFFAT_BETA) - 1)))[:, None, None]
        square = np.fft.ifftshift(self.grid.axis - self.grid.step / 2) ** 2
        psf = (1 + (square[:, None] + square) / width**2) ** np.float32(-MOFFAT_BETA)
        return np.fft.rfft2(psf / psf.sum((1, 2), keepdims=True, dtype=float))

    def blur(self, scene: Array) -> Array:
        """Convolve a scene with the point spread function, and integrate it over pixels.   Shape: [3, P, P] -> [3, S, S]"""
        spectrum = self.psf_spectrum * np.fft.rfft2(scene.astype(float, copy=False))    # faster than in single precision
        inside = slice(OVERSAMPLE * MARGIN, -OVERSAMPLE * MARGIN)
        blurred = np.fft.irfft2(spectrum, s=scene.shape[-2:])[:, inside, inside]
        return blurred.reshape(3, self.size, OVERSAMPLE, self.size, OVERSAMPLE).sum((2, 4))

    def expose(self, image: Array, rng: np.random.Generator) -> Array:
        """Return an image with photon and read noise, less the mean sky, in electrons.   Shape: [3, S, S]"""
        return rng.poisson(np.maximum(image, 0) + self.sky) + rng.normal(0, READ_NOISE, image.shape) - self.sky

    def to_rgb(self, image: Array) -> NDArray[np.uint8]:
        """Return i, r, g as red, green, blue by the asinh stretch of Lupton et al. 2004.   Shape: [3, S, S] -> [S, S, 3]"""
        noise = math.sqrt(float(self.sky[1, 0, 0]) + READ_NOISE**2)
        relative = image * (10 ** (0.4 * (ZERO_POINT[1] - ZERO_POINT)) * BALANCE / noise)[:, None, None]
        mean = np.maximum(relative.mean(0), 1e-6)
        colours = 0.06 + relative * np.arcsinh(BRIGHTNESS * SOFTNESS * mean) / (SOFTNESS * mean)
        colours /= np.maximum(colours.max(0), 1)
        return np.rint(255 * np.clip(colours, 0, 1)).astype(np.uint8)[::-1].transpose(1, 2, 0)
