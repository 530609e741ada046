"""Images of a user: prepared as in training and evaluation, and the objects in them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcai.data.images import Geometry, as_image, resize_crop
from hpcai.models.retinanet.config import STRIDE, RetinaNetConfig
from hpcai.models.retinanet.model import RetinaNet
from hpcai.nn.inference import inference_mode

if TYPE_CHECKING:
    from PIL import Image


def resize(image: "Image.Image", cfg: RetinaNetConfig, mirror: tuple[bool, bool, bool] = (False, False, False)) -> np.ndarray:
    """Return the pixels of an image in the network (``cfg.resized``), flipped in x, in y, and transposed.   [h, w, 3] uint8"""
    height, width = cfg.resized(image.height, image.width)
    geometry = Geometry((0, 0, image.height, image.width), (height, width), mirror=mirror)
    return resize_crop(image, geometry, max(height, width))


def pad(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return images in one frame, at its upper left, whose sides are multiples of 32.   [h, w, 3] each -> [B, H, W, 3]"""
    height, width = (-(-max(side) // STRIDE) * STRIDE for side in zip(*(image.shape[:2] for image in images)))
    padded = np.zeros((len(images), height, width, 3), np.uint8)
    for frame, image in zip(padded, images):
        frame[: image.shape[0], : image.shape[1]] = image
    return padded


def detect(model: RetinaNet, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the objects of each image, by score: boxes [n, 4] (x1 y1 x2 y2 in its pixels), scores [n], and the names of their
    classes. ``images``: arrays uint8 [H, W, 3] of any size, or encoded images (bytes). Raises DataError for others."""
    opened = [as_image(content, f"image {number}") for number, content in enumerate(images)]
    pixels = [resize(image, model.cfg) for image in opened]
    sizes = [p.shape[:2] for p in pixels], [image.size[::-1] for image in opened]
    with inference_mode(model, model.head["regression_head"].bbox_reg.weight) as dtype:
        within, original = (torch.tensor(s, device=model.scale.device).view(-1, 2) for s in sizes)
        x = model.normalised(torch.from_numpy(pad(pixels)).to(within.device), within).to(dtype)
        rows = model.select(model(x), x.shape[2:], within, original).cpu().numpy()
    objects = [row[row[:, 5] >= 0] for row in rows]
    return [{"boxes": o[:, :4], "scores": o[:, 4], "classes": [model.cfg.names[int(k)] for k in o[:, 5]]} for o in objects]
