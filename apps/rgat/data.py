"""Sub-graphs of papers as samples, and their batches."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from apps.rgat.settings import Config
from hpcai.data import Loader
from hpcai.data.direct import Reader
from hpcai.data.graph import Graph
from hpcai.data.readers import MEMORY_FRACTION, available_memory, open_reader
from hpcai.data.sampler import InOrder
from hpcai.data.splits import HELD_OUT, open_loaders
from hpcai.dist import Mesh
from hpcai.dist.collectives import all_gather_object
from hpcai.errors import ConfigError, DataError
from hpcai.models.rgat import FeatureLookup, Features, Papers, RGATConfig
from hpcai.programs import command_of
from hpcai.train import MicroBatches


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, RGATConfig, dict[str, np.ndarray]]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures, the settings of the model, completed
    from the data, and the known truth of simulated papers."""
    data, groups = cfg.data, cfg.data.evaluation_batch // cfg.data.papers
    with ExitStack() as stack:
        kind = "direct" if data.features == "direct" else "memory"  # O_DIRECT if the file system has it
        reader, graph = stack.enter_context(closing(open_reader(kind, 0, device=mesh.device))), open_graph(cfg)
        model, lookup = complete_model_config(cfg.model, graph), _lookup(cfg, graph, mesh, reader)
        features = stack.enter_context(closing(Features(graph, data.features, reader, int(data.cache * 1e9))))
        held_out = partial(PaperGroups, graph, features, "validation", cfg, multiple=groups)
        kwargs = {**_kwargs(cfg, lookup), **HELD_OUT}
        with open_loaders(
            mesh,
            lambda: training_loader(PaperGroups(graph, features, "train", cfg, mesh), cfg, mesh, lookup),
            lambda: Loader(held_out(), groups, mesh, name="validation", **kwargs),
            (lambda: Loader(held_out(count=data.pictures), groups, mesh, name="pictures", **kwargs)) if data.pictures else None,
        ) as loaders:
            yield *loaders, model, read_truth(cfg)


class PaperGroups(Papers):
    """Groups of papers of one split. Groups of training papers are numbered over all epochs. ``count``: the first papers only. A
    batch is one graph, or, for training, as many micro-batches as a step has."""

    groups: int

    def __init__(
        self, graph: Graph, features: Features, split: str, cfg: Config, mesh: Mesh | None = None, multiple: int = 1,
        count: int | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.count, self.parts = cfg, count, cfg.step.accumulate if split == "train" else 1
        local = cfg.data.batch // cfg.data.papers // (mesh["replicate"].size if mesh else 1) // self.parts
        pad = max(local, 1) if cfg.data.shapes == "few" and split == "train" else 0
        super().__init__(graph, features, split, cfg.data.papers, cfg.data.fan_out, seed=cfg.train.seed, multiple=multiple, pad=pad)
        if count is not None:
            self.groups = min(self.groups, -(-count // (self.papers * multiple)) * multiple)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.graph, self.features, self.split, self.cfg, self.multiple, self.count, self.pad)

    def seeds(self, index: int, epoch: int) -> np.ndarray:
        seeds = super().seeds(index, epoch)
        return seeds if self.count is None else seeds[: max(self.count - index * self.papers, 0)]

    def sample(self, index: int, epoch: int) -> Any:
        return super().sample(index % self.groups, index // self.groups if self.shuffled else epoch)

    def describe(self, index: int) -> str:
        return super().describe(index % self.groups)

    def close(self) -> None:
        """Loaders share the features, which stay open."""

    def collate(self, samples: Sequence[Any]) -> Any:
        each = len(samples) // self.parts
        batches = [super(PaperGroups, self).collate(samples[k * each : (k + 1) * each]) for k in range(self.parts)]
        return MicroBatches(batches) if self.parts > 1 else batches[0]


def _restored(
    graph: Graph, features: Features, split: str, cfg: Config, multiple: int, count: int | None, pad: int
) -> PaperGroups:  # fmt: skip
    groups = PaperGroups(graph, features, split, cfg, None, multiple, count)
    groups.pad = pad
    return groups


class Consecutive(InOrder):
    """Groups of papers in order, numbered over all epochs: each epoch has the next ones. ``PaperGroups`` shuffles papers."""

    def order(self, epoch: int) -> np.ndarray:
        return self._order + epoch * self.samples


def training_loader(source: PaperGroups, cfg: Config, mesh: Mesh, lookup: FeatureLookup | None = None) -> Loader:
    samples = len(source) if cfg.data.epoch is None else cfg.data.epoch // cfg.data.papers
    groups = cfg.data.batch // cfg.data.papers
    kwargs = {"accumulate": cfg.step.accumulate, "sampler": Consecutive(samples // groups * groups), **_kwargs(cfg, lookup)}
    return Loader(source, groups, mesh, name="train", **kwargs)


def _kwargs(cfg: Config, lookup: FeatureLookup | None) -> dict[str, Any]:
    return cfg.data.loader_kwargs() | ({} if lookup is None else {"batch_transform": partial(look_up, lookup)})


def look_up(lookup: FeatureLookup, batch: Any, step: int) -> Any:
    """Replace ids by features in a batch, or in each of its micro-batches."""
    return MicroBatches([lookup(part) for part in batch]) if isinstance(batch, MicroBatches) else lookup(batch)


def open_graph(cfg: Config) -> Graph:
    data = cfg.data
    if not (data.directory / "graph.json").is_file():
        remedy = f"make data with: {command_of('data_prep.igb')} simulate {data.directory}, or set data.directory"
        raise DataError(f"{data.directory}: has no graph.json; {remedy}")
    return Graph(data.directory, data.graph)


def _lookup(cfg: Config, graph: Graph, mesh: Mesh, reader: Reader) -> FeatureLookup | None:
    if cfg.data.features != "sharded":
        return None
    on_gpu = mesh.device.type == "cuda"
    node = socket.gethostname()
    ranks = all_gather_object(node, mesh.peers).count(node)
    available = torch.cuda.mem_get_info(mesh.device)[0] if on_gpu else available_memory() // ranks
    return FeatureLookup(graph, mesh["replicate"], mesh.device, reader, int(MEMORY_FRACTION * available))


def complete_model_config(model: RGATConfig, graph: Graph) -> RGATConfig:
    """Return the settings with features, relations, target and classes of the graph. Raises ConfigError if they differ."""
    actual = {"features": graph.width, "relations": tuple(graph.relations), "target": graph.target, "num_classes": graph.classes}
    for name, ours in (("features", model.features), ("num_classes", model.num_classes or len(model.classes) or None)):
        if ours not in (None, actual[name]):
            raise ConfigError(f"model.{name} is {ours}, but {graph.folder} has {actual[name]}; set it to null")
    if extra := set(model.relations) - set(graph.relations):
        text = f"model.relations has {', '.join(sorted(extra))}, which {graph.folder} lacks"
        raise ConfigError(f"{text}; it has {', '.join(graph.relations)}")
    return model.model_copy(update={**actual, "relations": model.relations or actual["relations"]})


def read_truth(cfg: Config) -> dict[str, np.ndarray]:
    """Return year, community, second community and its share of simulated papers; empty for other graphs."""
    path = cfg.data.directory / "truth.npz"
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {f"truth_{name}": file[name] for name in file if len(file[name])}
