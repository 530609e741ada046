"""DeepCAM data: simulate weather maps with cyclones and rivers, check them, or convert the public set.

    python -m data_prep.deepcam simulate OUT        an idealised atmosphere; masks by a rule on its fields (data_prep.detection)
    python -m data_prep.deepcam check OUT           files against their index, masks against the rule, a picture
    python -m data_prep.deepcam convert SOURCE OUT  the public time steps of CAM5, data-*.h5

    OUT/{train,validation,test}/samples_000000.h5   "fields" float32 [N, H, W, 16] and "mask" uint8 [N, H, W]
                                                    0 background, 1 tropical cyclone, 2 atmospheric river

The small region has higher frequencies of both classes than the globe of the public set (0.9863, 0.0005 and
0.0133): a cyclone covers more of a smaller map.

N rows of a file   H, W latitudes (south to north) and longitudes   16 the VARIABLES, in the order of the public data"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, detection, scenes, store, timestep
from data_prep.atmosphere import VARIABLES
from data_prep.command import option
from data_prep.sphere import Grid
from data_prep.store import Field
from hpcai.errors import ConfigError, DataError

CLASSES = ("background", "tropical cyclone", "atmospheric river")


# ---- contents of the files


def fields(height: int, width: int) -> store.Fields:
    return {
        "fields": Field("float32", (height, width, len(VARIABLES)), channels=2),
        "mask": Field("uint8", (height, width), 0, len(CLASSES) - 1, blank=0, classes=len(CLASSES)),   # calm weather has no object
    }


def _header(grid: Grid) -> dict[str, Any]:
    south, north, west, east = grid.bounds
    units = [variable.units for variable in VARIABLES.values()]
    extent = {"latitude": [south, north], "longitude": [west, east], "periodic": grid.periodic}
    return {"variables": list(VARIABLES), "units": units, "classes": list(CLASSES), **extent}


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated sample, besides its index, and its split."""

    seed: int = command.seed()
    height: int = option(None, "rows: 96, on the globe 768", type=command.positive)
    width: int = option(None, "columns: 144, on the globe 1152", type=command.positive)
    spacing: float = option(0.5, "degrees between cells of a region; unused with --globe", metavar="X", type=float)
    south: float = option(8.0, "southern edge of a region in degrees", metavar="X", type=float)
    west: float = option(0.0, "western edge of a region in degrees", metavar="X", type=command.within(-360, 360))
    globe: bool = option(False, "the full globe, periodic, with rows at both poles", action="store_true")
    rows: int = option(16, "samples per file", type=command.positive)
    validation: float = command.fraction(0.1, "the samples")
    test: float = command.fraction(0.1, "the samples")

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

    def grid(self) -> Grid:
        if self.globe:
            return Grid.globe(self.height, self.width)
        return Grid.region(self.height, self.width, self.spacing, self.south, self.west)


def write_maps(recipe: Recipe, samples: Sequence[int], path: Path) -> None:
    grid = recipe.grid()
    attributes = {**_header(grid), "kind": "simulated", "seed": recipe.seed, "samples": list(samples), "recipe": recipe.json_text}
    with store.create_file(path, len(samples), fields(recipe.height, recipe.width), attributes) as file:
        for row, index in enumerate(samples):
            values = scenes.sample(grid, recipe.generator(1, index))
            file["fields"][row], file["mask"][row] = values, detection.detect(grid, values)


def simulate(options: argparse.Namespace) -> command.Plan:
    height, width = options.height or (768 if options.globe else 96), options.width or (1152 if options.globe else 144)
    recipe = Recipe.from_options(options, height=height, width=width)
    members = recipe.numbers_by_split(options.samples)
    command.require_splits([split for split in members if members[split]], options, f"--samples {options.samples}")
    jobs = _jobs(options, members, partial(write_maps, recipe), height, width)
    size = options.samples * height * width * (4 * len(VARIABLES) + 1)
    message = f"{options.samples} samples of {height} x {width} cells: {size / 1e6:,.0f} MB in {options.out}"
    return command.Plan(recipe, jobs, _header(recipe.grid()), message)


def _jobs(options: argparse.Namespace, members: Any, write: Any, height: int, width: int) -> list[store.Job]:
    contents = store.Contents(fields(height, width))
    return [store.Job(options.out / split / f"samples_{number:06d}.h5", partial(write, names), contents, len(names))
            for split, items in members.items() for number, names in enumerate(command.batched(items, options.rows))]  # fmt: skip


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    rows: int = option(16, "samples per file", type=command.positive)
    limit: int | None = option(None, "source files per split, at most", type=command.positive)
    skip_bad: bool = command.skip_bad()


def convert_steps(root: Path, shape: tuple[int, int], skip_bad: bool, sources: Sequence[str], path: Path) -> store.Refused:
    attributes = {**_header(Grid.globe(*shape)), "kind": "converted", "origin": "public DeepCAM time steps"}
    with store.create_file(path, len(sources), fields(*shape), attributes) as file:
        names, skipped = list[str](), store.Skipped(skip_bad)
        for source in sources:
            with skipped.catch(root / source):
                file["fields"][len(names)], file["mask"][len(names)] = timestep.read(root / source, shape)
                names.append(source)
        store.truncate_rows(file, len(names))
        file["source"] = np.array(names, "S")
    return skipped


def _first_shape(paths: Sequence[Path], skip_bad: bool) -> tuple[int, ...]:
    skipped = store.Skipped(skip_bad)
    for path in paths:
        with skipped.catch(path):
            return timestep.read(path)[1].shape
    raise DataError(f"no file can be used: {store.count_by_reason(skipped)}")


def convert(options: argparse.Namespace) -> command.Plan:
    sources, unread = dict[str, list[str]](), list[tuple[str, str]]()
    for split, folder in command.source_folders(options.source, "data-*.h5 in each").items():
        steps = sorted(folder.glob("data-*.h5"))
        files = [path.relative_to(options.source).as_posix() for path in steps][: options.limit]
        unread += [(str(path), f"files {path.suffix} are not read") for path in command.data_files(folder) if path not in steps]
        if not files:
            raise ConfigError(f"{folder}: no files data-*.h5; name the folder of the splits, such as train")
        sources[split] = files
    if not sources:
        raise ConfigError(f"{options.source}: holds no folder train, validation or test; put the files of each split into one")
    height, width = _first_shape([options.source / file for files in sources.values() for file in files], options.skip_bad)
    recipe = {"kind": "convert", "rows": options.rows, "height": height, "width": width,
              "sources": {split: command.fingerprint(files) for split, files in sources.items()}}  # fmt: skip
    message = f"source files: {command.describe_sources(sources)}, of {height} x {width} cells in {options.source}"
    jobs = _jobs(options, sources, partial(convert_steps, options.source, (height, width), options.skip_bad), height, width)
    return command.Plan(recipe, jobs, _header(Grid.globe(height, width)), message, refused=unread)


# ---- check


def check_samples(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the masks of a simulation that differ from the rule."""
    recipe = prepared.simulation_settings(Recipe)
    if recipe is None:
        return
    grid, rows = recipe.grid(), command.subsample(prepared.locations, options.check_count)
    for path, row in rows:
        with h5py.File(path, "r") as file:
            values, mask = file["fields"][row], file["mask"][row]
        if different := (detection.detect(grid, values) != mask).sum():
            yield f"{path}: row {row}: the mask differs from the rule in {different} cells; make the file again"
    print(f"masks of {len(rows)} samples compared with the rule")


BUILDER = command.DatasetBuilder(
    "deepcam", "DeepCAM data: simulate weather maps, check them, or convert the public set.", "deepcam",
    command.Check("Files against index.json, masks against the rule.", check_samples, ("rule", 64, "masks to recompute")),
    (command.Simulate("Maps of an idealised atmosphere, with masks of cyclones and rivers.", Recipe, ("samples", 400), simulate),
     command.Convert("The public time steps (data-*.h5) to our files.", Source, convert,
                     "holds train, validation, test with data-*.h5")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
