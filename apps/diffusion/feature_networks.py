"""Networks of the user that score images: one for the features of FID, and a CLIP for the agreement with texts.

B images or texts, H and W pixels, F features, J channels of CLIP's joint embedding
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from data_prep.encoders import load_pretrained
from hpcai.cli.report.picture import arrays
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import check_fields, read_object

_EXPECTED = "settings of a CLIP saved by transformers"


def read_statistics(path: Path) -> tuple[Tensor, Tensor]:
    """Return mean [F] and covariance [F, F] of the features of true images from an .npz with mu and sigma, as written by MLPerf and
    pytorch-fid. Raises DataError for other contents."""
    try:
        content = arrays(path, {"mu": "real F", "sigma": "real F F"})
        if not all(np.isfinite(x).all() for x in content.values()):
            raise DataError("mu or sigma has elements that are not finite")
    except Exception as problem:  # zipfile raises its own errors for a damaged file
        raise DataError(f"{path}: {problem}; expected an .npz with mu [F] and sigma [F, F] of features") from problem
    mean, covariance = (torch.from_numpy(content[name].astype(np.float64)) for name in ("mu", "sigma"))
    return mean, covariance


class Features:
    """Features of a network that the user's ``package.module:name`` returns. It is imported code rather than a torch.export or
    TorchScript file, since these hold programs, and the former are unpickled. The network gets images in [0, 1] of any size, and
    resizes them itself."""

    def __init__(self, named: str, device: torch.device) -> None:
        module, _, name = named.partition(":")
        try:
            make = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigError(f"features is {named!r}, which cannot be imported ({problem}); give package.module:name") from problem
        network = make()
        if not isinstance(network, nn.Module):
            raise ConfigError(f"features: {named}() is a {type(network).__name__}; expected a torch module")
        self.named, self.network = named, network.to(device).eval().requires_grad_(False)

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, F]"""
        features = self.network(images)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(images):
            description = list(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise DataError(f"features: {self.named} returned {description} for {len(images)} images; expected [{len(images)}, F]")
        if not features.isfinite().all():
            raise DataError(f"features: {self.named} returned elements that are not finite")
        return features


class Clip:
    """A CLIP from a folder of transformers: config.json, model.safetensors, preprocessor_config.json and its tokenizer."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        kind = read_object(folder / "config.json", _EXPECTED, ConfigError).get("model_type")
        if kind != "clip":
            advice = "name a full CLIP (model_type 'clip')"
            raise ConfigError(f"{folder}: model_type is {kind!r}, without a joint embedding of images and texts; {advice}")
        preprocessor = read_object(folder / "preprocessor_config.json", _EXPECTED, ConfigError)
        with check_fields(folder / "preprocessor_config.json", "size, image_mean and image_std of three channels", DataError):
            size = preprocessor["size"]
            self.side = int(size if isinstance(size, int) else size.get("shortest_edge") or size["height"])
            both = (np.array(preprocessor[name], np.float32).reshape(1, 3, 1, 1) for name in ("image_mean", "image_std"))
            self.mean, self.deviation = (torch.from_numpy(x).to(device) for x in both)
        network, self.tokenizer = load_pretrained(folder, folder, "CLIPModel", "scoring images", use_safetensors=True)
        if network.config.vision_config.image_size != self.side:
            image_size = network.config.vision_config.image_size
            raise DataError(f"{folder}: preprocessor_config.json resizes to {self.side}, config.json has {image_size}")
        self.folder, self.device = folder, device
        self.network = network.float().to(device).eval().requires_grad_(False)
        self.length = int(network.config.text_config.max_position_embeddings)

    def embed_images(self, images: Tensor) -> Tensor:
        """Embed the center crops of images in [0, 1].   [B, 3, H, W] -> [B, J]"""
        factor = self.side / min(images.shape[2:])
        height, width = (max(self.side, round(factor * n)) for n in images.shape[2:])
        x = functional.interpolate(images, (height, width), mode="bicubic", antialias=True).clamp(0, 1)
        top, left = (height - self.side) // 2, (width - self.side) // 2
        x = (x[:, :, top : top + self.side, left : left + self.side] - self.mean) / self.deviation
        return self.network.visual_projection(self.network.vision_model(pixel_values=x).pooler_output)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts, truncated to the maximum length.   B texts -> [B, J]"""
        kwargs: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        inputs = self.tokenizer(list(texts), **kwargs).to(self.device)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return self.network.text_projection(self.network.text_model(**inputs).pooler_output)
