"""DimeNet++: energies and forces of atoms, such as adsorbates on catalysts."""

from hpcai.lazy import attach
from hpcai.models.dimenet.config import DimeNetConfig, ObjectiveConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["DimeNet"],
        ".objective": ["Batch", "counted", "loss", "score", "pairs"],
        ".graph": ["Graph", "Sizes", "Structure", "atoms", "find", "join", "sizes"],
        ".formats": ["Frame", "frames", "batch_of", "to_data", "to_ase"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights", "pyg_words"],
    },
)
__all__ = ["DimeNetConfig", "ObjectiveConfig", *_names]
