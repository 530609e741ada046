"""Data parallelism of CosmoFlow, and spatial sharding of its cubes along depth and height."""

from hpcai.dist.mesh import Mesh
from hpcai.models.cosmoflow.model import CosmoFlow
from hpcai.parallel.spatial import Cut, Join, Once, spatial


def spatial_cut(mesh: Mesh) -> Cut:
    """Return how a cube is sharded over the ranks of a replica."""
    return Cut.over({"depth": mesh["depth"], "height": mesh["height"]}, 3)


def parallelize(model: CosmoFlow, mesh: Mesh) -> CosmoFlow:
    """Shard the convolutions of ``model`` over ``depth`` and ``height``, in place. Raises MeshError if the mesh does not fit."""
    mesh.only("CosmoFlow", "replicate", "depth", "height")
    if mesh.copy.size > 1:
        model.gather_volume = Join()
        cut = spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, (model.cfg.size,) * 3)
        model.replicated_output = Once(cut)
    return model
