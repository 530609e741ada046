"""Images of a scientist as input of ResNet.   H W the image, S its size in the network"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcai.data.images import center_crop, decode_image
from hpcai.errors import DataError
from hpcai.models.resnet.config import ResNetConfig


def prepare_images(images: Sequence[Any], cfg: ResNetConfig) -> np.ndarray:
    """Return images, each resized and cropped as in evaluation: arrays uint8 [H, W, 3], or encoded ones. Raises DataError for
    others.   [N, S, S, 3]"""
    result = np.empty((len(images), cfg.size, cfg.size, 3), np.uint8)
    for number, image in enumerate(images):
        pixels = decode_image(image, f"image {number}") if isinstance(image, bytes) else np.asarray(image)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise DataError(f"image {number}: {pixels.dtype} {list(pixels.shape)}, expected uint8 [H, W, 3], or bytes of a file")
        result[number] = center_crop(pixels, cfg.resize, cfg.size)
    return result
