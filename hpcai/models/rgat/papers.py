"""Sub-graphs of papers as samples, and their batches.   N nodes, E edges, F features, L hops, S seeds"""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpcai.data.collate import tree_map
from hpcai.data.direct import Reader
from hpcai.data.graph import Graph, SubGraph, sample_neighbors
from hpcai.data.rows_file import RowsFile, hottest
from hpcai.dist.mesh import Axis
from hpcai.errors import DataError
from hpcai.models.rgat.batch import Batch
from hpcai.parallel.lookup import LookupPlan, check_shard_fits, rows_per_rank

Array = NDArray[Any]
Sizes = dict[str, Array]
Mode = Literal["mapped", "direct", "sharded"]
logger = logging.getLogger(__name__)


class Features:
    """The features of the nodes of a graph. ``mode``: ``mapped``; ``direct``, read by ``reader`` past the page cache with up to
    ``cache`` bytes of the rows with the most edges in memory; ``sharded``, ids instead of features, for ``FeatureLookup``."""

    def __init__(self, graph: Graph, mode: Mode = "mapped", reader: Reader | None = None, cache: int = 0) -> None:
        self.graph, self.mode, self.cache = graph, mode, cache if mode == "direct" else 0
        self.reader = (reader or Reader()) if mode == "direct" else None
        self._own_reader = self.reader if reader is None else None
        rows = self.cache // (graph.width * graph.dtype.itemsize)
        hot = hottest({name: graph.degrees(name) for name in graph.nodes}, rows) if rows else {}
        self.files = {
            name: RowsFile(graph.path(f"features/{name}"), count, graph.width, graph.dtype, self.reader, hot.get(name, ()))
            for name, count in graph.nodes.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings. Each worker process has a cache of its own."""
        return Features, (self.graph, self.mode, self.reader, self.cache)

    @property
    def hit_rate(self) -> float:
        """The fraction of rows so far that the cache had."""
        return sum(file.hits for file in self.files.values()) / max(sum(file.requested for file in self.files.values()), 1)

    def read(self, name: str, ids: Array, rows: int) -> Array:
        """Return the features of ``ids``, in the first of ``rows`` rows, followed by zeros.   [N] -> [rows, F]"""
        if self.mode == "sharded":
            return ids
        file = self.files[name]
        memory = self.reader.memory.allocate(rows * file.row_bytes) if self.reader else np.empty(rows * file.row_bytes, np.uint8)
        out = memory.view(file.dtype).reshape(rows, file.width)
        file.read(ids, out[: len(ids)])
        out[len(ids) :] = 0
        return out

    def close(self) -> None:
        if self.cache:
            logger.info("features: %.1f %% of rows came from a cache of %.3g GB", 100 * self.hit_rate, self.cache / 1e9)
        if self._own_reader is not None:
            self._own_reader.close()


class Sample(NamedTuple):
    """A sub-graph with the features of its nodes, or their ids, and the labels of its seeds."""

    nodes: dict[str, tuple[Array, ...]]
    edges: dict[str, tuple[Array, ...]]
    features: dict[str, tuple[Array, ...]]
    labels: Array


class Papers:
    """Groups of ``papers`` papers of a split with their sampled neighbours, a source of samples.

    Training ("train"): a permutation of the split in each epoch, without the last papers that fill no group. Other splits: each
    paper once, with the same neighbours in every epoch, in a multiple of ``multiple`` groups, the last ones of which may be
    smaller or empty (one seed of padding): so all replicas have equally many batches, as a lookup of sharded features needs.

    ``fan_out``: neighbours of each node and relation in hops 1 to L, MLPerf: 15, 10, 5. ``pad``: sub-graphs of a local batch that
    is padded, 0 for none. Sizes of hops are then those of a mean batch with room for its fluctuations, times a power of 1.1.
    """

    replicated = True

    def __init__(
        self, graph: Graph, features: Features, split: str, papers: int, fan_out: Sequence[int] = (15, 10, 5), *,
        seed: int = 0, multiple: int = 1, pad: int = 0,
    ) -> None:  # fmt: skip
        if split not in graph.splits:
            raise DataError(f"{graph.folder}: has no split {split!r}; it has {', '.join(graph.splits)}")
        self.graph, self.features, self.split, self.papers, self.fan_out = graph, features, split, papers, tuple(fan_out)
        self.seed, self.multiple, self.pad, self.shuffled = seed, multiple, pad, split == "train"
        count = len(graph.splits[split])
        self.groups = count // papers if self.shuffled else -(-count // (papers * multiple)) * multiple
        if not self.groups:
            raise DataError(f"{graph.folder}: {count:,} papers of {split} are no group of data.papers={papers:,}; lower it")
        self._lock, self._order = threading.Lock(), (-1, np.zeros(0, np.int64))
        self.smallest: tuple[Sizes, Sizes] | None = None
        self.smallest = self._smallest_sizes() if pad else None

    def __reduce__(self) -> tuple[Any, ...]:
        kwargs = {"seed": self.seed, "multiple": self.multiple, "pad": self.pad}
        return partial(Papers, self.graph, self.features, self.split, self.papers, self.fan_out, **kwargs), ()

    def __len__(self) -> int:
        return self.groups

    @property
    def identity(self) -> str:
        return f"{self.graph.folder.name} {self.graph.identity} {self.split}"

    def changes_since(self, seconds: float) -> str:
        newer = [path for path in self.graph.folder.rglob("*.bin") if path.stat().st_mtime > seconds]
        return f"{len(newer)} files in {self.graph.folder} are newer" if newer else ""

    def describe(self, index: int) -> str:
        return f"{self.graph.folder}: group {index} of {self.papers} papers of {self.split}"

    def close(self) -> None:
        self.features.close()

    def seeds(self, index: int, epoch: int) -> Array:
        """Return the papers of a group.   [S]"""
        group = slice(index * self.papers, (index + 1) * self.papers)
        if not self.shuffled:
            return np.array(self.graph.splits[self.split][group])
        with self._lock:
            if self._order[0] != epoch:
                order = self._generator(0, epoch).permutation(np.arange(len(self.graph.splits[self.split])))
                self._order = (epoch, order)
            return self.graph.splits[self.split][self._order[1][group]]

    def subgraph(self, index: int, epoch: int) -> SubGraph:
        """Return the papers of a group with their neighbours: a pure function of seed, ``epoch`` and ``index``."""
        epoch, seeds = epoch if self.shuffled else 0, self.seeds(index, epoch)
        part = sample_neighbors(self.graph, seeds, self.fan_out, self._generator(1, epoch, index))
        if not len(seeds):
            part.nodes[self.graph.target] = (np.array([-1]), *part.nodes[self.graph.target][1:])
        return part

    def sample(self, index: int, epoch: int) -> Sample:
        part = self.subgraph(index, epoch)
        sizes = self._fit([part])[0] if self.pad == 1 else _counts(part.nodes)  # a sub-graph that is a batch is copied no more
        features = {name: tuple(self.features.read(name, ids, int(rows)) for ids, rows in zip(hops, sizes[name]))
                    for name, hops in part.nodes.items()}  # fmt: skip
        seeds = part.nodes[self.graph.target][0]
        return Sample(*part, features, np.where(seeds < 0, -1, self.graph.labels[seeds]).astype(np.int64))

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the disjoint union of sub-graphs, hop by hop."""
        if self.pad and len(samples) != self.pad:
            raise DataError(f"{self.graph.folder}: {len(samples)} sub-graphs in a local batch, but padding is for {self.pad}")
        nodes, edges = self._fit(samples)
        filled = {name: np.sum([_counts(sample.nodes)[name] for sample in samples], 0) for name in nodes}
        shifts = {name: _shifts([sample.nodes[name] for sample in samples], sizes) for name, sizes in nodes.items()}

        def join_edges(name: str, hop: int, size: int) -> Array:
            rows = []
            for end, (kind, at) in enumerate(zip(self.graph.relations[name], (hop + 1, hop))):
                parts = [sample.edges[name][hop][end] for sample in samples]
                row = np.concatenate([shift[part] + part for shift, part in zip(shifts[kind], parts)])
                first, left = nodes[kind][:at].sum() + filled[kind][at], size - len(row)
                spare = (nodes[kind][at] - filled[kind][at]) * np.arange(left) // max(left, 1)  # evenly over nodes of padding
                rows.append(np.append(row, first + spare))
            return np.stack(rows)

        def join(parts: list[Array], rows: int, value: int = -1) -> Array:
            if len(parts) == 1 and len(parts[0]) == rows:
                return parts[0]
            out = np.full((rows, *parts[0].shape[1:]), value, parts[0].dtype)
            np.concatenate(parts, out=out[: sum(map(len, parts))])
            return out

        blank, seeds = -1 if self.features.mode == "sharded" else 0, nodes[self.graph.target][0]
        arrays = (
            {name: tuple(join([s.features[name][hop] for s in samples], size, blank) for hop, size in enumerate(sizes))
             for name, sizes in nodes.items()},
            {name: tuple(join_edges(name, hop, size) for hop, size in enumerate(sizes)) for name, sizes in edges.items()},
            join([s.labels for s in samples], seeds), join([s.nodes[self.graph.target][0] for s in samples], seeds),
        )  # fmt: skip
        return Batch(*tree_map(arrays, torch.from_numpy))

    # ---- sizes

    def _fit(self, parts: Sequence[SubGraph | Sample]) -> tuple[Sizes, Sizes]:
        """Return the numbers of nodes of each type by hop [L + 1], and of edges of each relation by hop [L], of a batch."""
        nodes = {name: np.sum([_counts(part.nodes)[name] for part in parts], 0) for name in self.graph.nodes}
        edges = {name: np.sum([_counts(part.edges)[name] for part in parts], 0) for name in self.graph.relations}
        if self.smallest is None:
            return nodes, edges
        ratios = [((x + spare) / low[name]).max() for spare, low, sizes in zip((1, 0), self.smallest, (nodes, edges))
                  for name, x in sizes.items()]  # fmt: skip
        factor = 1.1 ** max(np.ceil(np.log(max(ratios)) / np.log(1.1) - 1e-9), 0)
        nodes, edges = ({name: np.ceil(x * factor).astype(int) for name, x in low.items()} for low in self.smallest)
        for name, sizes in nodes.items():  # the number of seeds is the same in all batches
            sizes[0] = 1 + self.pad * self.papers * (name == self.graph.target)
        return nodes, edges

    def _smallest_sizes(self) -> tuple[Sizes, Sizes]:
        parts = [self.subgraph(index, 0) for index in range(min(self.groups, 4))]
        nodes, edges = ({name: x * self.pad / len(parts) for name, x in sizes.items()} for sizes in self._fit(parts))
        room = lambda mean: np.ceil(mean + 4 * np.sqrt(mean) + 2)  # noqa: E731  small counts fluctuate most
        return {name: room(x) for name, x in nodes.items()}, {name: room(x) for name, x in edges.items()}

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed, *key])))


def _counts(arrays: dict[str, tuple[Array, ...]]) -> Sizes:
    return {name: np.array([hop.shape[-1] for hop in hops]) for name, hops in arrays.items()}


def _shifts(parts: Sequence[tuple[Array, ...]], sizes: Array) -> list[Array]:
    """Return for each part the difference between the number of a node in the union and in the part.   [L + 1] -> [N] each"""
    own = np.array([[len(ids) for ids in hops] for hops in parts])
    first = np.cumsum(sizes) - sizes + np.cumsum(own, 0) - own  # in the union, by part and hop
    return [np.repeat(first[k] - (np.cumsum(row) - row), row) for k, row in enumerate(own)]


class FeatureLookup:
    """The features of all nodes, each type sharded by contiguous ranges over ``axis``: a ``batch_transform`` of a Loader, in the
    main thread, so that the captured step has no communication. A collective call; all ranks need equally many batches.

    The ids of a type become rows of one table, in which each rank has its range of every type. ``available``: bytes of memory for
    the shard; raises ConfigError if it has more. Reads the shard in large blocks."""

    def __init__(self, graph: Graph, axis: Axis, device: torch.device, reader: Reader, available: int) -> None:
        self.graph, self.axis = graph, axis
        self.each = {name: rows_per_rank(count, axis) for name, count in graph.nodes.items()}
        self.base = dict(zip(self.each, np.cumsum([0, *self.each.values()]).tolist()))
        self.rows = sum(self.each.values())  # of this shard
        row = graph.width * graph.dtype.itemsize
        check_shard_fits(f"{graph.folder}: features", self.rows * axis.size * row, available, axis, "set data.features=direct")
        dtype = torch.from_numpy(np.zeros(0, graph.dtype)).dtype
        self.shard = torch.zeros((self.rows, graph.width), dtype=dtype, device=device)
        for name, count in graph.nodes.items():
            first, end = (min(rank * self.each[name], count) for rank in (axis.rank, axis.rank + 1))
            for start in range(first, end, step := max(_BLOCK // row, 1)):
                part = reader.fetch(graph.path(f"features/{name}"), start * row, (min(start + step, end) - start) * row)
                place = self.base[name] + start - first
                self.shard[place : place + len(part) // row] = torch.from_numpy(part.view(graph.dtype).reshape(-1, graph.width))

    def __call__(self, batch: Batch, step: int = 0) -> Batch:
        """Replace the ids in ``batch.features`` by features."""
        names = [(name, len(hop)) for name, hops in batch.features.items() for hop in hops]
        ids = torch.cat([self._place(name, hop) for name, hops in batch.features.items() for hop in hops])
        rows = iter(LookupPlan(ids, self.rows * self.axis.size, self.axis).gather(self.shard).split([size for _, size in names]))
        return batch._replace(features={name: tuple(next(rows) for _ in hops) for name, hops in batch.features.items()})

    def _place(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        each = self.each[name]
        return torch.where(ids < 0, -1, ids // each * self.rows + self.base[name] + ids % each)


_BLOCK = 64 << 20  # bytes of the table that are read at once
