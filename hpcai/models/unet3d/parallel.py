"""The 3D U-Net over the mesh: copies, each of which may be cut along the depth and the height of its volume."""

from hpcai.dist.mesh import Axis, Mesh
from hpcai.models.unet3d.model import UNet3D
from hpcai.parallel.batchnorm import Total
from hpcai.parallel.spatial import Cut, Summed, spatial


def cut_of(mesh: Mesh) -> Cut:
    """How a volume lies on the processes of a copy."""
    return Cut.over({"depth": mesh["depth"], "height": mesh["height"]}, 3)


def parallelize(model: UNet3D, mesh: Mesh, window_group: int = 1, beside: bool = False) -> UNet3D:
    """``model``, in place, whose windows are cut over ``depth`` and ``height`` in training. In inference the processes of
    ``window_group`` neighbouring copies share the windows of a volume out, and each sees whole ones: nothing travels but the sums.
    ``beside``: evaluation goes on beside the training, so that its sums have a channel of their own.

    Raises MeshError for a mesh that does not fit.
    """
    mesh.only("UNet3D", "replicate", "depth", "height")
    cut = spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, model.cfg.window)
    model.total = Summed(cut)
    _, group = mesh.split("replicate", window_group, "data.window_group")
    together: tuple[Axis, Axis] = (mesh.aside("copy") if beside else mesh.copy, group)
    windows = model.windows
    windows.alone, windows.total = cut.off, Total(*together)
    windows.rank, windows.size = group.rank * mesh.copy.size + mesh.copy.rank, group.size * mesh.copy.size
    windows.copies, windows.speaks = group.size, group.rank == 0
    return model
