"""Settings of RetinaNet. Does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeInt, PositiveFloat, PositiveInt, Rate, Settings

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue
STRIDE = 32  # pixels of the image per pixel of the deepest stage; sides of the input are multiples of it


class RetinaNetConfig(Settings):
    """The network of MLPerf by default, a ResNeXt-50 with 37,060,652 parameters for 264 classes."""

    layers: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (3, 4, 6, 3)
    """blocks of each stage"""
    base_width: PositiveInt = 64
    """width of the stem and of the first stage, from which all others follow"""
    groups: PositiveInt = 32
    """groups of the 3 x 3 convolutions; 1, with width_per_group 64, in ResNet-50"""
    width_per_group: PositiveInt = 4
    """channels of a group, for a stage of 64"""
    norm: Literal["frozen", "batch"] = "frozen"
    """norms of the backbone: frozen statistics and weights, or batch norms"""
    norm_eps: Annotated[float, Field(ge=0)] = 1e-5
    """added to the variance; 0 for the weights COCO_V1 of torchvision"""
    trainable_layers: Annotated[int, Field(ge=0, le=5)] = 3
    """stages of the backbone that are trained, from the last; the stem is the first of five"""
    fpn_channels: PositiveInt = 256
    """width of the pyramid and of the heads"""
    p6: Literal["p5", "c5"] = "p5"
    """input of the level P6: the output P5, or the last stage (torchvision's v2)"""
    head_norm_groups: NonNegativeInt = 0
    """groups of the group norms of the heads; 0: none, 32 in torchvision's v2"""
    anchor_sizes: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt, PositiveInt] = (32, 64, 128, 256, 512)
    """side of the smallest square anchor of each level, in pixels of the input; two more are larger by 2^(1/3) and 2^(2/3)"""
    aspect_ratios: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.5, 1.0, 2.0)
    """height over width of the anchors"""
    classes: tuple[str, ...] = ()
    """names of the classes, in the order of the outputs; empty: read from the data, or numbers"""
    num_classes: PositiveInt | None = None
    """number of classes; null: read from the data, 264 without data"""
    resize: Literal["fixed", "shorter"] = "fixed"
    """fixed: images are stretched to `size` (MLPerf); shorter: their shorter side becomes `shorter` unless the longer one would
    exceed `longer`, and a batch is padded at the bottom and right to multiples of 32 (torchvision)"""
    size: tuple[PositiveInt, PositiveInt] = (800, 800)
    """height and width"""
    shorter: PositiveInt = 800
    longer: PositiveInt = 1333
    mean: tuple[float, float, float] = MEAN
    """mean of red, green and blue, on a scale of 0 to 1, subtracted from the input"""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = STD
    """standard deviation of red, green and blue, by which the input is divided"""
    foreground_iou: Rate = 0.5
    """an anchor is foreground from this overlap with an object"""
    background_iou: Rate = 0.4
    """an anchor is background below this overlap; those between are ignored"""
    alpha: float = 0.25
    """weight of the foreground in the focal loss, 1 - alpha of the background; negative: none"""
    gamma: Annotated[float, Field(ge=0)] = 2.0
    """exponent of the focal loss"""
    score_threshold: Rate = 0.05
    """detections have higher scores"""
    candidates: PositiveInt = 1000
    """best detections of each level before those that overlap are removed"""
    nms_threshold: Rate = 0.5
    """detections of a class that overlap more than this with a better one are removed"""
    detections: PositiveInt = 300
    """detections of an image at most; 100 in COCO"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names, norms = len(self.classes), self.head_norm_groups
        for problem, text in (
            (names and self.num_classes not in (None, names), f"num_classes is {self.num_classes}, but classes has {names} names"),
            (len(set(self.classes)) < names, f"classes {self.classes} contains a duplicate"),
            (any(side % STRIDE for side in self.size), f"size is {self.size}; expected multiples of {STRIDE}"),
            (self.background_iou > self.foreground_iou, f"background_iou exceeds foreground_iou, {self.foreground_iou}"),
            (self.shorter > self.longer, f"shorter is {self.shorter}, above longer, {self.longer}"),
            (norms and self.fpn_channels % norms, f"fpn_channels is {self.fpn_channels}; expected a multiple of {norms} groups"),
        ):  # fmt: skip
            if problem:
                raise ValueError(text)
        return self

    @property
    def outputs(self) -> int:
        return len(self.classes) or self.num_classes or 264

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.classes or tuple(map(str, range(self.outputs)))

    @property
    def anchors_per_cell(self) -> int:
        return 3 * len(self.aspect_ratios)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of an image in the network, before padding."""
        if self.resize == "fixed":
            return self.size
        scale = min(self.shorter / min(height, width), self.longer / max(height, width))
        return max(int(height * scale), 1), max(int(width * scale), 1)
