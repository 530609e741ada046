"""Sharded embedding tables train, and are checkpointed, as on one process, by plans of all kinds; the AUC of scores on all
ranks."""

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
from tests.ranks.launch import on_ranks
from tests.ranks.training import STEPS, Case, check_reshard, check_sharded_equals_full
from tests.reference_data import load_json, load_tensors

ROWS, HOTNESS, DIM, SAMPLES = (40, 3, 17, 60), (3, 1, 2, 5), 8, 8
PLANS = ("table", "row", "column", "grid", "mixed", "planned", "replicated")


def new_plan(kind: str, ranks: int, rowwise: bool = False) -> ShardingPlan:
    """Return a plan of a kind; the first table is always on the last rank alone, with others of the kind."""
    if kind == "planned":
        return plan_shards(ROWS, HOTNESS, DIM, ranks=ranks, memory=5000, batch=SAMPLES, rowwise=rowwise)
    shards = []
    for table, rows in enumerate(ROWS):
        shape = {"table": (1, 1), "row": (min(ranks, rows), 1), "column": (1, ranks), "grid": (ranks // 2 or 1, 2), "replicated": (0, 0),
                 "mixed": [(0, 0), (min(ranks, rows), 1), (1, 2), (1, 1)][table]}[kind]  # fmt: skip
        for number, (r, c) in enumerate(product(range(shape[0]), range(shape[1]))):
            row_range, columns = ((n * k // parts, n * (k + 1) // parts) for n, k, parts in ((rows, r, shape[0]), (DIM, c, shape[1])))
            shards.append(Shard(table, row_range, columns, (ranks - 1 - table - number) % ranks))
    return ShardingPlan(ROWS, HOTNESS, DIM, ranks, tuple(shards), rowwise)


class Network(nn.Module):
    """Pooled embeddings and a linear layer. All ranks along the tensor axis see the same samples."""

    def __init__(self, mesh: Mesh, case: Case) -> None:
        super().__init__()
        rowwise = case.get("rowwise", False)
        self.embedding, self.last = EmbeddingBags(ROWS, DIM, HOTNESS, rowwise=rowwise), nn.Linear(len(ROWS) * DIM, 1)
        if (ranks := mesh["replicate"].size) > 1:
            shard_embedding_bags(self.embedding, mesh, new_plan(case["shard"], ranks, rowwise))

    def forward(self, ids: Any) -> Tensor:
        return self.last(self.embedding(ids).flatten(1).tanh())[:, 0]


def loss(model: Network, batch: Any) -> dict[str, Any]:
    error = (model(batch[0]) - batch[1]).square()
    return {"loss": (error.sum(), torch.tensor(len(error)))}


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):
        model = Network(mesh, case)
    cfg = StepConfig(precision="fp64", optimizer="adagrad", eps=1e-5, accumulate=4 // mesh["replicate"].size, weight_decay=0.1)
    return Step(model, loss, cfg, mesh)


def draw_ids(generator: torch.Generator, samples: int = SAMPLES) -> Tensor:
    """Return ragged bags, some of them empty, with repeated ids: those of small tables, and every third of others."""
    parts = [torch.randint(0, n, (samples, h), generator=generator) for n, h in zip(ROWS, HOTNESS)]
    ids = torch.cat(parts, 1)
    ids[::3] = ids[0]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -1).int()


def batches(mesh: Mesh, case: Case, first: int = 0, steps: int = STEPS) -> list[Any]:
    axis, result = mesh["replicate"], []
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        result.append((draw_ids(generator), torch.randn(SAMPLES, generator=generator).double()))
    return [tuple(x.chunk(axis.size)[axis.rank] for x in batch) for batch in result]


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"replicate": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"shard": kind} for kind in PLANS]
    cases += [{"shard": kind, "rowwise": True} for kind in ("table", "row", "replicated", "planned")]
    check_sharded_equals_full(axes, cases, new_step, batches, tolerance=1e-12)


def test_a_checkpoint_resumes_with_another_plan_on_another_number_of_ranks(tmp_path: Path) -> None:
    four = {"replicate": 4}
    layouts: list[Any] = [({}, "table"), (four, "mixed"), ({"replicate": 2, "tensor": 2}, "grid"), (four, "row"), ({"replicate": 2}, "column")]
    check_reshard([(axes, {"shard": kind}) for axes, kind in layouts], tmp_path, new_step, batches)


def count_bytes(mesh: Mesh) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that a rank sends to others in a step, and those of the plan."""
    case, rank, sent = {"shard": "mixed"}, mesh["replicate"].rank, list[int]()
    model, plan = Network(mesh, case), new_plan("mixed", mesh["replicate"].size)
    step = Step(model, loss, StepConfig(optimizer="adagrad", decay_names=("none",), weight_decay=0.0, accumulate=2), mesh)
    start, (ids, target) = torch_dist.all_to_all_single, batches(mesh, case)[0]

    def all_to_all(output: Tensor, x: Tensor, received: list[int], sizes: list[int], **kwargs: Any) -> Any:
        sent.append((sum(sizes) - sizes[rank]) * x.element_size() * x[:1].numel())
        return start(output, x, received, sizes, **kwargs)

    with patch.object(torch_dist, "all_to_all_single", all_to_all):
        step((model.embedding.exchange.exchange(ids), target.float()))
    ids_bytes, *others = sent
    assert len(others) == 4, "embeddings and gradients of two micro-batches"
    measured = {"ids": ids_bytes, "embeddings": sum(others[::2]), "gradients": sum(others[1::2])}
    return measured, {name: plan.sent(rank, len(ids))[name] for name in measured}


def test_a_step_sends_the_bytes_of_its_plan() -> None:
    for measured, formula in on_ranks({"replicate": 4}, count_bytes):
        assert measured == formula and measured["ids"] and measured["gradients"]


def order_of_events(mesh: Mesh) -> str:
    """Return the order in which a network communicates and computes its bottom MLP, forward and backward."""
    cfg, events = DLRMConfig(rows=ROWS, hotness=HOTNESS, dim=DIM, bottom=(DIM,), top=(1,), cross_rank=2), list[str]()
    plan = ShardingPlan(ROWS, HOTNESS, DIM, 2, new_plan("table", 2).shards)
    model, ids = parallelize(DLRM(cfg), mesh, plan), draw_ids(torch.Generator().manual_seed(0))
    start, wait = expert._start_all_to_all, expert.Work.wait
    model.bottom[0].register_forward_hook(lambda *_: events.append("bottom"))
    model.bottom[0].weight.register_hook(lambda *_: events.append("bottom"))  # type: ignore[operator]
    batch = exchange(model, Batch(torch.randn(SAMPLES, 13), ids, torch.ones(SAMPLES)))
    with (
        patch.object(expert, "_start_all_to_all", lambda *args: (start(*args), events.append("start"))[0]),
        patch.object(expert.Work, "wait", lambda self: (events.append("wait"), wait(self))[1]),
    ):
        dlrm_loss(model, batch)["loss"].backward()
    return " ".join(events)


def test_the_bottom_mlp_computes_while_embeddings_travel() -> None:
    assert on_ranks({"replicate": 2}, order_of_events) == ["start bottom wait start bottom wait"] * 2


def scores(mesh: Mesh, case: str) -> tuple[Fraction, int]:
    """Return the AUC of uneven parts of stored scores, and the most rows that a rank gets from others."""
    arrays, axis, most = load_tensors("dlrm/auc", torch.float32), mesh["replicate"], 0
    values, labels = (arrays[f"{case}/{kind}"] for kind in ("scores", "labels"))
    ends = [len(values) * rank**2 // axis.size**2 for rank in range(axis.size + 1)]
    start = torch_dist.all_to_all_single

    def all_to_all(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        most = len(output)
        return start(output, *args, **kwargs)

    with patch.object(torch_dist, "all_to_all_single", all_to_all):
        return auc_of_ranks(*(x[ends[axis.rank] : ends[axis.rank + 1]] for x in (values, labels)), axis), most


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_auc_of_all_ranks_is_that_of_one_and_no_rank_has_all_scores(size: int) -> None:
    for case, expected in load_json("dlrm/auc").items():
        results = on_ranks({"replicate": size}, scores, case)
        assert {value for value, _ in results} == {Fraction(expected["numerator"], expected["denominator"])}, case
        assert size == 1 or max(rows for _, rows in results) < max(1.4 * expected["samples"] / size, size + 4)


class Uneven:
    """Two batches of five samples on one or two ranks, of which the second has none in the second batch."""

    def __init__(self, rank: int, size: int) -> None:
        generator = torch.Generator().manual_seed(5)
        ids, target = draw_ids(generator, 5), torch.randn(5, generator=generator)
        indices = [[0, 1, 2, 3], [4]] if size == 1 else [[[0, 1, 2], [4]], [[3]]][rank]
        self.parts = [(ids[index], target[index]) for index in indices]

    def __len__(self) -> int:
        return 2

    def epoch(self, _: int) -> Any:
        yield from self.parts


def evaluate_unevenly(mesh: Mesh) -> float:
    """Return a loss after a step that is not finite, which changes nothing, and a batch with an id that its table lacks."""
    torch.manual_seed(0)
    model, (ids, target) = Network(mesh, {"shard": "mixed"}), batches(mesh, {})[0]
    step = Step(model, loss, StepConfig(optimizer="adagrad", decay_names=("none",)), mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step((ids, target.float() * torch.nan))
    ids[0, 4] = ROWS[2]
    with pytest.raises(DataError, match="table 2: sample 0 has the id 17, expected 0 to 16"):
        step((ids, target.float()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return evaluate(step, loss, Uneven(mesh["replicate"].rank, mesh["replicate"].size))["loss"]


def test_uneven_evaluation_and_steps_that_change_nothing() -> None:
    (alone,), both = on_ranks({}, evaluate_unevenly), on_ranks({"replicate": 2}, evaluate_unevenly)
    assert both == pytest.approx([alone] * 2, rel=1e-6)


def test_plans_and_settings_that_do_not_fit_are_refused() -> None:
    mesh, bags = Mesh({"replicate": 2}, world=2), EmbeddingBags(ROWS, DIM, HOTNESS)
    for ranks, rowwise in ((4, False), (2, True)):
        with pytest.raises(ConfigError, match="the plan is for"):
            shard_embedding_bags(bags, mesh, new_plan("table", ranks, rowwise))
    with pytest.raises(ConfigError, match="row-wise Adagrad needs full rows"):
        new_plan("column", 2, rowwise=True)
    for setting in ({"clip": 1.0}, {"ema_decay": 0.9}):
        with pytest.raises(ConfigError, match=rf"step.{next(iter(setting))} does not apply to EmbeddingBags"):
            Step(Network(Mesh({}), {"shard": "table"}), loss, StepConfig(**setting), Mesh({}))  # type: ignore[arg-type]
