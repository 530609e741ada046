"""Images of galaxies with their morphological classes, for resnet, as Galaxy Zoo and Galaxy10 DECaLS have them.

    python -m data_prep.galaxies simulate OUT       galaxies of a survey with a limit of magnitude, from models of their light
    python -m data_prep.galaxies check OUT          files against their index, images against the simulation, a picture

    OUT/{train,validation,test}/images_000000.h5    as of data_prep.images; PNG files

Classes are equally frequent. A label is the class of the model, and no function of the image: the error of the best classifier is
not 0. A face-on lenticular looks like an elliptical; arms are weak, lost in noise, or narrower than the seeing; the pitch angle
that divides tight from loose arms, and inclinations, are continuous; most classes have weak bars, and spirals have rings; and
chance neighbours look like a merger before its pericentre, which has no tails.

P pixels per side of a scene"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from data_prep import command, images, picture
from data_prep import galaxy_models as models
from data_prep.command import option
from data_prep.galaxy_models import Array, Camera, Grid, Plane, Point

HUBBLE_LENGTH = 4283.0                          # Mpc, c / H_0 for 70 km/s/Mpc
FARTHEST = 0.15                                 # redshift
PARTICLES, SMOOTHING = 3000, 6                  # of a disc in an encounter; points that make each smooth
FAINTEST = 22.5                                 # r of stars and galaxies of the field
NEIGHBOURS = 0.3                                # fraction of galaxies with one of similar brightness
# Ranges of the classes of discs; below 0 is none: bulge, bar, ring (fractions of the light), young stars (of light of the disc),
# dust (optical depth in r through the centre of the face-on disc), sharpness of arms, their pitch angle in degrees
DISCS = {
    "lenticular": ((0.3, 0.8), (-0.3, 0.1), (0, 0), (0, 0.1), (0, 0), (0, 0), (8, 36)),
    "tight spiral": ((0.04, 0.3), (-0.3, 0.1), (-1, 0.1), (0.3, 0.65), (0.2, 0.8), (0, 3.5), (8, 18)),
    "loose spiral": ((0.04, 0.3), (-0.3, 0.1), (-1, 0.1), (0.3, 0.65), (0.2, 0.8), (0, 3.5), (18, 36)),
    "barred spiral": ((0.04, 0.3), (0.12, 0.28), (-1, 0.1), (0.3, 0.65), (0.2, 0.8), (0, 3.5), (8, 36)),
    "ring": ((0.04, 0.3), (-0.3, 0.1), (0.2, 0.4), (0.3, 0.5), (0.2, 0.8), (0, 0.6), (8, 36)),
}


class Galaxy(NamedTuple):
    """Magnitude in r, half-light radius in arcsec, redshift, and where the centre is, in arcsec."""

    magnitude: float
    radius: float
    redshift: float
    centre: Point

    def light(self, rng: np.random.Generator, old: Array, young: Array) -> Array:
        """Return the light in g, r, i, relative to r, from maps of old and of young stars.   Shape: [P, P] -> [3, P, P]"""
        z, shift = self.redshift, rng.normal(0, 0.04)
        old_colour = np.array((0.72 + 2.2 * z + shift, 0, -0.36 - 0.6 * z), np.float32)
        young_colour = np.array((0.05 + 1.2 * z + shift, 0, 0.06 - 0.3 * z), np.float32)
        return 10 ** (-0.4 * old_colour[:, None, None]) * old + 10 ** (-0.4 * young_colour[:, None, None]) * young


def draw_galaxy(rng: np.random.Generator, early: bool, limit: float, width: float) -> Galaxy:
    """Draw a galaxy brighter than ``limit`` that fits an image of ``width`` arcsec: uniform in Euclidean volume, Schechter's
    luminosity function (M* = -21.2, alpha = -1; Blanton et al. 2003), and about the sizes of Shen et al. 2003."""
    slope, middle = (-0.26, 3.2) if early else (-0.18, 5.0)
    while True:
        magnitude = limit - rng.exponential(1 / (0.6 * math.log(10)))
        absolute = -21.2 - 2.5 * math.log10(rng.gamma(1.5))     # brighter ones are seen in a volume of luminosity^1.5
        distance = 10 ** (0.2 * (magnitude - absolute) - 5)
        kpc = middle * 10 ** (slope * (absolute + 20.5)) * rng.lognormal(0, 0.3)
        radius, z = kpc / distance * 206.265, distance / HUBBLE_LENGTH
        if 0.04 * width < radius < 0.13 * width and z < FARTHEST:
            return Galaxy(magnitude, radius, z, (rng.normal(0, 0.3), rng.normal(0, 0.3)))


def draw_elliptical(rng: np.random.Generator, grid: Grid, galaxy: Galaxy) -> Array:
    ratio, young = float(np.clip(1 - abs(rng.normal(0, 0.25)), 0.4, 1)), rng.uniform(0, 0.1)
    plane = Plane(grid, galaxy.centre, rng.uniform(0, math.pi), ratio)
    stars = models.sersic(plane, galaxy.radius / math.sqrt(ratio), float(np.clip(rng.normal(3.3, 1.2), 1.5, 6)))
    return galaxy.light(rng, (1 - young) * stars, young * stars)


def draw_disc(rng: np.random.Generator, grid: Grid, galaxy: Galaxy, name: str) -> Array:
    """Return the light of a disc galaxy that is not edge-on, of total about 1 in r.   Shape: [3, P, P]"""
    u = rng.uniform
    bulge, bar, ring, young, dust, sharpness, pitch = (max(0.0, u(*limits)) for limits in DISCS[name])
    inclination, angle, scale = math.acos(u(math.cos(math.radians(76)), 1)), u(0, 2 * math.pi), galaxy.radius / 1.5
    disc = Plane(grid, galaxy.centre, angle, models.axis_ratio(inclination, u(0.15, 0.3)))
    centre = Plane(grid, galaxy.centre, angle, models.axis_ratio(inclination, u(0.6, 0.9)))
    length, bar_angle, is_barred = scale * u(0.9, 1.8), u(0, math.pi), bar > 0.1
    start, number = (length, 2) if is_barred else (scale * u(0.4, 0.8), int(rng.choice((2, 2, 2, 3, 4))))
    wave = models.spiral_arms(disc, number, math.radians(pitch) * rng.choice((-1, 1)), bar_angle, start, sharpness)
    smooth, circle, weights = models.sersic(disc, 1.678 * scale, 1.0), scale * u(1.3, 2.2), rng.lognormal(0, 0.8, 30)
    density = (smooth * wave).ravel().astype(float)
    regions = rng.choice(density.size, len(weights), p=density / density.sum())
    knots = np.bincount(regions, weights / weights.sum(), density.size).reshape(smooth.shape)       # star-forming regions
    ring_light = ring * models.ring(disc, circle, circle * u(0.12, 0.22))
    bar_light = bar * models.bar(disc, length, u(0.2, 0.35), bar_angle)
    bulge_light = bulge * models.sersic(centre, scale * math.sqrt(bulge) * u(0.5, 1.5), u(0.8, 2) + 4 * bulge)
    rest = 1 - bulge - bar - ring
    old = bulge_light + bar_light + (1 - young) * (rest * smooth * (0.6 + 0.4 * wave) + ring_light)
    stars = young * (rest * (0.9 * smooth * wave + 0.1 * knots) + ring_light)
    return galaxy.light(rng, old, stars) * np.exp(-models.DUST * (dust / math.cos(inclination) / smooth.max() * smooth))


def draw_edge_on(rng: np.random.Generator, grid: Grid, galaxy: Galaxy) -> Array:
    u = rng.uniform
    plane, scale = Plane(grid, galaxy.centre, u(0, 2 * math.pi)), galaxy.radius / 1.5
    inclination, is_dusty = math.acos(u(0, math.cos(math.radians(80)))), rng.random() < 0.7
    bulge, young, dust = (u(0.03, 0.35), u(0.3, 0.6), u(0.3, 1.2)) if is_dusty else (u(0.2, 0.5), 0.05, 0.0)
    spheroid = models.sersic(Plane(grid, galaxy.centre, plane.angle, u(0.55, 0.85)), scale * u(0.25, 0.6), u(1.5, 4))
    thick = models.edge_on_disc(plane, inclination, scale, scale * u(0.2, 0.3))
    thin = models.edge_on_disc(plane, inclination, scale, scale * u(0.08, 0.12))
    light = galaxy.light(rng, bulge * spheroid + (1 - bulge) * (1 - young) * thick, (1 - bulge) * young * thin)
    return light * models.dust_lane(plane, inclination, dust, 1.2 * scale, scale * u(0.06, 0.1))


def draw_merger(rng: np.random.Generator, grid: Grid, galaxy: Galaxy) -> Array:
    u, scale, own, young = rng.uniform, galaxy.radius / 1.678, rng.uniform(0.22, 0.34), rng.uniform(0, 0.6)
    masses = 1.0, 10 ** u(-0.8, 0)
    counts, sizes = (PARTICLES, int(PARTICLES * masses[1])), (1.0, math.sqrt(masses[1]))
    q, r = np.linalg.qr(rng.normal(size=(3, 3, 3)))
    *turns, view = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None]       # uniform over rotations and reflections
    bodies, particles = models.encounter(rng, masses, (own, own * sizes[1]), turns, counts, u(-0.7, 3.5))
    sky = np.concatenate((bodies, particles)) @ view[:, :2] * (scale / own)
    sky += galaxy.centre - sky[0] - u(0, 0.5) * (sky[1] - sky[0])
    parts, bulges = np.divide(masses, sum(masses)), u(0.15, 0.6, 2)
    weights = np.repeat(parts * (1 - bulges) / counts, counts)
    jitter = rng.normal(0, 0.2 * scale, (SMOOTHING, len(weights), 2))
    stars = grid.add_points((sky[2:] + jitter).reshape(-1, 2), np.tile(weights / SMOOTHING, SMOOTHING))
    knots = grid.add_points(sky[2::40], 40 * weights[::40])         # star-forming regions
    old = (1 - young) * stars
    for (x, y), size, light in zip(sky, sizes, parts * bulges):
        old += light * models.sersic(Plane(grid, (x, y), u(0, math.pi), u(0.6, 1)), 0.5 * scale * size, u(1.5, 4))
    return galaxy.light(rng, old, young * (0.8 * stars + 0.2 * knots))


DRAW: dict[str, Callable[[np.random.Generator, Grid, Galaxy], Array]] = {
    "elliptical": draw_elliptical, **{name: partial(draw_disc, name=name) for name in DISCS},
    "edge-on disc": draw_edge_on, "merger": draw_merger,
}  # fmt: skip
NAMES = tuple(DRAW)
FIELDS = images.image_fields(len(NAMES))


def draw_field(rng: np.random.Generator, camera: Camera) -> Array:
    """Return a scene of stars and galaxies in front and behind, with the counts of high galactic latitude: per square degree
    brighter than r = 22.5, 5,000 stars with slope 0.17 and 20,000 galaxies with slope 0.4 of log N per magnitude."""
    grid, u = camera.grid, rng.uniform
    width, scene = grid.side * grid.step, np.zeros((3, grid.side, grid.side), np.float32)
    for density, slope, bluest in ((5000, 0.17, 1.4), (20000, 0.4, 1.1)):
        for _ in range(rng.poisson(density * (width / 3600) ** 2)):
            magnitude = max(14.5, FAINTEST - rng.exponential(1 / (slope * math.log(10))))
            (x, y), blue = u(-width / 2, width / 2, 2), u(0.3, bluest)
            if density == 5000:
                light = grid.add_points(np.array([[x, y]]), np.ones(1))
            else:
                radius = 0.7 * 10 ** (0.1 * (21.5 - magnitude)) * rng.lognormal(0, 0.3)
                light = models.sersic(Plane(grid, (x, y), u(0, math.pi), u(0.3, 1)), radius, rng.choice((1.0, 1.0, 3.0)))
            scene += camera.electrons(magnitude + np.array((blue, 0.0, -0.45 * blue))) * light
    return scene


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated image, besides its index, and its split."""

    seed: int = command.seed()
    size: int = option(64, "pixels per side", type=command.within(32, 1024, int))
    width: float = option(33.5, "of an image in arcsec", metavar="X", type=command.within(10, 300))
    seeing: float = option(1.2, "mean FWHM of the point spread function in r, arcsec", metavar="X", type=command.within(0.1, 5))
    exposure: float = option(54.0, "seconds in each band", metavar="X", type=command.within(1, 1e5))
    limit: float = option(17.8, "magnitude of the faintest galaxy in r", metavar="X", type=command.within(15, 21))
    rows: int = option(500, "images per file", type=command.positive)
    validation: float = command.fraction(0.1, "the images")
    test: float = command.fraction(0.1, "the images")

    def sample(self, index: int) -> dict[str, Any]:
        """Simulate an image, with the entries of ``FIELDS``, and its pixels uint8 [S, S, 3]."""
        rng, name = self.generator(1, index), NAMES[label := index % len(NAMES)]
        camera = Camera(self.size, self.width / self.size, self.seeing * rng.lognormal(0, 0.1), self.exposure)
        galaxy = draw_galaxy(rng, name in ("elliptical", "lenticular"), self.limit, self.width)
        scene = DRAW[name](rng, camera.grid, galaxy) * camera.electrons(galaxy.magnitude) + draw_field(rng, camera)
        if name != "merger" and rng.random() < NEIGHBOURS:      # of the same group, or in front
            distance, angle = galaxy.radius * rng.uniform(1, 4), rng.uniform(0, 2 * math.pi)
            at = distance * math.cos(angle), distance * math.sin(angle)
            other = Galaxy(galaxy.magnitude + rng.uniform(0, 2), galaxy.radius * rng.uniform(0.4, 1), galaxy.redshift, at)
            scene += DRAW[NAMES[rng.integers(4)]](rng, camera.grid, other) * camera.electrons(other.magnitude)
        pixels = camera.to_rgb(camera.expose(camera.blur(scene), rng))
        image = images.encode_png(pixels)
        return {"bytes": len(image), "image": image, "label": label, "pixels": pixels}


BUILDER = command.DatasetBuilder(
    "galaxies", "Images of galaxies with classes: simulate them, or check them.", "resnet",
    command.Check("Files against index.json, images against the simulation.",
                  partial(images.check_simulated, Recipe, FIELDS, "label"), ("images", 64, "images to simulate again"),
                  picture.draw_classes),
    (command.Simulate("Galaxies of a survey, with the classes of their models.", Recipe, ("samples", 6000),
                      partial(images.simulate, Recipe, FIELDS, {"classes": list(NAMES)})),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
