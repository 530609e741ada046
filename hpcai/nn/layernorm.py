"""Layer normalisation over channels that are the last dim."""

from typing import Any

from torch import Tensor, nn

from hpcai.kernels.layernorm import layer_norm


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim, by one kernel for each pass on a GPU.   [..., C] of any strides -> [..., C], contiguous

    ``autocast_output``: Under autocast the result has the dtype of autocast, for results that only matrix products read. Otherwise
    it is float32 on a GPU. Raises ValueError for several dims.
    """

    def __init__(self, channels: int, *args: Any, autocast_output: bool = False, **kwargs: Any) -> None:
        super().__init__(channels, *args, **kwargs)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"LayerNorm over {list(self.normalized_shape)}; expected one number of channels, use nn.LayerNorm")
        self.autocast_output = autocast_output

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.autocast_output)
