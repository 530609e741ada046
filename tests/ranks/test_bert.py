"""BERT on replicas with unequal numbers of masked tokens, and with heads, channels and vocabulary sharded, equals one process."""

from typing import Any

import numpy as np
import pytest
import torch

from hpcai import dist
from hpcai.dist.mesh import Mesh
from hpcai.errors import MeshError
from hpcai.models.bert import Batch, Bert, BertConfig, attention_maps, counted, loss, parallelize, score
from hpcai.nn.lm_head import IGNORE_INDEX
from hpcai.settings import StepConfig
from hpcai.train import Step, seeds
from tests.ranks.launch import on_ranks
from tests.ranks.shards import Shards, check_equal, gather_full, local_shards

CFG = BertConfig(
    vocabulary=26, width=16, layers=2, heads=4, inner=24, positions=12, activation="gelu_pytorch_tanh", dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip
ROWS, WIDTH = 8, 20


def batch(first: int, end: int) -> Batch:
    """Return rows of the global batch, whose numbers of masked tokens and of sequences differ."""
    random = np.random.default_rng(0)
    lengths = np.array([[12, 8, 0], [5, 4, 3], [7, 0, 0], [12, 2, 6], [9, 9, 2], [3, 0, 0], [10, 10, 0], [6, 6, 6]])
    tokens, types = random.integers(0, 26, (ROWS, WIDTH)), random.integers(0, 2, (ROWS, WIDTH))
    masked, targets = np.zeros((ROWS, 5), int), np.full((ROWS, 5), IGNORE_INDEX)
    for row, total in enumerate(lengths.sum(1)):
        count = 1 + row % 5
        masked[row, :count], targets[row, :count] = random.choice(total, count, replace=False), random.integers(0, 26, count)
    nsp = np.where(lengths > 0, random.integers(0, 2, lengths.shape), IGNORE_INDEX)
    return Batch(*(torch.from_numpy(x[first:end]) for x in (tokens, lengths, masked, targets, types, nsp)))


def run(mesh: Mesh, precision: str = "fp64") -> tuple[Shards, list[float]]:
    with seeds(3):
        model = parallelize(Bert(CFG.model_copy(update={"deviation": 0.2})), mesh)
    cfg = StepConfig(optimizer="lamb", precision=precision, weight_decay=0.1, decay_names=("*[!m].weight",), clip=1.0)  # type: ignore[arg-type]
    step, replicas = Step(model, loss, cfg, mesh, counts=counted), mesh["replicate"]
    own = batch(ROWS * replicas.rank // replicas.size, ROWS * (replicas.rank + 1) // replicas.size)
    for _ in range(2):
        step(own, 1e-2)
    with torch.no_grad():
        scores: Any = score(step.model.eval(), own)
        scores["maps"] = [attention_maps(step.model, own)["attention"].flatten(2).double().square().sum((0, 2))]
    names = "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "maps"
    return local_shards(step), [float(x) for name in names for values in scores[name] for x in values.reshape(-1)]


@pytest.mark.parametrize("sizes", [{"replicate": 2}, {"replicate": 4}, {"tensor": 2}, {"tensor": 4}, {"replicate": 2, "tensor": 2}])
def test_sharded_equals_full(sizes: dict[str, int]) -> None:
    expected, scores = run(dist.single_process(torch.device("cpu")))
    ranks = on_ranks(sizes, run)
    check_equal(gather_full([shards for shards, _ in ranks]), gather_full([expected]), 1e-10)
    total = sum(np.array(each) for _, each in ranks) / sizes.get("tensor", 1)
    np.testing.assert_allclose(total, scores, rtol=1e-9)


def refused(mesh: Mesh) -> str:
    with pytest.raises(MeshError) as caught:
        parallelize(Bert(CFG.model_copy(update={"heads": 1})), mesh)
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused() -> None:
    assert "does not divide 1 heads" in on_ranks({"tensor": 2}, refused)[0]
