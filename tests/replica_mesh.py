"""The mesh of one data-parallel rank, without the other processes."""

from hpcai.dist.mesh import Axis, Mesh


def replica_mesh(rank: int, size: int) -> Mesh:
    """Return the mesh of replica ``rank`` of ``size``."""
    mesh = Mesh({})
    mesh._axes["replicate"] = Axis("replicate", size, rank)
    return mesh
