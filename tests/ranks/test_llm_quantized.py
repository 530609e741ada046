"""Adapters with frozen weights of 8 or 16 bits: the same bits and the same training for any sharding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LoRAConfig
from hpcai.models.llm.families import read_config
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

FOLDER = DATA / "llm" / "llama31_tiny" / "hf"
MESHES: list[dict[str, int]] = [
    {"tensor": 4}, {"replicate": 2, "tensor": 2}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2},
]  # fmt: skip
INT8: Case = {"model": "llama", "adapted": True, "frozen": "8bit"}
DTYPES: dict[str, set[torch.dtype]] = {
    "as they are": {torch.float32}, "bf16": {torch.float32, torch.bfloat16}, "8bit": {torch.float32, torch.int8},
}  # fmt: skip


def frozen_shards(model: torch.nn.Module) -> Shards:
    """Return the local shards of frozen weights."""
    shards: Shards = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            spec = shard_spec(parameter)
            for at, box in spec.boxes((0,) * parameter.ndim, tuple(parameter.shape)):
                shards.append((name, spec.global_shape, at, parameter.detach()[box].double().numpy().copy()))
    return shards


def quantized_shards(mesh: Mesh) -> Shards:
    model = new_step(mesh, INT8).model
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("_proj.weight")} == {torch.int8}
    return frozen_shards(model)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases = [INT8]
    if axes == {"context": 2, "tensor": 2}:
        cases += [INT8 | {"model": "tied"}]  # with recomputed layers
    if axes == {"tensor": 4}:
        cases += [INT8 | {"model": "one key"}]  # with keys replicated over ranks
    if "replicate" in axes:
        cases += [INT8 | {"shard": "optimizer"}, INT8 | {"model": "gpt"}, INT8 | {"frozen": "bf16"}]
    check_sharded_equals_full(axes, cases)
    check_equal(gather_full(on_ranks(axes, quantized_shards)), gather_full([quantized_shards(Mesh({}))]), tolerance=0)


def load_step(mesh: Mesh, frozen: Any, seed: int = 0, **settings: Any) -> Step:
    """Return a step of the stored model, with adapters initialized by ``seed``."""
    torch.manual_seed(seed)
    with deferred(seed):
        model = llm.parallelize(LLM(read_config(FOLDER)), mesh)
    llm.adapt(llm.load_deferred(model, FOLDER), LoRAConfig(rank=2, base_dtype=frozen))
    return Step(model, llm.loss, StepConfig(lr=0.1, capture="none", **settings), mesh)


def make_batch(mesh: Mesh, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return Batch(torch.randint(0, 60, (2, 17), generator=generator).chunk(mesh["replicate"].size)[mesh["replicate"].rank])


def resume_and_continue(mesh: Mesh, folder: Path, before: str, after: str) -> tuple[list[Shards], list[Shards], list[str]]:
    """Train two steps, save, and resume another model. Return for each its state at the checkpoint and after a third step, and the
    names in the checkpoint."""
    step, resumed = load_step(mesh, before, shard="optimizer"), load_step(mesh, after, seed=7, shard="optimizer")
    for number in range(2):
        step(make_batch(mesh, number))
    saved = Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=2)).path
    Checkpoints(folder, CheckpointConfig(), mesh).resume(resumed)
    assert {parameter.dtype for parameter in resumed.model.parameters()} == DTYPES[after]
    states: list[list[Shards]] = []
    for run in (step, resumed):
        now = checkpointed_state(run)
        run(make_batch(mesh, 2))
        states.append([now, local_shards(run) + frozen_shards(run.model)])
    return states[0], states[1], [name for name in open_checkpoint(saved).tensors if name.startswith("model/")]


@pytest.mark.parametrize(("before", "after"), [("8bit", "8bit"), ("as they are", "8bit"), ("8bit", "bf16")])
def test_a_run_resumes_with_frozen_weights_in_any_format(before: str, after: str, tmp_path: Path) -> None:
    ranks = on_ranks({"replicate": 2, "tensor": 2}, resume_and_continue, tmp_path, before, after)
    saved, loaded = (gather_full([rank[run][0] for rank in ranks]) for run in (0, 1))
    assert len(saved) > 10
    check_equal(loaded, saved, tolerance=0)
    if before == after:
        check_equal(*(gather_full([rank[run][1] for rank in ranks]) for run in (0, 1)), tolerance=0)
    assert all(".adapter." in name for name in ranks[0][2]), "frozen weights are read from the file"


def train_or_resume(mesh: Mesh, folder: Path, seed: int) -> Shards:
    step, checkpoints = new_step(mesh, INT8, seed), Checkpoints(folder, CheckpointConfig(), mesh)
    if seed == 0:
        train(step, batches(mesh, INT8))
        checkpoints.save(step, Progress(step=2))
    else:
        checkpoints.resume(step)
    return [piece for piece in local_shards(step) if piece[0].endswith("weight")] + frozen_shards(step.model)


def test_frozen_weights_without_a_file_are_in_the_checkpoint(tmp_path: Path) -> None:
    saved = gather_full(on_ranks({"tensor": 2}, train_or_resume, tmp_path, 0))
    check_equal(gather_full(on_ranks({"pipeline": 2, "tensor": 2}, train_or_resume, tmp_path, 7)), saved, tolerance=0)


def merge_trained(mesh: Mesh) -> Shards:
    step = new_step(mesh, INT8)
    train(step, batches(mesh, INT8))
    model: Any = llm.merge(step.model)  # type: ignore[arg-type]
    kinds = {type(part).__name__ for part in model.modules()}
    assert not any(k.startswith(("Frozen", "Quant")) for k in kinds) and ("RowParallelLinear" in kinds) == (mesh["tensor"].size > 1)
    return frozen_shards(model.requires_grad_(False))


def test_merged_shards_are_those_of_the_merged_model() -> None:
    check_equal(gather_full(on_ranks({"replicate": 2, "tensor": 2}, merge_trained)), gather_full([merge_trained(Mesh({}))]))
