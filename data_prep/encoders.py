"""Frozen networks that encode images to latents and captions to vectors, from folders of diffusers and transformers.

B captions   N tokens of J elements   J' elements of a pooled text vector
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcai.data.layout import parse_errors
from hpcai.dist.environment import read_rank_info
from hpcai.errors import ConfigError, DataError
from hpcai.json_file import check_fields, read_object
from hpcai.lazy import import_optional
from hpcai.models.diffusion import VAE, VAEConfig, load_network
from hpcai.nn.safetensors_files import find_weights, read_weight_map

T5_LENGTH = 256                                 # tokens of a caption in Flux.1-schnell and MLPerf
CLASSES = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}
Pair = tuple[Path, Path]


@dataclass(frozen=True)
class NetworkConfig:
    """The folders of the networks, and the settings of inference. A text encoder is a pair of its folder and its tokenizer's."""

    vae: Path | None
    tokens: tuple[Pair, ...] | None
    pooled: tuple[Pair, ...] | None
    length: int | None                          # tokens of a caption; None: the usual number of the encoder
    truncate: bool                              # longer captions, which otherwise raise
    precision: str
    device: str
    pipeline: str = ""                          # sdxl and sd3 combine several encoders
    channels: int = 0                           # of the tokens of sd3 without a T5
    zero_empty: bool = False                    # the vectors of the empty caption are 0

    def identities(self) -> tuple[str | None, list[str]]:
        """Return the identities of the autoencoder and of the text encoders."""
        pairs = [*(self.tokens or ()), *(self.pooled or ())]
        vae = None if self.vae is None else identity(self.vae)
        return vae, [identity(folder) for folder, _ in (dict.fromkeys(pairs) if self.pipeline else pairs)]


def resolve_networks(
    model: Path | None, vae: Path | None, tokens: Path | None, pooled: Path | None, length: int | None, truncate: bool,
    precision: str, device: str,
) -> NetworkConfig:  # fmt: skip
    """Return the networks of single folders, or of the folder of a pipeline. Raises ConfigError if a folder does not fit."""
    given = {"tokens": tokens, "pooled": pooled}
    parts: dict[str, tuple[Pair, ...]] = {name: ((path, _tokenizer_folder(path)),) for name, path in given.items() if path}
    combined: dict[str, Any] = {}
    if model is not None:
        if vae or tokens or pooled:
            raise ConfigError("--model and --vae, --tokens, --pooled: expected a pipeline, or its parts")
        vae, numbers = model / "vae", ("", "_2", "_3")
        first, second, third = ((model / f"text_encoder{number}", model / f"tokenizer{number}") for number in numbers)
        if second[0].is_dir() and _encoder_type(second[0]) == "t5":
            parts = {"tokens": (second,), "pooled": (first,)}
        elif second[0].is_dir():
            combined = _describe_pipeline(model)
            is_sd3 = combined["pipeline"] == "sd3"
            parts = {"tokens": (first, second, *((third,) if is_sd3 and third[0].is_dir() else ())),
                     "pooled": (first, second) if is_sd3 else (second,)}  # fmt: skip
        elif first[0].is_dir():
            parts["tokens"] = (first,)
    pairs = [pair for group in parts.values() for pair in group]
    for folder in [path for path in (vae, *chain(*pairs)) if path is not None]:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; name one as diffusers or transformers save it")
    kinds = {folder: _encoder_type(folder) for folder, _ in pairs}
    for folder, _ in parts.get("pooled", ()):
        if kinds[folder] == "t5":
            raise ConfigError(f"{folder}: t5 has no pooled output; name a CLIP text encoder by --pooled")
    if combined and [*kinds.values()] not in (["clip", "clip"], ["clip", "clip", "t5"]):
        raise ConfigError(f"{model}: text encoders are {', '.join(kinds.values())}; expected two CLIPs, of SD3 also a T5")
    if device == "auto":
        device = f"cuda:{(read_rank_info().local_rank or 0) % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    return NetworkConfig(vae, parts.get("tokens"), parts.get("pooled"), length, truncate, precision, device, **combined)


def _describe_pipeline(model: Path) -> dict[str, Any]:
    """Return the settings of a pipeline with two CLIPs, by its model_index.json, or else by the class of its first encoder."""
    path, first = model / "model_index.json", model / "text_encoder" / "config.json"
    index = read_object(path, "the settings of a pipeline of diffusers", ConfigError) if path.is_file() else {}
    classes = read_object(first, "the settings of an encoder", ConfigError).get("architectures")
    default = "StableDiffusion3" if classes == ["CLIPTextModelWithProjection"] else "StableDiffusionXL"
    if not (name := str(index.get("_class_name", default))).startswith(("StableDiffusionXL", "StableDiffusion3")):
        raise ConfigError(f"{path}: a {name}, expected SDXL or SD3; name the encoders singly by --tokens and --pooled")
    if not name.startswith("StableDiffusion3"):
        return {"pipeline": "sdxl", "zero_empty": bool(index.get("force_zeros_for_empty_prompt", bool(index)))}
    if (model / "text_encoder_3").is_dir():
        return {"pipeline": "sd3"}
    cfg = read_object(path := model / "transformer" / "config.json", expected := "the settings of SD3's transformer", ConfigError)
    with check_fields(path, f"{expected}, with joint_attention_dim", ConfigError):
        return {"pipeline": "sd3", "channels": int(cfg["joint_attention_dim"])}


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


class TextNetwork:
    """A text encoder with its tokenizer: hidden states [B, N, J], the last or of a pipeline the last but one, and the pooled output
    [B, J'], of a pipeline projected."""

    def __init__(self, pair: Pair, full_length: bool, cfg: NetworkConfig) -> None:
        (self.folder, tokenizer), self.truncate, self.device = pair, cfg.truncate, cfg.device
        kind = read_object(self.folder / "config.json", "the settings of an encoder", ConfigError)["model_type"]
        self.in_pipeline = bool(cfg.pipeline) and kind != "t5"
        self.is_projected = self.in_pipeline and pair in (cfg.pooled or ())
        name = CLASSES[kind] + ("WithProjection" if self.is_projected else "")
        network, self.tokenizer = load_pretrained(self.folder, tokenizer, name, "encoding captions")
        if self.tokenizer.pad_token is None:
            raise DataError(f"{tokenizer}: has no pad_token to pad captions; name it in tokenizer_config.json")
        self.network = network.to(device=cfg.device, dtype=getattr(torch, cfg.precision)).eval().requires_grad_(False)
        max_length = T5_LENGTH if kind == "t5" else int(network.config.max_position_embeddings)
        is_full = full_length or (self.in_pipeline and cfg.pipeline == "sd3")
        self.length = max_length if is_full or cfg.length is None else cfg.length
        if kind != "t5" and self.length > max_length:
            raise ConfigError(f"--length {self.length}: {self.folder} has {max_length} positions")

    def encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Return hidden states and pooled output. There is no attention mask: padding tokens are attended to, as in the pipelines
        of diffusers and in MLPerf."""
        kwargs: dict[str, Any] = {"padding": "max_length", "max_length": self.length, "truncation": True, "return_tensors": "pt"}
        ids = self.tokenizer(list(captions), **kwargs)["input_ids"].to(self.device)
        with torch.inference_mode():
            output = self.network(input_ids=ids, output_hidden_states=self.in_pipeline)
        states = output.hidden_states[-2] if self.in_pipeline else output.last_hidden_state
        pooled = output.get("text_embeds" if self.is_projected else "pooler_output")
        return states.float().cpu(), None if pooled is None else pooled.float().cpu()

    def is_truncated(self, caption: str, name: str) -> bool:
        """Return whether a caption is too long. Raises DataError if it is, and is not to be truncated."""
        length = len(self.tokenizer(caption, verbose=False)["input_ids"])
        if length > self.length and not self.truncate:
            reason = f"a caption of {length} tokens, {self.folder} takes {self.length}"
            raise DataError(f"{name}: {reason}; shorten it, or truncate (long: cut)")
        return length > self.length


class TextEncoder:
    """The tokens or the pooled vector of one text encoder, or of those of a pipeline: channels of CLIPs are concatenated. In SD3
    tokens of T5 follow, or zeros if there is none, and those of CLIP are padded to as many channels, as in diffusers."""

    def __init__(self, parts: Sequence[TextNetwork], pooled: bool, cfg: NetworkConfig) -> None:
        self.parts, self.pooled, self.cfg, self.folder = parts, pooled, cfg, parts[0].folder
        self.shape = tuple(self.encode([""], ["the empty caption"])[0].shape[1:])

    def encode(self, captions: Sequence[str], names: Sequence[str]) -> tuple[Tensor, int]:
        """Return vectors [B, N, J] or [B, J'], and the number of truncated captions. Raises DataError if a caption is too long."""
        long, outputs = sum(map(self.is_truncated, captions, names)), [part.encode(captions) for part in self.parts]
        if self.pooled or self.cfg.pipeline != "sd3":
            return torch.cat([x for x in (pair[self.pooled] for pair in outputs) if x is not None], -1), long
        clips, rest = torch.cat([states for states, _ in outputs[:2]], -1), [states for states, _ in outputs[2:]]
        t5 = rest[0] if rest else clips.new_zeros(len(clips), self.cfg.length or T5_LENGTH, self.cfg.channels)
        if (padding := t5.shape[2] - clips.shape[2]) < 0:
            raise ConfigError(f"{self.folder.parent}: tokens have {t5.shape[2]} channels, fewer than CLIPs, {clips.shape[2]}")
        return torch.cat((torch.nn.functional.pad(clips, (0, padding)), t5), 1), long

    def is_truncated(self, caption: str, name: str) -> bool:
        """Return whether a caption is too long for an encoder. Raises DataError if it is, and is not to be truncated."""
        return any(part.is_truncated(caption, name) for part in self.parts)


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
    named = {"tokens": cfg.tokens, "pooled": cfg.pooled}
    keys = {name: [(pair, name == "pooled" and not cfg.pipeline) for pair in pairs] for name, pairs in named.items() if pairs}
    networks = {key: TextNetwork(*key, cfg) for key in dict.fromkeys(chain(*keys.values()))}
    texts = {name: TextEncoder([networks[key] for key in each], name == "pooled", cfg) for name, each in keys.items()}
    return LoadedNetworks(cfg, vae, texts)
