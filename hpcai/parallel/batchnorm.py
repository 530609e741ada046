"""Batch normalisation whose statistics are those of several copies' samples: of one node's, of any number, of all."""

from typing import TypeVar

from torch import Tensor, nn

from hpcai.dist.collect import total
from hpcai.dist.mesh import Axis, Mesh
from hpcai.nn.batchnorm import BatchNorm

Model = TypeVar("Model", bound=nn.Module)


class Total(nn.Module):
    """Adds a tensor over an axis, in place."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, value: Tensor) -> Tensor:
        return total(value, self.axis)

    def __deepcopy__(self, memo: dict) -> "Total":
        return Total(self.axis)  # a group of processes is not copied


def group_batch_norm(model: Model, mesh: Mesh, group: int, setting: str = "batchnorm_group") -> Model:
    """``model``, in place, with every batch norm (``nn.BatchNorm1d`` to ``3d``, ours) over the samples of ``group`` neighbouring
    copies along ``replicate``; 1: each copy's own, and nothing changes.

    Forward and backward send one message each per layer. Equal to one process that has all samples of the group, in value,
    gradient and running statistics. Parameters, buffers and their names stay. Each process of the job calls it. Raises MeshError
    when ``group`` does not divide the copies; ``setting`` names what is to be changed then.
    """
    _, axis = mesh.split("replicate", group, setting)
    if axis.size == 1:
        return model
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                setattr(module, name, _ours(child))
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.add_module("total", Total(axis))
    return model


def _ours(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> BatchNorm:
    """A batch norm with the parameters and buffers of ``norm``, not copies of them."""
    made = BatchNorm(norm.num_features, False, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made._parameters, made._buffers = norm._parameters, norm._buffers
    return made.train(norm.training)
