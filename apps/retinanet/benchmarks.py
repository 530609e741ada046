"""Benchmark of RetinaNet:  hpcai bench retinanet | hpcai ablate retinanet [model.size=[400,400] data.batch=2 ...]

The plain form has torch's separate layers, contiguous. Images and boxes are random, and not encoded.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from apps.retinanet.settings import Config
from hpcai.cli.benchmarks import Enabled, ReferenceBatchNorm, Switch, Workload, plain_form
from hpcai.dist import Mesh
from hpcai.models.retinanet import Batch, RetinaNet, detections, loss, parallelize
from hpcai.models.retinanet.model import Level
from hpcai.nn import BatchNorm, Conv2d
from hpcai.nn.resnet import FrozenBatchNorm

_OBJECTS = 8  # of an image


class Benchmark(Workload):
    settings, batch, fields, unit = Config, Batch, Batch._fields, "images"
    loss = staticmethod(loss)

    def metric(self, model: Any, batch: Batch) -> dict[str, Any]:
        detected = detections(model, batch)["detections"][..., 5] >= 0
        return {"detections": (detected.sum(), len(detected))}

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        return [
            Switch("kernels", "norm, sum and ReLU fused, 1 x 1 convolutions as matrix products on a CPU"),
            Switch("channels-last", "weights and activations in channels-last memory, the layout of the images"),
        ]

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(RetinaNet(cfg.model), mesh, cfg.batchnorm_group if "kernels" in enabled else 1)
        classes = {BatchNorm: ReferenceBatchNorm, FrozenBatchNorm: _ReferenceFrozen, Conv2d: nn.Conv2d}
        return plain_form(model, enabled, classes, {RetinaNet: _Contiguous})

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        size, labels = np.array(cfg.model.size), random.integers(cfg.model.outputs, size=_OBJECTS)
        corners = np.sort(random.random((_OBJECTS, 2, 2), np.float32) * size[::-1].astype(np.float32), 1)
        return random.integers(0, 256, (*size, 3), np.uint8), corners.reshape(-1, 4), labels, size, size, np.int64(0)


class _ReferenceFrozen(FrozenBatchNorm):
    def after(self, conv: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self(conv(x), residual)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        scale, shift = self.affine()
        y = x * scale[:, None, None] + shift[:, None, None]
        y = y if residual is None else y + residual
        return y.relu() if self.relu else y


class _Contiguous(RetinaNet):
    def forward(self, x: Tensor) -> list[Level]:
        levels = self.backbone["fpn"](self.backbone["body"].features(x.contiguous())[1:])
        return [(self.head["classification_head"](level), self.head["regression_head"](level)) for level in levels]
