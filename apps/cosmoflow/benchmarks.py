"""Benchmark of CosmoFlow:  hpcai bench cosmoflow | hpcai ablate cosmoflow [model.size=128 data.batch=4 ...]

The plain form has torch's layers in their usual order, contiguous. Universes are random counts, without augmentation, whitening or
dropout, so that all variants compute the same.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.cosmoflow.data import Universes, build_loader, open_rows
from apps.cosmoflow.settings import Config
from hpcai.cli.benchmarks import Enabled, Switch, Workload
from hpcai.dist import Mesh
from hpcai.models.cosmoflow import Batch, CosmoFlow, error, loss, parallelize
from hpcai.models.cosmoflow.model import NEGATIVE_SLOPE, Block


class Benchmark(Workload):
    settings, batch, fields, unit = Config, Batch, Batch._fields, "universes"
    loss, metric = staticmethod(loss), staticmethod(error)

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        return [
            Switch("kernels", "strided convolutions of a single small volume (on a CPU), and pooling before the activation"),
            Switch("channels-last", "weights and activations in channels-last memory, the layout of the files"),
        ]

    def complete_settings(self, cfg: Config) -> Config:
        data = cfg.data.model_copy(update={"turn": False, "whiten": False})
        model = cfg.model.model_copy(update={"dropout": 0.0, "mean": None, "mix": None})
        return cfg.model_copy(update={"data": data, "model": model})

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model: Any = parallelize(CosmoFlow(cfg.model), mesh)
        if "kernels" not in enabled:
            for block in model.conv_seq:
                block.__class__, block.conv.__class__ = _ReferenceBlock, nn.Conv3d
        if "channels-last" not in enabled:
            model.to(memory_format=torch.contiguous_format).conv_seq.__class__ = _Contiguous
        return model

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        counts = random.integers(0, 100, (*[cfg.model.size] * 3, cfg.model.channels), np.int16)
        return counts, random.uniform(-1, 1, len(cfg.model.parameters)).astype(np.float32)

    def loader(self, cfg: Config, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        return build_loader(Universes(open_rows(cfg, split, mesh), None), cfg.data.batch, cfg, mesh, **kwargs)


class _ReferenceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(F.leaky_relu(self.conv(x), NEGATIVE_SLOPE), 2)


class _Contiguous(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())
