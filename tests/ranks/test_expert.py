"""Expert parallelism, also with tensor parallelism: mixtures of experts train, and are checkpointed, as on one process."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.nn.deferred_init import deferred
from hpcai.nn.moe import Experts, MoE, Router
from hpcai.parallel import expert
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.expert import expert_parallel, tensor_parallel_experts
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.training import STEPS, Case, check_reshard, check_sharded_equals_full

C, E = 8, 6
LOSSES: dict[str, Any] = {"balance_loss": 0.3, "z_loss": 0.02}
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": LOSSES, "gpt-oss": {"score": "softmax_after_topk", "bias": True, **LOSSES}, "capacity": {"z_loss": 0.02},
    "deepseek": {"score": "sigmoid", "groups": 3, "top_groups": 2, "scale": 1.5, "correction": True, "bias_update_rate": 0.05},
    "collapsed": {"bias": True, **LOSSES},  # all tokens choose the same two experts, and other ranks have none
}  # fmt: skip


def build_layer(kind: str) -> MoE:
    experts = Experts(C, 16, E, bias=kind == "gpt-oss", activation="clipped_swiglu" if kind == "gpt-oss" else "swiglu")
    shared, gate = nn.Sequential(nn.Linear(C, C), nn.Tanh()), nn.Linear(C, 1, bias=False)
    layer = MoE(Router(C, E, 2, **ROUTERS[kind]), experts, shared, gate, 0.75 if kind == "capacity" else None)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if kind == "collapsed" and layer.gate.bias is not None:
        with torch.no_grad():
            layer.gate.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0, 0.0, 0.0]))
    return layer


class Network(nn.Module):
    """Two layers. With ``sequence`` each rank of the tensor axis has its share of the tokens between them."""

    def __init__(self, mesh: Mesh, kind: str, sequence: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(C, C), nn.ModuleList(build_layer(kind) for _ in range(2))
        self.axis, self.sequence = mesh["tensor"], sequence

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.chunk(self.axis.size, 1)[self.axis.rank] if self.sequence else x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model: Network, x: Tensor) -> dict[str, Any]:
    total = model(x).square().sum()
    total = all_reduce(total, model.axis, identity_backward=True) if model.sequence else total
    return {"loss": (total, torch.tensor(x.numel() // C))}


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    """Build a step of the model of a case, with its number of expert ranks. Those with a capacity have the micro-batches of one
    replica in each mesh, since it counts the pairs of a call; that of DeepSeek has other ones."""
    replicas, sequence = mesh["replicate"].size, 1 if case["model"] != "gpt-oss" else None
    mesh.sizes["expert"] = min(case.get("expert", 1), replicas)
    with deferred(seed):
        model = Network(mesh, case["model"], sequence is not None)
        for layer in model.layers:
            tensor_parallel_experts(layer, mesh["tensor"], sequence)
            expert_parallel(layer, mesh)
    if model.sequence:
        sum_gradients_over(model, mesh["tensor"])
    settings: dict[str, Any] = {"precision": "fp64", "weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9, "eps": 1e-5}
    settings |= {name: case[name] for name in ("optimizer", "shard") if name in case}
    micros = 4 // replicas if case["model"] in ("deepseek", "capacity") else 1
    return Step(model, loss, StepConfig(**settings, capture="none", accumulate=micros), mesh)


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Tensor]:
    axis, numbers = mesh["replicate"], range(first, first + steps)
    draws = [torch.randn(8, 4, C, generator=torch.Generator().manual_seed(number)).double() for number in numbers]
    return [x.chunk(axis.size)[axis.rank] for x in draws]


def cases(size: int, *kinds: str, **settings: Any) -> list[Case]:
    return [{"model": kind, "expert": size, **settings} for kind in kinds]


KINDS = ("mixtral", "deepseek", "gpt-oss", "collapsed")


@pytest.mark.parametrize(("axes", "cases"), [
    ({"replicate": 2}, cases(2, *KINDS) + cases(1, "mixtral", "deepseek")),
    ({"replicate": 4}, cases(4, *KINDS, "capacity") + cases(2, "deepseek", "capacity") + cases(2, "gpt-oss", shard="optimizer")
     + cases(2, "mixtral", optimizer="lamb") + cases(2, *KINDS, shard="weights") + cases(4, "gpt-oss", shard="weights")),
    ({"tensor": 2}, cases(1, *KINDS)),
    ({"replicate": 2, "tensor": 2}, cases(2, *KINDS) + cases(1, "gpt-oss")),
], ids=lambda value: str(value) if isinstance(value, dict) else "")  # fmt: skip
def test_sharded_equals_unsharded(axes: dict[str, int], cases: list[Case]) -> None:
    """The tensor axis shards tokens between layers, but not those of gpt-oss."""
    check_sharded_equals_full(axes, cases, new_step, batches, (), tolerance=1e-12)


def test_a_checkpoint_resumes_with_another_number_of_expert_ranks(tmp_path: Path) -> None:
    four = {"replicate": 4}
    layouts: list[Any] = [({}, {}), (four, {"expert": 4}), (four, {"expert": 2, "shard": "optimizer"}),
                          ({"replicate": 2, "tensor": 2}, {"expert": 2}), (four, {"expert": 2, "shard": "weights"})]  # fmt: skip
    check_reshard([(axes, {"model": "deepseek", **case}) for axes, case in layouts], tmp_path, new_step, batches)


def order_of_events(mesh: Mesh) -> list[str]:
    """Return the order in which a layer communicates and computes its shared expert, forward and backward."""
    layer, events = build_layer("mixtral"), list[str]()
    expert_parallel(layer, mesh)
    start, wait = expert._start_all_to_all, expert.Work.wait
    for name in ("shared_expert", "experts"):
        part, record = layer.get_submodule(name), partial(lambda name, *_: events.append(name), name)
        part.register_forward_hook(record)
        next(part.parameters()).register_hook(record)
    with (
        patch.object(expert, "_start_all_to_all", lambda *args: (start(*args), events.append("start"))[0]),
        patch.object(expert.Work, "wait", lambda self: (events.append("wait"), wait(self))[1]),
    ):
        layer(torch.randn(2, 3, C, requires_grad=True)).sum().backward()
    return events


def test_the_shared_expert_computes_while_tokens_travel() -> None:
    forward, backward = "start shared_expert wait experts start wait", "start wait experts start shared_expert wait"
    for events in on_ranks({"replicate": 2, "expert": 2}, order_of_events):
        assert " ".join(events) == f"{forward} {backward}"


@pytest.mark.parametrize(("size", "evaluate", "message"), [
    (3, 0, "which does not divide 8 replicas"), (8, 0, "has 6 experts"), (2, 1, "of mesh.evaluate"),
])  # fmt: skip
def test_a_size_that_does_not_fit_is_refused(size: int, evaluate: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        mesh = Mesh({"replicate": 8, "expert": size}, world=8)
        mesh.sizes["evaluate"] = evaluate
        expert_parallel(build_layer("mixtral"), mesh)
