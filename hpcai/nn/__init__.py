"""Layers that two or more models use. Each runs on one process; ``hpcai.parallel`` substitutes sharded ones."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".batchnorm": ["BatchNorm"],
        ".layernorm": ["LayerNorm"],
        ".groupnorm": ["GroupNorm", "InstanceNorm"],
        ".conv": ["Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"],
        ".divisible_shape": ["DivisibleShape"],
    },
)
