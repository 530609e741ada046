"""The 3D U-Net over the mesh: copies, each of which may be cut along the depth and the height of its volume."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from hpcai.dist.mesh import Axis, Mesh
from hpcai.models.unet3d.model import UNet3D
from hpcai.models.unet3d.windows import Alone, Corner
from hpcai.parallel.batchnorm import SumInPlace
from hpcai.parallel.spatial import Cut, SumOverCut, spatial


def cut_of(mesh: Mesh) -> Cut:
    """How a volume lies on the processes of a copy."""
    return Cut.over({"depth": mesh["depth"], "height": mesh["height"]}, 3)


def parallelize(model: UNet3D, mesh: Mesh, window_group: int = 1) -> UNet3D:
    """``model``, in place, whose windows are cut over ``depth`` and ``height`` in training. In inference the processes of
    ``window_group`` neighbouring copies share the windows of a volume out, and each sees whole ones: nothing travels but the sums.

    Raises MeshError for a mesh that does not fit.
    """
    mesh.check_axes("UNet3D", "replicate", "depth", "height")
    cut = spatial(model, {"depth": mesh["depth"], "height": mesh["height"]}, model.cfg.window)
    model.total = SumOverCut(cut)
    if cut.axes:
        model.fits = nn.Identity()
    _, group = mesh.split("replicate", window_group, "data.window_group")
    model.windows.team = Team(cut, mesh.model_parallel, group)
    return model


class Team(Alone):
    """The processes of a copy, and of the neighbouring copies of ``group``: each sees every n-th window, whole."""

    def __init__(self, cut: Cut, copy: Axis, group: Axis) -> None:
        super().__init__()
        self.cut, self.sum = cut, SumInPlace(copy, group)
        self.rank, self.size = group.rank * copy.size + copy.rank, group.size * copy.size
        self.share, self.is_first = 1 / group.size, group.rank == 0

    def mine(self, windows: Sequence[Corner]) -> Sequence[Corner]:
        return windows[self.rank :: self.size]

    def total(self, sums: Tensor) -> Tensor:
        return self.sum(sums)

    def whole_windows(self) -> AbstractContextManager[None]:
        return self.cut.off()
