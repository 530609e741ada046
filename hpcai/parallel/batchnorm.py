"""Batch normalisation with statistics over the samples of several copies of a model: one node's, any number, or all."""

import copy
from typing import TypeVar

from torch import Tensor, nn

from hpcai.dist.collect import sum_in_place
from hpcai.dist.mesh import Axis, Mesh
from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.instancenorm import InstanceNorm

Model = TypeVar("Model", bound=nn.Module)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class AllReduce(nn.Module):
    """Adds a tensor over axes, in place; over no axis it does nothing."""

    def __init__(self, *axes: Axis) -> None:
        super().__init__()
        self.axes = tuple(axis.meet() for axis in axes)  # the first pass may be compiled

    def forward(self, value: Tensor) -> Tensor:
        return sum_in_place(value, *self.axes)

    def __deepcopy__(self, memo: dict) -> "AllReduce":
        return type(self)(*copy.deepcopy(self.axes, memo))


def convert_sync_batchnorm(model: Model, mesh: Mesh, group: int, setting: str = "batchnorm_group") -> Model:
    """Have every batch norm of ``model`` (``nn.BatchNorm1d`` to ``3d``, ours), in place, take statistics over the samples of
    ``group`` neighbouring copies along ``replicate``; with 1 nothing changes.

    Forward and backward send one message each per layer. Values, gradients and running statistics equal those of one process with
    all samples of the group. Parameters, buffers and their names stay. Each process of the job calls it. Raises MeshError when
    ``group`` does not divide the copies; ``setting`` names what is then to be changed.
    """
    _, axis = mesh.split("replicate", group, setting)
    if axis.size == 1:
        return model
    replace_norms(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.add_module("total", AllReduce(axis))
    return model


def replace_norms(model: nn.Module) -> None:
    """Replace torch's norms in ``model`` by norms whose statistics can be those of several processes; these take over the very
    parameters and buffers, not copies."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            norm: BatchNorm | InstanceNorm | GroupNorm
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                norm = BatchNorm(child.num_features, False, child.eps, child.momentum, child.affine, child.track_running_stats)
            elif isinstance(child, _INSTANCE) and child.affine and not child.track_running_stats:
                norm = InstanceNorm(child.num_features, eps=child.eps)
            elif type(child) is nn.GroupNorm:
                norm = GroupNorm(child.num_groups, child.num_channels, eps=child.eps, affine=child.affine)
            else:
                continue
            norm._parameters, norm._buffers = child._parameters, child._buffers
            setattr(module, name, norm.train(child.training))
