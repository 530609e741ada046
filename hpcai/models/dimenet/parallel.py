"""DimeNet++ over the mesh: copies, whose batches differ in atoms and edges."""

import math

from torch import Tensor

from hpcai.dist.mesh import Mesh
from hpcai.models.dimenet.model import DimeNet
from hpcai.parallel.batchnorm import SumInPlace


def parallelize(model: DimeNet, mesh: Mesh) -> DimeNet:
    """``model``, in place, whose losses are means over the atoms of all copies. Raises MeshError for a mesh that cuts it."""
    mesh.only("DimeNet", "replicate")
    model.mean_over_copies = Mean(mesh["replicate"])
    return model


class Mean(SumInPlace):
    """The mean of a tensor over the processes of some axes."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.clone()) / math.prod(axis.size for axis in self.axes)
