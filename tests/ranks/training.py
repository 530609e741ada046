"""A training on ranks beside the same one on one process, in float64, and checkpoints that go from ranks to other ranks.

A test file gives two functions: ``new_step(mesh, case, seed)`` builds a step, of which one process gets the same numbers, and
``batches(mesh, case, first, steps)`` has what this rank trains on in these steps. A case is a dict of what JSON has; its "shard"
and "how" say how it runs on ranks, and change nothing on one.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Mesh
from hpcai.settings import CheckpointConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress, read_tensors
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.pieces import Pieces, joined, pieces, same

Case = dict[str, Any]
NewStep = Callable[..., Step]
Batches = Callable[[Mesh, Case, int, int], Iterable[Any]]
STEPS = 2


class Trained(NamedTuple):
    """What a rank has after some steps, and what the last one told."""

    held: Pieces
    norm: float
    values: dict[str, float]


def held(step: Step) -> Pieces:
    """This rank's weights, gradients, moments, averages and buffers."""
    buffers = [(name, x) for name, x in step.model.named_buffers() if x.is_floating_point()]
    return pieces(step) + [(f"{name} buffer", tuple(x.shape), (0,) * x.ndim, x.double().numpy().copy()) for name, x in buffers]


def kept(step: Step) -> Pieces:
    """Of these what a checkpoint keeps."""
    return [piece for piece in held(step) if not piece[0].endswith("gradient")]


def train(step: Step, batches: Iterable[Any], first: int = 0) -> Trained:
    """Train on ``batches``, of which the first is that of step ``first``."""
    for number, batch in enumerate(batches, first):
        told = step(batch, 0.05 / (number + 1))
    step.check()
    values = {name: float(x[0]) / float(x[1]) if isinstance(x, tuple) else float(x) for name, x in told.items()}
    found = Trained(held(step), step._norm().item(), values)
    assert step.first_failures(compare=True)[1] > step.count, "what copies hold is the same"
    return found


def trained(mesh: Mesh, new_step: NewStep, batches: Batches, cases: Sequence[Case]) -> list[Trained]:
    return [train(new_step(mesh, case), batches(mesh, case, 0, STEPS)) for case in cases]


@cache
def _alone(new_step: NewStep, batches: Batches, case: str) -> Trained:
    return trained(Mesh({}), new_step, batches, [json.loads(case)])[0]


def cut_equals_whole(
    axes: dict[str, int], cases: Sequence[Case], new_step: NewStep, batches: Batches, values: Sequence[str] = ("loss",),
    close: float = 1e-11,
) -> None:  # fmt: skip
    """Each case ends on the ranks of ``axes`` as on one process; of ``values`` the mean over ranks is that of one."""
    for case, *ranks in zip(cases, *on_ranks(axes, trained, new_step, batches, cases), strict=True):
        one = _alone(new_step, batches, json.dumps({name: x for name, x in case.items() if name not in ("shard", "how")}))
        try:
            same(joined([rank.held for rank in ranks]), joined([one.held]), close)
            assert all(abs(rank.norm - one.norm) < close * one.norm for rank in ranks)
            for name in values:
                mean, right = sum(rank.values[name] for rank in ranks) / len(ranks), one.values[name]
                assert abs(mean - right) < close * max(1.0, abs(right)), name
        except AssertionError as problem:
            raise AssertionError(f"{axes} {case}: {problem}") from problem


def written(mesh: Mesh, new_step: NewStep, batches: Batches, folder: Path, case: Case) -> Pieces:
    step = new_step(mesh, case)
    train(step, batches(mesh, case, 0, STEPS))
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    return kept(step)


def read(mesh: Mesh, new_step: NewStep, batches: Batches, folder: Path, case: Case) -> tuple[Pieces, Pieces]:
    """What a checkpoint gave, and what followed on it."""
    step = new_step(mesh, case, seed=7)
    progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
    assert progress is not None and progress.step == step.count == step.optimizer.count.item() == STEPS
    drawn = all_gather_object(torch.rand(4).tolist(), mesh["tensor"])
    assert all(each == drawn[0] for each in drawn), "dropout of what is whole is the same on all ranks of a copy"
    return kept(step), train(step, batches(mesh, case, STEPS, 1), STEPS).held


def checkpoints_go_round(
    places: Sequence[tuple[dict[str, int], Case]], folder: Path, new_step: NewStep, batches: Batches
) -> None:
    """A checkpoint of each place has the same entries, and is read in the next one bit for bit, where training goes on alike."""
    folders = [folder / str(number) for number in range(len(places))]
    before = [joined(on_ranks(axes, written, new_step, batches, path, case)) for (axes, case), path in zip(places, folders)]
    after: dict[str, Any] = {}
    for number, (axes, case) in enumerate(places):
        ranks = on_ranks(axes, read, new_step, batches, folders[number - 1], case)
        same(joined([now for now, _ in ranks]), before[number - 1], close=0)
        followed = joined([later for _, later in ranks])
        after = after or followed
        same(followed, after)
    saved = [read_tensors(path / f"step-{STEPS:08d}") for path in folders]
    sizes = [{name: tuple(t.shape) for name, t in tensors.items() if not name.startswith("rng")} for tensors in saved]
    assert all(each == sizes[0] for each in sizes)
