"""Fields of files that people have (data_prep.grids), converted to samples with coarse counterparts.

Samples are in the order of time: the first ones train, the last ones are held out. The coarse counterpart is the mean of blocks, or
a field of another source, which is refused if it does not resemble that mean. A channel of positive values has the logarithm or
square root after which its distribution is least skewed (data_prep.standardize).

N samples, C channels, S and s cells of each side"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import command, grids, store
from data_prep.command import option
from data_prep.standardize import FORWARD, UNDO, Standard, skewness
from data_prep.store import Field
from hpcai.errors import ConfigError, DataError

Array = NDArray[Any]
STATISTICS = 64                 # samples for transforms, mean and deviation, evenly spaced in the training split
FILE_BYTES = 1 << 26            # of a file, in float32
CORRELATED = 0.5                # least correlation of coarse fields and means of fine ones
BETTER = 0.2                    # by how much more reversed or moved fields correlate if the coarse ones are misplaced
OFFSET = 0.1                    # cells between the centres of coarse cells and of blocks
NO_TRANSFORM = "a value has no logarithm or root; choose --transform NAME=none"
SCALE, SHIFT = 5.0, 5.0         # ratio of deviations, and deviations between means, that another unit explains


def block_mean(values: NDArray[Any], factor: int, dims: int) -> NDArray[Any]:
    """Return the means over blocks of ``factor`` cells a side of the last ``dims`` dims.   [..., *S] -> [..., *S/factor]"""
    for dim in range(values.ndim - dims, values.ndim):
        shape = values.shape
        values = values.reshape(*shape[:dim], shape[dim] // factor, factor, *shape[dim + 1 :]).mean(dim + 1)
    return values


def assignment(text: str) -> tuple[str, float]:
    """Return the parts of NAME=NUMBER."""
    name, _, value = text.partition("=")
    return name, float(value)


def chosen_transform(text: str) -> tuple[str, str]:
    """Return the parts of NAME=TRANSFORM."""
    name, _, kind = text.partition("=")
    if kind not in FORWARD:
        raise ValueError
    return name, kind


def several(text: str, metavar: str, **kwargs: Any) -> Any:
    return option((), text, nargs="+", metavar=metavar, **kwargs)


@dataclass(frozen=True)
class Conversion(command.Settings):
    """The fields that are taken from the files, and how they become samples."""

    variables: tuple[str, ...] = several("variables; default: all that have the sides", "NAME")
    levels: tuple[float, ...] = several("levels of variables that have some; default: all", "LEVEL", type=float)
    dims: tuple[str, ...] = several("dims that are sides, such as y x; default: by names and units", "DIM")
    periodic: tuple[str, ...] | None = option(None, "sides that wrap; default: 360 degrees of longitude", nargs="*", metavar="DIM")
    fill: tuple[tuple[str, float], ...] = several("value of missing cells, in the unit of the file", "NAME=VALUE", type=assignment)
    transform: tuple[tuple[str, str], ...] = several("none, log or sqrt; default: by skewness", "NAME=KIND", type=chosen_transform)
    factor: int = option(4, "cells of high along a cell of low, unless --coarse is given", type=command.positive)
    multiple: int = option(8, "sides are cut to a multiple of this, as U-Nets need; at their ends", type=command.positive)
    validation: float = command.fraction(0.1, "the samples, the last ones")
    test: float = command.fraction(0.0, "the samples, the last ones")
    gap: int = option(0, "samples left out between two splits, as neighbours in time are alike", type=command.natural)
    skip_bad: bool = command.skip_bad()

    def mistakes(self) -> Iterator[str]:
        yield from command.check_fractions(self.validation, self.test)
        if self.dims and len(self.dims) not in (2, 3):
            yield f"--dims {' '.join(self.dims)}: expected two names, or three for volumes"

    @property
    def choice(self) -> grids.Choice:
        return grids.Choice(self.variables, self.levels, self.dims, self.fill)


@dataclass(frozen=True)
class Pairs:
    """The samples of a source, cut to ``shape``, each with its coarse counterpart."""

    source: grids.Source
    coarse: grids.Source | None                 # None: the means of blocks
    factor: int
    shape: tuple[int, ...]

    def read(self, index: int) -> tuple[Array, Array]:
        """Return high [C, *S] and low [C, *s] in physical units."""
        high = self.source.read(index)[(slice(None), *map(slice, self.shape))]
        if self.coarse is None:
            return high, block_mean(high, self.factor, len(self.shape))
        return high, self.coarse.read(index)[(slice(None), *(slice(cells // self.factor) for cells in self.shape))]


def write_converted(pairs: Pairs, header: dict[str, Any], skip_bad: bool, indices: Sequence[int], path: Path) -> store.Refused:
    standard, skipped, names = Standard.from_header(header), store.Skipped(skip_bad), list[str]()
    with store.create_file(path, len(indices), converted_fields(pairs, len(standard.mean)), header) as file:
        for index in indices:
            where = pairs.source.describe(index)
            with skipped.catch(where):
                high, low = map(standard.apply, pairs.read(index))
                if not (np.isfinite(high).all() and np.isfinite(low).all()):
                    raise DataError(f"{where}: {NO_TRANSFORM}")
                file["high"][len(names)], file["low"][len(names)] = high, low
                names.append(where)
        store.truncate_rows(file, len(names))
        file["source"] = np.array(names, "S")
    return skipped


def converted_fields(pairs: Pairs, channels: int) -> store.Fields:
    low = tuple(cells // pairs.factor for cells in pairs.shape)
    return {name: Field("float32", (channels, *sides), channels=0) for name, sides in (("high", pairs.shape), ("low", low))}


def open_pairs(options: argparse.Namespace, settings: Conversion) -> Pairs:
    """Open SOURCE, and the coarse one. Raises ConfigError or DataError if they do not fit together."""
    source = grids.Source(options.source, settings.choice)
    coarse, factor = None, settings.factor
    if options.coarse is not None:
        coarse = grids.Source(options.coarse, settings.choice)
        factor = check_pair(source, coarse)
    step, wraps = math.lcm(factor, settings.multiple), periodic(source, settings)
    shape = tuple(cells - cells % step for cells in source.shape)
    for side, cells, cut, is_periodic in zip(source.sides, source.shape, shape, wraps):
        if not cut or (is_periodic and cut < cells):
            need = f"a multiple of {step}" if cut else f"{step} or more"
            raise ConfigError(f"{options.source}: {side.name} has {cells} cells, expected {need}; see --factor, --multiple")
    return Pairs(source, coarse, factor, shape)


def periodic(source: grids.Source, settings: Conversion) -> list[bool]:
    names = [side.name for side in source.sides]
    if unknown := [name for name in settings.periodic or () if name not in names]:
        raise ConfigError(f"--periodic {unknown[0]}: the sides are {' '.join(names)}")
    return [side.wraps if settings.periodic is None else side.name in settings.periodic for side in source.sides]


def check_pair(source: grids.Source, coarse: grids.Source) -> int:
    """Return the number of cells of ``source`` along one of ``coarse``. Raises DataError if they do not match."""
    pair = source, coarse
    for name, values in (
        ("channels", [[channel.name for channel in each.channels] for each in pair]),
        ("units", [[channel.units for channel in each.channels] for each in pair]), ("samples", [[len(each)] for each in pair]),
    ):  # fmt: skip
        if values[0] != values[1]:
            raise DataError(f"{coarse.path}: has {name} {values[1]}, {source.path} has {values[0]}; expected the same")
    if source.times is not None and coarse.times is not None and (different := source.times != coarse.times).any():
        number = int(different.argmax())
        times = f"{coarse.times[number]}, in {source.path} of {source.times[number]}"
        raise DataError(f"{coarse.path}: sample {number} is of {times}; select equal times")
    factor, *others = {high // low for high, low in zip(source.shape, coarse.shape)}
    if others or factor < 2:
        sizes = f"{list(coarse.shape)} cells, {source.path} {list(source.shape)}"
        raise DataError(f"{coarse.path}: has {sizes}; expected one ratio for all sides, of 2 or more")
    for ours, theirs in zip(source.sides, coarse.sides):
        centres = ours.coordinates[: len(theirs.coordinates) * factor].reshape(-1, factor).mean(1)
        offset = np.abs(centres - theirs.coordinates).max() / np.diff(theirs.coordinates).mean()
        if offset > OFFSET and ours.units != "cells":
            raise DataError(
                f"{coarse.path}: along {theirs.name} its cells are {offset:.2f} cells off the centres of {factor} cells of "
                f"{source.path}; interpolate it to them"
            )
    return factor


def check_alignment(pairs: Pairs, high: Array, low: Array) -> None:
    """Print the correlation of coarse fields with means of fine ones. Raise DataError if it is small.   [N, C, *S], [N, C, *s]"""
    assert pairs.coarse is not None
    means, names = block_mean(high, pairs.factor, len(pairs.shape)), [side.name for side in pairs.source.sides]
    sides = tuple(range(1, 1 + len(names)))
    for channel, ours, theirs in zip(pairs.source.channels, np.moveaxis(means, 1, 0), np.moveaxis(low, 1, 0)):
        where = f"{pairs.coarse.path}: {channel.name}"
        if not 1 / SCALE < theirs.std() / ours.std() < SCALE or abs(theirs.mean() - ours.mean()) > SHIFT * ours.std():
            values = f"{theirs.mean():.4g} +- {theirs.std():.2g}, in {pairs.source.path} {ours.mean():.4g} +- {ours.std():.2g}"
            raise DataError(f"{where} is {values}; is it in another unit?")
        similarity, ways = correlation(ours, theirs), {}
        for dim, name in zip(sides, names):
            ways[f"with {name} reversed"] = correlation(ours, np.flip(theirs, dim))
        spectra = [np.fft.fftn(x - x.mean(sides, keepdims=True), axes=sides) for x in (ours, theirs)]
        products = np.fft.ifftn(spectra[0] * spectra[1].conj(), axes=sides).real.mean(0)
        peak = np.unravel_index(products.argmax(), products.shape)
        moves = [int(n) if n <= size // 2 else int(n) - size for n, size in zip(peak, products.shape)]
        ways[f"moved by {' and '.join(map(str, moves))} cells"] = correlation(ours, np.roll(theirs, moves, sides))
        way = max(ways, key=lambda name: ways[name])
        is_misplaced = ways[way] > similarity + BETTER
        if similarity < CORRELATED or is_misplaced:
            advice = f"{way} by {ways[way]:.2f}: mend the files" if is_misplaced else "are they of the same times and region?"
            raise DataError(f"{where} correlates by {similarity:.2f} with means of {pairs.source.path}; {advice}")
        command.print_rank_0(f"{channel.name}: coarse fields correlate by {similarity:.2f} with the means of blocks")


def correlation(a: Array, b: Array) -> float:
    """Return the correlation of fields, without the mean of each sample.   [N, *s], [N, *s]"""
    a, b = (x - x.mean(tuple(range(1, x.ndim)), keepdims=True) for x in (a, b))
    return float((a * b).sum() / max(float(np.sqrt((a * a).sum() * (b * b).sum())), 1e-300))


def split_samples(source: grids.Source, settings: Conversion) -> dict[str, range]:
    """Return the samples of each split, the last ones held out. Samples of one time are in one split."""
    count, times = len(source), source.times
    ends = [count - round(count * (settings.validation + settings.test)), count - round(count * settings.test), count]
    if times is not None:
        ends = [int(np.searchsorted(times, times[end], "left")) if end < count else end for end in ends]
    starts = [0, *(min(end + settings.gap, other) for end, other in pairwise(ends))]
    return {split: range(start, end) for split, start, end in zip(store.SPLITS, starts, ends) if start < end}


def convert(options: argparse.Namespace) -> command.Plan:
    settings = Conversion.from_options(options)
    pairs = open_pairs(options, settings)
    source, shape, splits = pairs.source, pairs.shape, split_samples(pairs.source, settings)
    command.require_splits(splits, options, f"{len(source)} samples")
    names = [channel.name for channel in source.channels]
    if unknown := [name for name, _ in settings.transform if name not in names]:
        raise ConfigError(f"--transform {unknown[0]}: the channels are {' '.join(names)}")
    skipped, some = store.Skipped(settings.skip_bad), list[tuple[Array, Array]]()
    for index in command.subsample(splits["train"], STATISTICS):
        with skipped.catch(source.describe(index)):
            some.append(pairs.read(index))
    if not some:
        raise DataError(f"{options.source}: no sample can be used: {store.count_by_reason(skipped)}")
    high, low = (np.stack(fields) for fields in zip(*some))
    if pairs.coarse is not None:
        check_alignment(pairs, high, low)
    given = dict(settings.transform)
    standard = Standard.choose(high, {number: given[name] for number, name in enumerate(names) if name in given})
    for number, (name, values) in enumerate(zip(names, np.moveaxis(high, 1, 0))):
        if not math.isfinite(standard.deviation[number]):
            raise DataError(f"{options.source}: {name} goes from {values.min():.4g}: {NO_TRANSFORM}")
        if not standard.deviation[number]:
            raise DataError(f"{options.source}: {name} is {values.flat[0]:g} in all cells; leave it out by --variables")
        after = {"none": "", "log": f", log(x + {standard.floors[number]:g})", "sqrt": ", sqrt(x)"}[standard.transforms[number]]
        command.print_rank_0(f"{name}: {values.min():.4g} to {values.max():.4g}, skewness {skewness(values):.2g}{after}")
    lengths = [side.length * cut / cells for side, cells, cut in zip(source.sides, source.shape, shape)]
    units = list(dict.fromkeys(side.units for side in source.sides))
    header = {
        "kind": "converted", "factor": pairs.factor, **standard._asdict(), "undo": UNDO, "channels": names,
        "channel_units": [channel.units for channel in source.channels], "box": lengths, "box_units": ", ".join(units),
        "periodic": periodic(source, settings), "parameters": [], "low": [], "high": [], "units": [],
    }  # fmt: skip
    del header["sides"]
    per_file = max(1, FILE_BYTES // (4 * len(names) * math.prod(shape)))
    contents = store.Contents(converted_fields(pairs, len(names)))
    jobs = [
        store.Job(options.out / split / f"fields_{number:06d}.h5",
                  partial(write_converted, pairs, header, settings.skip_bad, part), contents, len(part))
        for split, indices in splits.items() for number, part in enumerate(command.batched(indices, per_file))
    ]  # fmt: skip
    recipe = {"kind": "convert", **settings.json_dict, "files": command.fingerprint(list(map(str, source.files)))}
    if pairs.coarse is not None:
        recipe["coarse"] = command.fingerprint(list(map(str, pairs.coarse.files)))
    cells, cut = " x ".join(map(str, shape)), "" if shape == source.shape else f", cut from {' x '.join(map(str, source.shape))}"
    summary = f"{command.describe_sources(splits)}: samples of {len(names)} x {cells} cells{cut}, of {options.source}"
    return command.Plan(recipe, jobs, header, summary, config="fields")


def add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file, a Zarr store, or a folder of them with one grid")
    parser.add_argument("--coarse", type=Path, metavar="SOURCE", help="the coarse counterparts; default: the means of blocks")
