"""DeepCAM data: simulate weather maps with cyclones and rivers, check them, or convert the public set.

    python -m data_prep.deepcam simulate OUT        an idealised atmosphere; masks by a rule on its fields (data_prep.detection)
    python -m data_prep.deepcam check OUT           files against their index, masks against the rule, a picture
    python -m data_prep.deepcam convert SOURCE OUT  the public time steps of CAM5, data-*.h5

    OUT/{train,validation,test}/samples_000000.h5   "fields" float32 [N, H, W, 16] and "mask" uint8 [N, H, W]
                                                    0 background, 1 tropical cyclone, 2 atmospheric river

A simulated sample is a pure function of (seed, index) and the grid, so that ranks, cores, stops and later growth of the set change
nothing in it. The small region holds more of both classes than the globe of the public set, whose frequencies are 0.9863, 0.0005
and 0.0133: a cyclone covers more of a smaller map.

N rows of a file   H, W latitudes (south to north) and longitudes   16 the VARIABLES, in the order of the public data
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, detection, moments, scenes, store, timestep
from data_prep.atmosphere import VARIABLES
from data_prep.sphere import Grid
from hpcai.errors import ConfigError, DataError

CLASSES = ("background", "tropical cyclone", "atmospheric river")
PICTURE = "weather.png"
PUBLIC_SEED = 12345             # of the random 80/10/10 split of the public set, by numpy; its code is not public


# ---- what the files hold


def _fields(shape: list[int], header: dict[str, Any]) -> dict[str, Any]:
    mask = {"dtype": "uint8", "shape": shape[:2], "low": 0, "high": len(CLASSES) - 1, "blank": 0}  # calm weather has no object
    return {"fields": {"dtype": "float32", "shape": shape}, "mask": mask}


def _sums(file: h5py.File) -> dict[str, Any]:
    """Moments of each variable, cells of each class."""
    rows = (file["fields"][row].reshape(-1, len(VARIABLES)) for row in range(file["fields"].shape[0]))
    classes = np.bincount(file["mask"][...].ravel(), minlength=len(CLASSES))
    return {**moments.join(map(moments.measure, rows)), "classes": classes.tolist()}


def _moments(records: Sequence[store.Record]) -> dict[str, Any]:
    fields = moments.summary(record["sums"] for record in records)
    classes = np.sum([record["sums"]["classes"] for record in records], axis=0)
    return {
        "rows": sum(record["rows"] for record in records),
        "fields": fields,
        "mask": {"cells": classes.tolist(), "frequency": (classes / fields["cells"]).tolist()},
    }


CONTENTS = store.Contents("fields", _fields, _sums, _moments)


def _header(grid: Grid) -> dict[str, Any]:
    south, north, west, east = grid.box
    units = [variable.units for variable in VARIABLES.values()]
    where = {"latitude": [south, north], "longitude": [west, east], "periodic": grid.periodic}
    return {"variables": list(VARIABLES), "units": units, "classes": list(CLASSES), **where}


def _datasets(height: int, width: int) -> dict[str, tuple[Any, Sequence[int]]]:
    return {"fields": (np.float32, (height, width, len(VARIABLES))), "mask": (np.uint8, (height, width))}


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Settings):
    """All that decides the content of a simulated sample, besides its index, and where it lies."""

    seed: int
    height: int
    width: int
    spacing: float                              # degrees; of no meaning on the globe
    south: float
    west: float
    globe: bool
    rows: int                                   # samples per file
    validation: float
    test: float

    def mistakes(self) -> Iterator[str]:
        if min(self.height, self.width) < 16:
            yield f"--height {self.height} and --width {self.width}: expected 16 or more"
        spacing = max(180 / self.height, 360 / self.width) if self.globe else self.spacing
        if not 0.05 <= spacing <= 2:
            yield f"the spacing is {spacing:g} degrees, expected 0.05 to 2: the radius of a cyclone's wind is about 1 degree"
        if self.globe:
            return
        north = self.south + self.height * self.spacing
        if not -85 <= self.south < north <= 85:
            yield f"--south {self.south:g} and {self.height} rows of {self.spacing:g} degrees end at {north:g}, expected -85 to 85"
        if not self.width * self.spacing <= 360:
            yield f"--width {self.width} times --spacing {self.spacing:g} is more than 360 degrees"
        if not -360 <= self.west <= 360:
            yield f"--west is {self.west:g}, expected -360 to 360"

    def grid(self) -> Grid:
        if self.globe:
            return Grid.globe(self.height, self.width)
        return Grid.region(self.height, self.width, self.spacing, self.south, self.west)


def write_maps(recipe: Recipe, samples: Sequence[int], path: Path) -> None:
    grid = recipe.grid()
    about = {**_header(grid), "kind": "simulated", "seed": recipe.seed, "samples": list(samples), "recipe": recipe.text}
    with store.rows_file(path, len(samples), _datasets(recipe.height, recipe.width), about) as file:
        for row, index in enumerate(samples):
            fields = scenes.sample(grid, recipe.generator(1, index))
            file["fields"][row], file["mask"][row] = fields, detection.detect(grid, fields).mask


def simulate(options: argparse.Namespace) -> int:
    height, width = options.height or (768 if options.globe else 96), options.width or (1152 if options.globe else 144)
    recipe = Recipe(
        options.seed, height, width, options.spacing, options.south, options.west, options.globe, options.rows,
        options.validation, options.test,
    )  # fmt: skip
    members: dict[str, list[int]] = {split: [] for split in store.SPLITS}
    for index in range(options.samples):
        members[recipe.split(index)].append(index)
    command.refuse_empty([split for split in members if members[split]], options, f"--samples {options.samples}")
    jobs = [
        store.Job(options.out / split / f"samples_{number:06d}.h5", partial(write_maps, recipe, share), CONTENTS, len(share))
        for split, indices in members.items()
        for number, share in enumerate(command.parts_of(indices, recipe.rows))
    ]
    size = options.samples * height * width * (4 * len(VARIABLES) + 1)
    command.print_once(f"{options.samples} samples of {height} x {width} cells: {size / 1e6:,.0f} MB in {options.out}")
    look = partial(inspect, some=64, picture=True)
    return command.simulate("deepcam", options, recipe, jobs, _header(recipe.grid()), "samples", look)


# ---- convert


def convert_steps(root: Path, sources: Sequence[str], shape: tuple[int, int], path: Path) -> None:
    about = {**_header(Grid.globe(*shape)), "kind": "converted", "origin": "public DeepCAM time steps"}
    with store.rows_file(path, len(sources), _datasets(*shape), about) as file:
        for row, source in enumerate(sources):
            file["fields"][row], file["mask"][row] = timestep.read(root / source, shape)
        file.create_dataset("source", data=np.array(sources, "S"))


def _sources(options: argparse.Namespace) -> dict[str, list[str]]:
    """Source files of each split, sorted, relative to SOURCE: as its folders have them, or a flat folder split at random."""
    root: Path = options.source
    folders = command.source_folders(root, "data-*.h5")
    found = {}
    for split, folder in (folders or {"": root}).items():
        files = sorted(path.relative_to(root).as_posix() for path in folder.glob("data-*.h5"))
        if not files:
            raise ConfigError(f"{folder}: no files data-*.h5 there; name the folder that holds them, or its parent with train")
        found[split] = files
    if not folders:
        for text in command.wrong_fractions(options.validation, options.test):
            raise ConfigError(text)
        files = found.pop("")
        order = np.random.default_rng(options.split_seed).permutation(len(files))
        held, test = (math.floor(fraction * len(files) + 0.5) for fraction in (options.validation, options.test))
        ends = np.cumsum((len(files) - held - test, held, test))
        for split, part in zip(store.SPLITS, np.split(order, ends[:-1])):
            if len(part):
                found[split] = sorted(files[i] for i in part)
    return {split: files[: options.limit] for split, files in found.items()}


def convert(options: argparse.Namespace) -> int:
    sources = _sources(options)
    command.refuse_same(options.source, options.out)
    height, width = timestep.read(options.source / next(iter(sources.values()))[0])[1].shape
    jobs = [
        store.Job(options.out / split / f"samples_{number:06d}.h5",
                  partial(convert_steps, options.source, share, (height, width)), CONTENTS, len(share))
        for split, files in sources.items()
        for number, share in enumerate(command.parts_of(files, options.rows))
    ]  # fmt: skip
    recipe = {"kind": "convert", "rows": options.rows, "height": height, "width": width}
    recipe["sources"] = {split: f"{len(files)} files, names {command.digest(files)}" for split, files in sources.items()}
    command.print_once(f"source files: {command.told_sources(sources)}, of {height} x {width} cells in {options.source}")
    command.work(options, jobs, recipe, _header(Grid.globe(height, width)))
    return command.conclude("deepcam", options, partial(_compare, options.source / "stats.h5"))


def _compare(path: Path, out: Path) -> None:
    """Tells where the measured range of all splits is far from that of the public stats.h5."""
    if not path.is_file():
        return
    try:
        with h5py.File(path, "r") as file:
            stated = [np.asarray(file["climate"][key][...], np.float64).reshape(-1) for key in ("minval", "maxval")]
    except (OSError, KeyError) as error:
        raise DataError(f"{path}: no climate/minval and climate/maxval to compare with ({error}); move it away") from None
    if any(values.shape != (len(VARIABLES),) for values in stated):
        raise DataError(f"{path}: {stated[0].shape} values, expected {len(VARIABLES)}; move it away")
    splits = store.read_json(out / "statistics.json")["splits"].values()
    least = np.min([split["fields"]["minimum"] for split in splits], axis=0)
    most = np.max([split["fields"]["maximum"] for split in splits], axis=0)
    for name, low, high, a, b in zip(VARIABLES, least, most, *stated):
        if max(abs(low - a), abs(high - b)) > 0.1 * max(b - a, 1e-30):
            print(f"{name}: the data are {low:g} to {high:g}, {path.name} says {a:g} to {b:g}; are all files of the set there?")


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    places = command.places_of(files)
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        shares = ", ".join(f"{name} {share:.5f}" for name, share in zip(CLASSES, part["mask"]["frequency"]))
        print(f"{split}: {part['rows']} samples; {shares}")
    settings = store.read_json(out / "recipe.json")
    if settings.pop("kind", None) == "simulate" and some and not wrong:
        wrong += _against_rule(Recipe(**settings).grid(), command.spread(places, some))
    if picture and not wrong:
        _draw(out / PICTURE, places)
    return command.told(wrong)


def _against_rule(grid: Grid, places: Sequence[tuple[Path, int]]) -> Iterator[str]:
    cyclones, rivers = Counter[int](), Counter[int]()
    for path, row in places:
        with h5py.File(path, "r") as file:
            fields, mask = file["fields"][row], file["mask"][row]
        objects = detection.detect(grid, fields)
        cyclones[len(objects.cyclones)] += 1
        rivers[len(objects.rivers)] += 1
        if (objects.mask != mask).any():
            yield f"{path}: row {row}: the mask differs from the rule in {(objects.mask != mask).sum()} cells; make the file again"
    print(f"masks of {len(places)} samples compared with the rule")
    for name, found in (("tropical cyclones", cyclones), ("atmospheric rivers", rivers)):
        print(f"  {name} per sample: " + ", ".join(f"{count} in {found[count]}" for count in sorted(found)))


def _draw(path: Path, places: Sequence[tuple[Path, int]]) -> None:
    """Six samples, of those that hold something if there are so many: water, pressure and outlines."""
    seen: list[tuple[int, Path, int]] = []
    for name, row in command.spread(places, 60):
        with h5py.File(name, "r") as file:
            seen.append((len(np.unique(file["mask"][row])), name, row))
    shown = sorted(seen, key=lambda item: -item[0])[:6]
    with command.picture(path, (16, 9), 100) as figure:
        for axis, (_, name, row) in zip(figure.subplots(2, 3, squeeze=False).ravel(), shown):
            with h5py.File(name, "r") as file:
                fields, mask = file["fields"][row], file["mask"][row]
                (south, north), (west, east) = file.attrs["latitude"], file.attrs["longitude"]
            x, y = np.linspace(west, east, mask.shape[1]), np.linspace(south, north, mask.shape[0])
            names = list(VARIABLES)
            image = axis.pcolormesh(x, y, fields[..., names.index("TMQ")], cmap="YlGnBu", vmin=0, vmax=65, rasterized=True)
            axis.contour(x, y, fields[..., names.index("PSL")] / 100, np.arange(900, 1060, 4), colors="0.25", linewidths=0.5)
            for kind, color in ((detection.CYCLONE, "red"), (detection.RIVER, "blue")):
                if (mask == kind).any():
                    axis.contour(x, y, mask == kind, [0.5], colors=color, linewidths=1.5)
            axis.set(aspect="equal", xlabel="longitude (degrees)", ylabel="latitude (degrees)")
            axis.set_title(f"{name.parent.name}/{name.name} row {row}", fontsize=10)
        text = "precipitable water (kg/m2); pressure at sea level every 4 hPa; cyclones red, rivers blue"
        figure.colorbar(image, ax=figure.axes, label=text, shrink=0.8, location="bottom", aspect=60)


# ---- command line


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("deepcam", "DeepCAM data: simulate weather maps, check them, or convert the public set.")

    def shared(made: argparse.ArgumentParser, of: str) -> None:
        command.add_fractions(made, 0.1, 0.1, of)
        made.add_argument("--rows", metavar="N", type=command.positive, default=16, help="samples per file")

    one = add("simulate", "Weather maps of an idealised atmosphere, with masks of cyclones and rivers.", simulate)
    command.add_out(one)
    one.add_argument("--samples", metavar="N", type=command.positive, default=400, help="how many; a later run may ask for more")
    one.add_argument("--height", metavar="N", type=command.positive, default=None, help="rows: 96, on the globe 768")
    one.add_argument("--width", metavar="N", type=command.positive, default=None, help="columns: 144, on the globe 1152")
    one.add_argument("--spacing", metavar="X", type=float, default=0.5, help="degrees between cells of a region")
    one.add_argument("--south", metavar="X", type=float, default=8.0, help="southern edge of a region in degrees")
    one.add_argument("--west", metavar="X", type=float, default=0.0, help="western edge of a region in degrees")
    one.add_argument("--globe", action="store_true", help="the whole globe, periodic, with rows at both poles")
    shared(one, "the samples")
    command.add_making(one)

    command.add_check(add, "Files against index.json, masks against the rule", inspect, PICTURE, "--rule", 64,
                      "samples whose masks are made again")  # fmt: skip

    three = add("convert", "The public time steps (data-*.h5) to our files.", convert)
    three.add_argument("source", type=Path, metavar="SOURCE", help="holds train, validation, test; or data-*.h5, to be split")
    command.add_out(three)
    three.add_argument("--split-seed", metavar="N", type=command.natural, default=PUBLIC_SEED, help="of the split of a flat folder")
    three.add_argument("--limit", metavar="N", type=command.positive, default=None, help="at most this many source files per split")
    shared(three, "the samples of a flat folder")
    command.add_workers(three)
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
