"""Data parallelism of DeepCAM, spatial sharding of its maps along the height, and batch norms over groups of replicas."""

from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.deepcam.model import DeepCam
from hpcai.parallel.batchnorm import convert_sync_batchnorm
from hpcai.parallel.spatial import GatherFull, SpatialSum, parallelize_spatial


def parallelize(model: DeepCam, mesh: Mesh, batchnorm_group: int = 1, size: tuple[int, int] | None = None) -> DeepCam:
    """Group the batch norms of ``batchnorm_group`` neighbouring replicas and shard maps of ``size`` (H, W) over ``height``, in
    place, and return ``model``. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("DeepCAM", "replicate", "height")
    convert_sync_batchnorm(model, mesh, batchnorm_group)
    if mesh["height"].size > 1:
        if size is None:
            raise MeshError(f"mesh.height is {mesh['height'].size}: size, of the maps to shard, is missing")
        cut = parallelize_spatial(model, {"height": mesh["height"]}, size)  # checks the full map: shards need not be divisible
        model.spatial_sum, model.gather_map, model.check_divisible = SpatialSum(cut), GatherFull(cut, size), nn.Identity()
    return model
