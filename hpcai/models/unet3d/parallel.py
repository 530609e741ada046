"""The 3D U-Net over the mesh: copies, each of which may be cut along the depth and the height of its volume."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.models.unet3d.model import UNet3D
from hpcai.models.unet3d.windows import Corner, WindowGroup
from hpcai.parallel.batchnorm import AllReduce
from hpcai.parallel.spatial import SpatialPartition, SpatialSum, parallelize_spatial


def spatial_cut(mesh: Mesh) -> SpatialPartition:
    """How a volume lies on the processes of a copy."""
    return SpatialPartition.from_axes({"depth": mesh["depth"], "height": mesh["height"]}, 3)


def parallelize(model: UNet3D, mesh: Mesh, window_group: int = 1) -> UNet3D:
    """``model``, in place, whose windows are cut over ``depth`` and ``height`` in training. In inference the processes of
    ``window_group`` neighbouring copies share the windows of a volume out, and each sees whole ones: nothing travels but the sums.

    Raises MeshError for a mesh that does not fit.
    """
    mesh.check_axes("UNet3D", "replicate", "depth", "height")
    cut = parallelize_spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, model.cfg.window)
    model.spatial_sum = SpatialSum(cut)
    if cut.axes:
        model.check_divisible = nn.Identity()
    _, window_axis = mesh.split("replicate", window_group, "data.window_group")
    model.sliding_window.group = DistributedWindowGroup(cut, mesh.model_parallel, window_axis)
    return model


class DistributedWindowGroup(WindowGroup):
    """The processes of a copy, and of the neighbouring copies of ``group``: each sees every n-th window, whole."""

    def __init__(self, cut: SpatialPartition, copy: Axis, group: Axis) -> None:
        super().__init__()
        self.cut, self.sum = cut, AllReduce(copy, group)
        self.rank, self.size = group.rank * copy.size + copy.rank, group.size * copy.size
        self.share, self.is_first = 1 / group.size, group.rank == 0

    def assign(self, windows: Sequence[Corner]) -> Sequence[Corner]:
        return windows[self.rank :: self.size]

    def all_reduce(self, sums: Tensor) -> Tensor:
        return self.sum(sums)

    def unsharded(self) -> AbstractContextManager[None]:
        return self.cut.disabled()
