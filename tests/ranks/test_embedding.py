"""Sharded embedding tables train, and are saved, as on one process, by plans of all kinds; the AUC over ranks."""

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError
from hpcai.models.dlrm import DLRM, Batch, DLRMConfig, auc_of_ranks, exchange, parallelize
from hpcai.models.dlrm import loss as dlrm_loss
from hpcai.nn.deferred_init import deferred
from hpcai.nn.embedding_bag import EmbeddingBags
from hpcai.parallel import expert
from hpcai.parallel.embedding import shard_embedding_bags
from hpcai.parallel.embedding_plan import Shard, ShardingPlan, plan_shards
from hpcai.settings import StepConfig
from hpcai.train.evaluation import evaluate
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph
from tests.ranks.launch import on_ranks
from tests.ranks.training import STEPS, Case, check_reshard, check_sharded_equals_full
from tests.reference_data import load_json, load_tensors

ROWS, HOTNESS, DIM, SAMPLES = (40, 3, 17, 60), (3, 1, 2, 5), 8, 8


def new_plan(kind: str, ranks: int, rowwise: bool = False) -> ShardingPlan:
    """Return a plan of a kind. Some ranks own no shard."""
    if kind == "planned":
        return plan_shards(ROWS, HOTNESS, DIM, ranks=ranks, memory=5000, batch=SAMPLES, rowwise=rowwise)
    shards, by_rows, none = list[Shard](), (min(ranks, 3), 1), (0, 0)
    shapes = {"table": (1, 1), "row": by_rows, "column": (1, ranks), "grid": (ranks // 2, 2), "replicated": none}
    for table, rows in enumerate(ROWS):
        parts = shapes.get(kind) or (none, by_rows, (1, 2), (1, 1))[table]  # or mixed
        for number, place in enumerate(product(*map(range, parts))):
            box = ((n * k // count, n * (k + 1) // count) for n, k, count in zip((rows, DIM), place, parts))
            shards.append(Shard(table, *box, (ranks - 1 - table - number) % ranks))  # type: ignore[arg-type,call-arg]
    return ShardingPlan(ROWS, HOTNESS, DIM, ranks, tuple(shards), rowwise)


class Network(nn.Module):
    """Pooled embeddings and a linear layer. All ranks along the tensor axis see the same samples."""

    def __init__(self, mesh: Mesh, kind: str, rowwise: bool = False) -> None:
        super().__init__()
        self.embedding, self.last = EmbeddingBags(ROWS, DIM, HOTNESS, rowwise=rowwise), nn.Linear(len(ROWS) * DIM, 1)
        if (ranks := mesh["replicate"].size) > 1:
            shard_embedding_bags(self.embedding, mesh, new_plan(kind, ranks, rowwise))

    def forward(self, ids: Any) -> Tensor:
        return self.last(self.embedding(ids).flatten(1).tanh())[:, 0]


def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
    error = (model(batch[0]) - batch[1]).square()
    return {"loss": (error.sum(), torch.tensor(len(error)))}


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):
        model = Network(mesh, case.get("shard", ""), case.get("rowwise", False))
    cfg = StepConfig(precision="fp64", optimizer="adagrad", eps=1e-5, accumulate=4 // mesh["replicate"].size)
    return Step(model, loss, cfg, mesh)


def draw(number: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return ragged bags, some of them empty and some with repeated ids, and targets."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.cat([torch.randint(0, n, (samples, h), generator=generator) for n, h in zip(ROWS, HOTNESS)], 1).int()
    ids[::3] = ids[0]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -1), torch.randn(samples, generator=generator)


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Any]:
    axis = mesh["replicate"]
    draws = [(ids, target.double()) for ids, target in map(draw, range(first, first + steps))]
    return [tuple(x.chunk(axis.size)[axis.rank] for x in batch) for batch in draws]


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"shard": kind} for kind in ("table", "row", "column", "grid", "mixed", "planned", "replicated")]
    cases += [{"shard": kind, "rowwise": True} for kind in ("row", "replicated", "planned")]
    check_sharded_equals_full(axes, cases, new_step, batches, tolerance=1e-12)


def test_a_checkpoint_resumes_with_another_plan_on_another_number_of_ranks(tmp_path: Path) -> None:
    two, four = {"replicate": 2}, {"replicate": 4}
    layouts: list[Any] = [({}, "table"), (four, "mixed"), (two | {"tensor": 2}, "grid"), (four, "row"), (two, "column")]
    check_reshard([(axes, {"shard": kind}) for axes, kind in layouts], tmp_path, new_step, batches)


def count_bytes(mesh: Mesh) -> tuple[list[int], list[int]]:
    """Return the bytes of ids, embeddings and gradients that a rank sends to others in a step, and those of the plan."""
    rank, sent, start = mesh["replicate"].rank, list[int](), torch_dist.all_to_all_single
    model, (ids, target) = Network(mesh, "mixed"), batches(mesh, {})[0]
    step = Step(model, loss, StepConfig(optimizer="adagrad", accumulate=2), mesh)

    def all_to_all(output: Tensor, x: Tensor, received: list[int], sizes: list[int], **kwargs: Any) -> Any:
        sent.append((sum(sizes) - sizes[rank]) * x.element_size())
        return start(output, x, received, sizes, **kwargs)

    with patch.object(torch_dist, "all_to_all_single", all_to_all):
        step((model.embedding.exchange.exchange(ids), target.float()))
    assert len(sent) == 5, "ids once, embeddings and gradients of two micro-batches"
    return [sent[0], sum(sent[1::2]), sum(sent[2::2])], new_plan("mixed", 4).sent(rank, len(ids))


def test_a_step_sends_the_bytes_of_its_plan() -> None:
    for measured, formula in on_ranks({"replicate": 4}, count_bytes):
        assert measured == formula and measured[0] and measured[2]


def order_of_events(mesh: Mesh) -> str:
    """Return the order in which a network communicates and computes its bottom MLP, forward and backward."""
    cfg, events = DLRMConfig(rows=ROWS, hotness=HOTNESS, dim=DIM, bottom=(DIM,), top=(1,), cross_rank=2), list[str]()
    model = parallelize(DLRM(cfg), mesh, new_plan("table", 2))
    start, wait = expert._start_all_to_all, expert.Work.wait
    bottom: Any = model.bottom[0]
    bottom.register_forward_hook(lambda *_: events.append("bottom"))
    bottom.weight.register_hook(lambda *_: events.append("bottom"))
    batch = exchange(model, Batch(torch.randn(SAMPLES, 13), draw(0)[0], torch.ones(SAMPLES)))
    with (
        patch.object(expert, "_start_all_to_all", lambda *args: (start(*args), events.append("start"))[0]),
        patch.object(expert.Work, "wait", lambda self: (events.append("wait"), wait(self))[1]),
    ):
        dlrm_loss(model, batch)["loss"].backward()
    return " ".join(events)


def test_the_bottom_mlp_computes_while_embeddings_travel() -> None:
    assert on_ranks({"replicate": 2}, order_of_events) == ["start bottom wait start bottom wait"] * 2


def score(mesh: Mesh, case: str) -> tuple[Fraction, int]:
    """Return the AUC of uneven parts of stored scores, and the number of distinct ones that a rank gets."""
    arrays, axis, rows = load_tensors("dlrm/auc", torch.float32), mesh["replicate"], list[int]()
    parts = [arrays[f"{case}/{kind}"] for kind in ("scores", "labels")]
    first, last = (len(parts[0]) * rank**2 // axis.size**2 for rank in (axis.rank, axis.rank + 1))
    start = torch_dist.all_to_all_single
    with patch.object(torch_dist, "all_to_all_single", lambda x, *args, **kwargs: (rows.append(len(x)), start(x, *args, **kwargs))):
        return auc_of_ranks(*(part[first:last] for part in parts), axis), sum(rows)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_auc_of_all_ranks_is_that_of_one_and_no_rank_has_all_scores(size: int) -> None:
    for case, expected in load_json("dlrm/auc").items():
        results = on_ranks({"replicate": size}, score, case)
        assert {value for value, _ in results} == {Fraction(expected["numerator"], expected["denominator"])}, case
        assert max(rows for _, rows in results) < max(1.4 * expected["samples"] / size, size + 4)


class Uneven:
    """Two batches of five samples on one or two ranks, of which the second has none in the second batch."""

    def __init__(self, mesh: Mesh) -> None:
        axis, batch = mesh["replicate"], draw(5, 5)
        indices = [[0, 1, 2, 3], [4]] if axis.size == 1 else ([[0, 1, 2], [4]], [[3]])[axis.rank]
        self.parts = [tuple(x[index] for x in batch) for index in indices]

    def __len__(self) -> int:
        return 2

    def epoch(self, _: int) -> list[Any]:
        return self.parts


def evaluate_unevenly(mesh: Mesh) -> float:
    """Return a loss after a step that is not finite, which changes nothing, and a batch with an id that its table lacks."""
    torch.manual_seed(0)
    model, (ids, target) = Network(mesh, "mixed"), batches(mesh, {})[0]
    step = Step(model, loss, StepConfig(optimizer="adagrad"), mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step((ids, target.float() * torch.nan))
    ids[0, 4] = ROWS[2]
    with pytest.raises(DataError, match="table 2: sample 0 has the id 17, expected 0 to 16"):
        step((ids, target.float()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return evaluate(step, loss, Uneven(mesh))["loss"]


def test_uneven_evaluation_and_steps_that_change_nothing() -> None:
    (alone,), both = on_ranks({}, evaluate_unevenly), on_ranks({"replicate": 2}, evaluate_unevenly)
    assert both == pytest.approx([alone] * 2, rel=1e-6)


def test_plans_and_settings_that_do_not_fit_are_refused() -> None:
    mesh = Mesh({"replicate": 2}, world=2)
    for ranks, rowwise in ((4, False), (2, True)):
        with pytest.raises(ConfigError, match="the plan is for"):
            shard_embedding_bags(EmbeddingBags(ROWS, DIM, HOTNESS), mesh, new_plan("table", ranks, rowwise))
    with pytest.raises(ConfigError, match="row-wise Adagrad needs full rows"):
        new_plan("column", 2, rowwise=True)
    for name, value in (("clip", 1.0), ("ema_decay", 0.9), ("shard", "weights"), ("capture", "forward")):
        with pytest.raises(ConfigError, match=rf"step.{name}\S* does not work with EmbeddingBags"):
            Step(Network(Mesh({}), ""), loss, StepConfig(**{name: value}), Mesh({}), graph=CPUGraph)  # type: ignore[arg-type]
