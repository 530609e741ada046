"""Benchmark of a language model:  hpcai bench llm | hpcai ablate llm [model.width=512 ...]

The plain form computes all logits and their cross entropy with torch. Rows are random tokens of a few documents each, with the
maximum length of the model.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.llm.data import METADATA, TextMetadata, Texts, open_rows, read_metadata
from apps.llm.settings import Config
from hpcai.cli.benchmarks import Enabled, Implementation, Peer, Switch, Workload, swap_classes
from hpcai.data.collate import tree_zip
from hpcai.data.splits import make_loader
from hpcai.dist import Mesh
from hpcai.models.llm import LLM, Batch, adapt, loss, parallelize, score
from hpcai.models.llm.families import hub_config
from hpcai.models.llm.objective import document_positions
from hpcai.nn.lm_head import IGNORE_INDEX, LMHead

_DOCUMENTS, _BYTES = 4, 4  # of a row, of a token


class Benchmark(Workload):
    settings, batch, fields = Config, Batch, ("tokens", "bytes", "documents", "ends")
    ragged, metric = frozenset({"ends"}), staticmethod(score)
    unit, compile_scope, slow_compile = "rows", "blocks", True

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        """Return the mean, as other apps do: all rows have equally many tokens in the loss."""
        total, count = loss(model, batch)["loss"]
        return {"loss": total / count}

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        cut = "the vocabulary is sharded, and its cross entropy has one form" if mesh["tensor"].size > 1 else None
        return [Switch("logits", "cross entropy of a few tokens at a time, not of all logits together", cut)]

    def build(self, cfg: Any, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(LLM(cfg.model), mesh)
        if "logits" not in enabled and mesh["tensor"].size == 1:
            swap_classes(model, {LMHead: _AllLogits})
        return model if cfg.lora is None else adapt(model, cfg.lora)

    def random_sample(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        metadata = _random_metadata(cfg)
        tokens = random.integers(0, metadata.vocabulary, metadata.sequence + 1).astype(metadata.type)
        ends = np.sort(random.choice(np.arange(2, metadata.sequence), _DOCUMENTS, replace=False)).astype(np.int32)
        return tokens, np.asarray(_BYTES * metadata.sequence, np.int32), np.asarray(_DOCUMENTS, np.int32), ends

    def collate(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        source = Texts(cast(Any, samples), _random_metadata(cfg), cfg.data.documents, "all")
        rows = [source.transform(dict(zip(self.fields, values)), number, 0) for number, values in enumerate(samples)]
        return tree_zip(rows, lambda values: torch.from_numpy(np.stack(values)))

    def loader(self, cfg: Any, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        metadata = read_metadata(cfg.data.directory)
        source = Texts(open_rows(cfg, split, mesh, metadata=metadata), metadata, cfg.data.documents, "all")
        return make_loader(source, cfg.data.batch, cfg.data, mesh, **kwargs)

    def write_files(self, cfg: Any, rows: int, splits: Sequence[str] = ("train", "validation")) -> Any:
        cfg = super().write_files(cfg, rows, splits)
        (cfg.data.directory / METADATA).write_text(json.dumps(_random_metadata(cfg).model_dump()))
        return cfg


def _random_metadata(cfg: Any) -> TextMetadata:
    """Return the metadata of rows of random tokens."""
    model = cfg.model
    kind: Any = "uint16" if model.vocabulary <= 1 << 16 else "uint32"
    return TextMetadata(
        sequence=model.positions, vocabulary=model.vocabulary, tokenizer="random", type=kind, answers=False, before=[],
    )  # fmt: skip


class _AllLogits(LMHead):
    def _cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight).flatten(0, 1).float()
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view(targets.shape)


def _transformers(cfg: Any, batch: Batch) -> Implementation:
    package: Any = import_module("transformers")
    kwargs, cached = hub_config(cfg.model, torch.float32), {"use_cache": False}  # a cache would ignore positions of documents
    if kwargs["model_type"] == "gpt2":  # its default is a dropout of 0.1 in three layers
        kwargs |= {"resid_pdrop": cfg.model.dropout, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    peer = package.AutoModelForCausalLM.from_config(package.AutoConfig.for_model(**kwargs))

    def mean(model: Any, batch: Batch) -> dict[str, Any]:
        positions = None if batch.documents is None else document_positions(batch.documents[:, :-1])
        logits, targets = model(batch.tokens[:, :-1], position_ids=positions, **cached).logits, batch.targets
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX)}

    return Implementation(peer.train().to(batch.tokens.device), mean)


Benchmark.peers = {"transformers": Peer("transformers", _transformers)}
