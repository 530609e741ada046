"""Frozen networks that encode images to latents and captions to vectors, from folders of diffusers and transformers.

B captions   N tokens of J elements   J' elements of a pooled text vector
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.data.layout import parse_errors
from hpcai.dist.environment import read_rank_info
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import read_object
from hpcai.lazy import import_optional
from hpcai.models.diffusion import VAE, VAEConfig, load_network
from hpcai.nn.safetensors_files import find_weights, read_weight_map

T5_LENGTH = 256                                 # tokens of a caption in Flux.1-schnell and MLPerf
CLASSES = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


@dataclass(frozen=True)
class NetworkConfig:
    """The folders of the networks, and the settings of inference. A text encoder is a pair of its folder and its tokenizer's."""

    vae: Path | None
    tokens: tuple[Path, Path] | None
    pooled: tuple[Path, Path] | None
    length: int | None                          # tokens of a caption; None: the usual number of the encoder
    truncate: bool                              # longer captions, which otherwise raise
    precision: str
    device: str

    def identities(self) -> tuple[str | None, list[str]]:
        """Return the identities of the autoencoder and of the text encoders."""
        vae = None if self.vae is None else identity(self.vae)
        return vae, [identity(pair[0]) for pair in (self.tokens, self.pooled) if pair is not None]


def resolve_networks(
    model: Path | None, vae: Path | None, tokens: Path | None, pooled: Path | None, length: int | None, truncate: bool,
    precision: str, device: str,
) -> NetworkConfig:  # fmt: skip
    """Return the networks of single folders, or of the folder of a pipeline. Raises ConfigError if a folder does not fit."""
    encoders: dict[str, tuple[Path, Path] | None] = {
        name: None if path is None else (path, _tokenizer_folder(path)) for name, path in (("tokens", tokens), ("pooled", pooled))
    }
    if model is not None:
        if vae or tokens or pooled:
            raise ConfigError("--model and --vae, --tokens, --pooled: expected a pipeline, or its parts")
        vae, first, second = model / "vae", model / "text_encoder", model / "text_encoder_2"
        if second.is_dir():
            if _encoder_type(second) != "t5":
                raise ConfigError(f"{second}: {_encoder_type(second)}, expected T5, whose tokens go beside a pooled CLIP as in "
                                  "Flux.1; name the encoders singly by --tokens and --pooled")  # fmt: skip
            encoders = {"tokens": (second, model / "tokenizer_2"), "pooled": (first, model / "tokenizer")}
        elif first.is_dir():
            encoders["tokens"] = first, model / "tokenizer"
    for folder in [path for path in (vae, *(encoders["tokens"] or ()), *(encoders["pooled"] or ())) if path is not None]:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name one as diffusers or transformers save it")
    if encoders["pooled"] and (kind := _encoder_type(encoders["pooled"][0])) == "t5":
        raise ConfigError(f"{encoders['pooled'][0]}: {kind} has no pooled output; name a CLIP text encoder by --pooled")
    if encoders["tokens"]:
        _encoder_type(encoders["tokens"][0])
    if device == "auto":
        device = f"cuda:{(read_rank_info().local_rank or 0) % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return NetworkConfig(vae, encoders["tokens"], encoders["pooled"], length, truncate, precision, device)


def _tokenizer_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer of an encoder: the same folder, or the one beside it in a pipeline."""
    beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model")
    return folder if any((folder / name).is_file() for name in names) or beside == folder else beside


def _encoder_type(folder: Path) -> str:
    path = folder / "config.json"
    kind = read_object(path, "the settings of an encoder in a folder of transformers", ConfigError).get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ConfigError(f"{path}: model_type is {kind!r}; expected one of {', '.join(CLASSES)}")
    return "t5" if kind == "t5" else "clip"


@lru_cache(8)
def identity(folder: Path) -> str:
    """Return the name of a folder, and the first digits of the SHA-256 of its weights."""
    digest = hashlib.sha256()
    for path in _weight_files(folder):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return f"{folder.resolve().name} {digest.hexdigest()[:12]}"


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder, in order."""
    for name in ("diffusion_pytorch_model", "safetensors"), ("model", "safetensors"), ("pytorch_model", "bin"):
        if (path := find_weights(folder, *name)) is not None:
            return sorted({folder / file for file in read_weight_map(path).values()}) if path.suffix == ".json" else [path]
    raise ConfigError(f"{folder}: holds no weights (model.safetensors); fetch or save the folder again")


def load_pretrained(folder: Path, tokenizer: Path, name: str, purpose: str, **kwargs: Any) -> tuple[Any, Any]:
    """Load a network of the class ``name`` of transformers, and a tokenizer. Raises DataError if weights are missing, which
    transformers initializes at random, or the files cannot be read."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers = import_optional("transformers", f"{purpose} by {folder} needs", "latents")
    transformers.logging.set_verbosity_error()              # it lists all unused weights of CLIP
    kwargs["variant"] = next((part for part in ("fp16", "bf16") if f".{part}" in _weight_files(folder)[0].name), None)
    with parse_errors(folder, "save it again", f"cannot be read as a {name} with its tokenizer {tokenizer}"):
        words = transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        cls = getattr(transformers, name)
        network, info = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True, **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise DataError(f"{folder}: has no {missing[0]}, one of {len(missing)} weights of a {name}; save it again")
    return network, words


class TextEncoder:
    """A text encoder that returns its last hidden states, or its pooled output."""

    def __init__(self, folder: Path, tokenizer: Path, pooled: bool, cfg: NetworkConfig) -> None:
        self.folder, self.pooled, self.truncate, self.device = folder, pooled, cfg.truncate, cfg.device
        kind = read_object(folder / "config.json", "the settings of an encoder", ConfigError)["model_type"]
        network, self.tokenizer = load_pretrained(folder, tokenizer, CLASSES[kind], "encoding captions")
        if self.tokenizer.pad_token is None:
            raise DataError(f"{tokenizer}: has no pad_token to pad captions; name it in tokenizer_config.json")
        self.network = network.to(device=cfg.device, dtype=getattr(torch, cfg.precision)).eval().requires_grad_(False)
        max_length = T5_LENGTH if kind == "t5" else int(network.config.max_position_embeddings)
        length = max_length if pooled or cfg.length is None else cfg.length
        if kind != "t5" and length > max_length:
            raise ConfigError(f"--length {length}: {folder} has {max_length} positions")
        self.length = length
        self.shape = (network.config.hidden_size,) if pooled else (length, network.config.hidden_size)

    def encode(self, captions: Sequence[str], names: Sequence[str]) -> tuple[Tensor, int]:
        """Return vectors [B, N, J] or [B, J'], and the number of truncated captions. There is no attention mask: padding tokens are
        attended to, as in the pipelines of diffusers and in MLPerf. Raises DataError if a caption is too long."""
        long = sum(map(self.is_truncated, captions, names))
        kwargs: dict[str, Any] = {"padding": "max_length", "max_length": self.length, "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(list(captions), **kwargs)["input_ids"].to(self.device)
        with torch.inference_mode():
            output = self.network(input_ids=ids)
        return (output.pooler_output if self.pooled else output.last_hidden_state).float().cpu(), long

    def is_truncated(self, caption: str, name: str) -> bool:
        """Return whether a caption is too long. Raises DataError if it is, and is not to be truncated."""
        length = len(self.tokenizer(caption, verbose=False)["input_ids"])
        if length > self.length and not self.truncate:
            reason = f"a caption of {length} tokens, {self.folder} takes {self.length}"
            raise DataError(f"{name}: {reason}; shorten it, or truncate (long: cut)")
        return length > self.length


@dataclass(frozen=True)
class LoadedNetworks:
    """The loaded networks of a configuration."""

    cfg: NetworkConfig
    vae: VAE | None
    text_encoders: dict[str, TextEncoder]

    def encode(self, images: Sequence[Tensor]) -> Tensor:
        """Return means, and logarithms of variances from -30 to 20.   Shape: B times [3, H, W] -> [B, 2L, h, w]"""
        assert self.vae is not None
        with torch.inference_mode():
            latents = self.vae.encode(torch.stack(tuple(images)).to(self.cfg.device, getattr(torch, self.cfg.precision)))
            return torch.cat((latents.mean, latents.logvar), 1).float().cpu()

    def decode(self, means: Tensor) -> Tensor:
        """Decode latents to images, -1 to 1.   Shape: [B, L, h, w] -> [B, 3, H, W]"""
        assert self.vae is not None
        with torch.inference_mode():
            return self.vae.decode(means.to(self.cfg.device, getattr(torch, self.cfg.precision))).float().clamp(-1, 1).cpu()


def _load_vae(folder: Path) -> VAE:
    vae = load_network(folder)
    if not isinstance(vae, VAE):
        raise ConfigError(f"{folder}: holds a {type(vae).__name__}, expected an autoencoder")
    return vae.requires_grad_(False)


@lru_cache(8)
def vae_config(vae: Path) -> VAEConfig:
    return _load_vae(vae).cfg


@lru_cache(1)
def load_networks(cfg: NetworkConfig) -> LoadedNetworks:
    vae = None if cfg.vae is None else _load_vae(cfg.vae).to(device=cfg.device, dtype=getattr(torch, cfg.precision))
    folders = {"tokens": cfg.tokens, "pooled": cfg.pooled}
    return LoadedNetworks(cfg, vae, {k: TextEncoder(*pair, k == "pooled", cfg) for k, pair in folders.items() if pair is not None})
