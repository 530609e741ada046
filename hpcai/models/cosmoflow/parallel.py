"""CosmoFlow over the mesh: copies, each with its own universes, which may be cut along their depth and height."""

from hpcai.dist.mesh import Mesh
from hpcai.models.cosmoflow.model import CosmoFlow
from hpcai.parallel.spatial import GatherVolume, ReplicatedOnce, SpatialPartition, parallelize_spatial


def spatial_cut(mesh: Mesh) -> SpatialPartition:
    """How a universe lies on the processes of a copy."""
    return SpatialPartition.from_axes({"depth": mesh["depth"], "height": mesh["height"]}, 3)


def parallelize(model: CosmoFlow, mesh: Mesh) -> CosmoFlow:
    """``model``, in place, whose convolutions are cut over ``depth`` and ``height``. Raises MeshError for a mesh that does not
    fit."""
    mesh.check_axes("CosmoFlow", "replicate", "depth", "height")
    if mesh.model_parallel.size > 1:
        model.gather_volume = GatherVolume()
        cut = parallelize_spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, (model.cfg.size,) * 3)
        model.replicated_output = ReplicatedOnce(cut)
    return model
