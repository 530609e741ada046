"""R-GAT: classes of papers from a graph of papers, authors, institutes and topics, or of other nodes of a heterogeneous graph."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["RGATConfig"],
        ".batch": ["Batch"],
        ".model": ["RGAT"],
        ".objective": ["counted", "loss", "score", "predictions"],
        ".papers": ["Features", "FeatureLookup", "Papers"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
    },
)
