"""DimeNet++: energies and forces of atoms, such as adsorbates on catalysts."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["DimeNetConfig", "ObjectiveConfig"],
        ".model": ["DimeNet"],
        ".objective": ["Batch", "counted", "loss", "score", "pairs"],
        ".graph": ["Graph", "Sizes", "Structure", "build_structure", "build_structure_for_model", "collate", "graph_sizes"],
        ".formats": ["Frame", "read_frames", "make_batch", "to_data", "to_ase"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights", "pyg_kwargs"],
    },
)
