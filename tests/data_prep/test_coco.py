"""Annotations of COCO: boxes, crowds and orientations of images, held-out splits, and bad input."""

import io
import json

import h5py
import numpy as np
import pytest
from PIL import Image

from data_prep import coco, store
from hpcai.data.image_files import decode_image
from tests.data_prep.prep_contract import check_error, check_fails, columns, read_json, runner, set_to

PIXELS = np.random.default_rng(0).integers(0, 200, (30, 40, 3), np.uint8)
PIXELS[5:9, 10:22] = 255        # an object
BOX = [10, 5, 12, 4]            # x, y, width, height
run = runner(coco)


def encode(pixels=PIXELS, turned=1, kind="PNG", mode="RGB"):
    exif = Image.Exif()
    exif[0x0112] = turned
    Image.fromarray(pixels).convert(mode).save(file := io.BytesIO(), kind, **({"exif": exif} if turned > 1 else {}))
    return file.getvalue()


def write_source(folder, images, *annotations, size=(30, 40)):
    """Write encoded images with ids from 1, and annotations, each with image, category and box; return the JSON file."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(images, 1):
        if data is not None:
            (folder / "images" / f"{number}.png").write_bytes(data)
    entries = [{"id": n, "file_name": f"{n}.png", "height": size[0], "width": size[1]} for n in range(1, len(images) + 1)]
    objects = [{"id": n, "image_id": i, "category_id": c, "bbox": b, "area": 7.0, "iscrowd": 0, **m}
               for n, (i, c, b, m) in enumerate(((*each, {})[:4] for each in annotations), 1)]  # fmt: skip
    categories = [{"id": 9, "name": "dog"}, {"id": 2, "name": "cat"}]
    (path := folder / "a.json").write_text(json.dumps({"images": entries, "annotations": objects, "categories": categories}))
    return path


def rows_of(folder):
    rows = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            rows += store.read_rows(file, coco.object_fields(2))
    return rows


@pytest.mark.parametrize("turned", range(1, 9))
def test_boxes_are_rotated_with_their_image(turned, tmp_path):
    source = write_source(tmp_path / "in", [encode(turned=turned), encode()], (1, 9, BOX), (2, 2, BOX))
    held_out = write_source(tmp_path / "held", [encode(turned=turned)], (1, 9, BOX), (1, 2, [0, 0, 40, 30], {"iscrowd": 1}))
    both = ["--validation-annotations", held_out, "--validation-images", held_out.parent / "images"]
    assert run("convert", source, source.parent / "images", tmp_path / "out", *both) == 0
    row = rows_of(tmp_path / "out/train")[0]
    left, top, right, bottom = row["boxes"][0].astype(int)
    pixels = decode_image(row["image"].tobytes(), "it")
    bright = np.argwhere((pixels == 255).all(2))
    assert [top, left] == bright.min(0).tolist() and [bottom, right] == (bright.max(0) + 1).tolist() and len(bright) == 48
    assert row["labels"].tolist() == [1] and row["size"].tolist() == [*pixels.shape[:2]]
    truth = read_json(tmp_path / "out/validation" / coco.TRUTH)
    assert truth["annotations"][0]["bbox"] == [left, top, right - left, bottom - top] and truth["annotations"][0]["area"] == 7
    assert [each["iscrowd"] for each in truth["annotations"]] == [0, 1] and truth["categories"][1] == {"id": 9, "name": "dog"}
    assert run("check", tmp_path / "out") == 0


def test_annotations_of_the_upright_image_and_images_of_other_modes(tmp_path):
    upright = write_source(tmp_path / "in", [encode(turned=6)], (1, 2, [1, 2, 3, 4]), size=(40, 30))
    assert run("convert", upright, upright.parent / "images", tmp_path / "out", "--validation-annotations", upright) == 0
    assert rows_of(tmp_path / "out/train")[0]["boxes"].tolist() == [[1, 2, 4, 6]]
    modes = [encode(kind="JPEG", mode="CMYK"), encode(kind="PNG", mode="L"), encode(kind="WEBP")]
    source = write_source(tmp_path / "more", modes, (1, 2, [-3, 20, 10, 30]))
    assert run("convert", source, source.parent / "images", tmp_path / "modes", "--validation-annotations", source) == 0
    assert columns(tmp_path / "modes/train")["boxes"].tolist() == [[0, 20, 7, 30]], "clipped"
    assert [len(row["labels"]) for row in rows_of(tmp_path / "modes/train")] == [1, 0, 0], "images without an object are kept"
    assert check_fails(run, tmp_path / "modes", tmp_path / "bad", set_to("image", slice(20, 900), 0), "cannot be read as an image")


def test_a_part_is_held_out_and_other_files_are_refused(tmp_path, capsys):
    source = write_source(tmp_path / "in", [encode()] * 20, (1, 2, BOX))
    args = source, source.parent / "images"
    assert run("convert", *args, tmp_path / "out", "--validation", 0.3, "--rows", 4) == 0
    ids = [columns(tmp_path / "out" / split)["id"].tolist() for split in ("train", "validation")]
    assert sorted(sum(ids, [])) == [*range(1, 21)] and 1 < len(ids[1]) < 12 and "2 classes" in capsys.readouterr().out
    assert run("convert", *args, tmp_path / "none", "--validation", 1e-9) == 2
    check_error(capsys, "no image for validation; give more, or change --validation")
    known = json.loads(source.read_text())
    others = [{"id": 9, "name": "dog"}, {"id": 2, "name": "cow"}]
    (other := tmp_path / "other.json").write_text(json.dumps(known | {"categories": others}))
    assert run("convert", *args, tmp_path / "none", "--validation-annotations", other) == 2
    check_error(capsys, "its categories differ from those of")
    short = known["annotations"][0] | {"bbox": [1, 2, 3]}
    for text, message in (("[1", "expected a JSON file of COCO"), ('{"images": []}', "categories"),
                          (json.dumps(known | {"annotations": [short]}), "not enough values")):  # fmt: skip
        source.write_text(text)
        assert run("convert", *args, tmp_path / "none") == 2
        check_error(capsys, message)


@pytest.mark.parametrize(("images", "annotations", "message"), [
    ([encode(), None], [], "2.png: cannot be read (No such file or directory); the annotations list it"),
    ([encode(), encode()[:900]], [], "2.png: cannot be read as an image"),
    ([encode(), encode(PIXELS[:20])], [], "2.png: 20 x 40, its annotations are of 30 x 40"),
    ([encode()] * 2, [(2, 2, [70.0, 0, 9, 9])], "annotation 1: bbox [70.0, 0, 9, 9] has no area in its image, 40 x 30"),
    ([encode()] * 2, [(2, 2, [9.0, 9, -4, 9])], "has no area"),
    ([encode()] * 2, [(2, 2, [3.0, 3, 0, 9])], "has no area"),
    ([encode()] * 2, [(2, 2, [1, float("nan"), 3, 4])], "has no area"),
    ([encode()] * 2, [(8, 2, BOX)], "annotation 1: image_id is 8, expected one of the 2 ids listed"),
    ([encode()] * 2, [(2, 5, BOX)], "category_id is 5, expected one of the 2 ids listed"),
], ids=lambda value: value[:30] if isinstance(value, str) else "")  # fmt: skip
def test_bad_items_are_refused_or_counted(images, annotations, message, tmp_path, capsys):
    source = write_source(tmp_path / "in", images, *annotations)
    good = write_source(tmp_path / "good", [encode()])
    held_out = "--validation-annotations", good, "--validation-images", good.parent / "images"
    args = source, source.parent / "images", tmp_path / "out", *held_out
    assert run("convert", *args) == 2
    check_error(capsys, message, "--skip-bad")
    assert run("convert", *args, "--skip-bad") == 0 and "1" in capsys.readouterr().out
    assert len(read_json(tmp_path / "out" / store.SKIPPED)["unusable"]) == 1
