"""Samples from files to the device."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(__name__, {"Rows": ".hdf5", "Loader": ".loader", "Source": ".loader", "order": ".sampler"})
