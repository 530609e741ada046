"""DimeNet++ over the mesh: copies, whose batches differ in atoms and edges."""

from hpcai.dist.mesh import Mesh
from hpcai.models.dimenet.model import DimeNet


def parallelize(model: DimeNet, mesh: Mesh) -> DimeNet:
    """``model`` itself: its copies share nothing but gradients. Raises MeshError for a mesh that cuts it."""
    mesh.check_axes("DimeNet", "replicate")
    return model
