"""Kidney tumours in CT (KiTS19): simulate scans of phantoms, check them, or convert the public set.

    python -m data_prep.kits19 simulate OUT         CT of simulated abdomens (data_prep.phantom), through the pipeline of convert
    python -m data_prep.kits19 check OUT            files against their index, boxes against labels, a picture
    python -m data_prep.kits19 convert SOURCE OUT   the public cases, case_00000/{imaging,segmentation}.nii.gz

    OUT/{train,validation,test}/case_00000.h5       "image" float32 [1, D, H, W], normalised HU (hpcai.models.unet3d.volume)
                                                    "label" uint8 [1, D, H, W], 0 background, 1 kidney, 2 tumour
                                                    "boxes" int32 [1, 2, 2, 6], to crop an object without reading the volume

Boxes are those of kidney and of tumour: for each, the two connected components (6 neighbours) with the largest boxes, the larger
first, as start and stop along D, H, W; zeros if there are fewer. Every case has its own shape, which the index states.

D along the body   H front to back   W from side to side"""

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
from numpy.typing import NDArray

from data_prep import command, nifti, phantom, store
from data_prep.command import option
from data_prep.store import Field
from hpcai.errors import ConfigError
from hpcai.lazy import import_optional
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import CLASSES
from hpcai.programs import command_of

PUBLIC, LABELLED = 300, 210     # cases of the public set; from 210 on without a label
EVALUATION = frozenset(json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))  # of the MLPerf reference
FOREGROUND_CLASSES, MAX_COMPONENTS = len(CLASSES) - 1, 2
Triple = tuple[float, float, float]


# ---- contents of the files


FIELDS = {
    "image": Field("float32", (None, None, None), channels=3),
    "label": Field("uint8", (None, None, None), 0, len(CLASSES) - 1, blank=0, classes=len(CLASSES)),
    "boxes": Field("int32", (FOREGROUND_CLASSES, MAX_COMPONENTS, 6), 0, blank=0),
}


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    shapes = np.array([record["shape"] for record in records])
    return {"shapes": {"least": shapes.min(0).tolist(), "largest": shapes.max(0).tolist()}}    # of each dim


CONTENTS = store.Contents(FIELDS, merge=_merge, varies=True)


def bounding_boxes(label: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return start and stop of the two largest components of each class, by the volume of their box; zeros for none.   [2, 2, 6]"""
    ndimage = import_optional("scipy.ndimage", "finding connected parts of labels needs", "unet3d")
    boxes = np.zeros((FOREGROUND_CLASSES, MAX_COMPONENTS, 6), np.int32)
    for number, region in enumerate(ndimage.find_objects(label, FOREGROUND_CLASSES)):
        if region is None:
            continue
        parts, _ = ndimage.label(label[region] == number + 1)
        begin = np.array([s.start for s in region])
        corners = np.array([[[s.start for s in box], [s.stop for s in box]] for box in ndimage.find_objects(parts)]) + begin
        order = np.argsort(-(corners[:, 1] - corners[:, 0]).prod(1), kind="stable")[:MAX_COMPONENTS]
        boxes[number, : len(order)] = corners[order].reshape(-1, 6)
    return boxes


def _header(spacing: Sequence[float]) -> dict[str, Any]:
    scale = {"clip_hu": list(volume.CLIP_HU), "mean_hu": volume.MEAN_HU, "deviation_hu": volume.STD_HU}
    return {"classes": list(CLASSES), "spacing_mm": list(spacing), **scale}


def _write_case(
    path: Path, image: NDArray[Any], label: NDArray[np.uint8], spacing: Triple, target: Triple, least: Sequence[int],
    attributes: dict[str, Any],
) -> None:  # fmt: skip
    if multiprocessing.parent_process() is not None:
        import torch

        torch.set_num_threads(1)                                    # there are as many workers as cores
    normalized, classes = volume.preprocess(image, label, spacing, target, least)
    assert classes is not None
    fields = {name: field._replace(shape=normalized.shape) if None in field.shape else field for name, field in FIELDS.items()}
    origin = {"original_spacing_mm": list(spacing), "original_shape": list(image.shape)}
    with store.create_file(path, 1, fields, {**_header(target), **origin, **attributes}) as file:
        file["image"][0], file["label"][0], file["boxes"][0] = normalized, classes, bounding_boxes(classes)


TRIPLE: dict[str, Any] = {"metavar": ("D", "H", "W"), "nargs": 3}
SPACING_OPTION: dict[str, Any] = {"text": "mm between voxels", "type": command.within(0.3, 20), **TRIPLE}
LEAST_OPTION: dict[str, Any] = {"text": "pad smaller volumes", "type": command.within(1, 1024, int), **TRIPLE}


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Recipe):
    """The settings that determine the content of a simulated case, besides its index, and its split."""

    seed: int = command.seed()
    spacing: tuple[float, float, float] = option((4.8, 3.6, 3.6), **SPACING_OPTION)
    least: tuple[int, int, int] = option((32, 64, 64), **LEAST_OPTION)
    extent: float | None = option(
        None, "length of the body in the scan: 220 to 320 at random", metavar="MM", type=command.within(40, 600))  # fmt: skip
    validation: float = command.fraction(0.2, "the cases")
    test: float = command.fraction(0.0, "the cases")

    def scan(self, index: int) -> phantom.Scan:
        return phantom.simulate_scan(self.generator(1, index), self.spacing, self.extent)


def write_phantom(recipe: Recipe, index: int, path: Path) -> None:
    scan = recipe.scan(index)
    attributes = {"kind": "simulated", "case": path.stem, "seed": recipe.seed, "index": index, "recipe": recipe.json_text}
    _write_case(path, scan.image, scan.label, scan.spacing_mm, recipe.spacing, recipe.least, attributes)


def write_nifti(recipe: Recipe, case: tuple[int, Path]) -> None:
    index, folder = case
    if not (folder / nifti.IMAGE).is_file():                        # this file is written last
        scan = recipe.scan(index)
        nifti.write(folder, scan.image, scan.label, scan.spacing_mm)


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
    message = f"{options.cases} cases at {' x '.join(f'{mm:g}' for mm in recipe.spacing)} mm in {options.out}"
    return command.Plan(recipe, jobs, _header(recipe.spacing), message)


# ---- convert


int_list = command.option_type("list of whole numbers such as 3,7", lambda text: [command.natural(p) for p in text.split(",")])


@dataclass(frozen=True)
class Source(command.Settings):
    spacing: tuple[float, float, float] = option(volume.TARGET_MM, **SPACING_OPTION)
    least: tuple[int, int, int] = option(volume.MIN_SHAPE, **LEAST_OPTION)
    validation_cases: tuple[int, ...] | None = option(
        None, "numbers of the cases held out; by default those of the MLPerf reference", metavar="N,N", type=int_list)  # fmt: skip
    skip_bad: bool = command.skip_bad()


def convert_case(source: Path, spacing: Triple, least: tuple[int, int, int], skip_bad: bool, path: Path) -> store.Refused:
    skipped = store.Skipped(skip_bad)
    with skipped.catch(source):
        image, label, original_spacing = nifti.read(source)
        if (image > -200).all():
            print(f"warning: {source}: no value below -200, which air has; are they in HU, or 1024 higher?", file=sys.stderr)
        attributes = {"kind": "converted", "case": source.name, "recipe": json.dumps({"spacing": spacing, "least": least})}
        _write_case(path, image, label, original_spacing, spacing, least, attributes)
    return skipped


def split_cases(root: Path, chosen: Sequence[int] | None) -> tuple[dict[str, list[str]], list[str]]:
    """Return the labelled cases of each split, and those without a label. ``chosen``: numbers for validation instead of the
    reference's."""
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds case_00000/{nifti.IMAGE} and {nifti.LABEL}, and so on")
    cases = {int(match[1]): path.name for path in sorted(root.iterdir()) if (match := re.fullmatch(r"case_(\d+)", path.name))}
    if not cases:
        raise ConfigError(f"{root}: no folder case_00000 or alike; name the folder of the cases (in KiTS19: data)")
    unlabelled = [number for number, name in cases.items()
                  if LABELLED <= number < PUBLIC and not nifti.find(root / name, nifti.LABEL).is_file()]  # fmt: skip
    labelled = {number: name for number, name in cases.items() if number not in unlabelled}
    validation = EVALUATION if chosen is None else frozenset(chosen)
    unknown = sorted(validation - labelled.keys()) if chosen is not None else []
    if unknown:
        raise ConfigError(f"--validation-cases names {unknown[:9]}, which have no labelled case in {root}; correct the numbers")
    private = [number for number in labelled if number >= LABELLED]
    if private and chosen is None:
        raise ConfigError(f"{root}: {cases[private[0]]} is no labelled case of the public set; name yours for validation: "
                          "--validation-cases 3,7")  # fmt: skip
    if chosen is None and len(labelled) < LABELLED:
        command.print_rank_0(f"{len(labelled)} of the {LABELLED} labelled cases of the public set are in {root}")
    splits = {"train": [name for number, name in labelled.items() if number not in validation],
              "validation": [name for number, name in labelled.items() if number in validation]}  # fmt: skip
    for split, names in splits.items():
        if not names:
            raise ConfigError(f"{root}: none of its {len(labelled)} labelled cases is for {split}; choose with --validation-cases")
    return splits, [cases[number] for number in unlabelled]


def convert(options: argparse.Namespace) -> command.Plan:
    source = Source.from_options(options)
    splits, unlabelled = split_cases(options.source, source.validation_cases)
    grid = source.spacing, source.least, source.skip_bad
    jobs = [store.Job(options.out / split / f"{name}.h5", partial(convert_case, options.source / name, *grid), CONTENTS, 1)
            for split, names in splits.items() for name in names]  # fmt: skip
    sources = {split: command.fingerprint(names, "cases, names") for split, names in splits.items()}
    recipe = {"kind": "convert", "spacing": list(source.spacing), "least": list(source.least), "sources": sources}
    refused = [(name, "has no label in the public set") for name in unlabelled]
    message = f"cases: {command.describe_sources(splits)}"
    return command.Plan(recipe, jobs, _header(source.spacing), message, refused=refused)


# ---- check


def check_samples(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the files whose boxes differ from those of their labels."""
    chosen = command.subsample(prepared.paths, options.check_count)
    for path in chosen:
        with h5py.File(path, "r") as file:
            stored, computed = file["boxes"][0], bounding_boxes(file["label"][0])
            if (file["image"][0] >= (volume.CLIP_HU[1] - volume.MEAN_HU) / volume.STD_HU - 1e-4).mean() > 0.5:
                print(f"warning: {path}: most voxels are above {volume.CLIP_HU[1]:g} HU; were the values of the source in HU?")
        if (stored != computed).any():
            yield f"{path}: boxes {stored.tolist()}, the label has {computed.tolist()}; delete the file and make it again"
    print(f"boxes of {len(chosen)} cases compared with their labels")


BUILDER = command.DatasetBuilder(
    "kits19", "Kidney tumours in CT: simulate scans, check them, or convert the public set KiTS19.", "unet3d",
    command.Check("Files against index.json, boxes against labels.", check_samples, ("boxes", 8, "cases to recompute")),
    (command.Simulate("CT scans of simulated abdomens with kidneys and tumours.", Recipe,
                      ("cases", 96), simulate, lambda parser: parser.add_argument(
                          "--nifti", action="store_true", help="write the public layout, on the scanner's grid, for convert")),
     command.Convert("The public cases (case_00000/imaging.nii.gz, segmentation.nii.gz).", Source, convert,
                     "holds case_00000 and so on; in KiTS19 its folder data")),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
