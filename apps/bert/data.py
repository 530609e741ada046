"""Packed rows as samples, with masked tokens.   T tokens of a row, P sequences and M masked tokens of it at most"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from apps.bert.settings import Config
from hpcai.data import Loader, Rows
from hpcai.data.sampler import Balanced
from hpcai.data.splits import HELD_OUT, Samples, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.errors import ConfigError, DataError
from hpcai.models.bert import Batch, Bert, load_weights
from hpcai.models.bert.masking import mask_tokens
from hpcai.nn.weights import set_origin
from hpcai.programs import command_of

FIELDS: dict[str, dict[str, Any]] = {
    "drawn": {"tokens": ("uint16", (None,)), "lengths": ("int16", (None,)), "nats": ("float32", (None,))},
    "stored": {
        "tokens": ("uint16", (None,)), "lengths": ("int16", (None,)), "masked": ("int16", (None,)), "targets": ("int32", (None,)),
        "types": ("uint8", (None,)), "next_sentence": ("int8", (None,)),
    },
    "families": {"tokens": ("uint16", (None,)), "lengths": ("int16", (1,)), "contacts": ("uint8", (None, None))},
}  # fmt: skip


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any, dict[str, np.ndarray]]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and families of known contacts, and the latter."""
    data, replicas = cfg.data, mesh["replicate"].size
    train, validation = open_rows(cfg, "train", mesh), open_rows(cfg, "validation", mesh)
    kwargs: dict[str, Any] = training_kwargs(train, cfg)
    if data.balance != "none":
        kwargs["sampler"] = balanced_sampler(cfg, train)
    has_families = data.pictures >= replicas and (data.directory / "families").is_dir()
    families = Families(open_rows(cfg, "families", mesh), data.pictures) if has_families else None
    with open_loaders(
        mesh,
        lambda: build_loader(PackedRows(train, cfg), data.batch, cfg, mesh, **kwargs),
        lambda: build_loader(PackedRows(validation, cfg, True), data.evaluation_batch, cfg, mesh, name="validation", **HELD_OUT),
        None if families is None else lambda: build_loader(families, replicas, cfg, mesh, name="families", **HELD_OUT),
    ) as loaders:
        yield *loaders, {} if families is None else {"contacts": families.contacts()}


class PackedRows(Samples):
    """Rows of one split as ``Batch`` without its first dim. Masks are drawn by seed, epoch and index; those held out are fixed."""

    replicated = True

    def __init__(self, rows: Rows, cfg: Config, held_out: bool = False) -> None:
        super().__init__(rows)
        self.cfg, self.held_out = cfg, held_out
        self.vocabulary = _tokens(rows) or cfg.model.vocabulary

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        cfg, tokens, total = self.cfg, values["tokens"], int(values["lengths"].sum())
        if tokens.max() >= cfg.model.vocabulary or not 0 < total <= len(tokens):
            actual = f"token {tokens.max()} of {cfg.model.vocabulary}, {total} tokens in a row of {len(tokens)}"
            raise DataError(f"{self.describe(index)}: {actual}; make the data again with data_prep.bert, or set model.vocabulary")
        if cfg.data.masks == "stored":
            names = "tokens", "lengths", "masked", "targets", "types", "next_sentence"
            return Batch(*(np.asarray(values[name], np.int64) for name in names))
        seed = [cfg.train.seed, int(self.held_out), 0 if self.held_out else epoch, index]
        return draw_masks(values, self.vocabulary, cfg.data.fraction, np.random.default_rng(seed))


def draw_masks(values: dict[str, Any], vocabulary: int, fraction: float, random: np.random.Generator) -> Batch:
    """Return a row with masked tokens, without the first dim of ``Batch``."""
    lengths = values["lengths"].astype(np.int64)
    tokens, masked, targets = mask_tokens(values["tokens"].astype(np.int64), lengths, vocabulary, fraction, random)
    baseline: Any = values["nats"][masked[targets >= 0]].sum(dtype=np.float32)
    return Batch(*(cast(Any, x) for x in (tokens, lengths, masked, targets)), baseline=baseline)


class Families(Samples):
    """A sequence of each family, without masks."""

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        none = np.zeros(1, np.int64)
        return Batch(values["tokens"].astype(np.int64), values["lengths"].astype(np.int64), none, none - 1)

    def contacts(self) -> np.ndarray:
        """Return the known contacts.   [F, L, L]"""
        return np.stack([self.rows.read(index)["contacts"] for index in range(len(self))])


def balanced_sampler(cfg: Config, rows: Rows) -> Balanced:
    """Return a sampler that assigns the rows of a batch to ranks by ``cfg.data.balance``."""
    lengths, model = rows.column("lengths").astype(float), cfg.model
    channels = 2 * model.width + model.inner  # products of a token with weights cost 2 C (2 C + C'), pairs of tokens 2 C each
    costs = lengths > 0 if cfg.data.balance == "sequences" else channels * lengths + lengths**2
    return Balanced(costs.sum(1), cfg.train.seed, samples=cfg.data.epoch)


def build_loader(source: Samples, batch: int, cfg: Config, mesh: Mesh, **kwargs: Any) -> Loader:
    return make_loader(source, batch, cfg.data, mesh, dict.fromkeys(source.rows.fields, ""), Batch, **kwargs)


def open_rows(cfg: Config, split: str, mesh: Mesh) -> Rows:
    data, model = cfg.data, cfg.model
    remedy = f"make data with: {command_of('data_prep.bert')} simulate {data.directory}, or set data.directory and data.masks"
    fields = FIELDS["families" if split == "families" else data.masks]
    rows = open_split(data.directory / split, fields, remedy, data, mesh)
    longest = int(rows.column("lengths").max())
    if longest > model.positions:
        raise ConfigError(f"{rows.folder}: {longest} tokens of a sequence; set model.positions, {model.positions}, to {longest}")
    if (tokens := _tokens(rows)) > model.vocabulary:
        raise ConfigError(f"{rows.folder}: {tokens} tokens; set model.vocabulary, {model.vocabulary}, to {-(-tokens // 8) * 8}")
    return rows


def _tokens(rows: Rows) -> int:
    """Return the number of tokens of the vocabulary, 0 if it is not known."""
    vocabulary = rows.metadata.get("vocabulary", 0)
    return vocabulary if isinstance(vocabulary, int) else len(vocabulary)


def build_model(cfg: Config) -> Bert:
    """Build the network, with the weights of ``cfg.start``. Raises CheckpointError if they do not fit."""
    model = Bert(cfg.model)
    if cfg.start.weights is not None:
        model.load_state_dict(load_weights(cfg.start.weights, cfg.model).state_dict())
        set_origin(model, cfg.start.weights)
    return model
