"""RMS normalisation over channels that are the last dim."""

import torch
from torch import Tensor, nn

from hpcai.kernels.rmsnorm import rms_norm


class RMSNorm(nn.Module):
    """w x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019), in the dtype of autocast; (1 + w) in place of w if ``zero_centered``.
    [..., C] -> [..., C]"""

    def __init__(self, channels: int, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(channels) if zero_centered else torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) if self.zero_centered else self.weight
        return rms_norm(x, weight, self.eps, autocast_output=True)
