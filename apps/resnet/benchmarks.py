"""Benchmark of ResNet:  hpcai bench resnet | hpcai ablate resnet [model.size=224 data.batch=16 ...]

The plain form has torch's separate layers, contiguous. Images are random, and not encoded.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from apps.resnet.settings import Config
from hpcai.cli.benchmarks import Enabled, ReferenceBatchNorm, Switch, Workload, plain_form
from hpcai.dist import Mesh
from hpcai.models.resnet import Batch, ResNet, loss, parallelize, score
from hpcai.nn import BatchNorm, Conv2d


class Benchmark(Workload):
    settings, batch, fields, unit = Config, Batch, Batch._fields, "images"
    loss, metric = staticmethod(loss), staticmethod(score)

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        return [
            Switch("kernels", "batch norm, sum and ReLU fused on a GPU, 1 x 1 convolutions as matrix products on a CPU"),
            Switch("channels-last", "weights and activations in channels-last memory, the layout of the images"),
        ]

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(ResNet(cfg.model), mesh, cfg.batchnorm_group if "kernels" in enabled else 1)
        classes = {BatchNorm: ReferenceBatchNorm, Conv2d: nn.Conv2d}
        return plain_form(model, enabled, classes, {ResNet: _Contiguous})

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        pixels = random.integers(0, 256, (cfg.model.size, cfg.model.size, 3), np.uint8)
        return pixels, np.int32(random.integers(cfg.model.outputs))


class _Contiguous(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x.contiguous())[-1].mean((2, 3)))
