"""Energies and forces of atoms (Open Catalyst): simulate slabs with adsorbates, check them, or convert trajectories.

    python -m data_prep.opencatalyst simulate OUT         slabs moved by EMT (data_prep.slabs): exact labels, not DFT
    python -m data_prep.opencatalyst check OUT            files against their index, counts and labels recomputed, a picture
    python -m data_prep.opencatalyst convert SOURCE OUT   extended XYZ (also OC20's chunks), ASE's .traj and .aselmdb

    OUT/{train,validation,test}/*.h5, R frames of A atoms in total
        "atoms" int32 [R]   "edges" int32 [R]   "triplets" int64 [R]     within "cutoff", of the "most" nearest of each atom
        "energy" float64 [R] eV   "cell" float64 [R, 3, 3] angstrom, rows are vectors   "pbc" uint8 [R, 3]
        "system" int64 [R]   "frame" int32 [R]   "source" int16 [R]      index into the "sources" of index.json
        "positions" float32 [A, 3] angstrom   "forces" float32 [A, 3] eV/angstrom, raw   "numbers" uint8 [A]
        "tags" uint8 [A], 0 below the surface, 1 surface, 2 adsorbate    "fixed" uint8 [A], 1 for fixed atoms

Datasets of shape [A] hold the frames concatenated; "atoms" is the length of each. Splits are by composition in simulate and by
system in convert, so that no frame of validation shares its system with training."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, frames, slabs, store, trajectories, trajectory_sources
from data_prep.command import option
from data_prep.frames import CONTENTS, Frame, import_ase
from hpcai.errors import ConfigError, DataError

ENERGY_TOLERANCE, FORCE_TOLERANCE = 5e-5, 2e-4      # eV, eV/angstrom: of labels recomputed from positions in float32
CUTOFF_OPTION: dict[str, Any] = {
    "text": "angstrom, for the counts of edges and triplets", "metavar": "A", "type": command.within(1, 50),
}  # fmt: skip
MOST_OPTION: dict[str, Any] = {"text": "neighbours of an atom, the nearest", "type": command.within(1, 10_000, int)}


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated system, besides its number, and its split."""

    seed: int = command.seed()
    size: tuple[int, int, int] = option((3, 3, 4), "of the slabs: atoms along the surface, layers", nargs=3, type=command.positive,
                                        metavar=("X", "Y", "LAYERS"))  # fmt: skip
    steps: int = option(75, "steps of 2 fs at each temperature", "dynamics", type=command.natural)
    each: int = option(4, "systems of a file", type=command.positive)
    validation: float = command.fraction(0.2, "the files and of the compositions")
    test: float = command.fraction(0.0, "the files and of the compositions")
    cutoff: float = option(6.0, **CUTOFF_OPTION)
    most: int = option(50, **MOST_OPTION)

    def mistakes(self) -> Iterator[str]:
        across, along, layers = self.size
        if not (min(across, along) >= 2 and max(across, along) <= 12 and slabs.FIXED_LAYERS < layers <= 12):
            yield f"--size {across} {along} {layers}: expected 2 to 12 atoms along and {slabs.FIXED_LAYERS + 1} to 12 layers"
        if self.validation + self.test < 1 and not self.compositions()["train"]:
            yield f"--validation {self.validation} and --test {self.test}: leave no composition for training; lower them"

    def compositions(self) -> dict[str, list[str]]:
        return slabs.split_compositions(self.generator(2, 0), self.validation, self.test)

    def make_system(self, number: int) -> slabs.System:
        choice = self.compositions()[self.split(number // self.each)]
        return slabs.make_system(self.generator(1, number), number, choice, self.size, self.steps)


def write_systems(recipe: Recipe, file: int, path: Path) -> None:
    systems = [recipe.make_system(number) for number in range(file * recipe.each, (file + 1) * recipe.each)]
    all_frames = [frame for system in systems for frame in system.frames]
    counts = [frames.count_graph(f, recipe.cutoff, recipe.most, f"system {f.system}: frame {f.frame}") for f in all_frames]
    entries = [{"system": system.frames[0].system, "name": system.name, "composition": system.composition,
                "reference": system.reference} for system in systems]  # fmt: skip
    about = {"kind": "simulated", "label": slabs.LABEL, "seed": recipe.seed, "recipe": recipe.json_text,
             "systems": json.dumps(entries)}  # fmt: skip
    frames.write(path, all_frames, counts, about)


def simulate(options: argparse.Namespace) -> command.Plan:
    import_ase()
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
    frames: int = option(1000, "frames of a file", type=command.positive)
    cutoff: float = option(6.0, **CUTOFF_OPTION)
    most: int = option(50, **MOST_OPTION)
    seed: int = option(1, "seed of the split", type=command.natural)
    validation: float = command.fraction(0.2, "the systems, where SOURCE has no folders train and val_id")
    test: float = command.fraction(0.0, "the systems, where SOURCE has no folders train and val_id")
    hold_last: int = option(0, "frames of one trajectory, for validation", type=command.natural)
    energy_key: str | None = option(None, "name of the energy in the files, such as dft_energy", metavar="KEY")
    forces_key: str | None = option(None, "name of the forces in the files", metavar="KEY")
    skip_bad: bool = option(False, "leave out and list frames and files that cannot be used", action="store_true")

    def mistakes(self) -> Iterator[str]:
        yield from command.check_fractions(self.validation, self.test)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", metavar="TEXT", default=None, help="the method of the labels, such as 'DFT (VASP)'")


@dataclass(frozen=True)
class SelectedFrames:
    """Frames of a source file that are written to one output file."""

    path: Path
    name: str                                   # path in its set
    frames: set[int]
    labels: str | None


def convert_frames(selected: Sequence[SelectedFrames], source: Source, out: Path) -> store.Refused:
    """Write a file of frames. Returns the frames that cannot be used."""
    usable: list[Frame] = []
    counts, refused, keys = [], store.Skipped(source.skip_bad), (source.energy_key, source.forces_key)
    for selection in selected:
        for index, item in enumerate(trajectories.frame_readers(selection.path, selection.name, keys)):
            if index > max(selection.frames):
                break
            if index not in selection.frames:
                continue
            where = f"{selection.path}: frame {index}"
            with refused.catch(where):
                frame = item()
                if frame.labels not in (None, selection.labels):
                    hint = f"others of the file have {selection.labels or 'none'}; use one file for each method"
                    raise DataError(f"{where}: labels of {frame.labels}, {hint}")
                counts.append(frames.count_graph(frame, source.cutoff, source.most, where))
                usable.append(frame)
    if usable:
        frames.write(out, usable, counts, {"kind": "converted"})
    return refused


def convert(options: argparse.Namespace) -> command.Plan:
    source, root = Source.from_options(options), options.source
    files = trajectory_sources.find_files(root)
    by_system = "" in files and not source.hold_last and source.validation + source.test > 0
    bad = store.Skipped(source.skip_bad)
    origins: dict[str, list[trajectory_sources.SourceFile]] = {}
    for split, paths in files.items():
        origins[split] = []
        for path in paths:
            with bad.catch(path):
                origins[split].append(trajectory_sources.inspect_file(path, options, by_system))
        if not origins[split]:
            raise DataError(f"{root}: none of its {len(paths)} files can be read, the first because {': '.join(bad[0])}")
    all_origins = [origin for group in origins.values() for origin in group]
    trajectory_sources.check_frames(all_origins, options)
    description = trajectory_sources.describe_source(all_origins, options)
    jobs: list[store.Job] = []
    parts = trajectory_sources.split_frames(origins, options)
    for split, group in parts.items():
        frames_of_split = [(origin, n) for origin, picked in group for n in picked]
        for number, chunk in enumerate(command.batched(frames_of_split, source.frames)):
            selected = [SelectedFrames(file.path, file.name, {n for _, n in rows}, file.labels)
                        for file, rows in groupby(chunk, itemgetter(0))]  # fmt: skip
            path = options.out / split / f"frames_{number:06d}.h5"
            jobs.append(store.Job(path, partial(convert_frames, selected, source), CONTENTS))
    names = {split or "all": [f"{origin.name} {len(origin.systems)}" for origin in group] for split, group in origins.items()}
    digests = {split: command.fingerprint(group, "files, names and frames") for split, group in names.items()}
    recipe = {"kind": "convert", **source.json_dict, "origin": description, "sources": digests}
    header = frames.header([description], description["labels"], source.cutoff, source.most)
    text = "frames: " + ", ".join(f"{sum(len(picked) for _, picked in group)} for {split}" for split, group in parts.items())
    text += trajectory_sources.describe_notes(all_origins)
    others = [path for path in command.data_files(root) if trajectories.file_format(path) is None]  # none if SOURCE is a file
    unread = [(str(path), f"files {path.suffix} are not read") for path in others]
    return command.Plan(recipe, jobs, header, text, refused=[*bad, *unread])


# ---- check


def check_samples(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the frames whose neighbours or labels differ when they are recomputed."""
    chosen = command.subsample(prepared.locations, options.check_count)
    index, remedy = prepared.index, "delete the file and make it again"
    for path, row in chosen:
        where = f"{path}: row {row}"
        with h5py.File(path, "r") as file:
            frame, counts = frames.read(file, row)
            systems = {each["system"]: each for each in json.loads(file.attrs.get("systems", "[]"))}
        computed = frames.count_graph(frame, index["cutoff"], index["most"], where)
        if computed != counts:
            yield f"{where}: {counts[0]} edges and {counts[1]} triplets, recounted {computed[0]} and {computed[1]}; {remedy}"
        if frame.system not in systems:
            continue
        atoms = import_ase().Atoms(frame.numbers, frame.positions.astype(np.float64), cell=frame.cell, pbc=frame.pbc)
        atoms.calc, stored = slabs.emt_calculator(), np.asarray(frame.forces, np.float64)
        energy, forces = atoms.get_potential_energy() - systems[frame.system]["reference"], atoms.get_forces()
        errors = abs(energy - frame.energy), float(np.abs(forces - stored).max())
        if not (errors[0] <= ENERGY_TOLERANCE and errors[1] <= FORCE_TOLERANCE):
            expected = f"expected {ENERGY_TOLERANCE:g} and {FORCE_TOLERANCE:g} at most"
            yield f"{where}: recomputed EMT is {errors[0]:.2g} eV and {errors[1]:.2g} eV/angstrom off, {expected}; {remedy}"
        total = float(np.abs(stored.sum(0)).max())
        if not total <= 1e-6 * (1 + np.abs(stored).sum()):
            yield f"{where}: the forces sum to {total:.2g} eV/angstrom, expected none; {remedy}"
    labels = "labels and " if prepared.recipe["kind"] == "simulate" else ""
    print(f"{labels}neighbours of {len(chosen)} frames recomputed")


BUILDER = command.DatasetBuilder(
    "opencatalyst", "Energies and forces of atoms: simulate slabs, check them, or convert trajectories.", "opencatalyst",
    command.Check("Files against index.json, counts and labels recomputed.", check_samples, ("frames", 12, "frames to recompute")),
    (command.Simulate("Metal slabs with adsorbates: relaxed, rattled and heated by EMT.", Recipe, ("systems", 60), simulate),
     command.Convert(f"Files that end with {', '.join(trajectories.SUFFIXES)} to ours.", Source, convert,
                     "a file, or a folder, perhaps with train and val_id in it", add_options)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
