"""DimeNet++: energies and forces of atoms, such as adsorbates on catalysts."""

from hpcai.lazy import lazy
from hpcai.models.dimenet.config import DimeNetConfig, ObjectiveConfig

__getattr__, _names = lazy(
    __name__,
    {
        "DimeNet": ".model",
        "Batch": ".objective",
        "loss": ".objective",
        "score": ".objective",
        "pairs": ".objective",
        "Graph": ".graph",
        "Sizes": ".graph",
        "Structure": ".graph",
        "atoms": ".graph",
        "find": ".graph",
        "join": ".graph",
        "sizes": ".graph",
        "Frame": ".formats",
        "frames": ".formats",
        "batch_of": ".formats",
        "to_data": ".formats",
        "to_ase": ".formats",
        "parallelize": ".parallel",
        "load_weights": ".load",
        "save_weights": ".load",
        "pyg_words": ".load",
    },
)
__all__ = ["DimeNetConfig", "ObjectiveConfig", *_names]
