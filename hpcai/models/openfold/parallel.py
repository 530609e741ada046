"""OpenFold over the mesh: copies."""

from hpcai.dist.mesh import Mesh
from hpcai.models.openfold.model import OpenFold


def parallelize(model: OpenFold, mesh: Mesh) -> OpenFold:
    """``model`` itself: its copies share nothing but gradients. Raises MeshError for a mesh that cuts it."""
    mesh.only("OpenFold", "replicate")
    return model
