"""Images with objects in boxes: convert annotations of COCO.

    python -m data_prep.coco convert ANNOTATIONS IMAGES OUT     a JSON file of COCO, and the folder of its images
    python -m data_prep.coco check OUT                          files against their index, images decoded, a picture

    --validation-annotations FILE --validation-images FOLDER    the held-out images; without them a part by a hash of names

    OUT/{train,validation,test}/images_000000.h5    as of data_prep.images, and for each object "boxes", "labels", "area", "crowd"
    OUT/{validation,test}/annotations.json          the objects of a held-out split, for scores: a file of COCO

Images are the files of the source, unchanged. A box is x1 y1 x2 y2 in pixels of the upright image, clipped to it. Boxes of the
source are in pixels before the rotation by EXIF data, as pycocotools and torchvision read them, unless height and width there are
those of the upright image alone; they are rotated with the image. Crowds are for scores: training leaves them out.

N rows of a file   n objects of all of them"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, images, picture, store
from data_prep.command import option
from data_prep.store import Field
from hpcai.data.image_files import mirror_boxes, open_image, orientation, to_rgb
from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import check_fields, read_regular

TRUTH = "annotations.json"
# Flips in x and in y, then a transposition, which make an image upright, by its EXIF orientation
UPRIGHT = {1: (0, 0, 0), 2: (1, 0, 0), 3: (1, 1, 0), 4: (0, 1, 0), 5: (0, 0, 1), 6: (0, 1, 1), 7: (1, 1, 1), 8: (1, 0, 1)}


def object_fields(classes: int) -> store.Fields:
    """Return the fields of images [N] with objects [n]; a size is height and width."""
    label = Field("int32", ("objects",), 0, classes - 1)
    return {
        "bytes": Field("int32", (), 1), "image": Field("uint8", ("bytes",)), "id": Field("int64"), "size": Field("int32", (2,), 1),
        "objects": Field("int32", (), 0), "boxes": Field("float32", ("objects", 4), 0), "labels": label,
        "area": Field("float32", ("objects",), 0), "crowd": Field("uint8", ("objects",), 0, 1),
    }  # fmt: skip


def write_truth(categories: Mapping[int, str], out: Path) -> None:
    """Write the objects of the held-out splits, in the format of COCO."""
    ids, fields = list(categories), object_fields(len(categories))
    for folder in (folder for split in store.SPLITS[1:] if (folder := out / split).is_dir()):
        content: dict[str, list[Any]] = {"images": [], "annotations": []}
        for path in sorted(folder.glob("*.h5")):
            with h5py.File(path, "r") as file:
                for row in store.read_rows(file, {name: field for name, field in fields.items() if name != "image"}):
                    (height, width), image = row["size"].tolist(), int(row["id"])
                    content["images"].append({"id": image, "height": height, "width": width})
                    columns = (row[name].tolist() for name in ("boxes", "labels", "area", "crowd"))
                    for (x, y, right, bottom), label, area, crowd in zip(*columns):
                        own = {"id": len(content["annotations"]) + 1, "image_id": image, "category_id": ids[label]}
                        own |= {"bbox": [x, y, right - x, bottom - y], "area": area, "iscrowd": crowd}
                        content["annotations"].append(own)
        content["categories"] = [{"id": key, "name": name} for key, name in categories.items()]
        replace_file(folder / TRUTH, json.dumps(content).encode())


# ---- convert


@dataclass(frozen=True)
class Source(command.Settings):
    rows: int = option(1024, "images per file", type=command.positive)
    validation: float = option(0.1, "held-out fraction without files of it", type=command.within(0, 0.9))
    skip_bad: bool = command.skip_bad()


def add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("annotations", type=Path, metavar="ANNOTATIONS", help="JSON file of COCO")
    parser.add_argument("images", type=Path, metavar="IMAGES", help="folder of its images")
    parser.add_argument("--validation-annotations", type=Path, metavar="FILE", help="JSON file of the held-out images")
    parser.add_argument("--validation-images", type=Path, metavar="FOLDER", help="their folder; default: IMAGES")


def read_annotations(path: Path, skipped: store.Skipped) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the images of a file of COCO, each with its "objects" (box, category, area, crowd), and names of categories by id."""
    try:
        content = json.loads(read_regular(path, None))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read ({problem}); expected a JSON file of COCO") from problem
    with check_fields(path, "annotations of COCO", DataError):
        keys = "id", "file_name", "height", "width"
        entries = {int(image["id"]): {"objects": [], **{key: image[key] for key in keys}} for image in content["images"]}
        names = {int(each["id"]): str(each["name"]) for each in sorted(content["categories"], key=lambda each: int(each["id"]))}
        if len(entries) < len(content["images"]) or len(names) < len(content["categories"]) or len({*names.values()}) < len(names):
            raise DataError(f"{path}: images or categories have the same id or name; expected different ones")
        for each in content["annotations"]:
            with skipped.catch(where := f"{path}: annotation {each['id']}"):
                for key, known in (("image_id", entries), ("category_id", names)):
                    if each[key] not in known:
                        raise DataError(f"{where}: {key} is {each[key]}, expected one of the {len(known)} ids listed")
                x, y, w, h = map(float, each["bbox"])
                image, area = entries[each["image_id"]], float(each.get("area", w * h))
                box = np.clip([x, y, x + w, y + h], 0, [image["width"], image["height"]] * 2).astype(np.float32)
                if not (np.isfinite([x, y, w, h, area]).all() and (box[2:] > box[:2]).all()):
                    raise DataError(f"{where}: bbox {each['bbox']} has no area in its image, {image['width']} x {image['height']}")
                image["objects"].append((box.tolist(), each["category_id"], area, int(each.get("iscrowd", 0))))
    return list(entries.values()), names


def write_images(ids: Sequence[int], skip_bad: bool, folder: Path, entries: Sequence[dict[str, Any]], path: Path) -> store.Refused:
    rows, skipped = list[dict[str, Any]](), store.Skipped(skip_bad)
    for entry in entries:
        with skipped.catch(name := folder / entry["file_name"]):
            try:
                data = read_regular(name, None)
            except OSError as problem:
                raise DataError(f"{name}: cannot be read ({problem.strerror}); the annotations list it") from problem
            with open_image(data, str(name)) as image:
                raw, turned, upright = image.size[::-1], orientation(image, data), to_rgb(image)[0].size[::-1]
            listed = entry["height"], entry["width"]
            if listed not in (raw, upright):
                sizes = [" x ".join(map(str, size)) for size in (upright, listed)]
                raise DataError(f"{name}: {sizes[0]}, its annotations are of {sizes[1]}; give the image that was annotated")
            corners, labels, area, crowd = zip(*entry["objects"]) if entry["objects"] else ((), (), (), ())
            boxes = mirror_boxes(np.reshape(corners, (-1, 4)), raw, UPRIGHT.get(turned if listed == raw else 1, UPRIGHT[1]))
            columns = {"boxes": boxes, "labels": np.searchsorted(ids, labels), "area": np.array(area), "crowd": np.array(crowd)}
            values = {"bytes": len(data), "image": np.frombuffer(data, np.uint8), "objects": len(boxes), **columns}
            rows.append({**values, "id": entry["id"], "size": upright})
    if rows:
        store.write_rows(path, object_fields(len(ids)), rows, {"kind": "converted"})
    return skipped


def convert(options: argparse.Namespace) -> command.Plan:
    out, skipped, settings = options.out, store.Skipped(options.skip_bad), Source.from_options(options)
    entries, names = read_annotations(options.annotations, skipped)
    if given := options.validation_annotations:
        held_out, others = read_annotations(given, skipped)
        if others != names:
            raise DataError(f"{given}: its categories differ from those of {options.annotations}; give files with the same ones")
        splits = {"train": (options.images, entries), "validation": (options.validation_images or options.images, held_out)}
    else:
        chosen = [images.name_hash(str(entry["file_name"])) < options.validation for entry in entries]
        parts = {"train": [not c for c in chosen], "validation": chosen}
        splits = {name: (options.images, [e for e, own in zip(entries, part) if own]) for name, part in parts.items()}
    if missing := [name for name, (_, some) in splits.items() if not some]:
        raise ConfigError(f"{options.annotations}: no image for {missing[0]}; give more, or change --validation")
    contents, write = store.Contents(object_fields(len(names))), partial(write_images, list(names), options.skip_bad)
    jobs = [store.Job(out / split / f"images_{i:06d}.h5", partial(write, folder, part), contents, len(part))
            for split, (folder, some) in splits.items() for i, part in enumerate(command.batched(some, options.rows))]  # fmt: skip
    counts = (f"{name}: {len(some)} images, {sum(len(e['objects']) for e in some)} objects" for name, (_, some) in splits.items())
    source = command.fingerprint([f"{e['id']} {e['file_name']}" for _, some in splits.values() for e in some], "images")
    return command.Plan(
        {**settings.json_dict, "kind": "convert", "source": source}, jobs,
        {"classes": list(names.values()), "categories": list(names)}, f"{', '.join(counts)}, of {len(names)} classes",
        refused=skipped, finalize=partial(write_truth, names),
    )  # fmt: skip


BUILDER = command.DatasetBuilder(
    "coco", "Images with objects in boxes: convert annotations of COCO.", "retinanet",
    command.Check("Files against index.json; decodes images.", images.check_images, ("images", 256, "to decode"),
                  picture.draw_boxes),
    (command.Convert("A JSON file of COCO and a folder of images, to our files.", Source, convert, None, add_source_options),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
