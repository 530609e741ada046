"""Classes of any images.   N images, H W an image, S its size in the network"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpcai.data.images import Geometry, as_image, center_crop_box, resize_crop
from hpcai.models.resnet.config import ResNetConfig
from hpcai.models.resnet.model import ResNet
from hpcai.nn.inference import inference_mode


def classify(model: ResNet, images: Sequence[Any]) -> list[dict[str, float]]:
    """Return the probability of each class, {name: value} for each image, the most probable class first.

    ``images``: arrays uint8 [H, W, 3] of any size, or encoded images (bytes, such as the content of a .png), each resized and
    cropped as in evaluation. Probabilities are softmax(logits/``cfg.temperature``). Raises DataError for other images.
    """
    cfg = model.cfg
    with inference_mode(model, model.fc.weight) as dtype:
        pixels = torch.from_numpy(prepare_images(images, cfg)).to(model.scale.device)
        logits = model(model.normalised(pixels).to(dtype)).double()
    rows = (logits / cfg.temperature).softmax(1).tolist()
    return [dict(sorted(zip(cfg.names, row), key=lambda pair: -pair[1])) for row in rows]


def prepare_images(images: Sequence[Any], cfg: ResNetConfig) -> np.ndarray:
    """Return images, each resized and cropped as in evaluation: arrays uint8 [H, W, 3], or encoded ones. Raises DataError for
    others.   [N, S, S, 3]"""
    result = np.empty((len(images), cfg.size, cfg.size, 3), np.uint8)
    for number, content in enumerate(images):
        image = as_image(content, f"image {number}")
        h, w, top, left = center_crop_box(image.height, image.width, cfg.resize, cfg.size)
        result[number] = resize_crop(image, Geometry((0, 0, image.height, image.width), (h, w), (top, left)), cfg.size)
    return result
