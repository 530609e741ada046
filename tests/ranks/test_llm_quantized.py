"""Adapters with frozen weights of 8 or 16 bits: the same bits and the same training for any sharding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LoRAConfig
from hpcai.models.llm.load import read_config
from hpcai.nn.deferred_init import deferred
from hpcai.parallel.sharding import shard_spec
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, open_checkpoint
from hpcai.train.step import Step
from tests.ranks.language_model import batches, check_sharded_equals_full, new_step
from tests.ranks.launch import on_ranks
from tests.ranks.shards import Shards, check_equal, gather_full, local_shards
from tests.ranks.training import Case, checkpointed_state, train
from tests.reference_data import DATA

HOME = DATA / "llm" / "llama31_tiny" / "hf"
MESHES: list[dict[str, int]] = [
    {"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2},
]  # fmt: skip
EIGHT: Case = {"model": "llama", "adapted": True, "frozen": "8bit"}
KINDS: dict[str, set[torch.dtype]] = {
    "as they are": {torch.float32}, "bf16": {torch.float32, torch.bfloat16}, "8bit": {torch.float32, torch.int8},
}  # fmt: skip


def still(model: torch.nn.Module) -> Shards:
    """Return the local shards of frozen weights."""
    found: Shards = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            place = shard_spec(parameter)
            for at, box in place.boxes((0,) * parameter.ndim, tuple(parameter.shape)):
                found.append((name, place.global_shape, at, parameter.detach()[box].double().numpy().copy()))
    return found


def frozen(mesh: Mesh) -> Shards:
    model = new_step(mesh, EIGHT).model
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("_proj.weight")} == {torch.int8}
    return still(model)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases = [EIGHT]
    if axes == {"context": 2, "tensor": 2}:
        cases += [EIGHT | {"model": "tied"}]  # whose layers are computed again
    if axes == {"tensor": 4}:
        cases += [EIGHT | {"model": "one key"}]  # whose keys several ranks have
    if "replicate" in axes:
        cases += [EIGHT | {"shard": "optimizer"}, EIGHT | {"model": "gpt"}, EIGHT | {"frozen": "bf16"}]
    check_sharded_equals_full(axes, cases)
    check_equal(gather_full(on_ranks(axes, frozen)), gather_full([frozen(Mesh({}))]), tolerance=0)


def from_folder(mesh: Mesh, frozen: Any, seed: int = 0, **more: Any) -> Step:
    """Return a step of the stored model, with adapters initialized by ``seed``."""
    torch.manual_seed(seed)
    with deferred(seed):
        model = llm.parallelize(LLM(read_config(HOME)), mesh)
    llm.adapt(llm.load_deferred(model, HOME), LoRAConfig(rank=2, base_dtype=frozen))
    return Step(model, llm.loss, StepConfig(lr=0.1, capture="none", **more), mesh)


def rows(mesh: Mesh, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return Batch(torch.randint(0, 60, (2, 17), generator=generator).chunk(mesh["replicate"].size)[mesh["replicate"].rank])


def gone_on(mesh: Mesh, folder: Path, before: str, after: str) -> tuple[list[Shards], list[Shards], list[str]]:
    """A run of two steps and one that goes on from its checkpoint, each as it was saved and read and after a third step; names in
    the checkpoint."""
    step, again = from_folder(mesh, before, shard="optimizer"), from_folder(mesh, after, seed=7, shard="optimizer")
    for number in range(2):
        step(rows(mesh, number))
    saved = Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=2)).path
    Checkpoints(folder, CheckpointConfig(), mesh).resume(again)
    assert {parameter.dtype for parameter in again.model.parameters()} == KINDS[after]
    found: list[list[Shards]] = []
    for each in (step, again):
        now = checkpointed_state(each)
        each(rows(mesh, 2))
        found.append([now, local_shards(each) + still(each.model)])
    return found[0], found[1], [name for name in open_checkpoint(saved).tensors if name.startswith("model/")]


@pytest.mark.parametrize(("before", "after"), [("8bit", "8bit"), ("as they are", "8bit"), ("8bit", "bf16")])
def test_a_run_resumes_with_frozen_weights_in_any_format(before: str, after: str, tmp_path: Path) -> None:
    ranks = on_ranks({"replicate": 2, "tensor": 2}, gone_on, tmp_path, before, after)
    saved, read = (gather_full([rank[which][0] for rank in ranks]) for which in (0, 1))
    assert len(saved) > 10
    check_equal(read, saved, tolerance=0)
    if before == after:
        check_equal(*(gather_full([rank[which][1] for rank in ranks]) for which in (0, 1)), tolerance=0)
    assert all(".adapter." in name for name in ranks[0][2]), "frozen weights are those of the file"


def drawn(mesh: Mesh, folder: Path, seed: int) -> Shards:
    step, checkpoints = new_step(mesh, EIGHT, seed), Checkpoints(folder, CheckpointConfig(), mesh)
    if seed == 0:
        train(step, batches(mesh, EIGHT))
        checkpoints.save(step, Progress(step=2))
    else:
        checkpoints.resume(step)
    return [piece for piece in local_shards(step) if piece[0].endswith("weight")] + still(step.model)


def test_frozen_weights_of_no_file_are_in_the_checkpoint(tmp_path: Path) -> None:
    saved = gather_full(on_ranks({"tensor": 2}, drawn, tmp_path, 0))
    check_equal(gather_full(on_ranks({"pipeline": 2, "tensor": 2}, drawn, tmp_path, 7)), saved, tolerance=0)


def merged(mesh: Mesh) -> Shards:
    step = new_step(mesh, EIGHT)
    train(step, batches(mesh, EIGHT))
    model: Any = llm.merge(step.model)  # type: ignore[arg-type]
    kinds = {type(part).__name__ for part in model.modules()}
    assert not any(k.startswith(("Frozen", "Quant")) for k in kinds) and ("RowParallelLinear" in kinds) == (mesh["tensor"].size > 1)
    return still(model.requires_grad_(False))


def test_merged_shards_are_those_of_the_merged_model() -> None:
    check_equal(gather_full(on_ranks({"replicate": 2, "tensor": 2}, merged)), gather_full([merged(Mesh({}))]))
