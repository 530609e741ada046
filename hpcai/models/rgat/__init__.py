"""R-GAT: classes of the nodes of a heterogeneous graph, such as the fields of papers."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["RGATConfig"],
        ".batch": ["Batch"],
        ".model": ["RGAT"],
        ".objective": ["counted", "loss", "score", "predictions"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
    },
)
