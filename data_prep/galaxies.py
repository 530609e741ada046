"""Images of galaxies with their morphological classes, for resnet, as Galaxy Zoo and Galaxy10 DECaLS have them.

    python -m data_prep.galaxies simulate OUT       galaxies of a survey with a limit of magnitude, from models of their light
    python -m data_prep.galaxies check OUT          files against their index, images against the simulation, a picture

    OUT/{train,validation,test}/images_000000.h5    "bytes" int32 [N], "image" uint8 [sum of bytes] PNG files, "label" int32 [N],
                                                    "snr" (r, optimal), "radius" (half-light, in FWHM of the point spread function),
                                                    "inclination" (degrees) float32 [N]

A label is the class of the model, and no function of the image: the error of the best classifier is not 0. A face-on lenticular
looks like an elliptical; arms are lost in noise, or are narrower than the seeing; the pitch angle that divides tight from loose
arms, and the inclinations of discs, are continuous; lenticulars have weak bars, spirals have rings, and chance neighbours of any
galaxy look like a merger before its pericentre, which has no tails.

The inclination of an elliptical is that of a round disc of its axis ratio; that of a merger is of its first disc.

N rows of a file   P pixels per side of a scene"""

import argparse
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, picture, store, survey
from data_prep import galaxy_models as models
from data_prep.command import option
from data_prep.galaxy_models import Arms, Array, Plane
from data_prep.store import Field

# Classes, and about how often a survey finds them
CLASSES = {"elliptical": 0.25, "lenticular": 0.17, "tight spiral": 0.2, "loose spiral": 0.08, "barred spiral": 0.15, "ring": 0.02,
           "edge-on disc": 0.1, "merger": 0.03}  # fmt: skip
NAMES = tuple(CLASSES)
FARTHEST = 0.15                                 # redshift
HUBBLE_LENGTH = 4283.0                          # Mpc, c / H_0 for 70 km/s/Mpc
PARTICLES = 3000                                # of a disc in an encounter


def image_fields(classes: int) -> store.Fields:
    return {
        "bytes": Field("int32", (), 1),
        "image": Field("uint8", ("bytes",), key=True),
        "label": Field("int32", (), 0, classes - 1, classes=classes),
    }


def fields() -> store.Fields:
    numbers = {"snr": Field("float32", (), 0), "radius": Field("float32", (), 0), "inclination": Field("float32", (), 0, 90.01)}
    return {**image_fields(len(CLASSES)), **numbers}


# ---- galaxies


@dataclass(frozen=True)
class Galaxy:
    """A galaxy of the survey: magnitude in r, half-light radius in arcsec, redshift; and where its centre is, in arcsec."""

    magnitude: float
    radius: float
    redshift: float
    centre: models.Point

    def colours(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return the flux in g, r, i, relative to r, of old and of young stars."""
        z, shift = self.redshift, rng.normal(0, 0.04)
        old = np.array((0.72 + 2.2 * z + shift, 0, -0.36 - 0.6 * z), np.float32)
        young = np.array((0.05 + 1.2 * z + shift, 0, 0.06 - 0.3 * z), np.float32)
        return 10 ** (-0.4 * old), 10 ** (-0.4 * young)


def draw_galaxy(rng: np.random.Generator, early: bool, limit: float, radii: tuple[float, float]) -> Galaxy:
    """Draw a galaxy brighter than ``limit`` and of a half-light radius within ``radii``: uniform in Euclidean volume, Schechter's
    luminosity function (M* = -21.2, alpha = -1; Blanton et al. 2003), and about the sizes of Shen et al. 2003."""
    grid = np.linspace(-23.5, -18, 56)
    density = np.cumsum(np.exp(-(10 ** (-0.4 * (grid + 21.2)))))
    while True:
        z = FARTHEST * rng.uniform(size=256) ** (1 / 3)
        absolute = np.interp(rng.uniform(size=256), density / density[-1], grid)
        distance = HUBBLE_LENGTH * (z - 0.225 * z * z)          # comoving, to second order in z
        magnitude = absolute + 5 * np.log10(distance * (1 + z)) + 25 + z
        slope, middle = (-0.26, 3.2) if early else (-0.18, 5.0)
        kpc = middle * 10 ** (slope * (absolute + 20.5)) * rng.lognormal(0, 0.3, 256)
        radius = kpc * (1 + z) / distance * 206.265
        for i in np.flatnonzero((magnitude < limit) & (radii[0] < radius) & (radius < radii[1]))[:1]:
            x, y = rng.normal(0, 0.3, 2)
            return Galaxy(float(magnitude[i]), float(radius[i]), float(z[i]), (float(x), float(y)))


def draw_smooth(rng: np.random.Generator, grid: models.Grid, galaxy: Galaxy) -> tuple[Array, float]:
    ratio = float(np.clip(1 - abs(rng.normal(0, 0.25)), 0.4, 1))
    plane = Plane(grid, galaxy.centre, rng.uniform(0, math.pi), ratio)
    light = models.sersic(plane, galaxy.radius / math.sqrt(ratio), float(np.clip(rng.normal(3.3, 1.2), 1.5, 6)))
    old, blue = (colour[:, None, None] for colour in galaxy.colours(rng))
    return light * (old + rng.uniform(0, 0.1) * (blue - old)), math.acos(ratio)


def draw_disc(rng: np.random.Generator, grid: models.Grid, galaxy: Galaxy, name: str) -> tuple[Array, float]:
    """Return the light of a disc galaxy that is not edge-on, of total about 1 in r, and its inclination."""
    u, spiral = rng.uniform, "spiral" in name
    inclination, angle = math.acos(u(math.cos(math.radians(76)), 1)), u(0, 2 * math.pi)
    lenticular = name == "lenticular"
    disc = Plane(grid, galaxy.centre, angle, models.axis_ratio(inclination, u(0.2, 0.35) if lenticular else u(0.15, 0.22)))
    centre = Plane(grid, galaxy.centre, angle, models.axis_ratio(inclination, u(0.6, 0.9)))
    scale = galaxy.radius / 1.5
    bulge = u(0.3, 0.8) if lenticular else u(0.04, 0.3)
    bulge_radius = scale * (u(0.4, 1.5) if lenticular else u(0.25, 0.6) * math.sqrt(bulge / 0.3))
    bulge_light = models.sersic(centre, bulge_radius, u(1.5, 5) if lenticular else u(1.5, 4) if bulge > 0.15 else u(1, 2))
    young = u(0.35, 0.65) if spiral else u(0.3, 0.5) if name == "ring" else u(0, 0.1)
    length, bar_angle = scale * u(0.9, 1.8), u(0, math.pi)
    bar = u(0.12, 0.28) if name == "barred spiral" else u(0.04, 0.1) if rng.random() < 0.25 else 0.0
    smooth = models.sersic(disc, 1.678 * scale, 1.0)
    bar_light = bar * models.bar(disc, length, u(0.2, 0.35), bar_angle)
    rest, left = 1 - bulge - bar, np.ones(1, np.float32)
    old_light: Array = rest * (1 - young) * smooth
    young_light: Array = rest * young * smooth
    if spiral or name == "ring":
        tight = {"tight spiral": True, "loose spiral": False}.get(name, rng.random() < 0.6)
        pitch = math.radians(u(8, 18) if tight else u(18, 36)) * rng.choice((-1, 1))
        start, phase = (length, bar_angle) if bar > 0.1 else (scale * u(0.4, 0.8), u(0, math.pi))
        arms = Arms(int(rng.choice((2, 2, 2, 3, 4))) if bar < 0.1 else 2, pitch, phase, start, u(0.5, 3.5) if spiral else u(0, 0.6))
        wave, texture = arms.modulation(disc), arms.flocculence(disc, rng, u(0.2, 0.6))
        tau = smooth / smooth.max() * arms.modulation(disc, 0.8) * (u(0.2, 0.8) / math.cos(inclination))
        left = np.exp(-models.DUST[:, None, None] * tau)
        weights = rng.lognormal(0, 0.8, rng.poisson(u(10, 50)))
        knots = grid.add_points(disc.to_sky(arms.knots(rng, len(weights), scale)), 0.1 * weights / max(weights.sum(), 1))
        ring = u(0.3, 0.6) if name == "ring" else u(0.05, 0.15) if rng.random() < 0.1 else 0.0
        circle = models.ring(disc, radius := scale * u(1.3, 2.2), radius * u(0.12, 0.22)) * texture
        old_light = rest * (1 - young) * ((1 - ring / 2) * smooth * (0.6 + 0.4 * wave) + ring / 2 * circle)
        young_light = rest * young * ((1 - ring) * smooth * wave * texture + ring * circle + knots - 0.1 * smooth)
    old, young_colour = (colour[:, None, None] for colour in galaxy.colours(rng))
    return (old * (bulge * bulge_light + bar_light + old_light) + young_colour * np.maximum(young_light, 0)) * left, inclination


def draw_edge_on(rng: np.random.Generator, grid: models.Grid, galaxy: Galaxy) -> tuple[Array, float]:
    u = rng.uniform
    inclination, angle = math.acos(u(0, math.cos(math.radians(80)))), u(0, 2 * math.pi)
    is_dusty, scale = rng.random() < 0.7, galaxy.radius / 1.5
    bulge = u(0.03, 0.35) if is_dusty else u(0.2, 0.5)
    dust = (u(0.3, 1.2) if is_dusty else 0.0, 1.2 * scale, scale * u(0.06, 0.1))
    plane = Plane(grid, galaxy.centre, angle)
    young = u(0.3, 0.6) if is_dusty else 0.05
    light = np.zeros((3, grid.side, grid.side), np.float32)
    old_colour, young_colour = galaxy.colours(rng)
    for part, height, colour in ((1 - young, u(0.2, 0.3), old_colour), (young, u(0.08, 0.12), young_colour)):
        disc, left = models.thick_disc(plane, inclination, scale, height * scale, dust)
        light += (1 - bulge) * part * colour[:, None, None] * disc
    spheroid = models.sersic(Plane(grid, galaxy.centre, angle, u(0.55, 0.85)), scale * u(0.25, 0.6), u(1.5, 4))
    return light + bulge * old_colour[:, None, None] * spheroid * left, inclination


def draw_merger(rng: np.random.Generator, grid: models.Grid, galaxy: Galaxy) -> tuple[Array, float]:
    u, scale = rng.uniform, galaxy.radius / 1.678
    mass, own, view = 10 ** u(-0.8, 0), u(0.22, 0.34), models.rotation(rng)
    turns, scales = (models.rotation(rng), models.rotation(rng)), (own, own * math.sqrt(mass))
    counts = PARTICLES, int(PARTICLES * mass)
    bodies, particles = models.encounter(rng, mass, scales, turns, counts, u(-0.7, 3.5))
    sky = scale / own * (view[:2] @ np.concatenate((bodies, particles)).T).T
    sky += galaxy.centre - sky[0] - u(0, 0.5) * (sky[1] - sky[0])
    members = np.split(sky[2:], counts[:1])
    smooth, knots, bulges = (np.zeros((grid.side, grid.side), np.float32) for _ in range(3))
    for part, size, centre, stars in zip((1 / (1 + mass), mass / (1 + mass)), (1, math.sqrt(mass)), sky, members):
        bulge, bright = u(0.15, 0.6), stars[: len(stars) // 40]     # star-forming regions
        smooth += grid.add_points(stars, part * (1 - bulge) / len(stars))
        knots += grid.add_points(bright, part * (1 - bulge) / len(bright))
        plane = Plane(grid, (centre[0], centre[1]), u(0, math.pi), u(0.6, 1))
        bulges += part * bulge * models.sersic(plane, 0.5 * scale * size, u(1.5, 4))
    smooth, young = survey.smooth(smooth, 0.2 * scale / grid.step), u(0.2, 0.6)
    old, blue = (colour[:, None, None] for colour in galaxy.colours(rng))
    light = old * (bulges + (1 - young) * smooth) + blue * young * (0.8 * smooth + 0.2 * knots)
    return light, math.acos(min(1, abs((view @ turns[0])[2, 2])))


def draw(rng: np.random.Generator, label: int, camera: survey.Camera, limit: float) -> dict[str, Any]:
    """Simulate an image of a galaxy of a class, with the entries of ``fields``, and its pixels uint8 [S, S, 3]."""
    name, grid, width = NAMES[label], camera.grid, camera.size * camera.pixel
    galaxy = draw_galaxy(rng, name in ("elliptical", "lenticular"), limit, (0.04 * width, 0.13 * width))
    draws = {"elliptical": draw_smooth, "edge-on disc": draw_edge_on, "merger": draw_merger}
    light, inclination = draws.get(name, partial(draw_disc, name=name))(rng, grid, galaxy)
    light = light * camera.electrons(np.full(3, galaxy.magnitude, np.float32))[:, None, None]
    field = survey.draw_field(camera, rng)
    if name != "merger" and rng.random() < 0.15:        # a neighbour of the same group, or in front
        distance, angle = galaxy.radius * rng.uniform(1.5, 4), rng.uniform(0, 2 * math.pi)
        at = (distance * math.cos(angle), distance * math.sin(angle))
        other = Galaxy(galaxy.magnitude + rng.uniform(0, 2), galaxy.radius * rng.uniform(0.4, 1), galaxy.redshift, at)
        draw_other = (draw_smooth, partial(draw_disc, name=NAMES[2]), partial(draw_disc, name=NAMES[3]))[rng.integers(3)]
        field += draw_other(rng, grid, other)[0] * camera.electrons(np.full(3, other.magnitude, np.float32))[:, None, None]
    pixels = survey.colour_image(camera.expose(camera.blur(light + field), rng), camera)
    image = np.frombuffer(survey.encode_png(pixels), np.uint8)
    return {"bytes": len(image), "image": image, "label": label, "snr": camera.signal_to_noise(camera.blur(light[1], 1)),
            "radius": survey.half_light_radius(grid, light[1]) / camera.seeing, "inclination": math.degrees(inclination),
            "pixels": pixels}  # fmt: skip


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated image, besides its index, and its split."""

    seed: int = command.seed()
    size: int = option(64, "pixels per side", type=command.positive)
    width: float = option(33.5, "of an image in arcsec", metavar="X", type=command.within(10, 300))
    seeing: float = option(1.2, "mean FWHM of the point spread function in r, arcsec", metavar="X", type=command.within(0.1, 5))
    exposure: float = option(54.0, "seconds in each band", metavar="X", type=command.within(1, 1e5))
    limit: float = option(17.8, "magnitude of the faintest galaxy in r", metavar="X", type=command.within(15, 21))
    balance: str = option("equal", "frequencies of classes: equal, or about those of a survey", choices=("equal", "natural"))
    rows: int = option(500, "images per file", type=command.positive)
    validation: float = command.fraction(0.1, "the images")
    test: float = command.fraction(0.1, "the images")

    def mistakes(self) -> Iterator[str]:
        if not 32 <= self.size <= 1024:
            yield f"--size {self.size}: expected 32 to 1024"

    def label(self, index: int) -> int:
        """Return the class of an image. Equal frequencies: each block of images has every class once, in random order."""
        if self.balance == "natural":
            return int(self.generator(2, index).choice(len(CLASSES), p=list(CLASSES.values())))
        block, place = divmod(index, len(CLASSES))
        return int(self.generator(2, block).permutation(len(CLASSES))[place])

    def sample(self, index: int) -> dict[str, Any]:
        rng = self.generator(1, index)
        camera = survey.Camera(self.size, self.width / self.size, self.seeing * rng.lognormal(0, 0.1), self.exposure)
        return draw(rng, self.label(index), camera, self.limit)


def write_images(recipe: Recipe, samples: Sequence[int], path: Path) -> None:
    attributes = {"classes": list(NAMES), "kind": "simulated", "samples": list(samples), "recipe": recipe.json_text}
    store.write_rows(path, fields(), [recipe.sample(index) for index in samples], attributes)


def simulate(options: argparse.Namespace) -> command.Plan:
    recipe = Recipe.from_options(options)
    members = recipe.numbers_by_split(options.samples)
    command.require_splits([split for split in members if members[split]], options, f"--samples {options.samples}")
    contents = store.Contents(fields())
    jobs = [store.Job(options.out / split / f"images_{number:06d}.h5", partial(write_images, recipe, names), contents, len(names))
            for split, items in members.items() for number, names in enumerate(command.batched(items, options.rows))]  # fmt: skip
    message = f"{options.samples} images of {recipe.size} x {recipe.size} pixels in {options.out}"
    return command.Plan(recipe, jobs, {"classes": list(NAMES)}, message)


# ---- check


def check_images(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the images of a simulation that differ from a new one by more than the rounding of another processor."""
    from PIL import Image

    recipe = prepared.simulation_settings(Recipe)
    if recipe is None:
        return
    rows = command.subsample(prepared.locations, options.check_count)
    for path, row in rows:
        with h5py.File(path, "r") as file:
            stored, index = next(store.read_rows(file, fields(), row, row + 1)), file.attrs["samples"][row]
        expected = recipe.sample(int(index))
        difference = np.abs(np.asarray(Image.open(io.BytesIO(stored["image"].tobytes())), int) - expected["pixels"]).mean()
        if stored["label"] != expected["label"] or difference > 0.1:
            yield f"{path}: row {row}: the image of class {stored['label']} differs from the simulation; make the file again"
    print(f"{len(rows)} images compared with new ones")


BUILDER = command.DatasetBuilder(
    "galaxies", "Images of galaxies with classes: simulate them, or check them.", "resnet",
    command.Check("Files against index.json, images against the simulation.", check_images,
                  ("images", 64, "images to simulate again"), picture.draw_classes),
    (command.Simulate("Galaxies of a survey, with the classes of their models.", Recipe,
                      ("samples", 6000, "how many; a later run may ask for more"), simulate),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
