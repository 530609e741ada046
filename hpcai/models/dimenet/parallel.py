"""DimeNet++ over the mesh: copies, whose batches differ in atoms and edges."""

from torch import Tensor, nn

from hpcai.dist.collect import total
from hpcai.dist.mesh import Axis, Mesh
from hpcai.models.dimenet.model import DimeNet


def parallelize(model: DimeNet, mesh: Mesh) -> DimeNet:
    """``model``, in place, whose losses are means over the atoms of all copies. Raises MeshError for a mesh that cuts it."""
    mesh.only("DimeNet", "replicate")
    model.mean_over_copies = Mean(mesh["replicate"])
    return model


class Mean(nn.Module):
    """Of a tensor over the processes of an axis."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, value: Tensor) -> Tensor:
        return total(value.clone(), self.axis) / self.axis.size
