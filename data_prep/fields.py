"""Fields and their coarse counterparts, to generate one from the other: simulate, convert and check them.

    python -m data_prep.fields simulate OUT --kind matter     slabs of simulated universes: projected density of matter, 64 x 64
    python -m data_prep.fields simulate OUT --kind volumes    full small universes: density of matter, 32^3
    python -m data_prep.fields simulate OUT --kind weather    maps of an idealised atmosphere of the globe, 64 x 96
    python -m data_prep.fields simulate OUT --kind turbulence trajectories of two-dimensional turbulence, 64 x 64
    python -m data_prep.fields convert SOURCE OUT             fields of NetCDF, Zarr, GRIB, HDF5 or .npy: data_prep.field_pairs
    python -m data_prep.fields check OUT                      files against their index, low against high, a picture

    OUT/{train,validation,test}/fields_000000.h5   "high" float32 [N, C, *S] and "low" float32 [N, C, *s], standardized
                                                   "parameters" float32 [N, P] in [-1, 1]; absent for weather
                                                   "step" int64 [N], of trajectories, in place of the last two
    OUT/static.safetensors                         of weather: "weights" float32 [C, *S], areas of cells (data_prep.field_pairs)

docs/data.md ("Fields and their coarse counterparts") describes the fields, their units, transforms and splits.

N rows of a file   C channels   S, s cells per dim   P parameters"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, cosmoflow, field_pairs, scenes, store, turbulence, universe
from data_prep.atmosphere import VARIABLES
from data_prep.command import option
from data_prep.field_pairs import block_mean
from data_prep.grids import cell_areas
from data_prep.sphere import Grid
from data_prep.standardize import Standard
from data_prep.store import Field
from hpcai.errors import ConfigError, DataError

Array = NDArray[np.float64]

# Wider than CosmoFlow's in the parameters with most effect on a map, so that conditioning matters.
RANGES = {**cosmoflow.RANGES, "Omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
CHANNELS = ("TMQ", "U850", "V850", "PSL")
STATISTICS_SIZE = 16            # universes or moments for mean and deviation
FLOOR = 0.05                    # added before the logarithm, in units of the mean density
OVERSAMPLING = 2                # of the grids of weather, whose cyclones are narrower than a cell of the map, and turbulence
WEATHER_STREAM, TURBULENCE_STREAM = 1, 2
INTERVAL = 0.33                 # time between frames of turbulence; 40 trajectories of 64 x 64: they correlate by 0.80
TOLERANCE = 1e-4                # deviations: rounding error of float32 between low and the mean of high


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The common settings of all kinds. A kind simulates the rows of one universe or moment, by its number."""

    transform: ClassVar[tuple[str, float]] = ("none", 0.0)      # of all channels, and its floor
    field: str = "matter"
    seed: int = command.seed()
    size: int = option(None, "cells per side: 64, of volumes 32; rows of a map of the weather", type=command.positive)
    factor: int = option(4, "cells of high along a cell of low", type=command.positive)
    rows: int = option(48, "samples per file, in complete universes", type=command.positive)
    validation: float = command.fraction(0.12, "the universes, or moments of weather")
    test: float = command.fraction(0.0, "the universes, or moments of weather")
    mean: tuple[float, ...] = ()                # of each channel; empty until computed
    deviation: tuple[float, ...] = ()

    def mistakes(self) -> Iterator[str]:
        if self.size < 8 or self.size % 4:
            yield f"--size {self.size}: expected a multiple of 4 of 8 or more"
        elif not 2 <= self.factor <= self.size // 2 or any(cells % self.factor for cells in self.shape):
            yield f"--factor {self.factor}: expected 2 or more that divides {' and '.join(map(str, self.shape))} twice or more"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the cells of each dim."""
        raise NotImplementedError

    @property
    def rows_per_index(self) -> int:
        """Return the number of rows of one universe or moment."""
        return 1

    def weights_and_interval(self) -> tuple[Array | None, tuple[float, str] | None]:
        """Return the weights of cells [C, *S], and the time between frames of trajectories with its unit, if there are any."""
        return None, None

    def simulate(self, number: int) -> Array:
        """Return the fields in physical units.   [rows, C, *S]"""
        raise NotImplementedError

    def target(self, number: int) -> Array:
        """Return the parameters in [-1, 1].   [P]"""
        return np.zeros(0)

    def kind_header(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def standard(self) -> Standard:
        return Standard.from_header(self.header())

    def coarsen(self, values: Array) -> Array:
        """The coarse counterpart, standardised, from physical units.   [..., C, *S] -> [..., C, *s]"""
        return self.standard.apply(block_mean(values, self.factor, len(self.shape)))

    def rows_of(self, number: int) -> dict[str, Array]:
        """Return the rows of one universe or moment, by dataset."""
        values, parameters = self.simulate(number), self.target(number)
        rows = {"high": self.standard.apply(values), "low": self.coarsen(values)}
        return {**rows, "parameters": np.tile(parameters, (len(values), 1))} if len(parameters) else rows

    def header(self) -> dict[str, Any]:
        (kind, floor), count = self.transform, len(self.mean)
        about = {"transforms": [kind] * count, "floors": [floor] * count, "mean": [*self.mean], "deviation": [*self.deviation]}
        return {"kind": self.field, "factor": self.factor, **about, **field_pairs.NO_PARAMETERS, **self.kind_header()}

    def fields(self) -> store.Fields:
        channels, low = len(self.mean), tuple(cells // self.factor for cells in self.shape)
        parameters = len(self.header()["parameters"])
        shapes = {"high": (channels, *self.shape), "low": (channels, *low)}
        fields = {name: Field("float32", shape, channels=0) for name, shape in shapes.items()}
        return {**fields, "parameters": Field("float32", (parameters,), -1, 1, channels=0)} if parameters else fields


@dataclass(frozen=True)
class Matter(Recipe):
    """Universes, and the slabs of their density."""

    transform: ClassVar[tuple[str, float]] = ("log", FLOOR)
    voxel: float = option(None, "width of a cell in Mpc/h: 1, of volumes 4", metavar="X", type=float)
    slabs: int = option(2, "maps along each axis of a universe", type=command.positive)         # 0 for the full cube
    thickness: int = option(16, "cells of a slab", type=command.positive)
    particles: int = option(None, "simulated: 8, of volumes 4", "particles-per-cell", type=int, choices=[*universe.LATTICES])
    omega_b: float = cosmoflow.omega_b_option()
    low_end: tuple[float, ...] = ()             # of the ranges
    high_end: tuple[float, ...] = ()

    def mistakes(self) -> Iterator[str]:
        mistakes = list(super().mistakes())
        if self.slabs and not 1 <= self.thickness * self.slabs <= self.size:
            mistakes.append(f"--slabs {self.slabs} of --thickness {self.thickness}: more than the {self.size} cells of --size")
        if not mistakes:
            try:
                _ = self.universes
            except ConfigError as error:
                mistakes.append(str(error))
        yield from mistakes

    @property
    def universes(self) -> cosmoflow.Recipe:
        cube, ends = (self.seed, self.size, 1, self.voxel, (0.0,), self.particles, 1.0), (self.low_end, self.high_end)
        return cosmoflow.Recipe(*cube, self.omega_b, *ends, 0.0, 0.0)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,) * (2 if self.slabs else 3)

    @property
    def rows_per_index(self) -> int:
        return 3 * self.slabs or 1

    def simulate(self, number: int) -> Array:
        """Return the density in units of the mean: of the slabs along the first axis, the second, the third, or of the cube."""
        density = cosmoflow.simulate_density(self.universes, number)[0]
        if not self.slabs:
            return density[None, None]
        starts = [slab * self.size // self.slabs for slab in range(self.slabs)]
        return np.array([
            [np.moveaxis(density, axis, 0)[start : start + self.thickness].mean(0)] for axis in range(3) for start in starts
        ])  # fmt: skip

    def target(self, number: int) -> Array:
        return self.universes.target(number)

    def kind_header(self) -> dict[str, Any]:
        side, dims = self.size * self.voxel, len(self.shape)
        return {
            "channels": ["density"], "channel_units": ["mean density"],
            "undo": "density = exp(mean + deviation * value) - floor",
            "box": [side] * dims, "box_units": "Mpc/h", "periodic": [True] * dims, "redshift": 0.0,
            **({"thickness": self.thickness * self.voxel} if self.slabs else {}),
            "parameters": list(cosmoflow.PARAMETERS), "low": list(self.low_end), "high": list(self.high_end),
            "units": list(cosmoflow.UNITS),
        }  # fmt: skip


@dataclass(frozen=True)
class Weather(Recipe):
    """Moments of an idealised atmosphere."""

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        spacing = 240 / self.size / OVERSAMPLING
        if spacing > 2:
            yield f"--size {self.size} gives cells of {spacing:g} degrees, expected 2 or less: cyclones are 1 degree wide"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.size * 3 // 2

    def simulate(self, number: int) -> Array:
        height, width = (OVERSAMPLING * cells for cells in self.shape)
        latitude, longitude = ((np.arange(cells) + 0.5) / cells for cells in (height, width))
        grid = Grid(180 * latitude - 90, 360 * longitude, True)
        fields = scenes.sample(grid, self.generator(WEATHER_STREAM, number)).astype(np.float64)
        chosen = np.moveaxis(fields[..., [list(VARIABLES).index(name) for name in CHANNELS]], -1, 0)
        return block_mean(chosen, OVERSAMPLING, 2)[None]

    def weights_and_interval(self) -> tuple[Array | None, tuple[float, str] | None]:
        height, width = self.shape
        areas = cell_areas((np.arange(height) + 0.5) * 180 / height - 90), np.ones(width)
        return field_pairs.cell_weights(areas, np.zeros((len(CHANNELS), height, width), bool)), None

    def kind_header(self) -> dict[str, Any]:
        return {
            "channels": list(CHANNELS), "channel_units": [VARIABLES[name].units for name in CHANNELS],
            "undo": "field = mean + deviation * value",
            "box": [180.0, 360.0], "box_units": "degrees", "periodic": [False, True],
            "note": "kinematic: an idealised atmosphere at one instant, southernmost row first; no weather model",
        }  # fmt: skip


@dataclass(frozen=True)
class Turbulence(Recipe):
    """Trajectories of the vorticity of two-dimensional turbulence."""

    frames: int = 16

    def mistakes(self) -> Iterator[str]:
        if self.size < 16 or self.size % 4:
            yield f"--size {self.size}: expected a multiple of 4 of 16 or more"
        if self.frames < 3:
            yield f"--frames {self.frames}: expected 3 or more"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.size

    @property
    def rows_per_index(self) -> int:
        return self.frames

    def weights_and_interval(self) -> tuple[Array | None, tuple[float, str] | None]:
        return None, (round(INTERVAL * self.deviation[0], 3), "eddy turnover times")      # 1 / deviation of vorticity

    def simulate(self, number: int) -> Array:
        random = self.generator(TURBULENCE_STREAM, number)
        return block_mean(turbulence.simulate(OVERSAMPLING * self.size, self.frames, INTERVAL, random), OVERSAMPLING, 2)[:, None]

    def rows_of(self, number: int) -> dict[str, Array]:
        return {"high": self.standard.apply(self.simulate(number)), "step": np.arange(self.frames)}

    def fields(self) -> store.Fields:
        return {"high": Field("float32", (1, *self.shape), channels=0), "step": Field("int64")}

    def kind_header(self) -> dict[str, Any]:
        return {
            "channels": ["vorticity"], "channel_units": ["1/time"], "undo": "field = mean + deviation * value",
            "box": [2 * np.pi] * 2, "box_units": "length", "periodic": [True, True],
        }  # fmt: skip


KINDS: dict[str, type[Recipe]] = {"matter": Matter, "volumes": Matter, "weather": Weather, "turbulence": Turbulence}


def with_statistics(recipe: Recipe, out: Path) -> Recipe:
    """Return the recipe with mean and deviation: those of the recipe saved in the folder, if all else is equal, or those of the
    first numbers of the training split."""
    path, settings = out / "recipe.json", {"kind": "simulate", **recipe.json_dict}
    if path.is_file():
        saved = store.read_json(path)
        if saved.get("mean") and {**saved, "mean": [], "deviation": []} == settings:
            return replace(recipe, mean=tuple(saved["mean"]), deviation=tuple(saved["deviation"]))
    first = islice((number for number in range(10**6) if recipe.split(number) == "train"), STATISTICS_SIZE)
    fields = np.concatenate([recipe.simulate(number) for number in first])
    kind, floor = ((each,) * fields.shape[1] for each in recipe.transform)
    mean, deviation = Standard(len(recipe.shape), kind, floor).measured(fields)[3:]
    mean = tuple(value if abs(value) > TOLERANCE * width else 0.0 for value, width in zip(mean, deviation))
    return replace(recipe, mean=mean, deviation=deviation)


def write_fields(recipe: Recipe, numbers: Sequence[int], path: Path) -> None:
    n, about = recipe.rows_per_index, {**recipe.header(), "seed": recipe.seed, "numbers": list(numbers), "recipe": recipe.json_text}
    with store.create_file(path, n * len(numbers), recipe.fields(), about) as file:
        for position, number in enumerate(numbers):
            for name, values in recipe.rows_of(number).items():
                file[name][position * n : (position + 1) * n] = values


def add_kind_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", choices=KINDS, required=True, help="kind of fields")
    parser.add_argument("--frames", metavar="N", type=command.positive, default=16, help="of a trajectory of turbulence")
    cosmoflow.add_ranges_option(parser, RANGES)


def simulate(options: argparse.Namespace) -> command.Plan:
    volumes, voxel, (low, high) = options.kind == "volumes", options.voxel, cosmoflow.range_ends(options)
    cube = {"slabs": 0, "thickness": 0} if volumes else {}
    extra: dict[str, Any] = {"field": options.kind, "size": options.size or (32 if volumes else 64)}
    if options.kind == "turbulence":
        extra["factor"] = 0
    elif options.kind != "weather":
        extra |= {**cube, "voxel": (4.0 if volumes else 1.0) if voxel is None else voxel, "low_end": low, "high_end": high}
        extra["particles"] = options.particles or (4 if volumes else 8)
    recipe = KINDS[options.kind].from_options(options, **extra)
    count = -(-options.samples // recipe.rows_per_index)
    members = recipe.numbers_by_split(count)
    command.require_splits([split for split in members if members[split]], options, f"--samples {options.samples}")
    recipe = with_statistics(recipe, options.out)
    contents = store.Contents(recipe.fields())
    jobs = [
        store.Job(options.out / split / f"fields_{file:06d}.h5", partial(write_fields, recipe, numbers), contents,
                  len(numbers) * recipe.rows_per_index)
        for split, members_of_split in members.items()
        for file, numbers in enumerate(command.batched(members_of_split, max(1, recipe.rows // recipe.rows_per_index)))
    ]  # fmt: skip
    units = {"weather": "moments", "turbulence": "trajectories"}.get(recipe.field, "universes")
    cells = " x ".join(map(str, (len(recipe.mean), *recipe.shape)))
    message = f"{count * recipe.rows_per_index} samples of {cells} cells from {count} {units} in {options.out}"
    config = {"matter": "small", "volumes": "small3d"}.get(recipe.field, recipe.field)
    weights, interval = recipe.weights_and_interval()
    header = {**recipe.header(), "static": [], "weighted": weights is not None, "interval": interval}
    return command.Plan(recipe, jobs, header, message, finalize=partial(field_pairs.write_shared, {}, weights), config=config)


# ---- check


def check_samples(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the rows in which ``low`` is not the mean of ``high``, or the mean of a simulated field is not conserved."""
    field, index = prepared.recipe.get("field"), prepared.index
    if field not in KINDS and "factor" not in prepared.recipe:
        raise DataError(f"{prepared.out}: recipe.json is not of data_prep.fields; name another folder")
    masked, compares = field_pairs.read_weights(prepared.out, index) == 0, index["factor"] and not prepared.recipe.get("coarse")
    conserved = {"volumes": ("density", 1), "turbulence": ("vorticity", 0)}.get(field or "")
    for name, dataset in (("fine", "fine"), ("coarse", "low")):
        if name in index and {*map(len, index[name].values())} != {index["fields"].get(dataset, {"shape": [0]})["shape"][0]}:
            raise DataError(f"{prepared.out}: index.json describes other channels of {name} than '{dataset}' has; make it again")
    if not compares:
        print("low is of a source of its own, or absent, and is not compared with the mean of high")
    standard, factor = Standard.from_header(index), index["factor"]
    rows = command.subsample(prepared.locations, options.check_count) if compares or conserved else ()
    for path, row in rows:
        with h5py.File(path, "r") as file:
            high, low = standard.invert(np.where(masked, np.nan, file["high"][row])), file["low"][row] if compares else None
        if compares and (error := np.nanmax(np.abs(standard.apply(block_mean(high, factor, standard.sides)) - low))) > TOLERANCE:
            yield f"{path}: row {row}: 'low' is {error:.2g} deviations off the mean of blocks of 'high'; make the file again"
        if conserved and abs(excess := high.mean() - conserved[1]) > TOLERANCE:
            yield f"{path}: row {row}: the mean {conserved[0]} is off by {excess:.2g}, it is not conserved; make the file again"
    if compares:
        print(f"low of {len(rows)} samples compared with the mean of high")


BUILDER = command.DatasetBuilder(
    "fields", "Fields and their coarse counterparts: simulate, convert and check them.", "diffusion",
    command.Check("Files against index.json, low against high.", check_samples, ("rows", 1000, "samples to recompute")),
    (command.Simulate("Density of matter in slabs or volumes, or maps of the weather, each with its coarse counterpart.", Matter,
                      ("samples", 1700), simulate, add_kind_option, "how many, in complete universes; a later run may add more"),
     command.Convert("Fields of NetCDF, Zarr, GRIB, HDF5 or .npy files, each with its coarse counterpart.",
                     field_pairs.Conversion, field_pairs.convert,
                     "a file, a Zarr store, or a folder of them with one grid", field_pairs.add_coarse)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
