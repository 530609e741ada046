"""OpenFold: the structure of a protein from its sequence and its relatives', as AlphaFold 2 has it."""

from hpcai.lazy import lazy
from hpcai.models.openfold.config import ObjectiveConfig, OpenFoldConfig

__getattr__, _names = lazy(
    __name__,
    {
        "OpenFold": ".model",
        "Prediction": ".model",
        "Alignment": ".alignments",
        "read_alignments": ".alignments",
        "Chain": ".structures",
        "read_mmcif": ".structures",
        "read_templates": ".templates",
        "FeatureConfig": ".features",
        "featurize": ".features",
        "Fold": ".folding",
        "loss": ".objective",
        "lddt": ".objective",
        "score": ".scores",
        "structures_of": ".scores",
        "parallelize": ".parallel",
        "parts_of": ".formats",
        "raw_of": ".formats",
        "batch_of": ".formats",
        "processed_of": ".formats",
        "load_weights": ".load",
        "save_weights": ".load",
    },
)
__all__ = ["ObjectiveConfig", "OpenFoldConfig", *_names]
