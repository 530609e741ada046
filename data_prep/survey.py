"""Images of the sky by a telescope: point spread function, noise, stars and galaxies of the field, colour images.

The telescope is of 2.5 m, with filters, sky and zero points close to those of SDSS (Gunn et al. 1998; York et al. 2000). Bands are
g, r, i. A scene has flux in electrons; it is drawn on pixels that are OVERSAMPLE times finer than those of the image, with a margin
of MARGIN pixels of the image, from which light is spread into it.

S pixels per side of an image   P = OVERSAMPLE (S + 2 MARGIN)"""

import io
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from data_prep.galaxy_models import Array, Grid, Plane, sersic

ZERO_POINT = np.array((25.9, 25.7, 25.3), np.float32)     # magnitude of 1 electron/s
SKY = np.array((21.9, 20.9, 20.2), np.float32)            # magnitudes per square arcsec
WAVELENGTH = np.array((0.477, 0.623, 0.763), np.float32)  # micrometres
READ_NOISE = 6.0                                          # electrons per pixel
OVERSAMPLE, MARGIN = 2, 8
MOFFAT_BETA = 3.0
FAINTEST = 22.5                                           # r of stars and galaxies of the field
BALANCE = np.array((1.5, 1.0, 0.8), np.float32)           # of blue, green, red light in a colour image
SOFTNESS, BRIGHTNESS = 6.0, 0.07                          # Q and alpha of Lupton et al. 2004, flux in units of the noise of the sky


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

    def electrons(self, magnitude: Array) -> Array:
        """Return the electrons of magnitudes in g, r, i.   Shape: [..., 3]"""
        return self.exposure * 10 ** (0.4 * (ZERO_POINT - magnitude))

    @cached_property
    def sky(self) -> Array:
        """Electrons per pixel.   Shape: [3]"""
        return self.electrons(SKY) * self.pixel**2

    def psf(self) -> Array:
        """Return the point spread functions: Moffat's of beta 3, wider at short wavelengths (Kolmogorov).   Shape: [3, P, P]"""
        fwhm = self.seeing * (WAVELENGTH / WAVELENGTH[1]) ** -0.2
        width = (fwhm / (2 * math.sqrt(2 ** (1 / MOFFAT_BETA) - 1)))[:, None, None]
        square = np.fft.ifftshift(self.grid.axis - self.grid.step / 2) ** 2
        psf = (1 + (square[:, None] + square) / width**2) ** np.float32(-MOFFAT_BETA)
        return psf / psf.sum((1, 2), keepdims=True, dtype=float)

    @cached_property
    def psf_spectrum(self) -> Any:
        return np.fft.rfft2(self.psf())

    def blur(self, scene: Array, band: Any = slice(None)) -> Array:
        """Convolve a scene, or one band of it, with the point spread function, and integrate it over pixels.

        Shape: [3, P, P] -> [3, S, S], or [P, P] -> [S, S]"""
        spectrum = self.psf_spectrum[band] * np.fft.rfft2(scene.astype(float, copy=False))   # faster than in single precision
        blurred = np.fft.irfft2(spectrum, s=scene.shape[-2:])
        begins = range(OVERSAMPLE * MARGIN, OVERSAMPLE * (MARGIN + 1))
        parts = [slice(begin, begin + OVERSAMPLE * self.size, OVERSAMPLE) for begin in begins]
        return np.sum([blurred[..., y, x] for y in parts for x in parts], axis=0)

    def expose(self, image: Array, rng: np.random.Generator) -> Array:
        """Return an image with photon and read noise, less the mean sky, in electrons.   Shape: [3, S, S]"""
        sky = self.sky[:, None, None]
        return rng.poisson(np.maximum(image, 0) + sky) + rng.normal(0, READ_NOISE, image.shape) - sky

    def signal_to_noise(self, signal: Array) -> float:
        """Return the optimal signal-to-noise ratio of a source (matched filter) of ``signal`` electrons in r.   Shape: [S, S]"""
        return float(np.sqrt((signal**2 / (np.maximum(signal, 0) + self.sky[1] + READ_NOISE**2)).sum()))


def draw_field(camera: Camera, rng: np.random.Generator) -> Array:
    """Return a scene of stars and galaxies in front and behind, with the counts of high galactic latitude: per square degree
    brighter than r = 22.5, 5,000 stars with slope 0.17 and 20,000 galaxies with slope 0.4 of log N per magnitude."""
    grid = camera.grid
    area, half = (grid.side * grid.step / 3600) ** 2, grid.side * grid.step / 2
    scene = np.zeros((3, grid.side, grid.side), np.float32)
    for density, slope, is_star in ((5000, 0.17, True), (20000, 0.4, False)):
        for _ in range(rng.poisson(density * area)):
            magnitude = max(14.5, FAINTEST + math.log10(rng.uniform()) / slope)
            centre, blue = rng.uniform(-half, half, 2), rng.uniform(0.3, 1.4 if is_star else 1.1)
            flux = camera.electrons(magnitude + np.array((blue, 0.0, -0.45 * blue), np.float32))
            if is_star:
                light = grid.add_points(centre[None], 1.0)
            else:
                radius = 0.7 * 10 ** (0.1 * (21.5 - magnitude)) * rng.lognormal(0, 0.3)
                plane = Plane(grid, (centre[0], centre[1]), rng.uniform(0, math.pi), rng.uniform(0.3, 1))
                light = sersic(plane, radius, float(rng.choice((1.0, 1.0, 3.0))))
            scene += flux[:, None, None] * light
    return scene


def smooth(light: Array, sigma: float) -> Array:
    """Return a map convolved with a Gaussian of standard deviation ``sigma`` pixels. Its borders are joined."""
    k = 2 * math.pi * sigma * np.fft.fftfreq(len(light))
    window = np.exp(-0.5 * (k[:, None] ** 2 + k[: len(light) // 2 + 1] ** 2))
    return np.fft.irfft2(np.fft.rfft2(light) * window, s=light.shape)


def half_light_radius(grid: Grid, light: Array) -> float:
    """Return the radius of the circle around the origin with half of the light of the grid."""
    radius = np.hypot(grid.axis[None, :], grid.axis[:, None]) / grid.step
    growth = np.cumsum(np.bincount(radius.astype(int).ravel(), light.ravel()))
    return float(np.interp(growth[-1] / 2, np.append(0, growth), np.arange(len(growth) + 1)) * grid.step)


def colour_image(image: Array, camera: Camera) -> Array:
    """Return a colour image by the asinh stretch of Lupton et al. 2004, which keeps colours: i, r, g are red, green, blue.

    Shape: [3, S, S] electrons -> uint8 [S, S, 3]"""
    noise = math.sqrt(float(camera.sky[1]) + READ_NOISE**2)
    relative = image * (10 ** (0.4 * (ZERO_POINT[1] - ZERO_POINT)) * BALANCE / noise)[:, None, None]
    mean = np.maximum(relative.mean(0), 1e-6)
    stretched = np.arcsinh(BRIGHTNESS * SOFTNESS * mean) / SOFTNESS
    colours = 0.06 + relative * (stretched / mean)
    colours /= np.maximum(colours.max(0), 1)
    return np.rint(255 * np.clip(colours, 0, 1)).astype(np.uint8)[::-1].transpose(1, 2, 0)


def encode_png(pixels: Array) -> bytes:
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(pixels)).save(content := io.BytesIO(), "PNG")
    return content.getvalue()
