"""OpenFold: protein structure prediction from a sequence and its multiple sequence alignment, as in AlphaFold 2."""

from hpcai.lazy import attach
from hpcai.models.openfold.config import FeatureConfig, ObjectiveConfig, OpenFoldConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["OpenFold", "Prediction"],
        ".alignments": ["Alignment", "read_alignments"],
        ".structures": ["Chain", "read_mmcif", "read_structure"],
        ".templates": ["read_templates"],
        ".features": ["featurize"],
        ".folding": ["Fold"],
        ".objective": ["loss", "lddt"],
        ".scores": ["score", "predict_structures"],
        ".parallel": ["parallelize"],
        ".formats": ["parse_features"],
        ".load": ["load_weights"],
    },
)
__all__ = ["FeatureConfig", "ObjectiveConfig", "OpenFoldConfig", *_names]
