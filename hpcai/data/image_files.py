"""Encoded images (PNG, JPEG, WebP): their size and pixels. Pillow is imported on use."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcai.data.layout import parse_errors
from hpcai.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
"""of Pillow; of others, EPS starts Ghostscript"""
REMEDY = "copy or write it again, or leave it out"
MAX_PIXELS = 1 << 26
"""of a resized image"""
_METADATA = (b"eXIf", b"Raw profile type", b"adobe.xmp")  # of a PNG, with its orientation


@contextmanager
def open_image(data: bytes, name: str) -> Iterator["Image.Image"]:
    """Context manager: an image of which only the header is decoded. Raises DataError with its ``name``, also for errors of the
    block.

    Animations are refused, and pixels of more than 8 bits: their range is that of an instrument (a camera of 12 bits uses one
    sixteenth of 16 bits), so that no scale is right for all.
    """
    from PIL import Image

    with parse_errors(name, REMEDY, "cannot be read as an image"), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.format != "MPO" and getattr(image, "is_animated", False):  # an MPO is a photograph with its preview
            raise DataError(f"{name}: an animated image; save one of its frames as .png, or leave it out")
        if image.format == "PNG" and data[24] > 8:  # Pillow drops the lower bits of RGB
            raise DataError(f"{name}: pixels of more than 8 bits (mode {image.mode}); convert it to 8 bits")
        yield image


def orientation(image: "Image.Image", data: bytes) -> int:
    """Return the orientation of an opened image by its EXIF data, 1 (upright) to 8."""
    from PIL import ExifTags

    if image.format == "PNG" and not any(text in data for text in _METADATA):  # Pillow would decode it in search of them
        return 1
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def image_size(data: bytes, name: str) -> list[int]:
    """Return height and width of an image, which is not decoded."""
    with open_image(data, name) as image:
        return list(image.size if orientation(image, data) in (5, 6, 7, 8) else image.size[::-1])


def to_rgb(image: "Image.Image") -> tuple["Image.Image", bool]:
    """Decode an opened image. Returns it upright in RGB, and whether it had transparent pixels, which are laid over white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    over_white = image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255
    if over_white:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB"), bool(over_white)


def decode_image(data: bytes, name: str) -> NDArray[np.uint8]:
    """Return the pixels of an image, upright, in RGB: those of one channel are repeated, transparent ones laid over white.

    Shape: [H, W, 3]. Raises DataError as ``open_image`` does, and for a truncated or damaged image.
    """
    with open_image(data, name) as image:
        return np.asarray(to_rgb(image)[0])


def mirror_boxes(boxes: np.ndarray, size: Sequence[float], mirror: Sequence[Any]) -> np.ndarray:
    """Return boxes x1 y1 x2 y2 in an image of ``size`` (height, width) that is flipped in x, in y, then transposed.   [n, 4]"""
    for axis in (0, 1):
        if mirror[axis]:
            boxes = boxes.copy()
            boxes[:, [axis, axis + 2]] = size[1 - axis] - boxes[:, [axis + 2, axis]]
    return boxes[:, [1, 0, 3, 2]] if mirror[2] else boxes
