"""DeepCAM over the mesh: copies of the whole network, each with its own maps, whose batch norms may share their statistics."""

from hpcai.dist.mesh import Mesh
from hpcai.models.deepcam.model import DeepCam
from hpcai.parallel.batchnorm import group_batch_norm


def parallelize(model: DeepCam, mesh: Mesh, batchnorm_group: int = 1) -> DeepCam:
    """``model`` with batch statistics of ``batchnorm_group`` neighbouring copies. Raises MeshError where the mesh does not fit."""
    mesh.only("DeepCAM", "replicate")
    return group_batch_norm(model, mesh, batchnorm_group)
