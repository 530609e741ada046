"""The optimizer, or the weights too, divided among the copies of a model: the same training as with none divided, the same
checkpoints, 1/G of the state, 2 (G-1)/G of the parameters on the wire."""

import os
import socket
import struct
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai.dist.collect import gather_shares
from hpcai.dist.mesh import Axis, Mesh
from hpcai.errors import MeshError
from hpcai.parallel import shard
from hpcai.parallel.batchnorm import group_batch_norm
from hpcai.parallel.replicate import sum_over
from hpcai.parallel.rows import Part, Place, Share
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.saved import Progress, opened
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

MESHES = [{"replicate": 1}, {"replicate": 2}, {"replicate": 4}, {"replicate": 2, "depth": 2}]
SCHEMES = [{"shard": "optimizer"}, {"shard": "weights"}]
STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    """Has a channels-last weight, repeated blocks, and sizes that do not divide by 2 or 4."""

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


def new_step(mesh: Mesh, seed: int = 0, **words: Any) -> Step:
    torch.manual_seed(seed)
    model = Network()
    sum_over(model, mesh["depth"])  # as if each rank of the axis saw half of every sample: halves add up to the whole
    words = {"precision": "fp64", "lr": 0.05, "weight_decay": 0.1, "clip": 0.5, "average": 0.9} | words
    step = Step(model, loss, StepConfig(**words), mesh)
    step._share /= mesh["depth"].size
    return step


def train(step: Step, first: int = 0, steps: int = STEPS) -> None:
    axis = step.mesh["replicate"]
    for i in range(first, first + steps):
        x, y = batch(i)
        dtype = next(step.model.parameters()).dtype
        step((x.to(dtype).chunk(axis.size)[axis.rank], y.to(dtype).chunk(axis.size)[axis.rank]), 0.05 / (i + 1))
    step.check()


def whole(tensor: Any) -> Any:
    """The whole tensor as an array: a tensor would travel between processes as a file that ends with its process."""
    full = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    return full.double().numpy().copy()


def weights(step: Step, average: bool = False) -> dict[str, torch.Tensor]:
    with step.average.applied():
        mean = {name: whole(t) for name, t in step.model.state_dict().items()}
    return mean if average else {name: whole(t) for name, t in step.model.state_dict().items()}


def trained(mesh: Mesh, words: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    step = new_step(mesh, seed=mesh["replicate"].rank, **words)  # the copies start equal, whatever they were
    train(step)
    return weights(step), weights(step, average=True), list(step.model.state_dict())


@cache
def by_one_rank(**words: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    return trained(Mesh({}), words)


def same(found: dict[str, Any], right: dict[str, Any]) -> None:
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "lars"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_cut_equals_whole(axes: dict[str, int], scheme: dict[str, Any], optimizer: str) -> None:
    words = {"optimizer": optimizer, "bucket_mb": 2e-3}
    live, mean, keys = by_one_rank(**words)
    for found in on_ranks(axes, trained, words | scheme):
        assert found[2] == keys
        same(found[0], live)
        same(found[1], mean)


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 2, "depth": 2}], ids=str)
@pytest.mark.parametrize("scheme", [{}, *SCHEMES], ids=str)
@pytest.mark.parametrize("kind", [{"average_half_life": 12.0, "average_ramp": 2.0}, {"average_power": 0.1}], ids=str)
def test_an_average_that_changes_with_the_step_is_that_of_one_rank(
    axes: dict[str, int], scheme: dict[str, Any], kind: dict[str, Any]
) -> None:
    words = {"average": None, "bucket_mb": 2e-3, **kind}
    live, mean, _ = by_one_rank(**words)
    assert any(not np.allclose(live[name], mean[name], atol=1e-4) for name in live)
    for found in on_ranks(axes, trained, words | scheme):
        same(found[0], live)
        same(found[1], mean)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("words", [{"accumulate": 2}, {"clip": None, "average": None}, {"shard_within": 2}], ids=str)
def test_groups_within_nodes_micro_batches_and_no_clipping_change_nothing(scheme: dict[str, Any], words: dict[str, Any]) -> None:
    live, mean, _ = by_one_rank(**{name: value for name, value in words.items() if name in ("clip", "average")})
    for found in on_ranks({"replicate": 4}, trained, words | scheme):
        same(found[0], live)
        same(found[1], mean)


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_two_ranks_with_a_divided_adam_are_two_ranks_without_bit_for_bit(precision: str) -> None:
    words = {"precision": precision, "clip": None, "moments": "bf16" if precision == "bf16-params" else "fp32"}
    plain = on_ranks({"replicate": 2}, trained, words)
    divided = on_ranks({"replicate": 2}, trained, words | {"shard": "optimizer"})
    for (a, b, _), (c, d, _) in zip(plain, divided):
        assert all(np.array_equal(a[name], c[name]) and np.array_equal(b[name], d[name]) for name in a)


def state_size(mesh: Mesh, words: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of optimizer state and of weights that this rank holds, and the count of its parameters' numbers."""
    step = new_step(mesh, **words)
    train(step, steps=1)
    state = sum(t.nbytes for s in step.optimizer.states for t in (*s.moments.values(), s.average))
    local = sum(s.row.weights.nbytes for s in step.optimizer.states)
    return state, local, sum(p.numel() for p in step.model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_rank_holds_its_part_of_the_state(scheme: dict[str, Any]) -> None:
    for state, local, numel in on_ranks({"replicate": 4}, state_size, scheme):
        assert state <= 1.2 * 3 * 8 * numel / 4, "two moments and an average, in float64"
        assert local <= 1.2 * 8 * numel / 4


def dtypes(mesh: Mesh) -> set[tuple[bool, torch.dtype]]:
    """Whether a parameter is trained, and in which type its share is, after a step."""
    model = Network()
    for parameter in (*model.conv.parameters(), *model.blocks[0].parameters(), model.blocks[1].linear.weight):
        parameter.requires_grad_(False)
    step = Step(model, loss, StepConfig(precision="bf16-params", shard="weights", lr=0.05), mesh)
    x, y = batch(0)
    step((x.bfloat16(), y.float()), 0.05)
    return {(p.requires_grad, p.dtype) for p in step.model.parameters()}


def test_frozen_weights_that_are_divided_are_narrow() -> None:
    for found in on_ranks({"replicate": 2}, dtypes):
        assert found == {(True, torch.float32), (False, torch.bfloat16)}


def written(mesh: Mesh, folder: Path, words: dict[str, Any]) -> tuple[dict[str, Any], float]:
    step = new_step(mesh, **words)
    train(step)
    Checkpoints(folder, CheckpointConfig(), mesh).save(step, Progress(step=STEPS))
    train(step, STEPS, 1)
    return weights(step), step.optimizer.count.item()


def read(mesh: Mesh, folders: list[Path], words: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """What follows on the checkpoint of each folder."""
    found = []
    for folder in folders:
        step = new_step(mesh, seed=7, **words)
        progress = Checkpoints(folder, CheckpointConfig(), mesh).resume(step)
        assert progress is not None and progress.step == step.count == STEPS
        train(step, STEPS, 1)
        found.append((weights(step), step.optimizer.count.item()))
    return found


PLACES = [
    ({"replicate": 1}, {}),
    ({"replicate": 2}, {"shard": "optimizer"}),
    ({"replicate": 4}, {"shard": "optimizer", "shard_within": 2, "bucket_mb": 1e-3}),
    ({"replicate": 2}, {"shard": "weights"}),
]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_checkpoint_has_the_same_entries_and_goes_from_every_division_to_every_other(tmp_path: Path, optimizer: str) -> None:
    places = [(axes, words | {"optimizer": optimizer}) for axes, words in PLACES]
    folders = [tmp_path / str(number) for number in range(len(places))]
    (right, count), *_ = [on_ranks(axes, written, folder, words)[0] for (axes, words), folder in zip(places, folders)]
    for axes, words in places:
        for found, counted in (each for rank in on_ranks(axes, read, folders, words) for each in rank):
            assert counted == count
            same(found, right)
    every = [opened(folder / f"step-{STEPS:08d}") for folder in folders]
    entries = [{name: (parts[0].dtype, held.sizes[name]) for name, parts in held.tensors.items()} for held in every]
    assert all(each == entries[0] for each in entries)


def bytes_sent() -> int:
    """Bytes that this process's TCP sockets have sent and had acknowledged."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        count += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue
    return count


def sent(mesh: Mesh, shard: str, steps: int) -> tuple[int, int]:
    """Bytes that this process's sockets have sent and had acknowledged during ``steps`` steps, and bytes of the weights."""
    big = nn.Linear(1000, 1000)
    step = Step(big, lambda m, b: {"loss": m(b).square().mean()}, StepConfig(shard=shard), mesh)
    part = torch.randn(2, 1000)
    step(part)
    step.sums.settle()
    torch_dist.barrier()
    before = bytes_sent()
    for _ in range(steps):
        step(part)
    step.sums.settle()
    torch_dist.barrier()
    return bytes_sent() - before, sum(p.nbytes for p in big.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_no_more_than_2_g_minus_1_over_g_of_the_parameters(ranks: int) -> None:
    found = on_ranks({"replicate": ranks}, sent, "optimizer", 5)
    mean = sum(count for count, _ in found) / ranks / 5 / found[0][1]
    assert mean == pytest.approx(2 * (ranks - 1) / ranks, rel=0.03)


def events(mesh: Mesh) -> list[str]:
    """Sums started, gradients made, gathers started and waited for, layers run: in order, of two steps."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    step = Step(model, lambda m, b: {"loss": m(b).sum()}, StepConfig(shard="optimizer", bucket_mb=1e-4), mesh)
    seen: list[str] = []
    for bucket in step.sums.buckets:
        launch, arrive = bucket.launch, bucket.arrive  # type: ignore[attr-defined]
        share, name = bucket.spread, bucket.parts[-1].name  # type: ignore[attr-defined]
        bucket.launch = lambda f=launch: (seen.append("sum"), f())[1]  # type: ignore[method-assign]
        bucket.spread = lambda f=share, n=name: (seen.append(f"gather {n}"), f())[1]  # type: ignore[attr-defined]
        bucket.arrive = lambda b=bucket, f=arrive: (b.coming and seen.append("arrive"), f())[1]  # type: ignore[attr-defined]
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_: seen.append("gradient"))
        layer.register_forward_hook(lambda *_, i=i: seen.append(f"layer {i}"))
    for _ in range(2):
        step(torch.ones(2, 8, requires_grad=True))
        seen.append("step is over")
    return seen


def test_sums_hide_behind_the_backward_pass_and_gathers_behind_the_next_forward_pass() -> None:
    seen = on_ranks({"replicate": 2}, events)[0]
    over = seen.index("step is over")
    first = seen[:over]
    assert first.index("sum") < len(first) - 1 - first[::-1].index("gradient")
    gathers = [event.split()[1] for event in first if event.startswith("gather")]
    assert gathers == sorted(gathers) and len(gathers) >= 3, "what the next forward pass needs first comes first"
    second = seen[over + 1 :]
    assert "arrive" not in first and second.count("arrive") == 4
    assert second.index("layer 0") < len(second) - 1 - second[::-1].index("arrive"), "later weights come after layer 0"


class Late:
    """A gather that has not begun before it is waited for."""

    def __init__(self, whole: torch.Tensor, own: torch.Tensor, axis: Axis) -> None:
        self.wait = lambda: gather_shares(whole, own.clone(), axis).wait()


class Asking(nn.Module):
    """Computes with weights of its parts, without their forward pass, and with those that nn.LSTM holds in a second place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.others, self.memory = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.memory(x)[0] @ self.inner.weight + self.inner.bias
        for weight in self.others.parameters():
            x = x @ weight if weight.ndim > 1 else x + weight
        return x


def asked(mesh: Mesh, scheme: str) -> list[dict[str, Any]]:
    """The weights right after each of some steps, asked for in several ways."""
    torch.manual_seed(0)
    ways: list[Any] = [nn.Module.state_dict, lambda m: dict(m.named_parameters()), lambda m: deepcopy(m).state_dict()]
    with patch.object(shard, "gather_shares", Late):
        words: dict[str, Any] = {"precision": "fp64", "shard": scheme, "bucket_mb": 1e-4}
        step = Step(Asking(), lambda m, x: {"loss": m(x).square().mean()}, StepConfig(**words), mesh)
        found = []
        for number, ask in enumerate(ways):
            step(torch.ones(2, 4, 6).double() / (1 + number + mesh.rank), 0.1)
            found.append({name: whole(tensor) for name, tensor in ask(step.model).items()})
        return found


def test_who_asks_for_a_weight_waits_until_it_has_come() -> None:
    right = on_ranks({"replicate": 2}, asked, "none")[0]
    for found in on_ranks({"replicate": 2}, asked, "optimizer"):
        for early, expected in zip(found, right):
            assert early.keys() == expected.keys()
            same(early, expected)


def refused(mesh: Mesh) -> list[str]:
    with pytest.raises(MeshError) as shard:
        new_step(mesh, shard="optimizer", shard_within=3)
    with pytest.raises(MeshError) as norm:
        group_batch_norm(Network(), mesh, 3, "model.batchnorm_group")
    return [str(error.value) for error in (shard, norm)]


def test_a_group_size_that_does_not_divide_the_copies_is_refused() -> None:
    text = "mesh.replicate has 4 ranks, which do not divide into groups of 3; set {} to a divisor of 4"
    expected = [text.format(name) for name in ("step.shard_within", "model.batchnorm_group")]
    assert on_ranks({"replicate": 4}, refused) == [expected] * 4


def test_a_share_is_a_few_boxes() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
    row = torch.arange(40.0)
    share = Share(Part("w", parameter, 101, 37, 2, Place.whole(parameter.shape)), row, ())
    pieces = list(share.part.boxes(share.row))
    assert sum(box.numel() for _, box in pieces) == 37 and len(pieces) <= 7
    copy = torch.full_like(parameter, -1.0)
    for at, box in pieces:
        part = copy.detach()
        for dim, first in enumerate(at):
            part = part.narrow(dim, first, box.shape[dim])
        part.copy_(box)
    flat = torch.as_strided(copy.detach(), (300,), (1,))
    assert flat[101:138].tolist() == list(range(2, 39)) and (flat >= 0).sum() == 37
