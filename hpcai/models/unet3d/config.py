"""Settings of the 3D U-Net, its input and its output. Does not import torch."""

from typing import Self

from pydantic import model_validator

from hpcai.config import PositiveFloat, PositiveInt, Rate, Settings


class UNet3DConfig(Settings):
    """The network of MLPerf Training's KiTS19 benchmark by default: 31,190,243 parameters."""

    channels: PositiveInt = 1
    """channels of the input"""
    classes: tuple[str, ...] = ("background", "kidney", "tumour")
    """classes of a voxel, in the order of the outputs; dice ignores the first one"""
    filters: tuple[PositiveInt, ...] = (32, 64, 128, 256, 320)
    """width at each resolution, from that of the input on; the bottleneck, at half the last resolution, has the last width"""
    window: tuple[PositiveInt, PositiveInt, PositiveInt] = (128, 128, 128)
    """voxels of one forward pass, in training and inference"""
    overlap: Rate = 0.5
    """fraction of a window that overlaps with the next one in inference"""
    spacing_mm: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1.6, 1.2, 1.2)
    """voxel sizes of the network's input"""

    @property
    def stride(self) -> int:
        """Voxels of the input per voxel of the bottleneck."""
        return 1 << len(self.filters)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.classes) < 2:
            raise ValueError(f"classes is {self.classes}; expected at least two, the first of them background")
        if not self.filters:
            raise ValueError("filters is empty; give the width of at least one resolution")
        if any(size % self.stride for size in self.window):
            sizes = " x ".join(map(str, self.window))
            raise ValueError(f"window is {sizes}; {len(self.filters)} resolutions need multiples of {self.stride}")
        if self.window == (self.stride,) * 3:
            raise ValueError(f"window is {self.stride}^3, one voxel without statistics in the bottleneck; double a side")
        return self
