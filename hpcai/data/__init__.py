"""Samples from files to the device."""

from hpcai.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Reader": ".direct",
        "Memory": ".direct",
        "Layout": ".layout",
        "Rows": ".hdf5",
        "Files": ".npy",
        "open_reader": ".readers",
        "stage_in": ".stage",
        "Loader": ".loader",
        "Source": ".loader",
        "Shuffled": ".sampler",
        "InOrder": ".sampler",
        "Endless": ".sampler",
        "Weighted": ".sampler",
        "Sharded": ".sampler",
        "Balanced": ".sampler",
    },
)
