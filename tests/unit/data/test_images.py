"""Encoded images as samples: equal to Pillow's and torchvision's results, a function of seed, epoch and index; DALI agrees."""

import io
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from hpcai.data.image_files import decode_image, image_size
from hpcai.data.images import Geometry, ImageSamples, center_crop_box, dali_fields, random_resized_crop, resize_crop
from hpcai.data.splits import make_loader
from hpcai.errors import ConfigError, DataError
from hpcai.settings import LoaderConfig
from tests.reference_data import digest, load_arrays, load_json
from tests.replica_mesh import replica_mesh

PHOTO = load_arrays("resnet50/preprocess")["image"]
NOISE = np.random.default_rng(0).integers(0, 256, (40, 56, 3)).astype(np.uint8)
S = 32  # size of a sample


def encode(image: Any, kind: str = "PNG", turned: int = 1, **kwargs: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turned
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer := io.BytesIO(), kind, **{"exif": exif} if turned > 1 else {}, **kwargs)
    return buffer.getvalue()


def new_samples(*images: bytes, train: bool = True, seed: int = 5, **kwargs: Any) -> ImageSamples:
    """Return samples of encoded images in memory, with their numbers as labels."""
    rows = MagicMock(describe="row {}".format, **{"__len__.return_value": len(images)})
    rows.read = lambda index, _: {"image": np.frombuffer(images[index], np.uint8), "label": np.int32(index)}
    return ImageSamples(rows, S, seed, train, **kwargs)


# ---- references


def test_boxes_and_pixels_are_those_of_torchvision_and_pillow() -> None:
    golden = load_json("resnet50/preprocess")
    for case in golden["crops"]:
        assert [*random_resized_crop(case["height"], case["width"], case["random"], case["scale"], case["ratio"])] == case["box"]
    for height, width, expected in golden["eval_geometry"]:
        assert [*center_crop_box(height, width, 256, 224)] == expected
    assert center_crop_box(256, 343, 256, 224) == (256, 343, 16, 60), "59.5 is rounded to even"
    for name, case in golden["images"].items():
        if name == "eval":
            height, width, *corner = center_crop_box(*PHOTO.shape[:2], case["resize_short_side"], case["size"])
            geometry = Geometry((0, 0, *PHOTO.shape[:2]), (height, width), (corner[0], corner[1]))
        else:
            box = case["top"], case["left"], case["crop_height"], case["crop_width"]
            geometry = Geometry(box, (case["size"], case["size"]), mirror=(case["flip"], False, False))
        assert digest(resize_crop(Image.fromarray(PHOTO), geometry, case["size"])) == case["sha256"], name


# ---- decoding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turned", [1, 2, 6, 7])
def test_images_are_upright(kind: str, turned: int) -> None:
    upright = {1: PHOTO, 2: PHOTO[:, ::-1], 6: np.rot90(PHOTO, -1), 7: np.rot90(PHOTO, 2).swapaxes(0, 1)}[turned]
    data = encode(PHOTO, kind, turned, **{"WEBP": {"lossless": True}}.get(kind, {}))
    assert image_size(data, "x") == [*upright.shape[:2]]
    assert np.abs(decode_image(data, "x") - upright.astype(int)).mean() < (6 if kind == "JPEG" else 1e-9)


def test_every_mode_is_rgb() -> None:
    gray, few = np.asarray(Image.fromarray(NOISE).convert("L")), Image.fromarray(NOISE).quantize(200)
    black = gray > 127
    for image, expected in ((gray, np.dstack([gray] * 3)), (few, few.convert("RGB")), (black, np.dstack([black] * 3) * 255)):
        assert np.array_equal(decode_image(encode(image), "x"), expected)
    red = decode_image(encode(Image.new("CMYK", (9, 8), (0, 255, 255, 0)), "JPEG"), "x")
    assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 2
    hidden = decode_image(encode(np.dstack([NOISE, np.zeros_like(gray)])), "x")
    assert (hidden == 255).all() and hidden.shape == NOISE.shape


@pytest.mark.parametrize("decode", [decode_image, image_size])
def test_unusable_images_are_refused_by_name(decode: Any) -> None:
    deep = encode(NOISE[..., 0].astype(np.uint16) * 200)
    frames = encode(NOISE, save_all=True, append_images=[Image.fromarray(NOISE[::-1])])
    for data, message in ((deep, "more than 8 bits .* convert it"), (frames, "animated"), (b"", "cannot be read as an image"),
                          (b"GIF89a" + bytes(99), "cannot be read"), (encode(NOISE)[:20], "cannot be read")):  # fmt: skip
        with pytest.raises(DataError, match=f"row 7: .*{message}"):
            decode(data, "row 7")
    for kind in ("PNG", "JPEG"):
        with pytest.raises(DataError, match="row 7: cannot be read as an image .*truncated"):
            decode_image(encode(PHOTO, kind)[:-3000], "row 7")


# ---- samples


def test_a_sample_is_a_function_of_seed_epoch_and_index() -> None:
    data = encode(PHOTO)
    samples, again = new_samples(data, data), new_samples(data, data)
    images = [samples.sample(index, epoch)["image"] for epoch in range(3) for index in range(2)]
    assert images[0].shape == (S, S, 3) and images[0].dtype == np.uint8 and samples.sample(1, 0)["label"] == 1
    assert len({digest(image) for image in images}) == 6 and np.array_equal(again.sample(1, 2)["image"], images[5])
    assert not np.array_equal(new_samples(data, seed=6).sample(0, 0)["image"], images[0])
    held_out = new_samples(data, train=False, count=1)
    expected = Image.fromarray(PHOTO).resize((49, 37), Image.Resampling.BILINEAR).crop((8, 2, 8 + S, 2 + S))
    assert all(np.array_equal(held_out.sample(0, epoch)["image"], expected) for epoch in range(2)) and len(held_out) == 1


def test_symmetries() -> None:
    square = NOISE[:S, :S]
    rotated, mirrored = ([np.rot90(part, k) for k in range(4)] for part in (square, square[:, ::-1]))
    cases = {"": [square], "flip": [square, mirrored[0]], "rotate90": rotated, "flip rotate90": rotated + mirrored}
    for options, expected in cases.items():
        samples = new_samples(encode(square), flip="flip" in options, rotate90="90" in options, scale=(1, 1), ratio=(1, 1))
        digests = [digest(samples.sample(0, epoch)["image"]) for epoch in range(200)]
        assert {*digests} == {digest(image) for image in expected}
        assert all(abs(digests.count(each) - 200 / len(expected)) < 40 for each in {*digests})


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="resized to 20 pixels, and cropped to 32"):
        new_samples(train=False, resize=20)
    with pytest.raises(DataError, match=r"row 0: 1 x 60000, too long"):
        new_samples(encode(np.zeros((1, 60000, 3), np.uint8)), train=False).sample(0, 0)
    with pytest.raises(DataError, match="row 0: cannot be read as an image"):
        new_samples(b"no image").sample(0, 0)


# ---- DALI

HAS_DALI = find_spec("nvidia") is not None and find_spec("nvidia.dali") is not None
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed: pip install 'hpcai-suite[dali]'")
VARIANTS = {
    "png": encode(PHOTO), "jpeg": encode(PHOTO, "JPEG"), "turned": encode(PHOTO, "JPEG", 6),
    "turned png": encode(PHOTO, "PNG", 7), "4:4:4": encode(PHOTO, "JPEG", subsampling=0),
    "progressive": encode(PHOTO, "JPEG", progressive=True),
    "gray": encode(Image.fromarray(PHOTO).convert("L")), "gray jpeg": encode(Image.fromarray(PHOTO).convert("L"), "JPEG"),
    "palette": encode(Image.fromarray(PHOTO).quantize(99)), "cmyk": encode(Image.fromarray(PHOTO).convert("CMYK"), "JPEG"),
    "alpha": encode(np.dstack([PHOTO, PHOTO[..., 0]])), "webp": encode(PHOTO, "WEBP"), "noise": encode(NOISE),
    "transparent color": encode(Image.fromarray(PHOTO).convert("L"), transparency=int(np.median(PHOTO))),
}  # fmt: skip


@needs_dali
@pytest.mark.parametrize("kwargs", [{}, {"rotate90": True}, {"train": False}], ids=str)
def test_dali_has_the_same_crops_flips_and_pixels(kwargs: dict[str, Any]) -> None:
    """But for the outermost pixels of a resized box: its edge is repeated there, see ``hpcai.data.images``."""
    batches = {}
    for reader in ("direct", "dali"):
        samples = new_samples(*VARIANTS.values(), encoded=reader == "dali", **kwargs)
        options: Any = {"name": "train", "shuffle": False, "last_batch": "keep"}
        with make_loader(samples, 5, LoaderConfig(reader=reader), replica_mesh(0, 1), dali_fields(samples), **options) as loader:  # type: ignore[arg-type]
            batches[reader] = [batch for epoch in range(3) for batch in loader.epoch(epoch)]
    assert len(batches["dali"]) == len(batches["direct"]) == 9
    for actual, expected in zip(batches["dali"], batches["direct"], strict=True):
        assert actual.keys() == expected.keys() == {"image", "label"}
        assert all(actual[key].dtype == expected[key].dtype for key in actual) and torch.equal(actual["label"], expected["label"])
        difference = (actual["image"].int() - expected["image"].int()).abs().amax(-1)
        for row, name in zip(difference, [[*VARIANTS][label] for label in actual["label"]]):
            assert row[1:-1, 1:-1].max() <= 1 and row.max() <= (13 if name == "noise" else 8), name


@needs_dali
def test_damage_that_only_dali_finds_is_named() -> None:
    samples = new_samples(VARIANTS["png"][:-3000], encoded=True)
    loader = make_loader(samples, 1, LoaderConfig(reader="dali"), replica_mesh(0, 1), dali_fields(samples), name="train")
    with loader, pytest.raises(DataError, match=r"samples 0 \(row 0\)"):
        next(loader.epoch(0))
