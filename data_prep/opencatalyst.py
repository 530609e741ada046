"""Energies and forces of atoms (Open Catalyst): simulate slabs with adsorbates, check them, or convert trajectories.

    python -m data_prep.opencatalyst simulate OUT         slabs moved by EMT (data_prep.slabs): exact labels, not DFT
    python -m data_prep.opencatalyst check OUT            files against their index, counts and labels made again, a picture
    python -m data_prep.opencatalyst convert SOURCE OUT   extended XYZ (OC20's chunks too), ASE's .traj, .db and .aselmdb

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

from data_prep import command, frames, slabs, store, trajectories, trajectory_sources
from data_prep.command import option
from data_prep.frames import CONTENTS, Frame, ase
from hpcai.errors import ConfigError, DataError

ENERGY_OFF, FORCE_OFF = 5e-5, 2e-4              # eV, eV/angstrom: labels again, from positions rounded to float32
CUTOFF: dict[str, Any] = {"text": "angstrom, for the counts of edges and triplets", "metavar": "A", "type": float}
MOST: dict[str, Any] = {"text": "neighbours of an atom, the nearest", "type": command.positive}


def _wrong_graph(cutoff: float, most: int) -> Iterator[str]:
    if not 1 <= cutoff <= 50:
        yield f"--cutoff {cutoff:g}: expected 1 to 50 angstrom"
    if most > 10000:
        yield f"--most {most}: expected at most 10000 neighbours"


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """All that decides the content of a simulated system, besides its number, and where it lies."""

    seed: int = command.seed()
    size: tuple[int, int, int] = option((3, 3, 4), "of the slabs: atoms along the surface, layers", nargs=3, type=command.positive,
                                        metavar=("X", "Y", "LAYERS"))  # fmt: skip
    steps: int = option(75, "steps of 2 fs at each temperature", "dynamics", type=command.natural)
    each: int = option(4, "systems of a file", type=command.positive)
    validation: float = command.fraction(0.2, "the files and of the compositions")
    test: float = command.fraction(0.0, "the files and of the compositions")
    cutoff: float = option(6.0, **CUTOFF)
    most: int = option(50, **MOST)

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
    about = {"kind": "simulated", "label": slabs.LABEL, "seed": recipe.seed, "recipe": recipe.json_text,
             "systems": json.dumps(told)}  # fmt: skip
    frames.write(path, every, counts, about)


def simulate(options: argparse.Namespace) -> command.Plan:
    ase()
    recipe, name = Recipe.from_options(options), " x ".join(map(str, options.size))
    if options.systems % options.each:
        raise ConfigError(f"--systems {options.systems}: expected a multiple of --each {options.each}, the systems of a file")
    splits = [recipe.split(file) for file in range(options.systems // options.each)]
    command.require_splits(splits, options, f"--systems {options.systems} in files of {options.each}")
    jobs = [store.Job(options.out / split / f"systems_{file:06d}.h5", partial(write_systems, recipe, file), CONTENTS)
            for file, split in enumerate(splits)]  # fmt: skip
    header = {**frames.header(slabs.SOURCES, slabs.LABEL, recipe.cutoff, recipe.most), "compositions": recipe.compositions()}
    return command.Plan(recipe, jobs, header, f"{options.systems} systems of {name} atoms in {options.out}; {slabs.LABEL}")


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    frames: int = option(1000, "of a file", type=command.positive)
    cutoff: float = option(6.0, **CUTOFF)
    most: int = option(50, **MOST)
    seed: int = option(1, "of the split", type=command.natural)
    validation: float = command.fraction(0.2, "the systems, where SOURCE has no folders train and val_id")
    test: float = command.fraction(0.0, "the systems, where SOURCE has no folders train and val_id")
    hold_last: int = option(0, "frames of one trajectory, for validation", type=command.natural)
    skip_bad: bool = option(False, "leave out and list frames and files that cannot be used", action="store_true")

    def mistakes(self) -> Iterator[str]:
        yield from (*command.check_fractions(self.validation, self.test), *_wrong_graph(self.cutoff, self.most))


def add_source(made: argparse.ArgumentParser) -> None:
    made.add_argument("source", type=Path, metavar="SOURCE", help="a file, or a folder, perhaps with train and val_id in it")
    made.add_argument("--label", metavar="TEXT", default=None, help="the method of the labels, such as 'DFT (VASP)'")


@dataclass(frozen=True)
class Pick:
    """Frames of a source file that go into a file of ours."""

    path: Path
    name: str                                   # in its set
    frames: tuple[int, ...]
    labels: str | None


def convert_share(picks: Sequence[Pick], source: Source, out: Path) -> store.Refused:
    """Gives the frames that cannot be used."""
    taken: list[Frame] = []
    counts, refused = [], list[tuple[str, str]]()
    for pick in picks:
        wanted = set(pick.frames)
        for index, item in enumerate(trajectories.items(pick.path, pick.name)):
            if index > max(wanted):
                break
            if index not in wanted:
                continue
            where = f"{pick.path}: frame {index}"
            try:
                frame = item()
                where = f"{where} (system {frame.system})"
                if frame.labels not in (None, pick.labels):
                    others = f"others of the file have {pick.labels or 'none'}; give each a file of its own"
                    raise DataError(f"{where}: labels of {frame.labels}, {others}")
                counts.append(frames.count(frame, source.cutoff, source.most, where))
                taken.append(frame)
            except DataError as problem:
                if not source.skip_bad:
                    raise
                refused.append(command.describe_refusal(problem, where))
    if not taken:
        raise DataError(f"{out}: none of its {len(refused)} frames can be used, the first because {': '.join(refused[0])}")
    frames.write(out, taken, counts, {"kind": "converted"})
    return refused


def convert(options: argparse.Namespace) -> command.Plan:
    source, root = Source.from_options(options), options.source
    files = trajectory_sources.find_files(root)
    by_system = "" in files and not source.hold_last and source.validation + source.test > 0
    bad: list[tuple[str, str]] = []
    origins: dict[str, list[trajectory_sources.SourceFile]] = {}
    for split, paths in files.items():
        origins[split] = []
        for path in paths:
            try:
                origins[split].append(trajectory_sources.inspect_file(path, root, by_system))
            except DataError as problem:
                if not source.skip_bad:
                    raise
                bad.append(command.describe_refusal(problem, path))
        if not origins[split]:
            raise DataError(f"{root}: none of its {len(paths)} files can be read, the first because {': '.join(bad[0])}")
    about = trajectory_sources.describe_source([origin for group in origins.values() for origin in group], options)
    jobs: list[store.Job] = []
    count: Counter[str] = Counter()
    for split, group in trajectory_sources.split_frames(origins, options).items():
        every = [(origin, n) for origin, picked in group for n in picked]
        count[split] = len(every)
        for number, some in enumerate(command.batched(every, source.frames)):
            part: dict[trajectory_sources.SourceFile, list[int]] = {}
            for origin, n in some:
                part.setdefault(origin, []).append(n)
            picks = [Pick(one.path, one.name, tuple(rows), one.labels) for one, rows in part.items()]
            path = options.out / split / f"frames_{number:06d}.h5"
            jobs.append(store.Job(path, partial(convert_share, picks, source), CONTENTS))
    names = {split or "all": [f"{origin.name} {len(origin.systems)}" for origin in group] for split, group in origins.items()}
    told = {split: command.fingerprint(group, "files, names and frames") for split, group in names.items()}
    recipe = {"kind": "convert", **source.json_dict, "origin": about, "sources": told}
    header = frames.header([about], about["labels"], source.cutoff, source.most)
    text = "frames: " + ", ".join(f"{number} for {split}" for split, number in count.items())
    return command.Plan(recipe, jobs, header, text, refused=bad)


# ---- check


def look(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the frames whose neighbours or labels differ when they are computed again."""
    chosen = command.subsample(prepared.locations, options.check_count)
    for path, row in chosen:
        yield from _again(path, row, prepared.index)
    labels = "labels and " if prepared.recipe["kind"] == "simulate" else ""
    print(f"{labels}neighbours of {len(chosen)} frames made again")


def _again(path: Path, row: int, index: dict[str, Any]) -> Iterator[str]:
    """Yield the differences of a frame from neighbours and labels that are computed again."""
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


BUILDER = command.DatasetBuilder(
    "opencatalyst", "Energies and forces of atoms: simulate slabs, check them, or convert trajectories.", "opencatalyst",
    command.Check("Files against index.json, counts and labels made again.", look, ("frames", 12, "how many are made again")),
    (command.Simulate("Metal slabs with adsorbates: relaxed, rattled and heated by EMT.", Recipe,
                      ("systems", 60, "how many; a later run may ask for more"), simulate),
     command.Convert(f"Files that end with {', '.join(trajectories.ENDINGS)} to ours.", Source, convert, add_source)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    sys.exit(main())
