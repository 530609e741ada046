"""Benchmark of BERT:  hpcai bench bert | hpcai ablate bert [model.layers=4 ...]

The plain form has a row for each sequence, padded to the length of packed rows, and attention with a mask. Rows hold one to three
sequences of random tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apps.bert.data import FIELDS, PackedRows, build_loader, draw_masks, open_rows
from apps.bert.settings import Config
from hpcai.cli.benchmarks import Enabled, Switch, Workload, swap_classes
from hpcai.data.collate import tree_zip
from hpcai.dist import Mesh
from hpcai.models.bert import Batch, Bert, counted, loss, parallelize, score
from hpcai.models.bert.masking import SPECIAL
from hpcai.nn.lm_head import IGNORE_INDEX

_MOST = 3  # sequences of a row


class Benchmark(Workload):
    settings, batch, fields = Config, Batch, tuple(FIELDS["drawn"])
    loss, metric, counts = staticmethod(loss), staticmethod(score), staticmethod(counted)
    unit, compile_scope, slow_compile = "rows", "blocks", True

    def switches(self, cfg: Any, mesh: Mesh) -> list[Switch]:
        return [Switch("packing", "several sequences in a row, and neither padding nor scores across sequences")]

    def build(self, cfg: Any, mesh: Mesh, enabled: Enabled) -> nn.Module:
        model = parallelize(Bert(cfg.model), mesh)
        if "packing" not in enabled:
            swap_classes(model, {Bert: _PaddedBert})
            model.bert.padded = True
        return model

    def random_sample(self, cfg: Any, random: np.random.Generator) -> tuple[Any, ...]:
        width, count = cfg.model.positions, int(random.integers(1, _MOST + 1))
        cuts = np.sort(random.choice(np.arange(8, width - 8), count - 1, replace=False))
        lengths = np.diff([0, *cuts, width])
        tokens = random.integers(len(SPECIAL), cfg.model.vocabulary, width).astype(np.uint16)
        return tokens, np.pad(lengths, (0, _MOST - count)).astype(np.int16), np.ones(width, np.float32)

    def collate(self, cfg: Any, samples: list[tuple[Any, ...]]) -> Any:
        random = np.random.default_rng(0)
        named = (dict(zip(self.fields, values)) for values in samples)
        rows = [draw_masks(values, cfg.model.vocabulary, cfg.data.fraction, random) for values in named]
        return tree_zip(rows, lambda values: torch.from_numpy(np.stack(values)))

    def loader(self, cfg: Any, mesh: Mesh, split: str, **kwargs: Any) -> Any:
        return build_loader(PackedRows(open_rows(cfg, split, mesh), cfg), cfg.data.batch, cfg, mesh, **kwargs)


class _PaddedBert(Bert):
    """Each sequence in a row of its own."""

    def forward(self, tokens: Tensor, lengths: Any = None, types: Any = None, masked: Any = None, targets: Any = None) -> Any:
        ends = lengths.long().cumsum(1)
        starts, column = ends - lengths, torch.arange(tokens.shape[1], device=tokens.device)
        at = (starts[:, :, None] + column).clamp(max=tokens.shape[1] - 1)  # [B, P, T]
        split = [None if x is None else x[:, None].expand(at.shape).gather(2, at).flatten(0, 1) for x in (tokens, types)]
        inside = (masked[:, None] >= starts[:, :, None]) & (masked[:, None] < ends[:, :, None])  # [B, P, M]
        own = (masked[:, None] - starts[:, :, None]).where(inside, 0).flatten(0, 1)
        if targets is not None:
            targets = targets[:, None].where(inside, IGNORE_INDEX).flatten(0, 1)
        mlm, nsp = super().forward(split[0], lengths.reshape(-1, 1), split[1], own, targets)
        if targets is None:  # of each masked token, those in the row of its sequence
            mlm = (mlm.unflatten(0, inside.shape[:2]) * inside[..., None]).sum(1)
        return mlm, None if nsp is None else nsp.view(*lengths.shape, 2)
