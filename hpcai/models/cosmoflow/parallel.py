"""Data parallelism of CosmoFlow, and spatial sharding of its cubes along depth and height."""

from hpcai.dist.mesh import Mesh
from hpcai.models.cosmoflow.model import CosmoFlow
from hpcai.parallel.axial import ReplicatedOnce
from hpcai.parallel.spatial import GatherFull, parallelize_spatial


def parallelize(model: CosmoFlow, mesh: Mesh) -> CosmoFlow:
    """Shard the convolutions of ``model`` over ``depth`` and ``height``, in place. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("CosmoFlow", "replicate", "depth", "height")
    if mesh.model_parallel.size > 1:
        cut = parallelize_spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, (model.cfg.size,) * 3)
        model.gather_volume = GatherFull(cut, (model.cfg.edge,) * 3)
        model.replicated_output = ReplicatedOnce(mesh.model_parallel)
    return model
