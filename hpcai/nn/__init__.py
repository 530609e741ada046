"""Layers that two or more models use, for one process."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "BatchNorm": ".batchnorm",
        "InstanceNorm": ".instancenorm",
        "Conv2d": ".conv",
        "Conv3d": ".conv",
        "ConvTranspose2d": ".conv",
        "ConvTranspose3d": ".conv",
        "Multiples": ".sizes",
    },
)
