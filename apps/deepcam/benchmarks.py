"""Benchmark of DeepCAM:  hpcai bench deepcam | hpcai ablate deepcam [model.divide=8 data.batch=2 ...]

The plain form has torch's separate layers, contiguous. Maps are random fields between 0 and 1, with a few pixels of a class other
than the first.

At the initial weights, batch norms over few pixels amplify rounding. At the default size on a CPU (a quarter of the widths, one map
of 192 x 288) torch's float32 gradient differs by 2e-2 from that in float64, in channels-last memory by 4e-2 (torch 2.13 sums the
moments of a channel to six digits there), and under bfloat16 it has a cosine of only 0.4 to it. In float64 all variants agree to
1e-12.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from apps.deepcam.data import Maps, build_loader, open_rows
from apps.deepcam.settings import Config
from hpcai.cli.benchmarks import Enabled, ReferenceBatchNorm, Switch, Workload, plain_form
from hpcai.dist import Mesh
from hpcai.dist.environment import read_rank_info
from hpcai.models.deepcam import STRIDE, Batch, DeepCam, loss, parallelize, score
from hpcai.nn import BatchNorm, Conv2d, ConvTranspose2d

Cells = Annotated[int, Field(ge=STRIDE, multiple_of=STRIDE)]

_GROUP = "group batch norm"
_RARE = 0.02  # fraction of pixels of a class other than the first


class MapConfig(Config):
    """A DeepCAM run, and the size of random maps."""

    height: Cells = 768
    width: Cells = 1152


class Benchmark(Workload):
    settings, batch, fields = MapConfig, Batch, Batch._fields
    loss, metric = staticmethod(loss), staticmethod(score)
    unit, slow_compile = "maps", True

    def switches(self, cfg: MapConfig, mesh: Mesh) -> list[Switch]:
        group, alone = cfg.batchnorm_group, mesh["replicate"].size == 1
        why_not = "one rank: statistics are shared among replicas" if alone else "batchnorm_group is 1" if group == 1 else None
        return [
            Switch("kernels", "batch norm, sum and ReLU fused on a GPU, 1 x 1 convolutions as matrix products on a CPU"),
            Switch("channels-last", "weights and activations in channels-last memory, the layout of the files"),
            Switch(_GROUP, f"batchnorm_group={group}, which costs communication (with kernels only)", why_not),
        ]

    def complete_settings(self, cfg: MapConfig) -> MapConfig:
        classes, variables = len(cfg.model.classes), len(cfg.model.variables)
        given = cfg.model.model_dump(exclude_none=True) | {"low": (0.0,) * variables, "high": (1.0,) * variables}
        return cfg.model_copy(update={"model": cfg.model.model_copy(update={"frequencies": (1 / classes,) * classes} | given)})

    def duplicate_replicas(self, cfg: MapConfig) -> int:
        """Return the number of replicas that read the same maps: those of a group, so that their statistics are equal."""
        return cfg.batchnorm_group

    def defaults(self, on_gpu: bool) -> Sequence[str]:
        return [*super().defaults(on_gpu), f"data.batch={(2 if on_gpu else 1) * (read_rank_info().world or 1)}"]

    def build(self, cfg: MapConfig, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(DeepCam(cfg.model), mesh, cfg.batchnorm_group if {"kernels", _GROUP} <= enabled else 1)
        classes = {BatchNorm: ReferenceBatchNorm, Conv2d: _ReferenceConv, ConvTranspose2d: nn.ConvTranspose2d}
        return plain_form(model, enabled, classes, {DeepCam: _Contiguous})

    def random_sample(self, cfg: MapConfig, random: np.random.Generator) -> tuple[Any, ...]:
        fields = random.random((cfg.height, cfg.width, len(cfg.model.variables)), np.float32)
        rare = random.random(fields.shape[:2]) < _RARE
        return fields, (rare * random.integers(1, len(cfg.model.classes), rare.shape)).astype(np.uint8)

    def loader(self, cfg: MapConfig, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        return build_loader(Maps(open_rows(cfg, split, mesh)), cfg.data.batch, cfg, mesh, **kwargs)


class _ReferenceConv(Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if not self._is_product(x) or self.stride == (1, 1):
            return nn.Conv2d.forward(self, x)
        down, across = self.stride  # slice first: the gradient of strided weights may end the process (``Conv2d``)
        return F.conv2d(x[:, :, ::down, ::across], self.weight, self.bias)


class _Contiguous(DeepCam):
    def forward(self, x: Tensor) -> Tensor:
        features, low = self.xception_features(x)
        return self.upsample(self.bottleneck(features), self.bn2(self.conv2(low)))

    def scaled(self, fields: Tensor) -> Tensor:
        return super().scaled(fields).contiguous()
