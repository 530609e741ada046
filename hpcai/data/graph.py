"""A graph with nodes and edges of several types in a folder of raw files, and samples of the neighbours of some nodes.

    graph.json                                  {"nodes": {TYPE: count}, "edges": {"SRC___REL___DST": count}, "target": TYPE,
                                                 "features": F, "dtype": "float16", "classes": C, "splits": {"train": count}}
    features/TYPE.bin                           float16 or float32 [nodes, F]
    edges/SRC___REL___DST/indptr.bin            int64 [destinations + 1]: compressed by destination
    edges/SRC___REL___DST/indices.bin           int32, or int64 from 2^31 sources on [edges]: sources
    labels.bin                                  int32 [nodes of the target type], -1: unknown
    splits/NAME.bin                             int64 [count]: ids of nodes of the target type

N nodes, E edges, F features, L hops, S seeds"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.data.direct import Reader
from hpcai.errors import DataError
from hpcai.json_file import check_fields, read_object

Array = NDArray[Any]
SEPARATOR = "___"
_CHUNK = 1 << 24  # elements that are checked at once
_REMEDY = "make the graph again, with data_prep"


class SubGraph(NamedTuple):
    """The sampled neighbours of seeds. A node is new in the hop in which it first appears, and its neighbours are drawn once, for
    the next hop. The numbers of a type count its nodes over all hops: seeds in the given order, then by hop and id."""

    nodes: dict[str, tuple[Array, ...]]  # of each type, hops 0 (seeds) to L: ids of new nodes [N_h] int64
    edges: dict[str, tuple[Array, ...]]  # of each relation, hops 1 to L: numbers [2, E_h] (source, destination), by destination


class Graph:
    """A graph in ``folder``. ``mode``: its files are mapped, or loaded to memory past the page cache and then checked.

    Raises DataError, with the file, for sizes that disagree with graph.json. Mapped edges are checked when they are sampled, or
    all by ``check``."""

    def __init__(self, folder: Path, mode: Literal["mapped", "memory"] = "mapped") -> None:
        self.folder, path = Path(folder), Path(folder) / "graph.json"
        self.header = header = read_object(path, "the header of a graph", DataError)
        with check_fields(path, "the header of a graph", DataError):
            self.nodes = {str(name): int(count) for name, count in header["nodes"].items()}
            self.edge_counts = {str(name): int(count) for name, count in header["edges"].items()}
            self.target, self.classes, self.width = str(header["target"]), int(header["classes"]), int(header["features"])
            self.dtype = np.dtype({"float16": "<f2", "float32": "<f4"}[header["dtype"]])
            self.relations = {name: tuple(name.split(SEPARATOR)[::2]) for name in self.edge_counts}
            splits = {str(name): int(count) for name, count in header["splits"].items()}
            ends = {name: (self.nodes[source], self.nodes[target]) for name, (source, target) in self.relations.items()}
            targets = self.nodes[self.target]
        if empty := [name for name, count in self.nodes.items() if count < 1]:
            raise DataError(f"{path}: type {empty[0]!r} has no node; leave it and its relations out")
        self.identity = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        with Reader() if mode == "memory" else nullcontext() as reader:
            self.indptr = {name: self._open(f"edges/{name}/indptr", "<i8", n + 1, reader) for name, (_, n) in ends.items()}
            kinds = {name: "<i4" if n < 1 << 31 else "<i8" for name, (n, _) in ends.items()}
            self.indices = {n: self._open(f"edges/{n}/indices", kinds[n], count, reader) for n, count in self.edge_counts.items()}
            self.labels = self._open("labels", "<i4", targets, reader)
            self.splits = {name: self._open(f"splits/{name}", "<i8", count, reader) for name, count in splits.items()}
        for name in self.nodes:
            self.features(name)
        for name, indptr in self.indptr.items():
            if (bounds := (indptr[0], indptr[-1])) != (0, count := self.edge_counts[name]):
                path = self.path(f"edges/{name}/indptr")
                raise DataError(f"{path}: runs from {bounds[0]:,} to {bounds[1]:,}, expected 0 to {count:,}; {_REMEDY}")
        if mode == "memory":
            self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder. A worker process maps the files, so that processes share them."""
        return Graph, (self.folder,)

    def features(self, name: str) -> Array:
        """Return the features of a type, mapped.   [N, F]"""
        return self._open(f"features/{name}", (self.dtype, (self.width,)), self.nodes[name], None)

    def degrees(self, name: str) -> Array:
        """Return the number of edges to each node of a type. With all reverse relations, as MLPerf has, as many start there.   [N]
        """
        parts = [np.diff(self.indptr[relation]) for relation, (_, end) in self.relations.items() if end == name]
        return np.sum([np.zeros(self.nodes[name], int), *parts], 0)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def check(self) -> None:
        """Read all edges, labels and splits. Raises DataError for an edge from a node that is not there, and the like."""
        for name, (source, _) in self.relations.items():
            indptr, path = self.indptr[name], self.path(f"edges/{name}/indptr")
            for first in range(0, len(indptr), _CHUNK):
                if (wrong := np.flatnonzero(np.diff(indptr[first : first + _CHUNK + 1]) < 0)).size:
                    raise DataError(f"{path}: does not ascend at {first + int(wrong[0]):,}; {_REMEDY}")
            self._check_ids(f"edges/{name}/indices", self.indices[name], 0, self.nodes[source], f"{source} nodes")
        self._check_ids("labels", self.labels, -1, self.classes, "classes")
        for name, ids in self.splits.items():
            self._check_ids(f"splits/{name}", ids, 0, self.nodes[self.target], f"{self.target} nodes")
            if len(np.unique(ids)) < len(ids):
                raise DataError(f"{self.path(f'splits/{name}')}: names a node twice; {_REMEDY}")

    def _open(self, name: str, dtype: Any, count: int, reader: Reader | None) -> Array:
        path, row = self.path(name), np.dtype(dtype).itemsize
        try:
            size = os.stat(path).st_size
        except OSError as problem:
            raise DataError(f"{path}: cannot be opened ({problem.strerror}); {_REMEDY}") from problem
        if size != row * count:
            actual = f"{size // row:,} rows" if size % row == 0 else f"{size:,} bytes, no multiple of a row of {row:,}"
            raise DataError(f"{path}: has {actual}, graph.json has {count:,} rows; {_REMEDY}")
        if not size or reader is None:
            return np.memmap(path, dtype, "r").view(np.ndarray) if size else np.zeros(0, dtype)
        return reader.fetch(path, 0, size).view(dtype)

    def _check_ids(self, name: str, values: Array, low: int, high: int, of: str) -> None:
        for first in range(0, len(values), _CHUNK):
            part = values[first : first + _CHUNK]
            if (wrong := np.flatnonzero((part < low) | (part >= high))).size:
                text = f"entry {first + int(wrong[0]):,} is {int(part[wrong[0]]):,}, but there are {high:,} {of}"
                raise DataError(f"{self.path(name)}: {text}; {_REMEDY}")


# ---- neighbours


def sample_neighbors(graph: Graph, seeds: Array, fan_out: Sequence[int], generator: np.random.Generator) -> SubGraph:
    """Return up to ``fan_out[h - 1]`` random neighbours, without replacement, of each node in each relation, hop by hop from
    ``seeds``; -1: all neighbours. A pure function of its arguments. Raises DataError for damaged edges.   [S] unique"""
    none = np.zeros(0, np.int64)
    nodes = {name: [seeds.astype(np.int64) if name == graph.target else none] for name in graph.nodes}
    if len(np.unique(seeds)) < len(seeds):
        raise DataError(f"{graph.folder}: seeds that are not unique")
    edges: dict[str, list[Array]] = {name: [] for name in graph.relations}
    first = dict.fromkeys(nodes, 0)  # the number of the first node of the last hop
    for limit in fan_out:
        drawn: dict[str, dict[str, Array]] = {name: {} for name in nodes}  # sources by type and relation
        ends: dict[str, Array] = {}
        for name, (source, destination) in graph.relations.items():
            drawn[source][name], counts = _draw_edges(graph, name, nodes[destination][-1], limit, generator)
            ends[name] = np.repeat(np.arange(first[destination], first[destination] + len(counts)), counts)
        for kind, parts in drawn.items():
            known = np.concatenate(nodes[kind])
            new, numbers = renumber(known, np.concatenate([none, *parts.values()]))
            nodes[kind].append(new)
            first[kind] = len(known)
            for name, part in zip(parts, np.split(numbers, np.cumsum([len(ids) for ids in parts.values()], dtype=int)[:-1])):
                edges[name].append(np.stack((part, ends[name])))
    return SubGraph(*({name: tuple(hops) for name, hops in lists.items()} for lists in (nodes, edges)))


def _draw_edges(graph: Graph, name: str, nodes: Array, limit: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the sources of drawn edges of a relation [E], and their number for each destination [N]."""
    start = graph.indptr[name][nodes]
    degree = graph.indptr[name][nodes + 1] - start
    if degree.size and (degree.min() < 0 or start.min() < 0 or (start + degree).max() > len(graph.indices[name])):
        raise DataError(f"{graph.path(f'edges/{name}/indptr')}: does not ascend from 0 to {graph.edge_counts[name]:,}; {_REMEDY}")
    counts, offsets = draw(degree, limit, generator)
    ids = graph.indices[name][np.repeat(start, counts) + offsets].astype(np.int64)
    count = graph.nodes[graph.relations[name][0]]
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(f"{graph.path(f'edges/{name}/indices')}: has node {wrong:,}, but there are {count:,}; {_REMEDY}")
    return ids, counts


def draw(degree: Array, limit: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the number of edges that each destination keeps [N], and their positions among its edges [E]: a uniform choice of
    ``limit`` without replacement (Floyd's algorithm), or all if there are no more, or if ``limit`` is -1."""
    counts = degree if limit < 0 else np.minimum(degree, limit)
    starts = np.cumsum(counts) - counts
    offsets = np.arange(counts.sum()) - np.repeat(starts, counts)
    many = np.flatnonzero(degree > counts)
    chosen, spare = np.empty((max(limit, 0), len(many)), np.int64), degree[many] - limit
    for k in range(len(chosen) if len(many) else 0):
        place = (generator.random(len(many)) * (spare + k + 1)).astype(np.int64)
        chosen[k] = np.where((chosen[:k] == place).any(0), spare + k, place)
    offsets[starts[many] + np.arange(len(chosen))[:, None]] = chosen
    return counts, offsets


def renumber(known: Array, ids: Array) -> tuple[Array, Array]:
    """Return the distinct ``ids`` that are not ``known``, ascending [N], and the position of each of ``ids`` in the concatenation
    of known and new ones [E]. ``known`` are unique, all at least 0.

    One sort of ids with their positions in the low bits: memory is that of a sample, not of the graph."""
    keys = np.concatenate((known, ids))
    bits = len(keys).bit_length()
    packed = np.sort(keys << bits | np.arange(len(keys)))
    ordered, position = packed >> bits, packed & ((1 << bits) - 1)
    leads = np.flatnonzero(np.diff(ordered, prepend=-1))  # of known ids the known one: its position is lower
    lead = position[leads]
    fresh = lead >= len(known)
    number = np.where(fresh, len(known) - 1 + np.cumsum(fresh), lead)
    numbers = np.empty_like(keys)
    numbers[position] = np.repeat(number, np.diff(leads, append=len(keys)))
    return ordered[leads][fresh], numbers[len(known) :]
