"""DimeNet++: energies and forces of atoms, such as adsorbates on catalysts."""

from hpcai.lazy import attach
from hpcai.models.dimenet.config import DimeNetConfig, ObjectiveConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["DimeNet"],
        ".objective": ["Batch", "counted", "loss", "score", "pairs"],
        ".graph": ["Graph", "Sizes", "Structure", "build_structure", "build_structure_for_model", "collate", "graph_sizes"],
        ".formats": ["Frame", "read_frames", "make_batch", "to_data", "to_ase"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights", "pyg_kwargs"],
    },
)
__all__ = ["DimeNetConfig", "ObjectiveConfig", *_names]
