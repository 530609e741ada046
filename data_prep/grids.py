"""Gridded fields of files that people have: NetCDF, Zarr, GRIB and HDF5, read by xarray, and NumPy arrays.

    source = Source(path, Choice(("t2m", "tp")))
    source.read(5)                    # fields of the 5th sample, in physical units

A sample is one entry along all dims that are neither a side nor a level, such as time. A variable with levels is one channel for
each of them. A static field is a variable without samples. Coordinates of sides increase.

N samples, C channels, R inputs, S cells of each side"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep import command
from data_prep.command import option
from hpcai.data.layout import parse_errors
from hpcai.errors import ConfigError, DataError
from hpcai.lazy import import_optional

Array = NDArray[Any]
# names of dims as files have them; units and attributes of the CF conventions come first
SIDES = {
    "x": ("x", "lon", "longitude", "rlon", "west_east", "projection_x_coordinate"),
    "y": ("y", "lat", "latitude", "rlat", "south_north", "projection_y_coordinate"),
}  # fmt: skip
LEVELS = ("level", "lev", "plev", "isobaricInhPa", "pressure", "pressure_level", "hybrid", "depth", "height", "z", "bottom_top")
TIMES = ("time", "valid_time", "t", "frame", "snapshot")
UNNAMED = ("sample", "phony_dim_")              # beginnings of names that arrays and HDF5 without names have
GRIB, HDF5, NETCDF = (".grib", ".grib2", ".grb", ".grb2"), (".h5", ".hdf5", ".he5"), (".nc", ".nc4", ".cdf", ".netcdf")


def assignment(text: str) -> tuple[str, float]:
    """Return the parts of NAME=NUMBER."""
    name, _, value = text.partition("=")
    return name, float(value)


def several(text: str, metavar: str, **kwargs: Any) -> Any:
    return option((), text, nargs="+", metavar=metavar, **kwargs)


@dataclass(frozen=True)
class Choice(command.Settings):
    """Variables and levels of the files, names of dims that are sides, missing cells; empty: all, and by names."""

    variables: tuple[str, ...] = several("variables to predict; default: all that have the sides, but --inputs", "NAME")
    inputs: tuple[str, ...] = several("variables of SOURCE that are conditions on its grid, and not predicted", "NAME")
    levels: tuple[float, ...] = several("levels of variables that have some; default: all", "LEVEL", type=float)
    dims: tuple[str, ...] = several("dims that are sides, such as y x; default: by names and units", "DIM")
    fill: tuple[tuple[str, float], ...] = several("value of missing cells, in the unit of the file", "NAME=VALUE", type=assignment)
    mask: bool = option(False, "give cells that a variable misses in all samples the weight 0", action="store_true")
    static: tuple[str, ...] = several("fields without samples: variables of SOURCE, or files with its grid", "NAME|FILE")


@dataclass(frozen=True)
class Channel:
    """A channel: a variable, or a level of it."""

    name: str
    variable: str
    units: str
    level: int | None = None                    # its index
    fill: float | None = None                   # value of missing cells


@dataclass(frozen=True)
class Side:
    """A dim of the grid. Its coordinates increase; in the files they may decrease."""

    name: str
    coordinates: Array
    units: str
    is_reversed: bool
    is_latitude: bool
    is_longitude: bool

    @property
    def length(self) -> float:
        """The length of all cells, each as wide as the mean spacing."""
        return float(self.coordinates[-1] - self.coordinates[0]) * len(self.coordinates) / (len(self.coordinates) - 1)

    @property
    def wraps(self) -> bool:
        """Whether the side goes round the globe."""
        return self.is_longitude and abs(self.length - 360) < 3.6 / len(self.coordinates)


class Source:
    """The samples of one or several files with the same grid, in the order of time. Raises ConfigError or DataError for files that
    do not have what is chosen, or differ in grid or units."""

    def __init__(self, path: Path, choice: Choice) -> None:
        self.path, self.choice, self.files = path, choice, list_files(path)
        first = open_file(self.files[0], choice)
        self.sides = [_read_side(first, dim, self.files[0]) for dim in self._find_sides(first)]
        self.shape = tuple(len(side.coordinates) for side in self.sides)
        channels = list(self._find_channels(first))
        self.channels = [channel for channel in channels if channel.variable not in choice.inputs]
        self.inputs = [channel for channel in channels if channel.variable in choice.inputs]
        self._sample_dims = self._other_dims(first[self.channels[0].variable])
        sizes, times = list[list[int]](), list[Any]()
        for number, file in enumerate(self.files):
            dataset = open_file(file, choice) if number else first
            self._check_same(dataset, file)
            sizes.append([dataset.sizes[dim] for dim in self._sample_dims])
            times.append(self._times(dataset, sizes[-1]))
        self._sizes, self._ends = sizes, np.cumsum([math.prod(lengths) for lengths in sizes])
        self.times: Array | None = None if any(part is None for part in times) else np.concatenate(times)
        """[N] time of each sample, which increases; None if the files do not have it"""
        self._order = np.arange(self._ends[-1])
        if self.times is not None:
            self._order = np.argsort(self.times, kind="stable")
            self.times = self.times[self._order]
        self._opened: tuple[int, Any] = (0, first)

    def __len__(self) -> int:
        return len(self._order)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": (-1, None)}  # a worker opens its files itself

    def read(self, index: int) -> Array:
        """Return the channels and inputs of a sample in physical units, with NaN in missing cells if ``mask`` is chosen. Raises
        DataError for missing cells without it or a value of ``fill``.   -> [C + R, *S] float64"""
        number, offset = self._locate(index)
        if self._opened[0] != number:
            self._opened = number, open_file(self.files[number], self.choice)
        place = dict(zip(self._sample_dims, map(int, np.unravel_index(offset, self._sizes[number])))) if self._sample_dims else {}
        channels = *self.channels, *self.inputs
        values = np.empty((len(channels), *self.shape))
        for channel, out in zip(channels, values):
            variable = self._opened[1][channel.variable]
            level = {} if channel.level is None else {self._level_dim(variable): channel.level}
            with parse_errors(self.describe(index), "fetch or write it again", f"{channel.name} cannot be read"):
                out[...] = _read_cells(variable.isel(place | level), self.sides)
            fill = np.nan if channel.fill is None and self.choice.mask else channel.fill
            _fill_missing(out, fill, f"{self.describe(index)}: {channel.name}", channel.variable)
        return values

    def read_static(self) -> dict[str, Array]:
        """Return the static fields in physical units, by name: variables of the first file, and all of other files.   [*S] each"""
        fields = dict[str, Array]()
        for name in self.choice.static:
            is_file = Path(name).exists()
            variables = self._static_variables(file := list_files(Path(name))[0] if is_file else self.files[0])
            if not variables or not (is_file or name in variables):
                over, has = " and ".join(self._side_names), ", ".join(variables) or "none"
                raise ConfigError(f"--static {name}: {file} has no such variable over {over} alone; it has {has}")
            fields |= variables if is_file else {name: variables[name]}
        for name, values in fields.items():
            _fill_missing(values, dict(self.choice.fill).get(name), f"{self.path}: {name}", name)
        return fields

    def _static_variables(self, file: Path) -> dict[str, Array]:
        """Return the variables of a file that have the sides, and one entry along all other dims."""
        dataset = open_file(file, replace(self.choice, variables=(), inputs=()))
        sides = [_read_side(dataset, dim, file) for dim in self._find_sides(dataset)]
        for ours, theirs in zip(self.sides, sides):
            a, b = ours.coordinates, theirs.coordinates
            if len(a) != len(b) or np.abs(a - b).max() > ours.length / len(a) / 100:
                raise DataError(f"{file}: {theirs.name} differs from {ours.name} of {self.path}; interpolate it to that grid")
        dims, size = {side.name for side in sides}, math.prod(self.shape)
        fields = {str(name): each.squeeze(sorted({*each.dims} - dims)) for name, each in dataset.data_vars.items()
                  if dims <= {*each.dims} and each.dtype.kind in "bfiu" and each.size == size}  # fmt: skip
        with parse_errors(file, "fetch or write it again", "cannot be read"):
            return {name: _read_cells(each, sides).astype(float) for name, each in fields.items()}

    def trajectories(self) -> tuple[Array, Array, str]:
        """Return the trajectory of each sample [N], its time [N], and the unit of times that are numbers. Samples along other dims
        than that of time are of other trajectories, as are files with equal times. Raises ConfigError without a dim of time."""
        dims, first, clocks, others = self._sample_dims, self._opened[1], list[Array](), list[Array]()
        dated = [dim for dim in dims if dim in first.coords and first[dim].dtype.kind in "mM"]
        named = [dim for dim in dims if dim.lower() in TIMES or (len(dims) == 1 and dim.startswith(UNNAMED))]
        if not (times := dated + named):
            raise ConfigError(f"{self.path}: has samples along {' and '.join(dims)}, expected a dim with times, or named time")
        axis = dims.index(dim := times[0])
        for file, lengths in zip(self.files, self._sizes):
            dataset, index = open_file(file, self.choice), np.indices(lengths).reshape(len(dims), -1)
            is_known = dim in dataset.coords and dataset[dim].dtype.kind in "mMfiu"
            clocks.append((dataset[dim].values if is_known else np.arange(lengths[axis]))[index[axis]])
            index[axis] = 0
            others.append(np.array(np.ravel_multi_index(tuple(index), [*lengths[:axis], 1, *lengths[axis + 1 :]])))
        clock, trajectory = np.concatenate(clocks), np.concatenate(others)
        if len({*zip(trajectory.tolist(), clock.tolist())}) < len(clock):
            trajectory += np.repeat(np.arange(len(others)) * (trajectory.max() + 1), [len(each) for each in others])
        return trajectory[self._order], clock[self._order], str(_attributes(dataset, dim).get("units", ""))

    def describe(self, index: int) -> str:
        """Return the file of a sample, and its time or number in the file."""
        number, offset = self._locate(index)
        return f"{self.files[number]}: " + (f"sample {offset}" if self.times is None else f"{str(self.times[index])[:16]}")

    def _locate(self, index: int) -> tuple[int, int]:
        """Return the number of the file of a sample, and its number in it."""
        position = int(self._order[index])
        number = int(np.searchsorted(self._ends, position, side="right"))
        return number, position - (int(self._ends[number - 1]) if number else 0)

    @property
    def _side_names(self) -> list[str]:
        return [side.name for side in self.sides]

    # ---- what the files have

    def _find_sides(self, dataset: Any) -> tuple[str, ...]:
        sizes = ", ".join(f"{dim} {size}" for dim, size in dataset.sizes.items())
        if self.choice.dims:
            if missing := [dim for dim in self.choice.dims if dim not in dataset.dims]:
                raise ConfigError(f"{self.path}: has no dim {missing[0]} for --dims; it has {sizes}")
            return self.choice.dims
        dims = {axis: [str(dim) for dim in dataset.dims if _axis_of(dataset, dim) == axis] for axis in ("y", "x")}
        if all(len(names) == 1 for names in dims.values()):
            return dims["y"][0], dims["x"][0]
        raise ConfigError(f"{self.path}: has dims {sizes}; name the sides with --dims, such as --dims y x, or z y x for volumes")

    def _find_channels(self, dataset: Any) -> Iterator[Channel]:
        fill, sides = dict(self.choice.fill), {*self._side_names}
        usable = [str(name) for name, each in dataset.data_vars.items()
                  if sides <= {*each.dims} and each.dtype.kind in "fiu" and self._other_dims(each)]  # fmt: skip
        targets = [name for name in self.choice.variables or usable if name not in self.choice.inputs]
        names = (*targets, *self.choice.inputs) if targets else ()
        if (missing := [name for name in names if name not in usable]) or not names:
            actual = f"no variable {missing[0]}" if missing else "no variable to predict"
            has = f"; it has {', '.join(usable)}" if usable else ""
            raise ConfigError(f"{self.path}: has {actual} over {', '.join(self._side_names)} and samples, such as times{has}")
        dims = {name: self._other_dims(dataset[name]) for name in names}
        if others := [name for name in names if dims[name] != dims[names[0]]]:
            actual = f"{others[0]} is over {', '.join(dims[others[0]])}, {names[0]} over {', '.join(dims[names[0]])}"
            raise ConfigError(f"{self.path}: {actual}; choose --variables with equal dims, and convert the others apart")
        for name in names:
            units, level_dim = str(dataset[name].attrs.get("units", "")), self._level_dim(dataset[name])
            if level_dim is None:
                yield Channel(name, name, units, None, fill.get(name))
                continue
            levels = (dataset[level_dim].values if level_dim in dataset.coords else np.arange(dataset.sizes[level_dim])).tolist()
            if absent := [level for level in self.choice.levels if level not in levels]:
                has = ", ".join(f"{level:g}" for level in levels)
                raise ConfigError(f"{self.path}: {name} has no level {absent[0]:g} of {level_dim}; it has {has}")
            for level in self.choice.levels or levels:
                yield Channel(f"{name}_{level:g}", name, units, levels.index(level), fill.get(name))

    def _other_dims(self, variable: Any) -> list[str]:
        """Return the dims along which a variable has samples."""
        return [str(dim) for dim in variable.dims if dim not in (*self._side_names, self._level_dim(variable))]

    def _level_dim(self, variable: Any) -> str | None:
        others = [str(dim) for dim in variable.dims if dim not in self._side_names]
        return next((dim for dim in others if dim in LEVELS or _attributes(variable, dim).get("axis") == "Z"), None)

    def _check_same(self, dataset: Any, file: Path) -> None:
        for channel in (*self.channels, *self.inputs):
            if channel.variable not in dataset:
                raise DataError(f"{file}: has no variable {channel.variable}, which {self.files[0]} has; move the file elsewhere")
            units = str(dataset[channel.variable].attrs.get("units", ""))
            if units != channel.units:
                actual = f"{channel.variable} is in {units or 'no unit'}, in {self.files[0]} in {channel.units or 'no unit'}"
                raise DataError(f"{file}: {actual}; convert one of them")
        for side in self.sides:
            if not np.array_equal(_read_side(dataset, side.name, file).coordinates, side.coordinates):
                raise DataError(f"{file}: {side.name} differs from that of {self.files[0]}; convert files of each grid apart")

    def _times(self, dataset: Any, lengths: Sequence[int]) -> Array | None:
        """Return the time of each sample of a file, of the first dim that has one, or of all of it."""
        for axis, dim in enumerate(self._sample_dims):
            if dim in dataset.coords and dataset[dim].dtype.kind in "Mm":
                return np.asarray(dataset[dim].values[np.indices(lengths)[axis].ravel()])
        single = (each.values for each in dataset.coords.values() if each.dtype.kind == "M" and not each.dims)
        return next((np.full(math.prod(lengths), time) for time in single), None)


def _read_side(dataset: Any, dim: str, file: Path) -> Side:
    known = dim in dataset.coords
    values = dataset[dim].values if known else np.arange(dataset.sizes[dim])
    if values.dtype.kind not in "fiu" or len(values) < 2:
        raise DataError(f"{file}: {dim} has {len(values)} coordinates of {values.dtype}, expected two numbers or more")
    steps = np.diff(values.astype(float))
    if (steps * steps[0] <= 0).any():
        raise DataError(f"{file}: the coordinates of {dim} neither increase nor decrease; sort them")
    unit = str(_attributes(dataset, dim).get("units", ""))
    is_latitude, is_longitude = (unit == f"degrees_{end}" or dim.lower() in (name, name[:3])
                                 for name, end in (("latitude", "north"), ("longitude", "east")))  # fmt: skip
    unit = unit.removesuffix("_north").removesuffix("_east") or "cells"
    return Side(dim, np.sort(values.astype(float)), unit, bool(steps[0] < 0), is_latitude, is_longitude)


def cell_areas(latitude: Array) -> Array:
    """Return the areas of cells at latitudes in degrees, up to a factor: cos(latitude) integrated over each, which ends at the
    pole."""
    middles = (latitude[1:] + latitude[:-1]) / 2
    ends = np.concatenate((2 * latitude[:1] - middles[:1], middles, 2 * latitude[-1:] - middles[-1:]))
    return np.diff(np.sin(np.radians(np.clip(ends, -90, 90))))


def _read_cells(variable: Any, sides: Sequence[Side]) -> Array:
    """Return the values of a variable with no other dims, with coordinates that increase.   [*S]"""
    reversed_dims = tuple(dim for dim, side in enumerate(sides) if side.is_reversed)
    return np.flip(variable.transpose(*(side.name for side in sides)).values, reversed_dims)


def _fill_missing(values: Array, fill: float | None, where: str, name: str) -> None:
    if (missing := ~np.isfinite(values)).any():
        if fill is None:
            advice = f"give one with --fill {name}=VALUE, leave the variable out, or mask cells that no sample has with --mask"
            raise DataError(f"{where} has no value in {missing.mean():.1%} of its cells; {advice}")
        values[missing] = fill


def list_files(path: Path) -> list[Path]:
    """Return the files of SOURCE, sorted. A folder that is a Zarr store is one. Raises ConfigError if there is none."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; SOURCE is one of NetCDF, Zarr, GRIB, HDF5 or .npy, or a folder of them")
    if path.is_file() or _is_zarr(path):
        return [path]
    known = {*GRIB, *HDF5, *NETCDF, ".npy"}
    stores = [each for each in sorted(path.rglob("*")) if each.is_dir() and _is_zarr(each)]
    paths = [*stores, *(file for file in command.data_files(path) if file.suffix in known)]
    paths = [each for each in paths if not any(other in each.parents for other in stores)]
    if not paths:
        raise ConfigError(f"{path}: holds no file of {', '.join(sorted(known))} and no Zarr store")
    return sorted(paths)


def open_file(path: Path, choice: Choice = Choice()) -> Any:
    """Open a file as an ``xarray.Dataset``, whose values are read later. Raises DataError if it is not readable."""
    xarray = import_optional("xarray", "reading gridded fields needs", "fields")
    with parse_errors(path, "fetch or write it again", "cannot be read"):
        if path.suffix == ".npy":
            return _wrap_array(xarray, np.load(path, mmap_mode="r", allow_pickle=False), path, choice)
        if path.is_dir():
            import_optional("zarr", "reading Zarr stores needs", "fields")
            return xarray.open_zarr(path, chunks=None, consolidated=(path / ".zmetadata").is_file())
        if path.suffix in GRIB:
            import_optional("cfgrib", "reading GRIB needs", "grib")
            return xarray.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": ""})
        with path.open("rb") as file:
            is_classic = file.read(3) == b"CDF"
        import_optional("scipy" if is_classic else "h5netcdf", "reading NetCDF needs", "fields")
        kwargs: dict[str, Any] = {"engine": "scipy"} if is_classic else {"engine": "h5netcdf", "phony_dims": "access"}
        return xarray.open_dataset(path, **kwargs)


def _wrap_array(xarray: Any, array: Array, path: Path, choice: Choice) -> Any:
    """Return a dataset of an array [N, *S] or [N, C, *S]; channels are those of --variables, then those of --inputs."""
    sides = choice.dims or ("y", "x")
    if array.ndim == len(sides):
        array = array[None]
    if array.ndim not in (len(sides) + 1, len(sides) + 2) or array.dtype.kind not in "fiu":
        expected = f"numbers [samples, {', '.join(sides)}], or with channels after these; name sides of volumes with --dims z y x"
        raise DataError(f"{path}: is {array.dtype} {list(array.shape)}, expected {expected}")
    names = (*choice.variables, *choice.inputs) or (path.stem,)
    if array.ndim == len(sides) + 1:
        if len(names) > 1:
            raise ConfigError(f"{path}: has no dim of channels, but --variables are {' '.join(names)}; give one name")
        return xarray.Dataset({names[0]: (("sample", *sides), array)})
    if len(names) != array.shape[1]:
        raise ConfigError(f"{path}: has {array.shape[1]} channels; name as many with --variables, found {' '.join(names)}")
    return xarray.Dataset({name: (("sample", *sides), array[:, channel]) for channel, name in enumerate(names)})


def _is_zarr(path: Path) -> bool:
    return path.suffix == ".zarr" or any((path / name).is_file() for name in (".zgroup", "zarr.json", ".zmetadata"))


def _axis_of(dataset: Any, dim: Any) -> str | None:
    """Return x or y by the attributes of a dim's coordinate, or its name; None if it is neither."""
    attributes = _attributes(dataset, dim)
    unit, axis = str(attributes.get("units", "")), str(attributes.get("axis", "")).lower()
    if unit in ("degrees_east", "degrees_north"):
        return "x" if unit == "degrees_east" else "y"
    return axis if axis in SIDES else next((axis for axis, names in SIDES.items() if str(dim).lower() in names), None)


def _attributes(data: Any, dim: Any) -> dict[str, Any]:
    return dict(data[dim].attrs) if dim in data.coords else {}
