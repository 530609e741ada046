"""Data parallelism of R-GAT: replicas have sub-graphs of their own, which differ in nodes and edges."""

from hpcai.dist.mesh import Mesh
from hpcai.models.rgat.model import RGAT


def parallelize(model: RGAT, mesh: Mesh) -> RGAT:
    """Return ``model`` itself: replicas communicate only gradients. Raises MeshError if the mesh has any other axis."""
    mesh.check_axes("R-GAT", "replicate")
    return model
