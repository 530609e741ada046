"""Instance normalisation together with the activation that follows it (Ulyanov et al. 2016, arXiv:1607.08022)."""

from torch import nn

from hpcai.nn.groupnorm import PerSampleNorm


class InstanceNorm(PerSampleNorm, nn.modules.instancenorm._InstanceNorm):
    """``nn.InstanceNorm`` of any number of dims, with weights and without running statistics, then an activation; see
    ``PerSample``: each channel is a group.   [B, C, ...] -> the same

    Keys are those of ``nn.InstanceNorm3d(affine=True)``.
    """

    def __init__(self, channels: int, activation: str | None = None, slope: float = 0.01, eps: float = 1e-5) -> None:
        super().__init__(channels, eps, affine=True)
        self.set_activation(channels, 1, activation, slope)
