"""Layer normalisation over channels that are the last dim."""

from typing import Any

from torch import Tensor, nn

from hpcai.kernels.layernorm import layer_norm


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` of one dim, by one kernel each way on a GPU.   [..., C] of any strides -> [..., C], contiguous

    ``narrow``: under autocast the result has autocast's dtype, for layers that only products read; without it, float32 on a GPU.
    Raises ValueError for several dims.
    """

    def __init__(self, channels: int, *more: Any, narrow: bool = False, **words: Any) -> None:
        super().__init__(channels, *more, **words)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"LayerNorm over {list(self.normalized_shape)}; expected one number of channels, use nn.LayerNorm")
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.narrow)
