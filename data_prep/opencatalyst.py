"""Energies and forces of atoms (Open Catalyst): simulate slabs with adsorbates, check them, or convert trajectories.

    python -m data_prep.opencatalyst simulate OUT         slabs moved by EMT (data_prep.slabs): exact labels, not DFT
    python -m data_prep.opencatalyst check OUT            files against their index, counts and labels made again, a picture
    python -m data_prep.opencatalyst convert SOURCE OUT   extended XYZ (OC20's chunks too), ASE's .traj, .db and .aselmdb, and .lmdb

    OUT/{train,validation,test}/*.h5, R frames of A atoms in all
        "atoms" int32 [R]   "edges" int32 [R]   "triplets" int64 [R]     within "cutoff", of the "most" nearest of each atom
        "energy" float64 [R] eV   "cell" float64 [R, 3, 3] angstrom, rows are vectors   "pbc" uint8 [R, 3]
        "system" int64 [R]   "frame" int32 [R]   "source" int16 [R]      index into the "sources" of index.json
        "positions" float32 [A, 3] angstrom   "forces" float32 [A, 3] eV/angstrom, raw   "numbers" uint8 [A]
        "tags" uint8 [A], 0 below the surface, 1 surface, 2 adsorbate    "fixed" uint8 [A], 1 for held atoms

What is [A] holds frame after frame, "atoms" tells how many rows each has. Splits are made by composition in simulate and by system
in convert, so that no frame of validation has a sibling in training.

A simulated system is a pure function of (seed, number) and the recipe (size, steps, systems of a file, fractions held out); ranks,
cores, stops and later growth of the set change nothing in it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, frames, gallery, gathering, slabs, store, trajectories
from data_prep.frames import CONTENTS, Frame, ase
from hpcai.errors import ConfigError, DataError

PICTURE = "frames.png"
ENERGY_OFF, FORCE_OFF = 5e-5, 2e-4              # eV, eV/angstrom: labels again, from positions rounded to float32
TOLD = 50                                       # bad frames whose errors a file keeps


def _wrong_graph(cutoff: float, most: int) -> Iterator[str]:
    if not 1 <= cutoff <= 50:
        yield f"--cutoff {cutoff:g}: expected 1 to 50 angstrom"
    if most > 10000:
        yield f"--most {most}: expected at most 10000 neighbours"


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Settings):
    """All that decides the content of a simulated system, besides its number, and where it lies."""

    seed: int
    size: tuple[int, int, int]                  # atoms along the surface, layers
    steps: int                                  # of dynamics at each temperature
    each: int                                   # systems in a file
    validation: float
    test: float
    cutoff: float
    most: int

    def mistakes(self) -> Iterator[str]:
        yield from _wrong_graph(self.cutoff, self.most)
        across, along, layers = self.size
        if not (min(across, along) >= 2 and max(across, along) <= 12 and slabs.HELD < layers <= 12):
            yield f"--size {across} {along} {layers}: expected 2 to 12 atoms along and {slabs.HELD + 1} to 12 layers"
        if self.validation + self.test < 1 and not self.compositions()["train"]:
            yield f"--validation {self.validation} and --test {self.test}: leave no composition for training; lessen them"

    def compositions(self) -> dict[str, list[str]]:
        return slabs.shared_out(self.generator(2, 0), self.validation, self.test)

    def system(self, number: int) -> slabs.System:
        choice = self.compositions()[self.split(number // self.each)]
        return slabs.system(self.generator(1, number), number, choice, self.size, self.steps)


def write_systems(recipe: Recipe, file: int, path: Path) -> None:
    made = [recipe.system(number) for number in range(file * recipe.each, (file + 1) * recipe.each)]
    every = [frame for system in made for frame in system.frames]
    counts = [frames.count(frame, recipe.cutoff, recipe.most, f"system {frame.system}: frame {frame.frame}") for frame in every]
    told = [{"system": one.frames[0].system, "name": one.name, "composition": one.composition, "reference": one.reference}
            for one in made]  # fmt: skip
    about = {"kind": "simulated", "label": slabs.LABEL, "seed": recipe.seed, "recipe": recipe.text, "systems": json.dumps(told)}
    frames.write(path, every, counts, about)


def simulate(options: argparse.Namespace) -> int:
    ase()
    recipe = Recipe(options.seed, tuple(options.size), options.dynamics, options.each, options.validation, options.test,
                    options.cutoff, options.most)  # fmt: skip
    if options.systems % options.each:
        raise ConfigError(f"--systems {options.systems}: expected a multiple of --each {options.each}, the systems of a file")
    splits = [recipe.split(file) for file in range(options.systems // options.each)]
    command.refuse_empty(splits, options, f"--systems {options.systems} in files of {options.each}")
    jobs = [store.Job(options.out / split / f"systems_{file:06d}.h5", partial(write_systems, recipe, file), CONTENTS)
            for file, split in enumerate(splits)]  # fmt: skip
    header = {**frames.header(slabs.SOURCES, slabs.LABEL, recipe.cutoff, recipe.most), "compositions": recipe.compositions()}
    command.print_once(f"{options.systems} systems of {' x '.join(map(str, recipe.size))} atoms in {options.out}; {slabs.LABEL}")
    return command.simulate("opencatalyst", options, recipe, jobs, header, "systems", partial(inspect, some=8, picture=True))


# ---- convert


@dataclass(frozen=True)
class Pick:
    """Frames of a source file that go into a file of ours."""

    path: Path
    name: str                                   # in its set
    frames: tuple[int, ...]
    source: int                                 # index into the sources
    labels: str | None


def convert_share(picks: Sequence[Pick], cutoff: float, most: int, trust: bool, skip: bool, out: Path) -> None:
    taken: list[Frame] = []
    counts, skipped = [], []
    for pick in picks:
        rest = set(pick.frames)
        for index, item in enumerate(trajectories.items(pick.path, pick.name, trust)):
            if index not in rest:
                continue
            rest.remove(index)
            try:
                frame = item()
                where = f"{pick.path}: frame {index} (system {frame.system})"
                if frame.labels not in (None, pick.labels):
                    others = pick.labels or "none"
                    remedy = "give each a file of its own"
                    raise DataError(f"{where}: labels of {frame.labels}, others of the file have {others}; {remedy}")
                counts.append(frames.count(frame, cutoff, most, where))
            except DataError as problem:
                if not skip:
                    raise
                skipped.append(str(problem))
            else:
                frame.source = pick.source
                taken.append(frame)
            if not rest:
                break
    if not taken:
        raise DataError(f"{out}: none of its {len(skipped)} frames can be used, the first because {skipped[0]}")
    about = {"kind": "converted", "skipped": len(skipped), "reasons": json.dumps(skipped[:TOLD])}
    frames.write(out, taken, counts, about)


def convert(options: argparse.Namespace) -> int:
    for text in (*command.wrong_fractions(options.validation, options.test), *_wrong_graph(options.cutoff, options.most)):
        raise ConfigError(text)
    files = gathering.files(options.source)
    command.refuse_same(options.source, options.out)
    by_system = "" in files and not options.hold_last and options.validation + options.test > 0
    bad: list[str] = []
    origins: dict[str, list[gathering.Origin]] = {}
    for split, paths in files.items():
        origins[split] = []
        for path in paths:
            if trajectories.kind(path) == ".lmdb" and options.trust_pickle:
                command.print_once(f"{path}: holds pickles; opening one can run code, of which only that of arrays is let through")
            try:
                origins[split].append(gathering.origin(path, options.source, options, by_system))
            except DataError as problem:
                if not options.skip_bad or (trajectories.kind(path) == ".lmdb" and not options.trust_pickle):
                    raise
                bad.append(str(problem))
        if not origins[split]:
            raise DataError(f"{options.source}: none of its {len(paths)} files can be read, the first because {bad[0]}")
    sources, which = gathering.sources([origin for group in origins.values() for origin in group], options)
    source = dict(zip((origin.path for group in origins.values() for origin in group), which))
    how = options.cutoff, options.most, options.trust_pickle, options.skip_bad
    jobs: list[store.Job] = []
    count: Counter[str] = Counter()
    for split, group in gathering.splits(origins, options).items():
        every = [(origin, n) for origin, picked in group for n in picked]
        count[split] = len(every)
        for number, some in enumerate(command.parts_of(every, options.frames)):
            part: dict[gathering.Origin, list[int]] = {}
            for origin, n in some:
                part.setdefault(origin, []).append(n)
            picks = [Pick(one.path, one.name, tuple(rows), source[one.path], one.labels) for one, rows in part.items()]
            path = options.out / split / f"frames_{number:06d}.h5"
            jobs.append(store.Job(path, partial(convert_share, picks, *how), CONTENTS))
    names = {split or "all": [f"{origin.name} {len(origin.systems)}" for origin in group] for split, group in origins.items()}
    told = {split: f"{len(group)} files, names and frames {command.digest(group)}" for split, group in names.items()}
    asked = ("frames", "cutoff", "most", "seed", "validation", "test", "hold_last", "mix", "skip_bad")
    recipe = {"kind": "convert", **{key: getattr(options, key) for key in asked}, "origin": sources, "sources": told}
    command.print_once("frames: " + ", ".join(f"{number} for {split}" for split, number in count.items()))
    label = sources[0]["labels"] if len(sources) == 1 else "several: see sources"
    header = frames.header(sources, label, options.cutoff, options.most)
    command.work(options, jobs, recipe, header)
    return command.conclude("opencatalyst", options, partial(_tell_all, bad))


def _tell_all(files: Sequence[str], out: Path) -> None:
    """What the files hold, and what was left out: ``files`` that cannot be read, and frames."""
    _tell(out)
    number, reasons = 0, list(files)
    for path, _, _ in store.indexed(out):
        with h5py.File(path, "r") as file:
            number += int(file.attrs["skipped"])
            reasons += json.loads(file.attrs["reasons"])
    if number or files:
        print(f"skipped: {number} frames, {len(files)} files")
        for text in reasons[:TOLD]:
            print(f"  {text}")


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    places = command.places_of(files)
    _tell(out)
    index = files[0][2]
    if some and not wrong:
        chosen = places[:: max(1, len(places) // some)][:some]
        wrong += [text for path, row in chosen for text in _again(path, row, index)]
        labels = "labels and " if store.read_json(out / "recipe.json")["kind"] == "simulate" else ""
        print(f"{labels}neighbours of {len(chosen)} frames made again")
    if picture and not wrong:
        gallery.draw(out / PICTURE, places, index["label"])
    return command.told(wrong)


def _tell(out: Path) -> None:
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        energy, forces, known = part["energy"], part["forces"], part["baselines"]
        atoms, triplets = (part[f"{name}_per_frame"]["mean"] for name in ("atoms", "triplets"))
        zero = "no free atoms" if forces["zero_mae"] is None else f"{forces['zero_mae']:.3f} eV/A"
        print(f"{split}: {part['frames']} frames of {part['systems']} systems, {atoms:.1f} atoms and {triplets:,.0f} triplets each")
        print(f"  energy {energy['mean']:.3f} +- {energy['deviation']:.3f} eV; errors before learning: force {zero}, energy "
              f"{known['energy_of_mean']:.3f}, by elements {known['energy_of_linear_reference']:.3f} eV")  # fmt: skip


def _again(path: Path, row: int, index: dict[str, Any]) -> Iterator[str]:
    """Where a frame differs from its neighbours and labels when they are computed again."""
    where, remedy = f"{path}: row {row}", "delete the file and make it again"
    with h5py.File(path, "r") as file:
        frame, counts = frames.read(file, row)
        told = {each["system"]: each for each in json.loads(file.attrs.get("systems", "[]"))}
    found = frames.count(frame, index["cutoff"], index["most"], where)
    if found != counts:
        yield f"{where}: {counts[0]} edges and {counts[1]} triplets, counted again {found[0]} and {found[1]}; {remedy}"
    if frame.system in told:
        atoms = ase().Atoms(frame.numbers, frame.positions.astype(np.float64), cell=frame.cell, pbc=frame.pbc)
        atoms.calc, stored = slabs.emt(), np.asarray(frame.forces, np.float64)
        energy, forces = atoms.get_potential_energy() - told[frame.system]["reference"], atoms.get_forces()
        off = abs(energy - frame.energy), float(np.abs(forces - stored).max())
        if not (off[0] <= ENERGY_OFF and off[1] <= FORCE_OFF):
            expected = f"expected {ENERGY_OFF:g} and {FORCE_OFF:g} at most"
            yield f"{where}: EMT again is {off[0]:.2g} eV and {off[1]:.2g} eV/angstrom off, {expected}; {remedy}"
        total = float(np.abs(stored.sum(0)).max())
        if not total <= 1e-6 * (1 + np.abs(stored).sum()):
            yield f"{where}: the forces sum to {total:.2g} eV/angstrom, expected none; {remedy}"


# ---- command line


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("opencatalyst", "Energies and forces of atoms: simulate slabs, check them, or convert trajectories.")

    def shared(made: argparse.ArgumentParser, of: str) -> None:
        command.add_fractions(made, 0.2, 0.0, of)
        made.add_argument("--cutoff", metavar="A", type=float, default=6.0, help="angstrom, for the counts of edges and triplets")
        made.add_argument("--most", metavar="N", type=command.positive, default=50, help="neighbours of an atom, the nearest")

    one = add("simulate", "Metal slabs with adsorbates: relaxed, rattled and heated by EMT.", simulate)
    command.add_out(one)
    one.add_argument("--systems", metavar="N", type=command.positive, default=60, help="how many; a later run may ask for more")
    one.add_argument("--each", metavar="N", type=command.positive, default=4, help="systems of a file")
    one.add_argument("--size", metavar=("X", "Y", "LAYERS"), nargs=3, type=command.positive, default=(3, 3, 4), help="of the slabs")
    one.add_argument("--dynamics", metavar="N", type=command.natural, default=75, help="steps of 2 fs at each temperature")
    shared(one, "the files and of the compositions")
    command.add_making(one)

    command.add_check(add, "Files against index.json, counts and labels made again", inspect, PICTURE, "--frames", 12,
                      "how many are made again")  # fmt: skip

    three = add("convert", f"Files that end with {', '.join(trajectories.ENDINGS)} to ours.", convert)
    three.add_argument("source", type=Path, metavar="SOURCE", help="a file, or a folder, perhaps with train and val_id in it")
    command.add_out(three)
    three.add_argument("--frames", metavar="N", type=command.positive, default=1000, help="of a file")
    shared(three, "the systems, where SOURCE has no folders train and val_id")
    three.add_argument("--seed", metavar="N", type=command.natural, default=1, help="of the split")
    three.add_argument("--hold-last", metavar="N", type=command.natural, default=0, help="frames of one trajectory, for validation")
    three.add_argument("--source", dest="source_name", metavar="NAME", default=None, help="what index.json calls the source")
    three.add_argument("--label", metavar="TEXT", default=None, help="the method of the labels, such as 'DFT (VASP)'")
    three.add_argument("--mix", action="store_true", help="take labels of several methods into one set")
    three.add_argument("--skip-bad", action="store_true", help="leave out and list frames and files that cannot be used")
    three.add_argument("--trust-pickle", action="store_true", help="open pickles in .lmdb, which can run code")
    command.add_workers(three)
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
