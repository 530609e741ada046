"""Settings of ResNet. Does not import torch."""

from typing import Literal, Self

from pydantic import model_validator

from hpcai.config import PositiveFloat, PositiveInt, Rate, Settings

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue


class ResNetConfig(Settings):
    """ResNet-50 v1.5 of MLPerf and torchvision by default: 25,557,032 parameters with 1,000 classes."""

    block: Literal["bottleneck", "basic"] = "bottleneck"
    """basic: two 3 x 3 convolutions (ResNet-18 and -34); bottleneck: 1 x 1, 3 x 3, 1 x 1"""
    layers: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (3, 4, 6, 3)
    """blocks of each stage"""
    base_width: PositiveInt = 64
    """width of the stem and of the first stage, from which all others follow"""
    groups: PositiveInt = 1
    """groups of the 3 x 3 convolutions: 32 in ResNeXt-50, with width_per_group 4"""
    width_per_group: PositiveInt = 64
    """channels of a group, for a stage of 64"""
    zero_init_residual: bool = False
    """the last norm of each block begins with weight 0, so that blocks begin as the identity (Goyal et al. 2017)"""
    classes: tuple[str, ...] = ()
    """names of the classes, in the order of the outputs; empty: read from the data, or numbers"""
    num_classes: PositiveInt | None = None
    """number of classes; null: read from the data, 1000 without data"""
    size: PositiveInt = 224
    """height and width of the input in pixels"""
    resize: PositiveInt = 256
    """shorter side in evaluation, before the center of `size` is cropped"""
    mean: tuple[float, float, float] = MEAN
    """mean of red, green and blue, on a scale of 0 to 1, subtracted from the input"""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = STD
    """standard deviation of red, green and blue, by which the input is divided"""
    label_smoothing: Rate = 0.1
    """weight of the uniform distribution in the target (Szegedy et al. 2016)"""
    temperature: PositiveFloat = 1.0
    """divisor of the logits of a prediction, for calibrated probabilities (Guo et al. 2017; `fit_temperature`)"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.classes and self.num_classes not in (None, len(self.classes)):
            raise ValueError(f"num_classes is {self.num_classes}, but classes has {len(self.classes)} names; give one of them")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes {self.classes} contains a duplicate")
        if self.resize < self.size:
            raise ValueError(f"resize is {self.resize} and size {self.size}; the resized image must not be smaller")
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise ValueError("groups and width_per_group are for bottleneck blocks; set block to bottleneck")
        return self

    @property
    def outputs(self) -> int:
        """The number of classes."""
        return len(self.classes) or self.num_classes or 1000

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.classes or tuple(map(str, range(self.outputs)))
