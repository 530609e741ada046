"""The frozen networks that make latents of images and vectors of captions: folders as diffusers and transformers have them.

B captions   N tokens of J numbers   J' numbers of a caption as a whole
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.extras import import_extra
from hpcai.dist.environment import read_rank_info
from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion import VAE, VAEConfig, load_network

T5_LENGTH = 256                                 # tokens that Flux.1-schnell and MLPerf give it
CLASSES = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


@dataclass(frozen=True)
class Networks:
    """The folders of networks, and how they work. A text encoder's folder comes with that of its tokenizer."""

    vae: Path | None
    tokens: tuple[Path, Path] | None
    pooled: tuple[Path, Path] | None
    length: int | None                          # tokens of a caption; None for as many as the encoder usually gets
    cut: bool                                   # captions that are longer
    precision: str
    device: str

    def identities(self) -> tuple[str | None, list[str]]:
        """Of the autoencoder, and of the encoders: name and the first digits of the SHA-256 of the weights."""
        vae = None if self.vae is None else identity(self.vae)
        return vae, [identity(both[0]) for both in (self.tokens, self.pooled) if both is not None]


def chosen(
    model: Path | None, vae: Path | None, tokens: Path | None, pooled: Path | None, length: int | None, cut: bool,
    precision: str, device: str,
) -> Networks:  # fmt: skip
    """Networks named singly, or by the folder of a pipeline. Raises ConfigError."""
    both: dict[str, tuple[Path, Path] | None] = {
        name: None if folder is None else (folder, _tokenizer(folder)) for name, folder in (("tokens", tokens), ("pooled", pooled))
    }
    if model is not None:
        if vae or tokens or pooled:
            raise ConfigError("--model and --vae, --tokens, --pooled: expected a whole pipeline, or its parts")
        vae, first, second = model / "vae", model / "text_encoder", model / "text_encoder_2"
        if second.is_dir():
            if _kind(second) != "t5":
                raise ConfigError(f"{second}: {_kind(second)}, expected T5, whose tokens go beside a pooled CLIP as in Flux.1; "
                                  "name the encoders singly by --tokens and --pooled")  # fmt: skip
            both = {"tokens": (second, model / "tokenizer_2"), "pooled": (first, model / "tokenizer")}
        elif first.is_dir():
            both["tokens"] = first, model / "tokenizer"
    for folder in [one for one in (vae, *(both["tokens"] or ()), *(both["pooled"] or ())) if one is not None]:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name one as diffusers or transformers save it")
    if both["pooled"] and (kind := _kind(both["pooled"][0])) == "t5":
        raise ConfigError(f"{both['pooled'][0]}: {kind} has no pooled output; name a CLIP text encoder by --pooled")
    if both["tokens"]:
        _kind(both["tokens"][0])
    if device == "auto":
        device = f"cuda:{(read_rank_info().local_rank or 0) % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return Networks(vae, both["tokens"], both["pooled"], length, cut, precision, device)


def _tokenizer(folder: Path) -> Path:
    """The folder of the tokenizer of an encoder: the same, or its neighbour in a pipeline."""
    beside = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model")
    return folder if any((folder / name).is_file() for name in names) or beside == folder else beside


def _kind(folder: Path) -> str:
    path = folder / "config.json"
    try:
        kind = json.loads(path.read_text())["model_type"]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise ConfigError(f"{path}: no settings of an encoder ({problem!r}); expected a folder of transformers") from None
    if kind not in CLASSES:
        raise ConfigError(f"{path}: model_type is {kind!r}; expected one of {', '.join(CLASSES)}")
    return "t5" if kind == "t5" else "clip"


@lru_cache(8)
def identity(folder: Path) -> str:
    """Name of a folder, and the first digits of the SHA-256 of its weights."""
    found = hashlib.sha256()
    for path in _weights(folder):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                found.update(block)
    return f"{folder.resolve().name} {found.hexdigest()[:12]}"


def _weights(folder: Path) -> list[Path]:
    """The files that are read of a folder, in order."""
    for stem in ("diffusion_pytorch_model.safetensors", "model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{stem}.index.json").is_file():
            try:
                return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
            except (ValueError, LookupError, AttributeError, TypeError) as problem:
                raise ConfigError(f"{index}: no weight_map ({problem!r}); fetch or save the folder again") from None
        if (folder / stem).is_file():
            return [folder / stem]
    raise ConfigError(f"{folder}: holds no weights (model.safetensors); fetch or save the folder again")


class Text:
    """An encoder of captions: to its last hidden states, or to its pooled output."""

    def __init__(self, folder: Path, tokenizer: Path, pooled: bool, asked: Networks) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        transformers = import_extra("transformers", f"encoding captions by {folder}", "latents")
        transformers.logging.set_verbosity_error()          # it lists what a whole CLIP has besides the encoder; we ask what lacks
        self.folder, self.pooled, self.cut, self.device = folder, pooled, asked.cut, asked.device
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            cls = getattr(transformers, CLASSES[kind])
            network, told = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as problem:
            found = f"cannot be read with its tokenizer {tokenizer} ({str(problem)[:300]})"
            raise DataError(f"{folder}: {found}; save it again") from problem
        # transformers makes up what a file does not have.
        if missing := sorted(told["missing_keys"]):
            raise DataError(f"{folder}: has no {missing[0]}, one of {len(missing)} weights of a {CLASSES[kind]}; save it again")
        if self.tokenizer.pad_token is None:
            raise DataError(f"{tokenizer}: tells no pad_token, which fills up captions; name it in tokenizer_config.json")
        self.network = network.to(device=asked.device, dtype=getattr(torch, asked.precision)).eval().requires_grad_(False)
        most = T5_LENGTH if kind == "t5" else int(network.config.max_position_embeddings)
        length = most if pooled or asked.length is None else asked.length
        if kind != "t5" and length > most:
            raise ConfigError(f"--length {length}: {folder} knows {most} places")
        self.length = length
        self.shape = (network.config.hidden_size,) if pooled else (length, network.config.hidden_size)

    def encode(self, captions: Sequence[str], names: Sequence[str]) -> tuple[Tensor, int]:
        """Vectors [B, N, J] or [B, J'], and how many captions were cut. All tokens count alike, those that fill up too, as in the
        pipelines of diffusers and in MLPerf. Raises DataError for captions that are too long."""
        lengths = [len(ids) for ids in self.tokenizer(list(captions), verbose=False)["input_ids"]]
        long = [number for number, length in enumerate(lengths) if length > self.length]
        if long and not self.cut:
            found = f"a caption of {lengths[long[0]]} tokens, {self.folder} takes {self.length}"
            raise DataError(f"{names[long[0]]}: {found}; shorten it, or have such be cut (long)")
        words: dict[str, Any] = {"padding": "max_length", "max_length": self.length, "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(list(captions), **words)["input_ids"].to(self.device)
        with torch.inference_mode():
            told = self.network(input_ids=ids)
        return (told.pooler_output if self.pooled else told.last_hidden_state).float().cpu(), len(long)


@dataclass(frozen=True)
class Opened:
    """Networks that are there."""

    asked: Networks
    vae: VAE | None
    texts: dict[str, Text]

    def moments(self, images: Tensor) -> Tensor:
        """Means, and logarithms of variances from -30 to 20.   [B, 3, H, W] -> [B, 2L, h, w]"""
        assert self.vae is not None
        with torch.inference_mode():
            found = self.vae.encode(images.to(self.asked.device, getattr(torch, self.asked.precision)))
            return torch.cat((found.mean, found.logvar), 1).float().cpu()

    def decoded(self, means: Tensor) -> Tensor:
        """[B, L, h, w] -> [B, 3, H, W], -1 to 1"""
        assert self.vae is not None
        with torch.inference_mode():
            return self.vae.decode(means.to(self.asked.device, getattr(torch, self.asked.precision))).float().clamp(-1, 1).cpu()


def _autoencoder(folder: Path) -> VAE:
    found = load_network(folder)
    if not isinstance(found, VAE):
        raise ConfigError(f"{folder}: holds a {type(found).__name__}, expected an autoencoder")
    return found.requires_grad_(False)


@lru_cache(8)
def settings(vae: Path) -> VAEConfig:
    return _autoencoder(vae).cfg


@lru_cache(1)
def opened(asked: Networks) -> Opened:
    vae = None if asked.vae is None else _autoencoder(asked.vae).to(device=asked.device, dtype=getattr(torch, asked.precision))
    named = {"tokens": asked.tokens, "pooled": asked.pooled}
    return Opened(asked, vae, {name: Text(*both, name == "pooled", asked) for name, both in named.items() if both is not None})
