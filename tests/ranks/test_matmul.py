"""Sharded layers of one input: one communication for all of them, and FP8 products that equal those of full layers."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Batch, LLMConfig, LoRAConfig
from hpcai.nn.deferred_init import deferred
from hpcai.nn.matmul import fused_linear
from hpcai.parallel import tensor
from hpcai.parallel.tensor import column_parallel, row_parallel
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks
from tests.ranks.shards import Shards, check_equal, gather_full, local_shards

MESHES: list[dict[str, int]] = [{"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}]


class Feed(nn.Module):
    float8 = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_linear(x, self.gate, self.up)
        return self.down(gate * up.unflatten(-1, (-1, 2)).sum(-1))


def squares(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return this rank's part of the mean over all tokens."""
    return {"loss": model(x).square().sum() / (8 * 32 * len(x))}


def train_feed(mesh: Mesh, sequence: bool) -> Shards:
    """Train two steps on positive elements of similar size, so that no scale decides whether one underflows."""
    torch.manual_seed(0)
    model = Feed()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.0)
    axis, dim = mesh["tensor"], 1 if sequence else None
    for linear in (model.gate, model.up):
        column_parallel(linear, axis, sequence=dim)
    row_parallel(model.down, axis, dim)
    if sequence:
        tensor.sum_gradients_over(model, axis)
    settings: dict[str, Any] = {"precision": "fp64", "matmul": "fp8", "lr": 0.01, "capture": "none"}
    step = Step(model, squares, StepConfig(**settings, accumulate=2 // mesh["replicate"].size), mesh)
    for number in range(2):
        x = 0.5 + torch.rand(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        x = x.chunk(mesh["replicate"].size)[mesh["replicate"].rank]
        step(x.chunk(axis.size, 1)[axis.rank] if sequence else x)
    return local_shards(step)


def test_float8_changes_the_gradients() -> None:
    with pytest.MonkeyPatch.context() as patch:
        float8 = gather_full([train_feed(Mesh({}), False)])
        patch.setattr("hpcai.train.step.enable_float8", lambda *_: [])
        float64 = gather_full([train_feed(Mesh({}), False)])
    assert all(np.abs(float8[name] / float64[name] - 1).max() > 1e-4 for name in float8 if name.endswith("gradient"))


@cache
def unsharded_state() -> dict[str, Any]:
    return gather_full([train_feed(Mesh({}), False)])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_equals_full_in_float8(axes: dict[str, int], sequence: bool) -> None:
    check_equal(gather_full(on_ranks(axes, train_feed, sequence)), unsharded_state())


def train_lm(mesh: Mesh, matmul: str, shard: str = "none") -> tuple[Shards, list[float]]:
    """Return the state of a language model after three steps, and its losses."""
    with deferred(0):
        sizes: dict[str, Any] = {"vocabulary": 61, "width": 64, "layers": 2, "heads": 4, "inner": 128, "positions": 32}
        model = llm.parallelize(LLM(LLMConfig(**sizes, recompute="selective")), mesh)
    settings: dict[str, Any] = {"precision": "fp64", "matmul": matmul, "optimizer": "sgd", "lr": 0.1, "capture": "none"}
    settings["shard"] = shard
    step = Step(model, llm.loss, StepConfig(**settings, accumulate=2), mesh, pipeline=llm.build_pipeline(model, mesh))
    rows = torch.randint(0, 61, (4, 33), generator=torch.Generator().manual_seed(0))
    rows = rows.chunk(mesh["replicate"].size)[mesh["replicate"].rank]
    losses = [step(Batch(rows))["loss"] for _ in range(3)]
    return local_shards(step), [float(total) / float(count) for total, count in losses]


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_a_sharded_language_model_trains_in_float8_as_a_full_one(axes: dict[str, int]) -> None:
    """The smallest elements of a shard underflow by the scale of that shard, so the results are not bitwise equal."""
    (expected, losses), (_, fp64_losses) = train_lm(Mesh({}), "fp8"), train_lm(Mesh({}), "precision")
    ranks = on_ranks(axes, train_lm, "fp8")
    difference = max(abs(a - b) for a, b in zip(ranks[0][1], losses))
    assert difference < 0.02 * max(abs(a - b) for a, b in zip(fp64_losses, losses)) < 1e-3, (ranks[0][1], losses, fp64_losses)
    weights = gather_full([[piece for piece in rank[0] if piece[0].endswith(" weight")] for rank in ranks])
    for name, value in gather_full([[piece for piece in expected if piece[0].endswith(" weight")]]).items():
        assert np.abs(weights[name] - value).max() < 1e-4, name


def test_sharded_weights_multiply_in_float8_as_full_ones() -> None:
    replicated, *sharded = (on_ranks({"replicate": 2}, train_lm, "fp8", shard) for shard in ("none", "optimizer", "weights"))
    expected = gather_full([rank[0] for rank in replicated])
    for ranks in sharded:
        actual = gather_full([rank[0] for rank in ranks])
        assert actual.keys() == expected.keys()
        assert all(np.abs(actual[name] - value).max() < 1e-12 for name, value in expected.items() if name.endswith(" weight"))


def communication(mesh: Mesh, lora: LoRAConfig | None) -> list[str]:
    """Return the collectives of a layer in order, forward and backward."""
    events: list[str] = []
    with deferred(0):
        sizes: dict[str, Any] = {"vocabulary": 32, "width": 32, "layers": 1, "heads": 4, "inner": 64, "positions": 8}
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        if lora is not None:
            llm.adapt(model, lora)
    step = Step(model, llm.loss, StepConfig(capture="none"), mesh)
    layer = step.model.model.layers[0]  # type: ignore[union-attr, index]
    patch = pytest.MonkeyPatch()
    for function, name in (("_start_all_gather", "gather"), ("_start_reduce", "sum")):
        patch.setattr(tensor, function, _recording(getattr(tensor, function), events, name))
    with patch.context():
        x = torch.randn(1, 4, 32, requires_grad=True)
        y = layer(x, [(torch.ones(1, 8, 8), torch.zeros(1, 8, 8))] * 2)
        events.append("backward")
        y.sum().backward()
    return events


def _recording(start: Any, events: list[str], name: str) -> Any:
    def recorded(*args: Any) -> Any:
        events.append(name)
        return start(*args)

    return recorded


def test_layers_of_one_input_communicate_once() -> None:
    forward = ["gather", "sum"]  # before and after attention, and likewise for the MLP
    backward = ["gather", "gather", "sum"]  # the gradient, the input once more, and its gradient
    for events in on_ranks({"tensor": 2}, communication, None):
        assert events == [*forward, *forward, "backward", *backward, *backward]
    frozen = LoRAConfig(rank=2, targets=("q_proj", "v_proj"), base_dtype="8bit")
    for events in on_ranks({"tensor": 2}, communication, frozen):
        adapter = ["gather"] * 2  # hidden features of the adapters
        assert events[: events.index("backward")] == ["gather", *adapter, "sum", *forward]
