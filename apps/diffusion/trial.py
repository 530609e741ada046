"""A diffusion model of fields to be measured:  hpcai bench diffusion | hpcai ablate diffusion [data.batch=4 ...]

The plain form has torch's group norms with the activation after them, contiguous. Fields are random numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.diffusion.data import Fields, rows_of
from apps.diffusion.settings import Config, DataConfig
from hpcai.cli.trial import On, Subject, Switch, exchange
from hpcai.data.splits import load
from hpcai.dist import Mesh
from hpcai.models.diffusion import (
    Batch,
    Diffusion,
    DiffusionConfig,
    ObjectiveConfig,
    SamplerConfig,
    UNetConfig,
    loss,
    parallelize,
    score,
)
from hpcai.nn.groupnorm import GroupNorm

_GPU = torch.cuda.is_available()
_FACTOR = 4  # cells along one of the coarse field

_UNET = UNetConfig(
    inputs=1, outputs=1, field=1, tokens=None, channels=(128, 256, 512) if _GPU else (32, 64, 128),
    attention=("none", "none", "self"), middle="self", heads=(2, 4, 8), groups=8,
)  # fmt: skip


class SizedConfig(Config):
    """A diffusion run, and the size of random fields."""

    cells: int = 64


class TrialConfig(SizedConfig):
    """A diffusion run of a size that is measured in minutes."""

    model: DiffusionConfig = DiffusionConfig(
        unet=_UNET, objective=ObjectiveConfig(says="flow", times="logit_normal"), sampler=SamplerConfig(method="heun")
    )
    data: DataConfig = DataConfig(batch=32 if _GPU else 4, evaluation_batch=32 if _GPU else 4, workers=1, turn=False)
    cells: int = 128 if _GPU else 64


class Trial(Subject):
    settings, batch, fields = TrialConfig, Batch, ("high", "low")
    loss, metric = staticmethod(loss), staticmethod(score)
    unit, published = "fields", SizedConfig
    tiny = (
        "model.unet.channels=[8,16]", "model.unet.heads=[1,2]", "model.unet.groups=4", "model.unet.attention=[none,none]",
        "model.unet.middle=none", "cells=16", "data.batch=2",
    )  # fmt: skip

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        return [
            Switch("norms", "group norms together with the activation that follows them"),
            Switch("channels-last", "weights and activations in channels-last memory"),
        ]

    def known(self, cfg: Any) -> Any:
        return cfg.model_copy(update={"data": cfg.data.model_copy(update={"turn": False})})

    def build(self, cfg: Any, mesh: Mesh, on: On) -> nn.Module:
        model = parallelize(Diffusion(cfg.model, cfg.train.seed), mesh)
        if "norms" not in on:
            exchange(model, {GroupNorm: _Plain})
        if "channels-last" not in on:
            model.to(memory_format=torch.contiguous_format)
        return model

    def random(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        unet = cfg.model.unet
        high = random.standard_normal((unet.inputs, *[cfg.cells] * unet.dims), np.float32)
        return high, random.standard_normal((unet.field, *[cfg.cells // _FACTOR] * unet.dims), np.float32)

    def together(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        high, low = (torch.from_numpy(np.stack(column)) for column in zip(*samples))
        return Batch(high, torch.arange(len(high)), torch.zeros(len(high), dtype=torch.int64), low)

    def loader(self, cfg: Any, mesh: Mesh, split: str, **words: Any) -> Any:
        return load(Fields(rows_of(cfg, split, mesh), None), cfg.data.batch, cfg.data, mesh, **words)

    def cases(self, on_gpu: bool) -> Sequence[Sequence[str]]:
        return [()]


class _Plain(GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return F.silu(y) if self.activation == "silu" else y
