"""Data parallelism of ResNet, with batch norms over groups of replicas."""

from hpcai.dist.mesh import Mesh
from hpcai.models.resnet.model import ResNet
from hpcai.parallel.batchnorm import convert_sync_batchnorm


def parallelize(model: ResNet, mesh: Mesh, batchnorm_group: int = 1) -> ResNet:
    """Group the batch norms of ``batchnorm_group`` neighbouring replicas, in place, and return ``model``. Raises MeshError if the
    mesh does not fit."""
    mesh.check_axes("ResNet", "replicate")
    convert_sync_batchnorm(model, mesh, batchnorm_group)
    return model
