"""Data parallelism of DeepCAM, spatial sharding of its maps along the height, and batch norms over groups of replicas."""

from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.deepcam.model import DeepCam
from hpcai.parallel.batchnorm import group_batch_norm
from hpcai.parallel.spatial import Cut, SumOverCut, Whole, spatial


def spatial_cut(mesh: Mesh) -> Cut:
    """Return how a map is sharded over the ranks of a replica."""
    return Cut.over({"height": mesh["height"]}, 2)


def parallelize(model: DeepCam, mesh: Mesh, batchnorm_group: int = 1, size: tuple[int, int] | None = None) -> DeepCam:
    """Group the batch norms of ``batchnorm_group`` neighbouring replicas and shard maps of ``size`` (H, W) over ``height``, in
    place, and return ``model``. Raises MeshError if the mesh does not fit."""
    mesh.only("DeepCAM", "replicate", "height")
    group_batch_norm(model, mesh, batchnorm_group)
    if mesh["height"].size > 1:
        if size is None:
            raise MeshError(f"mesh.height is {mesh['height'].size}: size, of the maps to shard, is missing")
        cut = spatial(model, {"height": mesh["height"]}, size)  # checks the full map: shards need not be divisible
        model.spatial_sum, model.gather_map, model.check_divisible = SumOverCut(cut), Whole(cut, size), nn.Identity()
    return model
