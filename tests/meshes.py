"""A process of many, without the others."""

from hpcai.dist.mesh import Axis, Mesh


def mesh_of(rank: int, size: int) -> Mesh:
    """Copy ``rank`` of ``size`` copies of a model."""
    mesh = Mesh({})
    mesh._axes["replicate"] = Axis("replicate", size, rank)
    return mesh
