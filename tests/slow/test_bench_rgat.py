"""A training step of R-GAT beside PyTorch Geometric's, from papers to gradients, in CPU seconds of one run."""

import time
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apps.rgat.benchmarks import PyGModel, random_graph
from hpcai.data.graph import Graph
from hpcai.models.rgat import RGAT, Batch, Features, Papers, RGATConfig, loss
from hpcai.models.rgat.config import RELATIONS

pytestmark = pytest.mark.timing
PAPERS, NODES, FAN_OUT = 16, 40_000, (15, 10, 5)
CFG = RGATConfig(relations=RELATIONS[:7], features=1024, num_classes=19)


def neighbor_loader(graph: Graph, x: dict[str, torch.Tensor], steps: int) -> Any:
    """Return batches of PyTorch Geometric, or None if it has no sampler here."""
    pyg = pytest.importorskip("torch_geometric", reason="torch_geometric is not installed: its R-GAT is NOT compared")
    if not (pyg.typing.WITH_PYG_LIB or pyg.typing.WITH_TORCH_SPARSE):
        return None
    data = pyg.data.HeteroData()
    for kind, values in x.items():
        data[kind].x = values
    data["paper"].y = torch.from_numpy(np.array(graph.labels)).long()
    for name in graph.relations:
        ends = np.repeat(np.arange(len(graph.indptr[name]) - 1), np.diff(graph.indptr[name]))
        data[tuple(name.split("___"))].edge_index = torch.from_numpy(np.stack((graph.indices[name].astype(np.int64), ends)))
    first = torch.from_numpy(np.array(graph.splits["train"][: steps * PAPERS]))
    return iter(pyg.loader.NeighborLoader(data, [*FAN_OUT], input_nodes=("paper", first), batch_size=PAPERS))


def test_a_step_is_faster_than_pyg() -> None:
    steps = 4
    graph = Graph(random_graph(CFG, NODES))
    random, x = np.random.default_rng(0), {}
    for kind, count in graph.nodes.items():
        values = np.memmap(graph.path(f"features/{kind}"), "<f2", "r+", shape=(count, CFG.inputs))
        values[:] = random.standard_normal((64, CFG.inputs), np.float32)[np.arange(count) % 64]
        x[kind] = torch.from_numpy(values)
    batches = neighbor_loader(graph, x, steps)
    papers = Papers(graph, Features(graph), "train", PAPERS, FAN_OUT)
    torch.manual_seed(0)
    ours, peer = RGAT(CFG), PyGModel(CFG)
    peer.load_state_dict(ours.state_dict())

    def sample(number: int) -> Batch:
        return papers.collate([papers.sample(number, 0)])

    def own_step(number: int) -> Any:
        return loss(ours, sample(number))["loss"]

    def peer_step(number: int) -> Any:
        if batches is None:
            return loss(peer, sample(number))["loss"]
        batch = next(batches)
        edges = {"___".join(name): (edge,) for name, edge in batch.edge_index_dict.items()}
        labels = batch["paper"].y[:PAPERS]
        logits = peer(Batch({kind: (values,) for kind, values in batch.x_dict.items()}, edges, labels, labels))
        return F.cross_entropy(logits, labels)

    def measure(step: Any, number: int) -> tuple[float, float]:
        start = time.process_time()
        ours.zero_grad()
        peer.zero_grad()
        value = step(number)
        value.backward()
        return time.process_time() - start, value.item()

    first, *rest = [[measure(step, number) for step in (peer_step, own_step)] for number in range(steps)]
    assert first[0][1] == pytest.approx(first[1][1], rel=0.2), "other papers, the same weights"
    theirs, own = (median(pair[which][0] for pair in rest) for which in (0, 1))
    sampler = "our sub-graphs for both" if batches is None else "its NeighborLoader"
    print(f"PyTorch Geometric with {sampler} {theirs:.3f} s, ours {own:.3f} s: {own / theirs:.3f}")
    assert own / theirs < 0.3
