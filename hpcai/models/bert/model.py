"""BERT (Devlin et al. 2018), with the names of Hugging Face's parameters. Layer norms follow the residual sums.

B rows, T tokens of each, P packed sequences of a row at most, N tokens of all rows without (on a GPU with) padding, M masked tokens
of a row at most, C channels, V vocabulary entries
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.errors import DataError
from hpcai.kernels.activations import gelu
from hpcai.kernels.packed_attention import Packing, packed_attention
from hpcai.models.bert.config import BertConfig
from hpcai.nn.layernorm import LayerNorm
from hpcai.nn.lm_head import IGNORE_INDEX, LMHead
from hpcai.nn.matmul import fused_linear
from hpcai.nn.recompute import cheap, run_block
from hpcai.nn.seam import Seam
from hpcai.nn.weights import PretrainedMixin


class Embeddings(nn.Module):
    """tokens, positions, types [N] -> [N, C]"""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(cfg.vocabulary, cfg.width)
        self.position_embeddings = nn.Embedding(cfg.positions, cfg.width)
        self.token_type_embeddings = nn.Embedding(cfg.types, cfg.width)
        self.LayerNorm, self.dropout = LayerNorm(cfg.width, eps=cfg.eps, autocast_output=True), nn.Dropout(cfg.dropout)

    def forward(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        x = self.word_embeddings(tokens) + self.position_embeddings(positions) + self.token_type_embeddings(types)
        return cast(Tensor, self.dropout(self.LayerNorm(x)))


class SelfAttention(nn.Module):
    """x [N, C] -> [N, C]"""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = cfg.width // cfg.heads, cfg.attention_dropout
        self.query, self.key, self.value = (nn.Linear(cfg.width, cfg.width) for _ in range(3))
        self.every_head = Seam()  # maps of this rank's heads [B, H/n, T, T] -> those of all

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values.   [N, C] -> [N, H, D] each"""
        return [y.unflatten(-1, (-1, self.head_dim)) for y in fused_linear(x, self.query, self.key, self.value)]

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        q, k, v = self.heads(x)
        return packed_attention(q, k, v, packing, self.dropout if self.training else 0.0).flatten(1)


class Residual(nn.Module):
    """LayerNorm(x + dropout(dense(y))).   y [N, C'], x [N, C] -> [N, C]"""

    def __init__(self, cfg: BertConfig, channels: int) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(channels, cfg.width), nn.Dropout(cfg.dropout)
        self.LayerNorm = LayerNorm(cfg.width, eps=cfg.eps, autocast_output=True)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return cheap(self.LayerNorm, x + self.dropout(self.dense(y)))


class Attention(nn.Module):
    """x [N, C] -> [N, C]"""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.self, self.output = SelfAttention(cfg), Residual(cfg, cfg.width)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        return cast(Tensor, self.output(self.self(x, packing), x))


class Layer(nn.Module):
    """x [N, C] -> [N, C]"""

    float8 = True  # its linear layers may multiply in FP8

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(cfg)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(cfg.width, cfg.inner)})
        self.output, self.activation = Residual(cfg, cfg.inner), _activation(cfg)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        x = self.attention(x, packing)
        return cast(Tensor, self.output(cheap(self.activation, self.intermediate["dense"](x)), x))


class Encoder(nn.Module):
    """Embeddings and layers, ``bert`` in Hugging Face's files; ``pooler`` with next-sentence prediction."""

    def __init__(self, cfg: BertConfig, pooler: bool) -> None:
        super().__init__()
        self.recompute, self.positions, self.padded = cfg.recompute, cfg.positions, False
        self.embeddings = Embeddings(cfg)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(cfg.width, cfg.width)}) if pooler else None

    def forward(self, tokens: Tensor, lengths: Tensor | None, types: Tensor | None) -> tuple[Tensor, Packing]:
        """tokens [B, T], lengths [B, P], types [B, T] -> [N, C]"""
        if lengths is None:
            lengths = torch.full((len(tokens), 1), tokens.shape[1], device=tokens.device)
        if tokens.shape[1] > self.positions and (lengths.is_meta or int(lengths.max()) > self.positions):
            longest = tokens.shape[1] if lengths.is_meta else int(lengths.max())
            raise DataError(f"a sequence has {longest} tokens, the model {self.positions} positions; shorten it")
        packing = Packing.of(lengths, tokens.shape[1], self.padded)
        tokens, types = (packing.flatten(x) for x in (tokens, torch.zeros_like(tokens) if types is None else types))
        x = self.embeddings(tokens, packing.positions.clamp(max=self.positions - 1), types)
        for layer in cast(Any, self.encoder)["layer"]:
            x = run_block(layer, self.recompute, x, packing)
        return x, packing

    def pool(self, x: Tensor, packing: Packing) -> Tensor:
        """Return the pooled first token of each sequence; a row without one has values that do not count.   [N, C] -> [B, P, C]"""
        return torch.tanh(cast(Any, self.pooler)["dense"](x[packing.starts]))


class MLMHead(LMHead):
    """Prediction of masked tokens, ``cls.predictions`` in Hugging Face's files, with the word embeddings as its weight."""

    def __init__(self, cfg: BertConfig) -> None:
        super().__init__(cfg.width, cfg.vocabulary, bias=True)
        self.transform = nn.ModuleDict({
            "dense": nn.Linear(cfg.width, cfg.width), "LayerNorm": LayerNorm(cfg.width, eps=cfg.eps, autocast_output=True),
        })  # fmt: skip
        self.activation = _activation(cfg)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        x = self.transform["LayerNorm"](self.activation(self.transform["dense"](hidden)))
        return super().forward(x, targets, temperature)


class Bert(PretrainedMixin):
    """BERT with its heads of pre-training.

    ``tokens`` [B, T]: Rows, each of which begins with its packed sequences, of ``lengths`` [B, P] (0: none; default: the full row).
    Positions restart with each sequence, and attention stays within it. ``types`` [B, T]: 0 by default. It returns logits of all
    tokens [B, T, V], or of tokens at ``masked`` [B, M] of each row [B, M, V], or with ``targets`` [B, M] their cross entropies,
    flat, without (on a GPU with 0 for) those that are IGNORE_INDEX; and logits of next-sentence prediction [B, P, 2], or None.
    Raises DataError for sequences longer than ``cfg.positions``.
    """

    package = __package__

    def __init__(self, cfg: BertConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or BertConfig()
        self.bert = Encoder(cfg, cfg.nsp)
        heads: dict[str, nn.Module] = {"predictions": MLMHead(cfg)}
        self.cls = nn.ModuleDict(heads | ({"seq_relationship": nn.Linear(cfg.width, 2)} if cfg.nsp else {}))
        cast(Any, self.cls)["predictions"].weight = self.bert.embeddings.word_embeddings.weight
        initialize(self, cfg)

    def forward(
        self, tokens: Tensor, lengths: Tensor | None = None, types: Tensor | None = None, masked: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        x, packing = self.bert(tokens, lengths, types)
        head, nsp = self.cls["predictions"], None
        if self.cfg.nsp:
            nsp = self.cls["seq_relationship"](self.bert.pool(x, packing))
        if masked is None:
            return packing.unflatten(head(x)), nsp
        at = packing.flat.gather(1, masked)
        if targets is None:
            return head(x[at]), nsp
        if packing.lengths is not None:
            kept = targets != IGNORE_INDEX
            at, targets = at[kept], targets[kept]
        return head(x[at.flatten()], targets.flatten()), nsp

    def output_files(self, export: Callable[..., None]) -> dict[str, Callable[[Path], Any]]:
        """Return the files of a run and their writers: a folder of Hugging Face."""
        return cast("dict[str, Callable[[Path], Any]]", import_module(f"{__package__}.load").files(self, export))


class BertClassifier(nn.Module):
    """BERT with a classifier of sequences, or of tokens with ``per_token``, for fine-tuning; the names are Hugging Face's.

    Arguments as of ``Bert``.   tokens [B, T] -> [B, P, labels], or [B, T, labels]
    """

    def __init__(self, cfg: BertConfig, labels: int, per_token: bool = False, pretrained: Bert | None = None) -> None:
        super().__init__()
        self.bert, self.dropout = Encoder(cfg, not per_token), nn.Dropout(cfg.dropout)
        self.classifier, self.per_token = nn.Linear(cfg.width, labels), per_token
        initialize(self, cfg)
        if pretrained is not None:  # without next-sentence prediction it has no pooler, which is then new
            self.bert.load_state_dict(self.bert.state_dict() | {k: v for k, v in pretrained.bert.state_dict().items()
                                                                if not (per_token and k.startswith("pooler."))})  # fmt: skip

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        x, packing = self.bert(tokens, lengths, types)
        x = packing.unflatten(x) if self.per_token else self.bert.pool(x, packing)
        return cast(Tensor, self.classifier(self.dropout(x)))


def initialize(model: nn.Module, cfg: BertConfig) -> None:
    """Draw weights from a normal distribution, and set biases to 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=cfg.deviation)


def _activation(cfg: BertConfig) -> Callable[[Tensor], Tensor]:
    return F.gelu if cfg.activation == "gelu" else gelu
