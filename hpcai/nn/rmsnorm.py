"""RMS normalisation over channels that are the last dim."""

import torch
from torch import Tensor, nn

from hpcai.kernels.rmsnorm import rms_norm


class RMSNorm(nn.Module):
    """w x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019), in the dtype of autocast.   [..., C] -> [..., C]"""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, autocast_output=True)
