"""Batches of heterogeneous graphs for tests."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpcai.models.rgat import Batch


def ascending(edges: Tensor) -> Tensor:
    """Return the edges, ascending by destination, in a stable order.   [2, E]"""
    return edges[:, edges[1].argsort(stable=True)]


def full_batch(x: Mapping[str, Tensor], edges: Mapping[str, Tensor], labels: Tensor, layers: int) -> Batch:
    """Return the full graph, whose nodes are all in hop 0, and edges in hop 1."""
    features = {kind: (value, *[value[:0]] * layers) for kind, value in x.items()}
    hops = {name: (ascending(value), *[value[:, :0]] * (layers - 1)) for name, value in edges.items()}
    return Batch(features, hops, labels, torch.arange(len(labels)))


def split_batch(
    x: Mapping[str, Tensor], nodes: Sequence[Mapping[str, int]], edges: Mapping[str, Tensor], counts: Sequence[Mapping[str, int]],
    labels: Tensor,
) -> Batch:  # fmt: skip
    """Return a sub-graph in hops: ``nodes`` after each of them, ``counts`` of edges in each."""
    features = {k: tuple(v.split([nodes[0][k], *(after[k] - n[k] for n, after in zip(nodes, nodes[1:]))])) for k, v in x.items()}
    hops = {r: tuple(map(ascending, v.split([hop[r] for hop in counts], 1))) for r, v in edges.items()}
    return Batch(features, hops, labels, torch.arange(len(labels)))


def random_batch(seed: int, relations: Sequence[str], width: int, seeds: int, layers: int = 2, classes: int = 3) -> Batch:
    """Return a random sub-graph in float64 with isolated nodes, pairs twice and seeds of unknown class."""
    generator = torch.Generator().manual_seed(seed)
    kinds = sorted({kind for name in relations for kind in name.split("___")[::2]})
    new = [{kind: (seeds if kind == "paper" else 0) if hop == 0 else 4 + hop + len(kind) % 3 for kind in kinds}
           for hop in range(layers + 1)]  # fmt: skip
    features = {k: tuple(torch.randn(n[k], width, generator=generator, dtype=torch.float64) for n in new) for k in kinds}
    edges: dict[str, list[Tensor]] = {name: [] for name in relations}
    for hop in range(1, layers + 1):
        for name in relations:
            source, _, destination = name.split("___")
            reached, first = (sum(n[kind] for n in new[:end]) for kind, end in ((source, hop + 1), (destination, hop - 1)))
            count = 3 * new[hop - 1][destination]
            ends = [torch.randint(a, a + max(n, 1), (count,), generator=generator)
                    for a, n in ((0, reached), (first, new[hop - 1][destination]))]  # fmt: skip
            edges[name].append(ascending(torch.stack(ends)))
    labels = torch.randint(-1, classes, (seeds,), generator=generator)
    return Batch(features, {name: tuple(hops) for name, hops in edges.items()}, labels, torch.arange(seeds))


def join(batches: Sequence[Batch]) -> Batch:
    """Return the disjoint union of sub-graphs: hop by hop, one after the other in each."""
    numbers: list[dict[str, Tensor]] = [{} for _ in batches]
    features = {}
    for kind in batches[0].features:
        hops = [*zip(*(batch.features[kind] for batch in batches))]
        features[kind] = tuple(map(torch.cat, hops))
        order = torch.arange(sum(len(part) for parts in hops for part in parts))
        pieces = iter(order.split([len(part) for parts in hops for part in parts]))
        by_batch = zip(*([next(pieces) for _ in parts] for parts in hops))
        for own, parts in zip(numbers, by_batch):
            own[kind] = torch.cat(parts)
    edges = {}
    for name in batches[0].edges:
        source, _, destination = name.split("___")
        edges[name] = tuple(
            ascending(torch.cat([torch.stack((own[source][e[0]], own[destination][e[1]])) for own, e in zip(numbers, parts)], 1))
            for parts in zip(*(batch.edges[name] for batch in batches))
        )  # fmt: skip
    return Batch(features, edges, torch.cat([b.labels for b in batches]), torch.cat([b.papers for b in batches]))
