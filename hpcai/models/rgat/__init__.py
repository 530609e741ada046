"""R-GAT: classes of papers from a graph of papers, authors, institutes and topics."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".batch": ["Batch"],
        ".papers": ["Features", "FeatureLookup", "Papers"],
    },
)
