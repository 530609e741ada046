"""Benchmark of R-GAT:  hpcai bench rgat | hpcai ablate rgat [model.hidden=128 data.batch=64 ...]

Sub-graphs are those of random papers with random edges. The plain form computes all hops in all layers, projects all sources before
they are summed, and has torch's operations in place of graph attention.
"""

import math
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from apps.rgat.data import Consecutive, PaperGroups, complete_model_config
from apps.rgat.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Peer, Switch, Workload
from hpcai.config import PositiveInt
from hpcai.data import Loader
from hpcai.data.collate import tree_map
from hpcai.data.graph import Graph
from hpcai.dist import Mesh
from hpcai.durable import write_json
from hpcai.kernels.graph_attention import reference
from hpcai.models.rgat import RGAT, Batch, Features, RGATConfig, counted, loss, parallelize, score
from hpcai.models.rgat.config import SEPARATOR
from hpcai.models.rgat.model import GATConv

_NODES = {"author": 1.9, "fos": 0.19, "institute": 0.015, "journal": 0.015, "conference": 0.0012}  # per paper, as in IGBH-small
_EDGES = {"cites": 12, "written_by": 5, "topic": 9, "affiliated_to": 2}  # of a paper, of an author to institutes; else one
_ROWS = 1024  # random features, which nodes repeat
_TEMPORARY = tempfile.TemporaryDirectory(prefix="hpcai-graphs-", ignore_cleanup_errors=True)


class GraphConfig(Config):
    """An R-GAT run. ``nodes``: papers of the random graph. Sub-graphs are as large as batches of any size allow."""

    nodes: PositiveInt = 200_000

    @model_validator(mode="after")
    def _has_whole_subgraphs(self) -> Self:
        return self

    def for_batch(self, batch: int) -> Self:
        """Return the settings for batches of so many papers."""
        papers = math.gcd(self.data.papers, batch)
        return self.model_copy(update={"data": self.data.model_copy(update={"papers": papers, "batch": batch})})


class Benchmark(Workload):
    settings, batch, fields, unit = GraphConfig, Batch, Batch._fields, "papers"
    loss, counts, metric = staticmethod(loss), staticmethod(counted), staticmethod(score)

    def switches(self, cfg: GraphConfig, mesh: Mesh) -> list[Switch]:
        return [
            Switch("needed hops", "each layer computes the nodes that later layers need"),
            Switch("fused attention", "graph attention over sorted edges, before or after the projection of their sources"),
        ]

    def build(self, cfg: GraphConfig, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize((RGAT if "needed hops" in enabled else _AllHops)(cfg.model), mesh)
        if "fused attention" not in enabled:
            for module in model.modules():
                if isinstance(module, GATConv):
                    module.__class__ = _ReferenceConv
        return model

    def random_sample(self, cfg: GraphConfig, random: np.random.Generator) -> tuple[Any, ...]:
        batch = self.random_batch(cfg, [int(random.integers(100))], torch.device("cpu"))
        return (*(hop.numpy() for hops in batch.features.values() for hop in hops), batch.labels.numpy())

    def random_batch(self, cfg: GraphConfig, seeds: Sequence[Any], device: torch.device) -> Batch:
        cfg, graph = cfg.for_batch(len(seeds)), Graph(random_graph(cfg.model, cfg.nodes))
        source, papers = PaperGroups(graph, Features(graph, "sharded"), "train", cfg), cfg.data.papers
        first = int(seeds[0]) // papers
        batch = source.collate([source.sample(first + k, 0) for k in range(len(seeds) // papers)])
        table = np.random.default_rng(0).standard_normal((_ROWS, cfg.model.inputs), np.float32).astype(graph.dtype)
        rows = torch.from_numpy(np.concatenate((table, np.zeros_like(table[:1]))))  # zeros for padding
        features = {kind: tuple(rows[torch.where(ids < 0, _ROWS, ids % _ROWS)] for ids in hops)
                    for kind, hops in batch.features.items()}  # fmt: skip
        return tree_map(batch._replace(features=features), lambda tensor: tensor.to(device))

    def write_files(self, cfg: GraphConfig, rows: int, splits: Sequence[str] = ("train", "validation")) -> GraphConfig:
        data = cfg.data.model_copy(update={"directory": random_graph(cfg.model, cfg.nodes)})
        return cfg.model_copy(update={"data": data})

    def loader(self, cfg: GraphConfig, mesh: Mesh, split: str, **kwargs: Any) -> Loader:
        cfg = cfg.for_batch(cfg.data.batch)
        graph, groups = Graph(cfg.data.directory), cfg.data.batch // cfg.data.papers
        if sampler := kwargs.pop("sampler", None):
            kwargs["sampler"] = Consecutive(sampler.samples // cfg.data.papers)
        source = PaperGroups(graph, Features(graph), split, cfg, mesh, groups)
        return Loader(source, groups, mesh, **cfg.data.loader_kwargs(), **kwargs)

    def complete_settings(self, cfg: GraphConfig) -> GraphConfig:
        graph = Graph(random_graph(cfg.model, cfg.nodes))
        return cfg.model_copy(update={"model": complete_model_config(cfg.model, graph)})


@cache
def random_graph(model: RGATConfig, papers: int) -> Path:
    """Write a random graph with the relations of the network, and return its folder. Features are a hole in a file, zeros."""
    folder, random = Path(tempfile.mkdtemp(dir=_TEMPORARY.name)), np.random.default_rng(0)
    kinds = sorted({kind for name in model.relation_names for kind in name.split(SEPARATOR)[::2]})
    nodes = {kind: papers if kind == model.target else max(round(_NODES.get(kind, 0.1) * papers), 8) for kind in kinds}
    edges = {}
    for name in model.relation_names:
        source, relation, destination = name.split(SEPARATOR)
        base = destination if relation.startswith("rev_") else source
        edges[name] = count = _EDGES.get(relation.removeprefix("rev_"), 1) * nodes[base]
        popular = random.random(count) ** (1 if nodes[destination] >= nodes[source] else 2)  # few destinations have most edges
        ends = np.bincount((popular * nodes[destination]).astype(int), minlength=nodes[destination]).cumsum()
        sources = random.integers(0, nodes[source], count).astype(np.int32)
        (folder / "edges" / name).mkdir(parents=True)
        np.append(0, ends).astype(np.int64).tofile(folder / "edges" / name / "indptr.bin")
        sources.tofile(folder / "edges" / name / "indices.bin")
    for name in ("features", "splits"):
        (folder / name).mkdir()
    for kind, count in nodes.items():
        with (folder / f"features/{kind}.bin").open("wb") as file:
            file.truncate(2 * count * model.inputs)
    for split in ("train", "validation"):
        np.arange(papers).tofile(folder / f"splits/{split}.bin")
    random.integers(0, model.outputs, papers).astype(np.int32).tofile(folder / "labels.bin")
    write_json(folder / "graph.json", {
        "nodes": nodes, "edges": edges, "target": model.target, "features": model.inputs, "dtype": "float16",
        "classes": model.outputs, "splits": {"train": papers, "validation": papers},
    })  # fmt: skip
    return folder


class _ReferenceConv(GATConv):
    def forward(self, x: Tensor, source_score: Tensor, destination_score: Tensor, edges: Tensor) -> Tensor:
        projected = self.lin(x).unflatten(1, self.att_src.shape[1:])
        return reference(source_score, destination_score, projected, edges, self.slope)


class _AllHops(RGAT):
    """The network with all nodes in every layer."""

    def forward(self, batch: Batch) -> Tensor:
        sizes, edges, x = self._inputs(batch)
        counts = {kind: sum(hops) for kind, hops in sizes.items()}
        for layer, conv in enumerate(self.convs):
            x = conv(x, edges, counts)
            if layer + 1 < len(self.convs):
                x = {kind: self.dropout(nn.functional.leaky_relu(h)) for kind, h in x.items()}
        return self.lin(x[self.cfg.target][: len(batch.labels)])


class PyGModel(nn.Module):
    """The model of MLPerf's reference, with modules of PyTorch Geometric."""

    def __init__(self, cfg: RGATConfig) -> None:
        super().__init__()
        pyg, names = import_module("torch_geometric.nn"), {tuple(name.split(SEPARATOR)) for name in cfg.relation_names}
        width, self.cfg, self.convs = cfg.hidden // cfg.heads, cfg, nn.ModuleList()
        for inputs in (cfg.inputs, *[cfg.hidden] * (cfg.layers - 1)):
            convs = {name: pyg.GATConv(inputs, width, heads=cfg.heads, add_self_loops=False) for name in sorted(names)}
            self.convs.append(pyg.HeteroConv(convs))
        self.lin, self.dropout = nn.Linear(cfg.hidden, cfg.outputs), nn.Dropout(cfg.dropout)

    def forward(self, batch: Batch) -> Tensor:
        x: Any = {kind: torch.cat(hops).to(self.lin.weight.dtype) for kind, hops in batch.features.items()}
        edges = {tuple(name.split(SEPARATOR)): torch.cat(hops, 1) for name, hops in batch.edges.items()}
        for layer, conv in enumerate(self.convs):
            x = conv(x, edges)
            if layer + 1 < len(self.convs):
                x = {kind: self.dropout(nn.functional.leaky_relu(h)) for kind, h in x.items()}
        return self.lin(x[self.cfg.target][: len(batch.labels)])


def _pyg(cfg: GraphConfig, batch: Batch) -> Implementation:
    return Implementation(PyGModel(cfg.model), loss)


Benchmark.peers = {"pyg": Peer("torch_geometric", _pyg)}
