"""Normalisation by the root of the mean square over channels that are the last dim."""

import torch
from torch import Tensor, nn

from hpcai.kernels.rmsnorm import rms_norm


class RMSNorm(nn.Module):
    """w x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019), as products read it.   x [..., C] -> the same"""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, narrow=True)
