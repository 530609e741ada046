"""A model as stages along the axis pipeline: the same training, evaluation and checkpoints as on one process, for each schedule."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DivergedError
from hpcai.parallel.pipeline import Pipeline
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints, Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.transformer import Transformer, batch, loss, mean_loss

STEPS = 2
WORDS: dict[str, Any] = {"precision": "fp64", "accumulate": 4, "clip": 0.5, "average": 0.9, "weight_decay": 0.1, "bucket_mb": 5e-3}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # the model, the arguments of Pipeline, settings of the step


class Layer(nn.Module):
    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), shared or nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + shift)


class Odd(nn.Module):
    """Has running statistics, a weight in two blocks, and weights and a buffer that are in no stage."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(24, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.blocks[2].linear = self.blocks[0].linear
        self.shift, self.scale = nn.Parameter(torch.randn(8), not fixed), nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, tokens: Tensor, *, shift: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, shift)
        return self.head(self.norm(x))


def odd_loss(model: Any, part: dict[str, Tensor]) -> dict[str, Any]:
    """Uses weights that are in no stage before and after the model's call."""
    out = model(part["tokens"][:, 0], shift=model.shift * model.offset) * model.scale
    return {"loss": (out - part["targets"][:, :3]).square().mean(), "greatest": out.abs().amax(), "pair": (out.sum(), float(len(out)))}


MODELS: dict[str, Any] = {"untied": Transformer, "tied": lambda: Transformer(tied=True), "odd": Odd}
MODELS |= {"five": lambda: Transformer(layers=5), "fixed": lambda: Odd(fixed=True)}


def new_step(mesh: Mesh, case: Case, seed: int = 0, function: Any = None) -> Step:
    name, how, words = case
    torch.manual_seed(seed)
    model = MODELS[name]()
    act = Pipeline(model, mesh, **how) if mesh["pipeline"].size > 1 else None
    return Step(model, function or (odd_loss if name in ("odd", "fixed") else mean_loss), StepConfig(**(WORDS | words)), mesh, act=act)


def own(mesh: Mesh, step: int, copies: int) -> dict[str, Tensor]:
    """What a copy of the model gets of a batch of 8 samples for each of ``copies``."""
    axis = mesh["replicate"]
    whole = batch(step, 8 * copies)
    return {name: value.chunk(axis.size)[axis.rank] for name, value in whole.items()}


def numbers(named: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy().copy() for name, value in named}


def followed(mesh: Mesh, case: Case, copies: int, seed: int | None = None) -> dict[str, Any]:
    """What this rank knows of two steps: what was told, and what it holds."""
    step = new_step(mesh, case, mesh["replicate"].rank if seed is None else seed)
    told, gradients, norms = [], {}, []
    for i in range(STEPS):
        values = step(own(mesh, i, copies), 0.05 / (i + 1))
        told.append({name: tuple(map(float, value)) if isinstance(value, tuple) else float(value) for name, value in values.items()})
        norms.append(step._norm().item())
        rows = [(row, row.gradient()) for row in step.sums.rows if row.cut.size == 1]
        gradients |= numbers((f"{p.name} {i}", p.whole(found)) for row, found in rows if found is not None for p in row.parts)
    step.check()
    live = numbers(step.model.state_dict().items())
    with step.average.applied():
        mean = numbers(step.model.state_dict().items())
    return {"told": told, "norms": norms, "held": [gradients, live, mean], "first": step.first_bad(compare=True).tolist()}


def each(mesh: Mesh, cases: list[Case], copies: int) -> list[dict[str, Any]]:
    return [followed(mesh, case, copies) for case in cases]


@cache
def by_one(name: str, words: tuple[Any, ...], copies: int) -> dict[str, Any]:
    """One process with the micro-batches of all copies."""
    settings = dict(words) | {"accumulate": dict(words).get("accumulate", 4) * copies}
    return followed(Mesh({}), (name, {}, settings), copies, seed=0)


def same(found: dict[str, Any], right: dict[str, Any], what: Any) -> None:
    assert found.keys() == right.keys(), what
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-13, err_msg=f"{what}: {name}")


def all_equal_one(axes: dict[str, int], cases: list[Case]) -> None:
    copies = axes.get("replicate", 1)
    found = on_ranks(axes, each, cases, copies)
    for number, case in enumerate(cases):
        right = by_one(case[0], tuple(case[2].items()), copies)
        ranks = [rank[number] for rank in found]
        for rank in ranks:
            np.testing.assert_allclose(rank["norms"], right["norms"], rtol=1e-12, err_msg=str(case))
            assert rank["first"] == [2**62, 2**62], case
            if copies == 1:  # else each copy tells of its own part of the batch
                for told, expected in zip(rank["told"], right["told"]):
                    same(told, expected, case)
        for kind, expected in enumerate(right["held"]):
            merged: dict[str, Any] = {}
            for rank in ranks:
                same({n: v for n, v in rank["held"][kind].items() if n in merged},
                     {n: merged[n] for n in rank["held"][kind] if n in merged}, case)  # fmt: skip
                merged |= rank["held"][kind]
            if kind or case[2].get("shard", "none") == "none":
                same(merged, expected, case)


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "zero-bubble"}, {"schedule": "gpipe", "per_rank": 2},
    {"schedule": "1f1b", "per_rank": 2}, {"schedule": "zero-bubble", "per_rank": 2}, {"schedule": "zero-bubble-v", "per_rank": 2},
]  # fmt: skip


def odd(how: dict[str, Any]) -> str:
    return "fixed" if "zero" in how["schedule"] else "odd"


def test_stages_on_two_ranks_train_as_one_process_does() -> None:
    plain: list[Case] = [(name, how, {}) for how in SCHEDULES for name in ("tied", "untied", odd(how))]
    sizes: list[Case] = [("tied", {"sizes": [3, 1]}, {}), ("untied", {"sizes": [0, 4]}, {}), ("five", {}, {})]
    words: list[Case] = [(name, {}, {"optimizer": "lamb"}) for name in ("tied", "odd")]
    few: list[Case] = [("tied", {"schedule": "gpipe"}, {"accumulate": 1}), ("untied", {}, {"accumulate": 8, "clip": None})]
    all_equal_one({"pipeline": 2}, plain + sizes + words + few)


def test_stages_on_four_ranks_train_as_one_process_does() -> None:
    cases: list[Case] = [("tied", how, {}) for how in SCHEDULES[:3]] + [(odd(how), how, {}) for how in SCHEDULES[:3]]
    cases += [("five", {"sizes": [1, 1, 2, 1]}, {"optimizer": "lamb"}), ("tied", {}, {"optimizer": "lamb"})]
    cases += [("tied", {"schedule": "gpipe"}, {"accumulate": 2})]
    all_equal_one({"pipeline": 4}, cases)


def test_copies_of_stages_train_as_one_process_does() -> None:
    cases: list[Case] = [
        (name, how, {"shard": shard, "optimizer": optimizer})
        for name in ("tied", "untied") for shard in ("none", "optimizer") for optimizer in ("adamw", "lamb")
        for how in SCHEDULES[1:3] if optimizer == "adamw" or how == SCHEDULES[1]
    ]  # fmt: skip
    all_equal_one({"replicate": 2, "pipeline": 2}, cases)
