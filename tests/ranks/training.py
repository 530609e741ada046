"""Compare sharded with unsharded training in float64, and resume checkpoints on other meshes.

A test file defines two functions: ``new_step(mesh, case, seed)`` builds a step with the same weights on each mesh, and
``batches(mesh, case, first, steps)`` returns the batches of this rank. A case is a JSON-serializable dict; its keys "shard" and
"how" select how it runs on several ranks, and have no effect on one.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Mesh
from hpcai.parallel.sharding import shard_spec
from hpcai.settings import CheckpointConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.shards import Shards, check_equal, gather_full, local_shards

Case = dict[str, Any]
NewStep = Callable[..., Step]
Batches = Callable[[Mesh, Case, int, int], Iterable[Any]]
STEPS = 2


class TrainResult(NamedTuple):
    """The state of a rank after some steps, and the metrics of the last step."""

    state: Shards
    norm: float
    values: dict[str, float]


def training_state(step: Step) -> Shards:
    """Return this rank's weights, gradients, moments, averages and buffers, and the parameters of modules that update
    themselves."""
    buffers = {name: x for name, x in step.model.named_buffers() if x.is_floating_point()}
    state = [(f"{name} buffer", tuple(x.shape), (0,) * x.ndim, x.double().numpy().copy()) for name, x in buffers.items()]
    own = {p for part in step.self_updating for p in part.parameters()}
    for name, p in ((name, p) for name, p in step.model.named_parameters() if p in own):
        boxes = shard_spec(p).boxes((0,) * p.ndim, p.shape)
        state += [(name, shard_spec(p).global_shape, at, p[piece].double().numpy().copy()) for at, piece in boxes]
    return local_shards(step) + state


def checkpointed_state(step: Step) -> Shards:
    """Return the part of the training state that a checkpoint stores."""
    return [piece for piece in training_state(step) if not piece[0].endswith("gradient")]


def train(step: Step, batches: Iterable[Any], first: int = 0) -> TrainResult:
    """Train on ``batches``, beginning with step ``first``."""
    for number, batch in enumerate(batches, first):
        metrics = step(batch, 0.05 / (number + 1))
    step.check()
    values = {name: float(x[0]) / float(x[1]) if isinstance(x, tuple) else float(x) for name, x in metrics.items()}
    result = TrainResult(training_state(step), step._norm().item(), values)
    assert step.first_failures(compare=True)[1] > step.count, "replicas are equal"
    return result


def train_cases(mesh: Mesh, new_step: NewStep, batches: Batches, cases: Sequence[Case]) -> list[TrainResult]:
    return [train(new_step(mesh, case), batches(mesh, case, 0, STEPS)) for case in cases]


@cache
def _train_unsharded(new_step: NewStep, batches: Batches, case: str) -> TrainResult:
    return train_cases(Mesh({}), new_step, batches, [json.loads(case)])[0]


def check_sharded_equals_full(
    axes: dict[str, int], cases: Sequence[Case], new_step: NewStep, batches: Batches, values: Sequence[str] = ("loss",),
    tolerance: float = 1e-11,
) -> None:  # fmt: skip
    """Assert for each case that ranks of mesh ``axes`` end with the state of one process, and that means of ``values`` agree."""
    for case, *ranks in zip(cases, *on_ranks(axes, train_cases, new_step, batches, cases), strict=True):
        unsharded = {name: value for name, value in case.items() if name not in ("shard", "pipeline")}
        full = _train_unsharded(new_step, batches, json.dumps(unsharded))
        try:
            check_equal(gather_full([rank.state for rank in ranks]), gather_full([full.state]), tolerance)
            assert all(abs(rank.norm - full.norm) < tolerance * full.norm for rank in ranks)
            for name in values:
                mean, expected = sum(rank.values[name] for rank in ranks) / len(ranks), full.values[name]
                assert abs(mean - expected) < tolerance * max(1.0, abs(expected)), name
        except AssertionError as problem:
            raise AssertionError(f"{axes} {case}: {problem}") from problem


def save_checkpoint(mesh: Mesh, new_step: NewStep, batches: Batches, folder: Path, case: Case) -> Shards:
    step = new_step(mesh, case)
    train(step, batches(mesh, case, 0, STEPS))
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return checkpointed_state(step)


def resume_and_train(mesh: Mesh, new_step: NewStep, batches: Batches, folder: Path, case: Case) -> tuple[Shards, Shards]:
    """Return the state read from a checkpoint, and the state after one more step."""
    step = new_step(mesh, case, seed=7)
    progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
    assert progress is not None and progress.step == step.count == step.optimizer.count.item() == STEPS
    draws = all_gather_object(torch.rand(4).tolist(), mesh["tensor"])
    assert all(each == draws[0] for each in draws), "dropout of replicated tensors is equal on all ranks of a replica"
    return checkpointed_state(step), train(step, batches(mesh, case, STEPS, 1), STEPS).state


def check_reshard(layouts: Sequence[tuple[dict[str, int], Case]], folder: Path, new_step: NewStep, batches: Batches) -> None:
    """Assert that checkpoints of all layouts have the same entries, and that each layout resumes that of the one before bitwise."""
    folders = [folder / str(number) for number in range(len(layouts))]
    before = [
        gather_full(on_ranks(axes, save_checkpoint, new_step, batches, path, case)) for (axes, case), path in zip(layouts, folders)
    ]
    after: dict[str, Any] = {}
    for number, (axes, case) in enumerate(layouts):
        ranks = on_ranks(axes, resume_and_train, new_step, batches, folders[number - 1], case)
        check_equal(gather_full([now for now, _ in ranks]), before[number - 1], tolerance=0)
        followed = gather_full([later for _, later in ranks])
        after = after or followed
        check_equal(followed, after)
    saved = [read_tensors(path / f"step-{STEPS:08d}") for path in folders]
    sizes = [{name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("rng")} for tensors in saved]
    assert all(each == sizes[0] for each in sizes)
