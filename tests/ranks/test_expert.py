"""Expert parallelism, also with tensor parallelism: mixtures of experts compute, train and are checkpointed as on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.nn.deferred_init import deferred
from hpcai.nn.matmul import fused_linear
from hpcai.nn.moe import Experts, MoE, Router
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.parallel.expert import expert_parallel, tensor_parallel_experts
from hpcai.parallel.sharding import shard_spec
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks import training
from tests.ranks.launch import on_ranks
from tests.ranks.training import STEPS, Case

C, I, E = 8, 12, 6


class Feed(nn.Module):
    """A shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(C, 6), nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(*fused_linear(x, self.up_proj)))


def build_layer(kind: str) -> MoE:
    """Build a layer with routing of a published family, or with a capacity."""
    balance: dict[str, Any] = {"balance_loss": 0.3, "z_loss": 0.02}
    router, capacity, settings = Router(C, E, 2, **balance), None, dict[str, Any]()
    if kind == "deepseek":
        router = Router(C, E, 2, score="sigmoid", groups=2, scale=1.5, correction=True, bias_update_rate=0.05, **balance)
    elif kind == "gpt-oss":
        router = Router(C, E, 2, score="softmax_after_topk", bias=True, **balance)
        settings = {"bias": True, "activation": "clipped_swiglu"}
    elif kind == "capacity":
        capacity = 0.75
    layer = MoE(router, Experts(C, I, E, **settings), Feed(), nn.Linear(C, 1, bias=False), capacity)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


class Network(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(C, C), nn.ModuleList(build_layer(case["model"]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(model: Network, x: Tensor) -> dict[str, Any]:
    return {"loss": (model(x).square().sum(), torch.tensor(x.numel() // C))}


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):
        model = Network(case)
        for layer in model.layers:
            tensor_parallel_experts(layer, mesh["tensor"], None)
            expert_parallel(layer, mesh, case.get("expert", 1) if mesh["replicate"].size > 1 else 1)
    settings: dict[str, Any] = {"precision": "fp64", "weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9, "eps": 1e-5, "capture": "none"}
    settings |= {name: case[name] for name in ("optimizer", "shard") if name in case}
    return Step(model, loss, StepConfig(**settings, accumulate=case.get("accumulate", 1)), mesh)


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Tensor]:
    axis, draw = mesh["replicate"], torch.Generator().manual_seed(1)
    full = torch.randn(first + steps, 8, 5, C, generator=draw, dtype=torch.float64)[first:]
    return [x.chunk(axis.size)[axis.rank] for x in full]


def test_x() -> None:
    case = {"model": "mixtral", "expert": 2}
    training.check_sharded_equals_full({"replicate": 2}, [case], new_step, batches, ())
    training.check_sharded_equals_full({"replicate": 2}, [{"model": "deepseek", "expert": 2}], new_step, batches, ())
    training.check_sharded_equals_full({"tensor": 2}, [{"model": "gpt-oss", "expert": 2}], new_step, batches, ())
    training.check_sharded_equals_full({"tensor": 2}, [{"model": "capacity", "expert": 2}], new_step, batches, ())
    training.check_sharded_equals_full({"replicate": 4}, [{"model": "deepseek", "expert": 4}], new_step, batches, ())
    training.check_sharded_equals_full({"replicate": 4}, [{"model": "gpt-oss", "expert": 2}], new_step, batches, ())
    training.check_sharded_equals_full({"replicate": 2,"tensor":2}, [{"model": "gpt-oss", "expert": 2}], new_step, batches, ())
