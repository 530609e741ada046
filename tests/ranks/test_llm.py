"""Language models cut over ``tensor``, ``context`` and ``pipeline``: the same training as on one process, the same checkpoints."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, MeshError
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig, SamplingConfig, complete
from hpcai.models.llm.load import read_config
from hpcai.nn.deferred import deferred, make
from hpcai.parallel.rows import place_of
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, joined, pieces
from tests.stored import DATA
from tests.stored import told as stored

STEPS = 2
LLAMA = {"vocabulary": 25, "width": 16, "layers": 4, "heads": 4, "key_heads": 2, "inner": 24, "positions": 16}
GPT = {**LLAMA, "key_heads": 4, "rotary": None, "norm": "layer", "feed": "gelu", "bias": True, "tied": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "tied": {**LLAMA, "tied": True, "recompute": "layers"}, "gpt": {**GPT, "recompute": "selective"},
    "one key": {**LLAMA, "key_heads": 1, "recompute": "selective"},
}  # fmt: skip
MESHES = [
    {"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}, {"context": 2}, {"context": 4}, {"context": 2, "tensor": 2},
    {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "context": 2}, {"replicate": 2, "context": 2},
    {"replicate": 2}, {"replicate": 2, "pipeline": 2},
]  # fmt: skip
SHORT = [(axes, axes == {"tensor": 2}) for axes in MESHES]
LONG = [pytest.param(axes, True, marks=pytest.mark.claim) for axes in MESHES[1:]]


def new_step(mesh: Mesh, case: dict[str, Any], seed: int = 0) -> Step:
    with deferred(seed):  # each rank draws its part of the same numbers
        model = llm.parallelize(LLM(LLMConfig(**MODELS[case["model"]] | {"layers": case.get("layers", 2)})), mesh)
        if case.get("adapted"):
            targets = ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")
            llm.adapt(model, LoRAConfig(rank=3, targets=targets, frozen=case.get("frozen", "as they are")))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    words: dict[str, Any] = {"precision": "fp64", "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "average": 0.9}
    words |= {"eps": 1e-5, "capture": "none"}  # biases of keys have no gradient but rounding, which a smaller one would show
    micros = 4 // mesh["replicate"].size if mesh["pipeline"].size > 1 else 2
    words |= {"accumulate": micros, "shard": case.get("shard", "none")}
    return Step(model, llm.loss, StepConfig(**words), mesh, act=llm.stages(model, mesh))


def batch(mesh: Mesh, step: int, packed: bool) -> Batch:
    """What a copy gets of four rows; some tokens do not count, and rows of several documents are as they come."""
    generator, axis = torch.Generator().manual_seed(step), mesh["replicate"]
    tokens = torch.randint(0, LLAMA["vocabulary"], (4, 17), generator=generator)
    counted = torch.rand(4, 17, generator=generator) < 0.8
    documents = (torch.rand(4, 17, generator=generator) < 0.2).cumsum(1)
    found = [value.chunk(axis.size)[axis.rank] for value in (tokens, documents, counted)]
    return Batch(found[0], found[1] if packed else None, found[2])


def train(step: Step, case: dict[str, Any], first: int = 0, steps: int = STEPS) -> float:
    for i in range(first, first + steps):
        values = step(batch(step.mesh, i, case.get("packed", False)), 0.05 / (i + 1))
    step.check()
    total, count = values["loss"]
    return float(total) / float(count)


def trained(mesh: Mesh, cases: list[dict[str, Any]]) -> list[tuple[Pieces, float, float]]:
    found = []
    for case in cases:
        step = new_step(mesh, case)
        loss = train(step, case)
        found.append((pieces(step), step._norm().item(), loss))
        assert step.first_bad(compare=True)[1] > STEPS, "what copies hold is the same"
    return found


@cache
def _by_one_rank(case: str) -> tuple[dict[str, Any], float, float]:
    (rank, norm, loss), = trained(Mesh({}), [json.loads(case)])  # fmt: skip
    return joined([rank]), norm, loss


def by_one_rank(case: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    return _by_one_rank(json.dumps({name: value for name, value in case.items() if name != "shard"}))


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-11 * max(1.0, np.abs(value).max()), err_msg=name)


@pytest.mark.parametrize(("axes", "every"), [*SHORT, *LONG], ids=str)
def test_cut_equals_whole(axes: dict[str, int], every: bool) -> None:
    """Each model with rows of one document, of several and with adapters; where not ``every``, each of these once."""
    cases: list[dict[str, Any]] = [{"model": "tied"}, {"model": "gpt", "packed": True}, {"model": "llama", "adapted": True}]
    cases += [{"model": "one key"}] if "tensor" in axes else []
    if every:
        cases += [{"model": "llama"}, {"model": "gpt"}, {"model": "llama", "packed": True}, {"model": "gpt", "adapted": True}]
    if list(axes) == ["pipeline"]:
        cases = [case | {"layers": 4} for case in cases]  # several of a stage
    if "replicate" in axes:
        cases += [{"model": "llama", "packed": True, "shard": shard} for shard in ("optimizer", "weights")]
        cases += [{"model": "tied", "shard": "weights"}]
    for case, *ranks in zip(cases, *on_ranks(axes, trained, cases)):
        right, norm, loss = by_one_rank(case)
        same(joined([rank[0] for rank in ranks]), right)
        assert all(abs(rank[1] - norm) < 1e-11 * norm for rank in ranks), case
        if "replicate" not in axes:  # a copy tells of its own samples
            assert all(abs(rank[2] - loss) < 1e-11 for rank in ranks), case


def written(mesh: Mesh, folder: Path) -> Pieces:
    case = {"model": "tied", "layers": 4}
    step = new_step(mesh, case)
    train(step, case)
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return [piece for piece in pieces(step) if not piece[0].endswith("gradient")]


def read(mesh: Mesh, folder: Path) -> tuple[Pieces, Pieces]:
    case = {"model": "tied", "layers": 4}
    step = new_step(mesh, case, seed=7)
    Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
    now = [piece for piece in pieces(step) if not piece[0].endswith("gradient")]
    train(step, case, STEPS, 1)
    return now, pieces(step)


def test_a_checkpoint_goes_from_one_cut_to_others(tmp_path: Path) -> None:
    saved, gone_on = joined(on_ranks({"pipeline": 2, "tensor": 2}, written, tmp_path)), dict[str, Any]()
    for axes in ({}, {"tensor": 4}, {"context": 2, "tensor": 2}):
        ranks = on_ranks(axes, read, tmp_path)
        found = joined([rank[0] for rank in ranks])
        assert found.keys() == saved.keys() and all(np.array_equal(found[name], value) for name, value in saved.items())
        after = joined([rank[1] for rank in ranks])
        gone_on = gone_on or after
        same(after, gone_on)


def parts_of_a_folder(mesh: Mesh, case: str) -> Pieces:
    folder = DATA / "llm" / case / "hf"
    with deferred(0):
        model = llm.parallelize(LLM(read_config(folder)), mesh)
    make(llm.load_later(model, folder), "cpu")
    return pieces(Step(model, llm.loss, StepConfig(precision="fp32", capture="none"), mesh))


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}], ids=str)
def test_each_rank_reads_its_part_of_a_folder(axes: dict[str, int]) -> None:
    found = joined([[p for p in rank if p[0].endswith("weight")] for rank in on_ranks(axes, parts_of_a_folder, "llama31_tiny")])
    whole = LLM.load(DATA / "llm" / "llama31_tiny" / "hf")
    for name, parameter in whole.named_parameters():
        np.testing.assert_array_equal(found[f"{name} weight"], parameter.detach().numpy())


def told(mesh: Mesh, case: str, prompts: list[list[int]], most: int) -> list[list[int]]:
    folder = DATA / "llm" / case / "hf"
    with deferred(0):
        model = llm.parallelize(LLM(read_config(folder)), mesh)
    if case.startswith("llama"):
        make(llm.load_later(model, folder), "cpu")
    else:
        make(model, "cpu")
        for name, whole in LLM.load(folder).state_dict().items():
            part = model.state_dict()[name]
            for offsets, box in place_of(model.get_parameter(name)).boxes((0,) * part.ndim, tuple(part.shape)):
                part[box] = whole[tuple(slice(a, a + n) for a, n in zip(offsets, part[box].shape))]
    return complete(model, prompts, SamplingConfig(most=most))


@pytest.mark.parametrize("case", ["llama31_tiny", "gpt2_tiny"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cut_model_gives_the_same_text(case: str, ranks: int) -> None:
    known = stored(f"llm/{case}/generate")
    prompts = known["prompts"]
    for found in on_ranks({"tensor": ranks}, told, case, prompts, 12):
        assert found == [tokens[:12] for tokens in known["left_padded"]["tokens"]]


def refused(mesh: Mesh, changes: dict[str, Any]) -> str:
    try:
        llm.stages(llm.parallelize(LLM(LLMConfig(**LLAMA | changes)), mesh), mesh)
    except (MeshError, ConfigError) as problem:
        return str(problem)
    return ""


def test_heads_that_do_not_divide_are_refused() -> None:
    odd = {"heads": 3, "key_heads": 3, "head": 4}
    assert all("does not divide 3 heads" in told for told in on_ranks({"tensor": 2}, refused, odd))
    told = on_ranks({"tensor": 2}, refused, {"heads": 6, "key_heads": 3, "head": 4})
    assert all("neither divides 3 heads of keys nor is a multiple" in text for text in told)


def test_layers_that_do_not_fill_the_pipeline_are_refused() -> None:
    """The first stage and the last have words besides, those between them nothing but layers."""
    told = on_ranks({"pipeline": 4}, refused, {"layers": 1})
    assert all("pipeline: 1 blocks cannot be divided among 4 stages" in text and "choose fewer stages" in text for text in told)
    assert on_ranks({"pipeline": 4}, refused, {"layers": 2}) == [""] * 4
