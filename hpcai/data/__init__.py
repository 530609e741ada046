"""Data loading: from files to batches on the device."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".direct": ["Reader", "MemoryPool"],
        ".layout": ["Layout"],
        ".hdf5": ["Rows"],
        ".readers": ["open_reader"],
        ".stage": ["stage_in"],
        ".loader": ["Loader", "Source"],
        ".sampler": ["Shuffled", "InOrder", "Endless", "Weighted", "Sharded", "Balanced"],
    },
)
