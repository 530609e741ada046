"""Batches of sub-graphs around papers.   L layers = hops, S seeds, F features"""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Papers, the seeds, with the sub-graph of their neighbours. A node is new in the hop in which it first appears; the edges of
    hop h end in nodes that are new in hop h - 1. Nodes of a type are numbered over all hops."""

    features: dict[str, tuple[Tensor, ...]]
    """of each node type, hops 0 (seeds) to L: nodes that are new in that hop [N_h, F]"""
    edges: dict[str, tuple[Tensor, ...]]
    """of each relation "source___relation___destination", hops 1 to L: sources and destinations [2, E_h], the latter ascending"""
    labels: Tensor
    """[S] classes of the seeds, -1: unknown, or padding"""
    papers: Tensor
    """[S] numbers of the seeds in the data, -1: padding"""
