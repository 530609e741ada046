"""Images with objects in boxes: convert annotations of COCO.

    python -m data_prep.coco convert ANNOTATIONS IMAGES OUT     a JSON file of COCO, and the folder of its images
    python -m data_prep.coco check OUT                          files against their index, images decoded, a picture

    --validation-annotations FILE --validation-images FOLDER    the held-out images; without them a part by a hash of names

    OUT/{train,validation,test}/images_000000.h5    as of data_prep.images, and for each object "boxes", "labels", "area", "crowd"
    OUT/{validation,test}/annotations.json          the objects of a held-out split, for scores: a file of COCO

Images are the files of the source, unchanged. A box is x1 y1 x2 y2 in pixels of the upright image, clipped to it. Boxes of the
source are in pixels before the rotation by EXIF data, as pycocotools and torchvision read them, unless its height and width are those
of the upright image alone; they are rotated with the image. Crowds are for scores alone: training leaves them out.

N rows of a file   n objects of all of them"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep import command, images, picture, store
from data_prep.command import option
from data_prep.store import Field
from hpcai.data.image_files import open_image, orientation, to_rgb
from hpcai.durable import replace_file
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import check_fields, read_regular

TRUTH = "annotations.json"
UPRIGHT = {2: "x", 3: "xy", 4: "y", 5: "t", 6: "yt", 7: "xyt", 8: "xt"}  # flips in x and y, then a transposition, by EXIF orientation


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
                    content["annotations"] += [
                        {"id": number, "image_id": image, "category_id": ids[label], "bbox": [x, y, right - x, bottom - y],
                         "area": area, "iscrowd": crowd}
                        for number, ((x, y, right, bottom), label, area, crowd) in enumerate(zip(*columns), len(content["annotations"]) + 1)
                    ]  # fmt: skip
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
        entries = {int(image["id"]): {"objects": [], **{k: image[k] for k in ("id", "file_name", "height", "width")}} for image in content["images"]}
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


def to_upright(boxes: np.ndarray, size: Sequence[int], turned: int) -> np.ndarray:
    """Return boxes of an image of ``size`` (height, width) in the image that its EXIF orientation makes upright.   [n, 4]"""
    for axis, name in enumerate("xy"):
        if name in UPRIGHT.get(turned, ""):
            boxes[:, [axis, axis + 2]] = size[1 - axis] - boxes[:, [axis + 2, axis]]
    return boxes[:, [1, 0, 3, 2]] if turned > 4 else boxes


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
                raise DataError(f"{name}: {upright[0]} x {upright[1]}, its annotations are of {listed[0]} x {listed[1]}; give those of it")
            boxes, labels, area, crowd = zip(*entry["objects"]) if entry["objects"] else ((), (), (), ())
            boxes = to_upright(np.reshape(boxes, (-1, 4)), raw, turned if listed == raw else 1)
            columns = {"boxes": boxes, "labels": np.searchsorted(ids, labels), "area": np.array(area), "crowd": np.array(crowd)}
            values = {"bytes": len(data), "image": np.frombuffer(data, np.uint8), "objects": len(boxes), **columns}
            rows.append({**values, "id": entry["id"], "size": upright})
    if rows:
        store.write_rows(path, object_fields(len(ids)), rows, {"kind": "converted"})
    return skipped


def convert(options: argparse.Namespace) -> command.Plan:
    out, skipped, recipe = options.out, store.Skipped(options.skip_bad), Source.from_options(options)
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
    contents = store.Contents(object_fields(len(names)))
    jobs = [store.Job(out / split / f"images_{i:06d}.h5", partial(write_images, list(names), options.skip_bad, folder, part), contents, len(part))
            for split, (folder, some) in splits.items() for i, part in enumerate(command.batched(some, options.rows))]  # fmt: skip
    counts = Counter(name for name, (_, some) in splits.items() for entry in some for _ in entry["objects"])
    message = ", ".join(f"{name}: {len(some)} images, {counts[name]} objects" for name, (_, some) in splits.items())
    header, identity = {"classes": list(names.values()), "categories": list(names)}, [f"{e['id']} {e['file_name']}" for _, some in splits.values() for e in some]
    return command.Plan({**recipe.json_dict, "kind": "convert", "source": command.fingerprint(identity, "images")}, jobs, header,
                        f"{message}, of {len(names)} classes", refused=skipped, finalize=partial(write_truth, names))  # fmt: skip


# ---- check


def check_images(prepared: command.PreparedDataset, options: argparse.Namespace) -> Iterator[str]:
    """Yield the images that cannot be decoded, and those of another size than the file says."""
    fields, rows = object_fields(len(prepared.index["classes"])), command.subsample(prepared.locations, options.check_count)
    for path, row in rows:
        with h5py.File(path, "r") as file:
            stored = next(store.read_rows(file, fields, row, row + 1))
        try:
            with open_image(stored["image"].tobytes(), f"{path}: row {row}") as image:
                size = to_rgb(image)[0].size[::-1]
        except DataError as problem:
            yield str(problem)
            continue
        if size != tuple(stored["size"]) or (stored["boxes"][:, [3, 2]] > size).any():
            yield f"{path}: row {row}: an image of {size[0]} x {size[1]}, its size or its boxes are of another"
    print(f"{len(rows)} images decoded")


BUILDER = command.DatasetBuilder(
    "coco", "Images with objects in boxes: convert annotations of COCO.", "retinanet",
    command.Check("Files against index.json; decodes images, draws boxes.", check_images, ("images", 256, "to decode"), picture.draw_boxes),
    (command.Convert("A JSON file of COCO and a folder of images, to our files.", Source, convert, add_source_options),),
)  # fmt: skip
main, parser = BUILDER.main, BUILDER.parser

if __name__ == "__main__":
    raise SystemExit(main())
