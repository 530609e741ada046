"""A diffusion model over the mesh: copies of it."""

from hpcai.dist.mesh import Mesh
from hpcai.models.diffusion.model import Diffusion


def parallelize(model: Diffusion, mesh: Mesh) -> Diffusion:
    """``model``, in place. Raises MeshError for a mesh that has more than copies."""
    mesh.only("Diffusion", "replicate")
    return model
