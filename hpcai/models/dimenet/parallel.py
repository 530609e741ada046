"""Data parallelism of DimeNet++: batches of replicas differ in atoms and edges."""

from hpcai.dist.mesh import Mesh
from hpcai.models.dimenet.model import DimeNet


def parallelize(model: DimeNet, mesh: Mesh) -> DimeNet:
    """Return ``model`` itself: replicas communicate only gradients. Raises MeshError if the mesh has any other axis."""
    mesh.check_axes("DimeNet", "replicate")
    return model
