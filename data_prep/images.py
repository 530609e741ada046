"""Images with classes: convert folders of images, or WebDataset.

    python -m data_prep.images convert SOURCE OUT       from one of the sources below
    python -m data_prep.images check OUT                files against their index, some images decoded, a picture

    SOURCE/CLASS/NAME.jpg                   .png .jpg .jpeg .jfif .webp, at any depth below CLASS (torchvision's ImageFolder)
    SOURCE/NAME.tar                         webdataset: KEY.jpg and so on, with KEY.cls, the number (from 0) or name of a class
    SOURCE/{train,validation,val,test}/     either of them by split; --validation is for a source without it, by a hash of names

    OUT/{train,validation,test}/images_000000.h5    "bytes" int32 [N], "image" uint8 [sum of bytes], "label" int32 [N]

Images are the files of the source, unchanged, after each was decoded once. Those of folders are ordered by a hash of their names,
so that classes are mixed. A label is the place of its class in "classes" of the index, the sorted names of the training split.

N rows of a file"""

import argparse
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import captioned, command, picture, store
from data_prep.captioned import Entry, Shard
from data_prep.command import option
from data_prep.store import Field
from hpcai.data.image_files import decode_image
from hpcai.errors import ConfigError, DataError

FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}


def image_fields(classes: int) -> store.Fields:
    label = Field("int32", (), 0, classes - 1, classes=classes)
    return {"bytes": Field("int32", (), 1), "image": Field("uint8", ("bytes",)), "label": label}


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    rows: int = option(1024, "images per file", type=command.positive)
    validation: float = option(None, "held-out fraction if there is no folder of it; default 0.1", type=command.within(0, 0.9))
    skip_bad: bool = command.skip_bad()


def write_images(classes: int, skip_bad: bool, shard: Shard, entries: Sequence[Entry], path: Path) -> store.Refused:
    rows, skipped = list[dict[str, Any]](), store.Skipped(skip_bad)
    for entry in entries:
        for sample in captioned.read_samples(shard, [entry], skipped):
            with skipped.catch(sample.name):
                if not isinstance(sample.image, bytes):
                    raise DataError(f"{sample.name}: an array, expected an image in a file (.png, .jpg, .webp); convert it")
                decode_image(sample.image, sample.name)
                data = np.frombuffer(sample.image, np.uint8)
                rows.append({"bytes": len(data), "image": data, "label": entry["label"]})
    if rows:
        store.write_rows(path, image_fields(classes), rows, {"kind": "converted"})
    return skipped


def find_splits(root: Path, out: Path) -> dict[str, list[Shard]]:
    """Return the shards of each split, or under "train" those of a source that has no other."""
    if root.is_dir() and out.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{out}: OUT lies within SOURCE {root}; choose another OUT")
    folders = {split: folder for split, names in FOLDERS.items() for name in names[::-1] if (folder := root / name).is_dir()}
    splits = {name: captioned.find_shards(path) for name, path in (folders if "train" in folders else {"train": root}).items()}
    if tables := [shard for shards in splits.values() for shard in shards if shard.kind == "table"]:
        raise ConfigError(f"{tables[0].path}: a table of latents; SOURCE holds images by class, or .tar")
    return splits


def list_tar(shard: Shard, skip_bad: bool) -> dict[str, Any]:
    """List the samples of a tar file, with their classes."""
    listing, skipped, entries = captioned.list_samples(shard, skip_bad), store.Skipped(skip_bad), []
    for entry in listing["entries"]:
        with skipped.catch(name := f"{shard.path}: {entry['name']}"), shard.path.open("rb") as file:
            if "cls" not in entry["members"]:
                raise DataError(f"{name}: has {', '.join(entry['members'])}, expected also cls, its class; leave it out")
            data = captioned.read_member(file, entry["members"]["cls"], f"{name}.cls")
            text = captioned.decode_text(data, f"{name}.cls")
            entries.append({**entry, "caption": False, "class": str(int(text)) if text.isdecimal() else text})
    return {"entries": entries, "refused": [*listing["refused"], *skipped]}


def list_entries(shards: Sequence[Shard], folder: Path, workers: int, skipped: store.Skipped) -> list[tuple[Shard, list[Entry]]]:
    """Return the samples of a split, with their classes, in the order in which they are written."""
    if shards[0].names:
        names = sorted((name for shard in shards for name in shard.names), key=lambda name: (name_hash(name), name))
        shard = Shard(shards[0].path, ("",))    # pickled with each job
        return [(shard, [{"name": name, "caption": False, "class": name.rpartition("/")[0].partition("/")[0]} for name in names])]
    tasks = {folder / f"{number:06d}.json": partial(list_tar, shard, skipped.skip_bad) for number, shard in enumerate(shards)}
    listings = list(store.all_gather_results(tasks, workers, "tar files"))
    for where, reason in (item for listing in listings for item in listing["refused"]):
        with skipped.catch(where):              # of an earlier run, which skipped it
            raise DataError(f"{where}: {reason}")
    return [(shard, listing["entries"]) for shard, listing in zip(shards, listings)]


def name_hash(name: str) -> float:
    """Return a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:6]) / (1 << 48)


def class_names(entries: Sequence[Entry], numbered: bool) -> list[str]:
    """Return the classes of the training split. Those of .tar may be ``numbered``."""
    names = sorted({entry["class"] for entry in entries} - {""})
    if not numbered or not all(name.isdecimal() for name in names):
        return names
    if (count := max(map(int, names), default=0) + 1) > max(len(entries), 2):
        raise DataError(f"class {count - 1} of {len(entries)} images; expected fewer classes than images")
    return [str(number) for number in range(count)]


def convert(options: argparse.Namespace) -> command.Plan:
    root, out, skipped = options.source, options.out, store.Skipped(options.skip_bad)
    splits = find_splits(root, out)
    if options.validation is not None and "validation" in splits:
        raise ConfigError(f"--validation {options.validation:g}: {root} has a folder for validation; leave the option out")
    settings = Source.from_options(options, validation=0.1 if options.validation is None else options.validation)
    fraction = 0.0 if "validation" in splits else settings.validation
    sources = {split: [*(name for shard in shards for name in shard.names),
                       *(f"{shard.path.relative_to(root)} {shard.path.stat().st_size}" for shard in shards if not shard.names)]
               for split, shards in splits.items()}  # fmt: skip
    recipe = {"kind": "convert", **settings.json_dict, "sources": {split: command.fingerprint(x) for split, x in sources.items()}}
    store.claim_folder(out, recipe)
    work = out / store.WORK / command.digest([*recipe["sources"].values()])
    listed = {split: list_entries(shards, work / split, options.workers, skipped) for split, shards in splits.items()}
    names = class_names([entry for _, entries in listed["train"] for entry in entries], not splits["train"][0].names)
    labels, batches = {name: label for label, name in enumerate(names)}, dict[str, list[tuple[Shard, tuple[Entry, ...]]]]()
    for split, shard, entries in ((split, *group) for split, groups in listed.items() for group in groups):
        kept: dict[str, list[Entry]] = {}
        for entry in entries:
            with skipped.catch(where := f"{shard.path}: {entry['name']}"):
                if entry["class"] not in labels:
                    actual = f"class {entry['class']!r}" if entry["class"] else "in no folder of a class"
                    raise DataError(f"{where}: {actual}, expected one of the {len(labels)} of the training split")
                own = "validation" if split == "train" and name_hash(entry["name"]) < fraction else split
                entry["label"] = labels[entry["class"]]
                kept.setdefault(own, []).append(entry)
        for own, some in kept.items():
            batches.setdefault(own, []).extend((shard, batch) for batch in command.batched(some, settings.rows))
    if missing := {"train", *(["validation"] if fraction else [])} - batches.keys():
        raise DataError(f"{root}: no image for {missing.pop()}; give more, or change --validation {store.count_by_reason(skipped)}")
    contents, write = store.Contents(image_fields(len(names))), partial(write_images, len(names), options.skip_bad)
    jobs = [store.Job(out / split / f"images_{number:06d}.h5", partial(write, *item), contents, len(item[1]))
            for split, some in batches.items() for number, item in enumerate(some)]  # fmt: skip
    message = f"{sum(job.rows or 0 for job in jobs)} images of {len(names)} classes in {root}, for {', '.join(batches)}"
    unread = [item for shards in splits.values() for item in captioned.list_unread(shards)]
    return command.Plan(recipe, jobs, {"classes": names}, message, refused=[*unread, *skipped])


# ---- check


def check_images(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the images that cannot be decoded."""
    fields, rows = {"image": image_fields(1)["image"]}, command.subsample(prepared.locations, options.check_count)
    for path, row in rows:
        with h5py.File(path, "r") as file:
            data = next(store.read_rows(file, fields, row, row + 1))["image"].tobytes()
        try:
            decode_image(data, f"{path}: row {row}")
        except DataError as problem:
            yield str(problem)
    print(f"{len(rows)} images decoded")


# ---- simulations


def encode_png(pixels: np.ndarray) -> np.ndarray:
    """Return a file of pixels [H, W, 3].   [bytes] uint8"""
    from PIL import Image

    Image.fromarray(np.ascontiguousarray(pixels)).save(file := io.BytesIO(), "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)


def write_simulated(recipe: Any, fields: store.Fields, samples: Sequence[int], path: Path) -> None:
    store.write_rows(path, fields, [recipe.sample(index) for index in samples], {"kind": "simulated", "samples": list(samples)})


def simulate(
    kind: type[Any], fields: store.Fields, header: dict[str, Any], options: argparse.Namespace,
    finalize: Callable[[Path], None] | None = None,
) -> command.Plan:  # fmt: skip
    """Return the files of a simulation by a recipe ``kind``, whose ``sample(index)`` has the values of a row, and its "pixels"."""
    recipe = kind.from_options(options)
    members = recipe.numbers_by_split(options.samples)
    command.require_splits([split for split in members if members[split]], options, f"--samples {options.samples}")
    contents, write = store.Contents(fields), partial(write_simulated, recipe, fields)
    jobs = [store.Job(options.out / split / f"images_{i:06d}.h5", partial(write, part), contents, len(part))
            for split, items in members.items() for i, part in enumerate(command.batched(items, options.rows))]  # fmt: skip
    message = f"{options.samples} images of {recipe.size} x {recipe.size} pixels in {options.out}"
    return command.Plan(recipe, jobs, header, message, finalize=finalize)


def check_simulated(
    kind: type[Any], fields: store.Fields, name: str, prepared: command.PreparedDataset, options: argparse.Namespace,
) -> Iterator[str]:  # fmt: skip
    """Yield the images of a simulation whose field ``name`` differs from a new one, or whose pixels do by more than the rounding of
    another processor."""
    recipe = kind.from_options(argparse.Namespace(**prepared.recipe))
    for path, row in (rows := command.subsample(prepared.locations, options.check_count)):
        with h5py.File(path, "r") as file:
            stored, index = next(store.read_rows(file, fields, row, row + 1)), file.attrs["samples"][row]
        expected = recipe.sample(int(index))
        difference = np.abs(decode_image(stored["image"].tobytes(), str(path)).astype(int) - expected["pixels"]).mean()
        if stored[name] != expected[name] or difference > 0.1:
            yield f"{path}: row {row}: the image of {name} {stored[name]} differs from the simulation; make the file again"
    print(f"{len(rows)} images compared with new ones")


BUILDER = command.DatasetBuilder(
    "images", "Images with classes: convert folders of images, or WebDataset.", "resnet",
    command.Check("Files against index.json; decodes images.", check_images, ("images", 256, "to decode"), picture.draw_classes),
    (command.Convert("Folders of images by class, or WebDataset, to our files.", Source, convert,
                     "images by class, or .tar, or folders of them by split"),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
