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

from data_prep import command, moments, nifti, phantom, store
from data_prep.extras import needed
from hpcai.errors import ConfigError
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import CLASSES
from hpcai.programs import start

PICTURE = "kidneys.png"
PUBLIC, LABELLED = 300, 210     # cases of the public set; those from 210 on have no label
# The evaluation cases of the MLPerf reference.
EVALUATION = frozenset((
    0, 3, 5, 6, 12, 24, 34, 41, 44, 49, 52, 56, 61, 65, 66, 70, 76, 78, 80, 84, 86, 87, 92, 111, 112, 125, 128, 138, 157, 160, 161,
    162, 169, 171, 176, 185, 187, 189, 198, 203, 206, 207,
))  # fmt: skip
OBJECTS, PARTS = len(CLASSES) - 1, 2
Three = tuple[float, float, float]


# ---- what the files hold


def _fields(shape: list[Any], header: dict[str, Any]) -> dict[str, Any]:
    return {
        "image": {"dtype": "float32", "shape": shape},
        "label": {"dtype": "uint8", "shape": shape, "low": 0, "high": len(CLASSES) - 1, "blank": 0},
        "boxes": {"dtype": "int32", "shape": [OBJECTS, PARTS, 6], "low": 0, "blank": 0},
    }


def _sums(file: h5py.File) -> dict[str, Any]:
    """Moments of the image, voxels of each class."""
    slices = range(file["image"].shape[1])
    found = moments.join(moments.measure(file["image"][0, d].reshape(-1, 1)) for d in slices)
    classes = np.sum([np.bincount(file["label"][0, d].ravel(), minlength=len(CLASSES)) for d in slices], axis=0)
    return {"case": str(file.attrs["case"]), **found, "classes": classes.tolist()}


def _moments(records: Sequence[store.Record]) -> dict[str, Any]:
    sums = [record["sums"] for record in records]
    image = moments.summary(sums)
    voxels = image.pop("cells")
    classes, shapes = np.sum([each["classes"] for each in sums], axis=0), np.array([record["shape"] for record in records])
    return {
        "cases": len(records),
        "voxels": voxels,
        "image": {name: value for name, (value,) in image.items()},
        "label": {"voxels": classes.tolist(), "frequency": (classes / voxels).tolist()},
        "shapes": {"least": shapes.min(0).tolist(), "largest": shapes.max(0).tolist()},             # of each dim by itself
        "without_kidney": [each["case"] for each in sums if not sum(each["classes"][1:])],
    }


CONTENTS = store.Contents("image", _fields, _sums, _moments, varies=True)


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
    scale = {"clip_hu": list(volume.CLIP_HU), "mean_hu": volume.MEAN_HU, "deviation_hu": volume.DEVIATION_HU}
    return {"classes": list(CLASSES), "spacing_mm": list(spacing), **scale}


def _write(
    path: Path, image: NDArray[Any], label: NDArray[np.uint8], spacing: Three, target: Three, least: Sequence[int],
    about: dict[str, Any],
) -> None:  # fmt: skip
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)                                    # the workers are as many as the cores
    ready, classes = volume.prepare(image, label, spacing, target, least)
    assert classes is not None
    datasets = {"image": (np.float32, ready.shape), "label": (np.uint8, ready.shape), "boxes": (np.int32, (OBJECTS, PARTS, 6))}
    origin = {"original_spacing_mm": list(spacing), "original_shape": list(image.shape)}
    with store.rows_file(path, 1, datasets, {**_header(target), **origin, **about}) as file:
        file["image"][0], file["label"][0], file["boxes"][0] = ready, classes, boxes(classes)


def _wrong_grid(spacing: Sequence[float], least: Sequence[int]) -> Iterator[str]:
    if not all(np.isfinite(mm) and 0.3 <= mm <= 20 for mm in spacing):
        yield f"--spacing {' '.join(f'{mm:g}' for mm in spacing)}: expected 0.3 to 20 mm along D, H, W"
    if max(least) > 1024:
        yield f"--least {' '.join(map(str, least))}: expected at most 1024 voxels along D, H, W"


# ---- simulate


@dataclass(frozen=True)
class Recipe(command.Settings):
    """All that decides the content of a simulated case, besides its index, and where it lies."""

    seed: int
    spacing: Three                              # mm along D, H, W
    least: tuple[int, int, int]
    extent: float | None                        # mm of the body that are covered; None: 220 to 320 at random
    validation: float
    test: float

    def mistakes(self) -> Iterator[str]:
        yield from _wrong_grid(self.spacing, self.least)
        if self.extent is not None and not 40 <= self.extent <= 600:
            yield f"--extent is {self.extent:g} mm, expected 40 to 600"

    def scan(self, index: int) -> phantom.Scan:
        return phantom.scan(self.generator(1, index), self.spacing, self.extent)


def write_phantom(recipe: Recipe, index: int, path: Path) -> None:
    scan = recipe.scan(index)
    about = {"kind": "simulated", "case": path.stem, "seed": recipe.seed, "index": index, "recipe": recipe.text}
    _write(path, scan.image, scan.label, scan.spacing_mm, recipe.spacing, recipe.least, about)


def write_nifti(recipe: Recipe, case: tuple[int, Path]) -> None:
    index, folder = case
    if not (folder / nifti.IMAGE).is_file():                        # it is written last
        scan = recipe.scan(index)
        nifti.write(folder, scan.image, scan.label, scan.spacing_mm)


def simulate(options: argparse.Namespace) -> int:
    recipe = Recipe(
        options.seed, tuple(options.spacing), tuple(options.least), options.extent, options.validation, options.test
    )  # fmt: skip
    names = [f"case_{index:05d}" for index in range(options.cases)]
    if options.nifti:
        store.claim(options.out, {"kind": "nifti", **command.settings_of(recipe)})
        rank, size = store.launched()
        cases = [(index, options.out / name) for index, name in enumerate(names)][rank::size]
        store.make(cases, partial(write_nifti, recipe), options.workers, options.command)
        folder = shlex.quote(str(options.out))
        command.print_once(f"{options.cases} NIfTI cases; next: {start('data_prep.kits19')} convert {folder} OUT")
        return 0
    splits = [recipe.split(index) for index in range(options.cases)]
    command.refuse_empty(splits, options, f"--cases {options.cases}")
    jobs = [store.Job(options.out / split / f"{name}.h5", partial(write_phantom, recipe, index), CONTENTS, 1)
            for index, (name, split) in enumerate(zip(names, splits))]  # fmt: skip
    command.print_once(f"{options.cases} cases at {' x '.join(f'{mm:g}' for mm in recipe.spacing)} mm in {options.out}")
    look = partial(inspect, some=8, picture=True)
    return command.simulate("unet3d", options, recipe, jobs, _header(recipe.spacing), "cases", look)


# ---- convert


def convert_case(source: Path, spacing: Three, least: tuple[int, int, int], path: Path) -> None:
    image, label, found = nifti.read(source)
    about = {"kind": "converted", "case": source.name, "recipe": json.dumps({"spacing": spacing, "least": least})}
    _write(path, image, label, found, spacing, least, about)


def _cases(options: argparse.Namespace) -> dict[str, list[str]]:
    """The labelled cases of each split."""
    root: Path = options.source
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; SOURCE holds case_00000/{nifti.IMAGE} and {nifti.LABEL}, and so on")
    found = {int(match[1]): path.name for path in sorted(root.iterdir()) if (match := re.fullmatch(r"case_(\d+)", path.name))}
    if not found:
        raise ConfigError(f"{root}: no folder case_00000 or alike; name the folder that holds the cases (in KiTS19: data)")
    bare = [number for number in found if LABELLED <= number < PUBLIC and not (root / found[number] / nifti.LABEL).is_file()]
    if bare:
        command.print_once(f"{len(bare)} cases from {found[bare[0]]} on have no label in the public set and are skipped")
    labelled = {number: name for number, name in found.items() if number not in bare}
    held = EVALUATION if options.validation_cases is None else frozenset(options.validation_cases)
    strangers = sorted(held - labelled.keys()) if options.validation_cases is not None else []
    if strangers:
        raise ConfigError(f"--validation-cases names {strangers[:9]}, which {root} does not hold with labels; correct the numbers")
    own = [number for number in labelled if number >= LABELLED]
    if own and options.validation_cases is None:
        raise ConfigError(f"{root}: {found[own[0]]} is no labelled case of the public set; name yours for validation: "
                          "--validation-cases 3,7")  # fmt: skip
    if options.validation_cases is None and len(labelled) < LABELLED:
        command.print_once(f"{len(labelled)} of the {LABELLED} labelled cases of the public set are in {root}")
    splits = {"train": [name for number, name in labelled.items() if number not in held],
              "validation": [name for number, name in labelled.items() if number in held]}  # fmt: skip
    for split, names in splits.items():
        if not names:
            raise ConfigError(f"{root}: none of its {len(labelled)} labelled cases is for {split}; choose with --validation-cases")
    return splits


def convert(options: argparse.Namespace) -> int:
    spacing, least = tuple(options.spacing), tuple(options.least)
    for text in _wrong_grid(spacing, least):
        raise ConfigError(text)
    splits = _cases(options)
    command.refuse_same(options.source, options.out)
    jobs = [store.Job(options.out / split / f"{name}.h5", partial(convert_case, options.source / name, spacing, least), CONTENTS, 1)
            for split, names in splits.items() for name in names]  # fmt: skip
    sources = {split: f"{len(names)} cases, names {command.digest(names)}" for split, names in splits.items()}
    recipe = {"kind": "convert", "spacing": list(spacing), "least": list(least), "sources": sources}
    command.print_once(f"cases: {command.told_sources(splits)}")
    command.work(options, jobs, recipe, _header(spacing))
    return command.conclude("unet3d", options, _tell)


# ---- check


def inspect(out: Path, some: int, picture: bool) -> int:
    """0 when all is well, otherwise 1 with the reasons printed. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    paths = [path for path, _, _ in files]
    _tell(out)
    if some and not wrong:
        chosen = command.spread(paths, some)
        wrong += _against_labels(chosen)
        print(f"boxes of {len(chosen)} cases compared with their labels")
    if picture and not wrong:
        _draw(out / PICTURE, paths)
    return command.told(wrong)


def _tell(out: Path) -> None:
    for split, part in store.read_json(out / "statistics.json")["splits"].items():
        shares = ", ".join(f"{name} {share:.5f}" for name, share in zip(CLASSES, part["label"]["frequency"]))
        least, largest = (" x ".join(map(str, part["shapes"][key])) for key in ("least", "largest"))
        print(f"{split}: {part['cases']} cases of {least} to {largest} voxels; {shares}")
        if part["without_kidney"]:
            print(f"note: no kidney in {', '.join(part['without_kidney'][:9])} of {split}; is the label that of the case?")


def _against_labels(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        with h5py.File(path, "r") as file:
            stated, found = file["boxes"][0], boxes(file["label"][0])
        if (stated != found).any():
            yield f"{path}: boxes {stated.tolist()}, the label has {found.tolist()}; delete the file and make it again"


def _draw(path: Path, paths: Sequence[Path]) -> None:
    """Two cases with a large tumour, if there are some: a slice across the body and one along it, with outlines."""
    seen: list[tuple[int, Path]] = []
    for name in command.spread(paths, 30):
        with h5py.File(name, "r") as file:
            start, stop = file["boxes"][0, 1, 0].reshape(2, 3)
            seen.append((int((stop - start).prod()), name))
    shown = sorted(seen, key=lambda item: -item[0])[len(seen) // 6 :][:2]
    with command.picture(path, (13, 11), 90) as figure:
        for row, (_, name) in zip(figure.subplots(2, 2, squeeze=False), shown):
            with h5py.File(name, "r") as file:
                image, label, mm = file["image"][0], file["label"][0], file.attrs["spacing_mm"]
            kind = int(label.max()) or 1
            d, h = ((label == kind).sum(other).argmax() for other in ((1, 2), (0, 2)))
            across, along = (row[0], np.s_[d], mm[1], f"slice {d}"), (row[1], np.s_[:, h], mm[0], f"row {h}")
            for axis, at, tall, text in (across, along):
                hu = image[at] * volume.DEVIATION_HU + volume.MEAN_HU
                axis.imshow(hu, cmap="gray", vmin=-79, vmax=250, aspect=tall / mm[2])
                for number, color in ((1, "cyan"), (2, "red")):
                    if (label[at] == number).any():
                        axis.contour(label[at] == number, [0.5], colors=color, linewidths=1)
                axis.set(xticks=[], yticks=[])
                axis.set_title(f"{name.parent.name}/{name.name}: {text}; {', '.join(f'{n:g}' for n in mm)} mm", fontsize=9)
        figure.suptitle("HU -79 to 250; kidney cyan, tumour red; the patient's right is on the left")


# ---- command line


numbers = command.taking("list of whole numbers such as 3,7", lambda text: [command.natural(part) for part in text.split(",")])


def parser() -> argparse.ArgumentParser:
    top, add = command.parser("kits19", "Kidney tumours in CT: simulate scans, check them, or convert the public set KiTS19.")

    def grid(made: argparse.ArgumentParser, spacing: Three, least: Sequence[int]) -> None:
        made.add_argument("--spacing", metavar=("D", "H", "W"), nargs=3, type=float, default=spacing, help="mm between voxels")
        made.add_argument("--least", metavar=("D", "H", "W"), nargs=3, type=command.positive, default=least,
                          help="smaller volumes are padded to it")  # fmt: skip

    one = add("simulate", "CT scans of made-up abdomens with kidneys and tumours.", simulate)
    command.add_out(one)
    one.add_argument("--cases", metavar="N", type=command.positive, default=96, help="how many; a later run may ask for more")
    grid(one, (4.8, 3.6, 3.6), (32, 64, 64))
    one.add_argument("--extent", metavar="MM", type=float, default=None, help="of the body that is covered: 220 to 320 at random")
    one.add_argument("--nifti", action="store_true", help="write the public layout, at the scanner's grid, for convert")
    command.add_fractions(one, 0.2, 0.0, "the cases")
    command.add_making(one)

    command.add_check(add, "Files against index.json, boxes against labels", inspect, PICTURE, "--boxes", 8,
                      "cases whose boxes are made again")  # fmt: skip

    three = add("convert", "The public cases (case_00000/imaging.nii.gz, segmentation.nii.gz) to our files.", convert)
    three.add_argument("source", type=Path, metavar="SOURCE", help="holds case_00000 and so on; in KiTS19 its folder data")
    command.add_out(three)
    grid(three, volume.TARGET_MM, volume.LEAST)
    three.add_argument("--validation-cases", metavar="N,N", type=numbers, default=None,
                       help="numbers of the cases held out; by default those of the MLPerf reference")  # fmt: skip
    command.add_workers(three)
    return top


main = partial(command.main, parser)

if __name__ == "__main__":
    sys.exit(main())
