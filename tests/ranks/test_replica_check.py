"""A flipped bit of one rank's weights is detected and reported; equal weights are never reported as different."""

from functools import partial
from typing import Any

import pytest
import torch

from hpcai.dist.mesh import Mesh
from hpcai.errors import DivergedError
from hpcai.models import cosmoflow
from hpcai.parallel.data_parallel import sum_gradients_over
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train.capture import _Watch
from hpcai.train.loop import fit
from hpcai.train.replica_check import _BLOCK, fingerprint
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph
from tests.ranks.launch import on_ranks
from tests.ranks.test_scoring import Network, batches, loss, metric

EVERY, FLIPPED = 4, 6  # steps; the flip follows the sixth


def flip(step: Step, name: str, bit: int = 0) -> None:
    """Flip one bit of the last element of a parameter, as radiation does."""
    weight: Any = step.optimizer.weights()[name]
    torch.as_strided(weight, (weight.numel(),), (1,)).view(torch.int32)[-1] ^= 1 << bit


class FlippingStep(Step):
    """A step that flips a bit of a parameter on some ranks, once."""

    flips: dict[int, str]

    def __call__(self, batch: Any, lr: float | None = None) -> Any:
        values = super().__call__(batch, lr)
        if self.count == FLIPPED and self.mesh.rank in self.flips:
            flip(self, self.flips[self.mesh.rank])
        return values


def train_with_flips(mesh: Mesh, flips: dict[int, str], settings: dict[str, Any], overrides: dict[str, Any]) -> tuple[str, int]:
    """Return the error of a run, of 16 steps by default, and its number of steps."""
    torch.manual_seed(0)
    model = Network()
    sum_gradients_over(model, mesh["depth"])
    graph = CPUGraph if "capture" in settings else None
    step = FlippingStep(model, loss, StepConfig(lr=0.01, **settings), mesh, graph=graph)
    step.flips = flips
    axis = mesh["replicate"]
    training, validation = ([b.chunk(axis.size)[axis.rank] for b in batches(n, 8, n)] for n in (8, 2))
    cfg = TrainConfig(**{"steps": 16, "report_every": 2, "replica_check_every": EVERY} | overrides)
    try:
        fit(step, training, cfg, validation=validation, evaluate=metric)
    except DivergedError as error:
        return str(error), step.count
    return "", step.count


CASES = [
    ({"replicate": 2}, {1: "last.weight"}, "rank 0 and rank 1 differ", "last.weight"),
    ({"replicate": 4}, {2: "norm.bias"}, "rank 2 differ", "norm.bias"),
    ({"replicate": 2, "depth": 2}, {3: "first.weight"}, "rank 3 differ", "first.weight"),
    ({"replicate": 2, "depth": 2}, {0: "last.bias", 2: "norm.weight"}, "rank 2 differ", "norm.weight"),
]


# Settings of the step, steps per report, and the step that detects the flip.
RUNS: list[tuple[dict[str, Any], int, int]] = [({}, 2, 8), ({"precision": "bf16-params"}, 3, 6), ({}, 100, 8)]


@pytest.mark.parametrize("axes, flips, ranks, name", CASES, ids=str)
def test_a_flipped_bit_is_named_with_its_ranks_and_its_parameter(axes: Any, flips: Any, ranks: str, name: str) -> None:
    for settings, report, detected in RUNS:
        for text, steps in on_ranks(axes, train_with_flips, flips, settings, {"report_every": report}):
            assert text.startswith(f"step {detected}: the weights of {ranks} from their replicas"), (settings, report)
            assert f"first in {name};" in text
            assert steps == detected <= FLIPPED + EVERY


SETTINGS = [
    {}, {"precision": "bf16-params", "moments": "bf16", "ema_decay": 0.9}, {"shard": "optimizer", "ema_decay": 0.9},
    {"shard": "optimizer", "precision": "bf16-params", "optimizer": "lamb"}, {"shard": "weights", "ema_decay": 0.9},
    {"capture": "whole", "ema_decay": 0.9}, {"capture": "forward", "shard": "optimizer"}, {"clip": 0.1, "accumulate": 2},
]  # fmt: skip


def train_cases(mesh: Mesh, flips: dict[int, str], cases: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [train_with_flips(mesh, flips, settings, {"replica_check_every": 1, "steps": 9}) for settings in cases]


def test_no_setting_makes_weights_differ() -> None:
    for results in on_ranks({"replicate": 2, "depth": 2}, train_cases, {}, SETTINGS):
        assert results == [("", 9)] * len(SETTINGS), "also after an evaluation"


def flip_messages(mesh: Mesh, shard: str) -> list[str]:
    """Return the messages about a flip on rank 1, if groups of two ranks shard the optimizer or the weights."""
    torch.manual_seed(0)
    step = Step(Network(), loss, StepConfig(shard=shard, shard_within=2), mesh)  # type: ignore[arg-type]
    messages = []
    for flipped in (False, True):
        step(batches(4, 2, mesh.rank)[0])
        step.reducer.wait()
        if flipped and mesh.rank == 1:
            tensors = {name: tensor for name, tensor, _ in step.reducer.replicated_tensors()}
            tensors["first.weight"].view(torch.int32)[0] ^= 1
        try:
            step.replica_check.raise_if_divergent(int(step.first_failures(compare=True)[1].item()), step.count)
        except DivergedError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("shard, ranks", [("optimizer", "rank 1"), ("weights", "rank 1 and rank 3")])
def test_ranks_with_sharded_states_compare_the_weights_they_compute_with(shard: str, ranks: str) -> None:
    for messages in on_ranks({"replicate": 4}, flip_messages, shard):
        assert len(messages) == 1 and "first in first.weight;" in messages[0]
        assert messages[0].startswith(f"step 2: the weights of {ranks} differ")


def first_divergent(mesh: Mesh) -> list[int]:
    """Return the first divergent parameters of a sharded model, with and without a flip on one rank."""
    cfg = cosmoflow.CosmoFlowConfig(size=16, filters=2, blocks=3)
    step = Step(cosmoflow.parallelize(cosmoflow.CosmoFlow(cfg), mesh), cosmoflow.loss, StepConfig(), mesh)
    with _Watch() as watch:
        divergent = step.first_failures(compare=True)[1]
    assert not watch.first_read, "the host waits for the device"
    indices = [int(divergent.item())]
    if mesh.rank == 2:
        flip(step, "dense1.weight", bit=31)
    return [*indices, int(step.first_failures(compare=True)[1].item())]


def test_the_ranks_of_a_sharded_replica_are_compared() -> None:
    names = [name for name, _ in cosmoflow.CosmoFlow(cosmoflow.CosmoFlowConfig(size=16, blocks=3)).named_parameters()]
    for axes in ({"depth": 4}, {"replicate": 2, "height": 2}):
        assert {tuple(indices) for indices in on_ranks(axes, first_divergent)} == {(2**62, names.index("dense1.weight"))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_fingerprint_changes_with_every_bit_and_permutation(dtype: torch.dtype) -> None:
    values = torch.randn(2**18 + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    expected = fingerprint(values)
    for index in (0, 1, 2**18 - 1, 2**18, len(values) - 1):
        for bit in range(8 * dtype.itemsize):
            values.view(bits)[index] ^= torch.ones((), dtype=bits) << bit
            assert fingerprint(values) != expected, (index, bit)
            values.view(bits)[index] ^= torch.ones((), dtype=bits) << bit
    assert fingerprint(values.roll(1)) != expected == fingerprint(values.clone())
    blocks = torch.randn(2 * _BLOCK, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(blocks.roll(_BLOCK)) != fingerprint(blocks)
    nan = partial(torch.full, (4,), dtype=torch.int32)
    assert fingerprint(nan(0x7FC00000).view(torch.float32)) != fingerprint(nan(0x7FC00001).view(torch.float32))
