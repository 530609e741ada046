"""What a conversion of trajectories begins with: which files there are, what computed their labels, which frames are held out."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import command, store, trajectories
from hpcai.errors import ConfigError, DataError

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "val_id", "val"), "test": ("test", "test_id")}


@dataclass(frozen=True)
class Origin:
    """A source file."""

    path: Path
    name: str                                   # in its set
    systems: tuple[int | None, ...]             # of each frame
    labels: str | None                          # what the file says of how they were computed
    relative: bool                              # energies are told less a reference


def files(root: Path) -> dict[str, list[Path]]:
    """Source files of each split, or of all under ""."""
    if root.is_file():
        if trajectories.file_format(root) is None:
            raise ConfigError(f"{root}: unknown ending, expected one of {', '.join(trajectories.SUFFIXES)}")
        return {"": [root]}
    if not root.is_dir():
        raise ConfigError(f"{root}: no such file or folder")
    named = {split: folder for split, names in SPLIT_NAMES.items() for name in names[::-1] if (folder := root / name).is_dir()}
    folders = named if "train" in named else {"": root}
    found = {split: [path for path in sorted(folder.rglob("*")) if path.is_file() and trajectories.file_format(path)]
             for split, folder in folders.items()}  # fmt: skip
    for split, folder in folders.items():
        if not found[split]:
            raise ConfigError(f"{folder}: holds no file that ends with {', '.join(trajectories.SUFFIXES)}; name another SOURCE")
    return found


def origin(path: Path, root: Path, by_system: bool) -> Origin:
    name = path.relative_to(root if root.is_dir() else root.parent).as_posix()
    told, labels = trajectories.system_ids(path), None     # OC20's lists spare a look at the atoms
    found: list[int | None] = []
    for number, item in enumerate(trajectories.frame_readers(path, name)):
        system = told[number] if number < len(told) else None
        if (labels is None and number < 9) or (by_system and not told):
            try:
                frame = item()
                labels, system = labels or frame.labels, system or frame.system
            except DataError:
                pass                            # told when it is its turn
        found.append(system if by_system else None)
    if not found:
        raise DataError(f"{path}: holds no frames; {trajectories.ADVICE}")
    return Origin(path, name, tuple(found), labels, trajectories.references_path(path) is not None)


def source(origins: Sequence[Origin], options: argparse.Namespace) -> dict[str, str]:
    """Entries of the index about the source. Labels of several methods in one set are refused: their energies have other zeros."""
    told = [(origin.labels or options.label, origin.relative) for origin in origins]
    kinds, advice = list(dict.fromkeys(told)), "convert them one by one"
    silent = [origin for origin, (labels, relative) in zip(origins, told) if labels is None and not relative]
    if len(kinds) > 1:
        one, other = (f"{origins[told.index(kind)].path.name} has {kind[0] or 'labels of unknown method'}"
                      f"{', energies less a reference' if kind[1] else ''}" for kind in kinds[:2])  # fmt: skip
        raise ConfigError(f"{options.source}: {one}, {other}; {advice}; --label names the method of files that do not tell it")
    if len(silent) > 1:
        raise ConfigError(f"{options.source}: {len(silent)} files such as {silent[0].path.name} do not tell how their labels were "
                          f"computed; if by one method, name it, as in --label 'DFT (VASP)'; otherwise {advice}")  # fmt: skip
    labels, relative = told[0]
    return {"name": options.source.name, "labels": options.label or labels or "not stated",
            "energy": "less a reference" if relative else "total"}  # fmt: skip


def splits(origins: dict[str, list[Origin]], options: argparse.Namespace) -> dict[str, list[tuple[Origin, list[int]]]]:
    """The frames of each split."""
    if "" not in origins:
        return {split: [(origin, list(range(len(origin.systems)))) for origin in group] for split, group in origins.items()}
    group = origins[""]
    if options.hold_last:
        only, last = group[0], options.hold_last
        if len(group) > 1 or last >= len(only.systems):
            found = f"{len(group)} files" if len(group) > 1 else f"{len(only.systems)} frames"
            raise ConfigError(f"--hold-last {last}: {options.source} has {found}, expected one trajectory of more frames than that")
        cut = len(only.systems) - last
        return {"train": [(only, list(range(cut)))], "validation": [(only, list(range(cut, cut + last)))]}
    order = list(dict.fromkeys(system for origin in group for system in origin.systems))
    where = {system: store.split_of(n, options.seed, options.validation, options.test) for n, system in enumerate(order)}
    one = f"{options.source} has {len(order)} systems" if len(order) > 1 else f"{options.source} is of one system (--hold-last N?)"
    command.refuse_empty(list(where.values()), options, one)
    parts = {split: [(origin, [n for n, system in enumerate(origin.systems) if where[system] == split]) for origin in group]
             for split in store.SPLITS if split in where.values()}  # fmt: skip
    return {split: [(origin, picked) for origin, picked in part if picked] for split, part in parts.items()}
