"""Synchronized batch normalization over a group of replicas: one node, any number, or all."""

import copy
from typing import TypeVar

from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.groupnorm import GroupNorm, InstanceNorm

Model = TypeVar("Model", bound=nn.Module)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class AllReduce(nn.Module):
    """All-reduce (sum) a tensor in place over axes; without axes it is the identity."""

    def __init__(self, *axes: Axis) -> None:
        super().__init__()
        self.axes = tuple(axis.init_group() for axis in axes)  # the first pass may be compiled

    def forward(self, value: Tensor) -> Tensor:
        return all_reduce_(value, *self.axes)

    def __deepcopy__(self, memo: dict) -> "AllReduce":
        return type(self)(*copy.deepcopy(self.axes, memo))


def convert_sync_batchnorm(model: Model, mesh: Mesh, group: int, setting: str = "batchnorm_group") -> Model:
    """Convert every batch norm of ``model`` (``nn.BatchNorm1d`` to ``3d``, hpcai's), in place, to statistics over the samples of
    ``group`` neighbouring replicas along ``replicate``; with 1 nothing changes.

    Forward and backward take one all-reduce each per layer. Values, gradients and running statistics equal those of one process
    with all samples of the group. Parameters, buffers and their names are kept. Every rank must call it. Raises MeshError if
    ``group`` does not divide the number of replicas; the message names ``setting``.
    """
    _, axis = mesh.split("replicate", group, setting)
    if axis.size == 1:
        return model
    replace_norms(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.add_module("all_reduce", AllReduce(axis))
    return model


def replace_norms(model: nn.Module) -> None:
    """Replace torch's norms in ``model`` by hpcai's, whose statistics can span several ranks; parameters and buffers are reused,
    not copied."""
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
