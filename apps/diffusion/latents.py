"""Latents of images as samples, each with its text.

L channels of a latent, h w its pixels, N tokens of a text, J channels of a token
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.diffusion.settings import Config
from hpcai.data import Rows
from hpcai.data.hdf5 import Selection
from hpcai.data.index import INDEX, read_index
from hpcai.data.splits import Samples
from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import Batch, Diffusion, DiffusionConfig, LatentsConfig
from hpcai.programs import command_of

REMEDY = f"make data with: {command_of('data_prep.latents')}, or set data.directory"
_EMPTY_TEXT = "nothing.npz"


class EncodedImages(Samples):
    """Images encoded by an autoencoder, means and logarithms of variances [2L, h, w], and their texts, tokens [N, J] and pooled
    [J], float16. ``count``: the first samples only. ``box``: the shard of an image of this rank."""

    def __init__(self, rows: Rows, count: int | None = None, box: Sequence[slice] = ()) -> None:
        super().__init__(rows, count)
        self.box, self.replicated = box, not box

    def selection(self, index: int, epoch: int) -> Selection | None:
        return {"moments": (slice(None), *self.box)} if self.box else None

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        number, when = (np.asarray(value, np.int64) for value in (index, epoch))
        texts = {name: values.get(name) for name in ("tokens", "pooled", "sizes", "level")}
        return Batch(values["moments"], number, when, **texts)


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the index of a split, or return {} if it has none."""
    return read_index(folder / INDEX)[0] if (folder / INDEX).is_file() else {}


def layouts(cfg: Config, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return dtypes and shapes of the datasets that the network of ``cfg`` reads, by the ``metadata`` of the index. Raises
    DataError if the data are for another network, and ConfigError for settings that are for images of one size."""
    network, channels = cfg.model.network, latent_channels(cfg.model)
    if metadata["latents"] != channels:
        has = f"latents of {metadata['latents']} channels, made by {metadata['vae']}"
        raise DataError(f"{folder}: {has}; the network of model expects {channels}. Encode the images with another autoencoder")
    sides = (None, None) if metadata.get("buckets") else metadata["size"]
    limits = {"model.dit": cfg.model.dit, "data.shards": cfg.data.shards > 1, "mesh.height": cfg.mesh.height > 1,
              "data.scored": cfg.data.scored}  # fmt: skip
    if sides == (None, None) and (named := [name for name, value in limits.items() if value]):
        raise ConfigError(f"{folder}: latents of several sizes; {named[0]} is for one: unset it, or make data without --buckets")
    fields: dict[str, Any] = {"moments": ("float16", (2 * channels, *sides))}
    for name in ("tokens", "pooled"):
        expected = getattr(network, name, None)
        if expected is None:
            continue
        stored = metadata.get(name)
        stored_channels = stored[-1] if isinstance(stored, list) else stored
        if stored_channels != expected:
            texts = "no texts" if stored is None else f"{name} of {stored_channels} channels, of {', '.join(metadata['encoders'])}"
            raise DataError(f"{folder}: {texts}; the network of model expects {name} of {expected}. Encode with another encoder")
        fields[name] = ("float16", tuple(stored) if isinstance(stored, list) else (stored,))
    if getattr(network, "field", 0) or getattr(network, "parameters", 0) or getattr(network, "classes", None):
        raise DataError(f"{folder}: latents with texts; the network of model also expects fields, parameters or classes")
    if getattr(network, "sizes", 0):
        if "sizes" not in metadata.get("fields", {}):
            command = f"{command_of('data_prep.latents')} convert SOURCE OUT --model DIR"
            raise DataError(f"{folder}: no sizes of images, which the network of model takes; encode images anew with: {command}")
        fields["sizes"] = ("int64", (6,))
    return fields | ({"level": ("int64", ())} if "level" in metadata.get("fields", {}) else {})


def latent_channels(model: DiffusionConfig) -> int:
    inputs: int = model.network.inputs
    return inputs // 4 if model.flux is not None else inputs


def complete_model_config(cfg: Config, rows: Rows) -> DiffusionConfig:
    """Return the settings of the model with the size of a latent, its scaling and its encoders. Raises DataError if settings
    contradict the data."""
    model, folder, metadata = cfg.model, rows.folder, rows.metadata
    size = latent_channels(model), *metadata["size"]
    if model.size and model.size != size:
        actual, expected = list(size), list(model.size)
        raise DataError(f"{folder}: latents are {actual}, model.size is {expected}; leave it out, or set data.directory")
    has_text = getattr(model.network, "tokens", None) is not None
    latents = LatentsConfig(
        scale=metadata["scale"], shift=metadata["shift"], vae=metadata["vae"],
        tokens=tuple(metadata["tokens"]) if has_text else None,
        pooled=metadata["pooled"] if getattr(model.network, "pooled", None) else None,
        encoders=tuple(metadata["encoders"]) if has_text else (),
    )  # fmt: skip
    if model.latents is not None and model.latents != latents:
        configured, stored = (x.model_dump() for x in (model.latents, latents))
        name = next(name for name, value in stored.items() if configured[name] != value)
        differ = f"{name} of its latents is {stored[name]}, model.latents.{name} is {configured[name]}"
        raise DataError(f"{folder}: {differ}; leave it out, or set data.directory")
    return model.model_copy(update={"size": size, "latents": latents})


def set_empty_text(model: Diffusion, directory: Path) -> None:
    """Copy the embedding of the empty text into ``model``. Raises DataError if the data have none, or one of another size."""
    path = directory / _EMPTY_TEXT
    if model.no_tokens is None and model.no_pooled is None:
        return
    if not path.is_file():
        raise DataError(f"{path}: does not exist; it holds the empty text, which data_prep.latents writes beside its splits")
    with np.load(path, allow_pickle=False) as file:
        keys = {"no_tokens": "tokens", "no_pooled": "pooled"}
        copy_buffers(model, keys, file, f"{path}: the empty text", "encode the texts again")


def copy_buffers(model: Diffusion, keys: Mapping[str, str], stored: Mapping[str, np.ndarray], where: str, advice: str) -> None:
    """Copy stored arrays, by their ``keys``, into the buffers that ``model`` has. Raises DataError for an array that is missing,
    not finite or of another size."""
    for name, key in keys.items():
        if (x := getattr(model, name)) is not None:
            array = stored[key] if key in stored else np.empty(0)
            if array.shape != tuple(x.shape) or not np.isfinite(array).all():
                raise DataError(f"{where}: {key} is {list(array.shape)}, expected {list(x.shape)}, finite; {advice}")
            x.copy_(torch.from_numpy(array.astype(np.float32)))
