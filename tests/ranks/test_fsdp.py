"""Sharded optimizers and FSDP train and save as unsharded ones, with 1/G of the state, and send 2 (G-1)/G of the parameters."""

import os
import socket
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.dist.collectives import all_gather
from hpcai.dist.mesh import Axis, Mesh
from hpcai.parallel import fsdp
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.shards import check_equal, gather_full
from tests.ranks.training import Case, TrainResult, check_reshard, check_sharded_equals_full, train, train_cases

SHARDS = ("optimizer", "weights")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    """A network with a channels-last weight, repeated blocks, and sizes that do not divide by 2 or 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.flat = nn.Linear(5 * 16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(16, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.flat(torch.relu(self.conv(x)).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 6, 6, generator=generator).double(), torch.randn(8, 3, generator=generator).double()


def loss(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"loss": (model(part[0]) - part[1]).square().mean()}


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    torch.manual_seed(seed + mesh["replicate"].rank)  # replicas start equal, whatever their initialization
    model = Network()
    sum_gradients_over(model, mesh["depth"])  # as if each rank of the axis saw half of every sample
    settings = {"precision": "fp64", "lr": 0.05, "weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9, "bucket_mb": 2e-3} | case
    step = Step(model, loss, StepConfig(**settings), mesh)
    step._weight /= mesh["depth"].size
    return step


def batches(mesh: Mesh, case: Case, first: int, steps: int) -> list[Any]:
    axis = mesh["replicate"]
    dtype = torch.float64 if case.get("precision", "fp64") == "fp64" else torch.float32
    return [tuple(x.to(dtype).chunk(axis.size)[axis.rank] for x in batch(i)) for i in range(first, first + steps)]


OPTIMIZERS = ("adamw", "sgd", "lamb", "lars", "muon")
NORMED = ("adamw", "lamb", "muon")  # by element, norm and matrix
CASES: list[Case] = [{"optimizer": optimizer, "shard": shard} for optimizer in OPTIMIZERS for shard in SHARDS]
EXTRA_CASES: list[Case] = [
    {**settings, "shard": shard} for shard in SHARDS
    for settings in ({"accumulate": 2}, {"clip": None, "ema_decay": None})
]  # fmt: skip


@pytest.mark.parametrize(("axes", "cases"), [
    ({"replicate": 1}, CASES[:2]), ({"replicate": 2}, CASES[:4]), ({"replicate": 4}, CASES + EXTRA_CASES),
    ({"replicate": 2, "depth": 2}, [case for case in CASES if case["optimizer"] in NORMED] + EXTRA_CASES[-2:]),
], ids=lambda value: str(value) if isinstance(value, dict) else "")  # fmt: skip
def test_sharded_equals_unsharded(axes: dict[str, int], cases: list[Case]) -> None:
    check_sharded_equals_full(axes, cases, new_step, batches)


def train_hybrid(mesh: Mesh, shard: str) -> TrainResult:
    case = {"shard": shard, **({"shard_within": 2} if mesh.world > 1 else {})}
    return train(new_step(mesh, case), batches(mesh, {}, 0, 2))


@pytest.mark.parametrize("shard", SHARDS)
def test_hybrid_sharding_changes_nothing(shard: str) -> None:
    expected = gather_full([train_hybrid(Mesh({}), shard).state])
    check_equal(gather_full([rank.state for rank in on_ranks({"replicate": 4}, train_hybrid, shard)]), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_two_ranks_with_a_sharded_adam_equal_two_without_bit_for_bit(precision: str) -> None:
    settings = {"precision": precision, "clip": None, "moments": "bf16" if precision == "bf16-params" else "fp32"}
    ranks = on_ranks({"replicate": 2}, train_cases, new_step, batches, [settings, settings | {"shard": "optimizer"}])
    replicated, sharded = (gather_full([rank[case].state for rank in ranks]) for case in (0, 1))
    assert all(np.array_equal(sharded[name], value) for name, value in replicated.items() if not name.endswith("gradient"))


def state_size(mesh: Mesh, shard: str) -> tuple[int, int, int]:
    """Return the bytes of optimizer state and of weights on this rank, and the number of parameter elements."""
    step = new_step(mesh, {"shard": shard, "bucket_mb": 25.0})
    train(step, batches(mesh, {}, 0, 1))
    state = sum(t.nbytes for s in step.optimizer.states for t in (*s.moments.values(), s.average))
    local = sum(s.flat_param.weights.nbytes for s in step.optimizer.states)
    return state, local, sum(p.numel() for p in step.model.parameters())


@pytest.mark.parametrize("shard", SHARDS)
def test_each_rank_holds_its_shard_of_the_state(shard: str) -> None:
    for state, local, numel in on_ranks({"replicate": 4}, state_size, shard):
        assert state <= 1.2 * 3 * 8 * numel / 4, "two moments and an average, in float64"
        assert local <= 1.2 * 8 * numel / 4


def dtypes(mesh: Mesh) -> set[tuple[bool, torch.dtype]]:
    """Return pairs (is trained, dtype of the shard) of the parameters after a step."""
    model = Network()
    for parameter in (*model.conv.parameters(), *model.blocks[0].parameters(), model.blocks[1].linear.weight):
        parameter.requires_grad_(False)
    step = Step(model, loss, StepConfig(precision="bf16-params", shard="weights", lr=0.05), mesh)
    x, y = batch(0)
    step((x.bfloat16(), y.float()), 0.05)
    return {(p.requires_grad, p.dtype) for p in step.model.parameters()}


def test_sharded_frozen_weights_are_bfloat16() -> None:
    for pairs in on_ranks({"replicate": 2}, dtypes):
        assert pairs == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_checkpoint_loads_with_every_sharding(tmp_path: Path, optimizer: str) -> None:
    layouts: list[tuple[dict[str, int], Case]] = [
        ({"replicate": 1}, {}), ({"replicate": 2}, {"shard": "optimizer"}),
        ({"replicate": 4}, {"shard": "optimizer", "shard_within": 2, "bucket_mb": 1e-3}), ({"replicate": 2}, {"shard": "weights"}),
    ]  # fmt: skip
    check_reshard([(axes, case | {"optimizer": optimizer}) for axes, case in layouts], tmp_path, new_step, batches)


def bytes_sent() -> int:
    """Return the acknowledged bytes that this process sent on TCP sockets."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        count += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue
    return count


def send_steps(mesh: Mesh, shard: str, steps: int) -> tuple[int, int]:
    """Return the acknowledged bytes that this process sent in ``steps`` steps, and the bytes of the weights."""
    model = nn.Linear(1000, 1000)
    step = Step(model, lambda m, b: {"loss": m(b).square().mean()}, StepConfig(shard=shard), mesh)
    part = torch.randn(2, 1000)
    step(part)
    step.reducer.wait()
    torch_dist.barrier()
    before = bytes_sent()
    for _ in range(steps):
        step(part)
    step.reducer.wait()
    torch_dist.barrier()
    return bytes_sent() - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_no_more_than_2_g_minus_1_over_g_of_the_parameters(ranks: int) -> None:
    results = on_ranks({"replicate": ranks}, send_steps, "optimizer", 5)
    mean = sum(count for count, _ in results) / ranks / 5 / results[0][1]
    assert mean == pytest.approx(2 * (ranks - 1) / ranks, rel=0.03)


def record_events(mesh: Mesh) -> list[str]:
    """Return the events of two steps in order: reductions, gradients, starts and waits of all-gathers, layers."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    step = Step(model, lambda m, b: {"loss": m(b).sum()}, StepConfig(shard="optimizer", bucket_mb=1e-4), mesh)
    events: list[str] = []
    for bucket in step.reducer.buckets:
        launch, wait_gather = bucket.launch, bucket.wait_gather  # type: ignore[attr-defined]
        all_gather, name = bucket.all_gather, bucket.flat_views[-1].name  # type: ignore[attr-defined]
        bucket.launch = lambda f=launch: (events.append("reduce"), f())[1]  # type: ignore[method-assign]
        bucket.all_gather = lambda f=all_gather, n=name: (events.append(f"gather {n}"), f())[1]  # type: ignore[attr-defined]
        bucket.wait_gather = lambda b=bucket, f=wait_gather: (b.gather_work and events.append("wait"), f())[1]  # type: ignore[attr-defined]
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_: events.append("gradient"))
        layer.register_forward_hook(lambda *_, i=i: events.append(f"layer {i}"))
    for _ in range(2):
        step(torch.ones(2, 8, requires_grad=True))
        events.append("step is over")
    return events


def test_reductions_overlap_with_the_backward_pass_and_gathers_with_the_next_forward_pass() -> None:
    events = on_ranks({"replicate": 2}, record_events)[0]
    end = events.index("step is over")
    first = events[:end]
    assert first.index("reduce") < len(first) - 1 - first[::-1].index("gradient")
    gathers = [event.split()[1] for event in first if event.startswith("gather")]
    assert gathers == sorted(gathers) and len(gathers) >= 3, "in the order of the next forward pass"
    second = events[end + 1 :]
    assert "wait" not in first and second.count("wait") == 4
    assert second.index("layer 0") < len(second) - 1 - second[::-1].index("wait"), "later weights come after layer 0"


class SlowGather:
    """An all-gather that begins in ``wait``."""

    def __init__(self, full: torch.Tensor, shard: torch.Tensor, axis: Axis) -> None:
        self.wait = lambda: all_gather(full, shard.clone(), axis).wait()


class DirectAccess(nn.Module):
    """A network that reads weights of submodules without their forward pass, and weights that nn.LSTM references twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.others, self.memory = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.memory(x)[0] @ self.inner.weight + self.inner.bias
        for weight in self.others.parameters():
            x = x @ weight if weight.ndim > 1 else x + weight
        return x


def access_weights(mesh: Mesh, scheme: str) -> list[dict[str, Any]]:
    """Return the weights immediately after each step, each time by another kind of access."""
    torch.manual_seed(0)
    accessors: list[Any] = [nn.Module.state_dict, lambda m: dict(m.named_parameters()), lambda m: deepcopy(m).state_dict()]
    with patch.object(fsdp, "all_gather", SlowGather):
        settings: dict[str, Any] = {"precision": "fp64", "shard": scheme, "bucket_mb": 1e-4}
        step = Step(DirectAccess(), lambda m, x: {"loss": m(x).square().mean()}, StepConfig(**settings), mesh)
        results = []
        for number, access in enumerate(accessors):
            step(torch.ones(2, 4, 6).double() / (1 + number + mesh.rank), 0.1)
            results.append({name: tensor.detach().numpy().copy() for name, tensor in access(step.model).items()})
        return results


def test_access_to_a_weight_waits_for_its_all_gather() -> None:
    replicated = on_ranks({"replicate": 2}, access_weights, "none")[0]
    for results in on_ranks({"replicate": 2}, access_weights, "optimizer"):
        for early, expected in zip(results, replicated):
            check_equal(early, expected)
