"""The networks that the user brings to judge images: one whose features are compared (FID), and a CLIP, which compares with texts.

B images or texts, H and W places, F features, J channels in which a CLIP compares
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from data_prep.extras import import_extra
from hpcai.cli.report.picture import arrays
from hpcai.errors import ConfigError, DataError


class Statistics(NamedTuple):
    """Of the features of true images."""

    mean: Tensor
    """[F]"""
    covariance: Tensor
    """[F, F]"""


def statistics(path: Path) -> Statistics:
    """From an .npz with mu and sigma, as MLPerf and pytorch-fid write it. Raises DataError for other contents."""
    try:
        found = arrays(path, {"mu": "real F", "sigma": "real F F"})
        if not all(np.isfinite(x).all() for x in found.values()):
            raise DataError("mu or sigma has numbers that are not finite")
    except Exception as problem:  # zipfile has errors of its own for a damaged file
        raise DataError(f"{path}: {problem}; expected an .npz with mu [F] and sigma [F, F] of features") from problem
    return Statistics(*(torch.from_numpy(found[name].astype(np.float64)) for name in ("mu", "sigma")))


class Features:
    """Those of a network that ``package.module:name`` of the user's makes. Code that the user names is run, so that no file has to
    hold any: torch.export and TorchScript files hold programs, and the former are unpickled. The network gets images from 0 to 1,
    and brings them to the size that it wants itself."""

    def __init__(self, named: str, device: torch.device) -> None:
        module, _, name = named.partition(":")
        try:
            make = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ConfigError(f"features is {named!r}, which is not there ({problem}); give package.module:name") from problem
        network = make()
        if not isinstance(network, nn.Module):
            raise ConfigError(f"features: {named}() is a {type(network).__name__}; expected a torch module")
        self.named, self.network = named, network.to(device).eval().requires_grad_(False)

    def __call__(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, F]"""
        found = self.network(images)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            told = list(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise DataError(f"features: {self.named} makes {told} of {len(images)} images; expected [{len(images)}, F]")
        if not found.isfinite().all():
            raise DataError(f"features: {self.named} makes numbers that are not finite")
        return found


class Clip:
    """A CLIP, whose folder transformers has written: config.json, model.safetensors, preprocessor_config.json and its tokenizer."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        kind = _json(folder / "config.json").get("model_type")
        if kind != "clip":
            raise ConfigError(
                f"{folder}: model_type is {kind!r}, without projections of images and texts that can be compared; name a whole "
                "CLIP (model_type 'clip')"
            )
        sees = _json(folder / "preprocessor_config.json")
        try:
            size = sees["size"]
            self.side = int(size if isinstance(size, int) else size.get("shortest_edge") or size["height"])
            both = (torch.tensor(sees[name], dtype=torch.float32, device=device) for name in ("image_mean", "image_std"))
            self.mean, self.deviation = (x.view(1, 3, 1, 1) for x in both)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as problem:
            path = folder / "preprocessor_config.json"
            raise DataError(f"{path}: no size, image_mean and image_std of three channels ({problem!r}); fetch it again") from None
        transformers = import_extra("transformers", f"judging images by {folder}", "latents")
        words: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        try:
            network, told = transformers.CLIPModel.from_pretrained(folder, **words)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as problem:
            raise DataError(f"{folder}: cannot be read as a CLIP ({str(problem)[:300]}); save it again") from problem
        # transformers makes up what a file does not have.
        if missing := sorted(told["missing_keys"]):
            raise DataError(f"{folder}: has no {missing[0]}, one of {len(missing)} weights of a CLIP; save it again")
        if network.config.vision_config.image_size != self.side:
            asked = network.config.vision_config.image_size
            raise DataError(f"{folder}: preprocessor_config.json makes images of {self.side}, config.json wants {asked}")
        self.folder, self.device = folder, device
        self.network = network.float().to(device).eval().requires_grad_(False)
        self.length = int(network.config.text_config.max_position_embeddings)

    def images(self, images: Tensor) -> Tensor:
        """Images from 0 to 1, whose middle is taken.   [B, 3, H, W] -> [B, J]"""
        factor = self.side / min(images.shape[2:])
        height, width = (max(self.side, round(factor * n)) for n in images.shape[2:])
        x = functional.interpolate(images, (height, width), mode="bicubic", antialias=True).clamp(0, 1)
        top, left = (height - self.side) // 2, (width - self.side) // 2
        x = (x[:, :, top : top + self.side, left : left + self.side] - self.mean) / self.deviation
        found: Tensor = self.network.visual_projection(self.network.vision_model(pixel_values=x).pooler_output)
        return found

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Of a text that is too long its beginning.   B texts -> [B, J]"""
        words: dict[str, Any] = {"padding": True, "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        told = self.tokenizer(list(texts), **words).to(self.device)
        told = {name: told[name] for name in ("input_ids", "attention_mask")}
        found: Tensor = self.network.text_projection(self.network.text_model(**told).pooler_output)
        return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"holds a {type(found).__name__}")
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem}); name the folder of a CLIP as transformers saves it") from problem
    return found
