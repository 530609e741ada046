"""Data parallelism of RetinaNet, and spatial sharding of its images along the height."""

from collections.abc import Sequence

from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.retinanet.config import STRIDE, RetinaNetConfig
from hpcai.models.retinanet.model import Anchors, Level, RetinaNet
from hpcai.parallel.batchnorm import convert_sync_batchnorm
from hpcai.parallel.spatial import SpatialPartition, SpatialSum, parallelize_spatial


def parallelize(model: RetinaNet, mesh: Mesh, batchnorm_group: int = 1, size: Sequence[int] | None = None) -> RetinaNet:
    """Group the batch norms of ``batchnorm_group`` neighbouring replicas and shard images over ``height``, in place, and return
    ``model``. ``size`` (H, W) of the input, after padding, is by default that of its settings. Objects of a batch are those of the
    full image. Raises MeshError if the mesh does not fit."""
    mesh.check_axes("RetinaNet", "replicate", "height")
    convert_sync_batchnorm(model, mesh, batchnorm_group)
    if mesh["height"].size > 1:
        size = tuple(size or model.cfg.size)
        if any(side % STRIDE for side in size):
            raise MeshError(f"mesh.height is {mesh['height'].size}: images are {size}, expected multiples of {STRIDE}")
        cut = parallelize_spatial(model, {"height": mesh["height"]}, size)
        model.spatial_sum, model.anchors = SpatialSum(cut), ShardedAnchors(model.cfg, cut, size)
        model.check_divisible = nn.Identity()  # of shards
    return model


class ShardedAnchors(Anchors):
    """Rows of the levels that are sharded, and all of those that are replicated, whose sums count once among the ranks."""

    def __init__(self, cfg: RetinaNetConfig, cut: SpatialPartition, size: Sequence[int]) -> None:
        super().__init__(cfg)
        self.cut, self.size = cut, tuple(size)

    def image_size(self, images: Tensor) -> Sequence[int]:
        return self.size

    def first_row(self, size: Sequence[int]) -> int:
        return self.cut.local_range(2, size[0])[0]

    def split(self, values: Tensor, size: Sequence[int]) -> list[tuple[Tensor, float]]:
        ranks = self.cut.axes[2].size
        parts = [(part, part.shape[1]) for part, _ in super().split(values, size)]
        shares = [1.0 if self.cut.is_sharded(2, height) else 1 / ranks for _, height in parts]
        return [(part[:, slice(*self.cut.local_range(2, height))], share) for (part, height), share in zip(parts, shares)]

    def gather(self, levels: Sequence[Level], size: Sequence[int]) -> Sequence[Level]:
        def full(x: Tensor, grid: tuple[int, int]) -> Tensor:  # the partition has maps [B, C, h, w]
            return self.cut.gather(x.flatten(3).permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1).unflatten(3, x.shape[3:])

        return [(full(logits, grid), full(codes, grid)) for (logits, codes), grid in zip(levels, self.grids(size))]

    def full(self, images: Tensor) -> Tensor:
        return self.cut.gather(images.permute(0, 3, 1, 2), self.size).permute(0, 2, 3, 1)
