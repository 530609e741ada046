"""A graph with nodes and edges of several types in a folder of raw files, and samples of the neighbours of some nodes.

    graph.json                                  {"nodes": {TYPE: count}, "edges": {"SRC___REL___DST": count}, "target": TYPE,
                                                 "features": F, "dtype": "float16", "classes": C, "splits": {"train": count}}
    features/TYPE.bin                           float16 or float32 [nodes, F]
    degrees/TYPE.bin                            int32 [nodes]: edges from each node, over all relations
    edges/SRC___REL___DST/indptr.bin            int64 [destinations + 1]: compressed by destination
    edges/SRC___REL___DST/indices.bin           int32, or int64 from 2^31 sources on [edges]: sources
    labels.bin                                  int32 [nodes of the target type], -1: unknown
    splits/NAME.bin                             int64 [count]: ids of nodes of the target type

N nodes, E edges, F features, L hops, S seeds"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.data.direct import Reader
from hpcai.errors import DataError
from hpcai.json_file import check_fields, read_object

Array = NDArray[Any]
Mode = Literal["mapped", "memory"]
SEPARATOR = "___"
_CHUNK = 1 << 24  # elements that are checked at once
_REMEDY = "make the graph again, with data_prep"


class SubGraph(NamedTuple):
    """The sampled neighbours of seeds. A node is new in the hop in which it first appears, and its neighbours are drawn once, for
    the next hop. The numbers of a type count its nodes over all hops: seeds in the given order, then by hop and id."""

    nodes: dict[str, tuple[Array, ...]]  # of each type, hops 0 (seeds) to L: ids of new nodes [N_h] int64
    edges: dict[str, tuple[Array, ...]]  # of each relation, hops 1 to L: numbers [2, E_h] (source, destination), by destination


class Graph:
    """A graph in ``folder``. ``mode``: ``mapped`` reads edges through the page cache, on use; ``memory`` loads them, by O_DIRECT.

    Raises DataError, with the file, for sizes that disagree with graph.json and an invalid ``indptr``. ``memory`` also checks all
    edges, as does ``check``; ``mapped`` checks those that are sampled.
    """

    def __init__(self, folder: Path, mode: Mode = "mapped", reader: Reader | None = None) -> None:
        self.folder, self.mode, path = Path(folder), mode, Path(folder) / "graph.json"
        header = read_object(path, "the header of a graph", DataError)
        with check_fields(path, "the header of a graph", DataError):
            self.nodes = {str(name): int(count) for name, count in header["nodes"].items()}
            self.edge_counts = {str(name): int(count) for name, count in header["edges"].items()}
            self.relations = {name: self._ends(name) for name in self.edge_counts}
            self.target, self.classes, self.width = str(header["target"]), int(header["classes"]), int(header["features"])
            self.dtype = np.dtype({"float16": "<f2", "float32": "<f4"}[header["dtype"]])
            counts = {str(name): int(count) for name, count in header["splits"].items()}
            targets = self.nodes[self.target]
        if empty := [name for name, count in self.nodes.items() if count < 1]:
            raise DataError(f"{path}: type {empty[0]!r} has no node; leave it and its relations out")
        self.header = header
        self.identity = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        opened = reader if reader is not None or mode == "mapped" else Reader()
        self.indptr, self.indices = dict[str, Array](), dict[str, Array]()
        for name, (source, destination) in self.relations.items():
            index = np.dtype("<i4" if self.nodes[source] < 1 << 31 else "<i8")
            folder, edges = self.folder / "edges" / name, self.edge_counts[name]
            self.indptr[name] = self._open(folder / "indptr.bin", "<i8", self.nodes[destination] + 1, opened)
            self.indices[name] = self._open(folder / "indices.bin", index, edges, opened)
            if (ends := (self.indptr[name][0], self.indptr[name][-1])) != (0, edges):
                text = f"runs from {ends[0]:,} to {ends[1]:,}, expected 0 to {edges:,}"
                raise DataError(f"{folder / 'indptr.bin'}: {text}; {_REMEDY}")
        self.labels = self._open(self.folder / "labels.bin", "<i4", targets, opened)
        self.splits = {name: self._open(self.folder / f"splits/{name}.bin", "<i8", count, opened) for name, count in counts.items()}
        for name in self.nodes:
            self._size(self.feature_path(name), self.width * self.dtype.itemsize, self.nodes[name])
        if opened is not None and reader is None:
            opened.close()
        if mode == "memory":
            self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder. A worker process maps the files, so that processes share them."""
        return Graph, (self.folder,)

    def feature_path(self, name: str) -> Path:
        return self.folder / f"features/{name}.bin"

    def degrees(self, name: str) -> Array:
        """Return the number of edges from each node of a type, over all relations.   [N] int32"""
        return self._open(self.folder / f"degrees/{name}.bin", "<i4", self.nodes[name], None)

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.suffix in (".bin", ".json"))

    def check(self) -> None:
        """Read all edges, labels and splits. Raises DataError for an edge from a node that is not there, and the like."""
        for name, (source, _) in self.relations.items():
            folder = self.folder / "edges" / name
            for first, part in _parts(self.indptr[name], overlap=1):
                if (wrong := np.flatnonzero(np.diff(part) < 0)).size:
                    raise DataError(f"{folder / 'indptr.bin'}: does not ascend at {first + int(wrong[0])}; {_REMEDY}")
            self._check_ids(folder / "indices.bin", self.indices[name], 0, self.nodes[source], "edge", f"{source} nodes")
        self._check_ids(self.folder / "labels.bin", self.labels, -1, self.classes, "label", "classes")
        for name, ids in self.splits.items():
            self._check_ids(path := self.folder / f"splits/{name}.bin", ids, 0, self.nodes[self.target], "row", "nodes")
            if len(np.unique(ids)) < len(ids):
                raise DataError(f"{path}: names a node twice; {_REMEDY}")

    def _ends(self, name: str) -> tuple[str, str]:
        source, _, destination = name.split(SEPARATOR)
        if missing := {source, destination} - self.nodes.keys():
            raise ValueError(f"relation {name!r} has ends of unknown type {missing.pop()!r}")
        return source, destination

    def _size(self, path: Path, row: int, rows: int) -> None:
        try:
            size = os.stat(path).st_size
        except OSError as problem:
            raise DataError(f"{path}: cannot be opened ({problem.strerror}); {_REMEDY}") from problem
        if size % row:
            raise DataError(f"{path}: has {size:,} bytes, no multiple of a row of {row:,}; {_REMEDY}")
        if size != row * rows:
            raise DataError(f"{path}: has {size // row:,} rows, graph.json has {rows:,}; {_REMEDY}")

    def _open(self, path: Path, dtype: Any, count: int, reader: Reader | None) -> Array:
        self._size(path, np.dtype(dtype).itemsize, count)
        if not count:
            return np.zeros(0, dtype)
        if reader is None:
            return np.memmap(path, dtype, "r").view(np.ndarray)
        return reader.fetch(path, 0, count * np.dtype(dtype).itemsize).view(dtype)

    def _check_ids(self, path: Path, values: Array, low: int, high: int, what: str, of: str) -> None:
        for first, part in _parts(values):
            if (wrong := np.flatnonzero((part < low) | (part >= high))).size:
                text = f"{what} {first + int(wrong[0]):,} has {int(part[wrong[0]]):,}, but there are {high:,} {of}"
                raise DataError(f"{path}: {text}; {_REMEDY}")


def _parts(values: Array, overlap: int = 0) -> Iterator[tuple[int, Array]]:
    return ((first, values[first : first + _CHUNK + overlap]) for first in range(0, len(values), _CHUNK))


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
        drawn: dict[str, list[Array]] = {name: [] for name in nodes}
        ends: dict[str, Array] = {}
        for name, (source, destination) in graph.relations.items():
            ids, counts = _draw_edges(graph, name, nodes[destination][-1], limit, generator)
            drawn[source].append(ids)
            ends[name] = np.repeat(np.arange(first[destination], first[destination] + len(counts)), counts)
        for kind, parts in drawn.items():
            known = np.concatenate(nodes[kind])
            new, numbers = renumber(known, np.concatenate([none, *parts]))
            nodes[kind].append(new)
            first[kind] = len(known)
            cuts = np.cumsum([len(part) for part in parts])[:-1]
            for name, part in zip((n for n, pair in graph.relations.items() if pair[0] == kind), np.split(numbers, cuts)):
                edges[name].append(np.stack((part, ends[name])))
    return SubGraph(_frozen(nodes), _frozen(edges))


def _frozen(lists: Mapping[str, list[Array]]) -> dict[str, tuple[Array, ...]]:
    return {name: tuple(arrays) for name, arrays in lists.items()}


def _draw_edges(graph: Graph, name: str, nodes: Array, limit: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Return the sources of drawn edges of a relation [E], and their number for each destination [N]."""
    start = graph.indptr[name][nodes]
    degree = graph.indptr[name][nodes + 1] - start
    if degree.size and degree.min() < 0:
        raise DataError(f"{graph.folder / 'edges' / name}: indptr does not ascend at {nodes[degree.argmin()]:,}; {_REMEDY}")
    counts, offsets = draw(degree, limit, generator)
    ids = graph.indices[name][np.repeat(start, counts) + offsets].astype(np.int64)
    count = graph.nodes[graph.relations[name][0]]
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        text = f"an edge of node {int(ids.min() if ids.min() < 0 else ids.max()):,}, but there are {count:,}"
        raise DataError(f"{graph.folder / 'edges' / name}: {text}; {_REMEDY}")
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
