"""Fields of files that people have (data_prep.grids), converted to samples with coarse counterparts.

docs/data.md ("Fields of your own") describes samples, their coarse counterparts, transforms and splits.

    "fine" float32 [N, R, *S]   variables of the fine grid that are inputs and not predicted, such as sea surface temperature
    OUT/static.safetensors      "static" float32 [K, *S], fields that all samples share, standardized but for masks of 0 and 1
                                "weights" float32 [C, *S], of mean 1: areas of cells between latitudes, and 0 in masked cells

Frames to predict from earlier ones have no coarse counterpart but a ``step``, which is 1 more than that of the frame before. Masked
cells are 0 after standardization.

N samples, K static fields, C channels, R inputs, S and s cells of each side"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from data_prep import command, grids, store
from data_prep.command import option
from data_prep.grids import cell_areas, several
from data_prep.standardize import FORWARD, UNDO, Standard, skewness
from data_prep.store import Field
from hpcai.data.layout import parse_errors
from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError

Array = NDArray[Any]
STATIC = "static.safetensors"
NO_PARAMETERS: Mapping[str, Any] = {"parameters": [], "low": [], "high": [], "units": []}   # of an index
STATISTICS = 64                 # samples for transforms, mean and deviation, evenly spaced in the training split
FILE_BYTES = 1 << 26            # of a file, in float32
CORRELATED = 0.5                # least correlation of coarse fields and means of fine ones
BETTER = 0.2                    # by how much more reversed or moved fields correlate if the coarse ones are misplaced
OFFSET = 0.1                    # cells between the centres of coarse cells and of blocks
NO_TRANSFORM = "a value has no logarithm or root; choose --transform NAME=none"
SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
SCALE, SHIFT = 5.0, 5.0         # ratio of deviations, and deviations between means, that another unit explains


def block_mean(values: NDArray[Any], factor: int, dims: int) -> NDArray[Any]:
    """Return the means over blocks of ``factor`` cells a side of the last ``dims`` dims, over the cells that are not NaN.
    [..., *S] -> [..., *S/factor]"""
    if (missing := np.isnan(values)).any():
        with np.errstate(invalid="ignore"):
            return block_mean(np.where(missing, 0, values), factor, dims) / block_mean(~missing, factor, dims)
    for dim in range(values.ndim - dims, values.ndim):
        shape = values.shape
        values = values.reshape(*shape[:dim], shape[dim] // factor, factor, *shape[dim + 1 :]).mean(dim + 1)
    return values


def chosen_transform(text: str) -> tuple[str, str]:
    """Return the parts of NAME=TRANSFORM."""
    name, _, kind = text.partition("=")
    if kind not in FORWARD:
        raise ValueError
    return name, kind


@dataclass(frozen=True)
class Conversion(grids.Choice):
    """The fields that are taken from the files, and how they become samples."""

    coarse_variables: tuple[str, ...] = several("variables of --coarse; default: those that are predicted", "NAME")
    periodic: tuple[str, ...] | None = option(None, "sides that wrap; default: 360 degrees of longitude", nargs="*", metavar="DIM")
    transform: tuple[tuple[str, str], ...] = several("none, log or sqrt; default: by skewness", "NAME=KIND", type=chosen_transform)
    factor: int = option(4, "cells of high along a cell of low, unless --coarse or --forecast is given", type=command.positive)
    multiple: int = option(8, "sides are cut to a multiple of this, as U-Nets need; at their ends", type=command.positive)
    validation: float = command.fraction(0.1, "the samples, the last ones")
    test: float = command.fraction(0.0, "the samples, the last ones")
    gap: int = option(0, "samples left out between two splits, as neighbours in time are alike", type=command.natural)
    forecast: bool = option(False, "frames in the order of time, to predict each from the ones before", action="store_true")
    skip_bad: bool = command.skip_bad()

    def mistakes(self) -> Iterator[str]:
        yield from command.check_fractions(self.validation, self.test)
        if self.dims and len(self.dims) not in (2, 3):
            yield f"--dims {' '.join(self.dims)}: expected two names, or three for volumes"


@dataclass(frozen=True)
class Pairs:
    """The samples of a source, cut to ``shape``, each with its coarse counterpart."""

    source: grids.Source
    coarse: grids.Source | None                 # None: the means of blocks
    factor: int                                 # 0: no coarse counterpart
    shape: tuple[int, ...]
    masks: Mapping[str, Array] = field(default_factory=dict)   # bool [C, *S]: where datasets have no value; empty: nowhere
    standards: Mapping[str, Standard] = field(default_factory=dict)

    @property
    def channels(self) -> dict[str, list[grids.Channel]]:
        low = {"low": (self.coarse or self.source).channels} if self.factor else {}
        return {"high": self.source.channels, **({"fine": self.source.inputs} if self.source.inputs else {}), **low}

    def read(self, index: int) -> dict[str, Array]:
        """Return the datasets of a sample in physical units. Raises DataError for missing cells that are not masked.   [C, *S]"""
        high, fine = np.split(self.source.read(index)[(slice(None), *map(slice, self.shape))], [len(self.source.channels)])
        fields = {"high": high, "fine": fine} if len(fine) else {"high": high}
        if self.coarse is not None:
            fields["low"] = self.coarse.read(index)[(slice(None), *(slice(cells // self.factor) for cells in self.shape))]
        elif self.factor:
            fields["low"] = block_mean(high, self.factor, len(self.shape))
        for name, mask in self.masks.items():
            for channel, differs in zip(self.channels[name], np.isnan(fields[name]) != mask):
                if differs.any():
                    fault = f"{channel.name} has a value only in some samples in {differs.mean():.1%} of its cells"
                    advice = f"give one with --fill {channel.variable}=VALUE, or leave the variable out"
                    raise DataError(f"{self.source.describe(index)}: {fault}; {advice}")
        return fields


Rows = Sequence[tuple[int, int]]                # sample of the source, and its step


def write_converted(pairs: Pairs, header: dict[str, Any], skip_bad: bool, rows: Rows, path: Path) -> store.Refused:
    skipped, names = store.Skipped(skip_bad), list[str]()
    with store.create_file(path, len(rows), converted_fields(pairs), header) as file:
        for index, step in rows:
            where = pairs.source.describe(index)
            with skipped.catch(where):
                fields = {name: pairs.standards[name].apply(values) for name, values in pairs.read(index).items()}
                for name, mask in pairs.masks.items():
                    fields[name][mask] = 0
                if not all(np.isfinite(values).all() for values in fields.values()):
                    raise DataError(f"{where}: {NO_TRANSFORM}")
                for name, values in (fields if pairs.factor else {**fields, "step": step}).items():
                    file[name][len(names)] = values
                names.append(where)
        store.truncate_rows(file, len(names))
        file["source"] = np.array(names, "S")
    return skipped


def converted_fields(pairs: Pairs) -> store.Fields:
    shapes = {"high": pairs.shape, "fine": pairs.shape, "low": tuple(cells // (pairs.factor or 1) for cells in pairs.shape)}
    fields = {name: Field("float32", (len(each), *shapes[name]), channels=0) for name, each in pairs.channels.items()}
    return fields if pairs.factor else {**fields, "step": Field("int64")}


def open_pairs(options: argparse.Namespace, settings: Conversion) -> Pairs:
    """Open SOURCE, and the coarse one. Raises ConfigError or DataError if they do not fit together."""
    source, coarse, factor = grids.Source(options.source, settings), None, 0 if settings.forecast else settings.factor
    if settings.forecast and (options.coarse is not None or settings.inputs):
        raise ConfigError("--forecast: frames have no coarse counterpart and no inputs; leave out --coarse and --inputs")
    if options.coarse is not None:
        variables = settings.coarse_variables or tuple(dict.fromkeys(channel.variable for channel in source.channels))
        coarse = grids.Source(options.coarse, replace(settings, variables=variables, inputs=()))
        factor = check_pair(source, coarse, bool(settings.coarse_variables))
    elif settings.coarse_variables:
        raise ConfigError("--coarse-variables: low is the mean of --variables; name the source of others with --coarse")
    step, wraps = math.lcm(factor or 1, settings.multiple), periodic(source, settings)
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


def check_pair(source: grids.Source, coarse: grids.Source, chosen: bool) -> int:
    """Return the number of cells of ``source`` along one of ``coarse``, whose channels may be ``chosen``. Raises DataError if they
    do not match."""
    pair = source, coarse
    names, units = ([[getattr(channel, name) for channel in each.channels] for each in pair] for name in ("name", "units"))
    same = {} if chosen and names[0] != names[1] else {"channels": names, "units": units}
    for name, values in {**same, "samples": [[len(each)] for each in pair]}.items():
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
            fault = f"along {theirs.name} its cells are {offset:.2f} cells off the centres of {factor} cells of {source.path}"
            raise DataError(f"{coarse.path}: {fault}; interpolate it to them")
    return factor


def check_alignment(pairs: Pairs, high: Array, low: Array) -> None:
    """Print the correlation of coarse fields with means of fine ones, of channels that both have. Raise DataError if it is small.
    [N, C, *S], [N, K, *s]"""
    assert pairs.coarse is not None
    means, names = block_mean(high, pairs.factor, len(pairs.shape)), [side.name for side in pairs.source.sides]
    sides = tuple(range(1, 1 + len(names)))
    known = {(channel.name, channel.units): values for channel, values in zip(pairs.coarse.channels, np.moveaxis(low, 1, 0))}
    for channel, ours in zip(pairs.source.channels, np.moveaxis(means, 1, 0)):
        if (theirs := known.get((channel.name, channel.units))) is None:
            continue
        where, both = f"{pairs.coarse.path}: {channel.name}", np.isfinite(ours) & np.isfinite(theirs)
        ours, theirs = (np.where(both, values, values[both].mean()) for values in (ours, theirs))
        if not 1 / SCALE < theirs.std() / ours.std() < SCALE or abs(theirs.mean() - ours.mean()) > SHIFT * ours.std():
            values = f"{theirs.mean():.4g} +- {theirs.std():.2g}, in {pairs.source.path} {ours.mean():.4g} +- {ours.std():.2g}"
            raise DataError(f"{where} is {values}; is it in another unit?")
        similarity = correlation(ours, theirs)
        ways = {f"with {name} reversed": correlation(ours, np.flip(theirs, dim)) for dim, name in zip(sides, names)}
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


def order_frames(source: grids.Source, splits: Mapping[str, range]) -> tuple[dict[str, Rows], list[Any]]:
    """Return the samples of each split in the order of time, trajectory by trajectory, and the interval of frames with its unit.
    Raises DataError if there are less than 3 frames in a row."""
    trajectory, clock, units = source.trajectories()
    if clock.dtype.kind in "mM":
        days = np.diff(np.unique(clock)) / np.timedelta64(1, "D")
        is_monthly = clock.dtype.kind == "M" and len(days) and 29 <= np.median(days) <= 31
        units = "months" if is_monthly else "seconds"
        clock = clock.astype("M8[M]").astype(float) if is_monthly else (clock - clock.min()) / np.timedelta64(1, "s")
    order = np.lexsort((clock, trajectory))
    spacing = np.diff(clock[order])[np.diff(trajectory[order]) == 0]
    ((interval, _),) = Counter(float(f"{each:.5g}") for each in spacing if each > 0).most_common(1) or [(1.0, 0)]
    unit, size = next(((unit, size) for unit, size in SECONDS.items() if units == "seconds" and not interval % size), (units, 1))
    about, rows = [interval / size, unit] if unit else [1.0, "frames"], dict[str, Rows]()
    apart = f"{about[0]:g} {about[1]} apart"
    for split, indices in splits.items():
        own = np.array(indices)
        own = own[np.lexsort((clock[own], trajectory[own]))]
        follows = (np.diff(trajectory[own]) == 0) & np.isclose(np.diff(clock[own]), interval, rtol=1e-4)
        runs = np.split(own, np.flatnonzero(~follows) + 1)
        if (longest := max(map(len, runs))) < 3:
            raise DataError(f"{source.path}: {split} has {longest} frames in a row, {apart}, expected 3 or more")
        command.print_rank_0(f"{split}: {len(own)} frames, {apart}, in {len(runs)} trajectories of at most {longest}")
        rows[split] = list(zip(own.tolist(), np.cumsum([0, *np.where(follows, 1, 2)]).tolist()))
    return rows, about


def standardize_static(pairs: Pairs) -> dict[str, Array]:
    """Return the static fields by name, of mean 0 and deviation 1, but for those of 0 and 1.   [*S] each"""
    fields = pairs.source.read_static() if pairs.source.choice.static else {}
    for name, values in fields.items():
        fields[name] = values = values[tuple(map(slice, pairs.shape))]
        command.print_rank_0(f"static {name}: {values.min():.4g} to {values.max():.4g}")
        if values.min() == values.max():
            raise DataError(f"{pairs.source.path}: the static field {name} is {values.flat[0]:g} in all cells; leave it out")
        if not np.isin(values, (0, 1)).all():
            fields[name] = (values - values.mean()) / values.std()
    return fields


def cell_weights(areas: Sequence[Array], masked: Array) -> Array | None:
    """Return weights of mean 1 by channel [C, *S], from areas of cells along each side, 0 in masked cells; None if all are 1."""
    weights = reduce(np.multiply.outer, areas) * ~masked
    weights = (weights / weights.mean(tuple(range(1, masked.ndim)), keepdims=True)).astype(np.float32)
    if (weights == 1).all():
        return None
    command.print_rank_0(f"weights of cells, by cos(latitude) and mask: {weights.min():.3g} to {weights.max():.3g}")
    return weights


def write_shared(static: Mapping[str, Array], weights: Array | None, out: Path) -> None:
    """Write ``STATIC``, if all samples share something."""
    arrays = {"static": np.stack(list(static.values())).astype(np.float32)} if static else {}
    if arrays := arrays if weights is None else {**arrays, "weights": weights}:
        replace_file(out / STATIC, save(arrays))


def read_weights(out: Path, header: Mapping[str, Any]) -> Array:
    """Return the weights of cells, or 1. Raises DataError if ``STATIC`` is not as the index says."""
    static, sizes = header.get("static", []), (len(header["channels"]), *header["fields"]["high"]["shape"][1:])
    shapes = ({"static": (len(static), *sizes[1:])} if static else {}) | ({"weights": sizes} if header.get("weighted") else {})
    with parse_errors(path := out / STATIC, advice := "repeat the command that made it", "cannot be read"):
        arrays = load(path.read_bytes()) if shapes else {}
    weights = arrays.get("weights", np.ones(sizes))
    is_finite = all(np.isfinite(values).all() for values in arrays.values())
    if not (is_finite and {name: values.shape for name, values in arrays.items()} == shapes and abs(weights.mean() - 1) < 1e-3):
        expected = " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise DataError(f"{path}: expected finite {expected}, and weights of mean 1; {advice}")
    return weights


def choose_standard(source: Path, names: Sequence[str], high: Array, given: Mapping[str, str]) -> Standard:
    """Return transforms, mean and deviation by samples [N, C, *S], and print those of each channel. Raises DataError for a channel
    that is constant, or has no values of its transform. ``given``: transforms by name, in place of those by skewness."""
    standard = Standard.choose(high, {number: given[name] for number, name in enumerate(names) if name in given})
    for number, name in enumerate(names):
        values, masked = high[:, number][seen := np.isfinite(high[:, number])], 1 - seen.mean()
        if not math.isfinite(standard.deviation[number]):
            raise DataError(f"{source}: {name} goes from {values.min():.4g}: {NO_TRANSFORM}")
        if not standard.deviation[number]:
            raise DataError(f"{source}: {name} is {values.flat[0]:g} in all cells; leave it out by --variables")
        after = {"none": "", "log": f", log(x + {standard.floors[number]:g})", "sqrt": ", sqrt(x)"}[standard.transforms[number]]
        after += f", masked in {masked:.1%} of its cells" if masked else ""
        command.print_rank_0(f"{name}: {values.min():.4g} to {values.max():.4g}, skewness {skewness(values):.2g}{after}")
    return standard


def convert(options: argparse.Namespace) -> command.Plan:
    settings = Conversion.from_options(options)
    pairs = open_pairs(options, settings)
    source, shape, splits = pairs.source, pairs.shape, split_samples(pairs.source, settings)
    command.require_splits(splits, options, f"{len(source)} samples")
    variables = {channel.name: channel.variable for each in pairs.channels.values() for channel in each}
    if unknown := [name for name, _ in settings.transform if name not in variables]:
        raise ConfigError(f"--transform {unknown[0]}: the channels are {' '.join(variables)}")
    skipped, some = store.Skipped(settings.skip_bad), list[dict[str, Array]]()
    for index in command.subsample(splits["train"], STATISTICS):
        with skipped.catch(source.describe(index)):
            some.append(pairs.read(index))
    if not some:
        raise DataError(f"{options.source}: no sample can be used: {store.count_by_reason(skipped)}")
    values = {name: np.stack([fields[name] for fields in some]) for name in some[0]}
    masks, about = {name: np.all(np.isnan(each), 0) for name, each in values.items()}, dict[str, dict[str, Any]]()
    standards = dict[str, Standard]()
    for name, each in pairs.channels.items():
        named, where = {channel.name: channel.units for channel in each}, options.coarse if name == "low" else options.source
        if name == "low" and list(named) == about["high"]["channels"]:
            continue
        if empty := [channel for channel, mask in zip(named, masks[name]) if np.all(mask)]:
            raise DataError(f"{where}: {empty[0]} has no value in any cell; leave it out by --variables")
        standards[name] = choose_standard(where, list(named), values[name], dict(settings.transform))
        about[name] = {"channels": list(named), "channel_units": list(named.values()), **standards[name]._asdict()}
        del about[name]["sides"]
    pairs = replace(pairs, masks=masks if settings.mask else {}, standards={"low": standards["high"], **standards})
    if pairs.coarse is not None:
        check_alignment(pairs, values["high"], values["low"])
    lengths = [side.length * cut / cells for side, cells, cut in zip(source.sides, source.shape, shape)]
    units = list(dict.fromkeys(side.units for side in source.sides))
    header = {
        "kind": "converted", "factor": pairs.factor, **about["high"], "undo": UNDO, "box": lengths, "box_units": ", ".join(units),
        "periodic": periodic(source, settings), **NO_PARAMETERS,
    }  # fmt: skip
    areas = [cell_areas(side.coordinates) if side.is_latitude else np.ones(len(side.coordinates)) for side in source.sides]
    static = standardize_static(pairs)
    known = [*static, *variables.values()]
    if unknown := [name for name, _ in settings.fill if name not in known]:
        raise ConfigError(f"--fill {unknown[0]}: the variables are {' '.join(dict.fromkeys(known))}")
    weights = cell_weights([each[:cells] for each, cells in zip(areas, shape)], masks["high"])
    rows: Mapping[str, Rows] = {split: [(index, 0) for index in indices] for split, indices in splits.items()}
    rows, interval = order_frames(source, splits) if settings.forecast else (rows, None)
    per_file = max(1, FILE_BYTES // (4 * (len(source.channels) + len(source.inputs)) * math.prod(shape)))
    contents = store.Contents(converted_fields(pairs))
    jobs = [
        store.Job(options.out / split / f"fields_{number:06d}.h5",
                  partial(write_converted, pairs, header, settings.skip_bad, part), contents, len(part))
        for split, own in rows.items() for number, part in enumerate(command.batched(own, per_file))
    ]  # fmt: skip
    added = "mask", "static", "forecast", "inputs", "coarse_variables"                 # options that earlier recipes do not have
    chosen = {name: value for name, value in settings.json_dict.items() if value or name not in added}
    recipe = {"kind": "convert", **chosen, "files": command.fingerprint(list(map(str, source.files)))}
    if pairs.coarse is not None:
        recipe["coarse"] = command.fingerprint(list(map(str, pairs.coarse.files)))
    cells, cut = " x ".join(map(str, shape)), "" if shape == source.shape else f", cut from {' x '.join(map(str, source.shape))}"
    summary = f"{command.describe_sources(splits)}: samples of {len(source.channels)} x {cells} cells{cut}, of {options.source}"
    others = {key: about[name] for key, name in (("fine", "fine"), ("coarse", "low")) if name in about}
    header = {**header, **others, "static": list(static), "weighted": weights is not None, "interval": interval}
    return command.Plan(recipe, jobs, header, summary, finalize=partial(write_shared, static, weights), config="fields")


def add_coarse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coarse", type=Path, metavar="SOURCE", help="the coarse counterparts; default: the means of blocks")
