"""Layers of one input that are cut: messages once for all of them, and products in 8 bits that are those of whole layers."""

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
    """Their mean over all tokens, of which ``x`` has some."""
    return {"loss": model(x).square().sum() / (8 * 32 * len(x))}


def fed(mesh: Mesh, sequence: bool) -> Shards:
    """What two steps make of numbers that are positive and alike in size: no scale decides whether one vanishes."""
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
    words: dict[str, Any] = {"precision": "fp64", "matmul": "fp8", "lr": 0.01, "capture": "none"}
    step = Step(model, squares, StepConfig(**words, accumulate=2 // mesh["replicate"].size), mesh)
    for number in range(2):
        x = 0.5 + torch.rand(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        x = x.chunk(mesh["replicate"].size)[mesh["replicate"].rank]
        step(x.chunk(axis.size, 1)[axis.rank] if sequence else x)
    return local_shards(step)


def test_whole_in_eighths_is_not_whole_without() -> None:
    with pytest.MonkeyPatch.context() as patch:
        right = gather_full([fed(Mesh({}), False)])
        patch.setattr("hpcai.train.step.enable_float8", lambda *_: [])
        wide = gather_full([fed(Mesh({}), False)])
    assert all(np.abs(right[name] / wide[name] - 1).max() > 1e-4 for name in right if name.endswith("gradient"))


@cache
def whole() -> dict[str, Any]:
    return gather_full([fed(Mesh({}), False)])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_cut_equals_whole_in_eighths(axes: dict[str, int], sequence: bool) -> None:
    check_equal(gather_full(on_ranks(axes, fed, sequence)), whole())


def read(mesh: Mesh, products: str, shard: str = "none") -> tuple[Shards, list[float]]:
    """A language model after three steps, and its losses."""
    with deferred(0):
        sizes: dict[str, Any] = {"vocabulary": 61, "width": 64, "layers": 2, "heads": 4, "inner": 128, "positions": 32}
        model = llm.parallelize(LLM(LLMConfig(**sizes, recompute="selective")), mesh)
    words: dict[str, Any] = {"precision": "fp64", "matmul": products, "optimizer": "sgd", "lr": 0.1, "capture": "none"}
    words["shard"] = shard
    step = Step(model, llm.loss, StepConfig(**words, accumulate=2), mesh, pipeline=llm.build_pipeline(model, mesh))
    rows = torch.randint(0, 61, (4, 33), generator=torch.Generator().manual_seed(0))
    rows = rows.chunk(mesh["replicate"].size)[mesh["replicate"].rank]
    found = [step(Batch(rows))["loss"] for _ in range(3)]
    return local_shards(step), [float(total) / float(count) for total, count in found]


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_a_cut_language_model_learns_in_eighths_as_the_whole_one(axes: dict[str, int]) -> None:
    """The smallest numbers of a part vanish by the scale of that part, so this is not to the last bit."""
    (right, losses), (_, wide) = read(Mesh({}), "fp8"), read(Mesh({}), "precision")
    found = on_ranks(axes, read, "fp8")
    off = max(abs(one - other) for one, other in zip(found[0][1], losses))
    assert off < 0.02 * max(abs(one - other) for one, other in zip(wide, losses)) < 1e-3, (found[0][1], losses, wide)
    weights = gather_full([[piece for piece in rank[0] if piece[0].endswith(" weight")] for rank in found])
    for name, value in gather_full([[piece for piece in right if piece[0].endswith(" weight")]]).items():
        assert np.abs(weights[name] - value).max() < 1e-4, name


def test_divided_weights_multiply_in_eighths_as_whole_ones() -> None:
    whole, *divided = (on_ranks({"replicate": 2}, read, "fp8", shard) for shard in ("none", "optimizer", "weights"))
    right = gather_full([rank[0] for rank in whole])
    for ranks in divided:
        found = gather_full([rank[0] for rank in ranks])
        assert found.keys() == right.keys()
        assert all(np.abs(found[name] - value).max() < 1e-12 for name, value in right.items() if name.endswith(" weight"))


def messages(mesh: Mesh, lora: LoRAConfig | None) -> list[str]:
    """What a layer sends, forward and backward."""
    done: list[str] = []
    with deferred(0):
        sizes: dict[str, Any] = {"vocabulary": 32, "width": 32, "layers": 1, "heads": 4, "inner": 64, "positions": 8}
        model = llm.parallelize(LLM(LLMConfig(**sizes)), mesh)
        if lora is not None:
            llm.adapt(model, lora)
    step = Step(model, llm.loss, StepConfig(capture="none"), mesh)
    layer = step.model.model.layers[0]  # type: ignore[union-attr, index]
    patch = pytest.MonkeyPatch()
    for kind, name in ((tensor._AsyncAllGather, "gather"), (tensor._AsyncReduce, "sum")):
        patch.setattr(kind, "__init__", _told(kind.__init__, done, name))
    with patch.context():
        x = torch.randn(1, 4, 32, requires_grad=True)
        y = layer(x, (torch.ones(1, 8, 8), torch.zeros(1, 8, 8)))
        done.append("back")
        y.sum().backward()
    return done


def _told(begin: Any, done: list[str], name: str) -> Any:
    def told(self: Any, *given: Any) -> None:
        done.append(name)
        begin(self, *given)

    return told


def test_layers_of_one_input_send_once() -> None:
    around = ["gather", "sum"]  # before and after attention, and the same for what follows it
    back = ["gather", "gather", "sum"]  # the gradient, the input again, and its gradient
    for found in on_ranks({"tensor": 2}, messages, None):
        assert found == [*around, *around, "back", *back, *back]
    frozen = LoRAConfig(rank=2, targets=("q_proj", "v_proj"), base_dtype="8bit")
    for found in on_ranks({"tensor": 2}, messages, frozen):
        small = ["gather"] * 2  # adapters' middles
        assert found[: found.index("back")] == ["gather", *small, "sum", *around]
