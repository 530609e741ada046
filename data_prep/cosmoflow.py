"""CosmoFlow data: simulate universes from physics, check them, or convert the public sets.

    python -m data_prep.cosmoflow simulate OUT      universes of cold dark matter: Eisenstein-Hu spectrum, 2LPT, counts on a mesh
    python -m data_prep.cosmoflow check OUT         files against their index, spectra against the linear input, a picture
    python -m data_prep.cosmoflow convert SOURCE OUT    public MLPerf TFRecords, or HDF5 universes

The four targets are Omega_m, sigma_8, n_s and H_0, each within 10 % of (0.3, 0.8, 0.96, 70), with Omega_b = 0.045, at redshifts 0,
0.5, 1.5 and 3, as in the generator of the public universes (NERSC/cosmoflow-sims, janWorkflow/prepMusic_4par.sh, files
ics_2019-03_a*). We know of no statement that its last version, which made the published set, kept these ranges; --ranges changes
them. One difference is by choice: the public box is 512 Mpc/h * H_0/70, ours has the same Mpc/h for every H_0."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, hdf5_universe, spectrum_check, store, tfrecord, universe
from data_prep.command import option
from data_prep.store import Field
from hpcai.errors import ConfigError, DataError

PARAMETERS = ("Omega_m", "sigma_8", "n_s", "H_0")
UNITS = ("", "", "", "km/s/Mpc")
RANGES = {"Omega_m": (0.27, 0.33), "sigma_8": (0.72, 0.88), "n_s": (0.864, 1.056), "H_0": (63.0, 77.0)}
VALID_RANGES = {"Omega_m": (0.1, 1.0), "sigma_8": (0.1, 2.0), "n_s": (0.5, 1.5), "H_0": (40.0, 100.0)}   # of the fits
PARAMETER_STREAM, FIELD_STREAM, ROUNDING_STREAM = 1, 2, 3           # streams of random numbers


# ---- contents of the files


FIELDS = {
    "counts": Field("int16", (None, None, None, None), low=0, channels=3),
    "target": Field("float32", (len(PARAMETERS),), low=-1, high=1, channels=0),
}


def _sums(file: h5py.File) -> dict[str, Any]:
    """Return the sums of log(1 + count) of each channel, and of products of channels."""
    counts = file["counts"]
    cells, total, products = 0, np.zeros(counts.shape[-1]), np.zeros((counts.shape[-1],) * 2)
    for row in range(counts.shape[0]):
        cube = counts[row].reshape(-1, counts.shape[-1])
        if cube.min() < 0:
            raise DataError(f"{file.filename}: row {row} has a count of {cube.min()}, expected 0 or more")
        log = np.log1p(np.arange(cube.max() + 1))[cube]                                  # [cells, C]
        products += np.einsum("ni,nj->ij", log, log)      # not BLAS: its sums depend on the number of threads
        cells, total = cells + len(log), total + log.sum(0)
    return {"cells": cells, "log_sum": total.tolist(), "log_product": products.tolist()}


def _moments(records: Sequence[store.Record]) -> dict[str, Any]:
    names = ("cells", "log_sum", "log_product")
    cells, log, product = (np.sum([record["sums"][name] for record in records], axis=0) for name in names)
    mean = log / cells
    return {"log1p": {"mean": mean.tolist(), "covariance": (product / cells - np.outer(mean, mean)).tolist()}}


CONTENTS = store.Contents(FIELDS, _sums, _moments)


def _header(low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    return {"parameters": list(PARAMETERS), "low": list(low), "high": list(high), "units": list(UNITS)}


def _fields_with_shape(*shape: int) -> store.Fields:
    return {**FIELDS, "counts": FIELDS["counts"]._replace(shape=shape)}


# ---- options


float_list = command.option_type("list such as 0,0.5,1.5,3", lambda text: [float(part) for part in text.split(",")])


def _parse_ranges(text: str, defaults: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the default ranges, with those of the text replaced."""
    ranges = dict(defaults)
    for part in text.split(","):
        name, _, ends = part.strip().partition("=")
        low, _, high = ends.partition(":")
        if name not in PARAMETERS:
            raise argparse.ArgumentTypeError(f"'{part}': expected NAME=LOW:HIGH with NAME one of {', '.join(PARAMETERS)}")
        ranges[name] = float(low), float(high)
    return ranges


def add_ranges_option(parser: argparse.ArgumentParser, defaults: Mapping[str, tuple[float, float]] = RANGES) -> None:
    text = ",".join(f"{name}={low:g}:{high:g}" for name, (low, high) in defaults.items())
    ranges = command.option_type("list such as Omega_m=0.27:0.33,H_0=63:77", partial(_parse_ranges, defaults=defaults))
    parser.add_argument("--ranges", metavar="NAME=LOW:HIGH,...", type=ranges, default=text, help="change some of them")


def range_ends(options: argparse.Namespace) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the low and high ends of the ranges, in the order of the parameters."""
    return tuple(options.ranges[name][0] for name in PARAMETERS), tuple(options.ranges[name][1] for name in PARAMETERS)


def omega_b_option() -> Any:
    return option(0.045, "baryon density, the same in every universe", metavar="X", type=float)


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated universe, besides its index."""

    seed: int = command.seed()
    size: int = option(32, "cells per side of a sample", type=command.positive)
    cut: int = option(2, "samples per side of a universe", type=command.positive)
    voxel: float = option(8.0, "width of a cell in Mpc/h", metavar="X", type=float)
    redshifts: tuple[float, ...] = option((0.0, 0.5, 1.5, 3.0), "one channel each", metavar="Z,Z,...", type=float_list)
    particles: int = option(2, "simulated particles", "particles-per-cell", type=int, choices=sorted(universe.LATTICES))
    mean_count: float = option(16.0, "counts in a cell of mean density", metavar="X", type=command.within(0.1, 1000))
    omega_b: float = omega_b_option()
    low: tuple[float, ...] = ()                 # of the ranges
    high: tuple[float, ...] = ()
    validation: float = command.fraction(0.125, "the universes")
    test: float = command.fraction(0.0, "the universes")

    def mistakes(self) -> Iterator[str]:
        if self.cells < 8 or self.cells % 2:
            yield f"--size {self.size} times --cut {self.cut} is {self.cells} cells per side, expected an even 8 or more"
        if not 0.1 <= self.voxel <= 100:
            yield f"--voxel is {self.voxel} Mpc/h, expected 0.1 to 100"
        if not self.redshifts or len(set(self.redshifts)) < len(self.redshifts) or not all(0 <= z <= 50 for z in self.redshifts):
            yield f"--redshifts are {list(self.redshifts)}, expected different numbers from 0 to 50"
        for name, low, high in zip(PARAMETERS, self.low, self.high):
            least, most = VALID_RANGES[name]
            if not least <= low < high <= most:
                yield f"--ranges {name}={low}:{high}: expected LOW below HIGH, within {least} to {most}"
        if not 0 < self.omega_b < self.low[0] / 2:
            yield f"--omega-b is {self.omega_b}, expected above 0 and below half of the least Omega_m, {self.low[0] / 2}"

    @property
    def cells(self) -> int:
        return self.size * self.cut

    def target(self, index: int) -> NDArray[np.float64]:
        """Return the parameters in [-1, 1): a point of an additive low-discrepancy sequence with square roots of primes (Richtmyer
        1951; these four correlate least), shifted by the seed. Any range of indices covers each parameter evenly, so a set can
        grow. Every eighth point lies near one of eight values, which is why splits are drawn at random."""
        step = np.sqrt((3, 5, 13, 19))
        return 2 * ((self.generator(PARAMETER_STREAM, 0).random(4) + index * step) % 1) - 1

    def physical(self, index: int) -> NDArray[np.float64]:
        low, high = np.array(self.low), np.array(self.high)
        return low + (self.target(index) + 1) / 2 * (high - low)


_mesh = lru_cache(maxsize=1)(universe.Mesh)


def simulate_density(recipe: Recipe, index: int) -> NDArray[np.float64]:
    """Simulate the matter per cell of the full universe in units of the mean, [Z, N, N, N]."""
    omega_m, sigma_8, n_s, hubble = (float(value) for value in recipe.physical(index))
    cosmology = universe.Cosmology(omega_m, sigma_8, n_s, hubble, recipe.omega_b)
    mesh = _mesh(recipe.cells, recipe.voxel)
    noise = recipe.generator(FIELD_STREAM, index).standard_normal((recipe.cells,) * 3, dtype=np.float32)
    modes = universe.linear_modes(mesh, universe.Spectrum(cosmology), noise)
    return universe.density(mesh, modes, omega_m, recipe.redshifts, recipe.particles)


def simulate_counts(recipe: Recipe, index: int) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Simulate the counts of the full universe [N, N, N, Z]. Returns them and the variance of their rounding [Z]."""
    mass = simulate_density(recipe, index)
    try:
        counts, variance = universe.round_counts(mass, recipe.mean_count, recipe.generator(ROUNDING_STREAM, index))
    except OverflowError as error:
        smaller = f"choose a smaller --mean-count than {recipe.mean_count:g}"
        raise DataError(f"universe {index}: {error}, above the range of int16; {smaller}") from None
    return np.ascontiguousarray(np.moveaxis(counts, 0, -1)), variance


def write_universe(recipe: Recipe, index: int, path: Path) -> None:
    counts, variance = simulate_counts(recipe, index)
    attributes = {
        **_header(recipe.low, recipe.high), "rounding_variance": variance, "redshifts": np.array(recipe.redshifts),
        "voxel_mpc_h": recipe.voxel, "physical": recipe.physical(index), "seed": recipe.seed, "universe": index,
        "recipe": recipe.json_text,
    }  # fmt: skip
    shape = (recipe.size,) * 3 + (len(recipe.redshifts),)
    with store.create_file(path, recipe.cut**3, _fields_with_shape(*shape), attributes) as file:
        for row, cube in enumerate(hdf5_universe.split_cubes(counts, recipe.size)):
            file["counts"][row] = cube
        file["target"][...] = recipe.target(index).astype(np.float32)


def simulate(options: argparse.Namespace) -> command.Plan:
    low, high = range_ends(options)
    recipe, rows = Recipe.from_options(options, low=low, high=high), options.cut**3
    splits = [recipe.split(index) for index in range(options.universes)]
    command.require_splits(splits, options, f"--universes {options.universes}")
    jobs = [store.Job(options.out / split / f"universe_{index:06d}.h5", partial(write_universe, recipe, index), CONTENTS, rows)
            for index, split in enumerate(splits)]  # fmt: skip
    size = len(jobs) * recipe.cells**3 * len(recipe.redshifts) * 2
    message = f"{rows} samples of {recipe.size}^3 x {len(recipe.redshifts)} each: {size / 1e6:,.0f} MB in {options.out}"
    return command.Plan(recipe, jobs, _header(low, high), f"{len(jobs)} universes, {message}")


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    """Settings of a conversion: the part of the public files that is read."""

    rows_per_file: int = option(64, "TFRecord files per output file", type=command.positive)
    channels: int = option(4, "channels of a sample", type=command.positive)
    cut_size: int = option(128, "cells per side of a sample of an HDF5 universe", type=command.positive)
    skip_bad: bool = command.skip_bad()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=store.SPLITS, default=None, help="only this split, or the split of a flat folder")
    parser.add_argument("--limit", metavar="N", type=command.positive, default=None, help="source files per split, at most")
    add_ranges_option(parser)


def convert_files(root: Path, sources: Sequence[str], source: Source, attributes: dict[str, Any], path: Path) -> store.Refused:
    convert = partial(_convert_records, root, sources, source, attributes, path)
    try:
        return convert(len(sources))
    except _RowCountError:                      # not one sample per file as in the public TFRecords: count first
        return convert(sum(_count_rows(root / name, source) for name in sources))


class _RowCountError(Exception):
    """The source files have more records than rows."""


def _count_rows(path: Path, source: Source) -> int:
    count = 0
    with suppress(DataError):                   # reported when the samples are read
        if h5py.is_hdf5(path):
            return hdf5_universe.count_samples(path, source.channels, source.cut_size)
        for count, _ in enumerate(tfrecord.read_payloads(path), 1):  # noqa: B007
            pass
    return count


def _usable_samples(
    root: Path, sources: Sequence[str], source: Source, skipped: store.Skipped
) -> Iterator[tuple[str, NDArray[np.int16], NDArray[np.float32]]]:
    """Yield (source file, counts, target) of all samples, which have the same shape."""
    shape: tuple[int, ...] = ()
    for name in sources:
        path = root / name
        with skipped.catch(path):
            samples = (hdf5_universe.read_samples(path, source.channels, source.cut_size) if h5py.is_hdf5(path)
                       else tfrecord.read_samples(path, source.channels))  # fmt: skip
            for where, counts, target in samples:
                shape = shape or counts.shape
                if len(target) != len(PARAMETERS):
                    raise DataError(f"{where}: {len(target)} target values, expected {len(PARAMETERS)} ({', '.join(PARAMETERS)})")
                if counts.shape != shape:
                    raise DataError(f"{where}: counts {counts.shape}, expected {shape} as in the first sample")
                yield name, counts, target


def _convert_records(
    root: Path, sources: Sequence[str], source: Source, attributes: dict[str, Any], path: Path, rows: int
) -> store.Refused:
    names, skipped = list[str](), store.Skipped(source.skip_bad)
    samples = _usable_samples(root, sources, source, skipped)
    if (first := next(samples, None)) is None:
        return skipped
    with store.create_file(path, rows, _fields_with_shape(*first[1].shape), attributes) as file:
        for name, counts, target in chain([first], samples):
            if len(names) >= rows:
                raise _RowCountError
            file["counts"][len(names)], file["target"][len(names)] = counts, target
            names.append(name)
        store.truncate_rows(file, len(names))
        file["source"] = np.array(names, "S")
    return skipped


def _source_files(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the source files of each split, sorted, relative to SOURCE."""
    root: Path = options.source
    folders = command.source_folders(root, "the files of one --split")
    if options.split:
        folders = {options.split: folders.get(options.split, root)}
    if not folders:
        raise ConfigError(f"{root}: contains no folder train, validation or test; for a flat folder give --split")
    sources = {}
    for split, folder in folders.items():
        files = [path.relative_to(root).as_posix() for path in command.data_files(folder)]
        if not files:
            raise ConfigError(f"{folder}: no files, expected TFRecords or HDF5 universes")
        sources[split] = files[: options.limit]
    return sources


def convert(options: argparse.Namespace) -> command.Plan:
    source, sources, (low, high) = Source.from_options(options), _source_files(options), range_ends(options)
    # The public voxel is H_0/70 Mpc/h: 512 cells in a box of the same size in Mpc for every universe.
    attributes = {**_header(low, high), "redshifts": np.array((0.0, 0.5, 1.5, 3.0))[: options.channels], "voxel_mpc_h": 1.0}
    jobs: list[store.Job] = []
    for split, files in sources.items():
        files_per_file = 1 if h5py.is_hdf5(options.source / files[0]) else source.rows_per_file
        for number, names in enumerate(command.batched(files, files_per_file)):
            write = partial(convert_files, options.source, names, source, attributes)
            jobs.append(store.Job(options.out / split / f"samples_{number:06d}.h5", write, CONTENTS))
    recipe = {"kind": "convert", **source.json_dict, "low": list(low), "high": list(high),
              "sources": {split: command.fingerprint(files) for split, files in sources.items()}}  # fmt: skip
    total = sum((options.source / file).stat().st_size for files in sources.values() for file in files)
    message = f"source files: {command.describe_sources(sources)}, {total / 1e6:,.1f} MB in {options.source}"
    return command.Plan(recipe, jobs, _header(low, high), message)


BUILDER = command.DatasetBuilder(
    "cosmoflow", "CosmoFlow data: simulate universes, check them, or convert the public sets.", "cosmoflow",
    command.Check("Files against index.json, spectra against the linear input.", spectrum_check.check_spectra,
                  ("spectra", 64, "universes whose spectra are measured")),
    (command.Simulate("Universes of cold dark matter, from their four parameters to particle counts.", Recipe,
                      ("universes", 256), simulate, add_ranges_option),
     command.Convert("Public MLPerf TFRecords, plain or gzip, or HDF5 universes.", Source, convert,
                     "holds train, validation, test; or the files of one --split", add_options)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
