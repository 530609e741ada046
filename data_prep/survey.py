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

from data_prep import coco, command, galaxies, picture, store
from data_prep.command import option
from data_prep.galaxies import Galaxy
from data_prep.galaxy_models import READ_NOISE, Array, Camera
from hpcai.data.image_files import decode_image

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
    galaxies: float = option(10.0, "mean number of galaxies", metavar="X", type=command.within(0, 1000))
    stars: float = option(6.0, "mean number of stars", metavar="X", type=command.within(0, 1000))
    rows: int = option(200, "images per file", type=command.positive)
    validation: float = command.fraction(0.15, "the images")
    test: float = command.fraction(0.0, "the images")

    def sample(self, index: int) -> dict[str, Any]:
        """Simulate an image, with the entries of ``FIELDS``, and its pixels uint8 [S, S, 3]."""
        from PIL import Image

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
        found = [seen for label, into, part in objects if (seen := find_box(label, into, part[1], image[1], ISOPHOTE * noise))]
        pixels = camera.to_rgb(camera.expose(image, rng))
        Image.fromarray(np.ascontiguousarray(pixels)).save(file := io.BytesIO(), "PNG")
        data, (labels, boxes, area) = np.frombuffer(file.getvalue(), np.uint8), zip(*found) if found else ((), (), ())
        values = {"labels": np.array(labels), "boxes": np.reshape(boxes, (-1, 4)), "area": np.array(area), "crowd": np.zeros(len(area))}
        size = {"size": (self.size, self.size), "objects": len(area), "bytes": len(data), "id": index}
        return {**values, **size, "image": data, "pixels": pixels}

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
    """Return label, box and area of an object, whose own ``light`` is at ``into`` of the ``image`` in r, or None if it is not seen."""
    if not light.size or (inside := light > threshold).sum() < LEAST:
        return None
    rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
    brightest = np.unravel_index(light.argmax(), light.shape)
    if image[into[1:]][brightest] > (1 + HIDDEN) * light[brightest]:
        return None
    top, left = into[1].start, into[2].start
    return label, (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1), int(inside.sum())


def write_images(recipe: Recipe, samples: Sequence[int], path: Path) -> None:
    store.write_rows(path, FIELDS, [recipe.sample(index) for index in samples], {"kind": "simulated", "samples": list(samples)})


def simulate(options: argparse.Namespace) -> command.Plan:
    recipe = Recipe.from_options(options)
    members = recipe.numbers_by_split(options.samples)
    command.require_splits([split for split in members if members[split]], options, f"--samples {options.samples}")
    contents = store.Contents(FIELDS)
    jobs = [store.Job(options.out / split / f"images_{i:06d}.h5", partial(write_images, recipe, part), contents, len(part))
            for split, items in members.items() for i, part in enumerate(command.batched(items, options.rows))]  # fmt: skip
    message = f"{options.samples} images of {recipe.size} x {recipe.size} pixels in {options.out}"
    header = {"classes": list(NAMES), "categories": list(range(1, len(NAMES) + 1))}
    return command.Plan(recipe, jobs, header, message, finalize=partial(coco.write_truth, dict(enumerate(NAMES, 1))))


def check_images(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the images of a simulation that differ from a new one by more than the rounding of another processor."""
    recipe = Recipe.from_options(argparse.Namespace(**prepared.recipe))
    for path, row in (rows := command.subsample(prepared.locations, options.check_count)):
        with h5py.File(path, "r") as file:
            stored, index = next(store.read_rows(file, FIELDS, row, row + 1)), file.attrs["samples"][row]
        expected = recipe.sample(int(index))
        difference = np.abs(decode_image(stored["image"].tobytes(), str(path)).astype(int) - expected["pixels"]).mean()
        if stored["objects"] != expected["objects"] or difference > 0.1:
            yield f"{path}: row {row}: its {stored['objects']} objects or its pixels differ from the simulation; make the file again"
    print(f"{len(rows)} images compared with new ones")


BUILDER = command.DatasetBuilder(
    "survey", "Fields of a sky survey with objects in boxes: simulate them, or check them.", "retinanet",
    command.Check("Files against index.json, images against the simulation.", check_images,
                  ("images", 16, "images to simulate again"), picture.draw_boxes),
    (command.Simulate("Clusters of galaxies, mergers and stars.", Recipe, ("samples", 600, "how many; a later run may ask for more"), simulate),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
