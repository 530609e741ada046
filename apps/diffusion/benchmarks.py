"""Benchmark of a diffusion U-Net:  hpcai bench diffusion | hpcai ablate diffusion [model.unet.channels='[64, 128]' ...]

The plain form has torch's separate layers in contiguous memory: a norm, then its activation; upsampling, then convolution;
``F.pad`` at periodic boundaries. Noise and times come from counter-based generators in all forms, so that all have the same loss.
Samples are random: moments of latents with a text each, or fields with their coarse counterparts.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from pydantic import model_validator
from torch import Tensor, nn

from apps.diffusion.data import Fields, open_rows
from apps.diffusion.latents import EncodedImages
from apps.diffusion.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Peer, Switch, Workload, swap_classes
from hpcai.config import PositiveInt
from hpcai.data.index import write_index
from hpcai.data.splits import make_loader
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.models.diffusion import Batch, Diffusion, LatentsConfig, UNetConfig, blocks, loss, parallelize, score, unet
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.load import to_config
from hpcai.nn import Conv2d, GroupNorm, LayerNorm, periodic
from hpcai.nn.conv import Conv3d

_FACTOR = 4  # pixels of a field for one of the coarse field, along each dim


class RandomConfig(Config):
    """A run of a U-Net, and the size of random samples."""

    side: PositiveInt = 64
    """pixels along each dim"""
    text: PositiveInt = 77
    """tokens"""

    @model_validator(mode="after")
    def _has_a_unet(self) -> Self:
        if self.model.unet is None:
            raise ValueError("model.unet is null; this benchmark has no other network, set model.unet")
        return self


class Benchmark(Workload):
    settings, batch = RandomConfig, Batch
    loss, metric = staticmethod(loss), staticmethod(score)
    unit, compile_scope, slow_compile = "images", "blocks", True

    def complete_settings(self, cfg: Any) -> Any:
        """Set the size of a sample, and random initial weights everywhere: behind zero weights all gradients would be zero."""
        net = cfg.model.unet.model_copy(update={"zero": False})
        updates = {"unet": net, "size": (net.inputs, *[cfg.side] * net.dims)}
        if net.tokens:
            updates["latents"] = LatentsConfig(tokens=(cfg.text, net.tokens))
        return cfg.model_copy(update={"model": cfg.model.model_copy(update=updates)})

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        ends = "; periodic padding without a copy" if any(cfg.model.unet.periodic) else ""
        return [
            Switch("kernels", "group norms with their SiLU, GEGLU and layer norms that save only their inputs"),
            Switch("products", "1 x 1 convolutions as matrix products (on a CPU)"),
            Switch("up", "upsampling and convolution fused, as a transposed convolution"),
            Switch("channels-last", f"weights and activations in channels-last memory from end to end{ends}"),
        ]

    def default_overrides(self, on_gpu: bool) -> Sequence[Sequence[str]]:
        """Return overrides for latents, and for the 64 x 64 fields of small.yaml."""
        small = yaml.safe_load((Path(__file__).parent / "configs/small.yaml").read_text())
        return [(), ("side=64", f"data.batch={small['data']['batch']}", f"model={json.dumps(small['model'])}")]

    def context(self, enabled: Enabled) -> AbstractContextManager[Any]:
        return nullcontext() if "channels-last" in enabled else _contiguous()

    def build(self, cfg: Any, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(Diffusion(cfg.model, cfg.train.seed), mesh)
        if "kernels" not in enabled:
            swap_classes(model, {GroupNorm: _Norm, LayerNorm: nn.LayerNorm, blocks.GEGLU: _GEGLU})
        if "products" not in enabled:
            swap_classes(model, {Conv2d: nn.Conv2d, Conv3d: nn.Conv3d})
        for part in model.modules():
            if isinstance(part, blocks.Upsample):
                part.fused = "up" in enabled
        return model if "channels-last" in enabled else model.to(memory_format=torch.contiguous_format)

    def dataset_names(self, cfg: Any) -> Sequence[str]:
        net = cfg.model.unet
        if net.tokens:
            return "moments", "tokens"
        return "high", *(["low"] if net.field else []), *(["parameters"] if net.parameters else [])

    def random_sample(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        net = cfg.model.unet
        sizes = {
            "moments": (2 * net.inputs, *[cfg.side] * net.dims), "tokens": (cfg.text, net.tokens),
            "high": cfg.model.size, "low": (net.field, *[cfg.side // _FACTOR] * net.dims), "parameters": (net.parameters,),
        }  # fmt: skip
        kind = np.float16 if net.tokens else np.float32
        return tuple(random.standard_normal(sizes[name], np.float32).astype(kind) for name in self.dataset_names(cfg))

    def collate(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        source = _source(cfg, samples)
        rows = [source.transform(dict(zip(self.dataset_names(cfg), values)), number, 0) for number, values in enumerate(samples)]
        return Batch(*(None if column[0] is None else torch.from_numpy(np.stack(column)) for column in zip(*rows)))

    def write_files(self, cfg: Any, rows: int, splits: Sequence[str] = ("train", "validation")) -> Any:
        cfg = super().write_files(cfg, rows, splits)
        net = cfg.model.unet
        metadata = {"kind": "latents", "latents": net.inputs, "size": [cfg.side] * net.dims, "tokens": [cfg.text, net.tokens]}
        for folder in (cfg.data.directory / split for split in splits if net.tokens):
            files = [{"name": path.name, "rows": rows, "bytes": path.stat().st_size} for path in folder.glob("*.h5")]
            write_index(folder, {"files": files, **metadata})
        return cfg

    def loader(self, cfg: Any, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        return make_loader(_source(cfg, open_rows(cfg, split, mesh)), cfg.data.batch, cfg.data, mesh, **kwargs)


def _source(cfg: Any, rows: Any) -> Any:
    return (EncodedImages if cfg.model.unet.tokens else Fields)(rows)


# ---- plain forms


class _Norm(GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return F.silu(y) if self.activation else y


class _GEGLU(blocks.GEGLU):
    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        return value * F.gelu(gate)


@contextmanager
def _contiguous() -> Iterator[None]:
    """Context manager: no operation converts contiguous tensors to channels-last."""
    patches: list[tuple[Any, str, Any]] = [
        (blocks, function.__name__, lambda *args, function=function: function(*args).contiguous())
        for function in (blocks.from_tokens, blocks.fold_upsampling)
    ]
    patches += [(blocks, "channels_last", Tensor.contiguous)]
    patches += [(periodic, "is_transformed", lambda: True)]  # circular_pad by F.pad
    with ExitStack() as stack:
        for module, name, function in patches:
            stack.enter_context(mock.patch.object(module, name, function))
        yield


# ---- the same network in diffusers


class _DiffusersNetwork(nn.Module):
    """A network of diffusers, with what it lacks around it: fields, patches and periodic padding."""

    def __init__(self, cfg: UNetConfig) -> None:
        super().__init__()
        self.cfg, self.space, cells = cfg, blocks.Space(cfg.dims, cfg.periodic), cfg.patch**cfg.dims
        inputs, outputs = cells * (cfg.inputs + cfg.field), cells * cfg.outputs
        same = cfg.model_copy(update={"inputs": inputs, "outputs": outputs, "field": 0, "patch": 1, "periodic": ()})
        if (config := to_config(same)) is None or len({*cfg.periodic}) > 1:
            raise ConfigError(f"diffusers has no network for model.unet {cfg!r}; leave --peers out")
        self.net = getattr(import_module("diffusers"), config["_class_name"]).from_config(config)
        for part in self.net.modules() if any(cfg.periodic) else ():
            if isinstance(part, nn.Conv2d):
                part.padding_mode = "circular"

    def forward(self, x: Tensor, time: Tensor, condition: Condition) -> Tensor:
        if condition.field is not None:
            x = torch.cat((x, blocks.resize(condition.field, x.shape[2:], self.space.periodic_dims)), 1)
        texts = {} if condition.tokens is None else {"encoder_hidden_states": condition.tokens.to(x.dtype)}
        return unet.pixel_shuffle(self.net(unet.pixel_unshuffle(x, self.cfg.patch), time, **texts).sample, self.cfg.patch)


def _diffusers(cfg: Any, batch: Batch) -> Implementation:
    least = UNetConfig(channels=(32,), attention=("none",), middle="none", heads=(1,), tokens=None, blocks=1)
    model: Any = Diffusion(cfg.model.model_copy(update={"unet": least}), cfg.train.seed)
    model.cfg, model.network = cfg.model, _DiffusersNetwork(cfg.model.unet)
    return Implementation(model.to(batch.sample.device), loss)


Benchmark.peers = {"diffusers": Peer("diffusers", _diffusers)}
