"""Instance normalisation fused with an activation (Ulyanov et al. 2016, arXiv:1607.08022)."""

from torch import nn

from hpcai.nn.groupnorm import PerSampleNorm


class InstanceNorm(PerSampleNorm, nn.modules.instancenorm._InstanceNorm):
    """``nn.InstanceNorm`` of any number of dims, with weights and without running statistics, then an activation.

    It is a ``PerSampleNorm`` with a group for each channel. Keys are those of ``nn.InstanceNorm3d(affine=True)``.
    Shape: x [B, C, ...] -> [B, C, ...]
    """

    def __init__(self, channels: int, activation: str | None = None, eps: float = 1e-5) -> None:
        super().__init__(channels, eps, affine=True)
        self.set_activation(channels, 1, activation)
