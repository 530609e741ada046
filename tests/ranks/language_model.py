"""A small language model in training, whole and cut, for tests of the forms that cut it.

A case names the model and what differs from the usual: layers, packed (several documents in a row), adapted (LoRA), frozen,
optimizer, shard.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcai.dist.collect import gather_objects
from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig
from hpcai.nn.deferred import deferred
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, Trained, equal, joined, pieces, same, train

STEPS = 2
LLAMA = {"vocabulary": 25, "width": 16, "layers": 2, "heads": 4, "key_heads": 2, "inner": 24, "positions": 16}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "tied": {**LLAMA, "tied": True, "recompute": "layers"}, "gpt": {**GPT, "recompute": "selective"},
    "one key": {**LLAMA, "key_heads": 1, "recompute": "selective"},
}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")
Case = dict[str, Any]


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):  # each rank draws its part of the same numbers
        sizes = MODELS[case["model"]] | {name: case[name] for name in ("layers",) if name in case}
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        if case.get("adapted"):
            llm.adapt(model, LoRAConfig(rank=3, targets=TARGETS, frozen=case.get("frozen", "as they are")))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    words: dict[str, Any] = {"precision": "fp64", "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "average": 0.9}
    words |= {"eps": 1e-5, "capture": "none"}  # biases of keys have no gradient but rounding, which a smaller one would show
    words |= {name: case[name] for name in ("optimizer", "shard") if name in case}
    micros = 4 // mesh["replicate"].size if mesh["pipeline"].size > 1 else 2
    return Step(model, llm.loss, StepConfig(**words, accumulate=micros), mesh, act=llm.stages(model, mesh))


def batch(mesh: Mesh, step: int, packed: bool) -> Batch:
    """What a copy gets of four rows; some tokens do not count, and rows of several documents are as they come."""
    generator, axis = torch.Generator().manual_seed(step), mesh["replicate"]
    tokens = torch.randint(0, LLAMA["vocabulary"], (4, 17), generator=generator)
    counted = torch.rand(4, 17, generator=generator) < 0.8
    documents = (torch.rand(4, 17, generator=generator) < 0.2).cumsum(1)
    found = [value.chunk(axis.size)[axis.rank] for value in (tokens, documents, counted)]
    return Batch(found[0], found[1] if packed else None, found[2])


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Batch]:
    return [batch(mesh, step, case.get("packed", False)) for step in range(first, first + steps)]


def trained(mesh: Mesh, cases: list[Case]) -> list[Trained]:
    return [train(new_step(mesh, case), batches(mesh, case)) for case in cases]


@cache
def _by_one_rank(case: str) -> Trained:
    return trained(Mesh({}), [json.loads(case)])[0]


def cut_equals_whole(axes: dict[str, int], cases: list[Case]) -> None:
    """Each case trains on the ranks of ``axes`` as on one process, in float64."""
    for case, *ranks in zip(cases, *on_ranks(axes, trained, cases)):
        one = _by_one_rank(json.dumps({name: value for name, value in case.items() if name != "shard"}))
        equal(ranks, one, (axes, case), means="replicate" not in axes)  # a copy tells of its own samples


def sharded(case: Case, *ways: str) -> list[Case]:
    return [case | {"shard": way} for way in ways]


def kept(step: Step) -> Pieces:
    return [piece for piece in pieces(step) if not piece[0].endswith("gradient")]


def written(mesh: Mesh, folder: Path, case: Case) -> Pieces:
    step = new_step(mesh, case)
    train(step, batches(mesh, case))
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return kept(step)


def read(mesh: Mesh, folder: Path, case: Case) -> tuple[Pieces, Pieces]:
    """What a checkpoint gave, and what followed on it."""
    step = new_step(mesh, case, seed=7)
    progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
    assert progress is not None and progress.step == step.count == step.optimizer.count.item() == STEPS
    drawn = gather_objects(torch.rand(4).tolist(), mesh["tensor"])
    assert all(each == drawn[0] for each in drawn), "dropout of what is whole is the same on all ranks of a copy"
    return kept(step), train(step, batches(mesh, case, STEPS, 1), STEPS).pieces


def checkpoints_go_round(places: list[tuple[dict[str, int], Case]], folder: Path) -> None:
    """A checkpoint of each place has the same entries, and is read in the next place bit for bit, where training goes on alike."""
    folders = [folder / str(number) for number in range(len(places))]
    before = [joined(on_ranks(axes, written, folder, case)) for (axes, case), folder in zip(places, folders)]
    after: dict[str, Any] = {}
    for number, (axes, case) in enumerate(places):
        ranks = on_ranks(axes, read, folders[number - 1], case)
        same(joined([now for now, _ in ranks]), before[number - 1], close=0)
        followed = joined([later for _, later in ranks])
        after = after or followed
        same(followed, after)
    saved = [read_tensors(folder / f"step-{STEPS:08d}") for folder in folders]
    sizes = [{name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("rng")} for tensors in saved]
    assert all(each == sizes[0] for each in sizes)
