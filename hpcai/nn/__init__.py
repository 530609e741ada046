"""Layers that two or more models use, for one process."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        ".batchnorm": ["BatchNorm"],
        ".instancenorm": ["InstanceNorm"],
        ".layernorm": ["LayerNorm"],
        ".groupnorm": ["GroupNorm"],
        ".conv": ["Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"],
        ".sizes": ["Multiples"],
    },
)
