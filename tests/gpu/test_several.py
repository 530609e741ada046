"""Several GPUs: copies, divided optimizers and weights, and cut volumes train as one GPU does, captured as eager, over NCCL."""

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
from tests.cpu_graph import CPUGraph
from tests.gpu.gpus import needs, on_gpus
from tests.gpu.machine import DEVICE, ON_GPU, precisely
from tests.ranks.test_fsdp import Network, batch, loss
from tests.ranks.test_spatial_models import Cam, Cosmo, Unet

STEPS = 5  # two as they are, one that is recorded, two more
Trained = tuple[list[float], dict[str, Any]]


def new_step(mesh: Mesh, model: Any, loss: Any, words: dict[str, Any]) -> Step:
    """One that is captured by CUDA's graphs, and on a CPU by their double."""
    return Step(model, loss, StepConfig(**words), mesh, graph=None if ON_GPU else CPUGraph)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().cpu()


def copies(mesh: Mesh, words: dict[str, Any]) -> Trained:
    """Losses of this rank, and weights after some steps, of copies that each have their part of the batch."""
    precisely()
    assert mesh.world == 1 or get_backend(mesh.device, mesh.peers) == ("nccl" if ON_GPU else "gloo")
    torch.manual_seed(mesh["replicate"].rank)  # the copies start equal, whatever they were
    step = new_step(mesh, Network(), loss, {"weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9} | words)
    axis, losses = mesh["replicate"], []
    kind = torch.float64 if words["precision"] == "fp64" else torch.float32
    for number in range(STEPS):
        part = tuple(x.to(mesh.device, kind).chunk(axis.size)[axis.rank] for x in batch(number))
        losses.append(step(part, 0.05 / (number + 1))["loss"])
    step.check()
    step.reducer.wait()  # weights that others have updated may be on their way
    return [float(x) for x in losses], {name: whole(x) for name, x in step.model.state_dict().items()}


KINDS = {("fp64", "lamb"): 1e-9, ("fp32", "adamw"): 2e-4}


def kinds(mesh: Mesh, words: dict[str, Any]) -> list[Trained]:
    """Of both kinds in one job: processes take seconds to start."""
    return [copies(mesh, {"precision": precision, "optimizer": optimizer, **words}) for precision, optimizer in KINDS]


@cache
def by_one_gpu() -> list[Trained]:
    return kinds(dist.single_process(DEVICE), {})


def same(found: dict[str, Any], right: dict[str, Any], small: float) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=small, atol=small, msg=lambda text, name=name: f"{name}: {text}")


SMALL = {"bucket_mb": 2e-3}  # several buckets
WAYS: list[dict[str, Any]] = [
    {}, SMALL, {"shard": "optimizer", **SMALL}, {"shard": "weights"}, {"capture": "whole", **SMALL}, {"capture": "forward"},
    {"capture": "whole", "shard": "optimizer", **SMALL},
]  # fmt: skip
TWO, FOUR = needs(2), needs(4)


@pytest.mark.parametrize("world", [pytest.param(2, marks=TWO), pytest.param(4, marks=FOUR)])
@pytest.mark.parametrize("words", WAYS, ids=str)
def test_copies_train_as_one_gpu(words: dict[str, Any], world: int) -> None:
    by_rank = on_gpus({"replicate": world}, kinds, words)
    for every, (losses, weights), small in zip(zip(*by_rank), by_one_gpu(), KINDS.values()):
        assert [sum(column) / world for column in zip(*(found[0] for found in every))] == pytest.approx(losses, rel=small)
        for _, found in every:
            same(found, weights, small)


def cut(mesh: Mesh, kind: Any, words: dict[str, Any]) -> Trained:
    """Losses and weights of a model whose samples are cut over the mesh."""
    precisely()
    torch.manual_seed(0)
    case, axis = kind(), mesh["replicate"]
    case.cfg = case.cfg.model_copy(update={"dropout": 0.0} if kind is Cosmo else {})
    words = {"optimizer": "sgd", "lr": 0.05, "precision": "fp64", "tf32": False} | words
    step, losses = new_step(mesh, case.model(mesh), case.package.loss, words), []
    mine = slice(axis.rank * 2 // axis.size, (axis.rank + 1) * 2 // axis.size)
    for number in range(STEPS):
        losses.append(step(tree_map(case.batch(number, mesh, mine), lambda x: x.to(mesh.device)))["loss"])
    step.check()
    step.reducer.wait()  # weights that others have updated may be on their way
    return [float(x) for x in losses], {name: whole(x) for name, x in step.model.state_dict().items()}


def graphs_send(capture: str) -> None:
    if capture != "none" and not ON_GPU:
        pytest.skip("the double of a graph waits for each message before the next, so that two ranks would wait for one another")


@cache
def uncut(kind: Any) -> Trained:
    return cut(dist.single_process(DEVICE), kind, {})


@pytest.mark.parametrize(
    "axes", [pytest.param({"depth": 2}, marks=TWO), pytest.param({"replicate": 2, "depth": 2}, marks=FOUR)], ids=str
)
@pytest.mark.parametrize("capture", ["none", "whole"])
@pytest.mark.parametrize("kind", [Cosmo, Unet])
def test_cut_volumes_train_as_whole_ones(kind: Any, capture: str, axes: dict[str, int]) -> None:
    graphs_send(capture)
    every, (losses, weights) = on_gpus(axes, cut, kind, {"capture": capture}), uncut(kind)
    each = [found[0] for found in every]
    assert [sum(column) / len(each) for column in zip(*each)] == pytest.approx(losses, rel=1e-7)
    for _, found in every:
        same(found, weights, 1e-7)


@TWO
@pytest.mark.parametrize("axes", [{"height": 2}, {"replicate": 2}], ids=str)
@pytest.mark.parametrize("capture", ["none", "whole"])
def test_batch_norms_over_several_gpus_are_those_of_one(axes: dict[str, int], capture: str) -> None:
    graphs_send(capture)
    every, (losses, weights) = on_gpus(axes, cut, Cam, {"capture": capture}), uncut(Cam)
    assert [sum(column) / 2 for column in zip(*(found[0] for found in every))] == pytest.approx(losses, rel=1e-6)
    for _, found in every:
        same(found, weights, 1e-5)
