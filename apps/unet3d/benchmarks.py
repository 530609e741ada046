"""Benchmark of the 3D U-Net:  hpcai bench unet3d | hpcai ablate unet3d [model.window='[64, 64, 64]' ...]

The plain form has torch's separate layers, contiguous; ``channels_last`` is the same in the other layout. Its loss is written as in
MLPerf's reference. Volumes are random, with the size of the window.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.unet3d.data import FIELDS, Volumes, open_rows
from apps.unet3d.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Peer, Switch, Workload, plain_form
from hpcai.data.splits import make_loader
from hpcai.dist import Mesh
from hpcai.models.unet3d import Batch, UNet3D, loss, parallelize, score
from hpcai.nn import Conv3d, ConvTranspose3d, InstanceNorm


class Benchmark(Workload):
    settings, batch, fields, unit = Config, Batch, tuple(FIELDS), "crops"
    loss = staticmethod(loss)

    def metric(self, model: Any, batch: Any) -> dict[str, Any]:
        return score(model, [batch] if isinstance(batch, Batch) else batch)

    def switches(self, cfg: Config, mesh: Mesh) -> list[Switch]:
        return [
            Switch("kernels", "instance norm fused with ReLU, and the fastest convolution for each shape (on a CPU)"),
            Switch("channels-last", "weights and activations in channels-last memory"),
        ]

    def build(self, cfg: Config, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(UNet3D(cfg.model), mesh)
        classes = {InstanceNorm: _ReferenceNorm, Conv3d: nn.Conv3d, ConvTranspose3d: nn.ConvTranspose3d}
        return plain_form(model, enabled, classes, {UNet3D: _Contiguous})

    def implementations(self, cfg: Config, batch: Any, mesh: Mesh) -> dict[str, Callable[[], Implementation]]:
        layouts = {"plain": frozenset[str](), "channels_last": frozenset({"channels-last"})}
        return {name: lambda on=on: Implementation(self.build(cfg, mesh, on), _reference) for name, on in layouts.items()}  # type: ignore[misc]

    def random_sample(self, cfg: Config, random: np.random.Generator) -> tuple[Any, ...]:
        shape = cfg.model.window
        boxes = np.zeros((2, 2, 6), np.int32)
        return random.standard_normal(shape, np.float32), random.integers(0, len(cfg.model.classes), shape, np.uint8), boxes

    def collate(self, cfg: Config, samples: list[tuple[Any, ...]]) -> Any:
        return Batch(*(torch.from_numpy(np.stack(column)) for column in list(zip(*samples))[:2]))

    def loader(self, cfg: Config, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        return make_loader(_Stacked(open_rows(cfg, split, mesh)), cfg.data.batch, cfg.data, mesh, **kwargs)


class _Stacked(Volumes):
    """Volumes of equal size, stacked to batches."""

    def collate(self, samples: list[Batch]) -> Any:
        return Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*samples)))


def _reference(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the loss as in MLPerf's reference: cross entropy, and dice of a softmax and one-hot labels."""
    logits, label = model(batch.image[:, None]).float(), batch.label.long()
    guess = F.softmax(logits, 1)[:, 1:]
    true = F.one_hot(label, logits.shape[1]).permute(0, 4, 1, 2, 3).float()[:, 1:]
    over = (2, 3, 4)
    dice = (2 * (guess * true).sum(over) + 1e-6) / (guess.sum(over) + true.sum(over) + 1e-6)
    return {"loss": (F.cross_entropy(logits, label) + (1 - dice).mean()) / 2}


class _ReferenceNorm(InstanceNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)
        return F.relu(y, inplace=True) if self.activation else y


class _Contiguous(UNet3D):
    to_layout = staticmethod(Tensor.contiguous)


def _monai(cfg: Config, batch: Batch) -> Implementation:
    """Return the network of nnU-Net in MONAI, whose blocks have leaky ReLUs."""
    from importlib import import_module

    widths = (*cfg.model.filters, cfg.model.filters[-1])
    down = [1] + [2] * (len(widths) - 1)
    kwargs = {"kernel_size": [3] * len(widths), "strides": down, "upsample_kernel_size": down[1:], "filters": widths}
    net = import_module("monai.networks.nets").DynUNet(3, cfg.model.channels, len(cfg.model.classes), **kwargs)
    return Implementation(net, _reference)


Benchmark.peers = {"monai": Peer("monai", _monai)}
