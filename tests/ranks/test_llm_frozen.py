"""Adapters beside frozen weights of 8 or 16 bits: the same bits, and the same training, however a language model is cut."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LoRAConfig, SamplingConfig, complete
from hpcai.models.llm.load import read_config
from hpcai.nn.deferred import deferred, make
from hpcai.parallel.rows import place_of
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train import compiling
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress, opened
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, joined, pieces
from tests.ranks.test_llm import by_one_rank, new_step, same, train, trained
from tests.stored import DATA

HOME = DATA / "llm" / "llama31_tiny" / "hf"
MESHES: list[dict[str, int]] = [
    {"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2},
]  # fmt: skip
EIGHT = {"model": "llama", "adapted": True, "frozen": "8bit"}


def held(model: torch.nn.Module) -> Pieces:
    """What this rank has of weights that are not trained."""
    found: Pieces = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            place = place_of(parameter)
            for at, box in place.boxes((0,) * parameter.ndim, tuple(parameter.shape)):
                found.append((name, place.size, at, parameter.detach()[box].double().numpy().copy()))
    return found


def frozen(mesh: Mesh, case: dict[str, Any]) -> tuple[Pieces, list[str]]:
    model = new_step(mesh, case).model
    return held(model), sorted({str(p.dtype) for name, p in model.named_parameters() if name.endswith("_proj.weight")})


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_cut_equals_whole(axes: dict[str, int]) -> None:
    cases: list[dict[str, Any]] = [EIGHT]
    if axes == {"context": 2, "tensor": 2}:
        cases += [EIGHT | {"model": "tied"}]  # whose layers are computed again
    if axes == {"tensor": 4}:
        cases += [EIGHT | {"model": "one key"}]  # whose keys several ranks have
    if "replicate" in axes:
        cases += [EIGHT | {"shard": "optimizer"}, EIGHT | {"model": "gpt"}, EIGHT | {"frozen": "bf16"}]
    for case, *ranks in zip(cases, *on_ranks(axes, trained, cases)):
        right, norm, _ = by_one_rank(case)
        same(joined([rank[0] for rank in ranks]), right)
        assert all(abs(rank[1] - norm) < 1e-11 * norm for rank in ranks), case
    ranks = on_ranks(axes, frozen, EIGHT)
    found, right = joined([rank[0] for rank in ranks]), joined([frozen(Mesh({}), EIGHT)[0]])
    assert found.keys() == right.keys() and all(np.array_equal(found[name], value) for name, value in right.items())
    assert all(rank[1] == ["torch.int8"] for rank in ranks) and "model.layers.0.self_attn.o_proj.scale" in right


def from_folder(mesh: Mesh, seed: int = 0, shard: str = "none", frozen: Any = "8bit", recompute: str = "none", **more: Any) -> Step:
    torch.manual_seed(seed)
    with deferred(seed):
        model = llm.parallelize(LLM(read_config(HOME).model_copy(update={"recompute": recompute})), mesh)
    llm.adapt(llm.load_later(model, HOME), LoRAConfig(rank=2, frozen=frozen))
    return Step(model, llm.loss, StepConfig(lr=0.1, capture="none", shard=shard, **more), mesh)  # type: ignore[arg-type]


def rows(mesh: Mesh, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return Batch(torch.randint(0, 60, (2, 17), generator=generator).chunk(mesh["replicate"].size)[mesh["replicate"].rank])


def gone_on(mesh: Mesh, folder: Path, shard: str) -> tuple[Pieces, Pieces, list[str]]:
    """What a run has after three steps, and one that was started again from the checkpoint of two."""
    step, checkpoints = from_folder(mesh, 0, shard), Checkpoints(folder, CheckpointConfig(), mesh)
    for number in range(3):
        if number == 2:
            saved = checkpoints.save(step, Progress(step=2)).path
        step(rows(mesh, number))
    again = from_folder(mesh, 7, shard)  # whose adapters are others
    Checkpoints(folder, CheckpointConfig(), mesh).resume(again)
    again(rows(mesh, 2))
    names = [name for name in opened(saved).tensors if name.startswith("model/")]
    return pieces(step) + held(step.model), pieces(again) + held(again.model), names


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_run_goes_on_to_the_last_bit_from_the_same_file(shard: str, tmp_path: Path) -> None:
    for before, after, names in on_ranks({"replicate": 2, "tensor": 2}, gone_on, tmp_path, shard):
        assert len(before) == len(after) > 20
        for one, other in zip(before, after):
            assert one[:3] == other[:3] and np.array_equal(one[3], other[3]), one[0]
        assert names and all(".adapter." in name for name in names), "frozen weights are those of the file"


KINDS: dict[str, set[torch.dtype]] = {
    "as they are": {torch.float32}, "bf16": {torch.float32, torch.bfloat16}, "8bit": {torch.float32, torch.int8},
}  # fmt: skip


def changed(mesh: Mesh, folder: Path, before: str, after: str) -> tuple[Pieces, Pieces, Pieces, Pieces, set[torch.dtype]]:
    """What a run has after two steps, and what goes on from there; frozen weights of that, and as they are made at a start."""
    step = from_folder(mesh, frozen=before)
    for number in range(2):
        step(rows(mesh, number))
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=2))
    again, new = from_folder(mesh, 7, frozen=after), from_folder(mesh, frozen=after)
    Checkpoints(folder, CheckpointConfig(), mesh).resume(again)
    kinds, read = {parameter.dtype for parameter in again.model.parameters()}, pieces(again)
    again(rows(mesh, 2))
    again.check()
    return [piece for piece in pieces(step) if "gradient" not in piece[0]], read, held(again.model), held(new.model), kinds


@pytest.mark.parametrize(("before", "after"), [
    ("as they are", "8bit"), ("bf16", "8bit"), ("8bit", "as they are"), ("8bit", "bf16"),
])  # fmt: skip
def test_a_run_goes_on_with_frozen_weights_of_other_bits(before: str, after: str, tmp_path: Path) -> None:
    for saved, read, now, new, kinds in on_ranks({"tensor": 2}, changed, tmp_path, before, after):
        found = {name: value for name, *_, value in read}
        assert len(saved) > 10 and all(np.array_equal(found[name], value) for name, *_, value in saved)
        assert len(now) == len(new) and all(np.array_equal(one[3], other[3]) for one, other in zip(now, new))
        assert kinds == KINDS[after]


@pytest.mark.parametrize("frozen", KINDS)
def test_layers_that_are_computed_again_learn_the_same(frozen: str) -> None:
    found = []
    for recompute in ("none", "layers", "selective"):
        step = from_folder(Mesh({}), frozen=frozen, recompute=recompute)
        for number in range(2):
            step(rows(step.mesh, number))
        found.append(pieces(step))
    for other in found[1:]:
        assert len(other) == len(found[0]) > 10
        assert all(one[0] == again[0] and np.array_equal(one[3], again[3]) for one, again in zip(found[0], other))


COMPILED = [("layers", "blocks"), ("none", "blocks")]  # what is computed again, and what is compiled


@pytest.mark.parametrize(
    ("frozen", "ways"),
    [("8bit", COMPILED[:1]), *(pytest.param(kind, COMPILED, marks=pytest.mark.claim) for kind in ("8bit", "bf16"))],
)
def test_compiled_layers_learn_the_same(frozen: str, ways: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced forward and backward; the code that Inductor makes of it takes half a minute."""
    monkeypatch.setattr(compiling, "compile_model", partial(compiling.compile_model, backend="aot_eager"))
    found = []
    for recompute, compiled in (("none", "none"), *ways):
        torch._dynamo.reset()
        step = from_folder(Mesh({}), frozen=frozen, recompute=recompute, compile=compiled, precision="fp64")
        for number in range(2):
            step(rows(step.mesh, number))
        found.append(joined([pieces(step)]))
        assert compiled == "none" or "0 graph breaks" in step.news()[0]
    for other in found[1:]:
        same(other, found[0])


def drawn(mesh: Mesh, folder: Path, seed: int) -> tuple[Pieces, Pieces]:
    step = new_step(mesh, EIGHT, seed)
    checkpoints = Checkpoints(folder, CheckpointConfig(), mesh)
    if seed == 0:
        train(step, EIGHT)
        checkpoints.save(step, Progress(step=2))
    else:
        checkpoints.resume(step)
    return [piece for piece in pieces(step) if piece[0].endswith("weight")], held(step.model)


def test_frozen_weights_of_no_file_are_in_the_checkpoint(tmp_path: Path) -> None:
    saved = on_ranks({"tensor": 2}, drawn, tmp_path, 0)
    for axes in ({}, {"pipeline": 2, "tensor": 2}):
        found = on_ranks(axes, drawn, tmp_path, 7)
        for kind in (0, 1):
            one, other = (joined([rank[kind] for rank in ranks]) for ranks in (saved, found))
            assert one.keys() == other.keys() and all(np.array_equal(one[name], value) for name, value in other.items())


def texts(mesh: Mesh) -> list[list[int]]:
    with deferred(0):
        model = llm.parallelize(LLM(read_config(HOME)), mesh)
    llm.adapt(llm.load_later(model, HOME), LoRAConfig(rank=2, frozen="8bit"))
    make(model, "cpu", dtype=torch.float64)
    return complete(model, [[1, 2, 3], [4, 5, 6, 7, 8]], SamplingConfig(most=12))


@cache
def texts_of_one() -> list[list[int]]:
    return texts(Mesh({}))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cut_model_gives_the_same_text(ranks: int) -> None:
    assert on_ranks({"tensor": ranks}, texts) == [texts_of_one()] * ranks


def merged(mesh: Mesh) -> Pieces:
    step = new_step(mesh, EIGHT)
    train(step, EIGHT)
    model: Any = llm.merge(step.model)  # type: ignore[arg-type]
    kinds = {type(part).__name__ for part in model.modules()}
    assert not any(name.startswith("Frozen") for name in kinds) and ("CutInputs" in kinds) == (mesh["tensor"].size > 1)
    model.requires_grad_(False)
    return held(model)


def test_merged_parts_are_those_of_the_merged_whole() -> None:
    right = joined([merged(Mesh({}))])
    same(joined(on_ranks({"replicate": 2, "tensor": 2}, merged)), right)


def refused(mesh: Mesh) -> str:
    try:
        from_folder(mesh, shard="weights")
    except ConfigError as problem:
        return str(problem)
    return ""


def test_weights_cut_over_copies_are_refused() -> None:
    told = on_ranks({"replicate": 2}, refused)
    assert all("step.shard is weights, but model.layers.0.self_attn.q_proj holds weights" in text for text in told)
