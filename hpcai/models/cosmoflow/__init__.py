"""CosmoFlow: cosmological parameters from the matter of a universe."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["CosmoFlowConfig"],
        ".model": ["CosmoFlow", "log_density", "to_physical"],
        ".objective": ["Batch", "loss", "error", "pairs"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
    },
)
