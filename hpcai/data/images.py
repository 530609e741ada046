"""Encoded images as samples, which are decoded, cropped, resized and flipped when they are read.   S the size of a sample

DALI does this with ``encoded`` samples and ``dali_fields``, by the same boxes and flips, which the host draws. Observed with DALI
2.4.0 on the CPU, and tested: it decodes as Pillow does, and its resized images differ by at most one level, but for the outermost
pixels of the resized box. There DALI repeats the edge, and Pillow has no weights beyond it: up to 3 levels of a photograph that is
resized to 112 pixels, 8 to 32 pixels, and 13 of white noise.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.data.dali import Field
from hpcai.data.hdf5 import Fields, Rows
from hpcai.data.image_files import MAX_PIXELS, open_image, orientation, to_rgb
from hpcai.data.splits import Samples
from hpcai.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image

FIELDS: Fields = {"label": ("int32", ()), "bytes": ("int32", ()), "image": ("uint8", ("bytes",))}
"""of the files of ``data_prep.images``"""
_ATTEMPTS, _STREAM = 10, 0x1A6E


class Geometry(NamedTuple):
    """The pixels of a sample: a box of the image, resized to ``size``, from whose ``corner`` on S x S pixels are taken. ``mirror``:
    flipped in x, in y, then transposed, which are the 8 symmetries of the square."""

    box: tuple[int, int, int, int]  # top, left, height, width
    size: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    mirror: tuple[bool, bool, bool] = (False, False, False)

    def to_array(self) -> NDArray[np.int32]:
        """Return the geometry for ``dali_fields``, with the matrix of the transposition in place of its bool.   [16]"""
        *flips, transpose = map(int, self.mirror)
        matrix = (1 - transpose, transpose, 0, transpose, 1 - transpose, 0)
        return np.array([*self.box, *self.size, *self.corner, *flips, *matrix], np.int32)


def with_classes(model: Any, rows: Rows) -> Any:
    """Return the settings of a model, which has ``classes`` and ``num_classes``, with the names of the classes of the data. Raises
    DataError if they contradict each other."""
    names = tuple(rows.metadata.get("classes") or ())
    if not names:
        if model.classes or model.num_classes:
            return model
        raise DataError(f"{rows.folder}: the index has no names of classes; write it again, or set model.num_classes")
    if model.classes not in ((), names) or model.num_classes not in (None, len(names)):
        setting = f"model.classes is {list(model.classes)}" if model.classes else f"model.num_classes is {model.num_classes}"
        raise DataError(f"{rows.folder}: has {len(names)} classes, {', '.join(names[:8])}, but {setting}; set neither, or the same")
    return model.model_copy(update={"classes": names, "num_classes": None})


def random_resized_crop(
    height: int, width: int, random: Sequence[Sequence[float]], scale: tuple[float, float], ratio: tuple[float, float],
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return top, left, height and width of a random crop, by torchvision's rule (Szegedy et al. 2015).

    Each attempt has four numbers in [0, 1): for the area, a fraction in ``scale`` of the image; for the logarithm of width by
    height, in ``ratio``; for top; for left. If none fits, the crop is the largest centred one within ``ratio``.
    """
    for for_area, for_ratio, for_top, for_left in random:
        area = height * width * (scale[0] + for_area * (scale[1] - scale[0]))
        aspect = math.exp(math.log(ratio[0]) + for_ratio * (math.log(ratio[1]) - math.log(ratio[0])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(for_top * (height - h + 1)), int(for_left * (width - w + 1)), h, w
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


def center_crop_box(height: int, width: int, resize: int, crop: int) -> tuple[int, int, int, int]:
    """Return height and width of an image whose short side is resized to ``resize``, then top and left of its centre crop."""
    short = min(height, width)
    h, w = (resize if side == short else int(resize * side / short) for side in (height, width))
    return h, w, round((h - crop) / 2), round((w - crop) / 2)


def as_image(content: Any, name: str) -> "Image.Image":
    """Return an image of Pillow, upright in RGB, from an encoded one (bytes) or pixels uint8 [H, W, 3]. Raises DataError with its
    ``name`` for others."""
    from PIL import Image

    if isinstance(content, bytes):
        with open_image(content, name) as opened:
            return to_rgb(opened)[0]
    pixels = np.asarray(content)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise DataError(f"{name}: {pixels.dtype} {list(pixels.shape)}, expected uint8 [H, W, 3], or the bytes of a file")
    return Image.fromarray(pixels)


def resize_crop(image: "Image.Image", geometry: Geometry, size: int) -> NDArray[np.uint8]:
    """Return the pixels of a sample, by Pillow's BILINEAR: a triangular filter, wider when it shrinks.   [S, S, 3]"""
    from PIL import Image

    (top, left, h, w), (y, x) = geometry.box, geometry.corner
    resized = image.crop((left, top, left + w, top + h)).resize(geometry.size[::-1], Image.Resampling.BILINEAR)
    flip_x, flip_y, transpose = geometry.mirror
    pixels = np.asarray(resized)[y : y + size, x : x + size][:: -1 if flip_y else 1, :: -1 if flip_x else 1]
    return np.ascontiguousarray(pixels.swapaxes(0, 1) if transpose else pixels)


def draw_mirror(random: NDArray[np.float64], flip: bool, rotate90: bool) -> tuple[bool, bool, bool]:
    """Return whether an image is flipped in x, in y, then transposed, from three numbers in [0, 1). ``flip``: In x, a half of them.
    ``rotate90``: Rotate by multiples of 90 degrees."""
    x, y, transpose = (random < 0.5).tolist()
    return (x, y, transpose if flip else x != y) if rotate90 else (x and flip, False, False)


class ImageSamples(Samples):
    """Images of one split: {"image": uint8 [S, S, 3], "label": int32}.

    Args:
        train: With a random resized crop (``scale``, ``ratio``), and the symmetries below. Otherwise the short side is resized to
            ``resize``, 8/7 of the size unless given, and the centre is taken.
        seed: Random numbers are a function of (seed, epoch, index).
        flip: In x, half of the samples.
        rotate90: Rotate by multiples of 90 degrees, for images that have no up. With ``flip``, one of 8 symmetries.
        encoded: For DALI (``dali_fields``): {"image": uint8 [bytes], "geometry": int32 [16], "label"}. What decoders of a GPU may
            treat in another way (orientation, palettes, transparency, CMYK) is decoded here, to a PPM.
        count: The first images only.
    """

    replicated = True

    def __init__(
        self, rows: Rows, size: int, seed: int, train: bool, *, scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3), flip: bool = True, rotate90: bool = False, resize: int | None = None,
        encoded: bool = False, count: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows, count)
        self.size, self.seed, self.train, self.scale, self.ratio, self.flip = size, seed, train, scale, ratio, flip
        self.rotate90, self.resize, self.encoded = rotate90, round(size * 8 / 7) if resize is None else resize, encoded
        if self.resize < size:
            raise ConfigError(f"images are resized to {self.resize} pixels, and cropped to {size}; resize to {size} or more")

    def geometry(self, height: int, width: int, index: int, epoch: int) -> Geometry:
        """Return the geometry of a sample, of an image of this size."""
        if not self.train:
            h, w, *corner = center_crop_box(height, width, self.resize, self.size)
            return Geometry((0, 0, height, width), (h, w), (corner[0], corner[1]))
        random = np.random.Generator(np.random.PCG64([self.seed, epoch, index, _STREAM])).random(4 * _ATTEMPTS + 3)
        box = random_resized_crop(height, width, random[:-3].reshape(_ATTEMPTS, 4).tolist(), self.scale, self.ratio)
        return Geometry(box, (self.size, self.size), mirror=draw_mirror(random[-3:], self.flip, self.rotate90))

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> dict[str, Any]:
        data, name = values["image"].tobytes(), self.describe(index)
        with open_image(data, name) as image:
            is_plain = image.mode in ("RGB", "L") and not image.has_transparency_data and orientation(image, data) == 1
            if not (self.encoded and is_plain):
                image = to_rgb(image)[0]
            geometry = self.geometry(image.height, image.width, index, epoch)
            if math.prod(geometry.size) > MAX_PIXELS:
                raise DataError(f"{name}: {image.height} x {image.width}, too long to be resized; crop it, or leave it out")
            if not self.encoded:
                return {"image": resize_crop(image, geometry, self.size), "label": values["label"]}
            if not is_plain:
                data = b"P6 %d %d 255\n" % image.size + image.tobytes()
        return {"image": np.frombuffer(data, np.uint8), "geometry": geometry.to_array(), "label": values["label"]}


def dali_fields(samples: ImageSamples, gpu: bool = False) -> tuple[Field, ...]:
    """Return the fields of ``encoded`` samples for ``make_loader``; with ``gpu`` they are decoded on it."""

    def operators(data: Any, random: Any, geometry: Any) -> Any:
        fn, types = (import_module(f"nvidia.dali.{name}") for name in ("fn", "types"))
        x = fn.decoders.image_slice(
            data, device="mixed" if gpu else "cpu", start=geometry[0:2], shape=geometry[2:4], axes=(0, 1), adjust_orientation=False,
            jpeg_fancy_upsampling=True,
        )  # fmt: skip
        x = fn.resize(x, size=fn.cast(geometry[4:6], dtype=types.FLOAT), interp_type=types.INTERP_LINEAR, antialias=True)
        x = fn.slice(x, start=geometry[6:8], shape=[samples.size, samples.size], axes=(0, 1))
        x = fn.flip(x, horizontal=geometry[8], vertical=geometry[9])
        if not samples.rotate90:
            return x
        return fn.warp_affine(x, fn.cast(fn.reshape(geometry[10:16], shape=[2, 3]), dtype=types.FLOAT), interp_type=types.INTERP_NN)

    return Field("image", "", operators, ("geometry",)), Field("geometry", output=False), Field("label")
