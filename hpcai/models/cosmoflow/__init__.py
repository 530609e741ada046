"""CosmoFlow: cosmological parameters from the matter of a universe."""

from hpcai.lazy import attach
from hpcai.models.cosmoflow.config import CosmoFlowConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["CosmoFlow", "log_density", "to_physical"],
        ".objective": ["Batch", "loss", "error", "pairs"],
        ".parallel": ["parallelize", "spatial_cut"],
        ".load": ["load_weights"],
    },
)
__all__ = ["CosmoFlowConfig", *_names]
