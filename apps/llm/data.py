"""Rows of tokens as samples, from one folder or a blend of several.   T targets of a row"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, PositiveInt, ValidationError

from apps.llm.settings import Config
from hpcai.data import Rows
from hpcai.data.hdf5 import Fields
from hpcai.data.sampler import Blend
from hpcai.data.splits import HELD_OUT, ConcatSamples, Samples, make_loader, open_loaders, open_split, training_kwargs
from hpcai.dist import Mesh
from hpcai.dist.collectives import broadcast_from_first
from hpcai.errors import ConfigError, DataError
from hpcai.models.llm import LLM, Batch, adapt, load_deferred, parallelize
from hpcai.models.llm.load import override_settings
from hpcai.models.llm.tokenizer import CONTENT, Tokenizer
from hpcai.programs import command_of
from hpcai.schema import format_first_error

METADATA = "text.json"


class TextMetadata(BaseModel):
    """The contents of ``text.json``, the metadata of a folder of rows."""

    sequence: PositiveInt
    vocabulary: PositiveInt
    tokenizer: str
    type: Literal["uint16", "uint32"]
    answers: bool
    before: list[int]
    splits: dict[str, Any] = {"validation": None}

    @property
    def fields(self) -> Fields:
        """The HDF5 datasets of a file."""
        answers: Fields = {"answers": ("int32", ()), "spans": ("int32", ("answers", 2))} if self.answers else {}
        return {"tokens": (self.type, (self.sequence + 1,)), "bytes": ("int32", ()), "documents": ("int32", ()),
                "ends": ("int32", ("documents",)), **answers}  # fmt: skip


@contextmanager
def build_loaders(cfg: Config, mesh: Mesh) -> Iterator[tuple[Any, Any, Any]]:
    """Yield loaders for training (None on ranks that only evaluate), validation and pictures: None for data without validation."""
    data, folders = cfg.data, [cfg.data.directory, *map(Path, cfg.data.blend)]
    metadata = [broadcast_from_first(partial(read_metadata, folder), mesh.peers) for folder in folders]
    _check_folders(cfg, folders, metadata)
    identity = broadcast_from_first(lambda: Tokenizer.load(folders[0]).identity, mesh.peers)
    if identity != metadata[0].tokenizer:  # the run copies the tokenizer that lies beside the rows
        fault = f"{folders[0] / CONTENT}: has tokenizer {identity[:12]}, {METADATA} names {metadata[0].tokenizer[:12]} for the rows"
        raise DataError(f"{fault}; copy that one there, or convert the rows again")
    parts = [Texts(open_rows(cfg, "train", mesh, f, m), m, data.documents, data.learn) for f, m in zip(folders, metadata)]
    has_validation = "validation" in metadata[0].splits
    validation = open_rows(cfg, "validation", mesh, folders[0], metadata[0]) if has_validation else None
    train = ConcatSamples(parts) if len(parts) > 1 else parts[0]
    kwargs = training_kwargs(parts[0].rows, cfg)
    if data.blend:
        counts, weights = [len(part) for part in parts], [1.0, *data.blend.values()]
        kwargs["sampler"] = Blend(counts, weights, data.epoch or round(counts[0] * sum(weights)), cfg.train.seed)

    def held_out(name: str, count: int | None) -> Any:
        if validation is None or count == 0:
            return nullcontext()
        rows = Texts(validation, metadata[0], data.documents, data.judge, count)
        return make_loader(rows, data.evaluation_batch, data, mesh, name=name, **HELD_OUT)

    with open_loaders(
        mesh,
        lambda: make_loader(train, data.batch, data, mesh, **kwargs),
        lambda: held_out("validation", data.validation_rows),
        lambda: held_out("pictures", data.pictures),
    ) as loaders:
        yield loaders


class Texts(Samples):
    """Rows of one split as ``Batch`` without its first dim. ``count``: the first rows only.

    The end token of a document belongs to the next document as input, so that every document begins with it. If the tokenizer puts
    a token before each text, documents begin with that, and it is no target. ``counts``: targets are all tokens, or the answers.
    """

    replicated = True

    def __init__(self, rows: Rows, metadata: TextMetadata, documents: str, counts: str, count: int | None = None) -> None:
        super().__init__(rows, count)
        self.metadata, self.apart, self.counts = metadata, documents == "apart", counts

    def transform(self, values: dict[str, Any], index: int, epoch: int) -> Batch:
        metadata, tokens, ends = self.metadata, np.asarray(values["tokens"], np.int64), np.asarray(values["ends"])
        if tokens.max() >= metadata.vocabulary:
            raise DataError(f"{self.describe(index)}: token {tokens.max()}, vocabulary {metadata.vocabulary}; convert it again")
        positions = np.arange(len(tokens), dtype=np.int32)
        documents = np.searchsorted(ends if metadata.before else ends - 1, positions, side="right").astype(np.int32)
        counted = np.ones(len(tokens), bool)
        if self.counts == "answers":
            counted[:] = False
            for begin, end in values["spans"]:
                counted[begin:end] = True
        if metadata.before:
            counted &= ~np.isin(positions, ends)
        byte_count = np.float32(values["bytes"]) if metadata.answers == (self.counts == "answers") else None
        return Batch(tokens, documents if self.apart else None, counted, byte_count)


def read_metadata(folder: Path) -> TextMetadata:
    """Read ``text.json``. Raises DataError if it is missing or invalid."""
    path = folder / METADATA
    try:
        return TextMetadata.model_validate_json(path.read_bytes())
    except OSError as problem:
        text = f"{path}: {problem.strerror}; make data with: {command_of('data_prep.text')} python {folder}, or set data.directory"
        raise DataError(text) from problem
    except ValidationError as problem:
        raise DataError(f"{path}: {format_first_error(problem)}; make the rows again") from problem


def open_rows(cfg: Config, split: str, mesh: Mesh, folder: Path | None = None, metadata: TextMetadata | None = None) -> Rows:
    folder = folder or cfg.data.directory
    fields = (metadata or broadcast_from_first(partial(read_metadata, folder), mesh.peers)).fields
    remedy = f"make rows with: {command_of('data_prep.text')} convert SOURCE {folder} --tokenizer FILE, or set data.directory"
    return open_split(folder / split, fields, remedy, cfg.data, mesh, cfg.data.shards if split == "train" else 1)


def _check_folders(cfg: Config, folders: Sequence[Path], metadata: Sequence[TextMetadata]) -> None:
    """Raise ConfigError if folders differ in kind, do not fit the model, or have another tokenizer than the weights."""
    first, model, data = metadata[0], cfg.model, cfg.data
    for folder, other in zip(folders[1:], metadata[1:]):
        for name in ("tokenizer", "sequence", "type", "answers"):
            ours, theirs = (str(getattr(info, name))[:12] for info in (first, other))
            if ours != theirs:
                raise ConfigError(f"{folder}: {name} is {theirs}, that of {folders[0]} is {ours}; a blend needs equal ones")
    if first.vocabulary > model.vocabulary:
        fault = f"{folders[0]}: its tokenizer has {first.vocabulary:,} tokens, model.vocabulary is {model.vocabulary:,}"
        raise ConfigError(f"{fault}; set it to at least as many, or convert rows with the tokenizer of the model")
    if first.sequence > model.positions:
        raise ConfigError(f"{folders[0]}: rows of {first.sequence} tokens, model.positions is {model.positions}; make shorter rows")
    if "answers" in (data.learn, data.judge) and not first.answers:
        raise ConfigError(f"{folders[0]}: has no answers, but data.learn or data.judge is answers; convert with --chat or --answer")
    if cfg.start.weights is not None and (cfg.start.weights / CONTENT).is_file():
        theirs = Tokenizer.load(cfg.start.weights).identity
        if theirs != first.tokenizer:
            raise ConfigError(
                f"{folders[0]}: rows made with the tokenizer {first.tokenizer[:12]}, start.weights {cfg.start.weights} has "
                f"{theirs[:12]}: its weights were trained with other tokens; convert with --tokenizer {cfg.start.weights}"
            )


def complete_settings(cfg: Config) -> Config:
    """Return ``cfg`` with defaults of the model replaced by the settings of ``start.weights``, or by vocabulary and positions of
    the data. Raises ConfigError if a setting differs from that of the weights."""
    if cfg.start.weights is not None:
        return cfg.model_copy(update={"model": override_settings(cfg.start.weights, cfg.model)})
    metadata = read_metadata(cfg.data.directory)
    defaults = {"vocabulary": metadata.vocabulary, "positions": metadata.sequence}
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=defaults | cfg.model.changed)})


def build_model(cfg: Config, mesh: Mesh) -> LLM:
    """Build the model on the mesh with random or loaded weights, within ``train.seeds``. No rank materializes the full model."""
    model = parallelize(LLM(cfg.model), mesh)
    if cfg.start.weights is not None:
        load_deferred(model, cfg.start.weights)
    return model if cfg.lora is None else adapt(model, cfg.lora)
