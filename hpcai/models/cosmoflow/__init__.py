"""CosmoFlow: cosmological parameters from the matter of a universe."""

from hpcai.lazy import lazy
from hpcai.models.cosmoflow.config import CosmoFlowConfig

__getattr__, _names = lazy(
    __name__,
    {
        "CosmoFlow": ".model",
        "log_density": ".model",
        "to_physical": ".model",
        "Batch": ".objective",
        "loss": ".objective",
        "error": ".objective",
        "pairs": ".objective",
        "parallelize": ".parallel",
        "cut_of": ".parallel",
        "load_weights": ".load",
        "save_weights": ".load",
    },
)
__all__ = ["CosmoFlowConfig", *_names]
