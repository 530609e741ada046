"""Shape of the 3D U-Net and the meaning of its input and output. No torch here."""

from typing import Self

from pydantic import model_validator

from hpcai.config import PositiveFloat, PositiveInt, Rate, Settings


class UNet3DConfig(Settings):
    """The network of MLPerf Training's KiTS19 benchmark by default: 31,190,243 parameters."""

    channels: PositiveInt = 1
    """channels of the input"""
    classes: tuple[str, ...] = ("background", "kidney", "tumour")
    """what a voxel can be, in the order of the outputs; the first one has no part in the dice"""
    filters: tuple[PositiveInt, ...] = (32, 64, 128, 256, 320)
    """width at each resolution, from that of the input on; one more halving, as wide as the last, is the bottleneck"""
    window: tuple[PositiveInt, PositiveInt, PositiveInt] = (128, 128, 128)
    """voxels that the network sees at a time, in training and inference"""
    overlap: Rate = 0.5
    """share of a window that the next one covers, too, in inference"""
    spacing_mm: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1.6, 1.2, 1.2)
    """sides of the voxels that the network sees"""

    @property
    def stride(self) -> int:
        """voxels of the input per voxel of the bottleneck"""
        return 1 << len(self.filters)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.classes) < 2:
            raise ValueError(f"classes is {self.classes}; expected at least two, the first one being what is none of the others")
        if not self.filters:
            raise ValueError("filters is empty; give the width of at least one resolution")
        if any(size % self.stride for size in self.window):
            sizes = " x ".join(map(str, self.window))
            raise ValueError(f"window is {sizes}; {len(self.filters)} resolutions need multiples of {self.stride}")
        if self.window == (self.stride,) * 3:
            raise ValueError(f"window is {self.stride}^3, of which the bottleneck has one voxel, and no statistics; double a side")
        return self
