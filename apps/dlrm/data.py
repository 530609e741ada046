"""Blocks of events as samples, and their batches."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from apps.dlrm.settings import Config
from hpcai.data import Endless, Loader
from hpcai.data.direct import Reader
from hpcai.data.events import EventTable
from hpcai.data.readers import MEMORY_FRACTION, available_memory, open_reader
from hpcai.data.splits import HELD_OUT, open_loaders
from hpcai.dist import Mesh
from hpcai.dist.collectives import all_gather_numbers, all_gather_object
from hpcai.errors import ConfigError, DataError
from hpcai.models.dlrm import DLRM, Batch, DLRMConfig, auc_of_ranks, exchange, predictions
from hpcai.parallel.embedding_plan import ShardingPlan, plan_shards
from hpcai.programs import command_of
from hpcai.train import PerSample

_BETWEEN_NODES = 67 / 4  # time of a byte on the network, in that of a byte of a lookup (ShardingPlan.network)


class NumberedBatch(NamedTuple):
    """A batch with the number of each event in its split."""

    dense: Tensor
    ids: Any
    label: Tensor
    row: Tensor


class Blocks:
    """Blocks of ``rows`` consecutive events of a split, a source of samples. ``drop_last``: without events that fill no block, so
    that batches have one shape. ``numbered``: batches are ``NumberedBatch``. ``count``: the first events only."""

    replicated = True

    def __init__(
        self, table: EventTable, split: str, rows: int, reader: Reader, *, drop_last: bool = False, numbered: bool = False,
        count: int | None = None,
    ) -> None:  # fmt: skip
        self.table, self.split, self.rows, self.reader, self.numbered = table, split, rows, reader, numbered
        events = table.count(split)
        self.events = min(events, events if count is None else count)
        if drop_last:
            self.events -= self.events % rows
        if not self.events:
            raise DataError(f"{table.path(split)}: {events:,} events do not fill a block of {rows}; lower data.rows")

    def __len__(self) -> int:
        return -(-self.events // self.rows)

    @property
    def identity(self) -> str:
        return f"{self.split} {self.table.splits[self.split]} of {self.table.rows} with {self.table.hotness}"

    def changes_since(self, seconds: float) -> str:
        path = self.table.path(self.split)
        return f"{path} is newer" if path.stat().st_mtime > seconds else ""

    def sample(self, index: int, epoch: int) -> Any:
        first = index * self.rows
        end = min(first + self.rows, self.events)
        return *self.table.read(self.reader, self.split, first, end), np.arange(first, end)

    def describe(self, index: int) -> str:
        return f"{self.table.path(self.split)}, rows from {index * self.rows:,}"

    def collate(self, samples: Sequence[Any]) -> Any:
        columns = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*samples)]
        return NumberedBatch(*columns) if self.numbered else Batch(*columns[:3])


class EventLoader(Loader):
    """A loader of blocks, whose data set counts events."""

    source: Any

    @property
    def dataset_size(self) -> int:
        return int(self.source.events)


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh, table: EventTable, model: DLRM) -> Iterator[tuple[Any, Any, Any]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures. The ids of training batches are sent
    to the ranks of their tables."""
    data, size = cfg.data, table.row_bytes * sum(table.count(split) for split in ("train", "validation"))
    with closing(open_reader(data.reader, size, device=mesh.device)) as reader:
        blocks: Callable[..., Blocks] = partial(Blocks, table, rows=data.rows, reader=reader)
        kwargs, groups = data.loader_kwargs(), data.evaluation_batch // data.rows
        held_out = {**kwargs, **HELD_OUT}
        with open_loaders(
            mesh,
            lambda: training_loader(blocks(split="train", drop_last=True), cfg, mesh, model),
            lambda: EventLoader(blocks(split="validation"), groups, mesh, name="validation", **held_out),
            (lambda: _picture_loader(blocks, cfg, mesh, held_out)) if data.pictures else None,
        ) as loaders:
            yield loaders


def _picture_loader(blocks: Callable[..., Blocks], cfg: Config, mesh: Mesh, kwargs: dict[str, Any]) -> Loader:
    source = blocks(split="validation", count=max(cfg.data.pictures, mesh["replicate"].size * cfg.data.rows), numbered=True)
    return EventLoader(source, cfg.data.evaluation_batch // cfg.data.rows, mesh, name="pictures", **kwargs)


def training_loader(source: Blocks, cfg: Config, mesh: Mesh, model: DLRM | None, **kwargs: Any) -> Loader:
    """Return the loader of shuffled blocks. An epoch of ``data.epoch`` events is a part of a pass over all of them."""
    data = cfg.data
    if data.epoch is not None:
        kwargs.setdefault("sampler", Endless(len(source), data.epoch // data.rows, cfg.train.seed))
    if model is not None:
        kwargs["batch_transform"] = lambda batch, step: exchange(model, batch)
    kwargs = {"name": "train", "seed": cfg.train.seed, "accumulate": cfg.step.accumulate, **data.loader_kwargs(), **kwargs}
    return EventLoader(source, data.batch // data.rows, mesh, **kwargs)


def score(model: Any, batch: Any) -> dict[str, Any]:
    """Return sum and count of the loss, and the logits and labels from which all ranks compute the AUC together."""
    values = predictions(model, batch)
    logit, label = values["logit"], values["label"]
    total = F.binary_cross_entropy_with_logits(logit, label.to(logit.dtype), reduction="sum")
    return {"auc": PerSample((logit, label), auc_of_ranks), "loss": (total, len(label))}


def numbered_predictions(model: Any, batch: NumberedBatch) -> dict[str, Tensor]:
    return predictions(model, Batch(*batch[:3])) | {"row": batch.row}


def open_table(cfg: Config) -> EventTable:
    folder = cfg.data.directory
    return EventTable(folder, f"make data with: {command_of('data_prep.events')} simulate {folder}, or set data.directory")


def complete_model_config(model: DLRMConfig, table: EventTable) -> DLRMConfig:
    """Return the settings with the numbers and tables of the data. Raises ConfigError if they were set, and differ."""
    actual = {"dense_features": table.dense, "rows": table.rows, "hotness": table.hotness}
    for name, value in actual.items():
        if (ours := getattr(model, name)) not in (value, DLRMConfig.model_fields[name].default):
            raise ConfigError(f"model.{name} is {ours}, but {table.folder} has {value}; leave it out")
    return model.model_copy(update=actual)


def plan_tables(cfg: Config, model: DLRMConfig, mesh: Mesh) -> ShardingPlan:
    """Return the plan of the tables, the same on all ranks. Raises ConfigError if they do not fit."""
    axis, node = mesh["replicate"], socket.gethostname()
    ranks, nodes = axis.size, all_gather_object(node, axis)
    on_gpu = mesh.device.type == "cuda"
    free = torch.cuda.mem_get_info(mesh.device)[0] if on_gpu else available_memory() // nodes.count(node)
    free = int(all_gather_numbers([free], axis, torch.int64).min())
    memory = MEMORY_FRACTION * free if cfg.tables.memory is None else cfg.tables.memory * 1e9
    memory /= 3 if cfg.train.evaluate == "background" else 1  # a copy for the evaluation, and one that waits for it
    kwargs: dict[str, Any] = {"network": _BETWEEN_NODES} if len({*nodes}) > 1 else {}
    rows, hotness, dim, rowwise = model.rows, model.hotness, model.dim, model.adagrad_rowwise
    replicated = ShardingPlan(rows, hotness, dim, ranks, (), rowwise)
    if cfg.tables.plan == "replicated" and replicated.memory(0) > memory:
        text = f"tables and states of {replicated.memory(0) / 1e9:.4g} GB do not fit into {memory / 1e9:.4g} GB of a rank"
        raise ConfigError(f"tables.plan is replicated, but {text}; set it to auto")
    plan = plan_shards(rows, hotness, dim, ranks=ranks, memory=memory, batch=cfg.data.batch, rowwise=rowwise, **kwargs)
    return replicated if ranks == 1 or cfg.tables.plan == "replicated" else plan


def describe_plan(plan: ShardingPlan, batch: int) -> str:
    """Return the plan in a line: kinds of shards, bytes of the fullest rank, and how unevenly lookups are spread."""
    count, ranks = len(plan.rows), range(plan.ranks)
    pieces = Counter(shard.table for shard in plan.shards)
    memory, costs = max(map(plan.memory, ranks)), [plan.cost(rank) for rank in ranks]
    alone = sum(n == 1 for n in pieces.values())
    text = f"{count} tables: {len(plan.replicated)} replicated, {alone} on one rank, {len(pieces) - alone} sharded"
    text += f"; {memory / 1e9:.3g} GB a rank at most"
    if not plan.shards:
        return text
    traffic = max(sum(plan.sent(rank, batch // plan.ranks)) for rank in ranks)
    slowest = max(costs) * plan.ranks / sum(costs)
    return f"{text}; a step sends {traffic / 1e6:.3g} MB; the slowest rank takes {slowest:.2f} of the mean"
