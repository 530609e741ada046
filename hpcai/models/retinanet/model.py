"""RetinaNet: detection of objects with a feature pyramid and a focal loss (Lin et al., ICCV 2017, arXiv:1708.02002).

The network is that of MLPerf, or torchvision's; parameter names are those of torchvision 0.28. B batch, C channels, H W the image,
h w a level of the pyramid, A anchors of a cell, K classes, D detections
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.models.retinanet.boxes import cell_anchors, clip_boxes, decode, grid_anchors, nms
from hpcai.models.retinanet.config import STRIDE, RetinaNetConfig
from hpcai.nn import BatchNorm, Conv2d, DivisibleShape, GroupNorm
from hpcai.nn.conv import channels_last
from hpcai.nn.resnet import FrozenBatchNorm, ResNetBody
from hpcai.nn.weights import PretrainedMixin

Level = tuple[Tensor, Tensor]  # logits [B, h, w, A, K] and coded boxes [B, h, w, A, 4]


class Pyramid(nn.Module):
    """Maps the last three stages of the body to five levels of one width, P3 to P7 (Lin et al. 2017, arXiv:1612.03144)."""

    def __init__(self, widths: Sequence[int], channels: int, p6: str) -> None:
        super().__init__()
        self.inner_blocks = nn.ModuleList(nn.Sequential(Conv2d(width, channels, 1)) for width in widths)
        self.layer_blocks = nn.ModuleList(nn.Sequential(Conv2d(channels, channels, 3, 1, 1)) for _ in widths)
        inputs = channels if p6 == "p5" else widths[-1]
        self.extra_blocks = nn.ModuleDict({"p6": Conv2d(inputs, channels, 3, 2, 1), "p7": Conv2d(channels, channels, 3, 2, 1)})
        self.upsample, self.from_p5 = nn.Upsample(scale_factor=2), p6 == "p5"
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        inner: Any = None
        levels: list[Tensor] = []
        for x, inner_block, layer_block in reversed([*zip(features, self.inner_blocks, self.layer_blocks)]):
            inner = inner_block(x) if inner is None else inner_block(x) + self.upsample(inner)
            levels.insert(0, layer_block(inner))
        levels.append(self.extra_blocks["p6"](levels[-1] if self.from_p5 else features[-1]))
        levels.append(self.extra_blocks["p7"](F.relu(levels[-1])))
        return levels


class Head(nn.Module):
    """Four 3 x 3 convolutions and one for the outputs, shared by all levels.   [B, C, h, w] -> [B, h, w, A, outputs]"""

    def __init__(self, cfg: RetinaNetConfig, name: str, outputs: int) -> None:
        super().__init__()
        width, norms = cfg.fpn_channels, cfg.head_norm_groups
        self.conv = nn.Sequential()
        for _ in range(4):
            act = GroupNorm(norms, width, activation="relu") if norms else nn.ReLU(inplace=True)
            self.conv.append(nn.Sequential(Conv2d(width, width, 3, 1, 1, bias=not norms), act))
        self.name, self.outputs = name, outputs
        self.add_module(name, Conv2d(width, cfg.anchors_per_cell * outputs, 3, 1, 1))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(self.conv(x)).permute(0, 2, 3, 1).unflatten(3, (-1, self.outputs))


class Anchors(nn.Module):
    """Anchors of the cells of all levels. This is a seam: where images are sharded, this rank has rows of some levels."""

    cells: Tensor  # [5, A, 4] around the corner of a cell

    def __init__(self, cfg: RetinaNetConfig) -> None:
        super().__init__()
        # Integers, since a model in bfloat16 would round other buffers.
        cells = torch.stack([cell_anchors(size, cfg.aspect_ratios) for size in cfg.anchor_sizes])
        self.register_buffer("cells", cells, persistent=False)

    def image_size(self, images: Tensor) -> Sequence[int]:
        """Return height and width of the full images.   [B, H, W, 3]"""
        return images.shape[1:3]

    def first_row(self, size: Sequence[int]) -> int:
        """Return the row of the full image of ``size`` (H, W) with which that of this rank begins."""
        return 0

    def grids(self, size: Sequence[int]) -> list[tuple[int, int]]:
        """Return the cells of each level (h, w) of an image of ``size`` (H, W): 1/8 to 1/128 of it, rounded up."""
        return [(-(-size[0] // stride), -(-size[1] // stride)) for stride in (8, 16, 32, 64, 128)]

    def forward(self, size: Sequence[int]) -> list[Tensor]:
        """Return the anchors of each level of a full image.   [h, w, A, 4] float32"""
        return [grid_anchors(cells, grid, size) for cells, grid in zip(self.cells, self.grids(size))]

    def split(self, values: Tensor, size: Sequence[int]) -> list[tuple[Tensor, float]]:
        """Return values of all anchors by level, and the weight of their sum among ranks.
        [B, anchors, ...] -> [B, h, w, A, ...]"""
        grids = self.grids(size)
        parts = values.split([h * w * self.cells.shape[1] for h, w in grids], 1)
        return [(part.unflatten(1, (*grid, -1)), 1.0) for part, grid in zip(parts, grids)]

    def gather(self, levels: Sequence[Level], size: Sequence[int]) -> Sequence[Level]:
        """Return the outputs for full images."""
        return levels

    def full(self, images: Tensor) -> Tensor:
        """Return full images.   [B, H, W, 3]"""
        return images


class RetinaNet(PretrainedMixin):
    """Maps normalised images [B, 3, H, W] to logits [B, h, w, A, K] and coded boxes [B, h, w, A, 4] of five levels. H and W are
    multiples of 32; raises ValueError for others. Weights and activations are channels-last."""

    package = __package__
    mean: Tensor  # [3] on the scale of uint8
    scale: Tensor  # [3]

    def __init__(self, cfg: RetinaNetConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or RetinaNetConfig()
        norm = partial(FrozenBatchNorm if cfg.norm == "frozen" else BatchNorm, eps=cfg.norm_eps)
        body = ResNetBody(cfg.layers, cfg.base_width, groups=cfg.groups, width_per_group=cfg.width_per_group, norm=norm)
        self.backbone: Any = nn.ModuleDict({"body": body, "fpn": Pyramid(body.widths[1:], cfg.fpn_channels, cfg.p6)})
        classification: Any = Head(cfg, "cls_logits", cfg.outputs)
        nn.init.constant_(classification.cls_logits.bias, -math.log(99.0))  # foreground has probability 0.01
        self.head: Any = nn.ModuleDict({"classification_head": classification, "regression_head": Head(cfg, "bbox_reg", 4)})
        stages = "conv1.", "bn1.", "layer1.", "layer2.", "layer3.", "layer4."
        frozen = stages[: 6 - cfg.trainable_layers] if cfg.trainable_layers < 5 else ()
        for name, parameter in body.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        self.anchors = Anchors(cfg)
        self.check_divisible: nn.Module = DivisibleShape(STRIDE, "pixels")
        self.spatial_sum: nn.Module = nn.Identity()  # seam: all-reduce of sums over a sharded image
        # Not persistent, since they follow from the settings: the keys of a checkpoint are those of torchvision.
        self.register_buffer("mean", 255 * torch.tensor(cfg.mean), persistent=False)
        self.register_buffer("scale", 1 / (255 * torch.tensor(cfg.std)), persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> list[Level]:
        levels = self.backbone["fpn"](self.backbone["body"].features(channels_last(self.check_divisible(x)))[1:])
        return [(self.head["classification_head"](level), self.head["regression_head"](level)) for level in levels]

    def normalised(self, images: Tensor, within: Tensor | None = None) -> Tensor:
        """Return the input of the network: (x/255 - mean)/std (``cfg.mean``, ``cfg.std``), and 0 outside of ``within`` (height and
        width of each image in its padded frame) if images are padded.

        [B, H, W, 3] uint8, [B, 2] -> [B, 3, H, W], a permuted view of channels-last memory
        """
        x = (images.to(self.scale.dtype) - self.mean) * self.scale
        if within is not None and self.cfg.resize != "fixed":
            rows, columns = (torch.arange(n, device=x.device) for n in x.shape[1:3])
            rows = rows + self.anchors.first_row(self.anchors.image_size(images))
            x = x * ((rows[:, None] < within[:, :1, None]) & (columns < within[:, 1:, None]))[..., None]
        return x.permute(0, 3, 1, 2)

    def select(self, levels: Sequence[Level], size: Sequence[int], within: Tensor, original: Tensor) -> Tensor:
        """Return the detections of outputs for images of ``size`` (H, W): x1 y1 x2 y2 score class, by score, padded with score 0
        and class -1. Boxes are clipped to ``within``, height and width of the image in its frame, and scaled to ``original``.

        Of each level the best ``cfg.candidates`` with scores above ``cfg.score_threshold`` are taken, and of all levels the best
        ``cfg.detections`` after non-maximum suppression by class.   Shape: within and original [B, 2] -> [B, D, 6]
        """
        cfg, parts = self.cfg, []
        for (logits, codes), anchors in zip(levels, self.anchors(size)):
            flat = logits.flatten(1)
            top, index = flat.topk(min(cfg.candidates, flat.shape[1]))
            cell = index // cfg.outputs
            code = codes.flatten(1, 3).gather(1, cell[..., None].expand(-1, -1, 4))
            boxes = clip_boxes(decode(wide(code), anchors.view(-1, 4)[cell]), within[:, None])
            parts.append((boxes, wide(top).sigmoid(), index % cfg.outputs))
        boxes, scores, labels = (torch.cat(values, 1) for values in zip(*parts))
        scores = scores.masked_fill(~(scores > cfg.score_threshold), -torch.inf)
        kept = nms(boxes, scores, labels, cfg.nms_threshold, cfg.detections)[..., None]
        ratio = (original.to(boxes.dtype) / within.to(boxes.dtype)).flip(1).repeat(1, 2)[:, None]
        rows = torch.cat((boxes * ratio, scores[..., None], labels[..., None].to(boxes.dtype)), 2)
        rows = rows.gather(1, kept.clamp(min=0).expand(-1, -1, 6))
        missing = kept < 0
        return torch.cat((rows[..., :5].masked_fill(missing, 0.0), rows[..., 5:].masked_fill(missing, -1.0)), 2)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()
