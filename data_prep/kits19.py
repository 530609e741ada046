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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from data_prep import command, moments, nifti, phantom, store
from hpcai.errors import ConfigError, MissingExtraError
from hpcai.models.unet3d import volume
from hpcai.models.unet3d.volume import CLASSES

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
    """Voxels, least, most, mean, sum of squared deviations of the image, in float64; voxels of each class."""
    slices = range(file["image"].shape[1])
    found = moments.join([moments.measure(file["image"][0, d].reshape(-1, 1)) for d in slices])
    classes = np.sum([np.bincount(file["label"][0, d].ravel(), minlength=len(CLASSES)) for d in slices], axis=0)
    told = {name: np.asarray(values).tolist() for name, values in zip(moments.NAMES, found)}
    return {"case": str(file.attrs["case"]), **told, "classes": classes.tolist()}


def _moments(records: Sequence[store.Record]) -> dict[str, Any]:
    sums = [record["sums"] for record in records]
    voxels, least, most, mean, square = moments.join([moments.of(each) for each in sums])
    classes, shapes = np.sum([each["classes"] for each in sums], axis=0), np.array([record["shape"] for record in records])
    return {
        "cases": len(records),
        "voxels": voxels,
        "image": {
            "minimum": float(least[0]), "maximum": float(most[0]), "mean": float(mean[0]),
            "deviation": float(np.sqrt(square[0] / voxels)),
        },
        "label": {"voxels": classes.tolist(), "frequency": (classes / voxels).tolist()},
        "shapes": {"least": shapes.min(0).tolist(), "largest": shapes.max(0).tolist()},             # of each dim by itself
        "without_kidney": [each["case"] for each in sums if not sum(each["classes"][1:])],
    }  # fmt: skip


CONTENTS = store.Contents("image", _fields, _sums, _moments, varies=True)


def boxes(label: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Start and stop of the two largest parts of each class, by the volume of their box; zeros for none.   [2, 2, 6]"""
    try:
        from scipy import ndimage
    except ImportError as problem:
        raise MissingExtraError("connected parts of labels need scipy: pip install 'hpcai-suite[unet3d]'") from problem
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
class Recipe:
    """All that decides the content of a simulated case, besides its index, and where it lies."""

    seed: int
    spacing: Three                              # mm along D, H, W
    least: tuple[int, int, int]
    extent: float | None                        # mm of the body that are covered; None: 220 to 320 at random
    validation: float
    test: float

    def __post_init__(self) -> None:
        wrong = [*_wrong_grid(self.spacing, self.least), *command.wrong_fractions(self.validation, self.test)]
        if self.extent is not None and not 40 <= self.extent <= 600:
            wrong.append(f"--extent is {self.extent:g} mm, expected 40 to 600")
        if wrong:
            raise ConfigError("\n".join(wrong))

    def split(self, index: int) -> str:
        return store.split_of(index, self.validation, self.test, partial(self.generator, 0))

    def generator(self, stream: int, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence([self.seed, stream, index])))

    def scan(self, index: int) -> phantom.Scan:
        return phantom.scan(self.generator(1, index), self.spacing, self.extent)


@dataclass(frozen=True)
class Phantom:
    """One case to be made."""

    path: Path                                  # a file, or the folder of a NIfTI case
    index: int
    recipe: Recipe
    rows: int = 1


def make_phantom(job: Phantom) -> None:
    recipe, text = job.recipe, json.dumps(asdict(job.recipe))
    if not store.is_made(job.path, text, "image", 1):
        scan = recipe.scan(job.index)
        about = {"kind": "simulated", "case": job.path.stem, "seed": recipe.seed, "index": job.index, "recipe": text}
        _write(job.path, scan.image, scan.label, scan.spacing_mm, recipe.spacing, recipe.least, about)
    store.write_record(job.path, CONTENTS)


def make_nifti(job: Phantom) -> None:
    if not (job.path / nifti.IMAGE).is_file():                      # it is written last
        scan = job.recipe.scan(job.index)
        nifti.write(job.path, scan.image, scan.label, scan.spacing_mm)


def simulate(options: argparse.Namespace) -> int:
    recipe = Recipe(
        options.seed, tuple(options.spacing), tuple(options.least), options.extent, options.validation, options.test
    )  # fmt: skip
    names = [(index, f"case_{index:05d}") for index in range(options.cases)]
    settings = {"kind": "nifti" if options.nifti else "simulate", **command.settings_of(asdict(recipe))}
    if options.nifti:
        store.claim(options.out, settings)
        rank, size = store.launched()
        cases = [Phantom(options.out / name, index, recipe) for index, name in names][rank::size]
        store.make(cases, make_nifti, options.workers, options.command, rank == 0)
        command.print_once(f"{options.cases} NIfTI cases; next: python -m data_prep.kits19 convert {options.out} OUT")
        return 0
    splits = {index: recipe.split(index) for index, _ in names}
    command.refuse_empty([split for split in store.SPLITS if split in splits.values()], options, f"--cases {options.cases}")
    jobs = [Phantom(options.out / splits[index] / f"{name}.h5", index, recipe) for index, name in names]
    command.print_once(f"{options.cases} cases at {' x '.join(f'{mm:g}' for mm in recipe.spacing)} mm in {options.out}")
    advice = f"ask for at least as many as it holds (--cases is {options.cases}), or choose a new folder"
    command.work(options, jobs, make_phantom, settings, _header(recipe.spacing), CONTENTS, advice)
    return command.conclude("unet3d", options, partial(inspect, options.out, 8, True) if options.check else None)


# ---- convert


@dataclass(frozen=True)
class Case:
    """One public case to be converted."""

    path: Path
    source: Path
    spacing: Three
    least: tuple[int, int, int]
    rows: int = 1


def convert_case(job: Case) -> None:
    image, label, spacing = nifti.read(job.source)
    recipe = json.dumps({"spacing": job.spacing, "least": job.least})
    about = {"kind": "converted", "case": job.source.name, "recipe": recipe}
    _write(job.path, image, label, spacing, job.spacing, job.least, about)
    store.write_record(job.path, CONTENTS)


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
    jobs = [Case(options.out / split / f"{name}.h5", options.source / name, spacing, least)
            for split, names in splits.items() for name in names]  # fmt: skip
    sources = {split: f"{len(names)} cases, names {command.digest(names)}" for split, names in splits.items()}
    recipe = {"kind": "convert", "spacing": list(spacing), "least": list(least), "sources": sources}
    command.print_once("cases: " + ", ".join(f"{len(names)} for {split}" for split, names in splits.items()))
    command.work(options, jobs, convert_case, recipe, _header(spacing), CONTENTS, "choose a new folder")
    if store.launched()[0] == 0:
        _tell(options.out)
    return command.conclude("unet3d", options)


# ---- check


def inspect(out: Path, boxed: int, picture: bool) -> int:
    """0 when all is well, 1 with the reasons printed when not. Raises DataError for a folder that cannot be read at all."""
    files, wrong = command.against_index(out)
    paths = [out / split / name for split, name, _, _ in files]
    _tell(out)
    if boxed and not wrong:
        some = paths[:: max(1, -(-len(paths) // boxed))]
        wrong += _against_labels(some)
        print(f"boxes of {len(some)} cases compared with their labels")
    if picture and not wrong:
        _draw(out / PICTURE, paths)
        print(f"picture: {out / PICTURE}")
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seen: list[tuple[int, Path]] = []
    for name in paths[:: max(1, -(-len(paths) // 30))]:
        with h5py.File(name, "r") as file:
            start, stop = file["boxes"][0, 1, 0].reshape(2, 3)
            seen.append((int((stop - start).prod()), name))
    figure = Figure(figsize=(13, 11), layout="constrained")
    FigureCanvasAgg(figure)
    shown = sorted(seen, key=lambda item: -item[0])[len(seen) // 6 :][:2]
    for row, (_, name) in zip(figure.subplots(2, 2, squeeze=False), shown):
        with h5py.File(name, "r") as file:
            image, label, mm = file["image"][0], file["label"][0], file.attrs["spacing_mm"]
        kind = int(label.max()) or 1
        d, h = ((label == kind).sum(other).argmax() for other in ((1, 2), (0, 2)))
        across, along = (row[0], np.s_[d], mm[1], f"slice {d}"), (row[1], np.s_[:, h], mm[0], f"row {h}")
        for axis, at, tall, text in (across, along):
            axis.imshow(image[at] * volume.DEVIATION_HU + volume.MEAN_HU, cmap="gray", vmin=-79, vmax=250, aspect=tall / mm[2])
            for number, color in ((1, "cyan"), (2, "red")):
                if (label[at] == number).any():
                    axis.contour(label[at] == number, [0.5], colors=color, linewidths=1)
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"{name.parent.name}/{name.name}: {text}; {', '.join(f'{n:g}' for n in mm)} mm", fontsize=9)
    figure.suptitle("HU -79 to 250; kidney cyan, tumour red; the patient's right is on the left")
    partial_file = path.with_name(f".{path.name}.partial")
    figure.savefig(partial_file, dpi=90, format="png")
    partial_file.replace(path)


# ---- command line


def check(options: argparse.Namespace) -> int:
    return inspect(options.out, options.boxes, options.picture)


def numbers(text: str) -> list[int]:
    return [command.natural(part) for part in text.split(",")]


numbers.__name__ = "list of whole numbers such as 3,7"


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
    one.add_argument("--validation", metavar="F", type=float, default=0.2, help="fraction of the cases")
    one.add_argument("--test", metavar="F", type=float, default=0.0, help="fraction of the cases")
    command.add_making(one)

    two = add("check", f"Files against index.json, boxes against labels, and OUT/{PICTURE}.", check)
    command.add_checking(two, PICTURE)
    two.add_argument("--boxes", metavar="N", type=command.natural, default=8, help="cases whose boxes are made again")

    three = add("convert", "The public cases (case_00000/imaging.nii.gz, segmentation.nii.gz) to our files.", convert)
    three.add_argument("source", type=Path, metavar="SOURCE", help="holds case_00000 and so on; in KiTS19 its folder data")
    command.add_out(three)
    grid(three, volume.TARGET_MM, volume.LEAST)
    three.add_argument("--validation-cases", metavar="N,N", type=numbers, default=None,
                       help="numbers of the cases held out; by default those of the MLPerf reference")  # fmt: skip
    command.add_workers(three)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
