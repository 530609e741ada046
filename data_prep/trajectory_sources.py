"""Source files of a conversion of trajectories: the method of their labels, and the split of their frames."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import command, frames, store, trajectories
from hpcai.errors import ConfigError, DataError

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val_id", "val"), "test": ("test", "test_id")}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    name: str                                   # path relative to SOURCE
    systems: tuple[int | None, ...]             # of each frame
    labels: str | None                          # the method of the labels, if the file has it
    relative: bool                              # energies are relative to a reference
    refused: store.Refused                      # frames that cannot be used, of those that were read
    notes: tuple[str, ...]                      # how their values are understood


def find_files(root: Path) -> dict[str, list[Path]]:
    """Return the source files of each split, or all files under "". Raises ConfigError if there are none."""
    if root.is_file():
        if trajectories.file_format(root) is None:
            raise ConfigError(f"{root}: unknown ending, expected one of {', '.join(trajectories.SUFFIXES)}")
        return {"": [root]}
    if not root.is_dir():
        raise ConfigError(f"{root}: no such file or folder")
    named = {split: folder for split, names in SPLIT_NAMES.items() for name in names[::-1] if (folder := root / name).is_dir()}
    folders = named if "train" in named else {"": root}
    files = {split: [path for path in sorted(folder.rglob("*")) if path.is_file() and trajectories.file_format(path)]
             for split, folder in folders.items()}  # fmt: skip
    for split, folder in folders.items():
        if not files[split]:
            raise ConfigError(f"{folder}: holds no file that ends with {', '.join(trajectories.SUFFIXES)}; name another SOURCE")
    return files


def inspect_file(path: Path, options: argparse.Namespace, by_system: bool) -> SourceFile:
    root, keys = options.source, (options.energy_key, options.forces_key)
    name = path.relative_to(root if root.is_dir() else root.parent).as_posix()
    listed, labels = trajectories.system_ids(path), None       # with the lists of OC20 the atoms need not be read
    systems: list[int | None] = []
    refused, notes = list[tuple[str, str]](), dict[str, None]()
    for number, item in enumerate(trajectories.frame_readers(path, name, keys)):
        system = listed[number] if number < len(listed) else None
        if (labels is None and number < 9) or (by_system and not listed):
            try:
                frame = item()
                labels, system = labels or frame.labels, system or frame.system
                notes.update(dict.fromkeys(frame.notes))
                frames.check_labels(frame, f"{path}: frame {number}")
            except DataError as problem:        # without all frames, it is reported when the frame is converted
                refused += [store.describe_refusal(problem, f"{path}: frame {number}")] if by_system and not listed else []
        systems.append(system if by_system else None)
    if not systems:
        raise DataError(f"{path}: holds no frames; {trajectories.ADVICE}")
    return SourceFile(path, name, tuple(systems), labels, trajectories.references_path(path) is not None, refused, tuple(notes))


def check_frames(files: Sequence[SourceFile], options: argparse.Namespace) -> str:
    """Return the reasons of refused frames, or "". Raises DataError if there is one without --skip-bad, or if none is left."""
    refused, total = [each for file in files for each in file.refused], sum(len(file.systems) for file in files)
    text = f"{len(refused)} of {total} frames cannot be used: {store.count_by_reason(refused)}" if refused else ""
    if refused and (not options.skip_bad or len(refused) == total):
        raise DataError(f"{options.source}: {text}" + "; or leave them out with --skip-bad" * (len(refused) < total))
    return text


def describe_notes(files: Sequence[SourceFile]) -> str:
    """Return a line for each way in which values of the files are understood."""
    named = {note: [file.path.name for file in files if note in file.notes] for file in files for note in file.notes}
    return "".join(f"\n{note}: {names[0]}, one of {len(names)} such files" for note, names in named.items())


def describe_source(files: Sequence[SourceFile], options: argparse.Namespace) -> dict[str, str]:
    """Return the index entries of the source. Raises ConfigError for several methods of labels: the zeros of energy differ."""
    methods = [(file.labels or options.label, file.relative) for file in files]
    kinds, advice = list(dict.fromkeys(methods)), "convert them one by one"
    unlabelled = [file for file, (labels, relative) in zip(files, methods) if labels is None and not relative]
    if len(kinds) > 1:
        first, second = (f"{files[methods.index(kind)].path.name} has {kind[0] or 'labels of unknown method'}"
                         f"{', energies less a reference' if kind[1] else ''}" for kind in kinds[:2])  # fmt: skip
        raise ConfigError(f"{options.source}: {first}, {second}; {advice}; --label names the method of files without one")
    if len(unlabelled) > 1:
        raise ConfigError(f"{options.source}: {len(unlabelled)} files such as {unlabelled[0].path.name} have no method of their "
                          f"labels; if it is one, name it, as in --label 'DFT (VASP)'; otherwise {advice}")  # fmt: skip
    labels, relative = methods[0]
    return {"name": options.source.name, "labels": options.label or labels or "not stated",
            "energy": "less a reference" if relative else "total"}  # fmt: skip


def split_frames(files: dict[str, list[SourceFile]], options: argparse.Namespace) -> dict[str, list[tuple[SourceFile, list[int]]]]:
    """Return the frames of each split, by file. All frames of a system are in one split."""
    if "" not in files:
        return {split: [(file, list(range(len(file.systems)))) for file in group] for split, group in files.items()}
    group = files[""]
    if options.hold_last:
        only, last = group[0], options.hold_last
        if len(group) > 1 or last >= len(only.systems):
            count = f"{len(group)} files" if len(group) > 1 else f"{len(only.systems)} frames"
            raise ConfigError(f"--hold-last {last}: {options.source} has {count}, expected one trajectory of more frames than that")
        cut = len(only.systems) - last
        return {"train": [(only, list(range(cut)))], "validation": [(only, list(range(cut, cut + last)))]}
    read = (system for file in group for system in file.systems if system is not None)
    order: list[int | None] = [*dict.fromkeys(read)] or [None]
    split_of = {system: store.split_of(n, options.seed, options.validation, options.test) for n, system in enumerate(order)}
    text = f"{options.source} has {len(order)} systems" if len(order) > 1 else f"{options.source} is of one system (--hold-last N?)"
    refused = check_frames(group, options)
    command.require_splits(list(split_of.values()), options, f"{text}, {refused}" if refused else text)
    parts = {split: [(file, [n for n, s in enumerate(file.systems) if split_of.get(s, "train") == split]) for file in group]
             for split in store.SPLITS if split in split_of.values()}  # fmt: skip
    return {split: [(file, frames) for file, frames in part if frames] for split, part in parts.items()}
