"""DeepCAM over the mesh: copies, each with its own maps, which may be cut along their height, and whose batch norms may share their
statistics."""

from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.deepcam.model import DeepCam
from hpcai.parallel.batchnorm import group_batch_norm
from hpcai.parallel.spatial import Cut, SumOverCut, Whole, spatial


def cut_of(mesh: Mesh) -> Cut:
    """How a map lies on the processes of a copy."""
    return Cut.over({"height": mesh["height"]}, 2)


def parallelize(model: DeepCam, mesh: Mesh, batchnorm_group: int = 1, size: tuple[int, int] | None = None) -> DeepCam:
    """``model``, in place, with batch statistics of ``batchnorm_group`` neighbouring copies, its maps of ``size`` (H, W) cut over
    ``height``. Raises MeshError where the mesh does not fit."""
    mesh.check_axes("DeepCAM", "replicate", "height")
    group_batch_norm(model, mesh, batchnorm_group)
    if mesh["height"].size > 1:
        if size is None:
            raise MeshError(f"mesh.height is {mesh['height'].size}: give the size of the maps that are cut")
        cut = spatial(model, {"height": mesh["height"]}, size)  # checks that the whole fits: parts need not
        model.total, model.whole, model.fits = SumOverCut(cut), Whole(cut, size), nn.Identity()
    return model
