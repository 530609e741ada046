"""Fields of a sky survey with their objects in boxes, for retinanet.

    python -m data_prep.survey simulate OUT     clusters of galaxies, mergers and stars, from models of their light
    python -m data_prep.survey check OUT        files against their index, images against the simulation, a picture

    OUT/{train,validation,test}/...             as of data_prep.coco; PNG files

A box encloses the isophote of an object, its own light after the seeing and without noise, at ``ISOPHOTE`` times the noise of the
sky per pixel, in r. Boxes and classes are those of the models, and no function of the noise. An object is not in the truth if it is
too faint (fewer than ``LEAST`` pixels within the isophote), hidden (at its brightest pixel the others give more than ``HIDDEN``
times its light), or centred outside of the image. Nothing but light tells a faint disc from an elliptical, or a compact galaxy from
a star: the average precision of the best detector is not 1.

S pixels per side of an image"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from data_prep import coco, command, galaxies, images, picture
from data_prep.command import option
from data_prep.galaxies import Galaxy
from data_prep.galaxy_models import READ_NOISE, Array, Camera

NAMES = ("star", "elliptical", "spiral", "edge-on disc", "merger")
SPIRALS = ("tight spiral", "loose spiral", "barred spiral")
FIELDS = coco.object_fields(len(NAMES))
ISOPHOTE, LEAST, HIDDEN = 1.0, 25, 2.0
STAMPS, RADII = (32, 64, 128, 256), 7.0         # pixels per side in which an object is drawn, for so many half-light radii each way
BRIGHTEST, FAINTEST = 16.0, 21.5               # of stars in r


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated image, besides its index, and its split."""

    seed: int = command.seed()
    size: int = option(256, "pixels per side", type=command.within(32, 4096, int))
    pixel: float = option(0.396, "width of a pixel in arcsec", metavar="X", type=command.within(0.05, 2))
    seeing: float = option(1.2, "mean FWHM of the point spread function in r, arcsec", metavar="X", type=command.within(0.1, 5))
    exposure: float = option(54.0, "seconds in each band", metavar="X", type=command.within(1, 1e5))
    limit: float = option(19.5, "magnitude of the faintest galaxy in r", metavar="X", type=command.within(15, 21))
    galaxies: float = option(16.0, "mean number of galaxies", metavar="X", type=command.within(0, 1000))
    stars: float = option(6.0, "mean number of stars", metavar="X", type=command.within(0, 1000))
    rows: int = option(200, "images per file", type=command.positive)
    validation: float = command.fraction(0.15, "the images")
    test: float = command.fraction(0.0, "the images")

    def sample(self, index: int) -> dict[str, Any]:
        """Simulate an image, with the entries of ``FIELDS``, and its pixels uint8 [S, S, 3]."""
        rng = self.generator(1, index)
        seeing = self.seeing * rng.lognormal(0, 0.1)
        cameras = {size: Camera(size, self.pixel, seeing, self.exposure) for size in (self.size, *STAMPS)}
        image, objects = np.zeros((3, self.size, self.size)), []
        for label, galaxy, place in self.objects(rng):
            size = next((s for s in STAMPS if s * self.pixel > 2 * RADII * galaxy.radius), STAMPS[-1])
            stamp = draw(rng, NAMES[label], galaxy, cameras[size])
            row, column = place - size // 2
            into = np.s_[:, max(row, 0) : row + size, max(column, 0) : column + size]
            part = stamp[:, max(-row, 0) : max(self.size - row, 0), max(-column, 0) : max(self.size - column, 0)]
            image[into] += part
            objects.append((label, into, part))
        camera = cameras[self.size]
        noise = math.sqrt(float(camera.sky[1, 0, 0]) + READ_NOISE**2)
        visible = [seen for label, into, part in objects if (seen := find_box(label, into, part[1], image[1], ISOPHOTE * noise))]
        pixels = camera.to_rgb(camera.expose(image, rng))
        data, (labels, boxes, area) = images.encode_png(pixels), zip(*visible) if visible else ((), (), ())
        objects_of = {"boxes": np.array(boxes), "labels": np.array(labels), "area": np.array(area), "crowd": np.zeros(len(area))}
        common = {"bytes": len(data), "id": index, "size": (self.size, self.size), "objects": len(area)}
        return {**objects_of, **common, "image": data, "pixels": pixels}

    def objects(self, rng: np.random.Generator) -> Iterator[tuple[int, Galaxy, Any]]:
        """Yield class, galaxy (of a star: its magnitude) and row and column of each object. Half of the galaxies are in a cluster,
        with a fraction of ellipticals that is higher (Dressler 1980)."""
        side, centre = self.size, rng.uniform(0, self.size, 2)
        for _ in range(rng.poisson(self.stars)):
            magnitude = max(FAINTEST - rng.exponential(1 / (0.17 * math.log(10))), BRIGHTEST)
            yield 0, Galaxy(magnitude, self.pixel, 0.0, tuple(rng.uniform(-0.5, 0.5, 2) * self.pixel)), rng.integers(0, side, 2)
        for _ in range(rng.poisson(self.galaxies)):
            in_cluster = rng.random() < 0.5
            label = int(rng.choice(4, p=(0.6, 0.2, 0.1, 0.1) if in_cluster else (0.25, 0.4, 0.2, 0.15))) + 1
            galaxy = galaxies.draw_galaxy(rng, label == 1, self.limit, 40.0)
            place = centre + rng.normal(0, 20 / self.pixel, 2) if in_cluster else rng.uniform(0, side, 2)
            if (place >= 0).all() and (place < side).all():
                yield label, galaxy, place.astype(int)


def draw(rng: np.random.Generator, name: str, galaxy: Galaxy, camera: Camera) -> Array:
    """Return the electrons of an object, with the seeing.   Shape: [3, size, size]"""
    if name == "star":
        blue = rng.uniform(0.3, 1.4)
        points = camera.grid.add_points(np.array([galaxy.centre]), np.ones(1))
        return camera.blur(camera.electrons(galaxy.magnitude + np.array((blue, 0.0, -0.45 * blue))) * points)
    kind = str(rng.choice(SPIRALS)) if name == "spiral" else name
    return camera.blur(galaxies.DRAW[kind](rng, camera.grid, galaxy) * camera.electrons(galaxy.magnitude))


def find_box(label: int, into: Any, light: Array, image: Array, threshold: float) -> tuple[int, Any, int] | None:
    """Return label, box and area of an object, whose own ``light`` is at ``into`` of the ``image`` in r; None if it is not seen."""
    if not light.size or (inside := light > threshold).sum() < LEAST:
        return None
    rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
    brightest = np.unravel_index(light.argmax(), light.shape)
    if image[into[1:]][brightest] > (1 + HIDDEN) * light[brightest]:
        return None
    top, left = into[1].start, into[2].start
    return label, (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1), int(inside.sum())


CATEGORIES = dict(enumerate(NAMES, 1))
HEADER = {"classes": list(NAMES), "categories": list(CATEGORIES)}
BUILDER = command.DatasetBuilder(
    "survey", "Fields of a sky survey with objects in boxes: simulate them, or check them.", "retinanet",
    command.Check("Files against index.json, images against the simulation.",
                  partial(images.check_simulated, Recipe, FIELDS, "objects"), ("images", 16, "images to simulate again"),
                  picture.draw_boxes),
    (command.Simulate("Clusters of galaxies, mergers and stars.", Recipe, ("samples", 600),
                      partial(images.simulate, Recipe, FIELDS, HEADER, finalize=partial(coco.write_truth, CATEGORIES))),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
