"""Several GPUs: replicas, sharded optimizers and weights, and sharded volumes train as one GPU, eager and captured, over NCCL."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from hpcai import dist
from hpcai.data.collate import tree_map
from hpcai.dist.collectives import get_backend
from hpcai.dist.mesh import Mesh
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GRAPH, ON_GPU, disable_tf32
from tests.gpu.launch import needs_gpus, on_gpus
from tests.ranks.test_fsdp import Network, batch, loss
from tests.ranks.test_spatial_models import Cam, Cosmo, Unet

STEPS = 5  # two eager ones, the captured one, two replays
TrainResult = tuple[list[float], dict[str, Any]]


def to_full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().cpu()


def finish(step: Step, losses: list[Any]) -> TrainResult:
    """Return this rank's losses and the full weights."""
    step.check()
    step.reducer.wait()  # an all-gather of updated weights may be in progress
    return [float(x) for x in losses], {name: to_full(x) for name, x in step.model.state_dict().items()}


def train_replicas(mesh: Mesh, overrides: dict[str, Any]) -> TrainResult:
    """Train replicas on shards of the batch."""
    disable_tf32()
    assert mesh.world == 1 or get_backend(mesh.device, mesh.peers) == ("nccl" if ON_GPU else "gloo")
    torch.manual_seed(mesh["replicate"].rank)  # replicas start equal despite different seeds
    cfg = StepConfig(weight_decay=0.1, clip=0.5, ema_decay=0.9, **overrides)
    step = Step(Network(), loss, cfg, mesh, graph=GRAPH)
    axis, losses = mesh["replicate"], []
    dtype = torch.float64 if overrides["precision"] == "fp64" else torch.float32
    for number in range(STEPS):
        batch_shard = tuple(x.to(mesh.device, dtype).chunk(axis.size)[axis.rank] for x in batch(number))
        losses.append(step(batch_shard, 0.05 / (number + 1))["loss"])
    return finish(step, losses)


KINDS = {("fp64", "lamb"): 1e-9, ("fp32", "adamw"): 2e-4}


def train_all_kinds(mesh: Mesh, overrides: dict[str, Any]) -> list[TrainResult]:
    """Train both kinds in one job, since processes take seconds to start."""
    return [train_replicas(mesh, {"precision": precision, "optimizer": optimizer, **overrides}) for precision, optimizer in KINDS]


@cache
def train_on_one_gpu() -> list[TrainResult]:
    return train_all_kinds(dist.single_process(DEVICE), {})


def check_same(by_rank: Sequence[TrainResult], expected: TrainResult, loss_tolerance: float, tolerance: float) -> None:
    """Assert that losses are those of one GPU in the mean over ranks, and weights on each rank."""
    assert [sum(column) / len(by_rank) for column in zip(*(losses for losses, _ in by_rank))] == pytest.approx(
        expected[0], rel=loss_tolerance
    )
    for _, weights in by_rank:
        assert weights.keys() == expected[1].keys()
        for name, x in expected[1].items():
            torch.testing.assert_close(weights[name], x, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


SMALL = {"bucket_mb": 2e-3}  # several buckets
OVERRIDES: list[dict[str, Any]] = [
    {}, SMALL, {"shard": "optimizer", **SMALL}, {"shard": "weights"}, {"capture": "whole", **SMALL}, {"capture": "forward"},
    {"capture": "whole", "shard": "optimizer", **SMALL},
]  # fmt: skip
TWO, FOUR = needs_gpus(2), needs_gpus(4)


@pytest.mark.parametrize("world", [pytest.param(2, marks=TWO), pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("overrides", OVERRIDES, ids=str)
def test_copies_train_as_one_gpu(overrides: dict[str, Any], world: int) -> None:
    by_rank = on_gpus({"replicate": world}, train_all_kinds, overrides)
    for results, expected, tolerance in zip(zip(*by_rank), train_on_one_gpu(), KINDS.values()):
        check_same(results, expected, tolerance, tolerance)


def train_sharded(mesh: Mesh, kind: Any, overrides: dict[str, Any]) -> TrainResult:
    """Train a model with samples sharded over the mesh."""
    disable_tf32()
    torch.manual_seed(0)
    case, axis = kind(), mesh["replicate"]
    case.cfg = case.cfg.model_copy(update={"dropout": 0.0} if kind is Cosmo else {})
    cfg = StepConfig(optimizer="sgd", lr=0.05, precision="fp64", tf32=False, **overrides)
    step = Step(case.model(mesh), case.package.loss, cfg, mesh, graph=GRAPH)
    samples = slice(axis.rank * 2 // axis.size, (axis.rank + 1) * 2 // axis.size)
    parts = (tree_map(case.batch(number, mesh, samples), lambda x: x.to(mesh.device)) for number in range(STEPS))
    return finish(step, [step(part)["loss"] for part in parts])


def skip_graph_communication(capture: str) -> None:
    if capture != "none" and not ON_GPU:
        pytest.skip("the CPU replacement of a graph waits for each transfer before the next, so that two ranks would deadlock")


@cache
def train_unsharded(kind: Any) -> TrainResult:
    return train_sharded(dist.single_process(DEVICE), kind, {})


@pytest.mark.parametrize(
    "axes", [pytest.param({"depth": 2}, marks=TWO), pytest.param({"replicate": 2, "depth": 2}, marks=FOUR)], ids=str
)
@pytest.mark.parametrize("capture", ["none", "whole"])
@pytest.mark.parametrize("kind", [Cosmo, Unet])
def test_cut_volumes_train_as_whole_ones(kind: Any, capture: str, axes: dict[str, int]) -> None:
    skip_graph_communication(capture)
    check_same(on_gpus(axes, train_sharded, kind, {"capture": capture}), train_unsharded(kind), 1e-7, 1e-7)


@TWO
@pytest.mark.parametrize("axes", [{"height": 2}, {"replicate": 2}], ids=str)
@pytest.mark.parametrize("capture", ["none", "whole"])
def test_batch_norms_over_several_gpus_are_those_of_one(axes: dict[str, int], capture: str) -> None:
    skip_graph_communication(capture)
    check_same(on_gpus(axes, train_sharded, Cam, {"capture": capture}), train_unsharded(Cam), 1e-6, 1e-5)
