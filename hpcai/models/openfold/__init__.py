"""OpenFold: protein structure prediction from a sequence and its multiple sequence alignment, as in AlphaFold 2."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["FeatureConfig", "ObjectiveConfig", "OpenFoldConfig"],
        ".model": ["OpenFold", "Prediction"],
        ".alignments": ["Alignment", "read_alignments"],
        ".structures": ["Chain", "read_structure"],
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
