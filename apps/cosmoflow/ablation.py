"""What each optimisation brings CosmoFlow:  hpcai ablate cosmoflow [model.size=128 data.batch=4 ...]

Plain is what one would write first: torch's layers in their usual order, contiguous, float32, torch's optimizer and DataLoader over
h5py, and training waits for its evaluation. Universes are random counts. They are neither turned nor whitened, and nothing is
dropped out, so that all arrangements compute the same.
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.cosmoflow.data import Universes, _rows, batches
from apps.cosmoflow.settings import Config, DataConfig
from hpcai.dist import Mesh
from hpcai.models.cosmoflow import Batch, CosmoFlow, CosmoFlowConfig, error, loss, parallelize
from hpcai.models.cosmoflow.model import _SLOPE, Block
from hpcai.nn import Conv3d
from hpcai.train.ablation import On, Switch, of_the_loop
from hpcai.train.trial import Stacked, Subject, Training
from hpcai.train.trial import trial as trial_of

_GPU = torch.cuda.is_available()


class CONFIG(Config):
    """A CosmoFlow run of a size that is measured in minutes."""

    model: CosmoFlowConfig = CosmoFlowConfig(size=128 if _GPU else 64)
    data: DataConfig = DataConfig(batch=16 if _GPU else 1, workers=4 if _GPU else 1)


def switches(cfg: Config, mesh: Mesh) -> list[Switch]:
    return [
        Switch("kernels", "convolutions that halve a single small volume (on a CPU), and pooling before the rectifier"),
        Switch("channels-last", "weights and activations in channels-last memory, as the files have them"),
        *of_the_loop(cfg, mesh, _APP.sample_bytes(cfg)),
    ]


def trial(cfg: Config, mesh: Mesh, on: On) -> AbstractContextManager[Training]:
    data = cfg.data.model_copy(update={"turn": False, "whiten": False})
    model = cfg.model.model_copy(update={"dropout": 0.0, "mean": None, "mix": None})
    return trial_of(_APP, cfg.model_copy(update={"data": data, "model": model}), mesh, on)


def _build(cfg: Config, mesh: Mesh, on: On) -> CosmoFlow:
    model: Any = parallelize(CosmoFlow(cfg.model), mesh)
    if "kernels" not in on:
        for block in model.conv_seq:
            block.__class__, block.conv.__class__ = _Usual, _Whole
    if "channels-last" not in on:
        model.to(memory_format=torch.contiguous_format).conv_seq.__class__ = _Contiguous
    return model


class _Usual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool3d(F.leaky_relu(self.conv(x), _SLOPE), 2)


class _Whole(Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv3d.forward(self, x)


class _Contiguous(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())


def _random(cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
    counts = random.integers(0, 100, (*[cfg.model.size] * 3, cfg.model.channels), np.int16)
    return counts, random.uniform(-1, 1, len(cfg.model.parameters)).astype(np.float32)


def _loader(cfg: Config, mesh: Mesh, split: str, **words: Any) -> Any:
    return batches(Universes(_rows(cfg, split, mesh), None), cfg.data.batch, cfg, mesh, **words)


_APP = Subject(_build, loss, error, Batch._fields, _random, _loader, Stacked(Batch))
