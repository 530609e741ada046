"""ResNet: classification of images (He et al., CVPR 2016), with the stride of a block in its 3 x 3 convolution (v1.5).

Names of parameters are those of torchvision, and of timm.   B batch, H W the image, K classes
"""

from typing import Any

import torch
from torch import Tensor, nn

from hpcai.models.resnet.config import ResNetConfig
from hpcai.nn.conv import channels_last
from hpcai.nn.resnet import BasicBlock, Bottleneck, ResNetBody
from hpcai.nn.weights import PretrainedMixin


class ResNet(ResNetBody, PretrainedMixin):
    """Maps normalised images [B, 3, H, W] to logits [B, K]. Weights and activations are channels-last."""

    package = __package__
    mean: Tensor  # [3] on the scale of uint8
    scale: Tensor  # [3]

    def __init__(self, cfg: ResNetConfig | None = None) -> None:
        cfg = cfg or ResNetConfig()
        block = Bottleneck if cfg.block == "bottleneck" else BasicBlock
        super().__init__(cfg.layers, cfg.base_width, block=block, groups=cfg.groups, width_per_group=cfg.width_per_group)
        self.cfg = cfg
        self.fc = nn.Linear(self.widths[-1], cfg.outputs)
        if cfg.zero_init_residual:
            for module in self.modules():
                if isinstance(module, (BasicBlock, Bottleneck)):
                    last: Any = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                    nn.init.zeros_(last.weight)
        # Not persistent, since they follow from the settings: the keys of a checkpoint are those of torchvision.
        self.register_buffer("mean", 255 * torch.tensor(cfg.mean), persistent=False)
        self.register_buffer("scale", 1 / (255 * torch.tensor(cfg.std)), persistent=False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(channels_last(x))[-1].mean((2, 3)))

    def normalised(self, images: Tensor) -> Tensor:
        """Return the input of the network: (x/255 - mean)/std (``cfg.mean``, ``cfg.std``).

        [B, H, W, 3] uint8 -> [B, 3, H, W], a permuted view of channels-last memory
        """
        return ((images.to(self.scale.dtype) - self.mean) * self.scale).permute(0, 3, 1, 2)
