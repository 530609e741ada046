"""DeepCAM over the mesh: copies, each with its own maps, which may be cut along their height, and whose batch norms may share their
statistics."""

from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.deepcam.model import DeepCam
from hpcai.parallel.batchnorm import convert_sync_batchnorm
from hpcai.parallel.spatial import GatherFull, SpatialPartition, SpatialSum, parallelize_spatial


def spatial_cut(mesh: Mesh) -> SpatialPartition:
    """How a map lies on the processes of a copy."""
    return SpatialPartition.from_axes({"height": mesh["height"]}, 2)


def parallelize(model: DeepCam, mesh: Mesh, batchnorm_group: int = 1, size: tuple[int, int] | None = None) -> DeepCam:
    """``model``, in place, with batch statistics of ``batchnorm_group`` neighbouring copies, its maps of ``size`` (H, W) cut over
    ``height``. Raises MeshError where the mesh does not fit."""
    mesh.check_axes("DeepCAM", "replicate", "height")
    convert_sync_batchnorm(model, mesh, batchnorm_group)
    if mesh["height"].size > 1:
        if size is None:
            raise MeshError(f"mesh.height is {mesh['height'].size}: give the size of the maps that are cut")
        cut = parallelize_spatial(model, {"height": mesh["height"]}, size)  # checks that the whole fits: parts need not
        model.spatial_sum, model.gather_map, model.check_divisible = SpatialSum(cut), GatherFull(cut, size), nn.Identity()
    return model
