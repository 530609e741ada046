"""Batch normalisation with statistics over the samples of several copies of a model: one node's, any number, or all."""

import copy
from typing import TypeVar

from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Axis, Mesh
from hpcai.nn.batchnorm import BatchNorm
from hpcai.nn.groupnorm import GroupNorm
from hpcai.nn.instancenorm import InstanceNorm

Model = TypeVar("Model", bound=nn.Module)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class SumInPlace(nn.Module):
    """Adds a tensor over axes, in place; over no axis it does nothing."""

    def __init__(self, *axes: Axis) -> None:
        super().__init__()
        self.axes = tuple(axis.init_group() for axis in axes)  # the first pass may be compiled

    def forward(self, value: Tensor) -> Tensor:
        return all_reduce_(value, *self.axes)

    def __deepcopy__(self, memo: dict) -> "SumInPlace":
        return type(self)(*copy.deepcopy(self.axes, memo))


def group_batch_norm(model: Model, mesh: Mesh, group: int, setting: str = "batchnorm_group") -> Model:
    """Have every batch norm of ``model`` (``nn.BatchNorm1d`` to ``3d``, ours), in place, take statistics over the samples of
    ``group`` neighbouring copies along ``replicate``; with 1 nothing changes.

    Forward and backward send one message each per layer. Values, gradients and running statistics equal those of one process with
    all samples of the group. Parameters, buffers and their names stay. Each process of the job calls it. Raises MeshError when
    ``group`` does not divide the copies; ``setting`` names what is then to be changed.
    """
    _, axis = mesh.split("replicate", group, setting)
    if axis.size == 1:
        return model
    use_ours(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.add_module("total", SumInPlace(axis))
    return model


def use_ours(model: nn.Module) -> None:
    """Replace torch's norms in ``model`` by norms whose statistics can be those of several processes; these take over the very
    parameters and buffers, not copies."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            made: BatchNorm | InstanceNorm | GroupNorm
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                made = BatchNorm(child.num_features, False, child.eps, child.momentum, child.affine, child.track_running_stats)
            elif isinstance(child, _INSTANCE) and child.affine and not child.track_running_stats:
                made = InstanceNorm(child.num_features, eps=child.eps)
            elif type(child) is nn.GroupNorm:
                made = GroupNorm(child.num_groups, child.num_channels, eps=child.eps, affine=child.affine)
            else:
                continue
            made._parameters, made._buffers = child._parameters, child._buffers
            setattr(module, name, made.train(child.training))
