"""Fields and their coarse counterparts, to generate one from the other: simulate and check them.

    python -m data_prep.fields simulate OUT --kind matter     slabs of simulated universes: projected density of matter, 64 x 64
    python -m data_prep.fields simulate OUT --kind volumes    whole small universes: density of matter, 32^3
    python -m data_prep.fields simulate OUT --kind weather    maps of an idealised atmosphere round the globe, 64 x 96
    python -m data_prep.fields check OUT                      files against their index, low against high, edges, spectra, a picture

    OUT/{train,validation,test}/fields_000000.h5   "high" float32 [N, C, *S] and "low" float32 [N, C, *s], standardised
                                                   "parameters" float32 [N, P] in [-1, 1]; not there for weather

Matter is the 2LPT of data_prep.universe, which lets particles cross where gravity would hold them: right on large scales, too
smooth inside clusters. Its density is in units of the mean, and a value is (log(density + floor) - mean) / deviation. A value of
weather is (field - mean) / deviation of the channel; data_prep.atmosphere is kinematic, one instant in balance, and no weather
model. ``low`` holds means of DENSITY over blocks of ``factor`` cells a side (of the field, for weather, each cell counted alike),
put through the same logarithm, mean and deviation. The index states all of these, so that any value can be undone.

Mean and deviation are those of the first 16 universes (or moments) of the training split, rounded to 4 digits: so they do not
change when a set grows, and any machine finds the same. All maps of one universe are in one split. Maps of one universe are not
independent: all share the parameters, and slabs along two axes the matter where they cross.

A file is a pure function of the recipe and the universes it holds, so that ranks, cores and stops change nothing in it.

N rows of a file   C channels   S, s cells per dim   P parameters
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import command, cosmoflow, moments, scenes, store, universe
from data_prep.atmosphere import VARIABLES
from data_prep.sphere import Grid
from hpcai.errors import ConfigError, DataError

Array = NDArray[np.float64]

PICTURE = "fields.png"
# Wider than CosmoFlow's in what a map tells most of, so that there is something to be conditioned on.
RANGES = {**cosmoflow.RANGES, "Omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
CHANNELS = ("TMQ", "U850", "V850", "PSL")
PILOT = 16                      # universes or moments whose mean and deviation all are standardised by
FINER = 2                       # weather is made on a grid so many times finer: its cyclones are narrower than a cell of the map
WEATHER_STREAM = 1
CLOSE = 1e-4                    # deviations: what float32 may leave between low and the mean of high
EDGE = 5.0                      # deviations of the lines inside that an edge's gradient may be off


# ---- what the files hold


def _fields(shape: list[int], header: dict[str, Any]) -> dict[str, Any]:
    low = [shape[0], *(cells // header["factor"] for cells in shape[1:])]
    found: dict[str, Any] = {"high": {"dtype": "float32", "shape": shape}, "low": {"dtype": "float32", "shape": low}}
    if header["parameters"]:
        found["parameters"] = {"dtype": "float32", "shape": [len(header["parameters"])], "low": -1, "high": 1}
    return found


def _sums(file: h5py.File) -> dict[str, Any]:
    """Moments of each channel of ``high`` and ``low``, and of the parameters."""
    found = {}
    for name in ("high", "low"):
        rows = (file[name][row] for row in range(file[name].shape[0]))
        found[name] = moments.join(moments.measure(row.reshape(len(row), -1).T) for row in rows)
    if "parameters" in file:
        found["parameters"] = moments.measure(file["parameters"][...])
    return found


def _moments(records: Sequence[store.Record]) -> dict[str, Any]:
    names = records[0]["sums"]
    return {
        "rows": sum(record["rows"] for record in records),
        **{name: moments.summary(record["sums"][name] for record in records) for name in names},
    }


CONTENTS = store.Contents("high", _fields, _sums, _moments)


def coarse(values: NDArray[Any], factor: int, dims: int) -> NDArray[Any]:
    """Means over blocks of ``factor`` cells a side of the last ``dims`` dims.   [..., *S] -> [..., *S/factor]"""
    for dim in range(values.ndim - dims, values.ndim):
        shape = values.shape
        values = values.reshape(*shape[:dim], shape[dim] // factor, factor, *shape[dim + 1 :]).mean(dim + 1)
    return values


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Settings):
    """What all kinds decide by. A kind makes the rows of a number: of a universe, or of a moment."""

    field: str
    seed: int
    size: int                                   # cells per side; rows of a map of the weather
    factor: int
    rows: int                                   # samples per file, about
    validation: float
    test: float
    mean: tuple[float, ...]                     # of each channel; empty until it is known
    deviation: tuple[float, ...]

    def mistakes(self) -> Iterator[str]:
        if self.size < 8 or self.size % 4:
            yield f"--size {self.size}: expected a multiple of 4 of 8 or more"
        elif not 2 <= self.factor <= self.size // 2 or any(cells % self.factor for cells in self.shape):
            yield f"--factor {self.factor}: expected 2 or more that divides {' and '.join(map(str, self.shape))} twice or more"

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells of each dim."""
        raise NotImplementedError

    @property
    def each(self) -> int:
        """Rows of a number."""
        return 1

    def made(self, number: int) -> Array:
        """Fields in physical units.   [rows, C, *S]"""
        raise NotImplementedError

    def target(self, number: int) -> Array:
        """Parameters in [-1, 1].   [P]"""
        return np.zeros(0)

    def scaled(self, values: Array) -> Array:
        """What is standardised, from physical units."""
        return values

    def unscaled(self, values: Array) -> Array:
        return values

    def about(self) -> dict[str, Any]:
        """What the header says of this kind alone."""
        raise NotImplementedError

    def standard(self, values: Array) -> Array:
        """Values as the files have them.   [..., C, *S]"""
        mean, deviation = self._per_channel()
        return (self.scaled(values) - mean) / deviation

    def undone(self, values: NDArray[Any]) -> Array:
        """Physical units again, in float64.   [..., C, *S]"""
        mean, deviation = self._per_channel()
        return self.unscaled(mean + deviation * values.astype(np.float64))

    def _per_channel(self) -> tuple[Array, Array]:
        ones = (1,) * len(self.shape)
        return np.reshape(self.mean, (-1, *ones)), np.reshape(self.deviation, (-1, *ones))

    def low(self, values: Array) -> Array:
        """The coarse counterpart, standardised, from physical units.   [..., C, *S] -> [..., C, *s]"""
        return self.standard(coarse(values, self.factor, len(self.shape)))

    def header(self) -> dict[str, Any]:
        moments = {"mean": list(self.mean), "deviation": list(self.deviation)}
        return {"kind": self.field, "factor": self.factor, **moments, **self.about()}


@dataclass(frozen=True)
class Matter(Recipe):
    """Universes, and how their density is cut."""

    voxel: float                                # Mpc/h
    redshift: float
    slabs: int                                  # per axis; 0 for the whole cube
    thickness: int                              # cells of a slab
    particles: int                              # per cell
    floor: float                                # added to the density, so that the logarithm of an empty cell is finite
    omega_b: float
    low_end: tuple[float, ...]
    high_end: tuple[float, ...]

    def mistakes(self) -> Iterator[str]:
        found = list(super().mistakes())
        if not 0 <= self.redshift <= 50:
            found.append(f"--redshift is {self.redshift}, expected 0 to 50")
        if self.slabs and not 1 <= self.thickness * self.slabs <= self.size:
            found.append(f"--slabs {self.slabs} of --thickness {self.thickness} cells: more than the {self.size} cells of --size")
        if not 1e-3 <= self.floor <= 1:
            found.append(f"--floor is {self.floor}, expected 0.001 to 1")
        if not found:
            try:
                _ = self.universes
            except ConfigError as error:
                found.append(str(error))
        yield from found

    @property
    def universes(self) -> cosmoflow.Recipe:
        return cosmoflow.Recipe(
            self.seed, self.size, 1, self.voxel, (self.redshift,), self.particles, 1.0, self.omega_b, self.low_end, self.high_end,
            0.0, 0.0,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,) * (2 if self.slabs else 3)

    @property
    def each(self) -> int:
        return 3 * self.slabs or 1

    def made(self, number: int) -> Array:
        """Density in units of the mean: of the slabs along the first axis, the second, the third, or of the cube."""
        density = cosmoflow.matter(self.universes, number)[0]
        if not self.slabs:
            return density[None, None]
        starts = [slab * self.size // self.slabs for slab in range(self.slabs)]
        return np.array([
            [np.moveaxis(density, axis, 0)[start : start + self.thickness].mean(0)] for axis in range(3) for start in starts
        ])  # fmt: skip

    def target(self, number: int) -> Array:
        return self.universes.target(number)

    def scaled(self, values: Array) -> Array:
        return np.log(values + self.floor)

    def unscaled(self, values: Array) -> Array:
        return np.exp(values) - self.floor

    def about(self) -> dict[str, Any]:
        side, dims = self.size * self.voxel, len(self.shape)
        return {
            "channels": ["density"], "channel_units": ["mean density"], "floor": self.floor,
            "undo": "density = exp(mean + deviation * value) - floor",
            "box": [side] * dims, "box_units": "Mpc/h", "periodic": [True] * dims, "redshift": self.redshift,
            **({"thickness": self.thickness * self.voxel} if self.slabs else {}),
            "parameters": list(cosmoflow.PARAMETERS), "low": list(self.low_end), "high": list(self.high_end),
            "units": list(cosmoflow.UNITS),
        }  # fmt: skip


@dataclass(frozen=True)
class Weather(Recipe):
    """Moments of an idealised atmosphere."""

    channels: tuple[str, ...]

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        spacing = 240 / self.size / FINER
        if spacing > 2:
            yield f"--size {self.size} is made of cells of {spacing:g} degrees, expected 2 or less: cyclones are 1 degree wide"
        if not self.channels or len({*self.channels}) < len(self.channels) or {*self.channels} - {*VARIABLES}:
            yield f"--channels {','.join(self.channels)}: expected different ones of {', '.join(VARIABLES)}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size, self.size * 3 // 2

    def made(self, number: int) -> Array:
        height, width = (FINER * cells for cells in self.shape)
        latitude, longitude = ((np.arange(cells) + 0.5) / cells for cells in (height, width))
        grid = Grid(180 * latitude - 90, 360 * longitude, True)
        fields = scenes.sample(grid, self.generator(WEATHER_STREAM, number)).astype(np.float64)
        chosen = np.moveaxis(fields[..., [list(VARIABLES).index(name) for name in self.channels]], -1, 0)
        return coarse(chosen, FINER, 2)[None]

    def about(self) -> dict[str, Any]:
        return {
            "channels": list(self.channels), "channel_units": [VARIABLES[name].units for name in self.channels],
            "undo": "field = mean + deviation * value",
            "box": [180.0, 360.0], "box_units": "degrees", "periodic": [False, True],
            "note": "kinematic: an idealised atmosphere at one instant, southernmost row first; no weather model",
            "parameters": [], "low": [], "high": [], "units": [],
        }  # fmt: skip


KINDS: dict[str, type[Recipe]] = {"matter": Matter, "volumes": Matter, "weather": Weather}


def standardised(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with mean and deviation: those that the folder was begun with, if all else is equal, or those of the first
    numbers of the training split."""
    path, asked = out / "recipe.json", {"kind": "simulate", **command.settings_of(recipe)}
    if path.is_file():
        before = store.read_json(path)
        if before.get("mean") and {**before, "mean": [], "deviation": []} == asked:
            return replace(recipe, mean=tuple(before["mean"]), deviation=tuple(before["deviation"]))
    first = islice((number for number in range(10**6) if recipe.split(number) == "train"), PILOT)
    fields = np.concatenate([recipe.scaled(recipe.made(number)) for number in first])
    whole = moments.summary([moments.measure(np.moveaxis(fields, 1, -1).reshape(-1, fields.shape[1]))])
    mean, deviation = (tuple(float(f"{value:.4g}") for value in whole[key]) for key in ("mean", "deviation"))
    return replace(recipe, mean=mean, deviation=deviation)


def write_fields(recipe: Recipe, numbers: Sequence[int], path: Path) -> None:
    header, each = recipe.header(), recipe.each
    low = tuple(cells // recipe.factor for cells in recipe.shape)
    channels, parameters = len(recipe.mean), len(header["parameters"])
    layouts: dict[str, Any] = {"high": (np.float32, (channels, *recipe.shape)), "low": (np.float32, (channels, *low))}
    if parameters:
        layouts["parameters"] = (np.float32, (parameters,))
    about = {**header, "seed": recipe.seed, "numbers": list(numbers), "recipe": recipe.text}
    with store.rows_file(path, each * len(numbers), layouts, about) as file:
        for place, number in enumerate(numbers):
            values, rows = recipe.made(number), slice(place * each, (place + 1) * each)
            file["high"][rows], file["low"][rows] = recipe.standard(values), recipe.low(values)
            if parameters:
                file["parameters"][rows] = recipe.target(number)


def _asked(options: argparse.Namespace) -> Recipe:
    kind = options.kind
    size = options.size or (32 if kind == "volumes" else 64)
    shared = kind, options.seed, size, options.factor, options.rows, options.validation, options.test, (), ()
    if kind == "weather":
        return Weather(*shared, tuple(options.channels))
    slabs, thickness = (0, 0) if kind == "volumes" else (options.slabs, options.thickness)
    voxel = (1.0 if slabs else 4.0) if options.voxel is None else options.voxel
    particles = options.particles_per_cell or (8 if slabs else 4)
    low, high = cosmoflow.ends(options)
    return Matter(
        *shared, voxel, options.redshift, slabs, thickness, particles, options.floor, options.omega_b,
        low, high,
    )  # fmt: skip


def simulate(options: argparse.Namespace) -> int:
    recipe = _asked(options)
    count = -(-options.samples // recipe.each)
    members: dict[str, list[int]] = {split: [] for split in store.SPLITS}
    for number in range(count):
        members[recipe.split(number)].append(number)
    command.refuse_empty([split for split in members if members[split]], options, f"--samples {options.samples}")
    recipe = standardised(recipe, options.out)
    share = max(1, recipe.rows // recipe.each)
    jobs = [
        store.Job(options.out / split / f"fields_{place:06d}.h5", partial(write_fields, recipe, numbers), CONTENTS,
                  len(numbers) * recipe.each)
        for split, every in members.items()
        for place, numbers in enumerate(command.parts_of(every, share))
    ]  # fmt: skip
    what = "moments" if recipe.field == "weather" else "universes"
    cells = " x ".join(map(str, (len(recipe.mean), *recipe.shape)))
    command.print_once(f"{count * recipe.each} samples of {cells} cells from {count} {what} in {options.out}")
    config = {"matter": "small", "volumes": "small3d"}.get(recipe.field, recipe.field)
    look = partial(inspect, some=64, picture=True)
    return command.simulate("diffusion", options, recipe, jobs, recipe.header(), "samples", look, config=config)


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    settings = store.read_json(out / "recipe.json")
    if settings.pop("kind", None) != "simulate" or settings.get("field") not in KINDS:
        raise DataError(f"{out}: was not made by data_prep.fields (recipe.json); name another folder")
    recipe = KINDS[settings["field"]](**settings)
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        high = part["high"]
        print(f"{split}: {part['rows']} samples of {part['rows'] // recipe.each} universes or moments")
        columns = zip(recipe.header()["channels"], *(high[key] for key in ("minimum", "maximum", "mean", "deviation")))
        for name, least, most, mean, deviation in columns:
            print(f"  {name}: {least:.2f} to {most:.2f}, mean {mean:.3f}, deviation {deviation:.3f}")
    edges = Edges(recipe)
    if not wrong:
        for path, _, _ in files:
            with h5py.File(path, "r") as file:
                wrong += [f"{path}: {text}" for text in _wrong_values(recipe, file, edges)]
        wrong += edges.mistakes()
    places = command.places_of(files)
    if (some or picture) and not wrong:
        spectra = Spectra(recipe, command.spread(places, max(1, some)))
        spectra.tell()
        if picture:
            _draw(out / PICTURE, recipe, places, spectra)
    return command.told(wrong)


def _wrong_values(recipe: Recipe, file: h5py.File, edges: "Edges") -> Iterator[str]:
    for row in range(file["high"].shape[0]):
        high, low = file["high"][row], file["low"][row]
        if not (np.isfinite(high).all() and np.isfinite(low).all()):
            yield f"row {row}: holds NaN or infinity; make the file again"
            continue
        edges.add(high)
        physical = recipe.undone(high)
        if (off := float(np.abs(recipe.low(physical) - low).max())) > CLOSE:
            yield f"row {row}: 'low' is {off:.2g} deviations off the mean of blocks of 'high'; make the file again"
        if recipe.field == "volumes" and abs(whole := physical.mean() - 1) > CLOSE:
            yield f"row {row}: the mean density is off by {whole:.2g}, matter is not conserved; make the file again"
    if "parameters" in file and not (np.abs(file["parameters"][...]) <= 1).all():
        yield "parameters outside [-1, 1] or NaN; make the file again"


class Edges:
    """Mean squares of the difference between neighbouring lines, the last of which is across the edge."""

    def __init__(self, recipe: Recipe) -> None:
        self.periodic, self.count = recipe.header()["periodic"], 0
        self.squares = [np.zeros(cells) for cells in recipe.shape]                       # [S] per dim

    def add(self, high: NDArray[np.float32]) -> None:
        self.count += 1
        for dim, squares in enumerate(self.squares, start=1):
            steps = np.diff(high, axis=dim, append=np.take(high, [0], dim)).astype(np.float64)
            squares += np.moveaxis(steps**2, dim, 0).reshape(len(squares), -1).mean(1)

    def mistakes(self) -> Iterator[str]:
        """Dims said to be periodic across whose edge values jump."""
        for dim, (squares, periodic) in enumerate(zip(self.squares, self.periodic)):
            steps = np.sqrt(squares / max(1, self.count))
            inside, spread, edge = steps[:-1].mean(), steps[:-1].std(), steps[-1]
            told = "periodic" if periodic else "not periodic"
            print(f"dim {dim}, {told}: a step is {inside:.4f} inside, {edge:.4f} across the edge")
            if periodic and edge > inside + EDGE * spread + CLOSE:
                yield (f"dim {dim} is said to be periodic, but a step across its edge is {edge:.3g}, "
                       f"inside {inside:.3g} with a deviation of {spread:.1g}")  # fmt: skip


class Spectra:
    """Mean power of high and low of some samples. Matter: P(k) of the density contrast, k [h/Mpc], P [(Mpc/h)^dims]. Weather: of
    the standardised channels by the number of waves round the globe, rows weighted by their area."""

    def __init__(self, recipe: Recipe, places: Sequence[tuple[Path, int]]) -> None:
        self.recipe, self.samples = recipe, len(places)
        self.k: dict[str, Array] = {}                                                    # [B]
        self.power: dict[str, Array] = {}                                                # [C, B]
        for path, row in places:
            with h5py.File(path, "r") as file:
                for name in ("high", "low"):
                    k, power = (_waves if recipe.field == "weather" else self._shells)(file[name][row])
                    self.k[name] = k
                    self.power[name] = self.power.get(name, np.zeros_like(power)) + power / self.samples

    def _shells(self, values: NDArray[np.float32]) -> tuple[Array, Array]:
        density, box = self.recipe.undone(values), self.recipe.header()["box"][0]
        return shells(density / density.mean() - 1, box)

    def tell(self) -> None:
        for channel, name in enumerate(self.recipe.header()["channels"]):
            k, high, low = self.k["low"], self.power["high"][channel], self.power["low"][channel]
            some = sorted({0, len(k) // 2, len(k) - 1})
            told = ", ".join(f"{high[place]:.3g} and {low[place]:.3g} at {k[place]:.3g}" for place in some)
            print(f"{name}: power of high and low, mean of {self.samples} samples: {told}")


def shells(contrast: Array, box: float) -> tuple[Array, Array]:
    """Wavenumbers [B] and power [C, B] of a periodic field in shells of one wave per box, up to Nyquist's.   [C, *S]"""
    cells, dims = contrast.shape[1], contrast.ndim - 1
    modes = np.fft.fftn(contrast, axes=range(1, dims + 1))
    square = (modes.real**2 + modes.imag**2) * (box / cells**2) ** dims
    number = np.fft.fftfreq(cells, 1 / cells)
    length = np.sqrt(sum(axis**2 for axis in np.meshgrid(*[number] * dims, indexing="ij"))).ravel()
    shell, most = np.round(length).astype(int), cells // 2
    inside = shell < most
    modes_of = np.bincount(shell[inside], minlength=most)[1:]
    k = np.bincount(shell[inside], length[inside], most)[1:] / modes_of * 2 * np.pi / box
    power = [np.bincount(shell[inside], one.ravel()[inside], most)[1:] / modes_of for one in square]
    return k, np.array(power)


def _waves(values: NDArray[np.float32]) -> tuple[Array, Array]:
    """Waves round the globe [B] and the variance of each [C, B], without what is below Nyquist's number.   [C, H, W]"""
    height, width = values.shape[1:]
    modes = np.fft.rfft(values.astype(np.float64), axis=2)[..., 1 : width // 2] / width
    area = np.cos(np.pi * ((np.arange(height) + 0.5) / height - 0.5))
    power = np.einsum("chm,h->cm", 2 * (modes.real**2 + modes.imag**2), area / area.sum())
    return np.arange(1, width // 2, dtype=np.float64), power


def _draw(path: Path, recipe: Recipe, places: Sequence[tuple[Path, int]], spectra: Spectra) -> None:
    """Four samples of one channel, or one sample of up to four channels: high above low; spectra beside them."""
    header = recipe.header()
    several = len(header["channels"]) > 1
    shown = []                          # title, high, low
    for name, row in command.spread(places, 1 if several else 4):
        with h5py.File(name, "r") as file:
            pair = [file[part][row] for part in ("high", "low")]
            title = f"{name.parent.name}/{name.name} row {row}"
            if "parameters" in file:
                low, high = (np.array(header[end]) for end in ("low", "high"))
                values = low + (file["parameters"][row] + 1) / 2 * (high - low)
                title = f"$\\Omega_m$ {values[0]:.3f}  $\\sigma_8$ {values[1]:.3f}"
        for channel, text in enumerate(header["channels"][:4]):
            images = [part[channel] if part.ndim == 3 else part[channel, part.shape[1] // 2] for part in pair]
            shown.append((text if several else title, *images))
    wide = recipe.shape[-1] / recipe.shape[-2]
    with command.picture(path, (2.4 * wide * len(shown) + 4.4, 5.4), 100) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=(2.4 * wide * len(shown), 4.4))
        axes = left.subplots(2, len(shown), squeeze=False)
        for column, (title, *images) in zip(axes.T, shown):
            bottom, top = (float(edge) for edge in np.quantile(images[0], (0.002, 0.998)))
            for axis, image in zip(column, images):
                axis.imshow(image, origin="lower", cmap="magma", vmin=bottom, vmax=top, interpolation="nearest")
                axis.set(xticks=[], yticks=[])
            column[0].set_title(title, fontsize=9)
        for axis, text in zip(axes[:, 0], ("high", "low")):
            axis.set_ylabel(text)
        axis = right.subplots()
        for channel, name in enumerate(header["channels"]):
            for part, line in (("high", "-"), ("low", "--")):
                axis.plot(spectra.k[part], spectra.power[part][channel], line, color=f"C{channel}", label=f"{name}, {part}")
        weather = recipe.field == "weather"
        axis.set(xscale="log", yscale="log", xlabel="waves round the globe" if weather else "k  [h/Mpc]")
        ends = spectra.k["high"][[0, -1]] * (0.9, 1.1)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if ends[0] < tick < ends[1]]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_ylabel("variance, standardised" if weather else f"P(k) of the density  [(Mpc/h)$^{len(recipe.shape)}$]")
        axis.set_title(f"mean of {spectra.samples} samples", fontsize=10)
        axis.legend(fontsize=8, frameon=False)


# ---- command line


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("fields", "Fields and their coarse counterparts: simulate and check them.", "simulate | check")
    text = "Density of matter in slabs or volumes, or maps of the weather, each with its coarse counterpart."
    one = add("simulate", text, simulate)
    command.add_out(one)
    one.add_argument("--kind", choices=KINDS, required=True, help="what is simulated")
    one.add_argument("--samples", metavar="N", type=command.positive, default=1700,
                     help="how many, rounded up to whole universes; a later run may ask for more")  # fmt: skip
    one.add_argument("--size", metavar="N", type=command.positive, default=None, help="cells per side: 64, of volumes 32")
    one.add_argument("--factor", metavar="N", type=command.positive, default=4, help="cells of high along a cell of low")
    command.add_fractions(one, 0.12, 0.0, "the universes, or moments of weather")
    one.add_argument("--rows", metavar="N", type=command.positive, default=48, help="samples per file, of whole universes")
    one.add_argument("--voxel", metavar="X", type=float, help="width of a cell in Mpc/h: 1, of volumes 4")
    one.add_argument("--redshift", metavar="Z", type=float, default=0.0, help="of matter")
    one.add_argument("--slabs", metavar="N", type=command.positive, default=2, help="maps along each axis of a universe")
    one.add_argument("--thickness", metavar="N", type=command.positive, default=16, help="cells of a slab")
    one.add_argument("--particles-per-cell", type=int, choices=sorted(universe.LATTICES), help="that are moved: 8, of volumes 4")
    one.add_argument("--floor", metavar="X", type=float, default=0.05, help="mean densities added before the logarithm")
    one.add_argument("--omega-b", metavar="X", type=float, default=0.045, help="baryon density, the same in every universe")
    cosmoflow.add_ranges(one, RANGES)
    names = command.taking("list such as TMQ,U850", lambda text: text.split(","))
    usual = ",".join(CHANNELS)
    one.add_argument("--channels", metavar="NAME,...", type=names, default=usual, help="of weather, in DeepCAM's names")
    command.add_making(one)
    command.add_check(add, "Files against index.json, low against high, edges, spectra", inspect, PICTURE, "--spectra", 64,
                      "samples whose spectra are measured")  # fmt: skip
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
