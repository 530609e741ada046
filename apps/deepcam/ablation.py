"""What each optimisation brings DeepCAM:  hpcai ablate deepcam [model.divide=8 data.batch=2 ...]

Plain is what one would write first: torch's layers one after the other, contiguous, float32, torch's optimizer and DataLoader over
h5py, and training waits for its evaluation. Maps are random fields between 0 and 1, where a few cells are of a class other than the
first.

Batch norms over few cells amplify rounding at the first weights. At the default size on a CPU (a quarter of the widths, one map of
192 x 288) torch's own float32 gradient is there 2e-2 away from that in float64, in channels-last memory 4e-2 (torch 2.13 adds up
the moments of a channel to six digits there), and that under bfloat16 has little in common with it: a cosine of 0.4. In float64 all
arrangements agree to 1e-12.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from apps.deepcam.data import Maps, _rows, batches
from apps.deepcam.settings import Config, DataConfig
from hpcai.dist import Mesh
from hpcai.dist.environment import place
from hpcai.models.deepcam import STRIDE, Batch, DeepCam, DeepCamConfig, loss, parallelize, score
from hpcai.nn import BatchNorm, Conv2d, ConvTranspose2d
from hpcai.settings import StepConfig
from hpcai.train.ablation import On, Switch, of_the_loop
from hpcai.train.trial import Stacked, Subject, Training, exchange
from hpcai.train.trial import trial as trial_of

Cells = Annotated[int, Field(ge=STRIDE, multiple_of=STRIDE)]

_GPU = torch.cuda.is_available()
_GROUP = "group batch norm"
_RARE = 0.02  # share of the cells that are of some class other than the first


class CONFIG(Config):
    """A DeepCAM run of a size that is measured in minutes."""

    model: DeepCamConfig = DeepCamConfig(divide=1 if _GPU else 4)
    data: DataConfig = DataConfig(batch=(2 if _GPU else 1) * (place().world or 1), workers=4 if _GPU else 1)
    step: StepConfig = Config().step.model_copy(update={"optimizer": "adamw"})  # torch has no LAMB to compare with
    height: Cells = 768 if _GPU else 192
    """of the random maps"""
    width: Cells = 1152 if _GPU else 288


def switches(cfg: CONFIG, mesh: Mesh) -> list[Switch]:
    group, alone = cfg.batchnorm_group, mesh["replicate"].size == 1
    why_not = "one process: statistics are shared among copies" if alone else "batchnorm_group is 1" if group == 1 else None
    loop = of_the_loop(cfg, mesh, _APP.sample_bytes(cfg))
    if mesh.device.type == "cpu" and cfg.step.compile == "none":
        minutes = "torch.compile takes minutes for each arrangement on a CPU; ask for it with step.compile=whole"
        loop = [replace(switch, why_not=switch.why_not or minutes) if switch.name == "compile" else switch for switch in loop]
    return [
        Switch("kernels", "batch norm, sum and rectifier in one pass on a GPU, 1 x 1 convolutions as products on a CPU"),
        Switch("channels-last", "weights and activations in channels-last memory, as the files have them"),
        Switch(_GROUP, f"batchnorm_group={group}, which costs messages (with kernels only)", why_not),
        *loop,
    ]


def trial(cfg: CONFIG, mesh: Mesh, on: On) -> AbstractContextManager[Training]:
    """Copies of a group see the same maps where numbers are compared, so that statistics of one are those of all."""
    classes, variables = len(cfg.model.classes), len(cfg.model.variables)
    known = {"low": (0.0,) * variables, "high": (1.0,) * variables}
    model = cfg.model.model_copy(update={"frequencies": (1 / classes,) * classes} | cfg.model.model_dump(exclude_none=True) | known)
    return trial_of(_APP, cfg.model_copy(update={"model": model}), mesh, on, alike=cfg.batchnorm_group)


def _build(cfg: CONFIG, mesh: Mesh, on: On) -> DeepCam:
    model = parallelize(DeepCam(cfg.model), mesh, cfg.batchnorm_group if {"kernels", _GROUP} <= on else 1)
    if "kernels" not in on:
        exchange(model, {BatchNorm: _Usual, Conv2d: _Plain, ConvTranspose2d: _PlainTransposed})
    if "channels-last" not in on:
        exchange(model.to(memory_format=torch.contiguous_format), {DeepCam: _Contiguous})
    return model


class _Usual(BatchNorm):
    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        y = nn.BatchNorm2d.forward(self, x)
        if plus is not None:
            y += plus
        return F.relu(y, inplace=True) if self.relu else y


class _Plain(Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if not self._is_product(x) or self.stride == (1, 1):
            return nn.Conv2d.forward(self, x)
        down, across = self.stride  # cells are picked first: the gradient of strided weights may end the process (``Conv2d``)
        return F.conv2d(x[:, :, ::down, ::across], self.weight, self.bias)


class _PlainTransposed(ConvTranspose2d):
    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return nn.ConvTranspose2d.forward(self, x, output_size)


class _Contiguous(DeepCam):
    def forward(self, x: Tensor) -> Tensor:
        features, low = self.xception_features(x)
        return self.upsample(self.bottleneck(features), self.bn2(self.conv2(low)))

    def scaled(self, fields: Tensor) -> Tensor:
        return super().scaled(fields).contiguous()


def _random(cfg: CONFIG, random: np.random.Generator) -> tuple[Any, ...]:
    fields = random.random((cfg.height, cfg.width, len(cfg.model.variables)), np.float32)
    rare = random.random(fields.shape[:2]) < _RARE
    return fields, (rare * random.integers(1, len(cfg.model.classes), rare.shape)).astype(np.uint8)


def _loader(cfg: CONFIG, mesh: Mesh, split: str, **words: Any) -> Any:
    return batches(Maps(_rows(cfg, split, mesh)), cfg.data.batch, cfg, mesh, **words)


_APP = Subject(_build, loss, score, Batch._fields, _random, _loader, Stacked(Batch))
