"""Linear layers, embeddings and losses that are cut over the ranks of ``tensor``: the same training as whole, the same checkpoints."""

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import ConfigError, MeshError
from hpcai.parallel import tensor
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.tensor import Entropy, cut_inputs, cut_outputs, cut_words, heads
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints, Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.transformer import HEADS, WIDTH, Transformer, batch, mean_loss, rotated

STEPS = 2
WHOLE: dict[str, int] = {"tensor": 1}
CUTS = [{"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}]


class Grouped(nn.Module):
    """Attention of which several heads of queries share keys and values (Ainslie et al., "GQA", 2023)."""

    def __init__(self, width: int, queries: int, keys: int) -> None:
        super().__init__()
        self.size, self.keys = width // queries, keys
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * keys * self.size), nn.Linear(width, width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(rotated(q, positions), rotated(k, positions), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def parallelize(model: Transformer, mesh: Mesh, sequence: bool) -> Transformer:
    axis, dim = mesh["tensor"], 1 if sequence else None
    cut_words(model.embedding, axis, dim)
    for block in model.blocks:
        attention, feed = block.attention, block.feed
        if isinstance(attention, Grouped):
            cut_outputs(attention.q, axis, sequence=dim)
            groups = mesh.split("tensor", max(axis.size // attention.keys, 1), "keys")
            cut_outputs(attention.kv, axis, [attention.keys * attention.size] * 2, sequence=dim, groups=groups)
        else:
            cut_outputs(attention.qkv, axis, heads(axis, attention.size, HEADS), sequence=dim)
        cut_inputs(attention.out, axis, dim)
        cut_outputs(feed.gate_up, axis, [2 * WIDTH, 2 * WIDTH], sequence=dim)
        cut_inputs(feed.down, axis, dim)
    cut_outputs(model.head, axis, sequence=dim)
    model.entropy = Entropy(axis, model.embedding.num_embeddings)
    if sequence:
        sum_over(model, axis)
    return model


def new_step(mesh: Mesh, case: dict[str, Any], seed: int = 0) -> Step:
    """``case``: settings of the step, and of the model: sequence, tied, words, keys."""
    torch.manual_seed(seed)
    model = Transformer(layers=2, tied=case.get("tied", False), vocabulary=case.get("words", 24))
    for block in model.blocks if "keys" in case else ():
        block.attention = Grouped(WIDTH, HEADS, case["keys"])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    words = {"precision": "fp64", "weight_decay": 0.1, "clip": 0.5, "average": 0.9, "accumulate": 2 // mesh["replicate"].size}
    words |= {name: value for name, value in case.items() if name in StepConfig.model_fields}
    return Step(parallelize(model, mesh, case.get("sequence", False)), mean_loss, StepConfig(**words), mesh)


def train(step: Step, words: int, first: int = 0, steps: int = STEPS) -> float:
    """The loss of the last step: each copy has half of the samples, one after another or side by side."""
    axis = step.mesh["replicate"]
    for i in range(first, first + steps):
        samples = {name: t.chunk(axis.size)[axis.rank] for name, t in batch(i, vocabulary=words).items()}
        values = step(samples, 0.05 / (i + 1))
    step.check()
    return float(values["loss"])


Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]


def pieces(step: Step, averages: bool = True) -> Pieces:
    """What this rank holds of weights, gradients, moments and averages: name, size of the whole, offsets there, numbers."""
    found: Pieces = []
    step.sums.settle()
    for state in step.optimizer.states:
        rows = {"weight": state.weights, "gradient": state.row.gradient(), "average": state.average, **state.moments}
        for part in state.row.parts:
            for what, row in rows.items():
                if row is not None:
                    boxes = part.boxes(row)
                    found += [(f"{part.name} {what}", part.place.size, at, t.detach().numpy().copy()) for at, t in boxes]
    return found


def joined(ranks: list[Pieces]) -> dict[str, Any]:
    """The wholes; what several ranks hold is the same, bit for bit."""
    found: dict[str, Any] = {}
    for name, size, at, value in (piece for rank in ranks for piece in rank):
        whole = found.setdefault(name, np.full(size, np.nan, value.dtype))
        box = tuple(slice(o, o + n) for o, n in zip(at, value.shape))
        assert np.all(np.isnan(whole[box]) | (whole[box] == value)), name
        whole[box] = value
    assert not any(np.isnan(whole).any() for whole in found.values())
    return found


def trained(mesh: Mesh, cases: list[dict[str, Any]]) -> list[tuple[Pieces, float, float]]:
    found = []
    for case in cases:
        step = new_step(mesh, case)
        loss = train(step, case.get("words", 24))
        found.append((pieces(step), step._norm().item(), loss))
        assert step.first_bad(compare=True)[1] > STEPS, "what copies hold is the same"
    return found


@cache
def _by_one_rank(case: str) -> tuple[dict[str, Any], float, float]:
    (rank, norm, loss), = trained(Mesh({}), [json.loads(case)])  # fmt: skip
    return joined([rank]), norm, loss


def by_one_rank(case: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    return _by_one_rank(json.dumps({name: value for name, value in case.items() if name not in ("sequence", "shard")}))


def same(found: dict[str, Any], right: dict[str, Any], exactly: bool = False) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        bound = 0.0 if exactly else 1e-12 * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=bound, err_msg=name)


TIED = {"tied": True, "words": 23}
CASES = [
    {"optimizer": "adamw"}, {"optimizer": "adamw", "sequence": True}, {"optimizer": "adamw", **TIED, "sequence": True},
    {"optimizer": "lamb", **TIED}, {"optimizer": "lamb", "sequence": True},
    {"optimizer": "sgd", "sequence": True}, {"optimizer": "sgd", "keys": 2}, {"optimizer": "sgd", "keys": 1, "sequence": True},
]  # fmt: skip


@pytest.mark.parametrize("axes", CUTS, ids=str)
def test_cut_equals_whole(axes: dict[str, int]) -> None:
    shards = ("none", "optimizer", "weights") if "replicate" in axes else ("none",)
    cases = [case | {"shard": shard} for shard in shards for case in CASES if shard != "weights" or not case.get("tied")]
    cases += [] if "replicate" in axes else [CASES[1] | {"shard": shard} for shard in ("optimizer", "weights")]
    for case, *ranks in zip(cases, *on_ranks(axes, trained, cases)):
        right, norm, loss = by_one_rank(case)
        found = [[piece for piece in rank[0]] for rank in ranks]
        same(joined(found), right)
        means = [rank[2] for rank in ranks]
        assert all(abs(rank[1] - norm) < 1e-12 * norm for rank in ranks), case
        assert abs(sum(means) / len(means) - loss) < 1e-12, case
