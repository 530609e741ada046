"""DLRM-dcnv2: probabilities of clicks, or of other events, from numbers and from ids of tables with many rows."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["DLRMConfig"],
        ".model": ["DLRM"],
        ".objective": ["Batch", "auc", "loss", "predictions"],
        ".parallel": ["auc_of_ranks", "exchange", "parallelize"],
        ".load": ["load_weights"],
    },
)
