"""Kidney tumours in CT (KiTS19): simulate scans of phantoms, check them, or convert the public set.

    python -m data_prep.kits19 simulate OUT         CT of made-up abdomens (data_prep.phantom), through the pipeline of convert
    python -m data_prep.kits19 check OUT            files against their index, boxes against labels, a picture
    python -m data_prep.kits19 convert SOURCE OUT   the public cases, case_00000/{imaging,segmentation}.nii.gz

    OUT/{train,validation,test}/case_00000.h5       "image" float32 [1, D, H, W], normalised HU (hpcai.models.unet3d.volume)
                                                    "label" uint8 [1, D, H, W], 0 background, 1 kidney, 2 tumour
                                                    "boxes" int32 [1, 2, 2, 6], so that a crop finds an object unread

Boxes are those of kidney and of tumour: of each the two connected parts (6 neighbours) whose boxes are the largest, the larger
first, as start and stop along D, H, W; zeros where there are fewer. Every case has a shape of its own, which the index states.

A simulated case is a pure function of (seed, index), spacing, least shape and extent, so that ranks, cores, stops and later growth
of the set change nothing in it.

D along the body   H front to back   W from side to side
"""

import argparse
import json
import multiprocessing
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from data_prep import command, nifti, phantom, store
from data_prep.command import option
from data_prep.extras import needed
from data_prep.store import Field
from hpcai.errors import ConfigError
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import CLASSES
from hpcai.programs import command_of

PUBLIC, LABELLED = 300, 210     # cases of the public set; those from 210 on have no label
# The evaluation cases of the MLPerf reference.
EVALUATION = frozenset((
    0, 3, 5, 6, 12, 24, 34, 41, 44, 49, 52, 56, 61, 65, 66, 70, 76, 78, 80, 84, 86, 87, 92, 111, 112, 125, 128, 138, 157, 160, 161,
    162, 169, 171, 176, 185, 187, 189, 198, 203, 206, 207,
))  # fmt: skip
OBJECTS, PARTS = len(CLASSES) - 1, 2
Three = tuple[float, float, float]


# ---- what the files hold


FIELDS = {
    "image": Field("float32", (None, None, None), channels=3),
    "label": Field("uint8", (None, None, None), 0, len(CLASSES) - 1, blank=0, classes=len(CLASSES)),
    "boxes": Field("int32", (OBJECTS, PARTS, 6), 0, blank=0),
}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    shapes = np.array([record["shape"] for record in records])
    return {"shapes": {"least": shapes.min(0).tolist(), "largest": shapes.max(0).tolist()}}    # of each dim


CONTENTS = store.Contents(FIELDS, merge=_merge, varies=True)


def boxes(label: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Start and stop of the two largest parts of each class, by the volume of their box; zeros for none.   [2, 2, 6]"""
    ndimage = needed("scipy.ndimage", "finding connected parts of labels", "unet3d")
    found = np.zeros((OBJECTS, PARTS, 6), np.int32)
    for kind, where in enumerate(ndimage.find_objects(label, OBJECTS)):
        if where is None:
            continue
        parts, _ = ndimage.label(label[where] == kind + 1)
        begin = np.array([cut.start for cut in where])
        corners = np.array([[[cut.start for cut in one], [cut.stop for cut in one]] for one in ndimage.find_objects(parts)]) + begin
        order = np.argsort(-(corners[:, 1] - corners[:, 0]).prod(1), kind="stable")[:PARTS]
        found[kind, : len(order)] = corners[order].reshape(-1, 6)
    return found


def _header(spacing: Sequence[float]) -> dict[str, Any]:
    scale = {"clip_hu": list(volume.CLIP_HU), "mean_hu": volume.MEAN_HU, "deviation_hu": volume.STD_HU}
    return {"classes": list(CLASSES), "spacing_mm": list(spacing), **scale}


def _write(
    path: Path, image: NDArray[Any], label: NDArray[np.uint8], spacing: Three, target: Three, least: Sequence[int],
    about: dict[str, Any],
) -> None:  # fmt: skip
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)                                    # the workers are as many as the cores
    ready, classes = volume.preprocess(image, label, spacing, target, least)
    assert classes is not None
    here = {name: field._replace(shape=ready.shape) if None in field.shape else field for name, field in FIELDS.items()}
    origin = {"original_spacing_mm": list(spacing), "original_shape": list(image.shape)}
    with store.create_file(path, 1, here, {**_header(target), **origin, **about}) as file:
        file["image"][0], file["label"][0], file["boxes"][0] = ready, classes, boxes(classes)


def _wrong_grid(spacing: Sequence[float], least: Sequence[int]) -> Iterator[str]:
    if not all(np.isfinite(mm) and 0.3 <= mm <= 20 for mm in spacing):
        yield f"--spacing {' '.join(f'{mm:g}' for mm in spacing)}: expected 0.3 to 20 mm along D, H, W"
    if max(least) > 1024:
        yield f"--least {' '.join(map(str, least))}: expected at most 1024 voxels along D, H, W"


SPACING: dict[str, Any] = {"text": "mm between voxels", "metavar": ("D", "H", "W"), "nargs": 3, "type": float}
LEAST: dict[str, Any] = {"text": "smaller volumes are padded", "metavar": ("D", "H", "W"), "nargs": 3, "type": command.positive}


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """All that decides the content of a simulated case, besides its index, and where it lies."""

    seed: int = command.seed()
    spacing: tuple[float, float, float] = option((4.8, 3.6, 3.6), **SPACING)
    least: tuple[int, int, int] = option((32, 64, 64), **LEAST)
    extent: float | None = option(None, "of the body that is covered: 220 to 320 at random", metavar="MM", type=float)
    validation: float = command.fraction(0.2, "the cases")
    test: float = command.fraction(0.0, "the cases")

    def mistakes(self) -> Iterator[str]:
        yield from _wrong_grid(self.spacing, self.least)
        if self.extent is not None and not 40 <= self.extent <= 600:
            yield f"--extent is {self.extent:g} mm, expected 40 to 600"

    def scan(self, index: int) -> phantom.Scan:
        return phantom.scan(self.generator(1, index), self.spacing, self.extent)


def write_phantom(recipe: Recipe, index: int, path: Path) -> None:
    scan = recipe.scan(index)
    about = {"kind": "simulated", "case": path.stem, "seed": recipe.seed, "index": index, "recipe": recipe.json_text}
    _write(path, scan.image, scan.label, scan.spacing_mm, recipe.spacing, recipe.least, about)


def write_nifti(recipe: Recipe, case: tuple[int, Path]) -> None:
    index, folder = case
    if not (folder / nifti.IMAGE).is_file():                        # it is written last
        scan = recipe.scan(index)
        nifti.write(folder, scan.image, scan.label, scan.spacing_mm)


def add_nifti(made: argparse.ArgumentParser) -> None:
    made.add_argument("--nifti", action="store_true", help="write the public layout, at the scanner's grid, for convert")


def simulate(options: argparse.Namespace) -> command.Plan | None:
    recipe, names = Recipe.from_options(options), [f"case_{index:05d}" for index in range(options.cases)]
    if options.nifti:
        store.claim_folder(options.out, {"kind": "nifti", **recipe.json_dict})
        rank, size = store.rank_and_size()
        cases = [(index, options.out / name) for index, name in enumerate(names)][rank::size]
        store.run_parallel(cases, partial(write_nifti, recipe), options.workers, options.command)
        folder = shlex.quote(str(options.out))
        command.print_rank_0(f"{options.cases} NIfTI cases; next: {command_of('data_prep.kits19')} convert {folder} OUT")
        return None
    splits = [recipe.split(index) for index in range(options.cases)]
    command.require_splits(splits, options, f"--cases {options.cases}")
    jobs = [store.Job(options.out / split / f"{name}.h5", partial(write_phantom, recipe, index), CONTENTS, 1)
            for index, (name, split) in enumerate(zip(names, splits))]  # fmt: skip
    told = f"{options.cases} cases at {' x '.join(f'{mm:g}' for mm in recipe.spacing)} mm in {options.out}"
    return command.Plan(recipe, jobs, _header(recipe.spacing), told)


# ---- convert


numbers = command.option_type("list of whole numbers such as 3,7", lambda text: [command.natural(part) for part in text.split(",")])


@dataclass(frozen=True)
class Source(command.Settings):
    spacing: tuple[float, float, float] = option(volume.TARGET_MM, **SPACING)
    least: tuple[int, int, int] = option(volume.MIN_SHAPE, **LEAST)
    validation_cases: tuple[int, ...] | None = option(
        None, "numbers of the cases held out; by default those of the MLPerf reference", metavar="N,N", type=numbers)  # fmt: skip

    def mistakes(self) -> Iterator[str]:
        yield from _wrong_grid(self.spacing, self.least)


def add_source(made: argparse.ArgumentParser) -> None:
    made.add_argument("source", type=Path, metavar="SOURCE", help="holds case_00000 and so on; in KiTS19 its folder data")


def convert_case(source: Path, spacing: Three, least: tuple[int, int, int], path: Path) -> None:
    image, label, found = nifti.read(source)
    about = {"kind": "converted", "case": source.name, "recipe": json.dumps({"spacing": spacing, "least": least})}
    _write(path, image, label, found, spacing, least, about)


def cases_of(root: Path, chosen: Sequence[int] | None) -> tuple[dict[str, list[str]], list[str]]:
    """The labelled cases of each split, by the numbers chosen for validation or those of the reference; and those without label."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds case_00000/{nifti.IMAGE} and {nifti.LABEL}, and so on")
    found = {int(match[1]): path.name for path in sorted(root.iterdir()) if (match := re.fullmatch(r"case_(\d+)", path.name))}
    if not found:
        raise ConfigError(f"{root}: no folder case_00000 or alike; name the folder that holds the cases (in KiTS19: data)")
    bare = [number for number in found if LABELLED <= number < PUBLIC and not (root / found[number] / nifti.LABEL).is_file()]
    labelled = {number: name for number, name in found.items() if number not in bare}
    held = EVALUATION if chosen is None else frozenset(chosen)
    strangers = sorted(held - labelled.keys()) if chosen is not None else []
    if strangers:
        raise ConfigError(f"--validation-cases names {strangers[:9]}, which {root} does not hold with labels; correct the numbers")
    own = [number for number in labelled if number >= LABELLED]
    if own and chosen is None:
        raise ConfigError(f"{root}: {found[own[0]]} is no labelled case of the public set; name yours for validation: "
                          "--validation-cases 3,7")  # fmt: skip
    if chosen is None and len(labelled) < LABELLED:
        command.print_rank_0(f"{len(labelled)} of the {LABELLED} labelled cases of the public set are in {root}")
    splits = {"train": [name for number, name in labelled.items() if number not in held],
              "validation": [name for number, name in labelled.items() if number in held]}  # fmt: skip
    for split, names in splits.items():
        if not names:
            raise ConfigError(f"{root}: none of its {len(labelled)} labelled cases is for {split}; choose with --validation-cases")
    return splits, [found[number] for number in bare]


def convert(options: argparse.Namespace) -> command.Plan:
    source = Source.from_options(options)
    splits, bare = cases_of(options.source, source.validation_cases)
    how = source.spacing, source.least
    jobs = [store.Job(options.out / split / f"{name}.h5", partial(convert_case, options.source / name, *how), CONTENTS, 1)
            for split, names in splits.items() for name in names]  # fmt: skip
    sources = {split: command.fingerprint(names, "cases, names") for split, names in splits.items()}
    recipe = {"kind": "convert", "spacing": list(source.spacing), "least": list(source.least), "sources": sources}
    refused = [(name, "has no label in the public set") for name in bare]
    told = f"cases: {command.describe_sources(splits)}"
    return command.Plan(recipe, jobs, _header(source.spacing), told, refused=refused)


# ---- check


def look(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the files whose boxes differ from those of their labels."""
    chosen = command.subsample(prepared.paths, options.check_count)
    for path in chosen:
        with h5py.File(path, "r") as file:
            stated, found = file["boxes"][0], boxes(file["label"][0])
        if (stated != found).any():
            yield f"{path}: boxes {stated.tolist()}, the label has {found.tolist()}; delete the file and make it again"
    print(f"boxes of {len(chosen)} cases compared with their labels")


BUILDER = command.DatasetBuilder(
    "kits19", "Kidney tumours in CT: simulate scans, check them, or convert the public set KiTS19.", "unet3d",
    command.Check("Files against index.json, boxes against labels.", look, ("boxes", 8, "cases whose boxes are made again")),
    (command.Simulate("CT scans of made-up abdomens with kidneys and tumours.", Recipe,
                      ("cases", 96, "how many; a later run may ask for more"), simulate, add_nifti),
     command.Convert("The public cases (case_00000/imaging.nii.gz, segmentation.nii.gz).", Source, convert, add_source)),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    sys.exit(main())
