"""Data parallelism of the 3D U-Net, and spatial sharding of its volumes along depth and height."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.models.unet3d.model import UNet3D
from hpcai.models.unet3d.windows import Corner, WindowGroup
from hpcai.parallel.batchnorm import AllReduce
from hpcai.parallel.spatial import SpatialPartition, SpatialSum, parallelize_spatial


def parallelize(model: UNet3D, mesh: Mesh, window_group: int = 1) -> UNet3D:
    """Shard the windows of training over ``depth`` and ``height``, in place, and return ``model``. In inference the ranks of
    ``window_group`` neighbouring replicas divide the unsharded windows of a volume; only sums are communicated.

    Raises MeshError if the mesh does not fit.
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
    """The ranks of ``copy`` and of ``group``, the neighbouring replicas: each computes every n-th window, unsharded."""

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
