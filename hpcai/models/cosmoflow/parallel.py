"""CosmoFlow over the mesh: copies of the whole network, each with its own universes."""

from hpcai.dist.mesh import Mesh
from hpcai.models.cosmoflow.model import CosmoFlow


def parallelize(model: CosmoFlow, mesh: Mesh) -> CosmoFlow:
    """The model as it is, once the mesh is one that it can use. Raises MeshError."""
    mesh.only("CosmoFlow", "replicate")
    return model
