"""Layers that two or more models use, for one process."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(__name__, {"BatchNorm": ".batchnorm", "Conv2d": ".conv", "Conv3d": ".conv", "ConvTranspose2d": ".conv"})
