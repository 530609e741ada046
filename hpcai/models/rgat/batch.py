"""The batch of R-GAT: sampled neighbours of papers.   L layers (hops), S seeds, F features"""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Sub-graphs of seeds, the papers to classify. A node is new in the hop in which it first appears; the edges of hop h end in
    nodes that are new in hop h - 1. A padded batch has further nodes, of zero features, and edges among these."""

    features: dict[str, tuple[Tensor, ...]]  # of each node type, hops 0 (seeds) to L: new nodes [N_h, F]
    edges: dict[str, tuple[Tensor, ...]]
    """of each relation "src___rel___dst", hops 1 to L: numbers of nodes within their type (source, destination), ascending by
    destination [2, E_h] int64"""
    labels: Tensor  # [S]; -1: unknown or padding
    papers: Tensor  # [S] ids of the seeds; -1: padding
